"""The other modes of a forward: in a scope, functional, transformed, in stored precision."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import nn

from fsdp_compose.base.casts import cast_inputs, cast_output
from fsdp_compose.base.policy import FullPrecision
from fsdp_compose.base.torch_private import (
    graph_task_id,
    hook_for_good,
    outside_transforms,
    transforms_active,
    untraced,
)
from fsdp_compose.base.torch_stack import on_backward_end
from fsdp_compose.base.tree import find_tensors
from fsdp_compose.buckets.entries import put_in_class, wrap
from fsdp_compose.core.forward import (
    Mode,
    begin_call,
    cast_gathered,
    end_pass,
    enter_gathered,
    follow_order,
    leave_forward,
)
from fsdp_compose.core.gathering import install, install_leaves, take_over_changes
from fsdp_compose.core.guards.cast_buffers import computes_as_stored
from fsdp_compose.core.guards.cut_graphs import watch_scope
from fsdp_compose.core.guards.forward_writes import (
    check_scope_is_current,
    count_writes,
    find_lost_copies,
    note_copies,
    raise_lost,
)
from fsdp_compose.core.guards.functional_calls import (
    GivenTensors,
    close_functional_call,
    find_given_tensors,
    open_functional_call,
)
from fsdp_compose.core.guards.interrupts import leave_interrupted, leave_scoped
from fsdp_compose.core.guards.partly_run import close_partly_run
from fsdp_compose.core.guards.scope_parameters import end_failed_rests
from fsdp_compose.core.passes import running_task
from fsdp_compose.core.records import Opened
from fsdp_compose.core.state import Unit


def _enter_scope(unit: Unit, module: nn.Module) -> None:
    """Inside ``gathered``: compute on the scope's tensors, in the dtype of a forward outside."""
    opened = unit.opened
    assert opened is not None
    raise_lost(leave_scoped(unit, module))
    stored = computes_as_stored(unit, module)
    given = {} if opened.calls else find_given_tensors(unit)
    if given:
        return _enter_apart(unit, given, stored)
    if not opened.calls:
        if opened.leaf_versions:
            check_scope_is_current(unit, opened)
        end_failed_rests(unit.entries)
        opened.stored = stored
        pairs = zip(opened.tensors, unit.links.aliases, strict=True)
        with count_writes():
            tensors = [t if stored else t.to(alias.dtype) for t, alias in pairs]
        note_copies(opened, tensors)
        install(
            unit,
            [
                wrap(tensor, entry) if tensor is shown else put_in_class(tensor, entry)
                for entry, tensor, shown in zip(unit.entries, tensors, opened.tensors, strict=True)
            ],
        )
    opened.calls += 1
    unit.engine.schedule.order.leave_out()
    return None


def _cast_opened(unit: Unit, args: Any, kwargs: Any) -> Any:
    """The inputs of a forward that computes on the tensors of a scope or of a functional call."""
    opened, active = unit.opened, unit.engine.schedule.active
    assert opened is not None
    is_outermost = len(active) == int(opened.for_call)  # a scope's forward is not among them
    return None if opened.stored else cast_inputs(unit.mp, args, kwargs, is_outermost, unit.run)


def _leave_opened(unit: Unit, module: nn.Module, output: Any) -> Any:
    """Leave a forward that computed on the tensors of a scope or of a functional call."""
    opened = unit.opened
    assert opened is not None
    opened.calls -= 1
    read = None if opened.calls or opened.for_call else unit.run.showing
    lost = find_lost_copies(unit, opened, output) if opened.calls == 0 else None
    if opened.calls == 0 and opened.for_call:
        _leave_apart(unit, output)
    elif opened.calls == 0:
        install(unit, opened.tensors)
    raise_lost(lost)
    if read is not None and torch.is_grad_enabled():
        _show_in_backward(unit, opened, read, output)
    if unit.links.dtensors and torch.is_grad_enabled():
        watch_scope(unit, output)
    if opened.stored and isinstance(unit.mp, FullPrecision):
        return output
    return cast_output(unit.mp, output)


