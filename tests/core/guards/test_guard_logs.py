"""What a log notes, compares and forgets, and what it says where ranks differ."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compose.base.group import Group
from fsdp_compose.base.process import here
from fsdp_compose.base.streams import make_streams
from fsdp_compose.comm import collectives as comm
from fsdp_compose.comm import messages
from fsdp_compose.comm.collectives import Flags
from fsdp_compose.comm.counts import epoch_of
from fsdp_compose.core.guards import collective_log
from fsdp_compose.core.guards.collective_log import (
    DISCARD,
    DISCARDED,
    KEPT,
    Log,
    StepDiscarded,
    _Pending,
    code_of,
    is_debugging,
    set_debug,
)
from fsdp_compose.core.guards.rank_differences import WRITE, explain_difference, explain_frozen

from fuzz import groups_named
from harness import simulate_ranks
from models import Tower, by_block, data, mesh_of_replicas, one_unit, seeded, square, units

ONE, TWO = (5, "gather", "a", "forward"), (6, "reduce", "b", "backward")


class FakeGroup:
    """A process group over which nothing is sent."""


def group(*ranks: int, rank: int = 0) -> Group:
    """A group that only has a name here: nothing is sent over it."""
    pg: Any = FakeGroup()
    return Group(pg=pg, rank=rank, size=len(ranks), backend="none", ranks=ranks)


def log_over(*groups: Group, frozen: Sequence[tuple[str, str]] = ()) -> Log:
    param = SimpleNamespace(requires_grad=False)
    specs = [SimpleNamespace(unit=unit, fqn=name) for unit, name in frozen]
    entries: list[Any] = [SimpleNamespace(spec=spec, param=param) for spec in specs]
    return Log(groups, make_streams(torch.device("cpu")), lambda log: entries)


def log_like(model: nn.Module) -> Log:
    """A new log over the groups of the model's units."""
    (log,) = units(model)[0].links.logs
    return Log(log.groups, log.streams, log.find_entries)


def compared(*largest: int, smallest: Sequence[int]) -> Any:
    """What comes back of a comparison: the largest of each value, and whether all sent it."""
    found = [*largest, *(-value for value in smallest)]
    result = SimpleNamespace(tolist=lambda: found)
    return _Pending(result, None, 3, [ONE], [], [])  # type: ignore[arg-type]


class Raised(Exception):
    """What a test has ``Log._raise`` raise, with its arguments."""


@pytest.fixture
def caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors keep what they were to be made of."""

    def refuse(log: Log, groups: Any, step: int, events: Any, late: bool) -> None:
        raise Raised(groups, step, events, late)

    monkeypatch.setattr(Log, "_raise", refuse)


def test_a_new_log_has_noted_nothing() -> None:
    """It compares each collective, takes no step for proven, and shares nothing with others."""
    log, other = log_over(), log_over()
    assert (log.units, log.step, log.passes, log.hash) == (0, 1, 0, 0)
    assert (log.disagreements, log.doubts) == (0, 0)
    assert log.is_stepwise and log.pending is None
    assert not (log.is_proven or log.is_debugging or log.skippable)
    for name in ("events", "guesses", "channels", "unread", "unmet"):
        assert not getattr(log, name) and getattr(log, name) is not getattr(other, name)


def test_a_unit_is_numbered_and_compared_at_first() -> None:
    """Whatever was proven of the units before it."""
    log = log_over()
    log.is_stepwise, log.is_proven, log.passes = False, True, 7
    assert log.number_unit() != log.number_unit()
    assert (log.is_stepwise, log.is_proven, log.passes) == (True, False, 0)


def test_inference_of_a_later_unit_is_compared() -> None:
    """Collective by collective, though another unit of the same ranks was trained before."""

    def ranks(rank: int) -> None:
        model = one_unit(seeded(Tower))
        square(model, data(0, rank)).backward()
        (log,) = units(model)[0].links.logs
        assert not log.is_stepwise
        later = one_unit(seeded(Tower))
        for _ in range(2):
            with torch.no_grad():
                later(data(0, rank))
            assert log.is_stepwise
        square(later, data(0, rank)).backward()
        assert not log.is_stepwise

    simulate_ranks(ranks)


def test_codes_fit_beside_those_of_the_engine() -> None:
    """They are positive, fit in 62 bits and never are 0 or 1, which mean other things."""
    codes = {code_of("gather", number) for number in range(200)}
    assert len(codes) == 200
    assert all(0 < code < 1 << 62 and code & 2 for code in codes)
    assert {code & 1 for code in codes} == {0, 1} and max(codes) >= 1 << 61
    assert code_of("gather", (2, 1)) == 2042435971034037946  # in every process


def test_events_without_an_end_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards with gradients enabled and no backward keep a bounded list, and are no step."""
    monkeypatch.setattr(collective_log, "MAX_EVENTS", 4)

    def ranks(rank: int) -> None:
        model = one_unit(seeded(Tower), reshard_after_forward=True)
        (log,) = units(model)[0].links.logs
        most = 0
        for seed in range(10):
            model(data(seed, rank))
            most = max(most, len(log.events))
        assert most == 4
        assert (log.step, log.passes, len(log.events)) == (1, 2, 2)
        assert not log.is_proven

    simulate_ranks(ranks)


