"""The rules of a step, explored: every order of events in small worlds keeps the invariants."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from fsdp_compose import Prefetch
from fsdp_compose.core.schedule import Expected, Hold, Schedule


class Broken(Exception):
    """An invariant does not hold."""


@dataclass
class Switches:
    keep_after_forward: bool | None = None
    keep_over_microbatches: bool = False
    reshard_after_backward: bool = True
    sync: bool = True


@dataclass(eq=False)
class Member:
    """A unit of a small world."""

    name: str
    prefetch: Prefetch
    switches: Switches
    expected: Expected = field(default_factory=Expected)
    holds: set[Hold] = field(default_factory=set)
    gathers: int = 0  # in the pass under way


@dataclass
class Checker:
    """Work that moves nothing and raises where a rule of memory or gradients is broken."""

    depth: int
    full: dict[str, str] = field(default_factory=dict)  # "gathering" or "gathered"
    reducing: list[str] = field(default_factory=list)
    reduced: list[str] = field(default_factory=list)  # in the backward under way
    members: list[Member] = field(default_factory=list)
    aliased: str = "1"  # the unit whose gradients lie in its parameters

    def announce(self, unit: Member, reason: Hold) -> None:
        pass

    def gather(self, unit: Member, is_first: bool) -> None:
        if is_first != (unit.name not in self.full):
            raise Broken(f"{unit.name} is held first, and {self.full.get(unit.name, 'released')}")
        if is_first:
            self.full[unit.name] = "gathering"
            unit.gathers += 1
        ahead = sum(member.holds == {Hold.PREFETCH} for member in self.members)
        if ahead > self.depth:
            raise Broken(f"{ahead} units are gathered ahead")

    def wait(self, unit: Member) -> None:
        if unit.name not in self.full:
            raise Broken(f"waits for {unit.name}, which nobody gathered")
        self.full[unit.name] = "gathered"

    def release(self, unit: Member) -> None:
        if unit.holds:
            raise Broken(f"{unit.name} is released while held by {unit.holds}")
        self.full.pop(unit.name)

    def gathered_nbytes(self, unit: Member) -> int:
        return 1

    def held_nbytes(self) -> int:
        return len(self.full)

    def has_room(self, unit: Member) -> bool:
        return True

    def note_kept(self, unit: Member) -> None:
        if unit.name not in self.full:
            raise Broken(f"{unit.name} is kept and not gathered")

    def reread(self, unit: Member, in_backward: bool) -> None:
        pass

    def spread(self, unit: Member) -> None:
        pass

    def forget_spread(self, unit: Member) -> None:
        pass

    def read(self, unit: Member) -> None:
        if self.full.get(unit.name) != "gathered":
            raise Broken(f"{unit.name} is read while {self.full.get(unit.name, 'released')}")

    def reads_gathered(self, unit: Member, parts: Any) -> bool:
        return unit.name == self.aliased

    def pack(self, part: str) -> None:
        held = any(m.name == part and Hold.BACKWARD in m.holds for m in self.members)
        if held != (part == self.aliased):
            raise Broken(f"{part} is packed while {'held' if held else 'released'}")
        if self.reducing:
            raise Broken(f"{part} is packed while {self.reducing} is reduced")

    def is_complete(self, part: str) -> bool:
        return True

    def postpone(self, part: str) -> None:
        pass

    def reduce(self, parts: Any) -> None:
        for part in parts:
            if part in self.reduced:
                raise Broken(f"{part} is reduced twice")
            self.reduced.append(part)
            self.reducing.append(part)

    def finish_reductions(self) -> None:
        self.reducing.clear()


@dataclass
class World:
    """A schedule, its units, and where autograd and the caller's program are.

    Attributes:
        stack: units whose forward runs, outermost first.
        ran: units of the forward, in the order in which their backward will undo them.
        begun: units that ran in the forward under way, each once.
        place: "rest", "forward", "backward" or "recompute" (a checkpointed unit runs again).
        passes: outermost forwards that may still begin.
    """

    schedule: Schedule[Member, str]
    members: list[Member]
    stack: list[int] = field(default_factory=list)
    ran: list[int] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    opened: bool = False
    place: str = "rest"
    passes: int = 2

    @property
    def work(self) -> Any:
        return self.schedule.work

    def key(self) -> Any:
        """Two worlds with equal keys have equal futures."""
        names = {id(member): i for i, member in enumerate(self.members)}

        def visits(order: Any) -> Any:
            def index(refs: Any) -> Any:
                return tuple(names[id(ref())] for ref in refs)

            passes = tuple(map(index, order.recorded)), tuple(map(index, order.current))
            return passes, order.latest, order.place, order.cursor, order.is_open

        schedule = self.schedule
        return (
            tuple(frozenset(member.holds) for member in self.members),
            tuple(member.gathers for member in self.members),
            tuple(sorted(self.work.full.items())), tuple(self.work.reducing),
            tuple(names[id(member)] for member in schedule.prefetched),
            visits(schedule.forward_order), visits(schedule.backward_order),
            tuple(self.stack), tuple(self.ran), tuple(self.begun),
            self.opened, self.place, self.passes,
        )  # fmt: skip

    # What may happen next, as (words, method, argument)

    def moves(self) -> Iterator[tuple[str, str, int]]:
        count = len(self.members)
        if self.place == "rest":
            if self.passes:
                yield from ((f"forward of {i} begins", "enter", i) for i in range(count))
            if self.ran:
                yield "backward begins", "reach", self.ran[-1]
            yield from ((f"user gathers {i}", "hold", i) for i in range(1))
            if Hold.USER in self.members[0].holds:
                yield "user releases 0", "drop", 0
        elif self.place == "forward":
            inner = self.stack[-1] + 1
            if inner < count and inner not in self.begun:
                yield f"forward of {inner} begins", "enter", inner
            yield f"forward of {self.stack[-1]} ends", "leave", 0
            yield "an exception ends the forward", "fail", 0
        elif self.place == "backward":
            if self.opened:
                yield f"gradients of {self.ran[-1]} arrive", "arrive", 0
            elif self.ran:
                yield f"backward reaches {self.ran[-1]}", "reach", self.ran[-1]
                yield f"{self.ran[-1]} is recomputed", "recompute", self.ran[-1]
            else:
                yield "backward ends", "end", 0
            yield "an exception ends the backward", "fail", 0

    def enter(self, i: int) -> None:
        member = self.members[i]
        if not self.stack:
            self.passes -= 1
            self.begun = []
            for other in self.members:
                other.gathers = 0
        self.stack.append(i)
        self.begun.append(i)
        self.place = "forward"
        self.schedule.active.append(member)
        self.schedule.enter_forward(member, recomputing=False)
        self.work.read(member)
        self.schedule.look_ahead(member)

    def leave(self, _: int) -> None:
        i = self.stack.pop()
        self.work.read(self.members[i])
        self.schedule.active.pop()
        self.ran.append(i)
        self.schedule.leave_forward(self.members[i], "seen", training=True, recomputing=False)
        if not self.stack:
            self.schedule.end_forward(complete=True, training=True)
            self.place = "rest"

    def reach(self, i: int) -> None:
        if self.place == "rest":
            self.place = "backward"
            self.work.reduced.clear()
            for other in self.members:
                other.gathers = 0
            self.schedule.drop_prefetched()
        member = self.members[i]
        self.schedule.enter_backward(member)
        self.work.read(member)
        self.schedule.look_back(member)
        self.opened = True

    def recompute(self, i: int) -> None:
        member = self.members[i]
        self.schedule.active.append(member)
        self.schedule.enter_forward(member, recomputing=True)
        self.work.read(member)
        self.schedule.active.pop()
        self.schedule.leave_forward(member, "seen", training=True, recomputing=True)
        self.reach(i)

    def arrive(self, _: int) -> None:
        i = self.ran.pop()
        self.work.read(self.members[i])
        runs_again = i in self.ran  # what it brought is reduced with the last of its gradients
        if runs_again or self.members[i].name in self.work.reduced:
            self.schedule.leave_backward(self.members[i])
        else:
            self.schedule.receive(self.members[i], [self.members[i].name], ends_backward=True)
        self.opened = False

    def end(self, _: int) -> None:
        self.schedule.reduce_rest([])
        self.schedule.end_backward()
        self.place = "rest"

    def fail(self, _: int) -> None:
        self.work.finish_reductions()
        self.schedule.fail(self.members)
        self.stack, self.ran, self.opened, self.place = [], [], False, "rest"

    def hold(self, i: int) -> None:
        counted = self.members[i].gathers  # what the user asks for is not the pass's
        self.schedule.keep(self.members[i], Hold.USER)
        self.members[i].gathers = counted

    def drop(self, i: int) -> None:
        self.schedule.drop(self.members[i], Hold.USER)

    def check(self) -> None:
        """What holds between any two events."""
        for member in self.members:
            if bool(member.holds) != (member.name in self.work.full):
                raise Broken(f"{member.name} is held by {member.holds}: {self.work.full}")
            if member.gathers > 2:
                raise Broken(f"{member.name} is gathered a third time in a pass")
            at_rest = self.place == "rest" and not self.ran
            if at_rest and member.holds - {Hold.USER, Hold.PREFETCH}:
                raise Broken(f"{member.name} is held by {member.holds} at rest")


def small_world(
    count: int, depth: int, keep: bool | None, schedule: type[Schedule[Any, Any]], passes: int
) -> World:
    switches = Switches(keep_after_forward=keep)
    members = [Member(str(i), Prefetch(depth, depth), switches) for i in range(count)]
    work = Checker(depth, members=members)
    return World(schedule(work), members, passes=passes)


def explore(start: World, limit: int = 6000) -> int:
    """How many states there are; raises with the shortest way to a broken one.

    Raises:
        Broken: an invariant does not hold; the message lists the events that led there.
    """
    seen = {start.key()}
    layer: list[tuple[World, tuple[str, ...]]] = [(start, ())]
    while layer and len(seen) < limit:
        following = []
        for world, history in layer:
            for words, method, argument in list(world.moves()):
                # Orders refer to members weakly: copied together, so that they find the copies.
                other = copy.deepcopy(world, memo_of(world))
                try:
                    getattr(other, method)(argument)
                    other.check()
                except Broken as error:
                    raise Broken("; ".join([*history, words, str(error)])) from None
                key = other.key()
                if key not in seen:
                    seen.add(key)
                    following.append((other, (*history, words)))
        layer = following
    return len(seen)


def memo_of(world: World) -> dict[Any, Any]:
    """For ``deepcopy``: weak references to members become those to their copies."""
    memo: dict[Any, Any] = {}
    copies = [copy.deepcopy(member, memo) for member in world.members]
    refs = memo["kept alive"] = [weakref.ref(member) for member in world.members]
    memo.update((id(ref), weakref.ref(copied)) for ref, copied in zip(refs, copies, strict=True))
    return memo


@pytest.mark.parametrize(
    ("count", "depth", "keep"),
    [(2, 0, None), (2, 1, None), (2, 1, True), (2, 1, False), (3, 1, False), (3, 2, None)],
)
def test_every_order_of_events_keeps_the_rules(count: int, depth: int, keep: bool | None) -> None:
    """Reads find gathered units, nothing is released while held, nothing stays at rest."""
    states = explore(small_world(count, depth, keep, Schedule, passes=2), limit=1200)
    assert states > 100
    print(f"{count} units, depth {depth}, keep {keep}: {states} states")


def test_what_was_expected_in_vain_is_released() -> None:
    """A unit that was gathered ahead and that another one ran instead of."""
    world = small_world(3, 1, False, Schedule, passes=2)
    for event in (world.enter, world.enter, world.leave, world.leave):
        event(len(world.stack))
    while world.ran:
        world.reach(world.ran[-1])
        world.arrive(0)
    world.end(0)
    world.enter(0)
    assert world.members[1].holds == {Hold.PREFETCH}
    world.enter(2)
    assert not world.members[1].holds


def test_what_could_not_be_gathered_is_not_held() -> None:
    """A gather that fails, for want of memory, leaves no reason behind: others may still hold."""
    world = small_world(1, 1, False, Schedule, passes=1)
    unit, schedule = world.members[0], world.schedule
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checker, "gather", lambda self, *_: self.full.update({"0": ""}) or 1 / 0)
        for reasons in (set(), {Hold.KEPT}):
            unit.holds = set(reasons)
            with pytest.raises(ZeroDivisionError):
                schedule.hold(unit, Hold.PREFETCH)
            assert unit.holds == reasons


class ForgetsToHold(Schedule[Any, Any]):
    def enter_backward(self, unit: Any) -> None:
        self.work.wait(unit)


class OneTooMany(Schedule[Any, Any]):
    def _prefetch(self, policy: Any, depth: int, listed: Any, order: Any) -> None:
        super()._prefetch(policy, depth + 1, listed, order)


class NeverWaits(Schedule[Any, Any]):
    def enter_forward(self, unit: Any, recomputing: bool) -> None:
        self.hold(unit, Hold.FORWARD)
        self.drop(unit, Hold.PREFETCH)


class ReducesTwice(Schedule[Any, Any]):
    def receive(self, unit: Any, parts: Any, ends_backward: bool) -> None:
        super().receive(unit, [*parts, *parts], ends_backward)


class PacksEarly(Schedule[Any, Any]):
    def receive(self, unit: Any, parts: Any, ends_backward: bool) -> None:
        self.work.finish_reductions = lambda: None
        super().receive(unit, parts, ends_backward)
        del self.work.finish_reductions


class PacksBeforeRelease(Schedule[Any, Any]):
    def receive(self, unit: Any, parts: Any, ends_backward: bool) -> None:
        super().receive(unit, parts, ends_backward=False)
        self.leave_backward(unit)


class ReleasesBeforePack(Schedule[Any, Any]):
    def receive(self, unit: Any, parts: Any, ends_backward: bool) -> None:
        self.leave_backward(unit)
        super().receive(unit, parts, ends_backward=False)


class ReleasesWhileHeld(Schedule[Any, Any]):
    def drop(self, unit: Any, reason: Hold) -> None:
        if reason in unit.holds:
            unit.holds.remove(reason)
            self.work.release(unit)


class KeepsForEver(Schedule[Any, Any]):
    def leave_backward(self, unit: Any, ended: bool = False) -> None:
        pass


class ForgetsFailures(Schedule[Any, Any]):
    def fail(self, units: Any) -> None:
        self.active.clear()


BROKEN = {
    ForgetsToHold: "waits for",
    OneTooMany: "gathered ahead",
    NeverWaits: "is read while gathering",
    ReducesTwice: "reduced twice",
    PacksEarly: "is reduced$",
    PacksBeforeRelease: "is packed while held",
    ReleasesBeforePack: "is packed while released",
    ReleasesWhileHeld: "is released while held",
    KeepsForEver: "is packed while held",
    ForgetsFailures: "at rest",
}


@pytest.mark.parametrize("schedule", BROKEN)
def test_a_broken_schedule_is_rejected(schedule: type[Schedule[Any, Any]]) -> None:
    """With the shortest history that shows it, in words."""
    keeps = None if schedule is KeepsForEver else False
    world = small_world(3, 1, keeps, schedule, passes=2)
    with pytest.raises(Broken, match=BROKEN[schedule]) as caught:
        explore(world, limit=4000)
    assert "begins" in str(caught.value)
