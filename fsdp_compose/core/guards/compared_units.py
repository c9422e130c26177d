"""Which units ranks compare at the end of a step, and what is forgotten where they differed."""

from __future__ import annotations

from fsdp_compose.base.order import Order
from fsdp_compose.core.state import Engine


def did_ranks_differ(engine: Engine) -> bool:
    """Whether ranks ran different units since the engine was last cleared after that."""
    return sum(log.disagreements for log in engine.logs.values()) != engine.disagreements


def forget_orders(engine: Engine) -> None:
    """After ranks differed: forget recorded orders, and what only some ranks may have gathered."""
    engine.disagreements = sum(log.disagreements for log in engine.logs.values())
    engine.schedule.forward_order, engine.schedule.backward_order = Order(), Order()
    for unit in engine.units:
        unit.expected.eval_order = Order()
        for inner in filter(None, (bucket.inner for bucket in unit.buckets)):
            inner.stamp = None


def reach_frozen(engine: Engine) -> None:
    """Count units that only ran forward, which no backward reaches, among those the step ran."""
    for unit in engine.schedule.forward_order.visited():
        live = unit.run.live
        if live is None or not live.pass_id or not live.trained:
            engine.reached.update(unit.links.logs)