def test_a_step_without_events_is_none() -> None:
    """Nothing is sent for it, and it is not counted."""

    def ranks(rank: int) -> None:
        log = log_like(one_unit(seeded(Tower)))
        before = here.traffic.control
        log.end_step(trained=True)
        assert here.traffic.control == before
        assert (log.step, log.is_proven, log.is_stepwise) == (1, False, True)

    simulate_ranks(ranks)


def test_what_a_graph_captures_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its events are forgotten when the step ends, with what was guessed."""
    monkeypatch.setattr(collective_log, "is_capturing", lambda: True)

    def ranks(rank: int) -> None:
        log = log_like(one_unit(seeded(Tower)))
        before = here.traffic.control
        log.note((5 + rank, "gather", "a", "forward"))
        assert len(log.events) == 1 and log.hash
        log.guesses, log.doubts = [None], 1  # type: ignore[list-item]
        log.end_step(trained=True)
        assert (log.events, log.hash, log.guesses, log.doubts) == ([], 0, [], 0)
        assert (log.step, log.passes, log.pending) == (1, 0, None)
        assert here.traffic.control == before

    simulate_ranks(ranks)


def test_a_rank_that_does_something_else_is_found() -> None:
    """In the first step, before its collective is issued."""

    def ranks(rank: int) -> None:
        log = log_like(one_unit(seeded(Tower)))
        log.note(ONE)
        with pytest.raises(RuntimeError, match="as collective 2 of it, rank 0 gathers unit 'a'"):
            log.note((ONE, TWO)[rank])

    simulate_ranks(ranks)


def test_debug_mode_is_asked_for_and_left() -> None:
    """By this rank alone; a step learns from the others whether one of them did."""
    assert not is_debugging()
    try:
        set_debug()
        assert is_debugging()
        set_debug(False)
        assert not is_debugging()
        set_debug(True)
        assert is_debugging()
    finally:
        set_debug(False)


def test_a_comparison_is_read_when_the_next_step_ends() -> None:
    """On a device, unless each collective is compared; then at once."""
    log, checked = log_over(), list[Any]()
    made = [SimpleNamespace(mark=mark) for mark in ("a", "b", "c", None)]
    waiting = iter(made)
    log._compare = lambda code: next(waiting)  # type: ignore[method-assign]
    log._check = checked.append  # type: ignore[method-assign]
    for stepwise, pending, read in (
        (False, made[0], []),
        (False, made[1], made[:1]),
        (True, None, made[:3]),
        (False, None, made),
    ):
        log.is_stepwise, log.events = stepwise, [ONE]
        log.end_step(trained=True)
        assert log.pending is pending and checked == read


def test_trials_of_inference_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many passes without a step only their ends are compared."""
    monkeypatch.setattr(collective_log, "TRIAL_PASSES", 2)

    def ranks(rank: int) -> None:
        log = log_like(one_unit(seeded(Tower)))
        for is_stepwise in (True, False, False):
            log.note(ONE)
            log.end_step(trained=False)
            assert log.is_stepwise == is_stepwise and not log.is_proven

    simulate_ranks(ranks)


