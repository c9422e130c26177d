"""Traces of the engine's schedule, and whether the rules of ``test_schedule.py`` accept them.

While ``recording`` is on, every event that an engine tells its schedule is noted, with what the
units looked like then and with the commands that followed. ``accept`` replays a trace: another
schedule, over integers, is told the same events, must give the same commands, and a checker that
moves nothing raises where a command breaks a rule of memory or of gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_compose.base.order import Order
from fsdp_compose.core.schedule import Expected, Hold, Schedule


class Broken(Exception):
    """A trace breaks a rule; the message has the events that led there."""


EVENTS = (
    "hold", "drop", "keep", "enter_forward", "look_ahead", "leave_forward", "end_forward",
    "enter_backward", "look_back", "receive", "leave_backward", "reduce_rest", "end_backward",
    "prefetch", "drop_prefetched", "fail",
)  # fmt: skip
ANSWERS = ("reads_gathered", "is_complete", "gathered_nbytes", "held_nbytes", "has_room")
COMMANDS = (
    "announce", "gather", "wait", "release", "note_kept", "reread", "spread", "forget_spread",
    "pack", "postpone", "reduce", "finish_reductions",
)  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """A unit as it was when an event came."""

    name: int
    prefetch: Any
    keeps: tuple[bool | None, bool, bool, bool]
    lists: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    holds: frozenset[Hold]


@dataclass
class Event:
    """What the engine told its schedule, and what came of it."""

    method: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    units: tuple[Seen, ...]  # all that the trace has met
    active: tuple[int, ...]
    order: int | None  # whose order a forward without gradients follows
    is_new: bool  # the recorded orders were thrown away before
    commands: list[tuple[Any, ...]] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)


class Trace:
    """The events of one schedule, in which units and gradients are numbers."""

    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule
        self.events: list[Event] = []
        self.units: list[Any] = []
        self.parts: list[Any] = []  # buckets
        self.depth = 0
        self.inside = 0  # commands that are being carried out
        self.orders: Any = None

    def unit(self, unit: Any) -> int:
        for index, known in enumerate(self.units):
            if known is unit:
                return index
        self.units.append(unit)
        return len(self.units) - 1

    def name(self, value: Any) -> Any:
        """A number in place of each unit and each part; what is plain stays."""
        if isinstance(value, (list, tuple)):
            return tuple(self.name(each) for each in value)
        if isinstance(value, (bool, int, str, Hold)) or value is None:
            return value
        if "bucket" in dir(value):
            if not any(value.bucket is known for known in self.parts):
                self.parts.append(value.bucket)
            return ("part", next(i for i, b in enumerate(self.parts) if b is value.bucket))
        return ("unit", self.unit(value)) if "holds" in dir(value) else value

    def begin(self, method: str, arguments: Any, options: Any) -> None:
        schedule = self.schedule
        named = tuple(self.name(a) for a in arguments)
        active = tuple(self.unit(u) for u in schedule.active)
        for unit in schedule.prefetched:
            self.unit(unit)
        order = schedule.eval_order
        mine = next((i for i, u in enumerate(self.units) if u.expected.eval_order is order), None)
        is_new = self.orders is not None and self.orders is not schedule.forward_order
        self.orders = schedule.forward_order
        seen = tuple(self.look(index) for index in range(len(self.units)))
        self.events.append(Event(method, named, dict(options), seen, active, mine, is_new))

    def look(self, index: int) -> Seen:
        unit = self.units[index]
        switches, expected = unit.switches, unit.expected
        keeps = (
            switches.keep_after_forward, switches.keep_over_microbatches,
            switches.reshard_after_backward, switches.sync,
        )  # fmt: skip
        lists = self.listed(expected.forward_list), self.listed(expected.backward_list)
        return Seen(index, unit.prefetch, keeps, lists, frozenset(unit.holds))

    def listed(self, refs: Any) -> tuple[int, ...] | None:
        if refs is None:
            return None
        return tuple(self.unit(unit) for ref in refs if (unit := ref()) is not None)


@contextlib.contextmanager
def recording() -> Iterator[list[Trace]]:
    """Inside, each schedule that is made is recorded; the traces, in the order they began."""
    traces: list[Trace] = []
    with pytest.MonkeyPatch.context() as patch:
        make = Schedule.__init__

        def init(schedule: Any, work: Any) -> None:
            schedule.trace = Trace(schedule)
            traces.append(schedule.trace)
            make(schedule, work)

        def set_work(schedule: Any, work: Any) -> None:  # also by a unit with static buffers
            schedule.recorder = _Recorder(work, schedule.trace)

        patch.setattr(Schedule, "__init__", init)
        patch.setattr(Schedule, "work", property(attrgetter("recorder"), set_work), raising=False)
        for method in EVENTS:
            patch.setattr(Schedule, method, _noted(method, getattr(Schedule, method)))
        yield traces


def _noted(method: str, function: Any) -> Any:
    def call(schedule: Any, *arguments: Any, **options: Any) -> Any:
        trace = getattr(schedule, "trace", None)
        if trace is None:
            return function(schedule, *arguments, **options)
        if method in ("prefetch", "fail"):
            arguments = (list(arguments[0]), *arguments[1:])
        if not trace.depth:
            trace.begin(method, () if method == "reduce_rest" else arguments, options)
            if method == "reduce_rest":
                arguments = (_reported(trace, *arguments),)
        elif trace.inside:  # by what a command ran, such as a hook that steps an optimizer
            named = tuple(trace.name(a) for a in arguments)
            trace.events[-1].commands.append(("inside", method, named))
        trace.depth += 1
        inside, trace.inside = trace.inside, 0
        try:
            return function(schedule, *arguments, **options)
        finally:
            trace.depth -= 1
            trace.inside = inside

    return call


def _reported(trace: Trace, parts: Any) -> Iterator[Any]:
    """The parts, each noted as it is asked for: what was done by then decides which there are."""
    event = trace.events[-1]
    event.arguments = ((),)
    for part in parts:
        event.arguments = ((*event.arguments[0], trace.name(part)),)
        yield part


class _Recorder:
    """The engine's work, which also notes what it is told to do."""

    def __init__(self, work: Any, trace: Trace) -> None:
        self.work, self.trace = work, trace

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # what isinstance asks
        return type(self.work)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.work, name)
        if name in ANSWERS:

            def ask(*arguments: Any) -> Any:
                answer = found(*arguments)
                self.trace.events[-1].answers.append(answer)
                return answer

            return ask
        if name not in COMMANDS:
            return found

        def carry_out(*arguments: Any, **options: Any) -> Any:
            if not self.trace.depth:
                self.trace.begin("work", (), {})
            named = (name, *(self.trace.name(a) for a in arguments))
            self.trace.events[-1].commands.append(named)
            self.trace.inside += 1
            try:
                return found(*arguments, **options)
            except BaseException:
                self.trace.events[-1].commands.append(("failed",))
                raise
            finally:
                self.trace.inside -= 1

        return carry_out


