"""Who may run a unit: one thread at a time, of the process that sharded it.

Ranks match collectives by their order, which two threads would mix up; and a process that was
forked off, such as a worker of a DataLoader, has no connection to the other ranks.
"""

from __future__ import annotations

import os
import sys
from threading import get_ident

from fsdp_compose.engine import recover
from fsdp_compose.state import Lane, Unit, _lanes
from fsdp_compose.torch_private import graph_task_id, is_in_call, is_jit_tracing


def is_foreign(lane: Lane) -> bool:
    """Whether another thread's forward is under way; a backward has threads of its own."""
    return bool(lane.active) and lane.thread != get_ident() and graph_task_id() == -1


def check_caller(unit: Unit) -> None:
    """Raise unless this thread and process may run the unit's forward.

    Raises:
        RuntimeError: another thread runs a forward, or this process was forked off, or the forward
            is being recorded by ``torch.jit.trace``.
    """
    lane = unit.lane
    if not lane.active:
        lane.thread = get_ident()
    elif is_foreign(lane):
        if is_in_call(sys._current_frames().get(lane.thread)):
            raise RuntimeError(
                f"unit {unit.name!r}: forward was called in a second thread while unit "
                f"{lane.active[0].name!r} runs in another. Threads would mix up the order in which "
                "ranks gather; call sharded models on one device from one thread at a time, for "
                "example under a lock."
            )
        recover(lane)  # an interrupt ended that thread's forward without running its hooks
        lane.thread = get_ident()
    if unit.is_forked:
        raise RuntimeError(
            f"unit {unit.name!r}: forward was called in a process that was forked off, such as a "
            "worker of a DataLoader, where the other ranks cannot be reached. Call it in the "
            "process that sharded it; give workers a plain copy, with load_state_dict of "
            "fsdp_compose.state_dict(model, kind='full')."
        )
    if is_jit_tracing():
        raise RuntimeError(
            f"unit {unit.name!r}: torch.jit.trace cannot record a sharded module, which gathers "
            "its parameters for each forward. Trace a plain model that loaded "
            "fsdp_compose.state_dict(model, kind='full'), or call fsdp_compose.undo(model) first."
        )


def _note_fork() -> None:
    for lane in _lanes.values():
        for unit in list(lane.units):
            unit.is_forked = any(bucket.mesh.size > 1 for bucket in unit.gathered)


os.register_at_fork(after_in_child=_note_fork)
