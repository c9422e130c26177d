"""What ranks have sent each other so far is counted, so that messages of two tries never meet.

A rank may cease to wait for a message, as Ctrl-C came, and begin again. What it had sent before may
still arrive. So heads (comm/heads.py) are numbered, and the tag of what follows one is made of its
number. Where the ranks of a group disagree, all of them begin to count again.
"""

from __future__ import annotations

import weakref
import zlib
from threading import get_ident
from typing import Any

from fsdp_compose.base.group import Group
from fsdp_compose.base.process import here

_counts: dict[weakref.ref[Any], tuple[int, int]] = {}
"""By process group, how often its ranks have disagreed, and how many heads were sent since."""


def counts_of(pg: Any) -> tuple[int, int]:
    """How often the ranks of ``pg`` have disagreed, and how many heads this one sent since."""
    return _counts.get(weakref.ref(pg), (0, 0))


def set_counts(pg: Any, epoch: int, sent: int) -> None:
    known = weakref.ref(pg)
    if known not in _counts:
        known = weakref.ref(pg, lambda ref: _counts.pop(ref, None))
    _counts[known] = epoch, sent


def epoch_of(group: Group) -> int:
    """Count disagreements in ``group``: what was sent before one is never read after it."""
    return _counts.get(weakref.ref(group.pg), (0, 0))[0] if group.pg is not None else 0


def end_epoch(group: Group) -> None:
    """The ranks of ``group`` have disagreed, all of them."""
    if group.pg is not None:
        set_counts(group.pg, epoch_of(group) + 1, 0)


def number_outside(group: Group, text: str) -> int:
    """A number of 26 bits for messages without heads, which is another one in the next try.

    Alike on ranks that have sent as many heads over ``group``, or are in one call over it.
    """
    call = here.calls.get(get_ident()) if here.calls else None
    which = counts_of(group.pg) if call is None else call.note
    return zlib.crc32(f"{which} {text}".encode()) & ((1 << 26) - 1)
