"""Begins and ends forward and backward passes, and clears up after one that failed.

A unit's ``full`` is freed before its reduction allocates, so that at most two gathered units, one
unit's gradients and one flat buffer exist at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import torch

from fsdp_compose.base.loops import exhaust
from fsdp_compose.base.streams import is_capturing, join_graph
from fsdp_compose.base.torch_private import (
    graph_is_kept,
    graph_task_id,
    made_at,
    node_will_run,
    running_node,
    untraced,
)
from fsdp_compose.base.torch_stack import on_backward_end
from fsdp_compose.core.gathering import forget_inner, install, install_leaves, release
from fsdp_compose.core.guards.compared_units import did_ranks_differ, forget_orders, reach_frozen
from fsdp_compose.core.guards.divisors import check_divisors
from fsdp_compose.core.guards.inner_gradients import guard_hooks
from fsdp_compose.core.guards.inner_parts import pack_kept
from fsdp_compose.core.guards.kept_views import guard_after_error, guard_everywhere, note_users
from fsdp_compose.core.guards.parted_gradients import add_held, forget_held, tell_late
from fsdp_compose.core.guards.plain_gradients import share_plain_gradients
from fsdp_compose.core.guards.replaced_parameters import return_leaves
from fsdp_compose.core.guards.replicas import verify_units
from fsdp_compose.core.guards.saved_tensors import recover_shields
from fsdp_compose.core.guards.unread_weights import reads_weights
from fsdp_compose.core.guards.waiting_gradients import drop_waiting_gradients
from fsdp_compose.core.guards.weight_versions import end_live, forget_outdated
from fsdp_compose.core.reducing import Arrival, finish_reduce, land, set_graph_gradients
from fsdp_compose.core.schedule import Hold
from fsdp_compose.core.state import Engine, Run, Task, Unit, unit_of


def begin_forward_pass(engine: Engine) -> None:
    """Begin an outermost forward: clear what a failed step left, then count the pass."""
    clear_failed_step(engine)
    drop_unread(engine)
    engine.pass_id += 1


def clear_failed_step(engine: Engine) -> None:
    """Clear what a backward that failed left; after ranks differed, the recorded orders too."""
    differed = did_ranks_differ(engine)
    if differed or engine.has_failed:
        recover(engine)
    if differed:
        forget_orders(engine)


def running_task(unit: Unit) -> Task:
    """The autograd run that has reached ``unit``; a new task if it is the run's first unit."""
    engine, task_id = unit.engine, graph_task_id()
    task = engine.tasks.get(task_id)
    if task is None and (not engine.tasks or engine.has_failed):
        clear_failed_step(engine)
    engine.reached.update(unit.links.logs)
    if task is not None:
        return task
    outermost, task = not engine.tasks, Task(task_id, graph_is_kept())
    engine_ref = weakref.ref(engine)

    @untraced
    def callback() -> None:
        if (owner := engine_ref()) is not None:
            end_task(owner, task_id)

    def failed(ref: object) -> None:
        if (owner := engine_ref()) is not None and task_id in owner.tasks:
            abandon_task(owner, owner.tasks[task_id])

    task.callback = weakref.ref(callback, failed)
    engine.tasks[task_id] = task  # alive, as a second model's thread may look now
    on_backward_end(callback)
    if outermost:
        engine.schedule.drop_prefetched()
    return task


def abandon_task(engine: Engine, task: Task) -> None:
    """Put the leaves back after a run that failed, and keep none of its units, as ``tasks`` did."""
    engine.tasks[task.id] = Task(task.id, False)  # for ``recover``, which communicates
    for unit in task.units:
        if not unit.run.calls:
            install_leaves(unit)
        unit.run.task = None if unit.run.task is task else unit.run.task
    engine.schedule.prefetched.clear()  # each is released by ``recover``, or when it is used


def end_task(engine: Engine, task_id: int) -> None:
    """After an autograd run: reduce what is left, set the gradients, release every unit."""
    task = engine.tasks.pop(task_id)
    try:
        pack_kept(task)
        # As in the pass itself, for hooks; a device's thread has a grad mode of its own.
        with torch.set_grad_enabled(bool(task.results)):
            engine.schedule.reduce_rest(
                Arrival(bucket)
                for bucket in task.packed
                if bucket.arriving.packed and unit_of(bucket).switches.sync
            )
            land(engine)
            set_graph_gradients(add_held(engine, task))
            tell_late(task)
            # The outermost backward shares those of units that did not run, too.
            share_plain_gradients(task.units if engine.tasks else engine.units)
    except BaseException:
        abandon_task(engine, task)
        raise
    for unit in [unit for unit in task.open if unit.run.task in (task, None)]:
        close_backward(unit, ended=True)
    for unit in engine.retained if task.consumed else ():
        unit.graphs.readers.difference_update(task.consumed)
    drop_unread(engine)
    if engine.tasks:
        if task.units:
            engine.schedule.backward_order.note_inner(None)
    else:
        if len(engine.logs) > len(engine.reached):
            reach_frozen(engine)
        engine.schedule.end_backward()
        join_graph(engine.streams)
        note_users(task.units)
        end_step(engine, trained=True)  # which raises where other ranks have skipped the step
        if any(log.is_debugging for log in engine.logs.values()) and not is_capturing():
            verify_units(dict.fromkeys(task.units), "debug mode, after a backward")
    if len(engine.mesh_sizes) > 1:
        check_divisors(task)