class _Checker:
    """Work that moves nothing, and raises where a command breaks a rule."""

    def __init__(self) -> None:
        self.full: dict[int, str] = {}
        self.packed: set[int] = set()
        self.reducing: set[int] = set()
        self.asked: set[int] = set()  # to be gathered ahead by the caller
        self.commands: list[tuple[Any, ...]] = []
        self.wanted: list[tuple[Any, ...]] = []
        self.tell: Callable[[str, Any], None] = lambda method, arguments: None
        self.answers: list[Any] = []
        self.fails_at = -1

    def note(self, *command: Any) -> None:
        self.commands.append(_name(command))
        if len(self.commands) - 1 == self.fails_at:
            raise InterruptedError
        for what, *nested in self.wanted[len(self.commands) : len(self.commands) + 1]:
            if what == "inside":
                self.commands.append((what, *nested))
                self.tell(*nested)

    def announce(self, unit: Any, reason: Hold) -> None:
        self.note("announce", ("unit", unit.name), reason)

    def gather(self, unit: Any) -> None:
        self.full.setdefault(unit.name, "gathering")
        self.note("gather", ("unit", unit.name))

    def read(self, unit: int) -> None:
        if self.full.get(unit) != "gathered":
            raise Broken(f"{unit} is read while {self.full.get(unit, 'released')}")

    def wait(self, unit: Any) -> None:
        if unit.name not in self.full:
            raise Broken(f"waits for {unit.name}, which nobody gathered")
        self.full[unit.name] = "gathered"
        self.note("wait", ("unit", unit.name))

    def release(self, unit: Any) -> None:
        if unit.holds:
            raise Broken(f"{unit.name} is released while held by {unit.holds}")
        self.full.pop(unit.name)
        self.note("release", ("unit", unit.name))

    def note_kept(self, unit: Any) -> None:
        if unit.name not in self.full:
            raise Broken(f"{unit.name} is kept and not gathered")
        self.note("note_kept", ("unit", unit.name))

    def reread(self, unit: Any, in_backward: bool) -> None:
        self.note("reread", ("unit", unit.name))

    def spread(self, unit: Any) -> None:
        self.note("spread", ("unit", unit.name))

    def forget_spread(self, unit: Any) -> None:
        self.note("forget_spread", ("unit", unit.name))

    def pack(self, part: Any) -> None:
        if self.reducing:
            raise Broken(f"{part} is packed while {self.reducing} is reduced")
        self.packed.add(part[1])
        self.note("pack", part)

    def postpone(self, part: Any) -> None:
        self.note("postpone", part)

    def reduce(self, parts: Any) -> None:
        for part in parts:
            if part[1] not in self.packed:
                raise Broken(f"{part} is reduced, and nothing of it was packed since")
            self.packed.discard(part[1])
            self.reducing.add(part[1])
        self.note("reduce", parts)

    def finish_reductions(self) -> None:
        self.reducing.clear()
        self.note("finish_reductions")

    def answer(self, *_: Any) -> Any:
        return self.answers.pop(0)

    reads_gathered = is_complete = gathered_nbytes = has_room = answer

    def held_nbytes(self) -> Any:
        return self.answers.pop(0)


