"""A unit's normal forward: gather it, compute on the gathered parameters, release it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_compose.base.casts import cast_inputs, cast_output
from fsdp_compose.base.loops import exhaust
from fsdp_compose.base.streams import join_graph
from fsdp_compose.base.torch_private import graph_task_id, next_node_number, saved_tensor_hooks
from fsdp_compose.base.torch_stack import count_modes
from fsdp_compose.core.autograd import is_current, view_parameters
from fsdp_compose.core.gathering import forget_inner, install, install_leaves, take_over_changes
from fsdp_compose.core.guards.added_parameters import check_additions
from fsdp_compose.core.guards.compared_units import did_ranks_differ
from fsdp_compose.core.guards.forward_writes import find_writes, forget_written, raise_lost
from fsdp_compose.core.guards.frozen_units import bound_inputs
from fsdp_compose.core.guards.functional_calls import close_functional_call
from fsdp_compose.core.guards.inner_backward import watch_hooked, watch_outputs
from fsdp_compose.core.guards.interrupts import leave_interrupted
from fsdp_compose.core.guards.kept_views import guard_after_error, note_forward, note_users
from fsdp_compose.core.guards.order_changes import warn_of_change
from fsdp_compose.core.guards.partly_run import close_forward, close_partly_run
from fsdp_compose.core.guards.recording_modes import check_modes
from fsdp_compose.core.guards.saved_tensors import shield_weights, unshield
from fsdp_compose.core.guards.standing_views import view_standing
from fsdp_compose.core.guards.surroundings import find_surroundings
from fsdp_compose.core.guards.trained_entries import trained_entries
from fsdp_compose.core.guards.unread_weights import note_unread
from fsdp_compose.core.passes import begin_forward_pass, end_step
from fsdp_compose.core.records import Live
from fsdp_compose.core.schedule import Backward, Hold
from fsdp_compose.core.state import Unit


@dataclass(frozen=True)
class Mode:
    """How one call of a unit's module computes; ``hooks.choose_mode`` chooses it once.

    Attributes:
        enter: given the unit and the module, lets the module read what it computes with.
        cast: given the unit and the module's inputs, returns those to use instead, or None. It
            runs when the unit was entered: if the inputs refuse, the unit is left.
        leave: given the unit, the module and its output (None if forward raised), returns the
            output to hand on.
    """

    enter: Callable[[Unit, nn.Module], None]
    cast: Callable[[Unit, Any, Any], tuple[Any, Any] | None]
    leave: Callable[[Unit, nn.Module, Any], Any]


def enter_gathered(unit: Unit, trained: tuple[int, ...]) -> None:
    """Gather the unit, show its modules full parameters, and gather ahead."""
    if count_modes():
        check_modes(unit)
    active, run = unit.engine.schedule.active, unit.run
    active.append(unit)
    run.calls += 1
    # One of its modules may have run before without gradients, as a checkpointed one does.
    is_open = run.finished and (not trained or (run.live and run.showing is run.live.tensors))
    if run.calls == 1 and not is_open:
        try:
            _open_forward(unit, trained)
        except Exception:  # the next forward clears up what Ctrl-C leaves
            _abandon_forward(unit)
            raise
        if (hooks := saved_tensor_hooks()) is not None:
            shield_weights(unit, hooks)


def cast_gathered(unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """The inputs in the dtype to compute in; an outermost call's end a frozen unit's backward."""
    inputs, active = None, unit.engine.schedule.active
    if unit.mp.param_dtype is not None:
        inputs = cast_inputs(unit.mp, args, kwargs, len(active) == 1, unit.run)
    if unit.links.trained or not torch.is_grad_enabled() or unit.run.calls > 1:
        return inputs
    return bound_inputs(unit, inputs or (args, kwargs))


def leave_forward(unit: Unit, module: nn.Module, output: Any) -> Any:
    """After forward: put the sharded parameters back, and release the unit.

    A hook on the outputs gathers it again in backward. This runs also when forward raised, since
    non-reentrant checkpointing ends a recomputation with an exception. Then it returns nothing.
    """
    active, run = unit.engine.schedule.active, unit.run
    run.calls -= 1
    if active and active[0] is unit and not run.calls:
        close_partly_run(unit.engine)
    while active and (last := active.pop()) is not unit:
        leave_interrupted(last)
    lost: str | None = None
    backward: Backward = "none"
    failed = True
    try:
        if unit.mp.output_dtype is not None:
            output = cast_output(unit.mp, output)
        lost = None if run.calls else find_writes(unit, module.training, output)
        backward = watch_outputs(unit, output) if lost is None else "none"
        if backward == "seen" and unit.switches.unshard_in_backward is not True:
            backward = note_unread(unit, module, output)
        failed = lost is not None or (output is None and sys.exc_info()[0] is not None)
    finally:
        if run.finished.get(id(module)) != "hidden":
            run.finished[id(module)] = backward
        if run.calls == 0:
            if run.shield is not None:
                unshield(unit)
            if len(run.finished) >= len(unit.modules) or not active:
                close_forward(unit)
            elif unit not in unit.engine.partly_run:
                unit.engine.partly_run.append(unit)
        if lost is not None:
            forget_written(unit)
        if not active:
            end_pass(unit, failed)
    if lost is not None:
        raise_lost(lost)
    return output


NORMAL = Mode(lambda unit, _: enter_gathered(unit, begin_call(unit)), cast_gathered, leave_forward)


def begin_call(unit: Unit) -> tuple[int, ...]:
    """Copy moved parameters into shards, begin a pass, and return the entries to train."""
    engine, recomputing = unit.engine, graph_task_id() != -1
    if unit.run.calls == 0 and not recomputing:
        take_over_changes(unit)
    trained = trained_entries(unit) if torch.is_grad_enabled() else ()
    if engine.schedule.active:
        return trained
    live = unit.run.live
    if not recomputing and (live is None or not _continues_pass(unit, live, trained)):
        begin_forward_pass(engine)
    return trained


def _open_forward(unit: Unit, trained: tuple[int, ...]) -> None:
    """Gather the unit, and let its modules read the gathered parameters."""
    recomputing, engine, checks = graph_task_id() != -1, unit.engine, unit.checks
    is_functional, schedule = unit.opened is not None and unit.opened.for_call, engine.schedule
    if unit.run.task is None and not is_functional:
        check_additions(unit)
    if trained and not checks.looked_around:
        find_surroundings(unit)
    if checks.watch is not None and any(checks.watch.hooks):
        watch_hooked(unit)
    schedule.enter_forward(unit, recomputing)
    live = unit.run.live
    if trained and live and live.pass_id == engine.pass_id and is_current(unit, live, trained):
        tensors = live.tensors  # a second call in one forward: its gradients join the first's
        live.joined_at = next_node_number()
    else:
        tensors = view_parameters(unit, trained) if torch.is_grad_enabled() else view_standing(unit)
    if is_functional and unit.opened is not None:
        given = unit.opened.given
        tensors = [given.get(index, tensor) for index, tensor in enumerate(tensors)]
    install(unit, tensors)
    if not recomputing:
        if len(schedule.active) == 1:
            follow_order(unit)
        change = schedule.look_ahead(unit)
        if change is not None:
            warn_of_change(engine, change)


def _abandon_forward(unit: Unit) -> None:
    """Undo ``enter_gathered`` where the unit could not be opened."""
    schedule = unit.engine.schedule
    unit.run.calls -= 1
    schedule.active.pop()
    if Hold.FORWARD in unit.holds:
        install_leaves(unit)
        schedule.drop(unit, Hold.FORWARD)
    if unit.opened is not None and unit.opened.for_call:
        close_functional_call(unit)
    if not schedule.active:
        schedule.eval_order = None


def end_pass(unit: Unit, failed: bool) -> None:
    """End the outermost forward, which was that of ``unit``."""
    engine, schedule = unit.engine, unit.engine.schedule
    if graph_task_id() == -1:
        join_graph(engine.streams)
        order, training, gathers = schedule.order, torch.is_grad_enabled(), schedule.gathers
        change = schedule.end_forward(not failed, training)
        if training:
            engine.wait_for_host_reads()
            note_forward(order.visited())
            warn_of_change(engine, change, unit)
        else:
            if gathers:
                engine.reached.update(*(visited.links.logs for visited in order.visited()))
            if not failed:
                note_users(order.visited())
                end_step(engine, trained=False)
        if failed:
            guard_after_error(engine)
            exhaust(map(forget_inner, engine.units if gathers else ()))
    schedule.eval_order = None


def follow_order(unit: Unit) -> None:
    """Follow the device's one order in training, otherwise that of ``unit``, the outermost."""
    if not torch.is_grad_enabled():
        unit.engine.schedule.eval_order = unit.expected.eval_order


def _continues_pass(unit: Unit, live: Live, trained: tuple[int, ...]) -> bool:
    """Whether an outermost forward continues the pass before, as of a head called on chunks."""
    order = unit.engine.schedule.forward_order
    return (
        live.pass_id == unit.engine.pass_id
        and live.trained == trained != ()
        and len(unit.modules) == 1
        and not unit.engine.tasks
        and bool(order.current)
        and len(order.current[-1]) == 1
        and not did_ranks_differ(unit.engine)
    )