def test_a_step_is_counted_when_it_ends() -> None:
    """A pass without a backward is none; after it each collective is still compared."""

    def ranks(rank: int) -> None:
        log = log_like(one_unit(seeded(Tower)))
        found = []
        for trained in (False, True, False):
            for event in (ONE, TWO):
                log.note(event)
            assert log.events == [ONE, TWO] and 0 < log.hash < 1 << 62
            log.end_step(trained)
            assert (log.events, log.hash, log.guesses, log.doubts) == ([], 0, [], 0)
            found.append((log.step, log.passes, log.is_proven, log.is_stepwise))
        wanted = [(1, 1, False, True), (2, 1, True, False), (2, 2, True, False)]
        assert found == wanted

    simulate_ranks(ranks)


def test_orders_of_the_same_events_differ() -> None:
    """What the end of a step compares depends on the order, and on each event."""
    hashes = set()
    for events in ([ONE, TWO], [TWO, ONE], [ONE], [TWO], [ONE, ONE], [ONE, TWO, TWO]):
        log = log_over()
        log.is_stepwise = False
        for event in events:
            log.note(event)
        hashes.add(log.hash)
    assert len(hashes) == 6


@pytest.mark.usefixtures("caught")
def test_ranks_agree_if_code_and_hash_do() -> None:
    """Either alone is not enough; guesses and settings are compared where the step ended."""
    log = log_over()
    checked: list[Any] = []
    settings: list[Any] = []
    log._check_guesses = checked.append  # type: ignore[method-assign]
    log._check_settings = settings.append  # type: ignore[method-assign]
    for smallest in ([1, 9, 0, 0], [1, 9, -1, 0]):
        log._check(compared(1, 9, 0, 0, smallest=smallest))
        assert not log.is_debugging and not checked
    log._check(compared(5, 9, 2, 0, 4, smallest=[5, 9, 0, 0, 0]))
    log._check(compared(1, 9, 2, 0, 4, smallest=[1, 9, 2, 0, 4]))  # all used the same
    assert not checked
    log._check(compared(1, 9, 3, 0, 4, smallest=[1, 9, 0, 0, 0]))
    assert log.is_debugging and len(checked) == 1 and not settings
    log._check(compared(1, 9, 0, 7, smallest=[1, 9, 0, 6]))
    assert not log.is_debugging and len(checked) == len(settings) == 1
    for stepwise in (True, False):
        log.is_stepwise = stepwise
        for smallest in ([0, 9, 0, 0], [1, 8, 0, 0], [0, 8, 0, 0]):
            with pytest.raises(Raised) as error:
                log._check(compared(1, 9, 0, 0, smallest=smallest))
            late = smallest[1] != 9 and not stepwise  # else what was done before is the same
            assert error.value.args == (log.groups, 3, [ONE], late)


