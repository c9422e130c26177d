"""The only file that calls collectives: functions over plain tensors and a group.

A buffer is one flat tensor of ``group.size`` equal parts, part ``r`` belonging to rank ``r``.
Gathers move bytes, so that any dtype travels. On gloo both directions go point to point: its own
all-gather and reduce-scatter move the data two to three times, and summing here lets low
precision travel while fp32 accumulates, in rank order, so that results do not depend on timing.

Buffers that go point to point are preceded by a head: what the sender is doing. Where heads differ,
the ranks run different units. The buffers behind them never meet, since their tags are made of the
heads, and the receiver says so instead of waiting for ever or reading what is not meant for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol

import torch
import torch.distributed as dist

from fsdp_compose.base.mesh import Group
from fsdp_compose.base.torch_private import (
    GATHER_OPTIONS,
    REDUCE_OPTIONS,
    all_gather_single,
    reduce_scatter_single,
)
from fsdp_compose.comm import waiting
from fsdp_compose.comm.flags import Flags as Flags
from fsdp_compose.comm.messages import gather_objects as gather_objects
from fsdp_compose.comm.messages import is_point_to_point as is_point_to_point
from fsdp_compose.comm.messages import (
    no_answer,
    post_pairs,
    tag_of,
    wait_for,
)
from fsdp_compose.comm.traffic import Traffic as Traffic
from fsdp_compose.comm.traffic import traffic as traffic

Op = Literal["sum", "max", "min", "product"]
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


Head = tuple[int, ...]
"""Ten integers. The last tells a comparison of heads alone from one ahead of data; the one before,
how many bytes of flags follow, may differ between ranks that do the same."""

HEAD = 10
_DATA, _COMPARISON = 0, 1
_FLAGS = HEAD - 2


class Caller(Protocol):
    """Whose collectives these are; see verify.Log."""

    epoch: int  # counts disagreements: what was sent before one is never read after it

    def head(self) -> Head:
        """What this rank is doing, in eight integers; equal on ranks that do the same."""

    def disagree(self, group: Group) -> NoReturn:
        """A rank of ``group`` does something else, as every rank of it knows."""


@dataclass(slots=True)
class Heads:
    """Of one exchange: what this rank sent, and what arrives from each peer.

    A rank that has not all of its ``flags`` sends them behind its head, to be united in ``check``.
    """

    caller: Caller
    group: Group
    sent: torch.Tensor
    received: torch.Tensor  # by peer
    works: Sequence[Any]
    peers: Sequence[int]
    purpose: str
    epoch: int  # of the caller, when it was sent
    flags: Flags | None = None
    flag_works: Sequence[Any] = ()  # of sending them

    def rows(self) -> list[list[int]]:
        wait_for(self.works, self.peers, self.purpose)
        return self.received.tolist()

    def check(self) -> bool:
        """Raise unless every peer does the same; False if ranks have disagreed since it was sent.

        Some of them may never have come to this exchange then, and nobody is to read its data.
        """
        if self.caller.epoch != self.epoch:
            return False
        mine, rows = self.sent.tolist(), self.rows()
        if any(row != mine for row in rows):
            what = _without_flags(mine)
            if any(_without_flags(row) != what for row in rows):
                self.caller.disagree(self.group)
        if self.flags is not None:
            self._unite(self.flags, mine, rows)
        return True

    def _unite(self, flags: Flags, mine: list[int], rows: list[list[int]]) -> None:
        assert self.group.pg is not None
        received = []
        works = list(self.flag_works)
        for index, row in enumerate(rows):
            if row[_FLAGS]:
                peer = index + (index >= self.group.rank)
                received.append(torch.empty(row[_FLAGS], dtype=torch.uint8))
                works.append(self.group.pg.recv([received[-1]], peer, _flag_tag(mine)))
        wait_for(works, (), self.purpose)
        for part in received:
            flags.add(part)
        if not all(row[_FLAGS] for row in rows):
            flags.bits = (1 << flags.count) - 1


@dataclass(slots=True)
class Exchange:
    """Communication under way; ``wait`` makes its data safe to read on the current stream.

    Raises:
        RuntimeError: another rank has died, did not answer within the group's timeout, or
            communicates something else.
    """

    works: Sequence[Any] = ()
    purpose: str = "communicate"
    peers: Sequence[int] = ()  # global rank each work is with; empty: all at once
    heads: Heads | None = None

    def wait(self) -> None:
        works, heads, self.works, self.heads = self.works, self.heads, (), None
        if heads is None or heads.check():
            wait_for(works, self.peers, self.purpose)


def _without_flags(head: list[int]) -> list[int]:
    return head[:_FLAGS] + head[_FLAGS + 1 :]


@dataclass(slots=True)
class ReduceScatter:
    """A reduce-scatter under way: on gloo every rank's contribution, elsewhere the sum."""

    exchange: Exchange
    contributions: list[torch.Tensor]
    own: int = 0  # which contribution is this rank's, in the buffer that was packed

    def result(self, dtype: torch.dtype, scale: float) -> torch.Tensor:
        """This rank's part of the sum, times ``scale``, in ``dtype``; a tensor of its own."""
        self.exchange.wait()
        parts, self.contributions = self.contributions, []
        if len(parts) == 1:
            total = parts[0].to(dtype)
        elif parts[0].dtype == dtype:
            total = torch.add(parts[0], parts[1], out=parts[1 if self.own == 0 else 0])
        else:
            total = parts[0].to(dtype).add_(parts[1])
        for part in parts[2:]:
            total += part
        return total if scale == 1.0 else total.mul_(scale)


