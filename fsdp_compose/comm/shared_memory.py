"""Memory that ranks of one host read of each other, where nothing is changed while it is read.

Each rank has a segment for each group. What it offers to the others it puts into a slot of its
segment, once, and every other rank reads it there:

    header   a secret | by other rank: floor | by other rank and slot: the newest ticket read here
    slot 0   what this rank offers, read by all others ...
    slot 1   ... each slot under a ticket, which grows by one with every offer

**A slot is written only when nobody reads it.** An offer is announced by a message that goes ahead
of every exchange anyway (comm/heads.py); it brings the ticket, the slot and its size. A rank that
has read a slot notes the ticket in its own header, and the owner writes into the slot again only
once it finds that ticket in the headers of all ranks that may read it. The owner never waits for
this: where no slot is free, it makes another, so a rank that is slow holds up nobody and reads what
it was offered. What a rank was offered and never read, since an exchange was given up, it passes
with its *floor*: of this rank's offers, nothing up to that ticket will be read any more. A copy
that its owner keeps is offered again as it lies, under another ticket.

**Nothing is left behind.** A segment is a memfd: it has no name, other ranks open it below
``/proc``, and the kernel frees it with the last process that maps it, however that ended. Its pages
are allocated when a slot is made (``fallocate``), so that a host without memory gives an error
here, and never a bus error later: ``offer`` and ``lend`` then answer None, and the data travels in
messages, as it does between hosts. Other ranks map a segment for reading alone.

Ranks find out once per group which of them share a host, see ``open_segments``: those that have the
same boot, process and network namespaces, and that can open each other's segment and pipe. Whoever
cannot, for want of Linux, ``/proc``, permission or memory, is treated as on another host.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp_compose.base.group import Group, is_alive
from fsdp_compose.base.process import here
from fsdp_compose.comm.mail import Mail
from fsdp_compose.comm.messages import gather_objects

MAX_SLOTS = 256
"""Slots of a rank in a group; with more offers unread than that, data travels in messages."""

_PAGE = mmap.PAGESIZE
_WORD = 8
_FLOORS = 2  # words of the header before them: the secret
_NO_MEMORY = (
    "rank %d cannot have %d bytes of shared memory for the other ranks of its host (%s). It sends "
    "them instead, which takes longer."
)
_logger = logging.getLogger("fsdp_compose")


class Offer(NamedTuple):
    """Where a rank offers data, as the head of an exchange says it; ticket 0: it sends the data."""

    ticket: int = 0
    slot: int = 0
    start: int = 0  # in the segment, in bytes
    nbytes: int = 0


@dataclass(eq=False)
class Lease:
    """Memory of a slot that its holder may write until it is offered; given back when dropped.

    ``kept`` holds what users made over the slot's memory, by themselves, for its next lease.
    """

    memory: torch.Tensor  # uint8, a storage of exactly the bytes that were asked for
    kept: MutableMapping[Any, Any]
    was_offered: bool = False
    is_copy: bool = False  # of what lies elsewhere; nobody writes it, and it is offered again


@dataclass(eq=False)
class _Slot:
    """A part of this rank's segment."""

    start: int
    map: mmap.mmap
    ticket: int = 0  # of its newest offer
    lease: weakref.ref[Lease] | None = None
    memories: dict[int, torch.Tensor] = field(default_factory=dict)  # by bytes
    kept: MutableMapping[Any, Any] = field(default_factory=weakref.WeakKeyDictionary)

    def memory(self, nbytes: int) -> torch.Tensor:
        if nbytes not in self.memories:
            with torch.inference_mode(False):
                found = torch.frombuffer(self.map, dtype=torch.uint8, count=nbytes)
            self.memories[nbytes] = found
        return self.memories[nbytes]


@dataclass(eq=False)
class _Peer:
    """Another rank's segment, to be read."""

    fd: int
    header: memoryview
    maps: dict[int, tuple[int, torch.Tensor]] = field(default_factory=dict)  # by slot

    def read(self, offer: Offer) -> torch.Tensor:
        """What the rank offers, as uint8."""
        start, found = self.maps.get(offer.slot, (-1, None))
        if found is None or start != offer.start or found.numel() < offer.nbytes:
            size = _whole_pages(offer.nbytes)
            seen = mmap.mmap(self.fd, size, prot=mmap.PROT_READ, offset=offer.start)
            with torch.inference_mode(False), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that it cannot be written, as wanted
                found = torch.frombuffer(seen, dtype=torch.uint8)
            self.maps[offer.slot] = offer.start, found
        return found[: offer.nbytes]


