"""A rank that waits for others says within seconds for whom and for what, while it still waits.

What this process waits for is noted before it waits; a thread looks at the notes once a second. A
rank that waits for more than a moment puts that into the store of the process group. One that has
waited for ``WARN_AFTER`` seconds logs which of the ranks it needs have put nothing there, or wait
for something else. A step in which nobody waits for long touches no store.

On an accelerator the host does not wait. There the notes are marks on the device: the thread asks
whether the device has passed them, so that the host is never held up.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from threading import get_ident
from time import monotonic
from typing import Any

import torch.distributed as dist

from fsdp_compose.base.process import here, once
from fsdp_compose.base.streams import is_capturing, turn_to
from fsdp_compose.base.torch_private import default_store

WARN_AFTER = 10.0
"""Seconds of waiting after which a rank says so."""

POST_AFTER = 2.0
"""Seconds of waiting after which the other ranks can read what this one waits for."""

_POLL = 1.0
_DEVICE = -1
_MAX_SPEAKERS = 8  # a thousand waiting ranks would all log the same
_logger = logging.getLogger("fsdp_compose")


Begun = tuple[str, Sequence[int], float]
"""A wait that a thread is in: its purpose, its ranks, and when it began."""


@dataclasses.dataclass(eq=False, slots=True)
class Wait:
    """A wait of this rank, with ``ranks`` and for ``purpose``, that the watch has looked at."""

    purpose: str
    ranks: Sequence[int]  # of the process group; may contain this one
    since: float
    mark: Any = None  # on a stream; the wait is over once the device has passed it
    was_told: bool = False
    absent: str = ""  # who was missing when it was told

    def is_over(self) -> bool:
        return self.mark is not None and bool(self.mark.query())


class _Watch:
    """The waits of this process and the thread that looks at them.

    Most waits are over before it looks: a thread notes its own in ``begun`` and nothing else.
    """

    def __init__(self) -> None:
        self.begun: dict[int, Begun] = {}  # by thread
        self.waits: dict[int, Wait] = {}  # those of it that were looked at, and the device's
        self.newest: Wait | None = None  # of those for the device
        self.thread: threading.Thread | None = None
        self.posted = ""
        self.is_over = threading.Event()

    def start(self) -> None:
        once(_stop_at_exit)
        self.thread = threading.Thread(target=self.run, name="fsdp_compose waits", daemon=True)
        self.thread.start()

    def run(self) -> None:
        while not self.is_over.wait(min(_POLL, POST_AFTER / 2)):
            # The store may be gone, or the process group: nobody can be told then.
            with contextlib.suppress(RuntimeError, ValueError):
                self.look(time.monotonic())

    def look(self, now: float) -> None:
        device = self.waits.get(_DEVICE)
        is_old = device is not None and now - device.since > POST_AFTER
        if device is not None and is_old and self.has_passed(device):
            self.waits.pop(_DEVICE, None)
            newest, self.newest = self.newest, None
            if newest is not None and newest is not device:
                self.waits[_DEVICE] = dataclasses.replace(newest, since=now)
        self._look_at_threads(self.begun.copy())
        oldest = min(self.waits.copy().values(), key=lambda wait: wait.since, default=None)
        is_long = oldest is not None and now - oldest.since > POST_AFTER
        self.post(oldest.purpose if oldest is not None and is_long else "")
        if oldest is not None and now - oldest.since > WARN_AFTER and not oldest.was_told:
            log_missing(oldest, now)

    def has_passed(self, wait: Wait) -> bool:
        """Whether the device has passed its mark, asked from the thread of the watch."""
        turn_to(wait.mark.device)
        return wait.is_over()

    def _look_at_threads(self, begun: dict[int, Begun]) -> None:
        for thread in [t for t in self.waits if t != _DEVICE and t not in begun]:
            del self.waits[thread]
        for thread, (purpose, ranks, since) in begun.items():
            known = self.waits.get(thread)
            if known is None or known.since != since:
                self.waits[thread] = Wait(purpose, ranks, since)

    def post(self, text: str) -> None:
        """Lets the other ranks read what this one waits for; nothing when it does not wait."""
        if text == self.posted:
            return
        key = _key(dist.get_rank())
        if text:
            default_store().set(key, text)
        else:
            default_store().delete_key(key)
        self.posted = text

    def stop(self) -> None:
        """End the thread, but wait for no store that does not answer."""
        self.is_over.set()
        if self.thread is not None:
            self.thread.join(timeout=5.0)


class NoWatch(_Watch):
    """The watch of simulated ranks: a simulation knows without a thread who waits for whom."""

    def start(self) -> None:
        pass


def the_watch() -> _Watch:
    """The watch of this process, made by its first wait."""
    if here.watch is None:
        here.watch = _Watch()
        once(_survive_forks)
    found: _Watch = here.watch
    return found


def _survive_forks() -> None:
    """A fork has none of its parent's threads, and waits for nothing."""
    os.register_at_fork(after_in_child=lambda: setattr(here, "watch", None))


