"""Unshard, reshard, reduce and prefetch: functions on state, called by hooks and by users.

A unit is gathered while it has a reason to be (``Hold``), and a bucket while some unit holds it.
Gradients are packed once into a flat buffer, reduced while backward goes on, and become the
parameters' ``.grad`` no later than at its end.

Order of frees and allocations, and what breaks without it: a unit's ``full`` is freed before its
reduction allocates, and the previous reduction is finished before the next pack, so that at most
two gathered units, one unit's gradients and one flat buffer exist at a time.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fsdp_compose import comm
from fsdp_compose.adopt import adopt, moved_before_backward, require_written
from fsdp_compose.bucket import Bucket, Entry, Phase, make_grad_buffer
from fsdp_compose.order import Order
from fsdp_compose.policy import Offload
from fsdp_compose.sharded import tag_all
from fsdp_compose.state import GradBucket, Hold, Lane, Reduction, Task, Unit, lane_of
from fsdp_compose.torch_private import (
    flat_weights,
    graph_task_id,
    on_backward_end,
    profiler_enabled,
    raw,
)


def _descriptor(name: str) -> Any:
    return torch.Tensor.__dict__.get(name) or getattr(torch.Tensor, name)


# Attribute access without the detour through a sharded tensor's own properties; use under raw().
get_grad: Callable[[torch.Tensor], torch.Tensor | None] = _descriptor("grad").__get__
set_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = _descriptor("grad").__set__
requires_grad: Callable[[torch.Tensor], bool] = _descriptor("requires_grad").__get__

log = logging.getLogger("fsdp_compose")
_QUIET = nullcontext()


def noted(phase: str, bucket: Bucket, nbytes: int) -> AbstractContextManager[object]:
    """Name what happens to a bucket in the log, at INFO, and in a profile."""
    if log.isEnabledFor(logging.INFO):
        spec = bucket.entries[0].spec
        what = f"{bucket.shard.dtype}, {len(bucket.entries)} parameters"
        log.info("%s %s: %d bytes (%s)", phase, spec.unit, nbytes, what)
    if profiler_enabled():
        return torch.profiler.record_function(f"fsdp_compose.{phase} {bucket.entries[0].spec.unit}")
    return _QUIET


_PURPOSE = {
    Hold.FORWARD: "forward",
    Hold.BACKWARD: "backward",
    Hold.KEPT: "to keep it",
    Hold.PREFETCH: "ahead of its use",
    Hold.RETAINED: "for a second backward",
    Hold.USER: "asked for by the caller",
}

# Gathering and releasing


def hold(unit: Unit, reason: Hold) -> None:
    """Start gathering the unit, and keep it gathered until ``reason`` is dropped."""
    for bucket, events, code in unit.gather_events:
        if bucket.phase is Phase.SHARDED:  # raises before anything has changed
            events.note((code, "gather", unit.name, _PURPOSE[reason]))
    if reason not in unit.holds:
        unit.holds.add(reason)
        for bucket in unit.gathered:
            bucket.holders += 1
    for bucket in unit.gathered:
        if bucket.residence.moved:
            settle(bucket)
        if bucket.phase is Phase.SHARDED:
            _start_gather(unit.lane, bucket)


def admit(unit: Unit) -> None:
    """Before a forward outside backward: take over what was done to the parameters since."""
    waiting = bool(unit.unready_buffers)
    for bucket in unit.gathered:
        if bucket.residence.moved:
            settle(bucket)
        waiting = waiting or bool(bucket.unready)
    if waiting:
        require_written(unit)


def settle(bucket: Bucket) -> None:
    """Take over what was done to the parameters of a bucket whose ``residence.moved`` is set."""
    if graph_task_id() != -1:
        if bucket.phase is Phase.SHARDED:
            raise RuntimeError(moved_before_backward(bucket))
        return  # gathered before the change, as this backward needs it
    was_gathered = bucket.phase is not Phase.SHARDED
    _release(lane_of(bucket.mesh.device), bucket)
    adopt(bucket)
    if was_gathered:
        _start_gather(lane_of(bucket.mesh.device), bucket)


def drop(unit: Unit, reason: Hold) -> None:
    """Withdraw a reason; what nobody holds any more is released."""
    if reason in unit.holds:
        unit.holds.remove(reason)
        for bucket in unit.gathered:
            bucket.holders -= 1
            if bucket.holders == 0:
                _release(unit.lane, bucket)


def wait_gathered(unit: Unit) -> None:
    """Make the unit's full parameters readable on the current stream."""
    for bucket in unit.gathered:
        if bucket.phase is Phase.GATHERING:
            _finish_gather(unit.lane, bucket)


