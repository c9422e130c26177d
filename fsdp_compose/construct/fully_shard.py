"""``fully_shard``: validate, collect, lay out, attach, hook; and ``undo``, which takes it all back.

Everything that can fail is done before anything is changed, and the ranks agree on it: an error on
one is raised on all, and no module is left half sharded.
"""

from __future__ import annotations

import pkgutil
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compose.base.mesh import SELF, Mesh, MeshLike, compute_device, fuse, subgroup_of
from fsdp_compose.base.policy import (
    INITS,
    GranularityLike,
    Init,
    MixedPrecision,
    MixedPrecisionLike,
    Offload,
    Prefetch,
    ShardingStrategy,
    place,
)
from fsdp_compose.base.torch_private import (
    buffer_slots,
    give_leaf_hooks,
    hide_from_traces,
    raw,
    take_leaf_hooks,
)
from fsdp_compose.base.unwritten import is_unwritten
from fsdp_compose.construct.agree import Value, agree, agree_on_values, values_of
from fsdp_compose.construct.collect import plan_shards, unit_precision
from fsdp_compose.construct.init import InitFn, broadcast, is_on_meta, materialise
from fsdp_compose.construct.names import name_cleaner
from fsdp_compose.construct.plans import BucketPlan, Ignored, Options, UnitPlan
from fsdp_compose.construct.wrap import Policy
from fsdp_compose.core import hooks
from fsdp_compose.core.bucket import (
    Bucket,
    Entry,
    find_entry,
    flatten,
    forget_entry,
    make_bucket,
    storage_order,
)
from fsdp_compose.core.gathering import check_slots, drop, install_leaves
from fsdp_compose.core.guards.audit import remember
from fsdp_compose.core.guards.methods import attach_methods, check_methods
from fsdp_compose.core.guards.replicas import checksum
from fsdp_compose.core.guards.whole import hide_all
from fsdp_compose.core.passes import begin_forward_pass
from fsdp_compose.core.receiving import gather_flat
from fsdp_compose.core.records import Switches
from fsdp_compose.core.reducing import drain
from fsdp_compose.core.state import (
    STATE_KEY,
    Unit,
    _FSDPState,
    find_state,
    iter_units,
    lane_of,
    owner_of,
)
from fsdp_compose.sharded import (
    Residence,
    ShardedDTensor,
    ShardedParameter,
    ShardedTensor,
    ShardSpec,
    close_dtensor,
    gather_part,
    give_back_hooks,
    open_dtensor,
    part_of,
    tag,
    take_over_hooks,
    untag,
)

_FULL_PRECISION = MixedPrecision()
_NO_OFFLOAD = Offload()
_NEXT_UNIT = Prefetch()


