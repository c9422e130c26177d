"""In which order things run that are expected to run in the same order again.

An ``Order`` records what was visited, to know what comes next. A sequence of visits is what runs
between two resets, such as a training step. It is made of passes, each an outermost forward. Which
passes follow each other is up to the caller's loop and may vary (another model, more microbatches);
the visits inside a pass are the model's own and are expected to repeat.

A pass is quiet if nothing had to be gathered in it. One rank may run it alone, such as an
evaluation while everything is gathered, so nothing that all ranks are expected to do follows from
it: it is known which visitors ran, and the rest goes on as if it had not been there.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Literal

Ref = weakref.ref[Any]
Turn = Literal["reached", "forward", "ended"]
"""Of a backward: it reached a visitor, ran its forward again, or one inside it ended."""
_visitor_of = weakref.ref.__call__

MAX_PASSES = 256
"""After so many passes a sequence that nobody ends, as in inference, is ended here."""


class Pass(list[Ref]):
    """The visitors of an outermost forward or of a backward, in their order."""

    is_quiet = False
    is_partial = False
    """Whether others ran in it that are not visited, as units in a scope of full parameters."""


@dataclass(frozen=True)
class Change:
    """How a pass differs from its last run; ``found`` is None where it ended early."""

    expected: Any
    found: Any | None


@dataclass(eq=False)
class Order:
    """A sequence of visits that is expected to repeat; visitors are held weakly.

    Attributes:
        recorded: passes of the last sequence, then older passes of visitors it did not begin with,
            then those that the sequence under way only assumes.
        latest: how many of ``recorded`` are of the last sequence.
        known: how many of ``recorded`` were run.
        current: passes of the sequence under way, the last of them perhaps unfinished.
        last: passes of the last sequence, quiet ones too.
        routes: each pass in which a visitor ran last, quiet ones too; the last one first.
        first: what began the first pass of the sequence under way that was not quiet.
        inner, last_inner: of a backward, under way or the last one: whose forwards it ran again, or
            None where a backward inside it ended, each with how many visits came before.
        place: index in ``recorded`` of the pass that the present one should repeat; None: unknown.
        cursor: position in that pass behind the last visit.
    """

    recorded: list[Pass] = field(default_factory=list)
    latest: int = 0
    known: int = 0
    current: list[Pass] = field(default_factory=list)
    last: list[Pass] = field(default_factory=list)
    place: int | None = None
    cursor: int = 0
    before: tuple[int | None, int] = (None, 0)  # place and cursor when the pass began
    is_open: bool = False  # a pass is under way
    routes: list[Pass] = field(default_factory=list)
    first: Ref | None = None
    inner: list[tuple[int, Ref | None]] = field(default_factory=list)
    last_inner: list[tuple[int, Ref | None]] = field(default_factory=list)

    def begin(self, visitor: Any) -> None:
        """Start a pass with ``visitor``."""
        if self.is_open:
            self.end(complete=False)
        if len(self.current) >= MAX_PASSES:
            self._shorten()
        self.before = self.place, self.cursor
        self.current.append(Pass([weakref.ref(visitor)]))
        self.is_open = True
        start = -1 if self.place is None else self.place
        indices = (*range(start + 1, len(self.recorded)), *range(start + 1))
        self.place = next((i for i in indices if self.recorded[i][0]() is visitor), None)
        self.cursor = 0 if self.place is None else 1

    def visit(self, visitor: Any) -> Change | None:
        """Note that ``visitor`` runs in the pass under way; return a change since last time."""
        if not self.is_open:
            self.begin(visitor)
            return None
        if self.place is None:
            self.current[-1].append(weakref.ref(visitor))
            return None
        known, at = self.recorded[self.place], self.cursor
        if at < len(known) and (ref := known[at])() is visitor:
            self.current[-1].append(ref)
            self.cursor = at + 1
            return None
        self.current[-1].append(weakref.ref(visitor))
        positions = (*range(at, len(known)), *range(at))
        self.cursor = next((i + 1 for i in positions if known[i]() is visitor), len(known))
        return _change(self.current[-1], known, at, visitor)

    def leave_out(self) -> None:
        """Note that somebody runs in the pass under way, if one is, who is no visitor of it."""
        if self.is_open:
            self.current[-1].is_partial = True

    def end(self, complete: bool = True, quiet: bool = False) -> Change | None:
        """End the pass under way, or forget one that failed; return a change since last time."""
        if not self.is_open:
            return None
        self.is_open = False
        if not complete:
            self.current.pop()
        elif quiet:
            self.current[-1].is_quiet = True
            self.place, self.cursor = self.before
        else:
            self.first = self.first or self.current[-1][0]
            if self.place is not None:
                return _change(self.current[-1], self.recorded[self.place], self.cursor, None)
        return None

    def ahead(self, count: int) -> list[Any]:
        """The visitors expected next, nearest first; fewer than ``count`` near the end."""
        if not count or self.place is None:
            return []
        known, at = self.recorded[self.place], self.cursor
        if count == 1 and at < len(known) and (nearest := known[at]()) is not None:
            return [nearest]
        found: list[Any] = list(map(_visitor_of, known[at : at + count]))
        if len(found) == count and None not in found:
            return found
        later = self.recorded[self.place + 1 : self.latest] if self.place < self.latest else []
        refs = chain(known[at:], *later)
        return list(islice((visitor for ref in refs if (visitor := ref()) is not None), count))

    def close(self) -> None:
        """End the sequence under way; it is what the next one is expected to repeat."""
        gathered = [p for p in self.current if not p.is_quiet]
        if gathered:
            self.recorded, self.latest = _merge(gathered, self.recorded), len(gathered)
            self.known = len(self.recorded)
        if self.current:
            if self.current != self.last:
                self.routes = _find_routes([*reversed(self.current), *self.routes])
            self.last, self.current = self.current, []
        self.last_inner, self.inner = self.inner, []
        self.place, self.cursor, self.is_open, self.first = None, 0, False, None

    def note_inner(self, visitor: Any | None) -> None:
        """Note that a backward runs a forward of ``visitor`` again; None: one inside it ended."""
        ref = None if visitor is None else weakref.ref(visitor)
        self.inner.append((sum(map(len, self.current)), ref))

    def list_turns(self) -> list[tuple[Turn, Any]]:
        """What the last backward did, with which visitor."""
        turns: list[tuple[Turn, Any]] = [("reached", ref()) for refs in self.last for ref in refs]
        for place, ref in reversed(self.last_inner):
            turns.insert(place, ("ended", None) if ref is None else ("forward", ref()))
        return [turn for turn in turns if turn[0] == "ended" or turn[1] is not None]

    def _shorten(self) -> None:
        """Forget the quiet passes of a long sequence, or end it where it is long without them."""
        gathered = [p for p in self.current if not p.is_quiet]
        if len(gathered) >= MAX_PASSES:
            self.close()
        else:
            self.current = gathered

    def assume(self, visitors: Sequence[Any]) -> None:
        """Expect ``visitors`` in reverse of the pass that has just begun, if it is not recorded.

        Those that ran after the pass's first one ran inside it and come next; the others come last.
        """
        begun = self.current[-1][0]()
        at = next((i for i, v in enumerate(visitors) if v is begun), len(visitors))
        expected = (begun, *visitors[:at:-1], *visitors[:at][::-1])
        self.recorded.append(Pass([weakref.ref(visitor) for visitor in expected]))
        self.place, self.cursor = len(self.recorded) - 1, 1

    def forget(self) -> None:
        """Forget the sequence under way, a pass or the backward of which was interrupted."""
        self.inner.clear()
        self.current.clear()
        del self.recorded[self.known :]
        self.place, self.cursor, self.is_open, self.first = None, 0, False, None

    def visited(self, quiet: bool = True) -> list[Any]:
        """The visitors of the sequence under way, or of the last one; of ``quiet`` passes too."""
        passes = [p for p in self.current or self.last if quiet or not p.is_quiet]
        return [v for refs in passes for ref in refs if (v := ref()) is not None]


def _merge(passes: list[Pass], older: list[Pass]) -> list[Pass]:
    """The passes, then older ones whose first visitor lives and begins none of them."""
    begun = {id(refs[0]()) for refs in passes}
    return passes + [p for p in older if p[0]() is not None and id(p[0]()) not in begun]


def _find_routes(passes: list[Pass]) -> list[Pass]:
    """List the passes with a visitor that lives and is in no pass before them."""
    found: list[Pass] = []
    seen: set[int] = set()
    for refs in passes:
        visitors = {id(visitor) for ref in refs if (visitor := ref()) is not None}
        if not visitors <= seen:
            seen |= visitors
            found.append(refs)
    return found


def _change(current: Pass, known: Pass, at: int, found: Any | None) -> Change | None:
    expected = known[at]() if at < len(known) else None
    is_partial = known.is_partial or current.is_partial
    return None if expected is None or is_partial else Change(expected, found)
