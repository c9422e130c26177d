"""The order in which units run: recorded, followed while it repeats, read again when it changes.

A sequence is what runs between two resets of the recorder, a training step for instance. It is made
of passes, each an outermost forward: which passes follow each other is the caller's loop, which may
vary freely (another model, another number of microbatches), while the visits inside a pass are the
model's own, which are expected to repeat.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

Ref = weakref.ref[Any]

MAX_PASSES = 256
"""A sequence that nobody ends, as inference without ``no_grad``, is cut after so many passes."""


@dataclass(frozen=True)
class Change:
    """A pass that differs from its last run; ``found`` is None where it ended early."""

    expected: Any
    found: Any | None


@dataclass(eq=False)
class Order:
    """A sequence of visits that is expected to repeat; visitors are held weakly.

    Attributes:
        recorded: passes of the last sequence, then older passes of visitors it did not begin with.
        latest: how many of ``recorded`` are of the last sequence.
        current: passes of the sequence under way, the last of them perhaps unfinished.
        place: index in ``recorded`` of the pass that the present one should repeat; None: unknown.
        cursor: position in that pass behind the last visit.
    """

    recorded: list[list[Ref]] = field(default_factory=list)
    latest: int = 0
    current: list[list[Ref]] = field(default_factory=list)
    place: int | None = None
    cursor: int = 0
    is_open: bool = False  # a pass is under way

    def begin(self, visitor: Any) -> None:
        """``visitor`` starts a pass."""
        if self.is_open:
            self.end(complete=False)
        if len(self.current) >= MAX_PASSES:
            self.close()
        self.current.append([weakref.ref(visitor)])
        self.is_open = True
        start = -1 if self.place is None else self.place
        indices = (*range(start + 1, len(self.recorded)), *range(start + 1))
        self.place = next((i for i in indices if self.recorded[i][0]() is visitor), None)
        self.cursor = 0 if self.place is None else 1

    def visit(self, visitor: Any) -> Change | None:
        """``visitor`` runs inside the pass under way; tells when another was expected to."""
        if not self.is_open:
            self.begin(visitor)
            return None
        self.current[-1].append(weakref.ref(visitor))
        if self.place is None:
            return None
        known, at = self.recorded[self.place], self.cursor
        if at < len(known) and known[at]() is visitor:
            self.cursor += 1
            return None
        positions = (*range(at, len(known)), *range(at))
        self.cursor = next((i + 1 for i in positions if known[i]() is visitor), len(known))
        return _change(known, at, visitor)

    def end(self, complete: bool = True) -> Change | None:
        """The pass under way is over; one that failed is forgotten."""
        if not self.is_open:
            return None
        self.is_open = False
        if not complete:
            self.current.pop()
        elif self.place is not None:
            return _change(self.recorded[self.place], self.cursor, None)
        return None

    def ahead(self, count: int) -> list[Any]:
        """The visitors expected next, nearest first; fewer than ``count`` near the end."""
        return list(islice(self._expected(), count)) if count and self.place is not None else []

    def _expected(self) -> Iterator[Any]:
        assert self.place is not None
        passes = [self.recorded[self.place][self.cursor :]]
        if self.place < self.latest:
            passes += self.recorded[self.place + 1 : self.latest]
        for refs in passes:
            for ref in refs:
                visitor = ref()
                if visitor is not None:
                    yield visitor

    def close(self) -> None:
        """End the sequence under way; it is what the next one is expected to repeat."""
        if self.current:
            self._record(self.current)
            self.current = []
        self.place, self.cursor, self.is_open = None, 0, False

    def _record(self, passes: list[list[Ref]]) -> None:
        begun = {id(refs[0]()) for refs in passes}
        older = [p for p in self.recorded if p[0]() is not None and id(p[0]()) not in begun]
        self.recorded, self.latest = passes + older, len(passes)

    def assume(self, visitors: Sequence[Any]) -> None:
        """Expect of the pass that has just begun, and is not recorded, ``visitors`` in reverse.

        Those behind its first visitor come before those in front of it: they ran inside it.
        """
        begun = self.current[-1][0]()
        at = next((i for i, v in enumerate(visitors) if v is begun), len(visitors))
        expected = (begun, *visitors[:at:-1], *visitors[:at][::-1])
        self.recorded.append([weakref.ref(visitor) for visitor in expected])
        self.place, self.cursor = len(self.recorded) - 1, 1

    def forget(self) -> None:
        """Forget the pass under way, which did not come to its end."""
        self.end(complete=False)
        self.place, self.cursor = None, 0

    def visited(self) -> list[Any]:
        """The visitors of the sequence under way or, where none is, of the last one."""
        passes = self.current or self.recorded[: self.latest]
        return [v for refs in passes for ref in refs if (v := ref()) is not None]


def _change(known: list[Ref], at: int, found: Any | None) -> Change | None:
    expected = known[at]() if at < len(known) else None
    return None if expected is None else Change(expected, found)