def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: MeshLike | None = None,
    units: Policy | None = None,
    strategy: ShardingStrategy | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionLike = _FULL_PRECISION,
    offload_policy: Offload = _NO_OFFLOAD,
    ignored: Iterable[nn.Parameter | nn.Module] = (),
    granularity: GranularityLike = 1,
    prefetch: Prefetch = _NEXT_UNIT,
    init: Init = "verify",
    param_init_fn: InitFn | None = None,
    methods: Sequence[str] = ("forward",),
) -> Any:
    """Shard a module's parameters, gradients and optimizer state over the data-parallel ranks.

    The module, its parameters and their names stay the same objects; between passes each parameter
    holds this rank's slice, and what needs the whole of it raises ``ShardedWeightError`` (whose
    help lists the few functions of torch, such as ``torch.tensor(p)``, that read the slice without
    asking); ``p.full_tensor()`` is the whole. Call it on submodules first, then on what contains
    them, or once with ``units``. All ranks of the mesh must call it.

    Parameters that tensor parallelism split before, over another dimension of the same mesh, are
    sharded further, and DTensors stay DTensors: ``parallelize_module(model, mesh["tp"], plan)``,
    then ``fully_shard(model, mesh=mesh["dp"])``. See ``declare_tensor_parallel`` for layers that
    were split by hand.

    Args:
        module: a module, or several that are gathered together as one unit.
        mesh: None for all ranks, a DeviceMesh with dimensions (shard) or (replicate, shard), a
            ProcessGroup, or a (shard, replicate) pair of ProcessGroups; or ``"self"``, for a whole
            model on this rank alone. Without ``torch.distributed`` initialised, None is a world of
            one, and an error where ``WORLD_SIZE`` says that several ranks were launched.
        units: a policy of ``fsdp_compose.wrap`` that names the submodules that become units of
            their own; what they leave belongs to ``module``'s unit.
        strategy: where weights live between forward and backward; see ``ShardingStrategy``.
        reshard_after_forward: release full parameters between forward and backward. None: all but
            the outermost unit's, which backward needs first. A number: spread them over that many
            neighbouring ranks, so that backward gathers from close by (a divisor of the group).
        mp_policy: dtypes, or a function ``(fqn, parameter)`` that gives them per parameter.
        offload_policy: what lives in host memory; see ``Offload``.
        ignored: parameters and modules to leave alone.
        granularity: how parameters may be cut: 1 (anywhere), a block size in elements, ``"row"``,
            ``"tensor"`` (never), or a function ``(fqn, parameter)`` that says so per parameter.
        prefetch: how many units are gathered ahead of use.
        init: ``"verify"`` raises when ranks start with different parameters or buffers,
            ``"broadcast"`` takes them from rank 0, ``"as_is"`` takes each rank's slice as it is.
        param_init_fn: for parameters and buffers on the meta device: called with each submodule
            that has some, which have memory by then, on the mesh's device; see ``seeded_init``.
            Where None, ``reset_parameters()`` of the submodule is called if it has one. One unit
            is materialised, initialised and sharded before the next. What nothing has written is
            left for loading: forward raises until it is loaded. A function that was written for
            FSDP1, which looks for parameters on the meta device and moves them off it, works too.
            The model may be on the meta device on some ranks only, with ``init="broadcast"``.
        methods: names of methods that gather as ``forward`` does, which always gathers, for example
            ``("forward", "encode", "generate")``. They apply to every unit of this call whose
            module has them. The modules' hooks are not run for them.

    Returns:
        ``module``.

    Raises:
        TypeError: ``module`` is not a module, or an argument is of the wrong type.
        ValueError: the module is sharded already, a DTensor lies on the ranks to shard over,
            options contradict each other, ``units`` matches
            nothing, parameters lie on several devices or differ between ranks. The same error is
            raised on every rank, and nothing has been changed; except where the initialisation of
            meta parameters failed or differs between ranks, after which the model must be built
            again.
        RuntimeError: several ranks were launched (``WORLD_SIZE`` in the environment), ``mesh`` is
            None, and there is no process group.
    """
    if not hooks.attachments:
        raise ImportError("from fsdp_compose import fully_shard: its __init__ completes the hooks.")
    hide_from_traces(untraced_modules(), ShardedParameter, ShardedTensor, ShardedDTensor)
    modules = [module] if isinstance(module, nn.Module) else module
    problem: Exception | None = None
    plans: list[UnitPlan] = []
    try:
        options = Options(
            mesh=mesh,
            placement=place(strategy, reshard_after_forward),
            offload=offload_policy,
            mp=mp_policy,
            granularity=granularity,
            prefetch=prefetch,
            init=init,
            device=torch.device("cpu"),
            param_init_fn=param_init_fn,
            methods=methods,
        )
        if is_on_meta(modules):
            options = replace(options, device=compute_device(mesh, options.device))
        if init not in INITS:
            raise ValueError(f"fully_shard: init is {init!r}; wanted one of {INITS}.")
        plans = plan_shards(modules, options, units, Ignored.of(ignored))
        alike = [m for p in plans if p.options.methods is methods for m in p.modules]
        every = check_methods(methods, alike)
        for plan in plans:
            own = plan.options.methods
            found = every if own is methods else check_methods(own, plan.modules)
            plan.options = replace(plan.options, methods=found)
    except Exception as error:  # whatever it is, the other ranks wait for it
        problem = error
    made = Made(agree(plans, mesh, problem, _listed(modules)))
    for plan in plans:
        _build(plan, made)
    for outer in modules:
        _rename_nested(outer)
    if made.keys:
        _finish(made, mesh, _listed(modules))
    return module


