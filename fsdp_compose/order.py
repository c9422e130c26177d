"""The order in which units run: recorded, followed while it repeats, re-read when it changes."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Order:
    """A sequence of visits that is expected to repeat.

    ``recorded`` is the last complete sequence, ``current`` the one under way, and ``cursor`` the
    position in ``recorded`` behind the last visit. Visitors are held weakly.
    """

    recorded: list[weakref.ref[Any]] = field(default_factory=list)
    current: list[weakref.ref[Any]] = field(default_factory=list)
    cursor: int = 0

    def visit(self, visitor: Any) -> None:
        """Note that ``visitor`` runs now, and find where that is in the recorded sequence."""
        self.current.append(weakref.ref(visitor))
        recorded = self.recorded
        if self.cursor < len(recorded) and recorded[self.cursor]() is visitor:
            self.cursor += 1
            return
        positions = (*range(self.cursor, len(recorded)), *range(self.cursor))
        self.cursor = next((i + 1 for i in positions if recorded[i]() is visitor), len(recorded))

    def ahead(self, count: int) -> list[Any]:
        """The visitors expected next, nearest first; fewer than ``count`` near the end."""
        expected = (ref() for ref in self.recorded[self.cursor : self.cursor + count])
        return [visitor for visitor in expected if visitor is not None]

    def close(self) -> None:
        """End the sequence under way; it is what the next one is expected to repeat."""
        if self.current:
            self.recorded, self.current = self.current, []
        self.cursor = 0

    def expect(self, visitors: list[weakref.ref[Any]]) -> None:
        """Expect ``visitors`` where nothing has been recorded yet."""
        if not self.recorded:
            self.recorded, self.cursor = visitors, 0
