"""Packs gradients into a flat buffer, reduces it, and sets ``.grad`` of the parameters.

A reduction is finished before the next gradients are packed, so that one flat buffer exists at a
time. The buffer is freed only after the reduction that reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

import torch

from fsdp_compose.base.attributes import get_grad
from fsdp_compose.base.loops import exhaust
from fsdp_compose.base.streams import copy_to_host
from fsdp_compose.base.torch_private import raw
from fsdp_compose.buckets.bucket import Arriving, Bucket, Entry
from fsdp_compose.buckets.gradients import add_gradients, close_grad_buffer, cut, pack, sum_in_tree
from fsdp_compose.buckets.issue import is_unseen, issue
from fsdp_compose.buckets.reduce import (
    plan_scatter,
    reduce_purpose,
    restore_dtype,
    start_scatter,
    sum_over_replicas,
)
from fsdp_compose.comm import collectives as comm
from fsdp_compose.comm import waiting
from fsdp_compose.comm.grad_bucket import GradBucket, run_hook
from fsdp_compose.core.guards.added_gradients import note_added
from fsdp_compose.core.guards.compared_reductions import note_reduction
from fsdp_compose.core.guards.inner_gradients import carry_gradients, show_stand_ins
from fsdp_compose.core.guards.parted_gradients import meet_leaves, tell_reduced
from fsdp_compose.core.guards.scope_parameters import at_rest
from fsdp_compose.core.guards.used_parameters import unite_early
from fsdp_compose.core.state import Engine, Landing, Reduction, unit_of
from fsdp_compose.sharded import replace_grad, run_hooks_and_copy, tag


@dataclass(eq=False, slots=True)
class Arrival:
    """Gradients of a bucket's entries that arrived together.

    Attributes:
        bucket: the one whose flat buffer they belong in.
        grads: by entry, in full; None where there is none.
        is_whole: there is no None among ``grads``.
        trained: bits of the entries that could have one.
        node: the autograd node they arrived at; None: in a compiled graph, or packed before.
    """

    bucket: Bucket
    grads: Sequence[torch.Tensor | None] = ()
    is_whole: bool = False
    trained: int = 0
    node: Any = None


def start_reduce(bucket: Bucket, unites: bool = True, begins: bool = True) -> Reduction:
    """Start averaging the packed gradients over the ranks; ``finish_reduce`` returns them.

    Args:
        unites: also find out which of the parameters any rank used.
        begins: False: only prepare it, for a caller that starts several together.
    """
    assert bucket.grads is not None
    unit = unit_of(bucket)
    arriving, mesh, streams = bucket.arriving, bucket.mesh, unit.engine.streams
    if bucket in unit.links.reduce_events:
        note_reduction(unit, bucket)
    used = comm.Flags(arriving.used, len(bucket.entries), arriving.trained)
    arriving.packed, arriving.used, arriving.trained, arriving.joined = False, 0, 0, False
    bucket.views.sent = None  # no further microbatch reads these weights
    scale = 1.0 / (unit.switches.divide_factor or mesh.divisor)
    reduction = Reduction(unit, bucket, None, scale, used)
    if unites and bucket.users.caller is not None:
        unite_early(bucket, reduction.used)
    if begins and is_unseen(streams.reduce):
        _begin(reduction)
    elif begins:
        work = partial(_begin, reduction)
        issue(streams, streams.reduce, "reduce", bucket, bucket.grads.nbytes, work)
        _watch(reduction)
    return reduction


def start_together(buckets: Sequence[Bucket]) -> list[Reduction]:
    """As ``start_reduce`` of each bucket of a unit, in one call where the transport has one.

    Empty, with nothing started, where messages between pairs of ranks go ahead of a reduction, or a
    hook makes it.
    """
    plans = [p for p in map(plan_scatter, buckets) if p is not None]
    if len(plans) < len(buckets) or any(unit_of(b).switches.comm_hook for b in buckets):
        return []
    reductions = [start_reduce(bucket, begins=False) for bucket in buckets]
    streams, nbytes = reductions[0].unit.engine.streams, [p.whole.nbytes for p in plans]

    def work() -> None:
        for bucket, size in zip(buckets[1:], nbytes[1:], strict=True):  # issue names the first
            bucket.log("reduce", size)
        for reduction, scatter in zip(reductions, comm.start_reduces(plans), strict=True):
            reduction.scatter = scatter
        if streams.reduce is not None:
            for reduction in reductions:
                reduction.result = _combine(reduction)
                reduction.done = streams.record(streams.reduce)

    issue(streams, streams.reduce, "reduce", buckets[0], nbytes[0], work)
    exhaust(map(_watch, reductions))
    return reductions


def _watch(reduction: Reduction) -> None:
    """Have the time watched that an accelerator takes for it."""
    if reduction.done is not None:
        bucket = reduction.bucket
        waiting.watch_mark(reduce_purpose(bucket), bucket.mesh.shard.ranks, reduction.done)


def _begin(reduction: Reduction) -> None:
    """Start summing over the ranks; where there are streams, on the current one, to the end."""
    bucket, unit = reduction.bucket, reduction.unit
    assert bucket.grads is not None
    hook, plan, streams = unit.switches.comm_hook, bucket.grads.plan, unit.engine.streams
    if hook is None and plan is not None:
        reduction.scatter = plan.start()
    elif hook is None:
        reduction.scatter, reduction.scale = start_scatter(bucket, reduction.scale, reduction.used)
    if hook is not None or streams.reduce is not None:
        reduction.result = _combine(reduction)
        reduction.done = streams.record(streams.reduce)


def reduce_apart(
    bucket: Bucket, grads: Sequence[torch.Tensor | None], trained: int
) -> torch.Tensor:
    """Average ``grads`` over all ranks now, without what waits for a later reduction."""
    drain(unit_of(bucket).engine)  # a reduction under way may read the bucket's buffer
    switches, buffer, kept = unit_of(bucket).switches, bucket.grads, bucket.arriving
    all_reduces, switches.all_reduce = switches.all_reduce, True
    bucket.grads, bucket.arriving = None if kept.packed else buffer, Arriving(trained=trained)
    try:
        pack(bucket, grads)
        return finish_reduce(start_reduce(bucket, unites=False))
    finally:
        bucket.arriving, switches.all_reduce = kept, all_reduces
        if kept.packed:
            bucket.grads = buffer


def start_all_reduce(bucket: Bucket) -> Reduction:
    """Start summing over the replicas the gradients that only the shard group has reduced yet."""
    assert bucket.arriving.partial is not None
    unit, arriving = unit_of(bucket), bucket.arriving
    used = comm.Flags(arriving.used, len(bucket.entries), arriving.trained)
    arriving.used, arriving.trained, arriving.joined = 0, 0, False
    reduction = Reduction(unit, bucket, None, 1.0, used)
    unite_early(bucket, reduction.used)
    work = partial(_all_reduce, reduction)
    nbytes = bucket.arriving.partial.nbytes
    issue(unit.engine.streams, unit.engine.streams.reduce, "all-reduce", bucket, nbytes, work)
    bucket.arriving.partial = None
    return reduction


def _all_reduce(reduction: Reduction) -> None:
    """Sum over the replicas; where there are streams, on the current one."""
    bucket, streams = reduction.bucket, reduction.unit.engine.streams
    assert bucket.arriving.partial is not None
    grad = sum_over_replicas(bucket, bucket.arriving.partial, reduction.used)
    reduction.result = restore_dtype(grad, bucket.dtypes.grad)
    reduction.done = streams.record(streams.reduce)


def _combine(reduction: Reduction) -> torch.Tensor:
    """This rank's sharded gradient of the bucket, over both mesh axes, as ``.grad`` is kept."""
    bucket, switches = reduction.bucket, reduction.unit.switches
    summed, kept = bucket.dtypes.summed, bucket.dtypes.grad
    if switches.comm_hook is not None:
        grad = _run_comm_hook(reduction).to(summed, copy=True)  # the hook may keep its result
        if bucket.arriving.partial is not None:  # from backwards before the hook was registered
            reduction.added, bucket.arriving.partial = bucket.arriving.partial, None
            grad = grad + sum_over_replicas(bucket, reduction.added, reduction.used)
        return restore_dtype(grad, kept)
    assert reduction.scatter is not None
    grad = reduction.scatter.result(summed, 1.0 if bucket.mesh.microbatches else reduction.scale)
    if bucket.arriving.partial is not None:
        grad += bucket.arriving.partial
        reduction.added, bucket.arriving.partial = bucket.arriving.partial, None
    if bucket.mesh.replicate_axis.size > 1:
        if not switches.all_reduce:
            bucket.arriving.partial = grad
        else:
            grad = sum_over_replicas(bucket, grad, reduction.used)
    return restore_dtype(grad, kept) if summed != kept else grad


