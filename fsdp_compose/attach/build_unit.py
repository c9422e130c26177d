"""Build one unit as it was planned: initialise it, cut its shards, attach its state and hooks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compose.attach.entrances import ANSWERS, attach_entrances
from fsdp_compose.base.exchange import swap_contents
from fsdp_compose.base.group import SELF
from fsdp_compose.base.memory import shared_memory_of
from fsdp_compose.base.mesh import Mesh, MeshLike, fuse, subgroup_of, with_own_reductions
from fsdp_compose.base.policy import MixedPrecision
from fsdp_compose.base.strides import flatten, storage_order
from fsdp_compose.base.torch_private import buffer_slots, take_leaf_hooks
from fsdp_compose.base.unwritten import UnwrittenMark, mark_unwritten
from fsdp_compose.buckets.bucket import Bucket, Entry
from fsdp_compose.buckets.build import make_bucket
from fsdp_compose.buckets.entries import find_entry, rename_entry
from fsdp_compose.comm.collectives import open_segments
from fsdp_compose.construct.choose_buckets import unit_precision
from fsdp_compose.construct.compare_ranks import Value, compare_values, values_of
from fsdp_compose.construct.initialise import broadcast_tensors, initialise, require_filled
from fsdp_compose.construct.names import path_cleaner
from fsdp_compose.construct.plans import BucketPlan, Options, UnitPlan
from fsdp_compose.core.autograd import EngineWork
from fsdp_compose.core.guards.added_parameters import remember
from fsdp_compose.core.guards.replicas import checksum
from fsdp_compose.core.guards.static_buffers import is_static, use_static_buffers
from fsdp_compose.core.guards.unread_weights import default_of
from fsdp_compose.core.records import Switches
from fsdp_compose.core.state import (
    Checks,
    Unit,
    _FSDPState,
    engine_of,
    find_state,
    iter_units,
    owner_of,
)
from fsdp_compose.sharded import (
    STATE_KEY,
    Residence,
    ShardSpec,
    find_wrapper,
    open_dtensor,
    open_wrapped,
    take_over_hooks,
    to_local,
)


@dataclass
class MetaValues:
    """Parameters and buffers that are on the meta device on some rank, while units are built.

    Attributes:
        keys: of all of them, as ``Value.key``.
        problem: what went wrong first while this rank initialised its own.
        sums: checksums of initialised values, for the ranks to compare.
        unwritten: keys of those that no initialisation wrote.
        values: where each went, by key.
    """

    keys: set[str]
    problem: Exception | None = None
    sums: dict[str, tuple[int, Value]] = field(default_factory=dict)
    unwritten: set[str] = field(default_factory=set)
    values: dict[str, tuple[Unit, Value]] = field(default_factory=dict)


def initialise_values(plan: UnitPlan, meta: MetaValues) -> list[Value]:
    """Initialise the unit's meta values, or take rank 0's where asked; returns the meta values."""
    left: set[int] = set()
    try:
        left = initialise(plan, plan.options.param_init_fn)
    except Exception as error:  # raised on every rank, once all units are built
        meta.problem = meta.problem or error
    is_broadcast = plan.options.init == "broadcast"
    values = [*values_of(plan)] if meta.keys or is_broadcast else []
    if is_broadcast:
        left.difference_update(id(value.tensor) for value in values if not _is_source(value))
        for mesh in dict.fromkeys(value.mesh for value in values if value.mesh is not None):
            broadcast_tensors([value.tensor for value in values if value.mesh == mesh], mesh)
        for group in {g.ranks: g for value in values for g in value.repeated}.values():
            alike = [value.tensor for value in values if group in value.repeated]
            broadcast_tensors(alike, Mesh(group, SELF, plan.buckets[0].mesh.device))
    try:
        require_filled(plan, left)
    except ValueError as error:
        meta.problem = meta.problem or error
    made_here = [value for value in values if value.key in meta.keys]
    for value in made_here:
        if id(value.tensor) in left:
            meta.unwritten.add(value.key)
        if plan.options.init == "verify":
            meta.sums[value.key] = (checksum(value.tensor), value)
    return made_here


def _is_source(value: Value) -> bool:
    """Whether other ranks take the value of this one, when it is broadcast."""
    mesh = value.mesh
    return not any(group.rank for group in (*(mesh.groups if mesh else ()), *value.repeated))


def build_unit(plan: UnitPlan, meta: MetaValues) -> None:
    """Build and attach the unit that was planned; all that the user can get wrong was checked."""
    made_here = initialise_values(plan, meta)
    buckets: list[Bucket] = []
    entries: dict[int, Entry] = {}
    for bucket_plan in plan.buckets:
        bucket = build_bucket(plan, bucket_plan)
        buckets.append(bucket)
        entries.update((id(entry.param), entry) for entry in bucket.entries)
    borrowed = [find_entry(item.param) for item in plan.found if id(item.param) not in entries]
    order = [*(e for b in buckets for e in b.entries), *borrowed]
    index = {id(entry.param): i for i, entry in enumerate(order)}
    device = _find_device(plan, buckets, borrowed)
    unit = Unit(
        name=plan.name,
        modules=tuple(weakref.ref(module) for module in plan.modules),
        buckets=buckets,
        borrowed=borrowed,
        engine=engine_of(device, EngineWork),
        mp=unit_precision(plan),
        prefetch=plan.options.prefetch,
        switches=Switches(
            keep_after_forward=plan.options.placement.keep_after_forward,
            keep_over_microbatches=plan.options.placement.keep_over_microbatches,
            unshard_in_backward=default_of(plan.modules),
        ),
        slots={slot: index[id(item.param)] for item in plan.found for slot in item.slots},
        options=_without_init(plan.options),
        checks=Checks(
            groupless=plan.options.mesh is None and not dist.is_initialized(),
            left_alone=plan.left_alone(),
        ),
    )
    for module in plan.modules:
        module.__dict__[STATE_KEY] = _FSDPState(unit, {})
        attach_entrances(module, plan.options.methods)
    remember(unit)
    if is_static(unit):
        use_static_buffers(unit.engine)
    meta.values.update((value.key, (unit, value)) for value in made_here)
    cast_buffers(plan, unit.mp)


def share_memory(mesh: Mesh) -> None:
    """Let ranks on one host read each other's memory; every rank of the mesh must call."""
    if mesh.device.type == "cpu":
        open_segments(mesh.groups)