def end_step(engine: Engine, trained: bool) -> None:
    """After a backward, or a forward without one: the ranks compare what they ran.

    They compare over the groups of the units that ran: ranks that share a group of another model
    may be in different stages of a pipeline now, and would wait for each other for ever.
    """
    if engine.inspected:
        guard_everywhere(engine)
    engine.wait_for_host_reads()
    reached, engine.reached = engine.reached, set()
    logs = [log for log in engine.logs.values() if log in reached]
    for log in sorted(logs, key=lambda log: log.place):  # in the same order on every rank
        log.end_step(trained)


def note_opened(unit: Unit, task: Task) -> None:
    """Have the unit closed when ``task`` ends, if not before."""
    task.units.append(unit)
    task.open[unit] = running_node()


def open_backward(unit: Unit, task: Task) -> None:
    """Gather the unit for its backward, and show its modules the parameters of its forward."""
    schedule, run = unit.engine.schedule, unit.run
    if run.task is not None and run.task.alive:
        return  # it is open, and held until its gradients arrive or its task ends
    run.task = task
    note_opened(unit, task)
    if unit.graphs.unread and not reads_weights(unit):
        return
    schedule.enter_backward(unit)
    if torch.is_grad_enabled():
        retain(unit, *_list_readers(unit))
    if (live := run.live) is not None and not run.calls:
        node = not task.asks_all and live.trained and live.tensors[live.trained[0]].grad_fn
        if node and node_will_run(node):
            task.asks_all = run.chosen is None and task.units == [unit]
        elif node and made_at(node) < made_at(running_node()):
            task.unasked[unit] = made_at(node)  # which no recomputation has made
        install(unit, live.tensors)
        if unit.checks.watch is not None and any(unit.checks.watch.backward_hooks):
            guard_hooks(unit)
    schedule.look_back(unit)


def _list_readers(unit: Unit) -> list[Any]:
    """What lives as long as a graph over the unit's backward: nodes that this backward will reach.

    Those of other units too, for whose gradients frozen weights are read. Where there are none, as
    for plain parameters inside a frozen unit, the unit stays gathered until its next forward.
    """
    nodes = [node for other in list(unit.engine.units) for node in tuple(other.graphs.nodes)]
    own = [node for node in unit.graphs.nodes if not node.is_spent]  # some rank may keep old ones
    return [*own, *filter(node_will_run, nodes)] or [*filter(None, [unit.run.live])]


def retain(unit: Unit, *readers: Any) -> None:
    """Keep the unit gathered: a graph over its backward is being made, which reads its weights.

    It ends when ``readers``, which live at least as long as the graph, are gone or consumed.
    """
    unit.engine.schedule.keep(unit, Hold.RETAINED)
    unit.graphs.readers.update(readers)
    unit.engine.retained.add(unit)


def consume(unit: Unit, reader: Any) -> None:
    """Remember that a backward has read the weights for a graph that ``retain`` was called for."""
    if reader in unit.graphs.readers and not graph_is_kept():
        running_task(unit).consumed.append(reader)


def drop_unread(engine: Engine) -> None:
    """Release units whose graphs over backward were run, or were deleted."""
    for unit in list(engine.retained) if engine.retained else ():
        forget_outdated(unit)
        if not unit.graphs.readers:
            engine.retained.discard(unit)
            engine.schedule.drop(unit, Hold.RETAINED)


def close_backward(unit: Unit, ended: bool = False) -> None:
    """After the unit's backward: put the sharded parameters back and release the unit."""
    show_leaves_after_backward(unit)
    unit.engine.schedule.leave_backward(unit, ended)


def show_leaves_after_backward(unit: Unit) -> None:
    """After the unit's backward: put the sharded parameters back into its modules."""
    run = unit.run
    if run.live is not None:
        run.live.pass_id = 0
        if not run.calls:
            install_leaves(unit)
    if run.task is not None:
        del run.task.open[unit]
        run.task = None


def recover(engine: Engine, restored: Collection[Unit] = ()) -> None:
    """After an exception: release every unit and clear its run.

    A backward that failed drops what waits for a later reduction: its own gradients are among it,
    and clearing ``.grad`` does not reach it. A forward that failed has added nothing.
    """
    differed = did_ranks_differ(engine)
    drops = differed or bool(engine.tasks or engine.reductions)
    # Where ranks differed, others take part in no reduction of this rank any more.
    exhaust(map(finish_reduce, () if differed else engine.reductions))
    engine.reductions.clear()
    engine.landing.clear()
    engine.wait_for_host_reads()
    engine.tasks.clear()
    engine.reached.clear()
    forget_held(engine)
    recover_shields(engine)
    engine.retained.clear()
    engine.schedule.fail(units := list(engine.units))
    for unit in units:
        if not unit.holds:  # where Ctrl-C came just before its release
            release(unit)
        unit.run = Run(showing=unit.run.showing, chosen=unit.run.chosen, live=end_live(unit))
        while unit.opened is not None and unit.opened.for_call:
            unit.opened = unit.opened.outer
        forget_inner(unit)
        unit.graphs.readers.clear()
        return_leaves(unit)
        for bucket in unit.buckets:
            if not bucket.arriving.packed:
                bucket.grads = None  # what others still send or read of it is for nobody
    guard_after_error(engine)
    if drops:  # all but those that the caller puts back
        drop_waiting_gradients(unit for unit in units if unit not in restored)
