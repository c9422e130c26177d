"""A forward that an interrupt ended is cleaned up, or what it left is an error and not kept.

A KeyboardInterrupt runs no hook of the modules that it leaves. Where a forward around them goes on,
its end closes them. Otherwise they hold gathered tensors until the next forward or step begins, so
``zero_grad`` of a module does not reach its parameters meanwhile, nor does clipping.
"""

from __future__ import annotations

import sys
from threading import get_ident
from typing import Any

from torch import nn

from fsdp_compose.base.attributes import get_grad
from fsdp_compose.base.torch_private import graph_task_id, outside_transforms, raw
from fsdp_compose.base.torch_stack import calls_compiled, is_in_call, walk_frames
from fsdp_compose.core.gathering import install, install_leaves
from fsdp_compose.core.guards.callers import count_calls, has_outer_ended, is_on_stack
from fsdp_compose.core.guards.forward_writes import find_lost_copies
from fsdp_compose.core.guards.functional_calls import close_functional_call
from fsdp_compose.core.guards.partly_run import close_forward
from fsdp_compose.core.guards.plain_gradients import share_plain_gradients
from fsdp_compose.core.guards.saved_tensors import unshield
from fsdp_compose.core.passes import recover
from fsdp_compose.core.schedule import Hold
from fsdp_compose.core.state import Engine, Unit


def leave_interrupted(unit: Unit) -> None:
    """Close a unit whose forward was interrupted inside one that caught the interrupt."""
    unit.run.calls = 0
    unit.run.modes.clear()
    if unit.run.shield is not None:
        unshield(unit)
    returned = _find_returned(unit)
    if Hold.FORWARD in unit.holds:
        close_forward(unit)
    else:
        install_leaves(unit)
        if unit.opened is not None and unit.opened.for_call:
            close_functional_call(unit)
    for values, name, value in returned:
        values[name] = value


def _find_returned(unit: Unit) -> list[tuple[dict[str, Any], str, Any]]:
    """What a functional call that the interrupt ended, too, has put back into the unit's modules.

    Where the call goes on, they hold what its forward reads.
    """
    opened, shown = unit.opened, unit.run.showing
    if shown is None or opened is None or not opened.for_call:
        return []
    return [
        (values, name, value)
        for values, name, index in unit.links.places
        if (value := values.get(name)) is not shown[index]
    ]


def leave_scoped(unit: Unit, module: nn.Module | None = None) -> str | None:
    """In a scope: forget the forwards that were interrupted, and show the scope's tensors again.

    Args:
        module: the module whose call begins, if one does.

    Returns the error text where a copy that was made for such a forward alone was written.
    """
    opened = unit.opened
    if opened is None or not opened.calls or any(map(calls_compiled, walk_frames(sys._getframe()))):
        return None
    modes, running = unit.run.modes, count_calls(unit.links.heads | {id(module)}, get_ident())
    opened.calls -= min(opened.calls, max(len(modes) - running, 0))
    del modes[running:]
    if opened.calls:
        return None
    install(unit, opened.tensors)
    return find_lost_copies(unit, opened, ())


def clear_failed(unit: Unit, module: nn.Module) -> None:
    """Clear up after a forward or a backward that was interrupted."""
    engine, active = unit.engine, unit.engine.schedule.active
    if active and active[0] is not unit:
        is_left = has_outer_ended(unit, active[0])
    else:
        is_left = bool(active) and not is_on_stack(unit, module)
    if not active and unit.run.task is None and unit.opened is None:
        is_left = unit.run.showing is not None  # interrupted while it put its leaves back
    uncleared = find_uncleared(engine) if is_left else None
    if is_left or (not active and engine.has_failed):
        with outside_transforms():
            recover(engine)
    if uncleared is not None:
        raise RuntimeError(uncleared)


def clear_interrupted(engine: Engine, caller: str = "") -> None:
    """Between passes: clear up after a forward that was interrupted, as the next one would.

    Raises:
        RuntimeError: parameters have gradients, which clipping and clearing did not reach; said
            once. It begins with ``caller``, if given.
    """
    if not engine.schedule.active or engine.thread != get_ident() or graph_task_id() != -1:
        return
    if is_in_call(sys._getframe()):
        return  # a forward is running
    uncleared = find_uncleared(engine)
    with outside_transforms():
        recover(engine)
    if uncleared is not None:
        raise RuntimeError(f"{caller}: {uncleared}" if caller else uncleared)


def find_uncleared(engine: Engine) -> str | None:
    """The error text where parameters that modules did not hold have gradients; said once."""
    units = [unit for unit in engine.units if unit.run.showing]
    share_plain_gradients(units)  # an optimizer over plain parameters may have cleared them
    shown = (entry for unit in units for entry in unit.entries)
    with raw():
        kept = next((entry for entry in shown if get_grad(entry.param) is not None), None)
    if kept is None:
        return None
    return (
        "the forward before this one was interrupted (KeyboardInterrupt or the like), and "
        f"parameter {kept.spec.fqn!r} of unit {kept.spec.unit!r}, perhaps among others, has a "
        "gradient from before that. Until now model.zero_grad() and clipping did not reach it. "
        "Call model.zero_grad() now, and begin the step again; or call the forward again to go on "
        "with these gradients."
    )
