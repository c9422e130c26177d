"""Copies parameters that were given other memory back into their bucket, or raises.

``module.to(dtype)``, ``p.data = x`` and the like give a parameter other storage than its slice of
the bucket's shard. ``copy_moved_parameters`` copies the values into a new shard of the bucket; the
parameter objects and the layout stay. It never writes into memory that parameters had before: code
that swaps weights for a while (``kept = p.data; p.data = average; ...; p.data = kept``) holds that
memory to put it back.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from fsdp_compose.base.attributes import get_grad
from fsdp_compose.base.group import Group
from fsdp_compose.base.mesh import Mesh, group_of, with_known_reductions, with_transport
from fsdp_compose.base.torch_private import raw
from fsdp_compose.base.unwritten import UnwrittenMark
from fsdp_compose.buckets.bucket import Bucket, Phase
from fsdp_compose.buckets.build import make_bucket, place_parameters
from fsdp_compose.buckets.gradients import make_grad_buffer
from fsdp_compose.comm import collectives as comm
from fsdp_compose.comm.heads import meet_alone
from fsdp_compose.core.state import Unit, engine_of, units_with
from fsdp_compose.sharded import replace_grad, tag, to_local

_TAKEN = ("mesh dtypes stored full views aliases in_place inner counts static").split()
"""What a rebuilt bucket takes from the bucket that was made around its new shard."""


def shard_of(bucket: Bucket) -> torch.Tensor:
    """This rank's part of the bucket, with the values that its parameters have now."""
    if bucket.residence.moved:
        copy_moved_parameters(bucket)
    return bucket.stored


def copy_moved_parameters(bucket: Bucket) -> None:
    """Copy the values that the bucket's parameters have now into a new shard of the bucket.

    Raises:
        RuntimeError: only some of its parameters have another dtype or device, or they have left
            host memory that ``offload_policy`` keeps them in.
    """
    locals_ = [to_local(entry.param) for entry in bucket.entries]
    kinds = {(local.dtype, local.device) for local in locals_}
    if len(kinds) > 1:
        raise RuntimeError(_explain_mixed(bucket, locals_))
    ((dtype, device),) = kinds
    with torch.inference_mode(False), torch.no_grad():
        _require_host(bucket, device)
        shard = _make_shard(bucket, locals_, dtype, device)
        earlier = bucket.history.earlier + bucket.stored._version + 1
        same = (dtype, device) == (bucket.stored.dtype, bucket.stored.device)
        if same and not bucket.in_place:
            bucket.stored = shard
            if bucket.views.shard_bytes is not None:
                bucket.views = replace(bucket.views, shard_bytes=shard.view(torch.uint8))
            place_parameters(bucket)
        else:
            _rebuild(bucket, shard)
        bucket.history.earlier = earlier
    bucket.fill.is_superseded = bucket.phase is not Phase.SHARDED and not bucket.in_place
    bucket.residence.moved = False
    waiting = [entry for entry, _ in bucket.history.unready]
    if bucket.residence.emptied:  # also where a slice is empty: ranks name the same ones
        bucket.residence.emptied = False
        bucket.history.emptied = not waiting or bucket.history.emptied
        waiting = list(bucket.entries)
    bucket.history.unready = [(entry, UnwrittenMark(entry.param)) for entry in waiting]
    if bucket.history.mirror is not None:
        # An optimizer over those tensors may step before the next backward.
        bucket.history.mirror.share_gradients(converted=True)


