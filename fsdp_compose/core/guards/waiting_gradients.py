"""Gradients that wait for a reduction when that or a backward fails: dropped, never silently."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from fsdp_compose.buckets.gradients import discard_waiting
from fsdp_compose.core.state import Unit

_logger = logging.getLogger("fsdp_compose")


def drop_waiting_gradients(units: Iterable[Unit], lost: Iterable[str] = ()) -> None:
    """Drop what ``units`` hold that is not in ``.grad``; say so where earlier backwards lose it.

    Args:
        lost: units whose gradients are gone already.
    """
    # sum() looks at every bucket, where any() would stop at the first and leave the others.
    lost = [*lost, *[unit.name for unit in units if sum(map(discard_waiting, unit.buckets))]]
    if lost:
        _logger.warning(
            "a backward or reduction failed: the gradients of this step that waited for a later "
            "reduction (no_sync, set_requires_gradient_sync, set_requires_all_reduce, "
            "set_is_last_backward) are dropped, in units such as %s. Clear .grad and run the whole "
            "step again.",
            ", ".join(map(repr, lost[:3])),
        )
