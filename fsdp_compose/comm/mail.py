"""Small messages between ranks of one host, through pipes, which cost less than those of gloo.

Each rank makes a pipe for each other rank, and that rank opens its end for writing below ``/proc``.
A message is a row of integers, so short that the kernel writes it at once or not at all. Who waits
for one sleeps, hears Ctrl-C, and finds the pipe closed when the process that writes it has ended,
however that was. Messages of one tag are read in the order sent; those of other tags may pass them.
"""

from __future__ import annotations

import os
import select
import struct
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

from fsdp_compose.base.group import Group
from fsdp_compose.base.torch_private import timeout_of
from fsdp_compose.comm.messages import no_receiver

ROW = 15
"""The integers of a message."""

_ENDED = "its process has ended"
_FORM = struct.Struct(f"{1 + ROW}q")  # the tag, which is above 0, and those
_WORD = 8
_AT_ONCE = _FORM.size * 64  # bytes, of whole messages
_PAUSE = 0.1  # seconds after which a thread looks whether another one has read its message


@dataclass(eq=False, slots=True)
class Letter:
    """A message that is to come from a rank, as a work: ``row`` is there when it was waited for."""

    mail: Mail
    rank: int
    tag: int
    number: int  # of those with this tag
    row: list[int] = field(default_factory=list)

    def wait(self) -> None:
        """Return when it has come.

        Raises:
            RuntimeError: the rank's process has ended, or the group's timeout is over.
        """
        self.row = self.mail.find(self.rank, self.tag, self.number)
        self.mail.rows.pop((self.rank, self.tag, self.number), None)

    def is_completed(self) -> bool:
        return len(self.row) > 0


class Mail:
    """The pipes of a group's ranks on this host: those this rank reads, and those it writes."""

    def __init__(self, group: Group) -> None:
        assert group.pg is not None
        self.group, self.timeout = group, timeout_of(group.pg)
        self.lock = threading.Lock()
        self.readers: dict[int, int] = {}  # file descriptors, by rank
        self.writers: dict[int, int] = {}
        self.entrances: dict[int, int] = {}  # what other ranks open, until they have
        self.posted: defaultdict[int, int] = defaultdict(int)  # by tag, messages to each rank
        # By rank, what was read and may not be stored yet, before zeros; by tag, what is stored.
        self.boxes: dict[int, tuple[bytearray, dict[int, int]]] = {}
        self.rows: dict[tuple[int, int, int], list[int]] = {}  # that nobody took yet
        self.ended: set[int] = set()
        weakref.finalize(self, _close, self.readers, self.writers, self.entrances)
        for rank in range(group.size):
            if rank != group.rank:
                self.boxes[rank] = bytearray(_AT_ONCE), {}
                self.readers[rank], self.entrances[rank] = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def open_to(self, rank: int, pid: int, entrance: int) -> None:
        """Open the pipe that ``rank`` made for this rank; OSError where that is not allowed."""
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
        self.writers[rank] = os.open(f"/proc/{pid}/fd/{entrance}", flags)

    def keep(self, ranks: Sequence[int]) -> None:
        """Close what is not between this rank and ``ranks``, all of which have opened theirs."""
        _close(self.entrances)
        for ends in (self.readers, self.writers):
            _close({rank: ends.pop(rank) for rank in [*ends] if rank not in ranks})

    def post(self, tag: int, row: Sequence[int], purpose: str) -> list[Letter]:
        """Send ``row`` to every rank; what each of them sends with this tag, in the same turn.

        Where one has died, the others still get what they wait for, and find the dead one
        themselves.

        Raises:
            RuntimeError: one has died.
        """
        data, dead = _FORM.pack(tag, *row), None
        with self.lock:
            number = self.posted[tag]
            self.posted[tag] = number + 1
            for rank, end in self.writers.items():
                try:
                    if rank in self.ended:
                        raise BrokenPipeError(_ENDED)
                    self._write(end, data)
                except (BrokenPipeError, TimeoutError) as error:
                    dead = dead or (rank, error)
        if dead is not None:
            raise no_receiver(purpose, self.group.ranks[dead[0]], dead[1]) from dead[1]
        return [Letter(self, rank, tag, number) for rank in self.readers]

    def _write(self, end: int, data: bytes) -> None:
        while True:
            try:
                os.write(end, data)
                return
            except BlockingIOError:  # hundreds of messages that the rank did not read yet
                if not _wait_for(end, select.POLLOUT, self.timeout):
                    raise TimeoutError(f"it has read nothing for {self.timeout:g} s") from None

    def find(self, rank: int, tag: int, number: int) -> list[int]:
        """The message of ``rank`` with this tag and number, which stays; see ``Letter.wait``."""
        key, began = (rank, tag, number), None
        while True:
            with self.lock:
                row = self.rows.get(key) or self._read(rank, key)
            if row is not None:
                return row
            if rank in self.ended:
                raise RuntimeError(_ENDED)
            now = monotonic()
            began = now if began is None else began
            if now - began >= self.timeout:
                raise RuntimeError(f"it has sent nothing for {self.timeout:g} s, the timeout")
            _wait_for(self.readers[rank], select.POLLIN, min(_PAUSE, self.timeout))

    def _read(self, rank: int, wanted: tuple[int, int, int]) -> list[int] | None:
        """Read what has come from ``rank``; return the message ``wanted``, if it is among it.

        Ctrl-C may come between any two lines. Then the next call stores the same messages again.
        """
        memory, stored = self.boxes[rank]
        try:
            if not any(memory[:_WORD]) and not os.readv(self.readers[rank], [memory]):
                self.ended.add(rank)
        except BlockingIOError:
            return None
        counts = stored.copy()
        for tag, *row in _FORM.iter_unpack(memory):
            if not tag:
                break
            number = counts.get(tag, 0)
            counts[tag] = number + 1
            self.rows[rank, tag, number] = row
        self.boxes[rank] = bytearray(_AT_ONCE), counts
        return self.rows.get(wanted)


def _wait_for(end: int, event: int, seconds: float) -> bool:
    """Sleep until a pipe can be read or written; False after so many seconds."""
    poll = select.poll()
    poll.register(end, event)
    return bool(poll.poll(1000 * seconds))


def _close(*ends: dict[int, int]) -> None:
    for each in ends:
        while each:
            os.close(each.popitem()[1])
