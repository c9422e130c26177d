"""Only one thread at a time may run a unit, in the process that sharded it, and no graph recorder.

Ranks match collectives by their order, which two threads would mix up. A process that was forked
off, such as a worker of a DataLoader, shares its parent's connections to the other ranks: what it
sent would arrive in the middle of what the parent sends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from threading import get_ident
from typing import Any, NoReturn

from torch import nn
from torch.compiler import is_exporting

from fsdp_compose.base.process import once
from fsdp_compose.base.torch_private import (
    SCRIPT_HOOK,
    graph_task_id,
    is_jit_tracing,
    outside_transforms,
)
from fsdp_compose.base.torch_stack import called_module, calls_compiled, is_in_call, walk_frames
from fsdp_compose.core.guards.units import get_state, list_all_units
from fsdp_compose.core.passes import recover
from fsdp_compose.core.state import Engine, Unit
from fsdp_compose.sharded import STATE_KEY

_FORKED = (
    "in a process that was forked off, such as a worker of a DataLoader, where the other ranks "
    "cannot be reached. Call it in the process that sharded the model; give workers a plain model "
    "that loads fsdp_compose.state_dict(model, kind='full')."
)
_TRACED = (
    "which gathers its parameters for each forward. {} a plain model instead: one that loads "
    "fsdp_compose.state_dict(model, kind='full'), or fsdp_compose.undo(copy.deepcopy(model)), "
    "called on every rank."
)


_THREADS = (
    "Two threads would mix up the order in which ranks gather and reduce. Call the sharded models "
    "of one device from one thread at a time, for example under a lock that is held from a forward "
    "to the end of its backward."
)


def is_foreign(engine: Engine) -> bool:
    """Whether a forward is under way in another thread; a backward has threads of its own."""
    return bool(engine.schedule.active) and graph_task_id() == -1


def _refuse_beside_backward(engine: Engine, unit: Unit) -> None:
    """Raise where another thread runs a backward. A device's may be over, and be seen a while."""
    if engine.streams.gather is None and any(task.alive for task in engine.tasks.values()):
        raise RuntimeError(
            f"unit {unit.name!r}: forward was called in a second thread while a backward runs in "
            f"another. {_THREADS}"
        )


def check_caller(unit: Unit) -> None:
    """Raise unless this thread and process may run the unit's forward.

    Raises:
        RuntimeError: another thread runs a forward, or this process was forked off, or the forward
            is being recorded by ``torch.jit.trace`` or ``torch.export``.
    """
    engine, active = unit.engine, unit.engine.schedule.active
    if not active:
        if graph_task_id() == -1:  # else a device's thread may recompute it
            if engine.tasks and engine.thread != get_ident():
                _refuse_beside_backward(engine, unit)
            engine.thread = get_ident()
    elif engine.thread != get_ident() and is_foreign(engine):
        if is_in_call(sys._current_frames().get(engine.thread)):
            raise RuntimeError(
                f"unit {unit.name!r}: forward was called in a second thread while the forward of "
                f"unit {active[0].name!r} runs in another. {_THREADS}"
            )
        recover(engine)  # an interrupt ended that thread's forward without running its hooks
        engine.thread = get_ident()
    elif active[0].modules[0]() is None:
        clear_deleted(engine)
    if unit.checks.is_forked:
        raise RuntimeError(f"unit {unit.name!r}: forward was called {_FORKED}")
    if is_jit_tracing():
        raise RuntimeError(
            f"unit {unit.name!r}: torch.jit.trace cannot record a sharded module, "
            + _TRACED.format("Trace")
        )
    if is_exporting():
        raise RuntimeError(
            f"unit {unit.name!r}: torch.export cannot record a sharded module, "
            + _TRACED.format("Export")
        )


def clear_deleted(engine: Engine) -> None:
    """Let go of a forward that was interrupted, if it is of a model that was deleted since."""
    active = engine.schedule.active
    if active and all(ref() is None for ref in active[0].modules):
        with outside_transforms():
            recover(engine)


def count_calls(heads: Collection[int], thread: int) -> int:
    """How many calls of the modules with these ids are on the stack of a thread."""
    called = map(called_module, walk_frames(sys._current_frames().get(thread)))
    return sum(module is not None and id(module) in heads for module in called)


def is_on_stack(unit: Unit, module: nn.Module) -> bool:
    """Whether a call of the unit besides the present one, of ``module``, is on this stack."""
    heads = unit.links.heads | {id(module)}  # it may be a shallow copy
    return count_calls(heads, get_ident()) > 1


def has_outer_ended(unit: Unit, outer: Unit) -> bool:
    """Whether the forward of ``outer``, which seems to be running around ``unit``'s, is over.

    An interrupt ended it without running its hooks. A unit looks once for each unit around it.
    """
    if graph_task_id() != -1 or unit.engine.thread != get_ident():
        return False  # a backward inside that forward recomputes, perhaps in a device's thread
    for frame in walk_frames(sys._getframe()):
        if calls_compiled(frame):
            break
        module = called_module(frame)
        state = None if module is None else vars(module).get(STATE_KEY)
        if state is not None and state.unit is outer:
            break
    else:
        return True
    unit.checks.around = id(outer)
    return False


class _OutOfReach:
    """Stands for a group's process group in a forked process, and raises when it is used."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(f"a sharded parameter was gathered or summed {_FORKED}")


def _note_fork() -> None:
    """Have every unit, and every gather of a parameter, raise in a forked child."""
    for unit in list_all_units():
        unit.checks.is_forked = any(bucket.mesh.size > 1 for bucket in unit.gathered)
        meshes = [(*bucket.mesh.groups, *(bucket.mesh.axes or ())) for bucket in unit.gathered]
        splits = [entry.spec.whole_groups for entry in unit.entries]
        for group in {id(g): g for groups in (*meshes, *splits) for g in groups}.values():
            if group.pg is not None:
                object.__setattr__(group, "pg", _OutOfReach())


class _Refusal:
    """Raises when called, which is what ``torch.jit.script`` does first with a unit's module."""

    def __init__(self, unit: str) -> None:
        self.unit = unit

    def __call__(self) -> Any:
        raise RuntimeError(
            f"unit {self.unit!r}: torch.jit.script cannot compile a sharded module, "
            + _TRACED.format("Script")
        )


def refuse_script(module: nn.Module) -> None:
    """Let ``torch.jit.script`` of a unit's module, or of one around it, raise and say why."""
    once(_watch_forks)
    vars(module).setdefault(SCRIPT_HOOK, _Refusal(get_state(module).unit.name))


def allow_script(module: nn.Module) -> None:
    """Undo ``refuse_script``."""
    if isinstance(vars(module).get(SCRIPT_HOOK), _Refusal):
        del vars(module)[SCRIPT_HOOK]


def _watch_forks() -> None:
    """Have Python call ``_note_fork`` in every process that is forked from this one."""
    os.register_at_fork(after_in_child=_note_fork)