def keep(unit: Unit, reason: Hold) -> None:
    """Keep a gathered unit for a later pass, which must not read it once its shard has changed."""
    hold(unit, reason)
    for bucket in unit.gathered:
        bucket.stamp = stamp_of(bucket)


def refresh_stale(unit: Unit) -> None:
    """Gather again what was kept gathered while its shard changed."""
    stale = [b for b in unit.gathered if b.phase is Phase.GATHERED and b.stamp != stamp_of(b)]
    for bucket, events, code in unit.gather_events if stale else ():
        if bucket in stale:
            events.note((code, "gather", unit.name, "again, since it was changed"))
    for bucket in stale:
        _start_gather(unit.lane, bucket)


def stamp_of(bucket: Bucket) -> object:
    """Changes whenever a parameter of the bucket is written, in whatever way autograd can see.

    A parameter whose ``.data`` was handed out can be written unseen, so its stamp never repeats.
    """
    if bucket.in_place:
        return None
    if bucket.residence.written:
        return object()
    with raw():
        return (bucket.shard._version, *[entry.param._version for entry in bucket.entries])


def _start_gather(lane: Lane, bucket: Bucket) -> None:
    bucket.move_to(Phase.GATHERING)
    if bucket.in_place:
        return
    streams = lane.streams
    with streams.on(streams.gather), noted("gather", bucket, bucket.full_nbytes):
        _fill(bucket)
        bucket.gathered_at = streams.record(streams.gather)


def _fill(bucket: Bucket) -> None:
    storage = bucket.full.untyped_storage()
    if storage.nbytes() == 0:
        storage.resize_(bucket.full_nbytes)
    group, parts, inner = bucket.mesh.shard, bucket.part_bytes, bucket.inner
    purpose = f"gather unit {bucket.entries[0].spec.unit!r}"
    if inner is not None and inner.store is not None and inner.stamp == stamp_of(bucket):
        group, parts = inner.group, inner.parts
        inner.own.copy_(inner.store)
    elif bucket.shard_bytes is not None and not comm.is_point_to_point(group) and group.pg:
        part = bucket.shard_bytes
        bucket.gather = comm.gather_parts(bucket.whole_bytes, parts, part, group, purpose)
        return
    else:
        bucket.own.copy_(_resident_shard(bucket), non_blocking=True)
    own = parts[group.rank] if parts else bucket.whole_bytes
    bucket.gather = comm.gather_parts(bucket.whole_bytes, parts, own, group, purpose)


def _resident_shard(bucket: Bucket) -> torch.Tensor:
    """What a gather reads: the shard, or of an offloaded one the copy kept on the device."""
    if not bucket.offload.optimizer or bucket.offload.params:
        return bucket.shard
    stamp = stamp_of(bucket)
    if bucket.device_shard is None:
        bucket.device_shard = torch.empty_like(bucket.own)
        bucket.device_stamp = None
    if bucket.device_stamp != stamp:
        bucket.device_shard.copy_(bucket.shard, non_blocking=True)
        bucket.device_stamp = stamp
    return bucket.device_shard


def spread_inner(unit: Unit) -> None:
    """Keep a part of what was gathered, so that backward gathers over fewer ranks."""
    for bucket in unit.buckets:
        if bucket.inner is not None and bucket.phase is Phase.GATHERED:
            bucket.inner.store = bucket.inner.own.clone()
            bucket.inner.stamp = stamp_of(bucket)


