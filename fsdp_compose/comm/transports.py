"""The two transports that come with the library: pairs of ranks, and the group's own collectives.

On gloo tensors go between pairs of ranks: its own all-gather and reduce-scatter move the data two
to three times, and what each rank adds to a sum then travels in low precision and is summed in fp32
here, in rank order, so that results do not depend on timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdp_compose.base.group import Call, Group, Op, Started, Transport
from fsdp_compose.base.torch_private import (
    GATHER_OPTIONS,
    REDUCE_OPTIONS,
    all_gather_single,
    reduce_scatter_single,
)
from fsdp_compose.comm.messages import is_point_to_point, post_pairs

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


def _reduce_pairs(whole: torch.Tensor, parts: Sequence[torch.Tensor], call: Call) -> Started:
    group, own = call.group, parts[call.group.rank]
    received = [own if r == group.rank else torch.empty_like(own) for r in range(group.size)]
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


def _gather_at_once(
    whole: torch.Tensor, parts: Sequence[torch.Tensor], own: torch.Tensor, call: Call
) -> Started:
    return _begun(all_gather_single(call.group.pg, whole, own, GATHER_OPTIONS), whole)


def _reduce_at_once(whole: torch.Tensor, parts: Sequence[torch.Tensor], call: Call) -> Started:
    total = torch.empty_like(parts[call.group.rank])
    pg = call.group.reductions or call.group.pg
    work = reduce_scatter_single(pg, total, whole, REDUCE_OPTIONS)
    return _begun(work, whole, (total,))


def _all_reduce_at_once(tensor: torch.Tensor, op: Op, call: Call) -> None:
    dist.all_reduce(tensor, _OPS[op], group=call.group.pg)


def _exchange_at_once(
    outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], call: Call
) -> Started:
    # By lists: the pieces travel from and to where they lie, without a copy into one buffer.
    rank = call.group.rank
    sent, received = list(outgoing), list(incoming)
    sent[rank], received[rank] = sent[rank][:0], received[rank][:0]
    dist.all_to_all(received, sent, group=call.group.pg)
    return Started()


def _begun(work: Any, buffer: torch.Tensor, parts: Sequence[torch.Tensor] = ()) -> Started:
    """On an accelerator the work is ordered on the current stream; elsewhere it is waited for."""
    if work is None or buffer.device.type == "cpu":
        return Started(() if work is None else (work,), (), parts)
    work.wait()
    return Started((), (), parts)


PAIRS = Transport(
    gather=_gather_pairs,
    reduce_scatter=_reduce_pairs,
    all_reduce=_all_reduce_at_once,
    exchange=_exchange_pairs,
    may_wait=False,
)
"""Tensors go between pairs of ranks; the default on gloo."""

AT_ONCE = Transport(
    gather=_gather_at_once,
    reduce_scatter=_reduce_at_once,
    all_reduce=_all_reduce_at_once,
    exchange=_exchange_at_once,
    copies_own=True,
    may_wait=False,
)
"""The collectives of the group, one call for all ranks; the default on NCCL and other backends."""


def transport_of(group: Group) -> Transport:
    """The transport that was chosen for the group, or else its backend's default."""
    return group.transport or (PAIRS if is_point_to_point(group) else AT_ONCE)
