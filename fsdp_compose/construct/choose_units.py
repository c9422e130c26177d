"""Decide which units to build from which modules; nothing is changed, so errors come first."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fsdp_compose.base.arguments import check_function, check_int, check_kind, describe_value
from fsdp_compose.base.group import Transport
from fsdp_compose.base.launched import require_group
from fsdp_compose.base.modules import walk_modules
from fsdp_compose.base.policy import (
    INITS,
    ByName,
    FullPrecision,
    MixedPrecision,
    Offload,
    Prefetch,
    place,
)
from fsdp_compose.base.torch_private import parameter_slots
from fsdp_compose.buckets.bucket import Slot
from fsdp_compose.construct.choose_buckets import plan_buckets
from fsdp_compose.construct.deterministic import check_alike
from fsdp_compose.construct.names import clean_name, name_cleaner, path_cleaner
from fsdp_compose.construct.overlaps import check_overlaps
from fsdp_compose.construct.plans import Ignored, Options, ParameterPlan, UnitPlan
from fsdp_compose.construct.tensor_parallel import tensor_parallel_groups
from fsdp_compose.construct.wrap import (
    Decide,
    Policy,
    describe_closest,
    describe_no_match,
    numel_of,
)
from fsdp_compose.core.state import find_state
from fsdp_compose.sharded import is_sharded


def check_modules(where: str, modules: Any) -> None:
    """Raise unless ``modules`` is a sequence of modules.

    Raises:
        TypeError: it is something else, or empty.
    """
    is_list = isinstance(modules, Sequence) and len(modules) > 0
    if not is_list or not all(isinstance(module, nn.Module) for module in modules):
        raise TypeError(
            f"{where}: got {type(modules).__name__} {modules!r:.80}; wanted an nn.Module or a "
            "non-empty sequence of them."
        )


def plan_shards(
    modules: Any, options: Options, units: Policy | None, ignored: Ignored
) -> list[UnitPlan]:
    """Decide everything; change nothing."""
    check_modules("fully_shard", modules)
    for module in modules:
        state = find_state(module)
        if state is not None:
            raise ValueError(
                f"fully_shard: {type(module).__name__} is already sharded, as unit "
                f"{state.unit.name!r}; call fsdp_compose.undo(module) first to shard "
                "it another way."
            )
        _require_forward(module)
    _check_list(modules)
    _check_options(options, "fully_shard")
    if units is not None:
        such = "such as wrap.by_class({Block}) or wrap.by_fn(lambda fqn, module: ...)"
        check_kind("fully_shard", "units", units, Policy, f"a policy of fsdp_compose.wrap, {such}")
    if units is not None and len(modules) != 1:
        raise ValueError("fully_shard: units goes with one module, not with a sequence of them.")
    plans = [] if units is None else _plan_units(modules[0], options, units, ignored)
    names = "+".join(type(module).__name__ for module in modules)
    plans.append(UnitPlan(names, list(modules), options, ignored=ignored))
    for plan in plans[:-1]:
        _require_forward(plan.modules[0], f"unit {plan.name!r}, a ")
    taken: set[int] = set()
    promised: set[int] = set()
    work: dict[tuple[int, ...], list[int]] = {}
    beside = tensor_parallel_groups(modules)
    planned = _split_full_precision(plans)
    for plan in planned:
        _find_parameters(plan, taken)
        plan_buckets(plan, promised, work, beside)
    _check_patterns(planned)
    check_overlaps("fully_shard", modules, planned)
    check_alike(modules, planned)
    return planned


_OF_PARAMETERS = (nn.ParameterList, nn.ParameterDict)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, *_OF_PARAMETERS)
_OF_A_MODULE = (
    "shard the module whose forward reads its parameters, or put it into a module of your own, "
    "shard that, and read them in its forward or inside `with fsdp_compose.gathered(module):`."
)
_ELEMENTS = "shard its elements, or pass them as a list to make them one unit."


def _require_forward(module: nn.Module, what: str = "") -> None:
    """Raise for a container, of which only the elements are called."""
    if isinstance(module, _CONTAINERS) and type(module).forward is nn.Module.forward:
        raise ValueError(
            f"fully_shard: {what}{type(module).__name__} has no forward, so nothing would gather "
            f"it; {_OF_A_MODULE if isinstance(module, _OF_PARAMETERS) else _ELEMENTS}"
        )


def _check_list(modules: Sequence[nn.Module]) -> None:
    """Raise unless modules that are gathered together differ, and none lies inside another."""
    places: dict[int, str] = {}
    for module in modules:
        name = type(module).__name__
        if id(module) in places:
            raise ValueError(f"fully_shard: {name} is in the list twice; list each module once.")
        places[id(module)] = name
    for module in modules:
        for path, inner in module.named_modules():
            if path and id(inner) in places:
                raise ValueError(
                    f"fully_shard: {places[id(inner)]} is part of {places[id(module)]}, as "
                    f"{path!r}, and both are in the list; leave it out, since what contains it "
                    "is gathered with it."
                )


def _check_options(options: Options, where: str) -> None:
    if options.mesh is None:
        require_group(where)
    for name, value, kind, such in (
        ("prefetch", options.prefetch, Prefetch, "Prefetch(forward=1, backward=1)"),
        ("offload_policy", options.offload_policy, Offload, "Offload(params=True)"),
    ):
        check_kind(where, name, value, kind, f"such as fsdp_compose.{such}")
    if not isinstance(options.mp_policy, MixedPrecision):
        if not callable(options.mp_policy):
            raise TypeError(
                f"{where}: mp_policy is {describe_value(options.mp_policy)}; wanted "
                "fsdp_compose.MixedPrecision(param_dtype=...), a function (fqn, parameter) that "
                "returns one or None, or a dict of them by pattern of names."
            )
        check_function(where, "mp_policy", options.mp_policy, "(fqn, parameter)")
    if options.transport is not None:
        wanted = "a Transport of fsdp_compose.base.group, or None"
        check_kind(where, "transport", options.transport, Transport, wanted)
    check_function(where, "layout", options.layout, "(extents, itemsize, world_size)")
    if callable(options.granularity):
        check_function(where, "granularity", options.granularity, "(fqn, parameter)")
    if options.deterministic is not None:
        wanted = "how many microbatches a step has on all ranks together, 1 or more, or None"
        check_int(where, "deterministic", options.deterministic, 1, wanted)
    if not isinstance(options.static_buffers, bool):
        wanted = "True, False, or in how many buffers units are gathered in turn, 2 or more"
        check_int(where, "static_buffers", options.static_buffers, 2, wanted)
    if options.init not in INITS:
        raise ValueError(f"{where}: init is {options.init!r}; wanted one of {INITS}.")
    if options.param_init_fn is not None:
        check_function(where, "param_init_fn", options.param_init_fn, "(module)")


def _check_patterns(plans: Sequence[UnitPlan]) -> None:
    """Raise for a pattern of names that chose options and matched no parameter.

    Of a dictionary that a policy gives to several units, each has a function of its own.
    """
    alike: dict[tuple[str, str], dict[ByName, str]] = {}  # with the first unit that asks it
    for plan in plans:
        for option in (plan.options.mp_policy, plan.options.granularity):
            if isinstance(option, ByName):
                group = alike.setdefault((option.option, repr(option.table)), {})
                group.setdefault(option, plan.name)
    for (name, _), group in alike.items():
        unused = set.intersection(*(option.unused for option in group))
        if unused:
            pattern, seen = min(unused), [fqn for option in group for fqn in option.seen]
            raise ValueError(
                f"fully_shard: {name}={{{pattern!r}: ...}} matches no parameter of unit "
                f"{next(iter(group.values()))!r} or another; {describe_closest(pattern, seen)}."
            )


def _plan_units(
    root: nn.Module, options: Options, policy: Policy, ignored: Ignored
) -> list[UnitPlan]:
    """Submodules that the policy names, innermost first."""
    start, clean = policy.start(root), path_cleaner(root)
    choice = _PolicyWalk(options, start, policy.leaves, ignored, {id(root)}, clean)
    choice.visit_children("", root)
    if not choice.plans and not choice.names_units:
        raise ValueError(describe_no_match(policy.description, root))
    return choice.plans


@dataclass
class _PolicyWalk:
    """A walk over the submodules that asks a policy about each, once, innermost first."""

    options: Options
    decide: Decide
    leaves: tuple[type[nn.Module], ...]
    ignored: Ignored
    seen: set[int]
    clean: Callable[[str], str]
    plans: list[UnitPlan] = field(default_factory=list)
    names_units: bool = False  # submodules that are units already

    def visit_children(self, name: str, module: nn.Module) -> dict[int, int]:
        """Choose inside ``module``; returns the elements of each parameter that no unit took."""
        if isinstance(module, self.leaves):
            return self.count(module, recurse=True)
        found = self.count(module, recurse=False)
        for child_name, child in module.named_children():
            if id(child) not in self.seen and id(child) not in self.ignored.modules:
                self.seen.add(id(child))
                found |= self.visit(f"{name}.{child_name}" if name else child_name, child)
        return found

    def visit(self, name: str, module: nn.Module) -> dict[int, int]:
        found = self.visit_children(name, module)
        path = self.clean(name)
        decision = self.decide(path, module, sum(found.values()))
        if find_state(module) is not None:
            self.names_units |= bool(decision)
            return {}
        if not decision:
            return found
        overrides = decision if isinstance(decision, dict) else {}
        options = _override_options(self.options, overrides, name)
        ignored = self.ignored.and_more(overrides.get("ignored", ()))
        self.plans.append(UnitPlan(path, [module], options, True, ignored=ignored))
        return {}

    def count(self, module: nn.Module, recurse: bool) -> dict[int, int]:
        params = (p for p in module.parameters(recurse) if id(p) not in self.ignored.params)
        return {id(p): 0 if is_sharded(p) else numel_of(p) for p in params}


def _split_full_precision(plans: list[UnitPlan]) -> list[UnitPlan]:
    """Modules of a unit's ``full_precision_classes`` as units of their own, before it."""
    heads = {id(module) for plan in plans for module in plan.modules}
    result: list[UnitPlan] = []
    for plan in plans:
        mp = plan.options.mp_policy
        if not isinstance(mp, MixedPrecision) or not mp.in_full_precision:
            result.append(plan)
            continue
        whole = [m for m in plan.modules if isinstance(m, mp.in_full_precision)]
        if whole:
            if len(whole) < len(plan.modules):
                raise ValueError(
                    f"fully_shard: unit {plan.name!r} gathers modules together of which some are "
                    "to run in full precision and some are not; shard them separately."
                )
            result.append(replace(plan, options=_full_precision(plan, plan.modules[0], mp)))
            continue
        for module in plan.modules:
            for path, member in _find_instances(module, mp.in_full_precision, plan.ignored, heads):
                heads.add(id(member))
                name = clean_name(f"{plan.name}.{path}" if plan.is_named else path)
                options = _full_precision(plan, member, mp)
                result.append(UnitPlan(name, [member], options, True, ignored=plan.ignored))
        result.append(plan)
    return result


