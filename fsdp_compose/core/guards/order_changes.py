"""Warns when the order of units changed, so that weights were gathered ahead in vain."""

from __future__ import annotations

import warnings

from fsdp_compose.base.order import Change
from fsdp_compose.core.state import Engine, Unit


def warn_of_change(engine: Engine, change: Change | None, outermost: Unit | None = None) -> None:
    """Say once for each outermost unit that the order of its units changed."""
    if change is None or engine.schedule.eval_order is not None:
        return
    outermost = outermost or engine.schedule.active[0]
    if "order" in outermost.checks.warned or not outermost.prefetch.forward:
        return
    outermost.checks.warned.add("order")
    expected, found = change.expected.name, change.found and change.found.name
    warnings.warn(
        f"the forward of unit {outermost.name!r} {'ended' if found is None else 'ran unit'} "
        f"{'' if found is None else repr(found) + ' '}where the forward before ran unit "
        f"{expected!r}. Results are not affected, and the new order is expected from now on, but "
        "weights were gathered ahead in vain. If the order never repeats, pass "
        "prefetch=Prefetch(forward=0). If the order may differ between ranks, "
        "fsdp_compose.set_debug(True) has them compare it.",
        stacklevel=2,
    )