def accept(trace: Trace) -> set[Any]:
    """The states that the rules go through as they replay ``trace``.

    Raises:
        Broken: a command differs from what was recorded, or breaks a rule.
    """
    checker = _Checker()
    schedule: Schedule[Any, Any] = Schedule(checker)
    members: dict[int, Any] = {}
    states: set[Any] = set()
    for number, event in enumerate(trace.events):
        _set_up(schedule, members, event)
        checker.commands, checker.answers = [], list(event.answers)
        checker.tell = partial(_call, schedule, members)
        fails = ("failed",) in event.commands
        wanted = [command for command in event.commands if command != ("failed",)]
        checker.fails_at = event.commands.index(("failed",)) - 1 if fails else -1
        checker.wanted = wanted
        try:
            _tell(schedule, checker, members, event)
            if event.method in ("enter_forward", "enter_backward") and not fails:
                checker.read(event.arguments[0][1])
        except (Broken, IndexError, KeyError) as error:
            history = [
                f"{e.method}{e.arguments}" for e in trace.events[max(0, number - 8) : number]
            ]
            raise Broken(
                "; ".join([*history, f"{event.method}{event.arguments}", repr(error)])
            ) from error
        found = checker.commands
        if found != wanted:
            raise Broken(f"event {number}, {event.method}{event.arguments}: {found}, not {wanted}")
        _check(schedule, checker, members)
        states.add(_state(schedule, checker, members))
    return states


@dataclass(eq=False)
class _Member:
    """A unit of a trace."""

    name: int
    holds: set[Hold] = field(default_factory=set)
    expected: Expected = field(default_factory=Expected)
    prefetch: Any = None
    switches: Any = None