def _find_instances(
    module: nn.Module, classes: tuple[type[nn.Module], ...], ignored: Ignored, heads: set[int]
) -> list[tuple[str, nn.Module]]:
    """Instances of ``classes`` among a unit's modules, without those inside another instance."""
    inner: set[int] = set()
    found: list[tuple[str, nn.Module]] = []
    for path, member in walk_modules(module, lambda m: _is_elsewhere(m, ignored, heads | inner)):
        if isinstance(member, classes):
            inner.update(id(m) for m in member.modules())
            found.append((path, member))
    return found


def _full_precision(plan: UnitPlan, module: nn.Module, mp: MixedPrecision) -> Options:
    """Options of a unit in its parameters' own dtype, inside a unit whose precision is ``mp``."""
    params = (p for m in (module, *plan.modules) for p in m.parameters())
    dtype = next((p.dtype for p in params if p.is_floating_point()), torch.float32)
    full = FullPrecision(
        param_dtype=dtype,
        output_dtype=(mp.output_dtype if module in plan.modules else None) or mp.param_dtype,
        keep_low_precision_grads=mp.keep_low_precision_grads,
        full_precision_in_eval=mp.full_precision_in_eval,
    )
    return replace(plan.options, mp_policy=full)


_OVERRIDABLE = (
    "mesh", "strategy", "reshard_after_forward", "mp_policy", "offload_policy", "ignored",
    "granularity", "prefetch", "init", "param_init_fn", "methods", "layout", "transport",
    "static_buffers",
)  # fmt: skip
"""Options that a policy may choose for one unit."""


