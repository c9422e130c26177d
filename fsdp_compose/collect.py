"""Decide which units to build from what; change nothing, so that every complaint comes first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fsdp_compose.bucket import Slot
from fsdp_compose.layout import Extent, Granularity, Layout, plan_layout
from fsdp_compose.mesh import Mesh, MeshLike, check_subgroup, compute_device, resolve_mesh
from fsdp_compose.policy import (
    GranularityLike,
    Init,
    MixedPrecision,
    MixedPrecisionLike,
    Offload,
    Placement,
    Prefetch,
    place,
)
from fsdp_compose.sharded import is_sharded
from fsdp_compose.state import find_state
from fsdp_compose.torch_private import parameter_slots
from fsdp_compose.wrap import Policy, SizePolicy


@dataclass(frozen=True)
class Options:
    """The arguments of ``fully_shard``, checked."""

    mesh: MeshLike | None
    placement: Placement
    offload: Offload
    mp: MixedPrecisionLike
    granularity: GranularityLike
    prefetch: Prefetch
    init: Init
    device: torch.device = torch.device("cpu")  # where meta parameters are materialised


@dataclass
class Found:
    """A parameter to shard, and every place it is read from."""

    param: nn.Parameter
    names: list[str] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)


@dataclass(frozen=True)
class BucketPlan:
    """A bucket that is to be built."""

    mesh: Mesh
    layout: Layout
    found: list[Found]
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    mp: MixedPrecision  # the policy they come from


@dataclass
class UnitPlan:
    """A unit that is to be built."""

    name: str
    modules: list[nn.Module]
    options: Options
    is_named: bool = False  # ``name`` is the FQN of its one module, not a class name
    members: list[list[tuple[str, nn.Module]]] = field(default_factory=list)  # by module
    found: list[Found] = field(default_factory=list)
    buckets: list[BucketPlan] = field(default_factory=list)

    def managed(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """The submodules of ``module`` that belong to the unit, with their names in it."""
        return self.members[self.modules.index(module)]


@dataclass(frozen=True)
class Ignored:
    params: frozenset[int]
    modules: frozenset[int]

    @classmethod
    def of(cls, ignored: Iterable[nn.Parameter | nn.Module]) -> Ignored:
        params: set[int] = set()
        modules: set[int] = set()
        for item in ignored:
            if isinstance(item, nn.Module):
                modules.update(id(m) for m in item.modules())
                params.update(id(p) for p in item.parameters())
            elif isinstance(item, nn.Parameter):
                params.add(id(item))
            else:
                raise TypeError(
                    f"fully_shard: ignored holds a {type(item).__name__}; wanted parameters and "
                    "modules."
                )
        return cls(frozenset(params), frozenset(modules))


def plan_shards(
    modules: Any, options: Options, units: Policy | None, ignored: Ignored
) -> list[UnitPlan]:
    """Decide everything; change nothing."""
    if (
        not isinstance(modules, Sequence)
        or not modules
        or not all(isinstance(m, nn.Module) for m in modules)
    ):
        raise TypeError(
            f"fully_shard: got {type(modules).__name__} {modules!r:.80}; wanted an nn.Module or a "
            "non-empty sequence of them."
        )
    for module in modules:
        if find_state(module) is not None:
            raise ValueError(
                f"fully_shard: {type(module).__name__} is already sharded, as unit "
                f"{find_state(module).unit.name!r}; call fsdp_compose.undo(module) first to shard "  # type: ignore[union-attr]
                "it another way."
            )
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict):
            raise ValueError(
                f"fully_shard: {type(module).__name__} has no forward, so nothing would gather it; "
                "shard its elements, or pass them as a list to make them one unit."
            )
    if units is not None and len(modules) != 1:
        raise ValueError("fully_shard: units goes with one module, not with a sequence of them.")
    plans = [] if units is None else _plan_units(modules[0], options, units, ignored)
    names = "+".join(type(module).__name__ for module in modules)
    plans.append(UnitPlan(names, list(modules), options))
    taken: set[int] = set()
    promised: set[int] = set()
    for plan in plans:
        _collect(plan, ignored, taken)
        _lay_out(plan, promised)
    return plans


def _plan_units(
    root: nn.Module, options: Options, policy: Policy, ignored: Ignored
) -> list[UnitPlan]:
    """Submodules that the policy names, innermost first."""
    plans: list[UnitPlan] = []
    chosen: set[int] = set()
    whole = policy.leaves if isinstance(policy, SizePolicy) else ()

    def visit(name: str, module: nn.Module, seen: set[int]) -> int:
        numel = sum(
            p.numel() for p in module.parameters(recurse=False) if id(p) not in ignored.params
        )
        if not isinstance(module, whole):
            for child_name, child in module.named_children():
                if id(child) not in seen and id(child) not in ignored.modules:
                    seen.add(id(child))
                    numel += visit(f"{name}.{child_name}" if name else child_name, child, seen)
        else:
            numel = sum(p.numel() for p in module.parameters())
        if module is root or find_state(module) is not None or id(module) in chosen:
            return 0 if module is not root else numel
        decision = policy.decide(name, module, numel)
        if not decision:
            return numel
        chosen.add(id(module))
        overrides = decision if isinstance(decision, dict) else {}
        plans.append(UnitPlan(name, [module], _override(options, overrides, name), is_named=True))
        return 0

    visit("", root, {id(root)})
    if not plans:
        kinds = sorted({type(m).__name__ for m in root.modules()} - {type(root).__name__})
        raise ValueError(
            f"fully_shard: units={policy.description} matches no submodule of "
            f"{type(root).__name__}; it has submodules of classes {kinds}."
        )
    return plans


_OVERRIDABLE = (
    "mesh",
    "strategy",
    "reshard_after_forward",
    "mp_policy",
    "granularity",
    "offload_policy",
    "prefetch",
)


def _override(options: Options, overrides: dict[str, Any], name: str) -> Options:
    unknown = set(overrides) - set(_OVERRIDABLE)
    if unknown:
        raise ValueError(
            f"fully_shard: unit {name!r} overrides {sorted(unknown)}; wanted some of "
            f"{_OVERRIDABLE}."
        )
    changed: dict[str, Any] = {k: v for k, v in overrides.items() if k in ("mesh", "prefetch")}
    if "mp_policy" in overrides:
        changed["mp"] = overrides["mp_policy"]
    if "offload_policy" in overrides:
        changed["offload"] = overrides["offload_policy"]
    if "granularity" in overrides:
        changed["granularity"] = overrides["granularity"]
    if "strategy" in overrides or "reshard_after_forward" in overrides:
        strategy = overrides.get("strategy")
        changed["placement"] = place(strategy, overrides.get("reshard_after_forward"))
    return replace(options, **changed)


def walk(module: nn.Module, skip: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    """Submodules in registration order, each once, without the subtrees that ``skip`` names."""
    seen = {id(module)}

    def visit(name: str, current: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        yield name, current
        for child_name, child in current.named_children():
            if id(child) not in seen and not skip(child):
                seen.add(id(child))
                yield from visit(f"{name}.{child_name}" if name else child_name, child)

    return visit("", module)


def _collect(plan: UnitPlan, ignored: Ignored, taken: set[int]) -> None:
    """Find the parameters of the unit: those of its modules that no other unit has."""
    found: dict[int, Found] = {}
    for position, module in enumerate(plan.modules):
        prefix = f"{position}." if len(plan.modules) > 1 else ""
        members = list(walk(module, lambda m: _is_elsewhere(m, ignored, taken)))
        plan.members.append(members)
        for name, submodule in members:
            for key, param in parameter_slots(submodule).items():
                if param is None or id(param) in ignored.params:
                    continue
                item = found.setdefault(id(param), Found(param))
                item.names.append(f"{prefix}{name}.{key}" if name else f"{prefix}{key}")
                item.slots.append(Slot.of(submodule, key))
    taken.update(id(module) for module in plan.modules)
    plan.found = list(found.values())


def _is_elsewhere(module: nn.Module, ignored: Ignored, taken: set[int]) -> bool:
    return find_state(module) is not None or id(module) in taken or id(module) in ignored.modules


def _lay_out(plan: UnitPlan, promised: set[int]) -> None:
    """Sort the unit's own parameters into buckets and plan each with integers."""
    groups: dict[tuple[Any, ...], list[Found]] = {}
    devices: dict[torch.device, str] = {}
    options = plan.options
    for item in plan.found:
        param = item.param
        if is_sharded(param) or id(param) in promised:
            continue
        promised.add(id(param))
        name = item.names[0]
        _check_parameter(plan, name, param)
        devices.setdefault(options.device if param.is_meta else param.device, name)
        if len(devices) > 1:
            (device, first), (other, second) = devices.items()
            raise ValueError(
                f"fully_shard: parameter {second!r} of unit {plan.name!r} is on {other}, but "
                f"{first!r} is on {device}; move the module to one device first: module.to(device)."
            )
        mp = _precision(options.mp, name, param)
        chosen = MixedPrecision(mp.param_dtype, mp.reduce_dtype)
        groups.setdefault((param.dtype, param.requires_grad, chosen), []).append(item)
    if not groups:
        return
    device = next(iter(devices))
    if options.offload.shards:
        device = compute_device(options.mesh, device)
    mesh = resolve_mesh(options.mesh, device, options.placement)
    if options.placement.spread is not None:
        check_subgroup(mesh.shard, options.placement.spread)
    for (storage, _, chosen), items in groups.items():
        compute, reduce = chosen.dtypes_for(storage)
        itemsize = min(storage.itemsize, compute.itemsize, reduce.itemsize)
        extents = [
            Extent(i.names[0], tuple(i.param.shape), _granularity(options, i)) for i in items
        ]
        layout = plan_layout(extents, itemsize, mesh.shard.size)
        plan.buckets.append(BucketPlan(mesh, layout, items, compute, reduce, chosen))


def _check_parameter(plan: UnitPlan, name: str, param: nn.Parameter) -> None:
    if param.layout is not torch.strided:
        raise ValueError(
            f"fully_shard: parameter {name!r} of unit {plan.name!r} has layout {param.layout}; "
            "wanted a dense parameter. Pass it in ignored=."
        )


def _precision(mp: MixedPrecisionLike, name: str, param: nn.Parameter) -> MixedPrecision:
    if isinstance(mp, MixedPrecision):
        return mp
    return mp(name, param) or MixedPrecision()


def _granularity(options: Options, item: Found) -> Granularity:
    if callable(options.granularity):
        return options.granularity(item.names[0], item.param) or 1
    return options.granularity
