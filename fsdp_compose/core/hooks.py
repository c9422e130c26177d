"""Hooks around a module's forward: plain functions that find their state through the module.

The functions hold no module, so a deep copy uses its own state, and hooks keep no module alive.
``choose_mode`` decides once how a call computes; ``forward.py`` has the normal way.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

from torch import nn

from fsdp_compose.base.torch_private import (
    remove_forward_hooks,
    transforms_active,
    untraced,
    untraced_itself,
)
from fsdp_compose.base.torch_stack import count_modes, in_selective, outside_selective
from fsdp_compose.base.tree import give_back_edits
from fsdp_compose.core.forward import NORMAL, Mode
from fsdp_compose.core.guards.added_parameters import check_copy
from fsdp_compose.core.guards.callers import allow_script, check_caller, is_foreign, refuse_script
from fsdp_compose.core.guards.cast_buffers import choose_precision
from fsdp_compose.core.guards.inner_backward import unwatch
from fsdp_compose.core.guards.interrupts import clear_failed
from fsdp_compose.core.guards.other_forwards import AGAIN, FUNCTIONAL, SCOPE, TRANSFORMED
from fsdp_compose.core.guards.replaced_parameters import find_replaced
from fsdp_compose.core.state import Unit
from fsdp_compose.sharded import STATE_KEY


def attach_hooks(module: nn.Module) -> None:
    """Register the hooks that gather around ``module``'s forward; its state must exist."""
    module.register_forward_pre_hook(before_forward, with_kwargs=True, prepend=True)
    module.register_forward_hook(after_forward, always_call=True)
    refuse_script(module)


def detach_hooks(module: nn.Module) -> None:
    """Remove what ``attach_hooks`` registered, from a copy of the module too."""
    remove_forward_hooks(module, before_forward, after_forward)
    unwatch(module)
    allow_script(module)


@untraced
def before_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Choose how this call computes, and enter that mode."""
    if count_modes() and in_selective():
        return outside_selective(before_forward, module, args, kwargs)
    unit: Unit = module.__dict__[STATE_KEY].unit
    check_caller(unit)
    unit.run.modes.append(REFUSED)  # until the call has begun: ``after_forward`` runs in any case
    if id(module) not in unit.links.heads:
        check_copy(unit, module)
    if not (active := unit.engine.schedule.active) or unit.checks.around != id(active[0]):
        clear_failed(unit, module)
    mode = choose_mode(unit, module)
    mode.enter(unit, module)
    unit.run.modes[-1:] = [mode]  # a recovery has emptied the list
    return mode.cast(unit, args, kwargs)


@untraced
def after_forward(module: nn.Module, args: Any, output: Any) -> Any:
    """Leave the mode that the call entered."""
    if count_modes() and in_selective():
        return outside_selective(after_forward, module, args, output)
    unit: Unit = module.__dict__[STATE_KEY].unit
    engine = unit.engine
    if not unit.run.modes or (engine.thread != get_ident() and is_foreign(engine)):
        return None  # it was refused before it began, or cleared away with what failed
    if unit.run.copied:
        give_back_edits(unit.run.copied, len(unit.run.modes))
    return unit.run.modes.pop().leave(unit, module, output)


REFUSED = Mode(lambda *_: None, lambda *_: None, lambda *_: None)


def choose_mode(unit: Unit, module: nn.Module) -> Mode:
    """The mode of the call that begins."""
    is_stored, run = unit.mp.full_precision_in_eval and choose_precision(unit, module), unit.run
    if unit.opened is not None and unit.opened.in_forward:
        return SCOPE
    is_transformed = transforms_active()
    if is_transformed or is_stored:
        if not run.calls:
            return TRANSFORMED
        if is_transformed:
            return AGAIN
    is_at_rest = not run.calls and run.task is None and not run.finished
    return FUNCTIONAL if is_at_rest and find_replaced(unit) else NORMAL


@untraced_itself
def call_as_forward(module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``function`` as if it were ``module``'s forward, which must be a unit's."""
    try:
        args, kwargs = before_forward(module, args, kwargs) or (args, kwargs)
        output = function(*args, **kwargs)
    except BaseException:
        after_forward(module, args, None)
        raise
    return after_forward(module, args, output)
