"""A unit of several modules is closed with the outermost forward, however many of them ran.

A forward may leave out modules of a unit, such as a head that is called on chunks of its output
later. Until the outermost forward ends the others may still run, on what is gathered already.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from fsdp_compose.base.torch_private import graph_task_id
from fsdp_compose.core.gathering import install_leaves
from fsdp_compose.core.guards.functional_calls import close_functional_call
from fsdp_compose.core.passes import note_opened, running_task
from fsdp_compose.core.schedule import Backward
from fsdp_compose.core.state import Engine, Unit


def close_partly_run(engine: Engine) -> None:
    """When the outermost forward ends: close units of whose modules some did not run in it."""
    while engine.partly_run:
        unit = engine.partly_run.pop()
        if unit.run.finished and not unit.run.calls:
            close_forward(unit)


def close_forward(unit: Unit) -> None:
    """Let the unit's modules hold their shards, and release the unit."""
    ways: Collection[Backward] = unit.run.finished.values()
    unit.run.finished = {}
    backward: Backward = "hidden" if "hidden" in ways else "seen" if "seen" in ways else "none"
    recomputing = graph_task_id() != -1
    if recomputing:  # in a backward that needs it, and releases it when its gradients arrive
        note_opened(unit, running_task(unit))
        unit.engine.schedule.backward_order.note_inner(unit)
    if not recomputing or unit.run.task is None:  # else a part may be recomputed in its backward
        install_leaves(unit)
    if unit.opened is not None and unit.opened.for_call:
        close_functional_call(unit)
    unit.engine.schedule.leave_forward(unit, backward, torch.is_grad_enabled(), recomputing)