def untraced_modules() -> list[str]:
    """The files of this package, all of which but one are never part of a compiled graph."""
    found = pkgutil.iter_modules([str(Path(__file__).parent)])
    return [f"{__package__}.{module.name}" for module in found if module.name != "traced"]


def _listed(modules: Any) -> Sequence[object]:
    return modules if isinstance(modules, Sequence) else ()


@dataclass
class Made:
    """What becomes of the values that are on the meta device on some rank."""

    keys: set[str]
    problem: Exception | None = None
    sums: dict[str, tuple[int, Value]] = field(default_factory=dict)
    unwritten: set[str] = field(default_factory=set)
    values: dict[str, tuple[Unit, Value]] = field(default_factory=dict)


def _finish(made: Made, mesh: MeshLike | None, modules: Sequence[object]) -> None:
    """Agree on what was made, and have what no initialisation wrote wait for loading."""
    for key in sorted(agree_on_values(mesh, made.sums, made.unwritten, made.problem, modules)):
        unit, value = made.values[key]
        if isinstance(value.tensor, nn.Parameter):
            entry = find_entry(value.tensor)
            owner_of(entry).unready.append(entry)
        else:
            unit.unready_buffers.append((value.name, value.slot))


def _make_values(plan: UnitPlan, made: Made) -> list[Value]:
    """Materialise the unit and take rank 0's values where asked; what was on the meta device."""
    try:
        materialise(plan, plan.options.param_init_fn)
    except Exception as error:  # raised on every rank, once all units are built
        made.problem = made.problem or error
    values = list(values_of(plan))
    if plan.options.init == "broadcast":
        for mesh in dict.fromkeys(value.mesh for value in values if value.mesh is not None):
            broadcast([value.tensor for value in values if value.mesh == mesh], mesh)
        for group in {g.ranks: g for value in values for g in value.repeated}.values():
            alike = [value.tensor for value in values if group in value.repeated]
            broadcast(alike, Mesh(group, SELF, plan.buckets[0].mesh.device))
    made_here = [value for value in values if value.key in made.keys]
    for value in made_here:
        if is_unwritten(part_of(value.tensor)):
            made.unwritten.add(value.key)
        if plan.options.init == "verify":
            made.sums[value.key] = (checksum(value.tensor), value)
    return made_here


def _build(plan: UnitPlan, made: Made) -> None:
    """Make the unit that was planned; nothing here depends on the user's input any more."""
    made_here = _make_values(plan, made)
    buckets: list[Bucket] = []
    entries: dict[int, Entry] = {}
    for bucket_plan in plan.buckets:
        bucket = _build_bucket(plan, bucket_plan)
        buckets.append(bucket)
        entries.update((id(entry.param), entry) for entry in bucket.entries)
    borrowed = [find_entry(item.param) for item in plan.found if id(item.param) not in entries]
    order = [*(e for b in buckets for e in b.entries), *borrowed]
    index = {id(entry.param): i for i, entry in enumerate(order)}
    device = _device(plan, buckets, borrowed)
    unit = Unit(
        name=plan.name,
        modules=tuple(weakref.ref(module) for module in plan.modules),
        buckets=buckets,
        borrowed=borrowed,
        lane=lane_of(device),
        mp=unit_precision(plan),
        prefetch=plan.options.prefetch,
        switches=Switches(
            keep_after_forward=plan.options.placement.keep_after_forward,
            keep_over_microbatches=plan.options.placement.keep_over_microbatches,
        ),
        slots=[(slot, index[id(item.param)]) for item in plan.found for slot in item.slots],
        options=replace(plan.options, param_init_fn=None),  # which may refer to the model
        groupless=plan.options.mesh is None and not dist.is_initialized(),
        left_alone=plan.left_alone(),
    )
    for module in plan.modules:
        module.__dict__[STATE_KEY] = _FSDPState(unit, {})
        hooks.attach(module)
        attach_methods(module, plan.options.methods)
    remember(unit)
    made.values.update((value.key, (unit, value)) for value in made_here)
    _cast_buffers(plan, unit.mp)


