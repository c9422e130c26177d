"""The order of units changed, or their gradients were averaged over different ranks: say so."""

from __future__ import annotations

import warnings

from fsdp_compose.base.order import Change
from fsdp_compose.core.state import Engine, Unit


def warn_of_change(engine: Engine, change: Change | None, outermost: Unit | None = None) -> None:
    """Say once for each outermost unit that the order of its units changed."""
    if change is None or engine.schedule.eval_order is not None:
        return
    outermost = outermost or engine.schedule.active[0]
    if "order" in outermost.checks.warned:
        return
    outermost.checks.warned.add("order")
    expected, found = change.expected.name, change.found and change.found.name
    warnings.warn(
        f"the forward of unit {outermost.name!r} {'ended' if found is None else 'ran unit'} "
        f"{'' if found is None else repr(found) + ' '}where unit {expected!r} was expected from "
        "the one before. Results are not affected, and the new order is what is expected next; "
        "but what was gathered ahead for the old one was in vain. If the order never repeats, pass "
        "prefetch=Prefetch(forward=0). If ranks should differ here, see what each runs with "
        "fsdp_compose.set_debug(True).",
        stacklevel=2,
    )