def _run_comm_hook(reduction: Reduction) -> torch.Tensor:
    """This rank's part of the gradients, as the user's hook reduced them."""
    unit, bucket, hook = reduction.unit, reduction.bucket, reduction.unit.switches.comm_hook
    assert hook is not None and bucket.grads is not None
    key = f"{unit.name}/{unit.buckets.index(bucket) if bucket in unit.buckets else 'tied'}"
    flat, mesh = bucket.grads.flat, bucket.mesh
    given = GradBucket(
        unit.name, key, flat, bucket.grads.parts or [flat],
        mesh.gather_axis, mesh.replicate_axis, reduction.scale, bucket.stored.dtype,
        bucket.users.caller,
    )  # fmt: skip
    return run_hook(hook, unit.switches.comm_state, given, bucket.mesh.axes is not None)


def finish_reduce(reduction: Reduction) -> torch.Tensor:
    """Wait for a reduction and free the buffer it read."""
    bucket, streams = reduction.bucket, reduction.unit.engine.streams
    if reduction.result is None:
        reduction.result = _combine(reduction)
    if reduction.done is not None:
        streams.wait(reduction.done)
    if bucket.grads is None:
        return reduction.result  # the buffer is gone where parameters moved after a failure
    if bucket.mesh.gather_axis.size == 1:
        bucket.grads = None  # the result may be the buffer itself
    elif not bucket.arriving.packed:
        # Not before the current stream has waited for the reduction that reads it.
        close_grad_buffer(bucket)
    return reduction.result