def _build_bucket(plan: UnitPlan, bucket_plan: BucketPlan) -> Bucket:
    layout, mesh = bucket_plan.layout, bucket_plan.mesh
    if plan.options.placement.fused:
        mesh = fuse(mesh, plan.options.mesh)
    params = [item.param for item in bucket_plan.found]
    parts = [item.part for item in bucket_plan.found]
    strides = [storage_order(part) for part in parts]
    flats = [flatten(p.detach(), s) for p, s in zip(parts, strides, strict=True)]
    offload = plan.options.offload
    shard = torch.zeros(
        layout.shard_numel,
        dtype=params[0].dtype,
        device="cpu" if offload.shards else parts[0].device,
        pin_memory=offload.shards and offload.pin_memory and mesh.device.type != "cpu",
    )
    residence = Residence()
    entries: list[Entry] = []
    for index, (item, flat) in enumerate(zip(bucket_plan.found, flats, strict=True)):
        own = layout.slice_of(index, mesh.shard.rank)
        shard[own.shard_offset : own.shard_offset + own.numel].copy_(flat[own.start : own.stop])
        spec = ShardSpec(
            fqn=plan.full_name(item.names[0]),
            unit=plan.name,
            shape=parts[index].shape,
            stride=strides[index],
            offset=layout.offsets[index],
            shard_numel=layout.shard_numel,
            group=mesh.shard,
            residence=residence,
            parallel=item.parallel,
        )
        entries.append(
            Entry(
                item.param,
                spec,
                tuple(item.names),
                item.slots,
                kind=nn.Parameter if spec.is_dtensor else type(item.param),
            )
        )
    leaf_hooks = [take_leaf_hooks(param) for param in params]
    grads = [param.grad for param in params]
    del flats, flat, parts
    for param in params:  # free the whole before the bucket's buffers are made
        param.grad = None
        if isinstance(param, DTensor):
            open_dtensor(param)
        else:
            param.data = shard.new_empty(0)
    spread = plan.options.placement.spread
    bucket = make_bucket(
        entries,
        layout,
        mesh,
        shard,
        bucket_plan.mp,
        plan.options.offload,
        None if spread is None else subgroup_of(mesh.shard, spread),
    )
    for param, grad, taken in zip(params, grads, leaf_hooks, strict=True):
        param.grad = grad  # takes this rank's slice
        take_over_hooks(param, find_entry(param).spec, *taken)
    return bucket


def _device(plan: UnitPlan, buckets: list[Bucket], borrowed: list[Entry]) -> torch.device:
    for bucket in buckets:
        return bucket.mesh.device
    for entry in borrowed:
        return entry.param.device
    for module in plan.modules:
        for buffer in module.buffers():
            return buffer.device
    return plan.options.device


def _cast_buffers(plan: UnitPlan, mp: MixedPrecision) -> None:
    """Cast the unit's floating-point buffers; one under two names stays one."""
    cast: dict[int, torch.Tensor] = {}
    for module in plan.modules:
        state = module.__dict__[STATE_KEY]
        for name, submodule in plan.managed(module):
            for key, buffer in buffer_slots(submodule).items():
                if buffer is None or id(buffer) in plan.ignored.buffers:
                    continue
                if mp.buffer_dtype is not None and buffer.is_floating_point():
                    state.buffer_dtypes[f"{name}.{key}" if name else key] = buffer.dtype
                    if id(buffer) not in cast:
                        cast[id(buffer)] = buffer.to(mp.buffer_dtype)
                    buffer_slots(submodule)[key] = cast[id(buffer)]


