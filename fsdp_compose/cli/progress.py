"""A line that says how far something is, once it has taken two seconds; on a terminal only."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 2.0  # seconds
_WIDTH = 30


def follow(items: Sequence[T], what: str) -> Iterator[T]:
    """Yield the items, and show on stderr how many of them are done.

    Example:
        >>> list(follow([1, 2], "squares"))
        [1, 2]
    """
    if not sys.stderr.isatty():
        yield from items
        return
    began = time.monotonic()
    shown = False
    for done, item in enumerate(items):
        if time.monotonic() - began > PATIENCE:
            shown = True
            filled = _WIDTH * done // len(items)
            bar = "#" * filled + "." * (_WIDTH - filled)
            print(f"\r{what} [{bar}] {done}/{len(items)}", end="", file=sys.stderr, flush=True)
        yield item
    if shown:
        print(f"\r{'':{_WIDTH + len(what) + 30}}\r", end="", file=sys.stderr, flush=True)


def say_all(lines: Iterable[str]) -> None:
    """Print lines whose text may hold anything, without a terminal acting on it."""
    for line in lines:
        print("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line))
