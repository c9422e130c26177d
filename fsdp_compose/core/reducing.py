"""Packs gradients into a flat buffer, reduces it, and sets ``.grad`` of the parameters.

A reduction is finished before the next gradients are packed, so that one flat buffer exists at a
time. The buffer is freed only after the reduction that reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, repeat
from operator import is_
from typing import Any

import torch

from fsdp_compose.base.loops import exhaust
from fsdp_compose.base.parts import cut_by_rank
from fsdp_compose.base.streams import copy_to_host
from fsdp_compose.base.torch_private import raw
from fsdp_compose.buckets.bucket import Bucket, Entry, GradBuffer
from fsdp_compose.buckets.gradients import close_grad_buffer, cut, pack, sum_slots
from fsdp_compose.buckets.issue import is_unseen, issue
from fsdp_compose.comm import collectives as comm
from fsdp_compose.comm import waiting
from fsdp_compose.comm.grad_bucket import GradBucket, run_hook
from fsdp_compose.core.guards.collective_log import code_of
from fsdp_compose.core.guards.scope_parameters import at_rest
from fsdp_compose.core.guards.used_parameters import unite_early
from fsdp_compose.core.state import Engine, Landing, Reduction, unit_of
from fsdp_compose.sharded import run_gradient_hooks, tag

_plain: Any = torch.Tensor
# Attributes of a sharded tensor without its own properties, which are slower; use under raw().
get_grad: Callable[[torch.Tensor], torch.Tensor | None] = _plain.grad.__get__
set_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = _plain.grad.__set__
requires_grad: Callable[[torch.Tensor], bool] = _plain.requires_grad.__get__


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


def start_reduce(bucket: Bucket, unites: bool = True) -> Reduction:
    """Start averaging the packed gradients over the ranks; ``finish_reduce`` returns them.

    Args:
        unites: also find out which of the parameters any rank used.
    """
    assert bucket.grads is not None
    unit = unit_of(bucket)
    arriving, mesh, streams = bucket.arriving, bucket.mesh, unit.engine.streams
    if bucket in unit.links.reduce_events:
        events, code, kept = unit.links.reduce_events[bucket]
        number = code if unit.switches.all_reduce else kept
        if arriving.trained != bucket.views.every:
            # Ranks that froze different parameters then send different numbers, which raises.
            number = code_of(number, arriving.trained)
        events.note((number, "reduce", unit.name, "backward"))
    factor, used = unit.switches.divide_factor, comm.Flags(arriving.used, len(bucket.entries))
    arriving.packed, arriving.used, arriving.trained = False, 0, 0
    scale = 1.0 / (mesh.divisor if factor is None else factor)
    reduction = Reduction(unit, bucket, None, scale, used)
    if unites and bucket.users.caller is not None:
        unite_early(bucket, reduction.used)
    if is_unseen(streams.reduce):
        _begin(reduction)
        return reduction
    work = partial(_begin, reduction)
    issue(streams, streams.reduce, "reduce", bucket, bucket.grads.nbytes, work)
    if reduction.done is not None:
        waiting.watch_mark(_purpose_of(reduction), mesh.gather_axis.ranks, reduction.done)
    return reduction


def _begin(reduction: Reduction) -> None:
    """Start summing over the ranks; where there are streams, on the current one, to the end."""
    bucket, unit = reduction.bucket, reduction.unit
    assert bucket.grads is not None
    hook, plan, streams = unit.switches.comm_hook, bucket.grads.plan, unit.engine.streams
    if hook is None:
        reduction.scatter = plan.start() if plan is not None else _scatter(reduction, bucket.grads)
    if hook is not None or streams.reduce is not None:
        reduction.result = _combine(reduction)
        reduction.done = streams.record(streams.reduce)


def _scatter(reduction: Reduction, buffer: GradBuffer) -> comm.ReduceScatter:
    """Start the reduce-scatter of a buffer; the next one of it is planned, where they are alike."""
    bucket, purpose = reduction.bucket, _purpose_of(reduction)
    flat, group, in_tree = buffer.flat, bucket.mesh.gather_axis, bucket.mesh.slots is not None
    # Half precision overflows at 65504: divide before the sum, by half of the factor.
    before = 1.0
    if flat.dtype == torch.float16:
        before = 2.0 ** round(math.log2(reduction.scale) / 2)
        reduction.scale /= before
    elif not in_tree:
        buffer.plan = comm.plan_reduce(flat, buffer.parts, group, purpose)
    if buffer.plan is not None:
        return buffer.plan.start()
    caller, used = bucket.users.caller, reduction.used
    return comm.reduce_scatter_parts(
        flat, buffer.parts, group, purpose, caller, used, before, in_tree
    )


def _purpose_of(reduction: Reduction) -> str:
    return f"reduce gradients of unit {reduction.unit.name!r}"


def reduce_apart(
    bucket: Bucket, grads: Sequence[torch.Tensor | None], trained: int
) -> torch.Tensor:
    """Average ``grads`` over all ranks now, without what waits for a later reduction."""
    switches = unit_of(bucket).switches
    packed, buffer, partial = bucket.arriving.packed, bucket.grads, bucket.arriving.partial
    used, all_reduces = (bucket.arriving.used, bucket.arriving.trained), switches.all_reduce
    if packed:
        bucket.grads, bucket.arriving.packed = None, False
    bucket.arriving.partial, switches.all_reduce, bucket.arriving.trained = None, True, trained
    try:
        pack(bucket, grads)
        return finish_reduce(start_reduce(bucket, unites=False))
    finally:
        bucket.arriving.partial, switches.all_reduce = partial, all_reduces
        bucket.arriving.used, bucket.arriving.trained = used
        if packed:
            bucket.grads, bucket.arriving.packed = buffer, True


def _take_used(bucket: Bucket) -> comm.Flags:
    """Which entries were used since the last reduction, which is then forgotten."""
    flags, bucket.arriving.used = comm.Flags(bucket.arriving.used, len(bucket.entries)), 0
    return flags


def start_all_reduce(bucket: Bucket) -> Reduction:
    """Start summing over the replicas the gradients that only the shard group has reduced yet."""
    assert bucket.arriving.partial is not None
    unit = unit_of(bucket)
    reduction = Reduction(unit, bucket, None, 1.0, _take_used(bucket))
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
    grad = _over_replicas(bucket, bucket.arriving.partial, reduction.used)
    reduction.result = typed(bucket, grad)
    reduction.done = streams.record(streams.reduce)


def _combine(reduction: Reduction) -> torch.Tensor:
    """This rank's sharded gradient of the bucket, over both mesh axes, in the storage dtype."""
    bucket, switches = reduction.bucket, reduction.unit.switches
    real = bucket.dtypes.grad.to_real() if bucket.dtypes.grad.is_complex else bucket.dtypes.grad
    if switches.comm_hook is not None:
        return typed(bucket, _run_comm_hook(reduction).to(real))
    assert reduction.scatter is not None
    grad = reduction.scatter.result(real, 1.0 if bucket.mesh.slots else reduction.scale)
    if bucket.arriving.partial is not None:
        grad += bucket.arriving.partial
        bucket.arriving.partial = None
    if bucket.mesh.replicate_axis.size > 1:
        if not switches.all_reduce:
            bucket.arriving.partial = grad
        else:
            grad = _over_replicas(bucket, grad, reduction.used)
    return typed(bucket, grad) if real != bucket.dtypes.grad else grad