def _rename_nested(outer: nn.Module) -> None:
    """Units inside ``outer`` and their parameters are named as ``outer`` sees them."""
    renamed: set[int] = set()
    clean = name_cleaner(outer)
    for path, submodule in outer.named_modules():
        state = find_state(submodule)
        if state is None or submodule is outer or id(state.unit) in renamed:
            continue
        unit, path = state.unit, clean(f"{path}.")[:-1]
        renamed.add(id(unit))
        unit.name = path
        for bucket in unit.buckets:
            for entry in bucket.entries:
                name = entry.names[0]
                if len(unit.modules) > 1:
                    position, name = name.split(".", 1)
                    member = unit.modules[int(position)]()
                    path_of = {id(m): clean(f"{p}.")[:-1] for p, m in outer.named_modules()}
                    fqn = f"{path_of.get(id(member), path)}.{name}"
                else:
                    fqn = f"{path}.{name}"
                entry.spec = replace(entry.spec, fqn=fqn, unit=path)
                tag(entry.param, entry.spec)


def undo(module: nn.Module) -> nn.Module:
    """Give back plain, full parameters, bit-identical, with every hook gone.

    Every unit in ``module`` is undone; all ranks must call it. Gradients are gathered too.

    Raises:
        ValueError: nothing in ``module`` is sharded, or a tied parameter of it belongs to a unit
            outside ``module``, or is used by one.
    """
    units = list(iter_units(module))
    if not units:
        raise ValueError(
            f"undo: {type(module).__name__} is not sharded, and neither is a module in it."
        )
    inside = {id(bucket) for unit in units for bucket in unit.buckets}
    for unit in {u for lane_unit in units for u in lane_unit.lane.units}:
        outer = id(unit) not in {id(u) for u in units}
        for entry in unit.borrowed:
            owned = entry.owner is not None and id(entry.owner()) in inside
            if outer == owned:
                raise ValueError(
                    f"undo: parameter {entry.spec.fqn!r} is tied between units inside and outside "
                    f"{type(module).__name__}; undo a module that contains both."
                )
    for lane in {id(unit.lane): unit.lane for unit in units}.values():
        begin_forward_pass(lane)  # clears what a failed step left
        drain(lane)
    for unit in units:
        check_slots(unit)
    for unit in units:
        for reason in tuple(unit.holds):
            drop(unit, reason)
        unit.opened = None
        for entry in unit.entries:
            hide_all(entry)
        install_leaves(unit)
    for unit in units:
        for bucket in unit.buckets:
            _restore(bucket)
        for ref in unit.modules:
            member = ref()
            if member is not None:
                state = member.__dict__.pop(STATE_KEY)
                hooks.detach(member)
                _restore_buffers(member, state, unit.mp)
        unit.lane.units.discard(unit)
        for other in unit.lane.units:
            other.watch = None  # what contains this module has its parameters to look at
    return module


def _restore(bucket: Bucket, only: Sequence[Entry] | None = None) -> None:
    full = gather_flat(bucket, bucket.shard, bucket.shard.dtype)
    for entry in bucket.entries if only is None else only:
        param, spec = entry.param, entry.spec
        grad = None if param.grad is None else gather_part(param.grad)
        part = torch.empty_strided(spec.shape, spec.stride, dtype=full.dtype, device=full.device)
        part.as_strided((spec.numel,), (1,)).copy_(full[spec.offset : spec.offset + spec.numel])
        with raw():
            param.grad = None
            untag(param)
            if spec.parallel is not None and spec.is_dtensor:
                close_dtensor(param, part, spec)
                grad = None if grad is None else spec.parallel.wrap(grad)
            else:
                param.__class__ = entry.kind  # type: ignore[assignment]
                param.data = part
        param.grad = grad
        forget_entry(param)
        take_leaf_hooks(param)
        tables = give_back_hooks(spec)
        give_leaf_hooks(param, tables.gradient, tables.accumulated)


def _restore_buffers(module: nn.Module, state: _FSDPState, mp: MixedPrecision) -> None:
    """Cast back what was cast; a buffer that was converted since stays what it was made."""
    restored: dict[int, torch.Tensor] = {}
    for name, dtype in state.buffer_dtypes.items():
        path, _, key = name.rpartition(".")
        buffers = buffer_slots(module.get_submodule(path))
        buffer = buffers.get(key)
        if buffer is not None and buffer.dtype == mp.buffer_dtype:
            buffers[key] = restored.setdefault(id(buffer), buffer.to(dtype))
