"""What happens to parameters between passes, for ranks to compare: steps, settings, writes."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from fsdp_compose.base.torch_stack import is_stepping
from fsdp_compose.buckets.bucket import Bucket, Entry
from fsdp_compose.buckets.gather import count_writes
from fsdp_compose.core.guards.rank_differences import CHANGE, STEPS, Event
from fsdp_compose.sharded import Writes
from fsdp_compose.sharded.writes import GRADIENT

_MASK = (1 << 62) - 1


@dataclass(frozen=True, eq=False)
class Settings:
    """What an optimizer stepped with, as its groups have it: learning rates and the like."""

    number: int  # a hash of the settings
    by_parameter: Callable[[], dict[tuple[str, str], dict[str, str]] | None]
    """The settings as texts, by (unit, parameter) and name; None where the optimizer is gone."""
    steps: int = 0  # of the optimizer since the ranks last compared


@dataclass(frozen=True, eq=False)
class Begun:
    """An optimizer's step that has begun and has not ended without an error."""

    optimizer: weakref.ref[Optimizer]
    kind: str
    buckets: list[weakref.ref[Bucket]]  # none: what is written into them is not counted
    writes: int  # into these, as it began

    @property
    def is_under_way(self) -> bool:
        optimizer = self.optimizer()
        return optimizer is not None and is_stepping(optimizer)

    def describe_writes(self) -> tuple[str, str]:
        """(unit, text): what was written since, so far as torch counts; no text: nothing was."""
        buckets = [bucket for ref in self.buckets if (bucket := ref()) is not None]
        count = count_writes(buckets) - self.writes
        if not count or len(buckets) < len(self.buckets):
            return "", ""
        unit = buckets[0].entries[0].spec.unit
        return unit, f"a step of {self.kind} that raised after {count} writes"


def number_of(settings: Sequence[Settings]) -> int:
    """A hash of several settings, in whatever order they came; 0 where there are none."""
    numbers = sorted([one.number + one.steps for one in settings])
    return hash(tuple(numbers)) & _MASK if settings else 0


def texts_of(
    settings: Iterable[Settings], entries: Iterable[Entry]
) -> dict[tuple[str, str], dict[str, str]]:
    """The texts of several settings, by (unit, parameter) and name, with how often each stepped.

    Args:
        entries: those of which this rank may hold elements that no step has reached.
    """
    found: dict[tuple[str, str], dict[str, str]] = {}
    is_known = True
    for one in settings:
        report = one.by_parameter()
        is_known &= report is not None
        for place, texts in (report or {}).items():
            before = found.get(place, {})
            found[place] = before | texts
            if STEPS in texts:
                found[place][STEPS] = str(int(before.get(STEPS, 0)) + one.steps)
    if not is_known:  # which parameters have been stepped
        return {place: {**texts, STEPS: ""} for place, texts in found.items()}
    for entry in entries:
        if entry.param.requires_grad and entry.spec.start < entry.spec.stop:
            found.setdefault((entry.spec.unit, entry.spec.fqn), {STEPS: "0"})
    return found


@dataclass(eq=False)
class Steps:
    """The steps of optimizers, and what else was written into parameters and gradients."""

    parameter: tuple[str, str] | None = None  # (unit, parameter) that one has stepped, if any
    taken: dict[weakref.ref[Optimizer], Settings] = field(default_factory=dict)
    added: dict[int, Settings] = field(default_factory=dict)  # by a backward, to a bucket's id
    are_compared: bool = True  # their settings: not where ranks gave optimizers other parameters
    writes: Writes = field(default_factory=Writes)  # outside of those steps
    noted: Writes = field(default_factory=Writes)  # those that are events of the step under way
    begun: Begun | None = None  # the step under way, or one that raised since
    failures: int = 0  # of other ranks in scopes, that this one was told of and is still inside

    def forget(self) -> None:
        """Forget the steps and writes that the ranks have compared; not what was written since."""
        self.parameter, self.writes.are_noted = None, True
        self.taken, self.added = {}, {}
        self.noted.found.clear()
        if self.begun is not None and not self.begun.is_under_way:
            self.begun = None

    def list_settings(self) -> list[Settings]:
        """What is to be compared of steps, and of gradients that backwards add to."""
        return [*self.taken.values(), *self.added.values()] if self.are_compared else []

    def take(self, optimizer: Optimizer, number: int, by_parameter: Callable[[], Any]) -> None:
        """A step has ended, with settings as ``Settings`` has them."""
        ref = weakref.ref(optimizer)
        before = self.taken.get(ref)
        self.taken[ref] = Settings(number, by_parameter, 1 + (before.steps if before else 0))

    def begin(self, step: Begun) -> None:
        """A step begins, which may be inside another one's."""
        self.end_failed()
        self.begun, self.writes.are_noted = self.begun or step, False

    def end(self, optimizer: Optimizer) -> None:
        """The step of an optimizer ends without an error."""
        self.writes.are_noted = True
        if self.begun is not None and self.begun.optimizer() is optimizer:
            self.begun = None

    def end_failed(self) -> None:
        """Let what a step has written that ended with an error be a write of the program.

        Ranks whose steps ended at the same place have written the same.
        """
        begun = self.begun
        if begun is None or begun.is_under_way:
            return
        self.begun, self.writes.are_noted = None, True
        unit, text = begun.describe_writes()
        if text:
            number = zlib.crc32(text.encode())
            self.writes.found["", "of a step"] = number, unit, "parameters", text

    def have_writes(self) -> bool:
        """Whether anything was written outside of steps that ended."""
        self.end_failed()
        return bool(self.writes.found)

    def forget_all(self) -> None:
        """Forget what was written since, too."""
        self.writes.found.clear()
        self.forget()

    def forget_loaded(self, unit: str) -> None:
        """After every rank has loaded a unit: which had stepped, or written it, is no matter.

        Nor is what was written in lists, which may have had other units in them.
        """
        self.forget()
        for place in [place for place in self.writes.found if place[0] in (unit, "")]:
            del self.writes.found[place]

    def recall(self) -> None:
        """Compare what made the weights at the end of another step, as this one ends early.

        What was done to gradients is forgotten: they are cleared, or are those of before the step.
        """
        self.added = {}
        self.writes.are_noted = True
        _add(self.writes, self.noted)
        self.noted.found.clear()
        for place in [place for place in self.writes.found if place[1].startswith(GRADIENT)]:
            del self.writes.found[place]

    def take_writes(self) -> list[Event]:
        """As ``list_writes``; they are forgotten."""
        events = self.list_writes()
        _add(self.noted, self.writes)
        self.writes.found.clear()
        return events

    def list_writes(self) -> list[Event]:
        """What was written, as events, in one order on every rank."""
        self.end_failed()
        events: list[Event] = []
        places = sorted(self.writes.found, key=lambda place: (not place[0], place))
        for number, unit, what, text in map(self.writes.found.__getitem__, places):
            code = number << 2 & _MASK | 2
            events.append((code, CHANGE, unit, f"{what}, last by {text}; checksum {code:016x}"))
        return events


def _add(total: Writes, more: Writes) -> None:
    for place, (number, unit, what, text) in more.found.items():
        before = total.found.get(place)
        total.found[place] = number + (before[0] if before else 0), unit, what, text