def _show_in_backward(
    unit: Unit, opened: Opened, read: Sequence[torch.Tensor], output: Any
) -> None:
    """Have the modules hold what a forward in a scope has read while its backward runs.

    That recomputes parts of it that were checkpointed, in the same dtypes.
    """
    if all(map(is_, read, opened.tensors)) or transforms_active():
        return  # nothing was cast, or nothing can be recomputed
    ref = weakref.ref(unit)

    def restore() -> None:
        if (reached := ref()) is not None and not reached.run.calls:
            install_leaves(reached)

    @untraced
    def show(_: torch.Tensor) -> None:
        reached = ref()
        if reached is None or reached.opened is not opened or opened.calls:
            return
        if reached.run.showing is not read:
            running_task(reached).units.append(reached)  # for one that fails
            install(reached, read)
            on_backward_end(restore)

    for tensor in find_tensors(output)[0]:
        if tensor.requires_grad and tensor.grad_fn is not None:
            hook_for_good(tensor, show)


def _enter_transformed(unit: Unit, module: nn.Module) -> None:
    """Under a transform of ``torch.func``, or in stored precision: on a buffer of its own."""
    is_at_rest = unit.run.task is None and not unit.run.finished
    given = find_given_tensors(unit) if is_at_rest else {}
    _enter_apart(unit, given, computes_as_stored(unit, module))


def _enter_functional(unit: Unit, module: nn.Module) -> None:
    """Compute on tensors that the caller gave in the place of some or all parameters."""
    trained = begin_call(unit)
    given = find_given_tensors(unit)
    with count_writes():
        shown = open_functional_call(unit, given) if given else None
    if shown is None:
        enter_gathered(unit, trained)
    else:
        _enter_shown(unit, shown)


def _cast_functional(unit: Unit, args: Any, kwargs: Any) -> Any:
    """Cast as the forward was entered: on the caller's tensors alone, or gathered."""
    return (_cast_opened if _is_complete(unit) else cast_gathered)(unit, args, kwargs)


def _leave_functional(unit: Unit, module: nn.Module, output: Any) -> Any:
    """Leave as the forward was entered."""
    return (_leave_opened if _is_complete(unit) else leave_forward)(unit, module, output)


def _is_complete(unit: Unit) -> bool:
    return unit.opened is not None and unit.opened.calls > 0


def _enter_apart(unit: Unit, given: GivenTensors, stored: bool) -> None:
    """Compute on the caller's tensors or on a buffer of the call's own, outside of any pass."""
    if graph_task_id() == -1:
        with outside_transforms():
            take_over_changes(unit)
    with count_writes():
        shown = open_functional_call(unit, given, stored)
    assert shown is not None
    _enter_shown(unit, shown)


def _enter_shown(unit: Unit, shown: list[torch.Tensor]) -> None:
    """Let the unit's modules read ``shown``."""
    opened = unit.opened
    assert opened is not None
    note_copies(opened, shown)
    install(unit, shown)
    active = unit.engine.schedule.active
    active.append(unit)
    if not opened.stored and len(active) == 1:
        follow_order(unit)  # units inside it that are gathered as always may run without gradients
    unit.engine.schedule.order.leave_out()


def _leave_apart(unit: Unit, output: Any) -> None:
    """Put back what the modules held, and end the call where it is the outermost."""
    schedule = unit.engine.schedule
    install_leaves(unit)
    close_functional_call(unit)
    if schedule.active and schedule.active[0] is unit:
        close_partly_run(unit.engine)
    while schedule.active and (last := schedule.active.pop()) is not unit:
        leave_interrupted(last)
    if not schedule.active:
        if schedule.order.is_open and not transforms_active():
            end_pass(unit, failed=output is None and sys.exc_info()[0] is not None)
        schedule.eval_order = None


def _enter_again(unit: Unit, module: nn.Module) -> None:
    """Compute under a transform inside the unit's own forward, on what that reads."""
    unit.run.calls += 1
    unit.engine.schedule.active.append(unit)


def _cast_again(unit: Unit, args: Any, kwargs: Any) -> Any:
    """The inputs of a further forward of a unit, which is not the outermost."""
    return cast_inputs(unit.mp, args, kwargs, False, unit.run)


def _leave_again(unit: Unit, module: nn.Module, output: Any) -> Any:
    """Leave a further forward of a unit under a transform."""
    unit.run.calls -= 1
    unit.engine.schedule.active.pop()
    return cast_output(unit.mp, output)


SCOPE = Mode(_enter_scope, _cast_opened, _leave_opened)
TRANSFORMED = Mode(_enter_transformed, _cast_opened, _leave_opened)
FUNCTIONAL = Mode(_enter_functional, _cast_functional, _leave_functional)
AGAIN = Mode(_enter_again, _cast_again, _leave_again)