def test_a_comparison_on_a_device_stalls_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on the stream of reductions, into pinned memory, and is awaited when it is read."""
    done: list[Any] = []

    class Host:
        def copy_(self, source: Any, non_blocking: bool = False) -> Host:
            done.append(("copy", source, non_blocking))
            return self

        def tolist(self) -> list[int]:
            done.append("read")
            return [1, 2, -1, -3]

    class Scope(nullcontext[None]):
        def __enter__(self) -> None:
            done.append("enter")

        def __exit__(self, *_: object) -> None:
            done.append("leave")

    result = SimpleNamespace(device=torch.device("cuda"), shape=(8,), dtype=torch.int64)
    mark = SimpleNamespace(synchronize=lambda: done.append("wait"))
    streams = SimpleNamespace(
        device=result.device,
        reduce="reduce",
        on=lambda stream: Scope(),
        record=lambda stream: done.append(("record", stream)) or mark,
    )
    monkeypatch.setattr(comm, "span", lambda *sent: done.append(sent) or result)
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: done.append((a, k)) or Host())
    log = log_over(group(0, 1))
    log.streams, log.hash, log.doubts = streams, 9, 2  # type: ignore[assignment]
    pending = log._compare(5)
    monkeypatch.undo()
    assert pending.read() == ([1, 2], [True, False])
    assert done == [
        "enter",
        ([5, 9, 2, 0, hash((-1,)) % 2**62], log.groups, result.device, log),
        ((result,), {"device": "cpu", "pin_memory": True}),
        ("copy", result, True),
        ("record", "reduce"),
        "leave",
        "wait",
        "read",
    ]


def guess(model: nn.Module, used: Sequence[int], rank: int) -> tuple[Log, list[Any]]:
    """Ranks guess what others used in each block, where each rank used one entry of it before.

    Args:
        used: by block, what this rank uses now.

    Returns:
        The log, and the buckets of the blocks.
    """
    log = log_like(model)
    buckets = [unit.buckets[0] for unit in units(model)[1:]]
    for bucket, bits in zip(buckets, used, strict=True):
        bucket.history.agreed = 1 << rank, 15
        flags = Flags(bits, 5)
        log.guess_used(bucket, flags)
        assert flags.bits == bits | 15
    return log, buckets


def ends(log: Log) -> int:
    """How many messages the end of a step takes."""
    log.is_stepwise = False
    log.note(ONE)
    before = here.traffic.control
    log.end_step(trained=True)
    assert not log.guesses and not log.doubts
    return here.traffic.control - before


def test_guesses_that_were_right() -> None:
    """Nothing more is sent where ranks use what they used; else all learn what each uses now."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower), mesh=mesh_of_replicas(2, 2))
        usual = 1 << rank
        log, _ = guess(model, [usual] * 3, rank)
        assert log.doubts == 0 and ends(log) == 2
        now = usual | (rank == 3)  # and so two ranks use the first entry
        log, buckets = guess(model, [usual, now, now], rank)
        assert log.doubts == 2 * (rank == 3)
        assert ends(log) == 4
        assert [b.history.agreed for b in buckets] == [(usual, 15), (now, 15), (now, 15)]

    with groups_named("nccl"):
        simulate_ranks(ranks, 4)


