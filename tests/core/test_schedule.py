"""The rules of a step, explored: every order of events in small worlds keeps the invariants."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from fsdp_compose.core.schedule import Hold, Schedule

from small_worlds import (
    Broken,
    Explored,
    Refused,
    Switches,
    World,
    explore,
    explore_two_ranks,
)

APART, SIBLINGS, CHAIN = (None, None, None), (None, 0, 0), (None, 0, 1)
KEPT = {"by default": None, "kept": True, "released": False}
ROOT_AND_BLOCK = (None, 0)


@pytest.fixture(autouse=True)
def collects_nothing() -> Iterator[None]:
    """What an exploration keeps is no garbage; looking through it takes a quarter of its time."""
    gc.disable()
    yield
    gc.enable()


def explored(name: str, world: World) -> None:
    """Explore a world, for one rank and for two, and print how large it was."""
    found = explore(world)
    pairs = explore_two_ranks(found)
    assert pairs > len(found.states) > 500
    print(
        f"{name}: {len(found.states)} states, {found.transitions} transitions, {pairs} of 2 ranks"
    )


@pytest.mark.parametrize(("depth", "keep"), [(0, "by default"), *itertools.product([1, 2], KEPT)])
@pytest.mark.parametrize("units", [APART, SIBLINGS, CHAIN], ids=["apart", "siblings", "chain"])
def test_every_order_of_events_keeps_the_rules(units: Any, depth: int, keep: str) -> None:
    """Of three units, in two forwards, with checkpoints, user holds and exceptions anywhere."""
    world = World(units, depth=depth, switches=Switches(keep_after_forward=KEPT[keep]))
    explored(f"{units}, depth {depth}, {keep}", world)


@pytest.mark.parametrize("keep", KEPT)
def test_the_user_may_hold_any_unit_at_any_time(keep: str) -> None:
    """Between any two events; nothing is released while held, nor held for longer."""
    world = World(ROOT_AND_BLOCK, switches=Switches(keep_after_forward=KEPT[keep]), held=(0, 1))
    explored(f"user holds, {keep}", world)


@pytest.mark.parametrize("units", [APART, SIBLINGS], ids=["apart", "siblings"])
def test_a_unit_that_backward_does_not_read(units: Any) -> None:
    """It is gathered for its forward alone, and never ahead of a backward."""
    explored("not read in backward", World(units, passes=2, unread=[2]))


@pytest.mark.parametrize("over", [False, True], ids=["released", "kept over microbatches"])
@pytest.mark.parametrize("keep", KEPT)
def test_microbatches_accumulate_in_every_order(keep: str, over: bool) -> None:
    """What waits is reduced once, by the first backward after it that does not wait."""
    switches = Switches(keep_after_forward=KEPT[keep], keep_over_microbatches=over)
    explored(f"accumulating, {keep}", World(ROOT_AND_BLOCK, switches=switches, accumulates=True))


@pytest.mark.parametrize("keep", KEPT)
def test_inference_between_steps_keeps_the_rules(keep: str) -> None:
    """It has an order of its own, and leaves nothing gathered that training would not."""
    switches = Switches(keep_after_forward=KEPT[keep])
    explored(f"evaluating, {keep}", World(ROOT_AND_BLOCK, switches=switches, evaluates=True))


def test_a_rank_that_waits_for_what_nobody_starts() -> None:
    """Both ranks wait, and the events that led there are told."""
    happened = (("wait", "gather 0"), ("start", "gather 0"))
    found = Explored({(): 0, (1,): 1}, [(0, ""), (0, "backward begins")])
    found.follows = [[("backward begins", 1, happened)], [("backward ends", 0, ())]]
    with pytest.raises(Broken, match="backward begins; both ranks wait"):
        explore_two_ranks(found)


def test_what_was_expected_in_vain_is_released() -> None:
    """A unit that was gathered ahead and that another one ran instead of."""
    world = World(SIBLINGS, switches=Switches(keep_after_forward=False))
    for event in (world.enter, world.enter, world.leave, world.leave):
        event(len(world.stack))
    world.back(0)
    while world.ran:
        (world.reach if world.ran[-1][1] == "ended" else world.arrive)(0)
    world.end(0)
    world.enter(0)
    assert world.members[1].holds == {Hold.PREFETCH}
    world.enter(2)
    assert not world.members[1].holds


def test_what_could_not_be_gathered_is_not_held() -> None:
    """A gather that fails, for want of memory, leaves no reason behind: others may still hold."""
    world = World([None])
    unit, world.work.refused = world.members[0], 0
    for reasons in (set(), {Hold.KEPT}):
        unit.holds, world.work.full = set(reasons), {}
        with pytest.raises((Refused, Broken)):
            world.schedule.hold(unit, Hold.PREFETCH)
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


class GathersAgain(Schedule[Any, Any]):
    def leave_forward(self, unit: Any, backward: Any, training: bool, recomputing: bool) -> None:
        if recomputing:
            self.drop(unit, Hold.FORWARD)
        else:
            super().leave_forward(unit, backward, training, recomputing)


class LooksAnywhere(Schedule[Any, Any]):
    def look_ahead(self, unit: Any) -> None:
        self.prefetch(self.work.members[2:])
        super().look_ahead(unit)


class AsksWhatArrived(Schedule[Any, Any]):
    def _prefetch(self, policy: Any, depth: int, listed: Any, order: Any) -> None:
        if self.work.has_arrived():
            super()._prefetch(policy, depth, listed, order)


class GathersUnread(Schedule[Any, Any]):
    def _prefetch(self, policy: Any, depth: int, listed: Any, order: Any) -> None:
        self.prefetch(order.ahead(depth), depth)


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
    GathersAgain: "more often than it is called",
    LooksAnywhere: "has never run",
    AsksWhatArrived: "by what has arrived",
    GathersUnread: "that does not read it",
    KeepsForEver: "is packed while held",
    ForgetsFailures: "after a failure",
}


@pytest.mark.parametrize("schedule", BROKEN)
def test_a_broken_schedule_is_rejected(schedule: type[Schedule[Any, Any]]) -> None:
    """With the shortest history that shows it, in words."""
    switches = Switches(keep_after_forward=None if schedule is KeepsForEver else False)
    unread = [2] if schedule is GathersUnread else []
    world = World(SIBLINGS, switches=switches, schedule=schedule, accumulates=True, unread=unread)
    with pytest.raises(Broken, match=BROKEN[schedule]) as caught:
        explore(world)
    print(caught.value)
    assert "begins" in str(caught.value)