def forget_inner(unit: Unit) -> None:
    """Backward is done: free what was kept for it."""
    for bucket in unit.buckets:
        if bucket.inner is not None:
            bucket.inner.store = None


def _finish_gather(lane: Lane, bucket: Bucket) -> None:
    bucket.gather.wait()
    bucket.move_to(Phase.GATHERED)
    lane.streams.wait(bucket.gathered_at)
    bucket.gathered_at = None


def _release(lane: Lane, bucket: Bucket) -> None:
    if bucket.phase is Phase.SHARDED:
        return
    if bucket.phase is Phase.GATHERING:
        _finish_gather(lane, bucket)
    bucket.move_to(Phase.SHARDED)
    if bucket.in_place:
        return
    if log.isEnabledFor(logging.INFO):
        log.info("release %s: %d bytes", bucket.entries[0].spec.unit, bucket.full_nbytes)
    storage = bucket.full.untyped_storage()
    if lane.streams.gather is None:
        storage.resize_(0)
    else:
        # Freed on the stream it was allocated on, behind the compute that read it: the allocator
        # then gives the memory only to later gathers, and nothing has to be kept alive for compute.
        with lane.streams.on(lane.streams.gather):
            storage.resize_(0)


# Parameters in compute


def install(unit: Unit, tensors: Sequence[torch.Tensor]) -> None:
    """Let the unit's modules read ``tensors``, by entry, as their parameters."""
    for values, name, index in unit.places:
        values[name] = tensors[index]
    for ref, positions in unit.recurrent:
        module = ref()
        assert isinstance(module, torch.nn.RNNBase)
        weights = flat_weights(module)
        for position, index in positions:
            weights[position] = tensors[index]


def install_leaves(unit: Unit) -> None:
    """Let the unit's modules hold their sharded parameters again, or what a scope put there."""
    install(unit, resting(unit))


def resting(unit: Unit) -> Sequence[torch.Tensor]:
    """What the unit's modules hold between passes, by entry."""
    return [e.param for e in unit.entries] if unit.opened is None else unit.opened.tensors


def check_slots(unit: Unit) -> None:
    """Raise when a parameter of the unit was replaced since it was sharded (D5)."""
    entries, held = unit.entries, resting(unit)
    for values, name, index in unit.places:
        if values.get(name) is not held[index]:
            found = values.get(name)
            raise RuntimeError(
                f"parameter {entries[index].spec.fqn!r} of unit {unit.name!r} was replaced after "
                f"fully_shard: found {type(found).__name__} {tuple(getattr(found, 'shape', ()))}, "
                "wanted the parameter that was sharded. Write into it instead (p.copy_(value), or "
                "with fsdp_compose.gathered(module, writeback=True)), or call "
                "fsdp_compose.undo(module) before replacing it."
            )


# Gradients


def pack(bucket: Bucket, grads: Sequence[torch.Tensor | None]) -> None:
    """Copy or add the gradients of the bucket's entries into its flat buffer; None is zero."""
    buffer = bucket.grads
    if buffer is None:
        buffer = bucket.grads = make_grad_buffer(bucket)
    elif not bucket.packed:
        buffer.flat.untyped_storage().resize_(buffer.flat.numel() * buffer.flat.element_size())
    views: list[torch.Tensor] = buffer.views
    given: Any = grads
    zeros = buffer.gaps
    if any(grad is None for grad in grads):
        pairs = list(zip(buffer.views, grads, strict=True))
        views = [view for view, grad in pairs if grad is not None]
        given = [grad for _, grad in pairs if grad is not None]
        zeros = [view for view, grad in pairs if grad is None] + buffer.gaps
    if bucket.packed:
        if given:
            torch._foreach_add_(views, given)
        return
    bucket.packed = True
    if given:
        torch._foreach_copy_(views, given)
    if zeros:
        torch._foreach_zero_(zeros)