@pytest.mark.parametrize("who", [0, 3])
def test_a_guess_that_was_wrong_is_named(who: int) -> None:
    """The first parameter that a rank began to use, or that none uses any more, on every rank."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower), mesh=mesh_of_replicas(2, 2))
        mine = 1 << rank
        began, stopped = (mine | 16, 0) if rank == who else (mine, mine)
        found = "parameter 'blocks.1.{}' of unit 'blocks.1': in step 1 {} rank .*{}"
        log, _ = guess(model, [mine, began, stopped], rank)
        wanted = found.format("down.weight", "some", "began to use it.*set_find_unused")
        with pytest.raises(RuntimeError, match=wanted):
            ends(log)
        log, _ = guess(model, [mine, stopped, began], rank)
        name = {0: "norm.weight", 3: "up.bias"}[who]
        wanted = found.format(name, "no", "used it any more, and the ranks took it for used")
        with pytest.raises(RuntimeError, match=wanted):
            ends(log)

    with groups_named("nccl"):
        simulate_ranks(ranks, 4)


def test_guesses_about_what_is_gone_are_dropped() -> None:
    """A model may be freed before its step is compared; what is known of no rank is a doubt."""

    def ranks(rank: int) -> None:
        model = one_unit(seeded(Tower))
        log = log_like(model)
        flags = Flags(1 << rank, 5)
        log.guess_used(units(model)[0].buckets[0], flags)
        assert (flags.bits, log.doubts) == (1 << rank, 1)
        del model
        log.end_step(trained=True)
        ends(log)

    simulate_ranks(ranks)


def test_disagreements_are_counted_by_group() -> None:
    """Messages over a group where none was are numbered as before, on every rank of it."""
    first, second, third = group(0, 1), group(0, 2), group(0, 3)
    log = log_over(first, second)
    assert [epoch_of(g) for g in (first, second, third)] == [0, 0, 0]
    log.events, log.hash, log.pending, log.is_stepwise = [ONE], 5, compared, False
    log.guesses, log.doubts = [None], 2  # type: ignore[list-item]
    log.unmet |= {first, third}
    log.start_over([first, second])
    assert (log.events, log.hash, log.pending, log.is_stepwise) == ([], 0, None, True)
    assert (log.guesses, log.doubts, log.disagreements) == ([], 0, 1)
    assert log.unmet == {third}
    log.start_over([second])
    assert [epoch_of(g) for g in (first, second, third)] == [1, 2, 0]
    assert log.disagreements == 2


def test_what_goes_ahead_of_a_collective() -> None:
    """The last event, the hash of those before it and how many they are."""
    log = log_over()
    log.is_stepwise = False
    assert log.head() == (0,) * 8
    for event in (ONE, TWO):
        log.note(event)
    assert log.head() == (6, log.hash, 2, 0, 0, 0, 0, 0)


@pytest.mark.usefixtures("caught")
def test_who_is_told_that_ranks_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group that data travels over, but not that which knows; only that one in a meeting."""
    first, second, third = group(0, 1), group(0, 2), group(0, 3)
    told: list[Any] = []
    monkeypatch.setattr(comm, "tell", lambda *args: told.append(args) or args[2])
    log = log_over(first, second)
    log.channels, log.events = dict.fromkeys([first, third]), [ONE]
    with pytest.raises(Raised) as error:
        log.disagree(first, meets=0)
    assert error.value.args == (log.groups, 1, [ONE], False)
    assert {one for *_, one in told} == {second, third}
    assert all(args[:2] == (log, 0) for args in told) and len(told) == 2
    for skippable, meets in (("open", KEPT), (None, KEPT), (None, DISCARDED)):
        log.skippable = skippable
        with pytest.raises(Raised) as error:
            log.disagree(first, meets)
        assert error.value.args == ((first,), 1, [ONE], False)
    log.skippable = "open"
    with pytest.raises(StepDiscarded, match="another rank discards this step"):
        log.disagree(second, meets=DISCARDED)
    assert log.unmet == {second} and len(told) == 2
    with pytest.raises(StepDiscarded):  # however often it tries to go on
        log.note(ONE)
    assert log.events == [ONE]
    with pytest.raises(Raised) as error:
        log.disagree(first, meets=0)
    assert error.value.args[0] is log.groups


def reporting(monkeypatch: pytest.MonkeyPatch, *others: Any) -> list[Any]:
    """What other ranks report comes before this rank's report; the groups that were asked."""
    asked: list[Any] = []

    def gather(reports: Any, over: Group, what: str) -> list[Any]:
        asked.append(over)
        return [[other] for other in others] + [reports] if len(asked) == 1 else [reports]

    monkeypatch.setattr(messages, "gather_objects", gather)
    return asked


def test_reports_are_in_the_order_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all groups; what was sent over these, and where data travels, is never read."""
    first, second, third = group(4, 7, rank=1), group(7, 9), group(7, 11)
    asked = reporting(monkeypatch, (9, [ONE], []), (8, [TWO], []))
    log = log_over(first, second)
    log.channels = {third: None}
    with pytest.raises(RuntimeError, match="in step 4: as collective 1 of it") as error:
        log._raise(log.groups, 4, [ONE], late=False)
    assert "ranks 7 and 9 gather unit 'a' (forward) where rank 8 reduces" in str(error.value)
    assert "found at the end" not in str(error.value)
    assert asked == [first, second]
    assert [epoch_of(g) for g in (first, second, third)] == [1, 1, 1]
    asked.clear()
    with pytest.raises(RuntimeError, match="found at the end of the step"):
        log._raise((first,), 4, [ONE], late=True)
    assert asked == [first]
    assert [epoch_of(g) for g in (first, second, third)] == [2, 1, 1]


def test_what_is_frozen_somewhere_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that discard the step come before even that, with the reasons they gave."""
    both = group(0, 1)
    reporting(monkeypatch, (1, [TWO], [("a", "w"), ("a", "x")]))
    log = log_over(both, frozen=[("a", "x")])
    with pytest.raises(RuntimeError, match=r"parameter 'w' of unit 'a' requires a gradient on"):
        log._raise(log.groups, 4, [ONE], late=False)
    event = (3, DISCARD, "", "nan")
    reporting(monkeypatch, (1, [ONE], []), (2, [], []), (3, [ONE, event], []))
    log = log_over(both, frozen=[("a", "x")])
    with pytest.raises(StepDiscarded, match=r"rank 3 discards this step \(nan\)") as error:
        log._raise(log.groups, 4, [ONE], late=False)
    assert error.value.reasons == {3: "nan"}


