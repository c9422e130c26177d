"""The events of a step as its units are known to run: their order, further calls, recomputation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from fsdp_compose.base.order import Turn
from fsdp_compose.report.survey import Event, Record, Survey


@dataclass(eq=False)
class _Call:
    """A call of a unit, and those of units inside it."""

    inside: list[_Call] = field(default_factory=list)
    record: Record | None = None  # None: of whatever is around the units


def arrange(survey: Survey) -> list[Event]:
    """The events as far as is known in the order in which they run; each is an object of its own.

    Units that lie beside each other are put in the order of ``survey.visits``, as often as they are
    there. Those that it lacks stay where they are.
    """
    around = survey.around
    calls: defaultdict[int, _Call] = defaultdict(_Call)  # the last one, by a record's id
    outermost = _Call()
    for record in survey.visits:
        if id(record) in around:
            outer = around[id(record)]
            call = _Call(record=record)
            (outermost if outer is None else calls[id(outer)]).inside.append(call)
            calls[id(record)] = call
    return _place(survey.events, outermost, calls)


def _place(events: Sequence[Event], around: _Call, calls: dict[int, _Call]) -> list[Event]:
    """Put the units among ``events``, which are those of one call, in the order of its calls."""
    parts = _split(events)
    times = Counter(id(part[0].record) for part in parts if part[0].enters)
    known = {id(call.record) for call in around.inside}
    once = {key for key, count in times.items() if count == 1 and key in known}
    units = {id(p[0].record): p for p in parts if p[0].enters and id(p[0].record) in once}
    turns = [call for call in around.inside if id(call.record) in units]
    found: list[Event] = []
    places = len(units)
    for part in parts:
        if units.get(id(part[0].record)) is not part:
            found += _place_inside(part, calls[id(part[0].record)], calls)
            continue
        places -= 1  # at the last one, what runs again follows
        now, turns = (turns[:1], turns[1:]) if places else (turns, [])
        for call in now:
            found += _place_inside(units[id(call.record)], call, calls)
    return found


def _place_inside(part: Sequence[Event], call: _Call, calls: dict[int, _Call]) -> list[Event]:
    first, *rest = map(replace, part)
    if not rest:
        return [first]
    *inside, last = rest
    inside = _place(inside, call, calls)
    if first.record.passes_on:  # what it reads itself it has read before
        parts = _split(inside)
        units = [inner for inner in parts if inner[0].enters]
        others = [inner for inner in parts if not units or inner is not units[-1]]
        inside = list(chain.from_iterable([*others, *units[-1:]]))
    return [first, *inside, last]


def _split(events: Sequence[Event]) -> list[list[Event]]:
    """What the outer unit reads itself, each alone, and each unit inside it with what it has."""
    parts: list[list[Event]] = []
    around: Record | None = None
    for event in events:
        if around is None:
            parts.append([])
            around = event.record if event.enters else None
        parts[-1].append(event)
        if event.leaves and event.record is around:
            around = None
    return parts


def reverse(events: Sequence[Event]) -> list[Event]:
    """In backward's order: a unit that returned an inner one's output is reached after that one."""
    found: list[Event] = []
    around: list[Event] = []  # exits that wait for the one before them
    for event in reversed(events):
        if event.leaves and event.record.passes_on:
            around.append(event)
            continue
        found += [event, *reversed(around)] if event.leaves else [*around, event]
        around.clear()
    return found


def find_reached(events: Sequence[Event]) -> tuple[set[int], set[int]]:
    """Which exits backward reaches, and which entries tell the end of a unit without gradients.

    A tensor needs a gradient once a trained parameter was read before it, and where a backward
    that ran has shown it.
    """
    needs = False
    reached: set[int] = set()
    bounded: set[int] = set()
    entered: dict[Record, int] = {}
    for event in events:
        if event.use is not None:
            needs = needs or event.use.grad_bytes > 0
        elif event.enters:
            entered[event.record] = id(event)
            if needs:
                bounded.add(id(event))
        elif needs if event.record.is_reached is None else event.record.is_reached:
            reached.add(id(event))
            if not needs:  # its inputs did
                needs = True
                bounded.add(entered[event.record])
    return reached, bounded


@dataclass
class Inner:
    """What happens inside a backward as it reaches a unit.

    Attributes:
        before, within: units whose forwards run again, before it is reached or once it is gathered.
        is_apart: it is reached in a backward inside this one, which brings its gradients alone.
        ends: that one ends when they are there.
    """

    before: list[Record] = field(default_factory=list)
    within: list[Record] = field(default_factory=list)
    is_apart: bool = False
    ends: bool = False


def find_inner(turns: Sequence[tuple[Turn, Record | None]]) -> dict[tuple[int, int], Inner]:
    """What happens inside a backward, by the id of the record it reaches, and how often it did.

    A checkpoint without reentry is reached by the hook of what its last unit returned, and runs
    that unit again, too. Others are run first, and then reached in a backward of their own.
    """
    found: defaultdict[tuple[int, int], Inner] = defaultdict(Inner)
    times: Counter[int] = Counter()
    reached: list[tuple[int, int]] = []  # since the last forwards that ran before
    again: list[Record] = []
    for turn, record in (*turns, ("reached", None)):
        if turn == "forward" and record is not None:
            again.append(record)
            continue
        key = id(record), times[id(record)]
        is_within = record is None or any(known in map(id, again) for known, _ in reached)
        if again and is_within and reached:
            found[reached[-1]].within += again
        elif again:
            found[key].before += again
            reached = []
        again = []
        if turn == "ended":
            for known in reached:
                found[known].is_apart = True
            if reached:
                found[reached[-1]].ends = True
            reached = []
        else:
            times[id(record)] += 1
            reached.append(key)
    return found
