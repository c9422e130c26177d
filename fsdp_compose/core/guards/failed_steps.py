"""Clears what a step that failed left, where the next forward would be too late to do so."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_compose.base.process import here
from fsdp_compose.core.guards.callers import clear_deleted
from fsdp_compose.core.guards.interrupts import clear_interrupted
from fsdp_compose.core.passes import clear_failed_step
from fsdp_compose.core.state import Unit


def clear_failed_steps(units: Iterable[Unit]) -> None:
    """Clear what steps that failed, or were interrupted, left in the engines of ``units``.

    Whoever gathers or releases units between passes, or reads or reduces gradients that wait, calls
    this first: where one rank failed alone, its units are in other phases than those of the others.
    So does whoever changes how gradients are reduced: reductions that the failed step began end as
    they would have in it.
    """
    for engine in dict.fromkeys(unit.engine for unit in units):
        clear_failed_step(engine)
        clear_interrupted(engine)


def clear_deleted_models() -> None:
    """Let go of what steps that failed, or were interrupted, hold of models that were deleted.

    Another model is about to be sharded, which may need that memory before its first forward.
    """
    for engine in list(here.engines.values()):
        clear_failed_step(engine)
        clear_deleted(engine)