def test_a_rank_announces_that_it_discards() -> None:
    """As its last event, whose number no other event has."""
    log = log_over()
    log.announce_discard("inf in a gradient")
    ((number, *event),) = log.events
    assert event == [DISCARD, "", "inf in a gradient"]
    assert number not in {code_of(DISCARD, i) for i in range(99)} | {0, 1}
    assert log.head()[0] == number


def test_who_discards_a_step_is_named() -> None:
    """The rank that says why, if one does."""
    for told, text, reasons in (
        ({}, "another rank discards this step (as another rank does)", {}),
        ({1: ""}, "rank 1 discards this step (as another rank does)", {}),
        ({1: "", 2: "nan", 3: ""}, "rank 2 discards this step (nan)", {2: "nan"}),
    ):
        error = StepDiscarded(told)  # type: ignore[arg-type]
        assert str(error).startswith(text) and error.reasons == reasons


def test_what_only_some_ranks_train_is_explained() -> None:
    """With the first such parameter, who trains it, and how many more there are."""
    w, x, y = ("a", "w"), ("a", "x"), ("b", "y")
    assert explain_frozen(1, [(0, [w, x]), (1, [w, x])]) is None
    text = explain_frozen(2, [(0, [w]), (4, [x, w]), (5, [w])])
    assert text is not None and text.startswith(
        "ranks disagree on what is trained in step 2: parameter 'x' of unit 'a' requires a "
        "gradient on ranks 0 and 5 and not on rank 4. Call"
    )
    text = explain_frozen(2, [(0, [w, y]), (4, [x, w]), (5, [w, x]), (6, [w, y, x])])
    assert text is not None
    assert "on rank 0 and not on ranks 4, 5 and 6, and 1 more parameters differ. Call" in text


def test_where_events_are_the_same() -> None:
    """Messages of two tries have met, or a name is that of two units."""
    text = explain_difference(3, [(0, [ONE, TWO]), (1, [ONE, TWO])])
    assert "ranks were interrupted at different moments of step 3, as by Ctrl-C" in text
    text = explain_difference(3, [(0, [ONE]), (1, [ONE, TWO])])
    assert "as collective 2 of it, rank 0 ends the step where rank 1 reduces" in text
    text = explain_difference(3, [(0, [ONE]), (1, [(7, *ONE[1:])])])
    assert "gathers unit 'a' (forward) of one model where rank 1 gathers" in text
    assert "unit 'a' (forward) of another. Every" in text
    braces = [(number, "gather", "a{}", "forward") for number in (8, 9)]
    text = explain_difference(3, [(0, [TWO]), (1, [braces[0]]), (2, [braces[0]])])
    assert "rank 0 reduces unit 'b' (backward) where ranks 1 and 2 gather unit 'a{}' (" in text


def test_weights_that_ranks_write_are_explained() -> None:
    """Only where that is what they did differently."""
    write = (8, WRITE, "a", "parameter 'w'")
    text = explain_difference(3, [(0, [ONE, write]), (1, [ONE, TWO])])
    assert "ranks write different weights in step 3: rank 0 writes unit 'a' (parameter" in text
    assert "collective" not in text
    text = explain_difference(3, [(0, [write, ONE]), (1, [write, TWO])])
    assert "ranks run different units in step 3: as collective 2" in text
    text = explain_difference(3, [(0, [ONE, write]), (1, [TWO, write])])
    assert "ranks run different units in step 3: as collective 1" in text
