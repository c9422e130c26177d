"""Messages between pairs of ranks that may not be over: gloo reads and writes their memory.

A rank may cease to wait for a message: another one died, failed or went elsewhere, or Ctrl-C came.
It may still arrive. If its memory were free by then, gloo would write where others keep theirs; if
its work were dropped, gloo would read nothing more from that rank. So both are kept here, from when
it is posted until it was waited for.

What nobody waits for any more is let go after two *rounds*, in each of which every rank sends to
every other one and then hears them all. The first tells a rank that its message is awaited, before
it sends in the second, and messages of a pair arrive in order: behind the second comes nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp_compose.base.process import here

_rounds: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""How many rounds were begun in each process group."""


class Posted(NamedTuple):
    """Where and when a message was posted, and the memory that it is in."""

    pg: weakref.ref[Any]
    rounds: int
    memory: torch.Tensor


def post(
    start: Callable[[list[torch.Tensor], int, int], Any],
    memory: torch.Tensor,
    peer: int,
    tag: int,
    pg: Any,
) -> Any:
    """The work of a message; ``start`` is ``pg.send`` or ``pg.recv``."""
    work = start([memory], peer, tag)
    here.posted[work] = Posted(weakref.ref(pg), _rounds.get(pg, 0), memory)
    return work


def forget(works: Iterable[Any]) -> None:
    """The messages are over, as they were waited for."""
    for work in works:
        here.posted.pop(work, None)


def may_go_on(works: Collection[Any], are_messages: bool) -> bool:
    """Whether ``works``, which nobody waits for any more, may write their memory yet."""
    return not here.posted.keys().isdisjoint(works) if are_messages else len(works) > 0


def begin_rounds(pg: Any, count: int = 1) -> None:
    """Rounds begin: nothing of them was sent yet."""
    _rounds[pg] = _rounds.get(pg, 0) + count


def end_rounds(pg: Any) -> None:
    """Every rank was heard in those that were begun; let go what was posted before two of them."""
    before = _rounds[pg] - 2
    for work, (ref, rounds, _) in [*here.posted.items()]:
        known = ref()
        if known is None or (known is pg and rounds <= before):
            here.posted.pop(work, None)