def gather_parts(
    whole: torch.Tensor,
    parts: Sequence[torch.Tensor],
    own: torch.Tensor,
    group: Group,
    purpose: str = "gather",
    caller: Caller | None = None,
) -> Exchange:
    """Fill every part of ``whole`` from the rank that owns it.

    Args:
        whole: uint8, one dimension.
        parts: ``whole`` cut into ``group.size`` equal views.
        own: what this rank sends: its part, filled already; or, unless the group is point to
            point, another tensor of the same bytes, which the collective copies there.
    """
    if group.pg is None or whole.numel() == 0:
        return Exchange()
    traffic.gathers += 1
    traffic.gather_bytes += whole.numel() - own.numel()
    if is_point_to_point(group):
        return _swap([own] * group.size, parts, group, purpose, caller)
    return _on_stream(all_gather_single(group.pg, whole, own, GATHER_OPTIONS), whole, purpose)


def reduce_scatter_parts(
    whole: torch.Tensor,
    parts: Sequence[torch.Tensor],
    group: Group,
    purpose: str = "reduce gradients",
    caller: Caller | None = None,
    flags: Flags | None = None,
) -> ReduceScatter:
    """Start summing every rank's ``whole``; this rank receives part ``group.rank`` of the sum.

    Args:
        whole: real floating point, one dimension; must stay allocated until the result is read.
        parts: ``whole`` cut into ``group.size`` equal views.
        flags: united over the group with it, where the group is point to point.
    """
    if group.pg is None:
        return ReduceScatter(Exchange(), [whole])
    if whole.numel() == 0:
        return ReduceScatter(Exchange(), [whole])
    own = parts[group.rank]
    traffic.reduces += 1
    traffic.reduce_bytes += (whole.numel() - own.numel()) * whole.element_size()
    if is_point_to_point(group):
        received = [own if r == group.rank else torch.empty_like(own) for r in range(group.size)]
        exchange = _swap(parts, received, group, purpose, caller, flags=flags)
        return ReduceScatter(exchange, received, group.rank)
    total = torch.empty_like(own)
    work = reduce_scatter_single(group.pg, total, whole, REDUCE_OPTIONS)
    return ReduceScatter(_on_stream(work, whole, purpose), [total])