def drain(engine: Engine) -> None:
    """Finish every reduction under way, and set or add to ``.grad`` of its parameters."""
    while engine.reductions:
        reduction = engine.reductions.pop(0)
        grad, bucket = finish_reduce(reduction), reduction.bucket
        total = None if bucket.arriving.partial is not None else grad
        if total is not None and bucket.mesh.microbatches is not None:
            total = sum_in_tree(bucket, grad, reduction.scale)
            engine.awaiting.add(bucket)  # for the count of its steps
        if total is None:
            _note_waiting(reduction)
        else:
            _deliver(engine, reduction, total)


def _deliver(engine: Engine, reduction: Reduction, grad: torch.Tensor) -> None:
    """Set a reduced gradient, or start copying it to the host, for which nothing waits here."""
    bucket, streams, last = reduction.bucket, engine.streams, reduction.unit.switches.last_backward
    offload, arriving, is_added = bucket.offload, bucket.arriving, bool(bucket.mesh.microbatches)
    if not offload.shards and (last or not offload.grads):
        if arriving.waiting is not None:
            grad += arriving.waiting.to(grad.device, non_blocking=True)
            arriving.waiting = None
        assign(reduction, grad)
        return
    if (waiting := arriving.waiting) is not None and waiting.device == grad.device:
        grad, arriving.waiting, is_added = waiting.add_(grad), None, True
    if not (last or offload.grads):
        arriving.waiting = grad
        _note_waiting(reduction)
        return
    with (streams.on if is_added else streams.beside)(streams.reduce):  # behind that sum
        host, reduction.result = copy_to_host(grad, offload.pin_memory), None
        mark = streams.record(streams.reduce)
    if mark and (is_added or bucket.mesh.gather_axis.size == 1):
        streams.hold(grad, mark)  # it may be memory of the current stream
    engine.landing.append(Landing(reduction, host, last, mark))