@dataclass(eq=False)
class Reading:
    """An exchange in which this rank reads others' memory, until it is closed or dropped."""

    segments: Segments
    own: Lease | None = None  # the memory that this rank offers in it, if that is lent
    read: dict[int, Offer] = field(default_factory=dict)  # by rank
    is_closed: bool = False

    def read_from(self, rank: int, offer: Offer) -> torch.Tensor:
        """The bytes that ``rank`` offers, uint8; not to be read once this is closed."""
        self.read[rank] = offer
        return self.segments.peers[rank].read(offer)

    def close(self) -> None:
        """What was offered has been read: its owners may write there again."""
        self.segments.close(self)


class Segments:
    """The segments of a group's ranks on this host: this rank's own, and those it reads."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
        self.peers: dict[int, _Peer] = {}
        self.slots: list[_Slot] = []
        self.ticket = 0
        self.readings: deque[weakref.ref[Reading]] = deque()  # as they were begun
        self.lock = threading.Lock()
        self.was_told = False  # that there is no memory for another slot
        self.end = _whole_pages(_WORD * (_FLOORS + group.size * (1 + MAX_SLOTS)))
        self.fd = os.memfd_create("fsdp_compose")
        weakref.finalize(self, os.close, self.fd)
        os.posix_fallocate(self.fd, 0, self.end)
        self.header = memoryview(mmap.mmap(self.fd, self.end)).cast("B").cast("q")
        self.secret = secrets.randbits(62)
        self.header[0] = self.secret
        self.mail = Mail(group)

    def try_peer(self, rank: int, pid: int, fd: int, secret: int, entrance: int) -> bool:
        """Open another rank's segment, and its pipe; False where this rank cannot."""
        try:
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            size = _whole_pages(_WORD * (_FLOORS + self.size * (1 + MAX_SLOTS)))
            header = memoryview(mmap.mmap(opened, size, prot=mmap.PROT_READ)).cast("B").cast("q")
            if header[0] != secret:
                raise OSError("another file")
            self.mail.open_to(rank, pid, entrance)
        except (OSError, ValueError):
            os.close(opened)
            return False
        peer = self.peers[rank] = _Peer(opened, header)
        weakref.finalize(peer, os.close, opened)
        return True

    def lend(self, nbytes: int) -> Lease | None:
        """Memory of this rank's segment that nobody reads; None where there is none."""
        with self.lock:
            slots = sorted(enumerate(self.slots), key=lambda pair: len(pair[1].map))
            large = (s for i, s in slots if len(s.map) >= nbytes and self._is_free(i, s))
            slot = next(large, None)
            if slot is None:
                slot = self._grow(nbytes, [s for i, s in slots if self._is_free(i, s)])
            if slot is None:
                return None
            lease = Lease(slot.memory(nbytes), slot.kept)
            slot.lease = weakref.ref(lease)
            return lease

    def _is_free(self, index: int, slot: _Slot) -> bool:
        if slot.lease is not None and slot.lease() is not None:
            return False
        floor, read = _FLOORS + self.rank, _FLOORS + self.size + self.rank * MAX_SLOTS + index
        for peer in self.peers.values():
            if peer.header[floor] < slot.ticket and peer.header[read] < slot.ticket:
                return False
        return True

    def _grow(self, nbytes: int, free: list[_Slot]) -> _Slot | None:
        """Make another slot, or a larger one in the place of one that is free and too small."""
        if not free and len(self.slots) == MAX_SLOTS:
            return None
        size = _whole_pages(nbytes)
        try:
            os.posix_fallocate(self.fd, self.end, size)
            slot = _Slot(self.end, mmap.mmap(self.fd, size, offset=self.end))
        except (OSError, ValueError) as error:
            if not self.was_told:
                self.was_told = True
                _logger.warning(_NO_MEMORY, dist.get_rank(), nbytes, error)
            return None
        self.end += size
        if free:
            small = max(free, key=lambda s: len(s.map))
            self.slots[self.slots.index(small)] = slot
            small.map.madvise(mmap.MADV_REMOVE)  # others may still map it, so free the pages now
        else:
            self.slots.append(slot)
        return slot

    def copy(self, data: torch.Tensor) -> Lease | None:
        """A copy of ``data``, which can be offered again and again while the lease is held."""
        lease = self.lend(data.nbytes)
        if lease is not None:
            lease.is_copy = True
            lease.memory.view(data.dtype).copy_(data)
        return lease

    def offer(self, data: torch.Tensor) -> Offer:
        """Make ``data`` readable for the others: as it lies, if it is lent, or else as a copy."""
        lease = self.lease_of(data)
        if lease is None or (lease.was_offered and not lease.is_copy):
            lease = self.copy(data)
        if lease is None:
            return Offer()
        lease.was_offered = True
        with self.lock:
            self.ticket += 1
            index = next(i for i, s in enumerate(self.slots) if s.lease and s.lease() is lease)
            slot = self.slots[index]
            slot.ticket = self.ticket
        return Offer(slot.ticket, index, slot.start, data.nbytes)

    def lease_of(self, data: torch.Tensor) -> Lease | None:
        """The lease whose memory ``data`` is."""
        address = data.data_ptr()
        leases = [slot.lease() for slot in self.slots if slot.lease is not None]
        found = (x for x in leases if x is not None and x.memory.data_ptr() == address)
        return next(found, None)

    def begin(self, own: Lease | None = None) -> Reading:
        """An exchange in which this rank will read what the others offer."""
        reading = Reading(self, own)
        with self.lock:
            self.readings.append(weakref.ref(reading))
        return reading

    @property
    def far(self) -> list[int]:
        """Ranks on other hosts."""
        return [r for r in range(self.size) if r != self.rank and r not in self.peers]

    def close(self, reading: Reading) -> None:
        with self.lock:
            for rank, offer in reading.read.items():
                place = _FLOORS + self.size + rank * MAX_SLOTS + offer.slot
                self.header[place] = max(self.header[place], offer.ticket)
            reading.is_closed, reading.own = True, None
            while self.readings:
                first = self.readings[0]()
                if first is not None and not first.is_closed:
                    return
                self.readings.popleft()
                for rank, offer in first.read.items() if first is not None else ():
                    place = _FLOORS + rank
                    self.header[place] = max(self.header[place], offer.ticket)

    def held_bytes(self) -> int:
        """Shared memory that this rank has allocated for the group."""
        return sum(len(slot.map) for slot in self.slots)

    def lent_bytes(self, copies: bool = False) -> int:
        """Bytes of that memory in which gradients are packed now, or that hold ``copies``."""
        leases = [slot.lease() for slot in self.slots if slot.lease is not None]
        return sum(x.memory.numel() for x in leases if x is not None and x.is_copy == copies)