def _stop_at_exit() -> None:
    """Python cannot end a thread that is inside the store, and aborts instead."""
    atexit.register(lambda: here.watch and here.watch.stop())


@contextlib.contextmanager
def waiting(purpose: str, ranks: Sequence[int]) -> Iterator[None]:
    """Scope in which this thread waits for ``ranks``, by their numbers in the process group."""
    enter(purpose, ranks)
    try:
        yield
    finally:
        end_wait()


def enter(purpose: str, ranks: Sequence[int]) -> dict[int, Begun]:
    """This thread waits until ``end_wait``, or until it is taken out of what is returned."""
    watch = here.watch or the_watch()
    begun: dict[int, Begun] = watch.begun
    begun[get_ident()] = (purpose, ranks, monotonic())
    if watch.thread is None:
        watch.start()
    return begun


def end_wait() -> None:
    (here.watch or the_watch()).begun.pop(get_ident(), None)


def find_absent() -> str:
    """Who is missing in the wait that this thread is in, as it was told; empty if it was not."""
    begun = the_watch().begun.get(get_ident())
    wait = the_watch().waits.get(get_ident())
    is_same = begun is not None and wait is not None and wait.since == begun[2]
    return wait.absent if wait is not None and is_same else ""


def watch_mark(purpose: str, ranks: Sequence[int], mark: Any) -> None:
    """Note that the device waits for ``ranks`` until it passes ``mark``; the host goes on.

    The oldest mark that is not known to have passed is kept, and the newest one; none of those in a
    graph, which the device passes when it is replayed, and none of before it, since to ask a device
    about them may end the capture of a graph in another thread. A device that waits for no other
    rank is only slow.
    """
    if is_capturing():
        forget_marks()
        return
    if len(ranks) < 2:
        return
    watch = the_watch()
    wait = watch.newest = Wait(purpose, ranks, monotonic(), mark)
    known = watch.waits.get(_DEVICE)
    if known is None or (wait.since - known.since > _POLL and known.is_over()):
        watch.waits[_DEVICE] = wait
    if watch.thread is None:
        watch.start()


def forget_marks() -> None:
    """Watch no mark that was noted before, as a graph is captured now."""
    watch = the_watch()
    watch.newest = None
    watch.waits.pop(_DEVICE, None)


def log_missing(wait: Wait, now: float) -> None:
    """Log who is missing; of many ranks that wait, the first few do."""
    me, store = dist.get_rank(), default_store()
    missing: list[int] = []
    elsewhere: dict[str, list[int]] = {}
    waiting_too = 0
    for rank in sorted(set(wait.ranks)):
        if rank == me:
            continue
        if not store.check([_key(rank)]):
            missing.append(rank)
        elif (text := store.get(_key(rank)).decode(errors="replace")) != wait.purpose:
            elsewhere.setdefault(text, []).append(rank)
        else:
            waiting_too += rank < me
    wait.was_told = True
    found = [f"{_name(missing)} did not come to it"] if missing else []
    found += [f"{_name(ranks)} waits to {text}" for text, ranks in elsewhere.items()]
    wait.absent = "; ".join(found) or "all the ranks it needs wait for the same"
    if waiting_too < _MAX_SPEAKERS:
        _logger.warning(
            "rank %d has waited %.0f s to %s: %s. Call what all ranks take part in on every rank, "
            "also where only rank 0 uses the result. When the timeout of the process group is "
            "over, this becomes an error.",
            me,
            now - wait.since,
            wait.purpose,
            wait.absent,
        )


def _key(rank: int) -> str:
    return f"fsdp_compose/waits/{rank}"


def _name(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}"
