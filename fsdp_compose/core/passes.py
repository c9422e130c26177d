"""Passes: what a forward or backward does to the units it reaches, and what its end settles.

A unit's ``full`` is freed before its reduction allocates, so that at most two gathered units, one
unit's gradients and one flat buffer exist at a time.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from fsdp_compose.base.torch_private import (
    graph_is_kept,
    graph_task_id,
    on_backward_end,
    raw,
    untraced,
)
from fsdp_compose.core.gathering import (
    forget_inner,
    install,
    install_leaves,
)
from fsdp_compose.core.guards.kept_views import guard_everywhere, note_users
from fsdp_compose.core.guards.replicas import verify_units
from fsdp_compose.core.guards.saved_tensors import recover_shields
from fsdp_compose.core.order import Order
from fsdp_compose.core.reducing import (
    Arrival,
    discard_packed,
    finish_reduce,
    land,
    requires_grad,
)
from fsdp_compose.core.schedule import Hold
from fsdp_compose.core.state import Lane, Run, Task, Unit, unit_of


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
    lane.schedule.forward_order, lane.schedule.backward_order = Order(), Order()
    for unit in lane.units:
        unit.expected.eval_order = Order()


def running_task(unit: Unit) -> Task:
    """The autograd run under way, which has reached ``unit``; known to the lane from then on."""
    lane, task_id = unit.lane, graph_task_id()
    lane.reached.update(unit.links.logs)
    task = lane.tasks.get(task_id)
    if task is not None:
        return task
    if lane.tasks and not any(task.alive for task in lane.tasks.values()):
        recover(lane)
        lane.reached.update(unit.links.logs)
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
        lane.schedule.drop_prefetched()
    return task


def show_leaves(task: Task) -> None:
    """The run ended with an exception: what follows, such as ``zero_grad``, is for the leaves.

    The rest of the clean-up communicates and waits for the next pass, in ``recover``.
    """
    for unit in task.units:
        if not unit.run.calls:
            install_leaves(unit)


def end_task(lane: Lane, task_id: int) -> None:
    """An autograd run ended: reduce what is left, hand out gradients, release every unit."""
    task = lane.tasks.pop(task_id)
    with torch.no_grad():  # as in the pass itself, for the hooks of users
        lane.schedule.reduce_rest(
            Arrival(bucket)
            for bucket in task.packed
            if bucket.arriving.packed and unit_of(bucket).switches.sync
        )
        land(lane)
        for mirror in task.mirrors:
            mirror.settle(None)
    for unit in task.units:
        if unit.run.task is task or unit.run.task is None:
            close_backward(unit, ended=True)
    for unit, reader in task.consumed:
        unit.graphs.readers.discard(reader)
    if lane.retained:
        drop_unread(lane)
    if not lane.tasks:
        if len(lane.logs) > len(lane.reached):
            _reach_frozen(lane)
        lane.schedule.end_backward()
        note_users(task.units)
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
    for unit in lane.schedule.forward_order.visited():
        live = unit.run.live
        if live is None or not live.pass_id or not live.trained:
            lane.reached.update(unit.links.logs)


def open_backward(unit: Unit, task: Task) -> None:
    """Gather the unit for its backward and let its modules read the parameters forward used."""
    schedule = unit.lane.schedule
    if unit.run.task is not None and unit.run.task.alive:
        schedule.hold(unit, Hold.BACKWARD)
        schedule.work.wait(unit)
        return
    unit.run.task = task
    task.units.append(unit)
    schedule.enter_backward(unit)
    if torch.is_grad_enabled():
        retain(unit, *unit.graphs.nodes)
    if unit.run.live is not None and not unit.run.calls:
        install(unit, unit.run.live.tensors)
    schedule.look_back(unit)


def retain(unit: Unit, *readers: Any) -> None:
    """Keep the unit gathered: a graph over its backward is being made, which reads its weights.

    Args:
        readers: each lives at least as long as the graph; see ``consume`` for when it is done.
    """
    unit.lane.schedule.keep(unit, Hold.RETAINED)
    unit.graphs.readers.update(readers)
    unit.lane.retained.add(unit)


def consume(unit: Unit, reader: Any) -> None:
    """A backward over a graph that ``retain`` was called for reached its end in the unit."""
    if reader in unit.graphs.readers and not graph_is_kept():
        running_task(unit).consumed.append((unit, reader))


def drop_unread(lane: Lane) -> None:
    """Release units whose graphs over backward were consumed, or are gone."""
    for unit in list(lane.retained):
        if not unit.graphs.readers:
            lane.retained.discard(unit)
            lane.schedule.drop(unit, Hold.RETAINED)


def close_backward(unit: Unit, ended: bool = False) -> None:
    """The unit's gradients have arrived, or autograd's run ended: back to leaves, and release."""
    show_leaves_after_backward(unit)
    unit.lane.schedule.leave_backward(unit, ended)


def show_leaves_after_backward(unit: Unit) -> None:
    """The unit's backward is over: its modules hold their sharded parameters again."""
    if unit.run.live is not None:
        unit.run.live.pass_id = 0
        if not unit.run.calls:
            install_leaves(unit)
    unit.run.task = None


def _return_leaves(unit: Unit) -> None:
    """As ``install_leaves``, but what the user put there stays: for the call that begins
    (``functional_call``), or for ``check_slots`` to see."""
    shown = unit.run.showing  # what the failed pass put there, if its end did not take it away
    given = [
        (values, name, value)
        for values, name, index in unit.links.places
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
    lane.retained.clear()
    units = list(lane.units)
    lane.schedule.fail(units)
    for unit in units:
        unit.run = Run(showing=unit.run.showing)
        while unit.opened is not None and unit.opened.for_call:
            unit.opened = unit.opened.outer
        forget_inner(unit)
        unit.graphs.readers.clear()
        _return_leaves(unit)
        for bucket in unit.buckets:
            if bucket.arriving.packed and unit.switches.sync:
                discard_packed(bucket)
