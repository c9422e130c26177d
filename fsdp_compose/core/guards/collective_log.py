"""Compares what ranks communicate: different units raise, and their weights are never mixed.

Every gather and reduction of a unit is an event of the log of its groups. In the first step, and in
debug mode in every step, the ranks compare the event before each collective; otherwise a running
hash of the step's events at its end. Both comparisons send the same message by the same collective,
so that a rank that is about to gather meets one that is about to reduce or to end its step.

A comparison is a maximum over ranks of a few integers. On a CPU it is read at once: a step that
mixed up its units raises before the optimizer sees its gradients; on gloo, in every step, the same
message also goes ahead of each collective, and is read with it. On an accelerator it runs beside
the compute and is read at the end of the next step, when it has long been there: the host never
waits for the step that it has just issued.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from fsdp_compose.base.group import Group
from fsdp_compose.base.mesh import Mesh
from fsdp_compose.base.process import here
from fsdp_compose.base.streams import Streams, is_capturing
from fsdp_compose.buckets.bucket import Bucket
from fsdp_compose.comm import collectives as comm

Event = tuple[int, str, str, str]
"""(its number, a verb, name of the unit, for what); the number tells events apart."""

TRIAL_PASSES = 32
"""Inference passes whose collectives are compared one by one, if no training step comes first."""

MAX_EVENTS = 1 << 16
"""Without an end of a step, as in inference with gradients enabled, compare after so many."""

DISCARD = "discard"
_END, _DISCARDED = 1, 3
_FACTOR = 0x5851F42D4C957F2D
_MASK = (1 << 62) - 1


def set_debug(enabled: bool = True) -> None:
    """Compare units over the ranks before each collective of every step, not of the first alone.

    A rank that runs another unit than the others is then an error that names both, at the moment it
    happens, where otherwise the step's end finds it, or where ranks wait for each other until the
    process group's timeout, as they issue different numbers of collectives. It costs a small
    blocking collective per gather and reduction. It takes effect at the end of the step that runs,
    on every rank if one asks for it. The environment variable ``FSDP_COMPOSE_DEBUG=1`` does the
    same from the start.
    """
    here.is_debugging = enabled


def is_debugging() -> bool:
    """Whether this rank asked for checks in every step that otherwise only the first makes."""
    return here.is_debugging


WRITE = "write"
_WRITING = (
    "What a forward writes into a parameter must be the same on every rank, and where that is "
    "sharded it would be lost: write it outside of forward, after optimizer.step()."
)


def code_of(*key: Any) -> int:
    """Return a number that is the same on every rank and in every run."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _MASK | 2


@dataclass(frozen=True, eq=False)
class Guess:
    """What this rank took for used by any rank, before it could know; bits by entry."""

    bucket: weakref.ref[Bucket]
    here: int  # used by this rank
    anywhere: int


Frozen = list[tuple[str, str]]
"""(unit, parameter) of what a rank does not train."""


@dataclass(eq=False)
class _Pending:
    """A comparison whose result the host has not read yet, and what it compares."""

    result: torch.Tensor
    mark: Any  # stream mark behind it
    step: int
    events: list[Event]
    guesses: list[Guess]

    def read(self) -> list[int]:
        if self.mark is not None:
            self.mark.synchronize()
        return self.result.tolist()