def _set_up(schedule: Any, members: dict[int, Any], event: Event) -> None:
    for seen in event.units:
        member = members.setdefault(seen.name, _Member(seen.name))
        member.prefetch = seen.prefetch
        after, over, reshard, sync = seen.keeps
        member.switches = SimpleNamespace(
            keep_after_forward=after, keep_over_microbatches=over, reshard_after_backward=reshard,
            sync=sync,
        )  # fmt: skip
        if frozenset(member.holds) != seen.holds:
            raise Broken(
                f"{seen.name} is held by {seen.holds} when {event.method}, not {member.holds}"
            )
    for seen in event.units:
        forward, backward = (
            None if names is None else [lambda name=name: members[name] for name in names]
            for names in seen.lists
        )
        members[seen.name].expected.forward_list = forward
        members[seen.name].expected.backward_list = backward
    schedule.active[:] = [members[name] for name in event.active]
    schedule.eval_order = None if event.order is None else members[event.order].expected.eval_order
    if event.is_new:
        schedule.forward_order, schedule.backward_order = Order(), Order()
        for member in members.values():
            member.expected.eval_order = Order()


def _name(value: Any) -> Any:
    """What stands in a trace for a unit, and for a part that is a list."""
    if isinstance(value, _Member):
        return ("unit", value.name)
    return tuple(map(_name, value)) if isinstance(value, list | tuple) else value


def _value(members: dict[int, Any], named: Any) -> Any:
    if isinstance(named, tuple) and len(named) == 2 and named[0] == "unit":
        return members[named[1]]
    if isinstance(named, tuple) and not (len(named) == 2 and named[0] == "part"):
        return [_value(members, each) for each in named]
    return named


def _call(schedule: Any, members: dict[int, Any], method: str, arguments: Any) -> None:
    getattr(schedule, method)(*(_value(members, each) for each in arguments))


def _tell(schedule: Any, checker: _Checker, members: dict[int, Any], event: Event) -> None:
    value = partial(_value, members)
    with contextlib.suppress(InterruptedError):
        if event.method == "work":
            for name, *arguments in [c for c in event.commands if c != ("failed",)]:
                getattr(checker, name)(*map(value, arguments), **_in_backward(name))
        else:
            if event.method == "prefetch":
                checker.asked |= {name for _, name in event.arguments[0]}
            getattr(schedule, event.method)(*map(value, event.arguments), **event.options)


def _in_backward(name: str) -> dict[str, bool]:
    return {"in_backward": False} if name == "reread" else {}


def _check(schedule: Any, checker: _Checker, members: dict[int, Any]) -> None:
    """What holds between any two events."""
    for member in members.values():
        if bool(member.holds) != (member.name in checker.full):
            raise Broken(f"{member.name} is held by {member.holds}: {checker.full}")
    checker.asked &= {name for name, m in members.items() if Hold.PREFETCH in m.holds}
    ahead = [m for m in members.values() if m.holds == {Hold.PREFETCH}]
    ahead = [m for m in ahead if m.name not in checker.asked]
    limits = [
        max(m.prefetch.forward, m.prefetch.backward, *map(len, filter(None, _lists(m))), 0)
        for m in members.values()
    ]
    if len(ahead) > max([*limits, 0]) and not any(Hold.USER in m.holds for m in ahead):
        raise Broken(f"{[m.name for m in ahead]} are gathered ahead; at most {max(limits)}")


def _lists(member: Any) -> tuple[Any, Any]:
    return member.expected.forward_list or [], member.expected.backward_list or []


def _state(schedule: Any, checker: _Checker, members: dict[int, Any]) -> Any:
    return (
        tuple(frozenset(member.holds) for member in members.values()),
        tuple(sorted(checker.full.items())), frozenset(checker.reducing), frozenset(checker.packed),
        tuple(m.name for m in schedule.prefetched), tuple(m.name for m in schedule.active),
    )  # fmt: skip
