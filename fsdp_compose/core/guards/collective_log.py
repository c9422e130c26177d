"""Ranks compare what they communicate: where they run different units, every rank raises.

The groups of a unit share a log, and each gather and reduction of the unit is an event in it. In
the first step, and in debug mode in every step, the ranks compare the event before each collective.
In other steps they compare a running hash of all events when the step ends. Both comparisons send
the same message by the same collective, so a rank that is about to gather meets a rank that is
about to reduce or to end its step.

A comparison is a maximum over ranks of a few integers. On a CPU the host reads it at once, so a
step that mixed up its units raises before the optimizer sees its gradients. On gloo the same
message also goes ahead of each collective in every step, and is read with it. On an accelerator the
comparison runs beside the compute, and the host reads it at the end of the next step, when the
result has arrived: it never waits for the step that it has just issued.

Whether an optimizer has stepped since the last comparison is the last event of a step: a rank that
left the step out has old slices of weights that are new on the others. With what settings it has
stepped is part of the message: where that differs, the ranks compare them by parameter.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import torch

from fsdp_compose.base.arguments import check_flags
from fsdp_compose.base.group import Group
from fsdp_compose.base.mesh import Mesh
from fsdp_compose.base.process import here
from fsdp_compose.base.streams import Streams, is_capturing
from fsdp_compose.buckets.bucket import Bucket, Entry
from fsdp_compose.comm import collectives as comm
from fsdp_compose.comm.counts import end_epoch
from fsdp_compose.comm.heads import answer_for
from fsdp_compose.comm.messages import RUNNING, gather_in_turn
from fsdp_compose.core.guards.compared_steps import Settings, Steps, number_of, texts_of
from fsdp_compose.core.guards.guessed_use import Guess, make_guess, sum_up, take_back_zeros
from fsdp_compose.core.guards.rank_differences import (
    ALONE,
    DISCARD,
    LATE,
    STEPPED,
    Event,
    Frozen,
    differ_in_writes,
    explain_added,
    explain_difference,
    explain_frozen,
    explain_settings,
    explain_stepped,
    explain_unknown,
    have_same_parameters,
)

TRIAL_PASSES = 32
"""How many inference passes compare each collective, if no training step comes first."""

MAX_EVENTS = 1 << 16
"""Compare after this many events where no step ends, as in inference with gradients enabled."""

_DISAGREED, _END, _DISCARDED = 0, 1, 3
KEPT, DISCARDED = 1, 2  # how a rank ends a skippable step
_FAILED = 4  # and its number: it failed where others wait for it
_FACTOR = 0x5851F42D4C957F2D
_MASK = (1 << 62) - 1


def set_debug(enabled: bool = True) -> None:
    """Have ranks compare their units before each collective of every step, not only of the first.

    A rank that runs another unit than the others then raises at that moment, with both units named.
    Without it the end of the step finds the difference, or, where ranks issue different numbers of
    collectives, they wait for each other until the process group's timeout. Debug mode costs a
    small blocking collective per gather and reduction. It takes effect when the step under way
    ends, on every rank if one asks for it. The environment variable ``FSDP_COMPOSE_DEBUG=1`` turns
    it on from the start.
    """
    check_flags("set_debug", enabled=enabled)
    here.is_debugging = enabled


def is_debugging() -> bool:
    """Whether this rank asked every step to make the checks of the first one."""
    return here.is_debugging


def code_of(*key: Any) -> int:
    """Return a number that is the same on every rank and in every run."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _MASK | 2


_STEPPED = code_of(STEPPED)


Report = tuple[int, list[Event], Frozen]
"""A rank, its events since the ranks last agreed, and what it does not train."""