@dataclass(eq=False)
class Log:
    """What this rank communicated over some groups since the ranks last compared it."""

    groups: tuple[Group, ...]
    streams: Streams
    find_frozen: Callable[[Log], Frozen]
    units: int = 0  # how many were made, which numbers them alike on every rank
    step: int = 1
    passes: int = 0  # of inference, while ``is_stepwise``
    is_stepwise: bool = True  # compare before each collective
    is_proven: bool = False  # a training step went well
    is_debugging: bool = False  # some rank asked for it
    hash: int = 0
    events: list[Event] = field(default_factory=list)
    pending: _Pending | None = None
    disagreements: int = 0
    epochs: dict[Group, int] = field(default_factory=dict)  # the same, by group
    guesses: list[Guess] = field(default_factory=list)
    doubts: int = 0  # guesses that are not those of the last comparison

    def number_unit(self) -> int:
        """Give a new unit its number; its first step is compared before each collective."""
        self.units += 1
        self.is_stepwise, self.is_proven, self.passes = True, False, 0
        return self.units

    def note(self, event: Event) -> None:
        """Note that ``event`` is about to communicate.

        Raises:
            RuntimeError: another rank is about to do something else.
        """
        if len(self.events) >= MAX_EVENTS:
            self.end_step(trained=False)
        self.events.append(event)
        if self.is_stepwise and not is_capturing():
            self._check(self._compare(event[0]))
        self.hash = (self.hash * _FACTOR + event[0]) & _MASK

    def end_step(self, trained: bool) -> None:
        """After a backward, or a forward without one: compare what was done since the last.

        What a CUDA graph captures is not compared: the host cannot read anything until it runs.

        Raises:
            RuntimeError: another rank did something else.
        """
        if not self.events:
            return
        if is_capturing():
            self.events, self.hash = [], 0
            self.guesses, self.doubts = [], 0
            return
        previous, self.pending = self.pending, None
        if previous is not None:
            self._check(previous)
        comparison = self._compare(_END)
        if self.is_stepwise or comparison.mark is None:
            self._check(comparison)
        else:
            self.pending = comparison
        self.events, self.hash = [], 0
        self.guesses, self.doubts = [], 0
        self.step += trained
        self.passes += not trained
        self.is_proven |= trained
        if self.is_proven or self.passes >= TRIAL_PASSES:
            self.is_stepwise = self.is_debugging

    def _compare(self, code: int) -> _Pending:
        values = (code, self.hash, int(here.is_debugging), self.doubts)
        streams = self.streams
        with streams.on(streams.reduce):
            result = comm.span(values, self.groups, streams.device, self)
            mark = None
            if result.device.type != "cpu":
                host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
                result = host.copy_(result, non_blocking=True)
                mark = streams.record(streams.reduce)
        return _Pending(result, mark, self.step, self.events, self.guesses)

    def _check(self, comparison: _Pending) -> None:
        code, hashed, debug, doubts, low_code, low_hashed, *_ = comparison.read()
        self.is_debugging = debug > 0
        if code == -low_code and hashed == -low_hashed:
            if doubts and code == _END:
                self._check_guesses(comparison)
            return
        self._raise(self.groups, comparison.step, comparison.events, late=not self.is_stepwise)

    def guess_used(self, bucket: Bucket, used: comm.Flags) -> None:
        """Unite ``used`` with what is known of the other ranks; the step after the next checks."""
        here, known = used.bits, bucket.history.agreed
        if known is None or known[0] != here:
            self.doubts += 1
        if known is not None:
            used.bits |= known[1]
        self.guesses.append(Guess(weakref.ref(bucket), here, used.bits))

    def _check_guesses(self, comparison: _Pending) -> None:
        """Learn what all ranks used, since some rank used other parameters than before.

        Raises:
            RuntimeError: a guess was wrong; names the parameter.
        """
        wrong = ""
        reports = self._gather([(guess.here, guess.anywhere) for guess in comparison.guesses])
        for guess, found in zip(comparison.guesses, reports, strict=True):
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
                    wrong = _unknown(spec.fqn, spec.unit, comparison.step, is_used)
        if wrong:
            raise RuntimeError(wrong)

    def _gather(self, mine: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """By guess: (used there, taken for used anywhere) of every rank."""
        rows = [mine]
        for group in self.groups:
            rows = [row for part in comm.gather_objects(rows, group) for row in part]
        return [list(found) for found in zip(*rows, strict=True)]

    def epoch(self, group: Group) -> int:
        """Count how often the ranks of ``group`` disagreed."""
        return self.epochs.get(group, 0) if self.epochs else 0

    def head(self) -> comm.Head:
        """Describe what this rank has done since the last comparison, and does now."""
        code = self.events[-1][0] if self.events else 0
        return (code, self.hash, len(self.events), 0, 0, 0, 0, 0)

    def disagree(self, group: Group) -> NoReturn:
        """Found ahead of data: the ranks of ``group`` know, and those of other groups do not.

        Raises:
            RuntimeError: always.
        """
        self._raise((group,), self.step, self.events, late=False)

    def _raise(
        self, groups: Sequence[Group], step: int, events: list[Event], late: bool
    ) -> NoReturn:
        mine = groups[0].ranks[groups[0].rank], events, sorted(self.find_frozen(self))
        reports = [mine]
        for group in groups:
            reports = [r for part in comm.gather_objects(reports, group) for r in part]
        self.start_over(groups)
        reports.sort(key=lambda report: report[0])
        if discards := {
            r: done[-1][3] for r, done, _ in reports if done and done[-1][1] == DISCARD
        }:
            raise StepDiscarded(discards)
        frozen = explain_frozen(step, [(rank, names) for rank, _, names in reports])
        text = frozen or explain(step, [(rank, done) for rank, done, _ in reports])
        raise RuntimeError(f"{text} {LATE}" if late else text)

    def announce_discard(self, reason: str) -> None:
        """The next thing that this rank tells others is that it discards the step."""
        self.events.append((_DISCARDED, DISCARD, "", reason))

    def start_over(self, groups: Sequence[Group]) -> None:
        """Forget the step; what was sent over ``groups`` is never read."""
        self.events, self.hash, self.pending, self.is_stepwise = [], 0, None, True
        self.guesses, self.doubts = [], 0
        self.disagreements += 1
        for group in groups:
            self.epochs[group] = self.epoch(group) + 1


class StepDiscarded(RuntimeError):
    """Raised where some ranks discard the step; ``reasons`` says why, by rank, if known."""

    def __init__(self, told: dict[int, str]) -> None:
        rank, reason = max(told.items(), key=lambda item: bool(item[1]))
        super().__init__(
            f"rank {rank} discards this step ({reason or 'as another rank does'}), for which this "
            "rank waits. Run it inside `with fsdp_compose.skippable_step(model):` on every rank."
        )
        self.reasons = {rank: reason for rank, reason in told.items() if reason}


LATE = (
    "This was found at the end of the step: its results and gradients are mixed up, so discard "
    "them. With fsdp_compose.set_debug(True) it is found before it happens."
)


def _unknown(name: str, unit: str, step: int, is_used: bool) -> str:
    found = (
        "some rank began to use it, and others took it for unused and did not set its gradient"
        if is_used
        else "no rank used it any more, and ranks took it for used elsewhere and set zeros"
    )
    return (
        f"parameter {name!r} of unit {unit!r}: in step {step} {found}, since on an accelerator a "
        "rank goes by what the ranks used when they last compared it. The step is to be discarded. "
        "Call fsdp_compose.set_find_unused_parameters(model) on every rank before training: ranks "
        "then compare it at every reduction, for which the host waits."
    )


def explain_frozen(step: int, reports: Sequence[tuple[int, Frozen]]) -> str | None:
    """Say which parameters some ranks train and others do not (D17); None where they agree.

    Args:
        reports: (rank, what it does not train), by rank.
    """
    everywhere = set.intersection(*(set(names) for _, names in reports))
    differing = sorted(set().union(*(names for _, names in reports)) - everywhere)
    if not differing:
        return None
    unit, name = differing[0]
    frozen = [rank for rank, names in reports if differing[0] in names]
    trained = [rank for rank, names in reports if differing[0] not in names]
    more = f", and {len(differing) - 1} more parameters differ" if len(differing) > 1 else ""
    return (
        f"ranks disagree on what is trained in step {step}: parameter {name!r} of unit {unit!r} "
        f"requires a gradient on {_name(trained)} and not on {_name(frozen)}{more}. Call "
        "requires_grad_ alike on every rank, before the forward."
    )


def explain(step: int, reports: Sequence[tuple[int, list[Event]]]) -> str:
    """Say what the ranks did differently first.

    Args:
        reports: (rank, its events since the ranks last agreed), by rank.
    """
    lists = [events for _, events in reports]
    length = max(map(len, lists))
    same = (len({_number(events, i) for events in lists}) == 1 for i in range(length))
    position = next((i for i, is_same in enumerate(same) if not is_same), length)
    kinds: dict[int, tuple[str, list[int]]] = {}
    for rank, events in reports:
        text = _describe(events[position]) if position < len(events) else "end{} the step"
        kinds.setdefault(_number(events, position), (text, []))[1].append(rank)
    texts = [text for text, _ in kinds.values()]
    if len(set(texts)) < len(texts):
        texts = [f"{text} of {'one model' if not i else 'another'}" for i, text in enumerate(texts)]
    found = " where ".join(
        _name(ranks) + " " + text.replace("{}", "s" if len(ranks) == 1 else "", 1)
        for text, (_, ranks) in zip(texts, kinds.values(), strict=True)
    )
    if any(event[1] == WRITE for events in lists for event in events[position : position + 1]):
        return f"ranks write different weights in step {step}: {found}. {_WRITING}"
    return (
        f"ranks run different units in step {step}: as collective {position + 1} of it, {found}. "
        "Every gather and reduction needs all ranks that share the parameters, so they must run "
        "the same units in the same order: choose the branch alike on every rank, or let ranks "
        "that skip a unit call fsdp_compose.participate(module) on it."
    )


def _number(events: Sequence[Event], position: int) -> int:
    return events[position][0] if position < len(events) else 0


def _describe(event: Event) -> str:
    _, verb, unit, purpose = event
    return f"{verb}{{}} unit {unit!r} ({purpose})"


def _name(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def log_key(mesh: Mesh) -> tuple[Any, ...]:
    """What meshes have in common whose collectives are compared together; () for none."""
    if any(group.backend == "fake" for group in mesh.groups):
        return ()
    return tuple(group.pg for group in mesh.groups)