def _make_shard(
    bucket: Bucket, locals_: list[torch.Tensor], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A new shard with the values of ``locals_``."""
    pinned = bucket.offload.shards and bucket.stored.is_pinned()
    shard = torch.zeros(bucket.layout.shard_numel, dtype=dtype, device=device, pin_memory=pinned)
    pieces = shard.split(bucket.views.splits)
    for k, local in zip(bucket.views.pieces, locals_, strict=True):
        pieces[k].copy_(local)
    return shard


def _require_host(bucket: Bucket, device: torch.device) -> None:
    """Raise where parameters left the host memory that their offload policy keeps them in."""
    first = bucket.entries[0].spec
    if device != bucket.stored.device and bucket.offload.shards:
        raise RuntimeError(
            f"parameter {first.fqn!r} of unit {first.unit!r} was moved to {device}, but its "
            "offload_policy keeps parameters in host memory. Call fsdp_compose.undo(module), then "
            "fully_shard without Offload(params=True) or Offload(optimizer=True)."
        )


def _rebuild(bucket: Bucket, shard: torch.Tensor) -> None:
    """Build all buffers again around ``shard``, whose dtype or device is not the former one's."""
    mesh, spread, device = bucket.mesh, bucket.spread, shard.device
    if device != bucket.stored.device:
        mesh = Mesh(
            _regroup(mesh.shard, device),
            _regroup(mesh.replicate, device),
            device,
            mesh.axes and (_regroup(mesh.axes[0], device), _regroup(mesh.axes[1], device)),
            mesh.microbatches,
        )
        mesh = with_known_reductions(mesh)
        spread = None if spread is None else _regroup(spread, device)
        for entry in bucket.entries:
            entry.spec = replace(entry.spec, group=mesh.shard, replicas=mesh.replicate)
    fresh = make_bucket(
        bucket.entries, bucket.layout, mesh, shard, bucket.mp, bucket.offload, spread
    )
    for name in _TAKEN:
        setattr(bucket, name, getattr(fresh, name))
    bucket.device_copy = None
    if bucket.fill.stamp is not None:  # it was kept for a later pass, and will be filled anew
        bucket.fill.stamp = object()
    _convert_gradients(bucket)
    for entry in bucket.entries:
        entry.owner = weakref.ref(bucket)
    for unit in units_with(bucket):
        unit.engine.units.discard(unit)
        kind: Any = type(unit.engine.schedule.work)
        unit.engine = engine_of(mesh.device, kind)
        known = type(unit.engine.schedule.work)
        if known is not kind and issubclass(kind, known):  # kind looks after static buffers, too
            unit.engine.schedule.work = kind(unit.engine)
        unit.checks.epoch, unit.checks.trigger, unit.run.live = unit.checks.epoch + 1, None, None
        unit.link()


def _convert_gradients(bucket: Bucket) -> None:
    """Convert gradients that are still being accumulated to the bucket's new dtypes and device."""
    old, bucket.grads = bucket.grads, None
    if bucket.arriving.packed:
        assert old is not None
        bucket.grads = make_grad_buffer(bucket)
        bucket.grads.flat.copy_(old.flat)
    kind = bucket.dtypes.grad
    if bucket.arriving.partial is not None:
        bucket.arriving.partial = bucket.arriving.partial.to(bucket.mesh.device, kind.to_real())
    if bucket.arriving.waiting is not None:
        bucket.arriving.waiting = bucket.arriving.waiting.to(kind)
    nodes = bucket.arriving.sums.nodes
    nodes[:] = [node.to(bucket.mesh.device, kind) for node in nodes]
    with raw():
        for entry in bucket.entries:
            grad = get_grad(entry.param)  # not what stands there for gradients that wait
            if grad is not None and (grad.dtype, grad.device) != (kind, bucket.stored.device):
                local = to_local(grad).to(bucket.stored.device, kind)
                replace_grad(entry.param, tag(local, entry.spec))


def moved_before_backward(bucket: Bucket) -> str:
    """The error for parameters that were given other memory between forward and backward."""
    names = [entry.spec.fqn for entry in bucket.entries]
    others = f" or others of its {len(names)}" if len(names) > 1 else ""
    return (
        f"parameters of unit {bucket.entries[0].spec.unit!r} ({names[0]!r}{others}) were given "
        "other storage (module.to(...), refresh(...), p.data = ...) between forward and backward. "
        "Backward needs the values that forward used: run it before the change."
    )


def _regroup(group: Group, device: torch.device) -> Group:
    """The same ranks, for a bucket on another device."""
    if group.pg is None:
        return group
    return with_transport(group_of(group.pg, device), group.transport)


def _explain_mixed(bucket: Bucket, locals_: list[torch.Tensor]) -> str:
    """The error for a bucket whose parameters have several dtypes or devices."""
    kept = (bucket.stored.dtype, bucket.stored.device)
    named = [(entry, (t.dtype, t.device)) for entry, t in zip(bucket.entries, locals_, strict=True)]
    moved = [(entry, kind) for entry, kind in named if kind != kept]
    same = [entry.spec.fqn for entry, kind in named if kind == kept]
    names = ", ".join(f"{e.spec.fqn!r} is {kind[0]} on {kind[1]}" for e, kind in moved[:4])
    first = repr(same[0]) if same else "none"
    others = f"{first} and {len(same) - 1} more are" if len(same) > 1 else f"{first} is"
    return (
        f"parameters of unit {bucket.entries[0].spec.unit!r} share a buffer, and only some were "
        f"converted since they were sharded: {names}{', ...' if len(moved) > 4 else ''}, "
        f"{others} {kept[0]} on {kept[1]}. Convert the whole unit with "
        "module.to(dtype or device), or call fsdp_compose.undo(module), convert, and shard again."
    )


def require_all_written(units: Iterable[Unit]) -> None:
    """Before weights leave the run: ``require_written`` of the units that something is left in.

    Every rank must call it.
    """
    for unit in units:
        for bucket in unit.gathered:
            shard_of(bucket)  # takes note of what was emptied
        if unit.checks.unready_buffers or any(b.history.unready for b in unit.gathered):
            require_written(unit)


def require_written(unit: Unit) -> None:
    """Raise on every rank when some rank has not loaded a value that was left for loading.

    One rank may have emptied its parameters alone. So on gloo a rank that lacks nothing goes on,
    and raises where it meets one that does.

    Raises:
        RuntimeError: naming what is missing.
    """
    missing = [
        f"parameter {entry.spec.fqn!r}"
        for bucket in unit.gathered
        for entry, mark in bucket.history.unready
        if mark.is_on(entry.param, to_local(entry.param))
    ]
    missing += [
        f"buffer {name!r}"
        for name, slot, mark in unit.checks.unready_buffers
        if mark.is_on(slot.values[slot.name])
    ]
    what = missing[0] if missing else "all values"
    told = f"have {what} of unit {unit.name!r} loaded, which nothing has written"
    for group in unit.gathered[0].mesh.groups if unit.gathered else ():
        if missing or _all_wait(unit):
            meet_alone(group, told, "have values loaded")
        if _all_wait(unit) or not comm.is_point_to_point(group):
            reports = comm.gather_objects(missing, group, "a forward, gathered() or saving")
            missing = list(dict.fromkeys(name for report in reports for name in report))
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise RuntimeError(
            f"unit {unit.name!r}: {', '.join(missing[:5])}{more} came from the meta device, or was "
            "emptied by to_empty(), and nothing has written it since. Load the model first "
            "(model.load_state_dict(...), fsdp_compose.load_checkpoint) or initialise it "
            "(fsdp_compose.apply(model, fn)). When sharding, you can pass "
            "fully_shard(param_init_fn=...) or give the module that owns it a reset_parameters()."
        )
    for bucket in unit.gathered:
        bucket.history.unready, bucket.history.emptied = [], False
    unit.checks.unready_buffers = []


def _all_wait(unit: Unit) -> bool:
    """Whether values of the unit are left for loading on every rank, as where they were meta."""
    lists = (b.history.unready for b in unit.gathered if not b.history.emptied)
    return bool(unit.checks.unready_buffers) or any(lists)
