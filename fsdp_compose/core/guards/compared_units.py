"""Which units ranks compare at the end of a step, and what is forgotten where they differed."""

from __future__ import annotations

from fsdp_compose.buckets.bucket import Phase
from fsdp_compose.core.schedule import Hold
from fsdp_compose.core.state import Engine, Unit


def did_ranks_differ(engine: Engine) -> bool:
    """Whether ranks ran different units since the engine was last cleared after that."""
    return sum(log.disagreements for log in engine.logs.values()) != engine.disagreements


def forget_orders(engine: Engine) -> None:
    """After ranks differed: forget recorded orders, and what only some ranks may have gathered.

    What ``unshard`` asked for and did not get is held no more: it never arrives.
    """
    engine.disagreements = sum(log.disagreements for log in engine.logs.values())
    engine.schedule.forget_orders(engine.units)
    for unit in engine.units:
        for inner in filter(None, (bucket.inner for bucket in unit.buckets)):
            inner.stamp = None
        if Hold.USER in unit.holds and _is_cut_off(unit):
            engine.schedule.drop(unit, Hold.USER)


def _is_cut_off(unit: Unit) -> bool:
    gathering = [bucket for bucket in unit.gathered if bucket.phase is Phase.GATHERING]
    return any(bucket.fill.exchange.will_be_lost() for bucket in gathering)


def reach_frozen(engine: Engine) -> None:
    """Count units that only ran forward, which no backward reaches, among those the step ran."""
    for unit in engine.schedule.forward_order.visited():
        live = unit.run.live
        if live is None or not live.pass_id or not live.trained:
            engine.reached.update(unit.links.logs)
