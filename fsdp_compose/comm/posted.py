"""Messages between pairs of ranks that may not be over: gloo reads and writes their memory.

A rank may cease to wait for a message: another one died, failed or went elsewhere, or Ctrl-C came.
It may still arrive. If its memory were free by then, gloo would write where others keep theirs; if
its work were dropped, gloo would read nothing more from that rank. So both are kept here, from when
it is posted until it was waited for.

Where gloo waits for a message until the group's timeout, it closes the connection, also if the rank
has long ceased to wait and gone on. So a thread that may be left behind is ``Patient``.

What nobody waits for any more is let go after two *rounds*, in each of which every rank sends to
every other one and then hears them all. The first tells a rank that its message is awaited, before
it sends in the second, and messages of a pair arrive in order: behind the second comes nothing.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp_compose.base.process import here
from fsdp_compose.base.torch_private import timeout_of

_AGES = timedelta(days=10_000)

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


class Patient:
    """A message that is waited for as long as it takes, as a work; whoever waits for it may leave.

    Attributes:
        timeout: seconds after which the ranks of its group do not wait for each other any more.
    """

    def __init__(self, work: Any) -> None:
        pg = here.posted[work].pg()
        self.work, self.is_over = work, False
        self.timeout = math.inf if pg is None else timeout_of(pg)

    def wait(self) -> None:
        self.work.wait(_AGES)
        forget([self.work])
        self.is_over = True

    def is_completed(self) -> bool:
        return self.is_over


def be_patient(works: Iterable[Any]) -> tuple[list[Any], float]:
    """``works``, of which the messages are ``Patient``, and the shortest timeout of those."""
    found = [Patient(work) if work in here.posted else work for work in works]
    return found, min((one.timeout for one in found if isinstance(one, Patient)), default=math.inf)