def build_bucket(plan: UnitPlan, bucket_plan: BucketPlan) -> Bucket:
    """Cut this rank's shard from whole parameters, which become views of the shard."""
    mesh = bucket_plan.mesh
    if plan.options.placement.fused:
        mesh = fuse(mesh, plan.options.mesh)
        share_memory(mesh)
    mesh = with_own_reductions(mesh)
    with torch.inference_mode(False), torch.no_grad():
        shard, entries = _cut_shard(plan, bucket_plan, mesh)
    params = [entry.param for entry in entries]
    leaf_hooks = [take_leaf_hooks(param) for param in params]
    grads = [param.grad for param in params]
    for entry, param in zip(entries, params, strict=True):  # free the whole before buffers are made
        param.grad = None
        if isinstance(param, DTensor):
            open_dtensor(param)
        elif entry.wrapper is not None:
            open_wrapped(param, entry.wrapper)
        elif param.is_inference():  # for good, whatever its data: what writes it is not counted
            with torch.inference_mode(False):
                swap_contents(param, nn.Parameter(shard.new_empty(0), param.requires_grad))
        else:
            param.data = shard.new_empty(0)
    ranks = plan.options.placement.spread
    spread = None if ranks is None else subgroup_of(mesh.shard, ranks)
    if spread is not None:
        share_memory(replace(mesh, shard=spread))
    bucket = make_bucket(
        entries,
        bucket_plan.layout,
        mesh,
        shard,
        bucket_plan.mp,
        plan.options.offload_policy,
        spread,
    )
    for param, grad, taken in zip(params, grads, leaf_hooks, strict=True):
        if grad is not None:  # a sharded parameter keeps this rank's slice of it
            param.grad = grad.to(bucket.dtypes.grad)
        take_over_hooks(param, find_entry(param).spec, *taken)
    return bucket