def _over_replicas(bucket: Bucket, grad: torch.Tensor, used: comm.Flags) -> torch.Tensor:
    """This rank's part of the sum over the replicas, each of which summed over its own ranks."""
    mesh, caller, in_tree = bucket.mesh, bucket.users.caller, bucket.mesh.slots is not None
    axis = mesh.replicate_axis
    purpose = f"reduce gradients of unit {bucket.entries[0].spec.unit!r} over the replicas"
    if mesh.axes is None:
        return comm.sum_replicas(grad, axis, purpose, caller, used, in_tree)
    parts = cut_by_rank(grad, axis.size)
    scatter = comm.reduce_scatter_parts(grad, parts, axis, purpose, caller, used, 1.0, in_tree)
    return scatter.result(grad.dtype, 1.0)


def typed(bucket: Bucket, grad: torch.Tensor) -> torch.Tensor:
    """Gradients travel as real numbers; those of complex parameters are complex again here."""
    return torch.view_as_complex(grad.view(-1, 2)) if bucket.stored.dtype.is_complex else grad


def _run_comm_hook(reduction: Reduction) -> torch.Tensor:
    """This rank's part of the gradients, as the user's hook reduced them."""
    unit, bucket, hook = reduction.unit, reduction.bucket, reduction.unit.switches.comm_hook
    assert hook is not None and bucket.grads is not None
    given = GradBucket(
        unit=unit.name,
        key=f"{unit.name}/{unit.buckets.index(bucket) if bucket in unit.buckets else 'tied'}",
        flat=bucket.grads.flat,
        parts=bucket.grads.parts or [bucket.grads.flat],
        shard=bucket.mesh.gather_axis,
        replicate=bucket.mesh.replicate_axis,
        scale=reduction.scale,
        dtype=bucket.stored.dtype,
    )
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
        if total is not None and bucket.mesh.slots is not None:
            total = sum_slots(bucket, grad, reduction.scale)
        if total is None:
            _note_waiting(reduction)
        else:
            _deliver(engine, reduction, total)


