"""Clears what a step that failed left, where the next forward would be too late to do so."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_compose.core.guards.compared_units import did_ranks_differ
from fsdp_compose.core.passes import recover
from fsdp_compose.core.state import Unit


def clear_failed_steps(units: Iterable[Unit]) -> None:
    """Clear what steps that failed left in the engines of ``units``.

    Whoever reads or reduces gradients that wait calls this first.
    """
    for engine in dict.fromkeys(unit.engine for unit in units):
        if engine.has_failed or did_ranks_differ(engine):
            recover(engine)