def _cut_shard(
    plan: UnitPlan, bucket_plan: BucketPlan, mesh: Mesh
) -> tuple[torch.Tensor, list[Entry]]:
    """This rank's shard of a bucket, and what each parameter is in it."""
    layout, offload = bucket_plan.layout, plan.options.offload_policy
    parts = [item.part for item in bucket_plan.found]
    shard = torch.zeros(
        layout.shard_numel,
        dtype=parts[0].dtype,
        device="cpu" if offload.shards else parts[0].device,
        pin_memory=offload.shards and offload.pin_memory and mesh.device.type != "cpu",
    )
    residence = Residence()
    entries: list[Entry] = []
    shapes: dict[torch.Size, torch.Size] = {}  # one object for all that are alike
    for index, (item, part) in enumerate(zip(bucket_plan.found, parts, strict=True)):
        own, stride = layout.slice_of(index, mesh.shard.rank), storage_order(part)
        origin = shared_memory_of(part)  # before others have it
        flat = flatten(part.detach(), stride)
        shard[own.shard_offset : own.shard_offset + own.numel].copy_(flat[own.start : own.stop])
        spec = ShardSpec(
            fqn=plan.full_name(item.names[0]),
            unit=plan.name,
            shape=shapes.setdefault(part.shape, part.shape),
            stride=stride,
            offset=layout.offsets[index],
            shard_numel=layout.shard_numel,
            group=mesh.shard,
            residence=residence,
            parallel=item.parallel,
            replicas=mesh.replicate,
            answers=ANSWERS,
        )
        wrapper = find_wrapper(item.param)
        kind = nn.Parameter if spec.is_dtensor or wrapper is not None else type(item.param)
        names, asked = tuple(item.names), item.param.grad_dtype
        grad_dtype = None if asked == part.dtype else asked
        entry = Entry(
            item.param, spec, names, item.slots, kind=kind, wrapper=wrapper, grad_dtype=grad_dtype
        )
        entry.origin = origin
        entries.append(entry)
    return shard, entries


def _without_init(options: Options) -> Options:
    """``options`` without the function of the user's, which could keep the model alive."""
    return options if options.param_init_fn is None else replace(options, param_init_fn=None)


def _find_device(plan: UnitPlan, buckets: list[Bucket], borrowed: list[Entry]) -> torch.device:
    for bucket in buckets:
        return bucket.mesh.device
    for entry in borrowed:
        return owner_of(entry).mesh.device  # which is not where an offloaded parameter lies
    for module in plan.modules:
        for unit in iter_units(module):  # a module that only holds units runs on their device
            return unit.engine.streams.device
    for module in plan.modules:
        for buffer in module.buffers():
            return buffer.device
    return plan.options.device


def cast_buffers(plan: UnitPlan, mp: MixedPrecision) -> None:
    """Cast the unit's floating-point buffers that were not; one under two names stays one."""
    cast: dict[int, torch.Tensor] = {}
    for module in plan.modules if mp.buffer_dtype is not None else ():
        dtypes = module.__dict__[STATE_KEY].buffer_dtypes
        for name, submodule, key, buffer in plan.managed_buffers(module):
            if buffer.is_floating_point() and name not in dtypes:
                dtypes[name] = buffer.dtype
                if id(buffer) not in cast:
                    cast[id(buffer)] = buffer.to(mp.buffer_dtype)
                buffer_slots(submodule)[key] = cast[id(buffer)]


def leave_for_loading(meta: MetaValues, mesh: MeshLike | None, modules: Sequence[object]) -> None:
    """Agree on what was meta, and have what no initialisation wrote wait for loading.

    Where one failed, or ranks differ, that is raised on every rank, and everything waits.
    """
    try:
        left = compare_values(mesh, meta.sums, meta.unwritten, meta.problem, modules)
    except Exception:
        for _, value in meta.values.values():
            mark_unwritten(_find_written(value))
        _await_loading(meta, meta.values)
        raise
    _await_loading(meta, sorted(left))


def _await_loading(meta: MetaValues, keys: Iterable[str]) -> None:
    """Have forward raise until the values are written."""
    for unit, value in map(meta.values.__getitem__, keys):
        if isinstance(value.tensor, nn.Parameter):
            entry = find_entry(value.tensor)
            owner_of(entry).history.unready.append((entry, UnwrittenMark(entry.param)))
        else:
            unit.checks.unready_buffers.append(
                (value.name, value.slot, UnwrittenMark(_find_written(value)))
            )


def _find_written(value: Value) -> torch.Tensor:
    """The memory of a value now: this rank's slice, or the buffer that the module reads."""
    if isinstance(value.tensor, nn.Parameter):
        return to_local(value.tensor)
    buffer: torch.Tensor = value.slot.values[value.slot.name]
    return buffer


def rename_nested_units(outer: nn.Module) -> None:
    """Name the units inside ``outer``, and their parameters, as ``outer`` names them."""
    clean = path_cleaner(outer)
    paths = {id(submodule): clean(path) for path, submodule in outer.named_modules()}
    renamed: set[int] = set()
    for submodule in outer.modules():
        state = find_state(submodule)
        if state is None or submodule is outer or id(state.unit) in renamed:
            continue
        unit = state.unit
        renamed.add(id(unit))
        unit.name = paths[id(submodule)]
        for entry in (entry for bucket in unit.buckets for entry in bucket.entries):
            path, name = unit.name, entry.names[0]
            if len(unit.modules) > 1:
                position, name = name.split(".", 1)
                path = paths.get(id(unit.modules[int(position)]()), path)
            rename_entry(entry, f"{path}.{name}", unit.name)