def start_reduce(unit: Unit, bucket: Bucket, wanted: frozenset[Entry] | None = None) -> Reduction:
    """Start averaging the packed gradients over the ranks; ``finish_reduce`` gives the result."""
    assert bucket.grads is not None
    if bucket in unit.reduce_events:
        events, code, kept = unit.reduce_events[bucket]
        all_reduces = unit.switches.all_reduce
        events.note((code if all_reduces else kept, "reduce", unit.name, "backward"))
    bucket.packed = False
    mesh, streams = bucket.mesh, unit.lane.streams
    factor = unit.switches.divide_factor
    scale = 1.0 / (mesh.size if factor is None else factor)
    reduction = Reduction(unit, bucket, None, scale, wanted)
    flat, parts = bucket.grads.flat, bucket.grads.parts
    nbytes = flat.numel() * flat.element_size()
    with streams.on(streams.reduce), noted("reduce", bucket, nbytes):
        if unit.switches.comm_hook is None:
            # Half precision overflows at 65504: divide before the sum, by half of the factor.
            if flat.dtype == torch.float16 and scale != 1.0:
                before = 2.0 ** round(math.log2(scale) / 2)
                flat *= before
                reduction.scale = scale / before
            reduction.scatter = comm.reduce_scatter_parts(
                flat, parts, mesh.shard, f"reduce gradients of unit {unit.name!r}"
            )
        if unit.switches.comm_hook is not None or streams.reduce is not None:
            reduction.result = _combine(reduction)
            reduction.done = streams.record(streams.reduce)
    return reduction


def start_all_reduce(unit: Unit, bucket: Bucket) -> Reduction:
    """Finish over the replicas what was reduced over the shard group only."""
    assert bucket.partial is not None
    streams = unit.lane.streams
    reduction = Reduction(unit, bucket, None, 1.0, reads_buffer=False)
    with streams.on(streams.reduce), noted("all-reduce", bucket, bucket.partial.nbytes):
        grad = comm.all_reduce(bucket.partial, bucket.mesh.replicate)
        reduction.result = _typed(bucket, grad)
        reduction.done = streams.record(streams.reduce)
    bucket.partial = None
    return reduction


def _combine(reduction: Reduction) -> torch.Tensor:
    """This rank's sharded gradient of the bucket, over both mesh axes, in the storage dtype."""
    bucket, switches = reduction.bucket, reduction.unit.switches
    real = _real_dtype(bucket.grad_dtype)
    if switches.comm_hook is not None:
        return _typed(bucket, _run_comm_hook(reduction).to(real))
    assert reduction.scatter is not None
    grad = reduction.scatter.result(real, reduction.scale)
    if bucket.partial is not None:
        grad += bucket.partial
        bucket.partial = None
    if bucket.mesh.replicate.size > 1:
        if not switches.all_reduce:
            bucket.partial = grad
        else:
            comm.all_reduce(grad, bucket.mesh.replicate)
    return _typed(bucket, grad)


def _typed(bucket: Bucket, grad: torch.Tensor) -> torch.Tensor:
    """Gradients travel as real numbers; complex parameters get theirs back as complex ones."""
    return torch.view_as_complex(grad.view(-1, 2)) if bucket.shard.is_complex() else grad


def _run_comm_hook(reduction: Reduction) -> torch.Tensor:
    unit, bucket, hook = reduction.unit, reduction.bucket, reduction.unit.switches.comm_hook
    assert hook is not None and bucket.grads is not None
    given = GradBucket(
        unit=unit.name,
        key=f"{unit.name}/{unit.buckets.index(bucket) if bucket in unit.buckets else 'tied'}",
        flat=bucket.grads.flat,
        parts=bucket.grads.parts or [bucket.grads.flat],
        shard=bucket.mesh.shard,
        replicate=bucket.mesh.replicate,
        scale=reduction.scale,
        dtype=bucket.shard.dtype,
    )
    with torch.no_grad():
        grad = hook(unit.switches.comm_state, given)
    wanted = given.parts[0].numel()
    if getattr(grad, "numel", int)() != wanted:
        raise ValueError(
            f"communication hook of unit {unit.name!r} returned "
            f"{type(grad).__name__} {tuple(getattr(grad, 'shape', ()))}; wanted this rank's part "
            f"of the averaged gradient, {wanted} elements."
        )
    return grad.reshape(-1)


