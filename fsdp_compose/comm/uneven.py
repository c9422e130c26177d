"""Tensors of other sizes on each rank: gathered, or moved between pairs of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_compose.base.group import Call, Group
from fsdp_compose.base.parts import cut_by_rank
from fsdp_compose.base.process import here
from fsdp_compose.comm.collectives import gather_parts
from fsdp_compose.comm.heads import meet_alone, tag_outside
from fsdp_compose.comm.messages import wait_for
from fsdp_compose.comm.transports import transport_of


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
    here.traffic.moves += 1
    here.traffic.move_bytes += sum(p.numel() for r, p in enumerate(incoming) if r != group.rank)
    call = Call(group, tag_outside(purpose, 0, group), purpose)
    started = transport_of(group).exchange(outgoing, incoming, call)
    wait_for(started.works, started.peers, purpose)


def all_gather_uneven(
    local: torch.Tensor, lengths: Sequence[int], group: Group, purpose: str = "gather a tensor"
) -> torch.Tensor:
    """Concatenate one-dimensional pieces of known ``lengths`` in rank order, on every rank.

    Raises:
        RuntimeError: on every rank, where one does something else; on gloo.
    """
    if group.pg is None:
        return local.clone()
    meet_alone(group, purpose)
    width = max(lengths)
    whole = local.new_empty(width * group.size).view(torch.uint8)
    parts = cut_by_rank(whole, group.size) if width else [whole] * group.size
    parts[group.rank].view(local.dtype)[: local.numel()].copy_(local)
    gather_parts(whole, parts, parts[group.rank], group, purpose).wait()
    size = local.element_size()  # bytes, as autocast would look at the dtypes of numbers
    return torch.cat([p[: n * size] for p, n in zip(parts, lengths, strict=True)]).view(local.dtype)