def _note_waiting(reduction: Reduction) -> None:
    """What was reduced waits outside ``.grad`` for a later backward."""
    bucket = reduction.bucket
    bucket.arriving.used |= reduction.used.bits
    bucket.arriving.trained |= reduction.used.possible
    bucket.residence.awaits = True
    reduction.unit.engine.awaiting.add(bucket)


def land(engine: Engine) -> None:
    """Have the host wait for the gradients that were copied to it, and set them."""
    while engine.landing:
        landing = engine.landing.pop(0)
        grad, arriving = landing.grad, landing.reduction.bucket.arriving
        if landing.mark is not None:
            landing.mark.synchronize()
            engine.streams.held.clear()
        if arriving.waiting is not None:
            grad, arriving.waiting = arriving.waiting.add_(grad), None
        if landing.is_last:
            assign(landing.reduction, grad)
        else:
            arriving.waiting = grad
            _note_waiting(landing.reduction)


def assign(reduction: Reduction, flat: torch.Tensor) -> None:
    """Set or add to ``.grad`` of the bucket's parameters, then run their hooks."""
    unit, bucket, used = reduction.unit, reduction.bucket, reduction.used
    mirror, is_hooked = bucket.history.mirror, bucket.residence.is_hooked
    if unit.run.stand_ins:
        carry_gradients(unit)
    if mirror is not None:
        mirror.share_gradients()
    entries, params, grads = bucket.entries, bucket.views.params, cut(bucket, flat)
    if used.bits != bucket.views.every:
        flags = [used.bits >> i & 1 for i in range(used.count)]
        entries, params = list(compress(entries, flags)), list(compress(params, flags))
        grads = list(compress(grads, flags))
    reduced = entries
    with raw():
        if is_hooked:
            entries, params, grads = meet_leaves(unit, entries, grads)
        were_there = add_gradients(params, grads)
    if were_there is not None:
        note_added(entries, were_there)
    if mirror is not None:
        mirror.share_gradients(flat, are_set=were_there is None or not all(were_there))
    if is_hooked:
        _run_accumulated_hooks(entries)
    if unit.post_reduce_hooks and reduced:
        tell_reduced(unit, reduced)
    if mirror is not None:
        mirror.share_gradients()  # a hook may have stepped an optimizer and cleared its gradients
    if unit.run.calls:
        show_stand_ins(unit)


def set_graph_gradients(results: dict[Entry, torch.Tensor]) -> None:
    """Set or add to ``.grad`` gradients with a graph over them, then run the hooks."""
    with raw(), torch.enable_grad():
        note_added(list(results), [get_grad(entry.param) is not None for entry in results])
        for entry, result in results.items():
            grad = run_hooks_and_copy(entry.spec.hooks, tag(result, entry.spec))
            previous = get_grad(entry.param)
            total = grad if previous is None else tag(previous + grad, entry.spec)
            replace_grad(entry.param, total)
    _run_accumulated_hooks(results)


def _run_accumulated_hooks(entries: Iterable[Entry]) -> None:
    for entry in entries:
        for hook in tuple((entry.spec.hooks.accumulated or {}).values()):
            with at_rest([entry]):
                hook.deliver(entry.held)
