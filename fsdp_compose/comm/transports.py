"""The library's own transports: shared memory, pairs of ranks, and the group's collectives.

On gloo tensors go between pairs of ranks: its own all-gather and reduce-scatter move the data two
to three times, and what each rank adds to a sum then travels in low precision and is summed in fp32
here, in rank order, so that results do not depend on timing.

Ranks of one host read each other's memory instead (comm/shared_memory.py): a gather reads every
rank's copy of its shard, a reduction the packed gradients where they lie, and sums the same numbers
in the same order. Nothing is sent for it, as the heads that go ahead of an exchange say where to
read: who waits for them sleeps, and hears of ranks that are missing or do something else. In a
group over several hosts, ranks of one host share memory and the others send to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fsdp_compose.base.group import Call, Group, Op, Started, Tensors, Transport
from fsdp_compose.base.mesh import served_devices
from fsdp_compose.base.torch_private import (
    GATHER_OPTIONS,
    REDUCE_OPTIONS,
    all_gather_several,
    all_gather_single,
    premultiplied,
    reduce_scatter_several,
    reduce_scatter_single,
)
from fsdp_compose.comm.messages import post_pairs
from fsdp_compose.comm.posted import forget
from fsdp_compose.comm.shared_memory import MAX_SLOTS, Lease, Offer, Reading, Segments, segments_of

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def send_pairs(
    outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], call: Call
) -> Started:
    """Send ``outgoing[r]`` to every other rank ``r`` and receive ``incoming[r]`` from it."""
    group = call.group
    peers = [(group.rank + step) % group.size for step in range(1, group.size)]
    senders = peers[::-1]
    arriving = {r: incoming[r] for r in senders}
    works = post_pairs(arriving, {r: outgoing[r] for r in peers}, group, call.tag, call.purpose)
    return Started(works, [group.ranks[r] for r in senders + peers])


def _gather_pairs(
    whole: torch.Tensor, parts: Sequence[torch.Tensor], own: torch.Tensor, call: Call
) -> Started:
    return send_pairs([own] * call.group.size, parts, call)


def room_for_parts(parts: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """Make memory for what each rank adds to this rank's part; this rank's is the part itself."""
    own = parts[group.rank]
    return [own if r == group.rank else torch.empty_like(own) for r in range(group.size)]


def _reduce_pairs(whole: torch.Tensor, parts: Sequence[torch.Tensor], call: Call) -> Started:
    received = call.room or room_for_parts(parts, call.group)
    return send_pairs(parts, received, call)._replace(parts=received)


def _exchange_pairs(
    outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], call: Call
) -> Started:
    group = call.group
    others = [r for r in range(group.size) if r != group.rank]
    arriving = {r: incoming[r] for r in others if incoming[r].numel()}
    leaving = {r: outgoing[r] for r in others if outgoing[r].numel()}
    works = post_pairs(arriving, leaving, group, call.tag, call.purpose)
    return Started(works, [group.ranks[r] for r in [*arriving, *leaving]])


@dataclass(eq=False, slots=True)
class _Read:
    """Reading what one rank offers, as a work.

    Attributes:
        like: of the dtype and size of what is read, which is ...
        begin: ... from here in bytes ...
        nbytes: ... of so many that the rank offers.
        take: is given it.
    """

    rank: int
    reading: Reading
    call: Call
    like: torch.Tensor
    begin: int
    nbytes: int
    take: Callable[[torch.Tensor], object]
    is_last: bool = False  # the last of the reading's parts, which ends the reading

    def wait(self) -> None:
        assert self.call.offers is not None
        offer: Offer = self.call.offers()[self.rank]
        if not offer.ticket:  # that rank had no memory to offer, and sends instead
            found = torch.empty_like(self.like)
            works = post_pairs({self.rank: found}, {}, *self.call[:3])
            works[0].wait()
            forget(works)
        elif offer.nbytes != self.nbytes:
            raise RuntimeError(f"it offers {offer.nbytes} bytes; wanted {self.nbytes}.")
        else:
            try:
                offered = self.reading.read_from(self.rank, offer)
            except OSError as error:
                raise self._explain(error) from error
            found = offered[self.begin : self.begin + self.like.nbytes].view(self.like.dtype)
        self.take(found)
        if self.is_last:
            self.reading.close()

    def _explain(self, error: OSError) -> OSError:
        """The error where this rank cannot map what the other one offers, for the user."""
        group = self.call.group
        return OSError(
            error.errno,
            f"rank {group.ranks[group.rank]} waits to {self.call.purpose}, and cannot map the "
            f"memory of rank {group.ranks[self.rank]}: {error.strerror}. This takes an open file: "
            "close files, or start the job with a higher limit (ulimit -n).",
        )


def _start_on_host(
    outgoing: Sequence[torch.Tensor],
    incoming: Mapping[int, torch.Tensor],
    reads: Sequence[_Read],
    call: Call,
) -> Started:
    """Send ``outgoing[r]`` to ranks that do not read it here, and wait for what ``reads`` read.

    Args:
        incoming: by rank of another host, what is to be filled.
    """
    near = [read.rank for read in reads]
    leaving = {r: outgoing[r] for r in incoming}
    if call.offered == Offer():
        leaving |= {r: outgoing[r] for r in near}
    works = [*reads, *post_pairs(incoming, leaving, *call[:3])]
    return Started(works, [call.group.ranks[r] for r in (*near, *incoming, *leaving)])


def _segments(group: Group) -> Segments:
    """Those of a group for which ``transport_of`` chose ``ON_HOST``."""
    found = segments_of(group)
    assert found is not None
    return found


def _offer_on_host(data: torch.Tensor, group: Group) -> Offer:
    return _segments(group).offer(data)


def _lend_on_host(nbytes: int, group: Group) -> Lease | None:
    return _segments(group).lend(nbytes)


def _copy_on_host(data: torch.Tensor, group: Group) -> Lease | None:
    segments = _segments(group)
    if len(segments.slots) > MAX_SLOTS // 2:
        return None  # the other slots are for what is under way
    return segments.copy(data)


def _room_on_host(parts: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """As ``room_for_parts``; what ranks of this host add is read where it lies."""
    own = parts[group.rank]
    found = [own] * group.size
    for rank in _segments(group).far:
        found[rank] = torch.empty_like(own)
    return found


def _gather_on_host(
    whole: torch.Tensor, parts: Sequence[torch.Tensor], own: torch.Tensor, call: Call
) -> Started:
    group, mine = call.group, parts[call.group.rank]
    if own.data_ptr() != mine.data_ptr():
        mine.copy_(own)
    if call.offers is None:
        return _gather_pairs(whole, parts, mine, call)
    segments = _segments(group)
    reading = segments.begin()
    reads = [_Read(r, reading, call, mine, 0, mine.nbytes, parts[r].copy_) for r in segments.peers]
    reads[-1].is_last = True
    return _start_on_host([mine] * group.size, {r: parts[r] for r in segments.far}, reads, call)


def _reduce_on_host(whole: torch.Tensor, parts: Sequence[torch.Tensor], call: Call) -> Started:
    """Each rank reads its part of the others' gradients; one of another host is sent its part."""
    group = call.group
    if call.offers is None:  # nobody said where to read
        return _reduce_pairs(whole, parts, call._replace(room=room_for_parts(parts, group)))
    segments, own, found = _segments(group), parts[group.rank], [*call.room]
    reading = segments.begin(segments.lease_of(whole))
    begin, nbytes = group.rank * own.nbytes, whole.nbytes
    reads = [
        _Read(r, reading, call, own, begin, nbytes, partial(found.__setitem__, r))
        for r in segments.peers
    ]
    started = _start_on_host(parts, {r: found[r] for r in segments.far}, reads, call)
    return started._replace(parts=found, release=reading.close)