_segments: weakref.WeakKeyDictionary[dist.ProcessGroup, Segments | None] = (
    weakref.WeakKeyDictionary()
)


def open_segments(groups: Iterable[Group]) -> None:
    """Find out which ranks of each group share a host; every rank of each group must call.

    It is done once for a group, where the backend is gloo and nobody chose a transport. Simulated
    ranks send, so that every message can be delayed or lost.
    """
    for group in groups:
        if group.pg is None or group.backend != "gloo" or group.transport is not None:
            continue
        if here.simulated is not None:
            continue
        if group.pg not in _segments:
            for pg in [known for known in _segments if not is_alive(known)]:
                del _segments[pg]
            _segments[group.pg] = None  # if the next line fails, it is not tried again
            _segments[group.pg] = _meet(group)


def segments_of(group: Group) -> Segments | None:
    """What ranks of the group's host read of each other; None where this rank is alone on it."""
    return None if group.pg is None else _segments.get(group.pg)


def all_segments() -> Iterator[Segments]:
    """The segments of all groups, for tests."""
    return filter(None, list(_segments.values()))


def _meet(group: Group) -> Segments | None:
    own = place = None
    with contextlib.suppress(OSError, AttributeError, ValueError):
        host = _name_host()
        own = Segments(group)
        place = host, os.getpid(), own.fd, own.secret, own.mail.entrances
    places = gather_objects(place, group, "fully_shard")
    opened = []
    if own is not None and place is not None:
        for rank, other in enumerate(places):
            if rank != group.rank and other is not None and other[0] == place[0]:
                _, pid, fd, secret, entrances = other
                can_read = own.try_peer(rank, pid, fd, secret, entrances[group.rank])
                opened += [rank] if can_read else []
    answers = gather_objects(opened, group, "fully_shard")
    if own is None:
        return None
    own.peers = {rank: p for rank, p in own.peers.items() if group.rank in answers[rank]}
    own.mail.keep([*own.peers])
    return own if own.peers else None


def _name_host() -> tuple[str, ...]:
    """What processes have in common that see the same memory, process numbers and network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
    return boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))


def _whole_pages(nbytes: int) -> int:
    return max(-(-nbytes // _PAGE), 1) * _PAGE