def _override_options(options: Options, overrides: dict[str, Any], name: str) -> Options:
    """``options`` with what a policy says of one unit."""
    if not overrides:
        return options
    unknown = set(overrides) - set(_OVERRIDABLE)
    if unknown:
        raise ValueError(
            f"fully_shard: unit {name!r} overrides {sorted(unknown)}; wanted some of "
            f"{_OVERRIDABLE}."
        )
    apart = ("strategy", "reshard_after_forward", "ignored")
    changed = {option: value for option, value in overrides.items() if option not in apart}
    _check_options(replace(options, **changed), f"fully_shard: override of unit {name!r}")
    reshard = overrides.get("reshard_after_forward")
    if "strategy" in overrides:
        changed["placement"] = place(overrides["strategy"], reshard)
    elif reshard is not None:
        if options.placement.replicate_only and reshard:
            raise ValueError(
                f"fully_shard: unit {name!r} overrides reshard_after_forward with {reshard!r}, but "
                "strategy NO_SHARD has nothing to reshard; override its strategy too."
            )
        if options.placement.fused and not isinstance(reshard, bool):
            raise ValueError(
                f"fully_shard: unit {name!r} overrides reshard_after_forward with {reshard!r}, but "
                "strategy HYBRID_SHARD_OPTIMIZER keeps weights over the shard axis; override its "
                "strategy too."
            )
        outer = options.placement
        changed["placement"] = replace(
            place(None, reshard),
            axes=outer.axes,
            replicate_only=outer.replicate_only,
            fused=outer.fused,
        )
    return replace(options, **changed)