@dataclass(eq=False)
class _Pending:
    """A comparison whose result the host has not read yet, and the events that it compares."""

    result: torch.Tensor
    mark: Any  # of the stream, after the comparison; None on a CPU
    step: int
    events: list[Event]
    guesses: list[Guess]
    settings: list[Settings]

    def read(self) -> tuple[list[int], list[bool]]:
        """Wait for the result; the largest of each integer, and whether every rank sent it."""
        if self.mark is not None:
            self.mark.synchronize()
        found = self.result.tolist()
        high, low = found[: len(found) // 2], found[len(found) // 2 :]
        return high, [a == -b for a, b in zip(high, low, strict=True)]


@dataclass(eq=False)
class Log:
    """What this rank communicated over some groups since the ranks last compared it."""

    groups: tuple[Group, ...]
    streams: Streams
    find_entries: Callable[[Log], list[Entry]]  # of the units whose collectives it notes
    units: int = 0  # made so far; gives units the same numbers on every rank
    step: int = 1
    passes: int = 0  # of inference, while ``is_stepwise``
    is_stepwise: bool = True  # compare before each collective
    is_proven: bool = False  # the ranks agreed about a whole training step
    is_debugging: bool = False  # some rank asked for debug mode
    hash: int = 0
    events: list[Event] = field(default_factory=list)
    pending: _Pending | None = None
    disagreements: int = 0
    guesses: list[Guess] = field(default_factory=list)
    doubts: int = 0  # guesses whose bucket used other entries here than when ranks last compared
    channels: dict[Group, None] = field(default_factory=dict)  # groups that data travels over
    unread: dict[Any, deque[comm.Heads]] = field(default_factory=dict)  # see heads.py
    skippable: Literal["open", "over"] | None = None  # a step whose end meets all groups in order
    unmet: set[Group] = field(default_factory=set)  # groups that ended it ahead of this rank
    steps: Steps = field(default_factory=Steps)  # since the ranks last compared

    def __post_init__(self) -> None:
        answer_for(self, self.groups)

    @property
    def place(self) -> tuple[int, int, Sequence[int]]:
        """Where it comes among others of a rank, which end a step in one order on every rank.

        A rank of a mesh of two axes is in groups of other ranks than the rest of the mesh, so only
        sizes are compared there; logs in the same place keep the order they were made in.
        """
        sizes = [group.size for group in self.groups]
        return math.prod(sizes), len(sizes), self.groups[0].ranks if len(sizes) == 1 else ()

    def inner_channels(self) -> set[Group]:
        """The groups that data travels over, and over which nothing is compared."""
        return {*self.channels}.difference(self.groups)

    def number_unit(self) -> int:
        """Give a new unit its number; its first step is compared before each collective."""
        self.units += 1
        self.is_stepwise, self.is_proven, self.passes = True, False, 0
        return self.units

    def note(self, event: Event) -> None:
        """Record an event whose collective comes next, and compare it where that is due.

        Raises:
            RuntimeError: another rank is about to do something else.
        """
        if self.skippable == "over":  # which was raised and caught, and no other rank goes on
            raise StepDiscarded({})
        if len(self.events) >= MAX_EVENTS:
            self.end_step(trained=False)
        if not self.events and self.steps.have_writes():
            self._add_writes()
        self.events.append(event)
        if self.is_stepwise and not is_capturing():
            self._check(self._compare(event[0]))
        self.hash = (self.hash * _FACTOR + event[0]) & _MASK

    def compare_now(self, events: Sequence[Event]) -> None:
        """Compare ``events``, of which no collective comes next, before this rank goes on.

        Raises:
            RuntimeError: another rank does something else.
        """
        if is_capturing():
            return
        begun = len(self.events)
        self.events += events
        self._check(self._compare(code_of(*(number for number, *_ in events))))
        del self.events[begun:]

    def end_step(self, trained: bool) -> None:
        """After a backward, or a forward without one: compare the events since the last comparison.

        What a CUDA graph captures is not compared, as the host can read nothing until it runs.

        Raises:
            RuntimeError: another rank did something else.
        """
        if not self.events:
            return
        if is_capturing():
            self._forget()
            return
        previous, self.pending = self.pending, None
        if previous is not None:
            self._check(previous)
        if self.steps.have_writes():
            self._add_writes()
        if self.steps.parameter is not None:
            self.events.append((_STEPPED, STEPPED, *self.steps.parameter))
            self.hash = (self.hash * _FACTOR + _STEPPED) & _MASK
        comparison = self.compare_guesses()
        if self.is_stepwise or comparison.mark is None:
            self._check(comparison)
        else:
            self.pending = comparison
        self._forget()
        self.step += trained
        self.passes += not trained
        self.is_proven |= trained
        if self.is_proven or self.passes >= TRIAL_PASSES:
            self.is_stepwise = self.is_debugging

    def compare_guesses(self) -> _Pending:
        """Compare what the ranks did; where all turned alike to other entries, that is known now.

        A rank that has no doubt about its guesses waits for nothing.
        """
        comparison = self._compare(_END)
        if self.doubts and all(comparison.read()[1]):
            take_back_zeros(self.guesses)
            self.guesses, self.doubts = [one for one in self.guesses if not one.is_doubted], 0
        return comparison

    def _add_writes(self) -> None:
        """Let what was written into parameters be events, for the next comparison."""
        for event in self.steps.take_writes():
            self.events.append(event)
            self.hash = (self.hash * _FACTOR + event[0]) & _MASK

    def _forget(self) -> None:
        """Begin a step: what the last one did is compared, or never will be."""
        self._forget_events()
        self.steps.forget_all()

    def _forget_events(self) -> None:
        self.events, self.hash = [], 0
        self.guesses, self.doubts = [], 0

    def _compare(self, code: int) -> _Pending:
        """Send this rank's event and hash to all ranks of the groups."""
        settings = self.steps.list_settings() if code == _END else []
        values = [code, self.hash, here.is_debugging + 2 * (self.doubts > 0), number_of(settings)]
        streams = self.streams
        if streams.device.type != "cpu" or not all(map(comm.is_point_to_point, self.groups)):
            rank = self.groups[0].ranks[self.groups[0].rank]
            values.append(hash(sum_up(self.guesses, rank)) & _MASK if self.doubts else 0)
        with streams.on(streams.reduce):
            result = comm.span(values, self.groups, streams.device, self)
            mark = None
            if result.device.type != "cpu":
                host = torch.empty_like(result, device="cpu", pin_memory=True)
                result = host.copy_(result, non_blocking=True)
                mark = streams.record(streams.reduce)
        return _Pending(result, mark, self.step, self.events, self.guesses, settings)

    def _check(self, comparison: _Pending) -> None:
        """Raise where the ranks sent different events or hashes."""
        (code, _, flags, *_), agree = comparison.read()
        self.is_debugging = flags % 2 > 0  # where ranks have doubts, perhaps a step later
        if agree[0] and agree[1]:
            if flags > 1 and code == _END and not all(agree[4:]):
                self._check_guesses(comparison)
            if not agree[3]:
                self._check_settings(comparison)
            return
        late = not agree[1] and not self.is_stepwise
        self._raise(self.groups, comparison.step, comparison.events, late)

    def guess_used(self, bucket: Bucket, used: comm.Flags) -> None:
        """Add to ``used`` what other ranks used when last compared; this step's end checks that."""
        made = make_guess(bucket, used)
        self.doubts += made.is_doubted
        self.guesses.append(made)

    def _check_guesses(self, comparison: _Pending) -> None:
        """Learn what all ranks used, because some rank used other parameters than before.

        Raises:
            RuntimeError: a guess was wrong; names the parameter.
        """
        wrong = ""
        mine = [(guess.here, guess.anywhere) for guess in comparison.guesses]
        reports = gather_in_turn(mine, self.groups, RUNNING)
        for guess, *found in zip(comparison.guesses, *reports, strict=True):
            bucket, anywhere, missed = guess.bucket(), 0, 0
            for used, _ in found:
                anywhere |= used
            for _, taken in found:
                missed |= taken ^ anywhere
            if bucket is not None:
                bucket.history.agreed = guess.here, anywhere
                if missed and not wrong:
                    index = missed.bit_length() - 1
                    spec, is_used = bucket.entries[index].spec, bool(anywhere >> index & 1)
                    wrong = explain_unknown(spec.fqn, spec.unit, comparison.step, is_used)
        if wrong:
            raise RuntimeError(wrong)

    def _check_settings(self, comparison: _Pending) -> None:
        """Compare by parameter what optimizers have stepped with, as something of it differs.

        Raises:
            RuntimeError: a parameter was stepped in other ways; names it, the ranks and the ways.
        """
        texts = texts_of(comparison.settings, self.find_entries(self))
        mine = self.groups[0].ranks[self.groups[0].rank], texts
        reports = gather_in_turn(mine, self.groups, RUNNING)
        reports.sort(key=lambda found: found[0])
        if text := (
            explain_added(comparison.step, reports) or explain_settings(comparison.step, reports)
        ):
            self._forget()  # the next step is compared by itself
            raise RuntimeError(text)
        self.steps.are_compared = have_same_parameters(reports)

    def head(self) -> comm.Head:
        """The message that goes ahead of the next collective: the event and the hash so far."""
        code = self.events[-1][0] if self.events else 0
        return (code, self.hash, len(self.events), 0, 0, 0, 0, 0)

    @contextlib.contextmanager
    def alone(self, purpose: str, kind: str) -> Iterator[comm.Head]:
        """Scope of a collective that no step issues, the last event of this rank while it lasts."""
        event = (code_of(ALONE, kind), ALONE, "", purpose)
        self.events.append(event)
        try:
            yield (event[0], 0, 0, 0, 0, 0, 0, 0)
        finally:
            if self.events and self.events[-1] is event:  # ranks that differ forget all events
                self.events.pop()

    def disagree(self, group: Group, meets: int) -> NoReturn:
        """Raise where a message ahead of data differed, which only the ranks of ``group`` know.

        They tell the other groups, whose ranks hear of it where they wait for data of these, or
        will, and tell others in turn; then all compare what they did. Where a rank ``meets`` the
        others, at the end of a skippable step, it tells its groups itself; a rank that is inside
        the step compares at its end, since the others may wait for it in another group first.

        Raises:
            RuntimeError: always.
        """
        if meets >= _FAILED:
            self._tell_failure(meets, group)
            self.steps.failures += 1
            raise RuntimeError(
                f"rank {meets - _FAILED} failed inside a scope of gathered(writeback=True) or "
                "apply(), for whose end this rank waits; nothing was written. See its error; then "
                "every rank may begin it again."
            )
        if meets == DISCARDED and self.skippable:
            self.unmet.add(group)
            self.skippable = "over"
            raise StepDiscarded({})
        if meets:
            self._raise((group,), self.step, self.events, late=False)
        self._tell_others(_DISAGREED, group)
        self._raise(self.groups, self.step, self.events, late=False)

    def _tell_others(self, code: int, group: Group | None) -> None:
        """Tell the ranks of all groups but this one, without waiting for them."""
        others = dict.fromkeys((*self.channels, *self.groups)).keys() - {group}
        with contextlib.ExitStack() as rest:  # where a rank has died, other groups are told yet
            for other in others:
                rest.callback(comm.tell, self, code, other)

    def announce_failure(self, rank: int) -> None:
        """Tell ranks that wait for this one, or will, that it failed; they raise, and go on.

        Nothing waits here, so that the error is seen even where the others never come. On
        accelerators nothing is told.
        """
        if all(map(comm.is_point_to_point, self.groups)):
            with contextlib.suppress(RuntimeError):  # one has died, which the others notice
                self._tell_failure(_FAILED + rank, None)

    def _tell_failure(self, code: int, group: Group | None) -> None:
        try:
            self._tell_others(code, group)
        finally:
            self.start_over([*{*self.groups, *self.channels}])

    def _raise(
        self, groups: Sequence[Group], step: int, events: list[Event], late: bool
    ) -> NoReturn:
        """Exchange the events over ``groups``, and raise with what differs first."""
        ended = [*{*groups, *self.channels}] if groups is self.groups else groups
        try:
            reports = self._exchange(groups, events)
            if groups is self.groups:
                comm.end_messages(self.inner_channels(), RUNNING)
            done = [(rank, events) for rank, events, _ in reports]
            if explain_stepped(step, done) or differ_in_writes(done):
                self._forget()  # as it is told
        finally:  # after Ctrl-C, too: what was sent for it meets no later exchange
            self.start_over(ended)
        if discards := {
            r: events[-1][3] for r, events, _ in reports if events and events[-1][1] == DISCARD
        }:
            self.skippable = self.skippable and "over"
            raise StepDiscarded(discards)
        if text := explain_stepped(step, done):
            raise RuntimeError(text)
        frozen = explain_frozen(step, [(rank, names) for rank, _, names in reports])
        text = frozen or explain_difference(step, done)
        raise RuntimeError(f"{text} {LATE}" if late else text)

    def _exchange(self, groups: Sequence[Group], events: list[Event]) -> list[Report]:
        """What each rank of ``groups`` has done, by rank."""
        found = self.find_entries(self)
        frozen = {(e.spec.unit, e.spec.fqn) for e in found if not e.param.requires_grad}
        mine = groups[0].ranks[groups[0].rank], events, sorted(frozen)
        return sorted(gather_in_turn(mine, groups, RUNNING), key=lambda report: report[0])

    def ask_who_reduces(self, unit: str) -> None:
        """Before an error: raise where others wait for gradients that this rank did not reduce.

        For units without gathers, over which a step that reduces nothing sends nothing either: its
        end was not compared. Ranks that reduce are told where they wait, as in ``disagree``.

        Raises:
            RuntimeError: some do, and which.
        """
        if not all(map(comm.is_point_to_point, self.groups)):
            return
        channels = [*dict.fromkeys((*self.channels, *self.groups))]
        for group in channels:
            comm.tell(self, _DISAGREED, group)
        kept = [(_END, "accumulate", unit, "without synchronisation")]
        reports = self._exchange(self.groups, kept)
        if any(events != kept for _, events, _ in reports):
            self.start_over(channels)
            raise RuntimeError(
                explain_difference(self.step, [(rank, done) for rank, done, _ in reports])
            )
        for group in channels:  # nobody reads what was told
            end_epoch(group)

    def announce_discard(self, reason: str) -> None:
        """Have this rank's next message tell the others that it discards the step."""
        self.events.append((_DISCARDED, DISCARD, "", reason))

    def start_over(self, groups: Sequence[Group]) -> None:
        """Forget the step's events; what was sent over ``groups`` for them is never read.

        What was stepped and written before it is compared when the next step ends. No rank has done
        that yet: one that found a difference has told all groups of it before they could agree.
        """
        self.steps.recall()
        self._forget_events()
        self.pending, self.is_stepwise = None, True
        self.disagreements += 1
        for group in groups:
            end_epoch(group)
        self.unmet -= set(groups)


class StepDiscarded(RuntimeError):
    """Raised where some ranks discard the step; ``reasons`` says why, by rank, if known."""

    def __init__(self, told: dict[int, str]) -> None:
        rank, reason = max(told.items(), key=lambda item: bool(item[1]), default=(None, ""))
        who = "another rank" if rank is None else f"rank {rank}"
        super().__init__(
            f"{who} discards this step ({reason or 'as another rank does'}), for which this "
            "rank waits. Run it inside `with fsdp_compose.skippable_step(model):` on every rank."
        )
        self.reasons = {rank: reason for rank, reason in told.items() if reason}


def log_key(mesh: Mesh) -> tuple[Any, ...]:
    """What meshes have in common whose collectives are compared together; () for none."""
    if any(group.backend == "fake" for group in mesh.groups):
        return ()
    return tuple(group.pg for group in mesh.groups)