def _deliver(engine: Engine, reduction: Reduction, grad: torch.Tensor) -> None:
    """Set a reduced gradient, or start copying it to the host.

    The copy runs on the reduce stream, so neither compute nor the host waits for it.
    """
    last, streams = reduction.unit.switches.last_backward, engine.streams
    offload, arriving = reduction.bucket.offload, reduction.bucket.arriving
    if not offload.shards and (last or not offload.grads):
        if arriving.waiting is not None:
            grad += arriving.waiting.to(grad.device, non_blocking=True)
            arriving.waiting = None
        assign(reduction, grad)
        return
    with streams.beside(streams.reduce):
        if arriving.waiting is not None and arriving.waiting.device == grad.device:
            grad, arriving.waiting = arriving.waiting.add_(grad), None
        if not (last or offload.grads):
            arriving.waiting = grad
            _note_waiting(reduction)
            return
        grad = copy_to_host(grad, offload.pin_memory)
        engine.landing.append(Landing(reduction, grad, last, streams.record(streams.reduce)))


def _note_waiting(reduction: Reduction) -> None:
    """What was reduced waits outside ``.grad`` for a later backward."""
    bucket = reduction.bucket
    bucket.arriving.used |= reduction.used.bits
    bucket.residence.awaits = True


def land(engine: Engine) -> None:
    """Have the host wait for the gradients that were copied to it, and set them."""
    while engine.landing:
        landing = engine.landing.pop(0)
        grad, arriving = landing.grad, landing.reduction.bucket.arriving
        if landing.mark is not None:
            landing.mark.synchronize()
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
    if mirror is not None:
        mirror.reconcile()
    entries, params, grads = bucket.entries, bucket.views.params, cut(bucket, flat)
    if used.bits != bucket.views.every:
        flags = [used.bits >> i & 1 for i in range(used.count)]
        entries, params = list(compress(entries, flags)), list(compress(params, flags))
        grads = list(compress(grads, flags))
    with raw():
        if is_hooked:
            pairs = zip(entries, grads, strict=True)
            grads = [run_gradient_hooks(e.spec.hooks, tag(grad, e.spec)) for e, grad in pairs]
        _add_gradients(params, grads)
    if mirror is not None:
        mirror.join_gradients(flat)
    if is_hooked:
        _run_accumulated_hooks(entries)
    hooks = unit.post_reduce_hooks
    for reduced in tuple(hooks.values()) if hooks and entries else ():
        with at_rest(entries):
            reduced(unit.modules[0](), [entry.held for entry in entries])
    if mirror is not None:
        mirror.reconcile()  # a hook may have stepped an optimizer and cleared its gradients


def _add_gradients(params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
    """Set ``.grad`` where there is none, and add to it where there is."""
    previous = list(map(get_grad, params))
    if all(map(is_, previous, repeat(None))):
        exhaust(map(set_grad, params, grads))
        return
    held: list[torch.Tensor] = []
    added: list[torch.Tensor] = []
    for param, before, grad in zip(params, previous, grads, strict=True):
        if before is None:
            set_grad(param, grad)
        else:
            held.append(before)
            added.append(grad)
    with torch.no_grad():
        torch._foreach_add_(held, added)


def accumulate(results: dict[Entry, torch.Tensor]) -> None:
    """Set or add to ``.grad`` gradients with a graph over them, then run the hooks."""
    with raw(), torch.enable_grad():
        for entry, result in results.items():
            grad = tag(result, entry.spec)
            if entry.spec.hooks.gradient:
                grad = run_gradient_hooks(entry.spec.hooks, grad)
            previous = get_grad(entry.param)
            set_grad(entry.param, grad if previous is None else tag(previous + grad, entry.spec))
    _run_accumulated_hooks(results)


def _run_accumulated_hooks(entries: Iterable[Entry]) -> None:
    for entry in entries:
        for hook in tuple(entry.spec.hooks.accumulated.values()):
            with at_rest([entry]):
                hook.deliver(entry.held)