def _gather_at_once(
    whole: torch.Tensor, parts: Sequence[torch.Tensor], own: torch.Tensor, call: Call
) -> Started:
    if (
        whole.is_cpu
        and call.group.backend not in _OF_HOSTS
        and (device := _find_served_device(call.group))
    ):
        there = torch.empty_like(whole, device=device)
        _order(all_gather_single(call.group.pg, there, own.to(device), GATHER_OPTIONS))
        whole.copy_(there)
        return Started()
    work = all_gather_single(call.group.pg, whole, own, GATHER_OPTIONS)
    return Started((work,)) if whole.is_cpu and work is not None else _order(work)


def _gather_all_at_once(
    wholes: Tensors, parts: Sequence[Tensors], owns: Tensors, call: Call
) -> Started:
    work = all_gather_several(call.group.pg, list(wholes), list(owns), GATHER_OPTIONS)
    return Started((work,)) if wholes[0].is_cpu and work is not None else _order(work)


def _reduce_at_once(whole: torch.Tensor, parts: Sequence[torch.Tensor], call: Call) -> Started:
    total = whole.new_empty(whole.numel() // call.group.size)
    pg = call.group.reductions or call.group.pg
    options = REDUCE_OPTIONS if call.factor == 1.0 else premultiplied(call.factor)
    work = reduce_scatter_single(pg, total, whole, options)
    if whole.is_cpu and work is not None:
        return Started((work,), (), (total,))
    return _order(work)._replace(parts=(total,))


def _reduce_all_at_once(wholes: Tensors, parts: Sequence[Tensors], call: Call) -> Sequence[Started]:
    totals = [whole.new_empty(whole.numel() // call.group.size) for whole in wholes]
    pg = call.group.reductions or call.group.pg
    work = reduce_scatter_several(pg, totals, list(wholes), REDUCE_OPTIONS)
    if wholes[0].is_cpu and work is not None:
        return [Started((work,), (), (total,)) for total in totals]
    started = _order(work)
    return [started._replace(parts=(total,)) for total in totals]


def _all_reduce_at_once(tensor: torch.Tensor, op: Op, call: Call) -> None:
    is_away = tensor.is_cpu and call.group.backend not in _OF_HOSTS
    device = _find_served_device(call.group) if is_away else None
    there = tensor if device is None else tensor.to(device)
    dist.all_reduce(there, _OPS[op], group=call.group.pg)
    if there is not tensor:
        tensor.copy_(there)


_OF_HOSTS = ("gloo", "fake")
"""Backends that move what lies on the host."""


def _find_served_device(group: Group) -> torch.device | None:
    """Where what lies on the host travels, as numbers of offloaded gradients, if not there.

    A process group of NCCL alone serves no host: ``init_process_group("nccl")``.
    """
    served = list(served_devices(group.pg))
    return None if "cpu" in served or len(served) != 1 else torch.device(served[0])


def _exchange_at_once(
    outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], call: Call
) -> Started:
    if call.group.backend == "gloo":  # whose lists are of pieces of one size
        return _exchange_pairs(outgoing, incoming, call)
    # By lists: the pieces travel from and to where they lie, without a copy into one buffer.
    rank = call.group.rank
    sent, received = list(outgoing), list(incoming)
    sent[rank], received[rank] = sent[rank][:0], received[rank][:0]
    dist.all_to_all(received, sent, group=call.group.pg)
    return Started()


def _order(work: Any) -> Started:
    """Order work of an accelerator on its current stream; the host waits for nothing then."""
    if work is not None:
        work.wait()
    return Started()


PAIRS = Transport(
    gather=_gather_pairs,
    reduce_scatter=_reduce_pairs,
    all_reduce=_all_reduce_at_once,
    exchange=_exchange_pairs,
    keeps_parts=True,
    may_wait=False,
    room=room_for_parts,
)
"""Tensors go between pairs of ranks; the default on gloo."""

ON_HOST = replace(
    PAIRS,
    gather=_gather_on_host,
    reduce_scatter=_reduce_on_host,
    copies_own=True,
    offer=_offer_on_host,
    lend=_lend_on_host,
    copy=_copy_on_host,
    room=_room_on_host,
)
"""Ranks of one host read each other's memory, the others send; where some ranks share a host."""

AT_ONCE = Transport(
    gather=_gather_at_once,
    reduce_scatter=_reduce_at_once,
    all_reduce=_all_reduce_at_once,
    exchange=_exchange_at_once,
    copies_own=True,
    gather_all=_gather_all_at_once,
    reduce_all=_reduce_all_at_once,
)
"""The collectives of the group, one call for all ranks and for all buckets of a unit; on NCCL."""

ONE_BY_ONE = replace(AT_ONCE, gather_all=None, reduce_all=None)
"""As ``AT_ONCE``, with a call for each bucket, which every backend has; the default on others."""

_COALESCES = ("nccl", "fake")


def transport_of(group: Group) -> Transport:
    """The transport that was chosen for the group, or else its backend's default."""
    if group.transport is not None:
        return group.transport
    if group.backend != "gloo":
        return AT_ONCE if group.backend in _COALESCES else ONE_BY_ONE
    return PAIRS if segments_of(group) is None else ON_HOST


def premultiplies(group: Group) -> bool:
    """Whether a reduction multiplies each rank's tensor on its way to the sum, as NCCL does."""
    return group.pg is not None and group.backend == "nccl" and transport_of(group) is AT_ONCE


def count_shared(group: Group) -> int:
    """How many other ranks of the group this one reads the memory of, as they share its host."""
    segments = segments_of(group)
    return 0 if segments is None or transport_of(group) is not ON_HOST else len(segments.peers)