def finish_reduce(reduction: Reduction) -> torch.Tensor:
    """Wait for a reduction and free the buffer it read."""
    bucket, streams = reduction.bucket, reduction.unit.lane.streams
    if reduction.result is None:
        reduction.result = _combine(reduction)
    streams.wait(reduction.done)
    if not reduction.reads_buffer:
        return reduction.result
    assert bucket.grads is not None
    if bucket.mesh.shard.size == 1:
        bucket.grads = None  # the result is the buffer itself
    elif not bucket.packed:
        # Not before the current stream has waited for the reduction that reads it.
        bucket.grads.flat.untyped_storage().resize_(0)
    return reduction.result


def drain(lane: Lane) -> None:
    """Finish every reduction under way and hand its gradients to the parameters."""
    while lane.reductions:
        reduction = lane.reductions.pop(0)
        grad = finish_reduce(reduction)
        if reduction.bucket.partial is None:
            _deliver(lane, reduction, grad)


def _deliver(lane: Lane, reduction: Reduction, grad: torch.Tensor) -> None:
    """Bring a reduced gradient to where the shards are, now or in the last backward of a step."""
    bucket, last = reduction.bucket, reduction.unit.switches.last_backward
    offload = bucket.offload
    if not (offload.shards or offload.grads):
        assign(reduction, grad)
        return
    if offload.grads and not (last and not offload.shards):
        grad = _to_host(grad, offload)
    if not last:
        waiting = bucket.waiting_grad
        _settle(lane)
        bucket.waiting_grad = grad if waiting is None else waiting.add_(grad)
        return
    if bucket.waiting_grad is not None:
        _settle(lane)
        grad = bucket.waiting_grad.add_(grad.to(bucket.waiting_grad.device))
        bucket.waiting_grad = None
    if offload.shards:
        grad = _to_host(grad, offload)
    else:
        grad = grad.to(bucket.shard.device, non_blocking=True)
    lane.landing.append((reduction, grad, lane.streams.record(lane.streams.current)))


def _to_host(tensor: torch.Tensor, offload: Offload) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(
        tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=offload.pin_memory
    )
    return host.copy_(tensor, non_blocking=True)


def _settle(lane: Lane) -> None:
    """Let the host see gradients that are being copied to it."""
    if lane.streams.current is not None:
        lane.streams.current.synchronize()


def land(lane: Lane) -> None:
    """Hand out gradients that were copied to the host, which has to wait for them here."""
    while lane.landing:
        reduction, grad, mark = lane.landing.pop(0)
        if mark is not None:
            mark.synchronize()
        assign(reduction, grad)


def cut(bucket: Bucket, flat: torch.Tensor) -> list[torch.Tensor]:
    """Slices of a sharded flat tensor by entry, each tagged as what it is."""
    slices = flat.split_with_sizes(bucket.splits)
    grads = [slices[piece] for piece in bucket.pieces]
    tag_all(grads, [entry.spec for entry in bucket.entries])
    return grads


def assign(reduction: Reduction, flat: torch.Tensor) -> None:
    """Set or add to ``.grad`` of the bucket's parameters, then run their hooks."""
    bucket, wanted, mirror = reduction.bucket, reduction.wanted, reduction.bucket.mirror
    if mirror is not None:
        mirror.reconcile()
    ready: list[Entry] = []
    held: list[torch.Tensor] = []
    added: list[torch.Tensor] = []
    with raw():
        for entry, grad in zip(bucket.entries, cut(bucket, flat), strict=True):
            param, leaf_hooks = entry.param, entry.spec.hooks
            if not requires_grad(param) or (wanted is not None and entry not in wanted):
                continue
            if leaf_hooks.gradient:
                grad = run_gradient_hooks(entry, grad)
            previous = get_grad(param)
            if previous is None:
                set_grad(param, grad)
            else:
                held.append(previous)
                added.append(grad)
            ready.append(entry)
        if held:
            with torch.no_grad():
                torch._foreach_add_(held, added)
    if mirror is not None:
        mirror.settle(flat)
    for entry in ready:
        for hook in tuple(entry.spec.hooks.accumulated.values()):
            hook.deliver(entry.param)
    module = reduction.unit.modules[0]()
    for reduced in tuple(reduction.unit.post_reduce_hooks.values()):
        reduced(module, [entry.param for entry in ready])
    if mirror is not None:
        mirror.reconcile()  # a hook may have stepped an optimizer and cleared its gradients


