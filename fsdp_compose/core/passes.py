"""Passes: what a forward or backward does to the units it reaches, and what its end settles.

A unit's ``full`` is freed before its reduction allocates, so that at most two gathered units, one
unit's gradients and one flat buffer exist at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from fsdp_compose.base.policy import Prefetch
from fsdp_compose.base.torch_private import (
    graph_is_kept,
    graph_task_id,
    on_backward_end,
    raw,
    untraced,
)
from fsdp_compose.core.bucket import Bucket, Phase
from fsdp_compose.core.gathering import (
    drop,
    forget_inner,
    hold,
    install,
    install_leaves,
    keep,
    refresh_handed_out,
    refresh_stale,
    stamp_of,
    wait_gathered,
)
from fsdp_compose.core.guards.kept_views import guard_everywhere
from fsdp_compose.core.guards.replicas import verify_units
from fsdp_compose.core.guards.saved_tensors import recover_shields
from fsdp_compose.core.order import Order
from fsdp_compose.core.records import Hold
from fsdp_compose.core.reducing import (
    discard_packed,
    drain,
    finish_reduce,
    land,
    requires_grad,
    start_reduce,
)
from fsdp_compose.core.state import Lane, Task, Unit, unit_of


def begin_forward_pass(lane: Lane) -> None:
    """An outermost forward starts: clear what a failed step left, then count it."""
    if lane.tasks and not any(task.alive for task in lane.tasks.values()):
        recover(lane)
    if lane.retained:
        drop_unread(lane)
    lane.pass_id += 1
    _start_over_if_ranks_differed(lane)


def _start_over_if_ranks_differed(lane: Lane) -> None:
    """What each rank gathered ahead and recorded may differ, and so would what follows from it."""
    disagreements = sum(log.epoch for log in lane.logs.values())
    if disagreements == lane.disagreements:
        return
    lane.disagreements = disagreements
    recover(lane)
    lane.forward_order, lane.backward_order = Order(), Order()
    for unit in lane.units:
        unit.eval_order = Order()


def running_task(unit: Unit) -> Task:
    """The autograd run under way, which has reached ``unit``; known to the lane from then on."""
    lane, task_id = unit.lane, graph_task_id()
    lane.reached.update(unit.logs)
    task = lane.tasks.get(task_id)
    if task is not None:
        return task
    if lane.tasks and not any(task.alive for task in lane.tasks.values()):
        recover(lane)
        lane.reached.update(unit.logs)
    outermost = not lane.tasks
    if outermost:
        _start_over_if_ranks_differed(lane)
    task = lane.tasks[task_id] = Task(task_id)
    lane_ref = weakref.ref(lane)

    @untraced
    def callback() -> None:
        owner = lane_ref()
        if owner is not None:
            end_task(owner, task_id)

    def failed(ref: object) -> None:
        owner = lane_ref()
        if owner is not None and task_id in owner.tasks:
            show_leaves(owner.tasks[task_id])

    task.callback = weakref.ref(callback, failed)
    on_backward_end(callback)
    if outermost:
        drop_prefetched(lane)
    return task


def show_leaves(task: Task) -> None:
    """The run ended with an exception: what follows, such as ``zero_grad``, is for the leaves.

    The rest of the clean-up communicates and waits for the next pass, in ``recover``.
    """
    for unit in task.units:
        if not unit.calls:
            install_leaves(unit)


def end_task(lane: Lane, task_id: int) -> None:
    """An autograd run ended: reduce what is left, hand out gradients, release every unit."""
    task = lane.tasks.pop(task_id)
    with torch.no_grad():  # as in the pass itself, for the hooks of users
        for bucket in task.packed:
            if bucket.packed and unit_of(bucket).switches.sync:
                drain(lane)
                lane.reductions.append(start_reduce(bucket))
        drain(lane)
        land(lane)
        for mirror in task.mirrors:
            mirror.settle(None)
    for unit in task.units:
        if unit.task is task or unit.task is None:
            close_backward(unit, ended=True)
    for unit, reader in task.consumed:
        unit.readers.discard(reader)
    if lane.retained:
        drop_unread(lane)
    if not lane.tasks:
        drop_prefetched(lane)
        if len(lane.logs) > len(lane.reached):
            _reach_frozen(lane)
        lane.forward_order.close()
        lane.backward_order.close()
        end_step(lane, trained=True)
    if any(log.is_debugging for log in lane.logs.values()):
        verify_units(dict.fromkeys(task.units), "debug mode, after a backward")
    if len(lane.mesh_sizes) > 1:
        _check_divisors(task)


def _check_divisors(task: Task) -> None:
    """Units over different numbers of ranks: only the user knows whose data their gradients see."""
    found: dict[int, Unit] = {}
    with raw():
        for unit in task.units:
            if unit.switches.divide_factor is None:
                for bucket in unit.buckets:
                    if any(requires_grad(entry.param) for entry in bucket.entries):
                        found.setdefault(bucket.mesh.size, unit)
    if len(found) > 1:
        (most, wide), (few, narrow) = max(found.items()), min(found.items())
        raise RuntimeError(
            f"a backward averaged gradients over different numbers of ranks: those of unit "
            f"{wide.name!r} over {most}, of unit {narrow.name!r} over {few}. Say what unit "
            f"{narrow.name!r} is divided by, after fully_shard: if it holds experts, whose "
            f"gradients bring the tokens of all {most} ranks, fsdp_compose."
            f"set_gradient_divide_factor(experts, {most}); if the other ranks hold the same "
            f"parameters and see the same data, set_gradient_divide_factor(module, {few}). The "
            "gradients of this backward are to be discarded."
        )


def end_step(lane: Lane, trained: bool) -> None:
    """A backward, or a forward without one, is over: let the ranks compare what they ran (D2).

    Only over the groups of what ran. Ranks that shared a group for another model may be in
    different stages of a pipeline now, and would wait for each other for ever.
    """
    if lane.inspected:
        guard_everywhere(lane)
    reached, lane.reached = lane.reached, set()
    if len(reached) > 1:
        for log in sorted(reached, key=lambda log: [g.ranks for g in log.groups]):
            log.end_step(trained)
    else:
        for log in reached:
            log.end_step(trained)


def _reach_frozen(lane: Lane) -> None:
    """Count units whose forward ran and that no backward will reach among what the step ran."""
    for unit in lane.forward_order.visited():
        live = unit.live
        if live is None or not live.pass_id or not live.trained:
            lane.reached.update(unit.logs)


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
        retain(unit, *unit.nodes)
    refresh_handed_out(unit)
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


def retain(unit: Unit, *readers: Any) -> None:
    """Keep the unit gathered: a graph over its backward is being made, which reads its weights.

    Args:
        readers: each lives at least as long as the graph; see ``consume`` for when it is done.
    """
    keep(unit, Hold.RETAINED)
    unit.readers.update(readers)
    unit.lane.retained.add(unit)


def consume(unit: Unit, reader: Any) -> None:
    """A backward over a graph that ``retain`` was called for reached its end in the unit."""
    if reader in unit.readers and not graph_is_kept():
        running_task(unit).consumed.append((unit, reader))


def drop_unread(lane: Lane) -> None:
    """Release units whose graphs over backward were consumed, or are gone."""
    for unit in list(lane.retained):
        if not unit.readers:
            lane.retained.discard(unit)
            drop(unit, Hold.RETAINED)


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
    listed, policy = unit.forward_list, unit.prefetch
    if listed is not None:
        prefetch(unit.lane, existing(listed), len(listed))
    elif policy.forward:
        prefetch(unit.lane, order.ahead(policy.forward), policy.forward, policy)


def prefetch_backward(unit: Unit) -> None:
    """Gather ahead what is expected behind ``unit`` in backward, or what the user listed."""
    listed, policy, lane = unit.backward_list, unit.prefetch, unit.lane
    if listed is not None:
        prefetch(lane, existing(listed), len(listed))
    elif policy.backward:
        prefetch(lane, lane.backward_order.ahead(policy.backward), policy.backward, policy)


def existing(refs: Iterable[weakref.ref[Unit]]) -> list[Unit]:
    return [unit for ref in refs if (unit := ref()) is not None]


def prefetch(
    lane: Lane, units: Iterable[Unit], limit: int | None = None, policy: Prefetch | None = None
) -> None:
    """Start gathering ``units``, while fewer than ``limit`` are gathered ahead and not used yet.

    The limit bounds memory without blocking the host: where there are streams, a gather is queued
    behind the free of an earlier unit on the gather stream. What ``policy`` has a rule for is asked
    of it.
    """
    lane.prefetched = [unit for unit in lane.prefetched if Hold.PREFETCH in unit.holds]
    room = None if limit is None else max(0, limit - len(lane.prefetched))
    upcoming = list(dict.fromkeys([unit for unit in units if not unit.holds]))[:room]
    if upcoming and policy is not None and policy.rule is not None:
        sizes = [(unit.name, sum(map(gathered_nbytes, unit.gathered))) for unit in upcoming]
        del upcoming[policy.count_ahead(sizes, held_nbytes(lane)) :]
    for unit in upcoming:
        hold(unit, Hold.PREFETCH)
        lane.prefetched.append(unit)


def gathered_nbytes(bucket: Bucket) -> int:
    """What gathering the bucket allocates."""
    return 0 if bucket.in_place else bucket.full_nbytes


def held_nbytes(lane: Lane) -> int:
    """Bytes of gathered parameters on the device now."""
    buckets = {bucket for unit in lane.units if unit.holds for bucket in unit.gathered}
    return sum(gathered_nbytes(b) for b in buckets if b.phase is not Phase.SHARDED)


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


def _return_leaves(unit: Unit) -> None:
    """As ``install_leaves``, but what the user put there stays: for the call that begins
    (``functional_call``), or for ``check_slots`` to see."""
    shown = unit.showing  # what the failed pass put there, if its end did not take it away
    given = [
        (values, name, value)
        for values, name, index in unit.places
        if isinstance(value := values.get(name), torch.Tensor)
        and unit.opened is None
        and not (shown is not None and value is shown[index])
    ]
    install_leaves(unit)
    for values, name, replaced in given:
        values[name] = replaced


def recover(lane: Lane) -> None:
    """Return every unit to rest after a step that ended with an exception; gradients that were
    complete stay, those under way are dropped."""
    for reduction in lane.reductions:
        finish_reduce(reduction)
    lane.reductions.clear()
    lane.landing.clear()
    lane.tasks.clear()
    lane.reached.clear()
    recover_shields(lane)
    lane.active.clear()
    lane.prefetched.clear()
    lane.carried.clear()
    lane.retained.clear()
    for order in (lane.forward_order, lane.backward_order, lane.eval_order):
        if order is not None:
            order.forget()
    lane.eval_order = None
    for unit in list(lane.units):
        unit.calls = 0
        unit.finished.clear()
        unit.task = None
        unit.live = None
        while unit.opened is not None and unit.opened.for_call:
            unit.opened = unit.opened.outer
        forget_inner(unit)
        unit.readers.clear()
        for reason in tuple(unit.holds - {Hold.USER}):
            drop(unit, reason)
        _return_leaves(unit)
        for bucket in unit.buckets:
            if bucket.packed and unit.switches.sync:
                discard_packed(bucket)