def exchange_parts(parts: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """Send ``parts[r]`` to rank ``r`` and return what every rank sent here, in rank order.

    Args:
        parts: uint8, one dimension, all of the same size on every rank.
    """
    if group.pg is None:
        return list(parts)
    own = parts[group.rank]
    traffic.reduces += 1
    traffic.reduce_bytes += own.numel() * (group.size - 1)
    if is_point_to_point(group):
        received = [own if r == group.rank else torch.empty_like(own) for r in range(group.size)]
        _swap(parts, received, group, "exchange gradients").wait()
        return received
    incoming = own.new_empty(own.numel() * group.size)
    dist.all_to_all_single(incoming, torch.cat(list(parts)), group=group.pg)
    return list(incoming.chunk(group.size))


def move_pieces(
    outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], group: Group, purpose: str
) -> None:
    """Send ``outgoing[r]`` to rank ``r`` and fill ``incoming[r]`` with what it sent here.

    Args:
        outgoing, incoming: uint8, one dimension, of sizes that both ends know; nothing travels
            where a piece is empty, nor to the rank itself.
    """
    if group.pg is None:
        return
    traffic.moves += 1
    traffic.move_bytes += sum(p.numel() for r, p in enumerate(incoming) if r != group.rank)
    others = [r for r in range(group.size) if r != group.rank]
    senders = [r for r in others if incoming[r].numel()]
    receivers = [r for r in others if outgoing[r].numel()]
    if is_point_to_point(group):
        arriving = {r: incoming[r] for r in senders}
        works = post_pairs(arriving, {r: outgoing[r] for r in receivers}, group, 0, purpose)
        Exchange(works, purpose, [group.ranks[r] for r in senders + receivers]).wait()
        return
    sizes = [[pieces[r].numel() * (r != group.rank) for r in range(group.size)]
             for pieces in (outgoing, incoming)]  # fmt: skip
    sent = torch.cat([outgoing[0].new_empty(0), *(outgoing[r] for r in receivers)])
    got = sent.new_empty(sum(sizes[1]))
    dist.all_to_all_single(got, sent, sizes[1], sizes[0], group=group.pg)
    for piece, part in zip(incoming, got.split(sizes[1]), strict=True):
        if part.numel():
            piece.copy_(part)


def all_reduce(
    tensor: torch.Tensor,
    group: Group,
    op: Op = "sum",
    caller: Caller | None = None,
    flags: Flags | None = None,
    purpose: str = "add up gradients or norms over the ranks",
) -> torch.Tensor:
    """Combine ``tensor`` over the group in place and return it; ``flags`` as in a reduction."""
    if group.pg is not None:
        if caller is not None and is_point_to_point(group):
            _send_heads(caller, caller.head(), _DATA, group, purpose, flags).check()
        traffic.all_reduces += 1
        traffic.all_reduce_bytes += (
            2 * tensor.numel() * tensor.element_size() * (group.size - 1) // group.size
        )
        with _blocking(purpose, group, tensor):
            dist.all_reduce(tensor, _OPS[op], group=group.pg)
    return tensor


@contextlib.contextmanager
def _blocking(purpose: str, group: Group, tensor: torch.Tensor) -> Iterator[None]:
    """Scope of a collective that on a CPU returns when it is done."""
    wait = waiting.enter(purpose, group.ranks)
    try:
        yield
    except RuntimeError as error:
        advice = f"{wait.absent or 'it has died, is stuck, or does not take part'}. Look at what "
        raise no_answer(purpose, "another rank", f"{advice}it printed.", error) from error
    finally:
        waiting.leave()
    if tensor.device.type != "cpu":
        stream = torch.get_device_module(tensor.device).current_stream(tensor.device)
        waiting.watch_mark(purpose, group.ranks, stream.record_event())


def unite(flags: Flags, group: Group, device: torch.device, caller: Caller) -> None:
    """Combine ``flags`` over the group and wait for the result, which stalls an accelerator."""
    if group.pg is None:
        return
    if is_point_to_point(group):
        _send_heads(caller, caller.head(), _DATA, group, "compare gradients", flags).check()
        return
    traffic.control += 1
    tensor = flags.to_tensor().to(device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group.pg)
    flags.take(tensor)


def all_gather_uneven(
    local: torch.Tensor, lengths: Sequence[int], group: Group, purpose: str = "gather a tensor"
) -> torch.Tensor:
    """Concatenate one-dimensional pieces of known ``lengths`` in rank order, on every rank."""
    if group.pg is None:
        return local.clone()
    width = max(lengths)
    whole = local.new_empty(width * group.size).view(torch.uint8)
    parts = whole.chunk(group.size) if width else [whole] * group.size
    parts[group.rank].view(local.dtype)[: local.numel()].copy_(local)
    gather_parts(whole, parts, parts[group.rank], group, purpose).wait()
    pieces = (p.view(local.dtype)[:n] for p, n in zip(parts, lengths, strict=True))
    return torch.cat(list(pieces))


def broadcast(tensor: torch.Tensor, group: Group, source: int = 0) -> torch.Tensor:
    """Overwrite ``tensor`` with that of the group's rank ``source``; bytes, so any dtype."""
    if group.pg is not None and tensor.numel():
        traffic.control += 1
        with _blocking("receive a broadcast", group, tensor):
            dist.broadcast(tensor, group.ranks[source], group=group.pg)
    return tensor