def _find_parameters(plan: UnitPlan, taken: set[int]) -> None:
    """Find the parameters of the unit: those of its modules that no other unit has."""
    found: dict[int, ParameterPlan] = {}
    for position, module in enumerate(plan.modules):
        prefix = f"{position}." if len(plan.modules) > 1 else ""
        clean = name_cleaner(module)
        members = list(walk_modules(module, lambda m: _is_elsewhere(m, plan.ignored, taken)))
        plan.members.append(members)
        for name, submodule in members:
            if isinstance(submodule, torch.jit.ScriptModule):
                _check_script(plan, name, submodule)
                continue
            _check_plain(plan, name, submodule)
            for key, param in parameter_slots(submodule).items():
                if param is None or id(param) in plan.ignored.params:
                    continue
                check_dense(plan, name, submodule)
                item = found.setdefault(id(param), ParameterPlan(param))
                item.names.append(prefix + clean(f"{name}.{key}" if name else key))
                item.slots.append(Slot.of(submodule, key))
    taken.update(id(module) for module in plan.modules)
    plan.found = list(found.values())


def _check_plain(plan: UnitPlan, name: str, module: nn.Module) -> None:
    """Raise for a module that torch's own FSDP has sharded: its parameters are slices by now."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)):
        is_wrapper = isinstance(module, fsdp.FullyShardedDataParallel)
        whose = "FullyShardedDataParallel" if is_wrapper else "fully_shard"
        what = f"contains {name!r}, which" if name else "is what"
        raise ValueError(
            f"fully_shard: unit {plan.name!r} {what} torch.distributed.fsdp's {whose} has sharded. "
            "Shard the plain module here instead, without that call, or pass it in ignored= to "
            "leave it to torch."
        )


def check_dense(plan: UnitPlan, name: str, module: nn.Module) -> None:
    """Raise for sparse gradients, which have no place in the flat buffer that is reduced."""
    kinds = nn.Embedding, nn.EmbeddingBag
    if isinstance(module, kinds) and module.sparse and module.weight.requires_grad:
        what = f"has the embedding {name!r}" if name else "is an embedding"
        raise ValueError(
            f"fully_shard: unit {plan.name!r} {what} with sparse=True, whose "
            "sparse gradients cannot be reduced and cut over ranks. Set sparse=False, or pass it "
            "in ignored= and average its gradient yourself."
        )


def _check_script(plan: UnitPlan, name: str, module: nn.Module) -> None:
    """Raise for a scripted module, which reads parameters where gathered ones cannot be put."""
    if any(True for _ in module.parameters()) or any(module is m for m in plan.modules):
        where = f" as {name!r}" if name else ""
        raise ValueError(
            f"fully_shard: unit {plan.name!r} has a ScriptModule{where}, whose compiled code reads "
            "its parameters where gathered ones cannot be put. Shard the Python module instead "
            "(and compile it, if you like, with module.compile()), or pass it in ignored=."
        )


def _is_elsewhere(module: nn.Module, ignored: Ignored, taken: set[int]) -> bool:
    return find_state(module) is not None or id(module) in taken or id(module) in ignored.modules
