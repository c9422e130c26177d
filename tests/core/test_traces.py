"""What the engine does is what the rules of the schedule allow, event by event.

``FSDP_COMPOSE_TRACES=file pytest tests/core`` checks the traces of every rank of every test. It
keeps their models alive, so the tests of ``test_identity.py`` that count what is freed fail there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fsdp_compose.core.schedule import Hold, Schedule

from fuzz import case_of, failure_of
from fuzz_programs import Case, Leaf, Node
from traces import Broken, Trace, accept, recording


def record(case: Case, seed: int = 0) -> list[Trace]:
    with recording() as traces:
        assert failure_of(case, seed) is None
    assert len(traces) >= case.world
    ended = case.fault is not None  # perhaps before any event
    assert ended or all(trace.events for trace in traces)
    return traces


def test_traces_of_random_programs_are_accepted() -> None:
    """Also of those that a fault ends in the middle."""
    states: set[Any] = set()
    events = 0
    for seed in range(24):
        for trace in record(case_of(seed, 2), seed):
            states |= accept(trace)
            events += len(trace.events)
    print(f"{events} events, {len(states)} states")
    assert events > 2000 and len(states) > 200


def pack_early(self: Any, unit: Any, parts: Any, ends_backward: bool) -> None:
    self.drop(unit, Hold.BACKWARD)  # and the reductions under way go on
    for part in parts:
        self.work.pack(part)
        self.work.reduce([part])


def look_too_far(self: Any, policy: Any, depth: int, listed: Any, order: Any) -> None:
    self.prefetch(order.ahead(depth + 1), depth + 1)


def read_at_once(self: Any, unit: Any) -> None:
    self.hold(unit, Hold.BACKWARD)
    self.work.reread(unit, in_backward=True)


def never_release(self: Any, unit: Any, reason: Any) -> None:
    unit.holds.discard(reason)


TOWER = Case(
    Node(tuple(Node((Leaf("matrix"),), unit=True) for _ in range(4))), 2, "FULL_SHARD",
    (("step", 0), ("step", 0)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("method", "broken", "text"),
    [
        ("receive", pack_early, "is packed while"),
        ("_prefetch", look_too_far, "gathered ahead; at most"),
        ("enter_backward", read_at_once, "is read while"),
        ("drop", never_release, "is held by"),
    ],
)
def test_traces_of_a_broken_engine_are_rejected(
    method: str, broken: Callable[..., Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the numbers come out as; the message has the events that led there."""
    monkeypatch.setattr(Schedule, method, broken)
    with recording() as traces:
        failure_of(TOWER)
    with pytest.raises(Broken, match=text):
        list(map(accept, traces))


def test_a_trace_that_was_changed_is_rejected() -> None:
    """A command left out, or a reason to hold a unit that no event gave."""
    first, second = record(TOWER)
    event = next(e for e in first.events if e.method == "enter_forward")
    event.commands = [c for c in event.commands if c[0] != "wait"]
    with pytest.raises(Broken, match="not "):
        accept(first)
    held = next(e for e in second.events if any(seen.holds for seen in e.units))
    held.units = tuple(
        type(s)(s.name, s.prefetch, s.keeps, s.lists, frozenset()) for s in held.units
    )
    with pytest.raises(Broken, match="is held by"):
        accept(second)