def span(
    values: Sequence[int], groups: Sequence[Group], device: torch.device, caller: Caller
) -> torch.Tensor:
    """The largest of each value over all ranks of ``groups``, then the largest of its negative.

    The values are written by kernels, so that nothing waits for a device. On an accelerator the
    result is in the order of the current stream.
    """
    both = [*values, *(-value for value in values)]
    if device.type == "cpu" and all(is_point_to_point(g) for g in groups if g.pg is not None):
        return torch.tensor(_span_by_heads(both, groups, caller))
    if device.type == "cpu":
        tensor = torch.tensor(both)
    else:
        tensor = torch.empty(len(both), dtype=torch.int64, device=device)
        for index, value in enumerate(both):
            tensor[index].fill_(value)
    for group in groups:
        if group.pg is not None:
            traffic.control += 1
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group.pg)
    return tensor


def _span_by_heads(both: list[int], groups: Sequence[Group], caller: Caller) -> list[int]:
    """``span`` by the messages that precede data, so that it meets a rank that sends some."""
    for group in groups:
        if group.pg is not None:
            traffic.control += 1
            head = (*both, *[0] * (_FLAGS - len(both)))
            rows = _send_heads(caller, head, _COMPARISON, group, "end a step").rows()
            if any(row[-1] != _COMPARISON for row in rows):
                caller.disagree(group)
            both = [max(column) for column in zip(both, *rows, strict=False)]
    return both


def _swap(
    outgoing: Sequence[torch.Tensor],
    incoming: Sequence[torch.Tensor],
    group: Group,
    purpose: str,
    caller: Caller | None = None,
    tag: int = 0,
    flags: Flags | None = None,
) -> Exchange:
    """Send ``outgoing[r]`` to every other rank ``r`` and receive ``incoming[r]`` from it."""
    assert group.pg is not None
    heads = None
    if caller is not None:
        head = caller.head()
        heads = _send_heads(caller, head, _DATA, group, purpose, flags)
        tag = _DATA_TAGS | hash((caller.epoch, *head)) & (_DATA_TAGS - 1)
    peers = [(group.rank + step) % group.size for step in range(1, group.size)]
    senders = peers[::-1]
    arriving = {r: incoming[r] for r in senders}
    tag = tag or tag_of(purpose, incoming[senders[0]].nbytes)
    works = post_pairs(arriving, {r: outgoing[r] for r in peers}, group, tag, purpose)
    return Exchange(works, purpose, [group.ranks[r] for r in senders + peers], heads)


# Tags of data behind heads, and of flags. Those of heads and of messages are smaller.
_DATA_TAGS = 1 << 30
_FLAG_TAGS = 1 << 29


def _flag_tag(head: list[int]) -> int:
    return _FLAG_TAGS | hash(tuple(_without_flags(head))) & (_FLAG_TAGS - 1)


def _send_heads(
    caller: Caller, head: Head, kind: int, group: Group, purpose: str, flags: Flags | None = None
) -> Heads:
    """Tell every other rank of the group what this one does, and start hearing what they do."""
    assert group.pg is not None
    is_partial = flags is not None and not flags.is_full
    mine = [*head, flags.nbytes if flags is not None and is_partial else 0, kind]
    sent = torch.tensor(mine)
    received = sent.new_empty(group.size - 1, HEAD)
    incoming = list(received.unbind())
    incoming.insert(group.rank, sent)
    tag = 1 + caller.epoch
    exchange = _swap([sent] * group.size, incoming, group, purpose, tag=tag)
    heads = Heads(
        caller, group, sent, received, exchange.works, exchange.peers, purpose, caller.epoch, flags
    )
    if flags is not None and is_partial:
        data, peers = flags.to_bytes(), (r for r in range(group.size) if r != group.rank)
        heads.flag_works = [group.pg.send([data], r, _flag_tag(mine)) for r in peers]
    return heads


def _on_stream(work: Any, buffer: torch.Tensor, purpose: str) -> Exchange:
    """On an accelerator the work is ordered on the current stream; elsewhere, wait later."""
    if work is None:
        return Exchange()
    if buffer.device.type != "cpu":
        work.wait()
        return Exchange()
    return Exchange([work], purpose)