def run_gradient_hooks(entry: Entry, grad: torch.Tensor) -> torch.Tensor:
    """Apply the hooks a user registered on the parameter to its sharded gradient."""
    for hook in tuple(entry.spec.hooks.gradient.values()):
        changed = hook(grad)
        if changed is not None:
            grad = changed
    return grad


def _real_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


# Passes


def begin_forward_pass(lane: Lane) -> None:
    """An outermost forward starts: clear what a failed step left, then count it."""
    if lane.tasks and not any(task.alive for task in lane.tasks.values()):
        recover(lane)
    lane.pass_id += 1


def running_task(lane: Lane) -> Task:
    """The autograd run under way, known to the lane from its first event on."""
    task_id = graph_task_id()
    task = lane.tasks.get(task_id)
    if task is not None:
        return task
    if lane.tasks and not any(task.alive for task in lane.tasks.values()):
        recover(lane)
    outermost = not lane.tasks
    task = lane.tasks[task_id] = Task(task_id)
    lane_ref = weakref.ref(lane)

    def callback() -> None:
        owner = lane_ref()
        if owner is not None:
            end_task(owner, task_id)

    task.callback = weakref.ref(callback)
    on_backward_end(callback)
    if outermost:
        drop_prefetched(lane)
    return task


def end_task(lane: Lane, task_id: int) -> None:
    """An autograd run ended: reduce what is left, hand out gradients, release every unit."""
    task = lane.tasks.pop(task_id)
    with torch.no_grad():  # as in the pass itself, for the hooks of users
        for unit, bucket in task.packed:
            if bucket.packed and unit.switches.sync:
                drain(lane)
                lane.reductions.append(start_reduce(unit, bucket))
        drain(lane)
        land(lane)
        for mirror in task.mirrors:
            mirror.settle(None)
    for unit in task.units:
        if unit.task is task or unit.task is None:
            close_backward(unit, ended=True)
    for unit in task.consumed:
        drop(unit, Hold.RETAINED)
    if not lane.tasks:
        drop_prefetched(lane)
        lane.forward_order.close()
        lane.backward_order.close()
        end_step(lane, trained=True)


def end_step(lane: Lane, trained: bool) -> None:
    """A backward, or a forward without one, is over: let the ranks compare what they ran (D2)."""
    if len(lane.logs) == 1:
        next(iter(lane.logs.values())).end_step(trained)
    else:
        for log in sorted(lane.logs.values(), key=lambda log: [g.ranks for g in log.groups]):
            log.end_step(trained)


def open_backward(unit: Unit, task: Task) -> None:
    """Gather the unit for its backward and let its modules read the parameters forward used."""
    if unit.task is not None and unit.task.alive:
        hold(unit, Hold.BACKWARD)
        wait_gathered(unit)
        return
    unit.task = task
    task.units.append(unit)
    hold(unit, Hold.BACKWARD)
    drop(unit, Hold.PREFETCH)
    if torch.is_grad_enabled():
        # A graph over this backward is being created: a later backward reads the weights again.
        keep(unit, Hold.RETAINED)
    wait_gathered(unit)
    if unit.live is not None and not unit.calls:
        install(unit, unit.live.tensors)
    order = unit.lane.backward_order
    if order.is_open:
        order.visit(unit)
    else:
        order.begin(unit)
        if order.place is None:
            order.assume(unit.lane.forward_order.visited())
    if unit.prefetch.backward_moment == "pre":
        prefetch_backward(unit)


def close_backward(unit: Unit, ended: bool = False) -> None:
    """The unit's gradients have arrived, or autograd's run ended: back to leaves, and release."""
    if unit.live is not None:
        unit.live.pass_id = 0
        if not unit.calls:
            install_leaves(unit)
    unit.task = None
    forget_inner(unit)
    switches = unit.switches
    if switches.reshard_after_backward and (switches.sync or not switches.keep_over_microbatches):
        drop(unit, Hold.KEPT)
    elif Hold.BACKWARD in unit.holds:
        keep(unit, Hold.KEPT)
    drop(unit, Hold.BACKWARD)
    if unit.prefetch.backward_moment == "post" and not ended:
        prefetch_backward(unit)


def prefetch_forward(unit: Unit, order: Order) -> None:
    """Gather ahead what is expected behind ``unit`` in forward, or what the user listed."""
    listed = unit.forward_list
    depth = unit.prefetch.forward if listed is None else len(listed)
    if depth:
        prefetch(unit.lane, order.ahead(depth) if listed is None else existing(listed), depth)


def prefetch_backward(unit: Unit) -> None:
    """Gather ahead what is expected behind ``unit`` in backward, or what the user listed."""
    listed, lane = unit.backward_list, unit.lane
    depth = unit.prefetch.backward if listed is None else len(listed)
    if depth:
        units = lane.backward_order.ahead(depth) if listed is None else existing(listed)
        prefetch(lane, units, depth)


def existing(refs: Iterable[weakref.ref[Unit]]) -> list[Unit]:
    return [unit for ref in refs if (unit := ref()) is not None]


def prefetch(lane: Lane, units: Iterable[Unit], limit: int | None = None) -> None:
    """Start gathering ``units``, while fewer than ``limit`` are gathered ahead and not used yet.

    The limit bounds memory without blocking the host: where there are streams, a gather is queued
    behind the free of an earlier unit on the gather stream.
    """
    lane.prefetched = [unit for unit in lane.prefetched if Hold.PREFETCH in unit.holds]
    for unit in units:
        if limit is not None and len(lane.prefetched) >= limit:
            break
        if not unit.holds:
            hold(unit, Hold.PREFETCH)
            lane.prefetched.append(unit)


def carry_prefetched(lane: Lane) -> None:
    """A forward ended: what is still gathered ahead is for the next, if it is not changed first."""
    for unit in lane.prefetched:
        if Hold.PREFETCH in unit.holds:
            lane.carried.append(unit)
            for bucket in unit.gathered:
                bucket.stamp = stamp_of(bucket)


def use_carried(unit: Unit) -> None:
    """The unit was gathered ahead in an earlier forward: gather again if it changed since."""
    unit.lane.carried.remove(unit)
    if Hold.PREFETCH in unit.holds:
        wait_gathered(unit)
        refresh_stale(unit)


def drop_prefetched(lane: Lane) -> None:
    """Release what was gathered ahead and not used."""
    for unit in lane.prefetched:
        drop(unit, Hold.PREFETCH)
    lane.prefetched.clear()
    lane.carried.clear()


def recover(lane: Lane) -> None:
    """Return every unit to rest after a step that ended with an exception; gradients that were
    complete stay, those under way are dropped."""
    for reduction in lane.reductions:
        finish_reduce(reduction)
    lane.reductions.clear()
    lane.landing.clear()
    lane.tasks.clear()
    lane.active.clear()
    lane.prefetched.clear()
    lane.carried.clear()
    for order in (lane.forward_order, lane.backward_order, lane.eval_order):
        if order is not None:
            order.forget()
    lane.eval_order = None
    for unit in list(lane.units):
        unit.calls = 0
        unit.finished.clear()
        unit.task = None
        unit.live = None
        forget_inner(unit)
        for reason in tuple(unit.holds - {Hold.USER}):
            drop(unit, reason)
        install_leaves(unit)
        for bucket in unit.buckets:
            if bucket.packed and unit.switches.sync:
                discard_packed(bucket)


def discard_packed(bucket: Bucket) -> None:
    """Forget gradients that were packed and not reduced."""
    bucket.packed = False
    assert bucket.grads is not None
    bucket.grads.flat.untyped_storage().resize_(0)
