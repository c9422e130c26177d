"""Numbers of all ranks of a group, for reductions that autograd records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_compose.base.group import Group
from fsdp_compose.comm.collectives import all_reduce
from fsdp_compose.comm.uneven import all_gather_uneven

__all__ = ["GatherRanks", "average", "count_ties", "find_extreme"]


class GatherRanks(torch.autograd.Function):
    """(n,) on each rank -> (ranks, n) on all; backward averages over the ranks."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Group, purpose: str) -> Tensor:
        ctx.group, ctx.purpose = group, purpose
        lengths = [partial.numel()] * group.size
        ranks = all_gather_uneven(partial.contiguous(), lengths, group, purpose)
        return ranks.view(group.size, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _AverageOwn.apply(grad, ctx.group, ctx.purpose), None, None


class _AverageOwn(torch.autograd.Function):
    """(ranks, n) on all -> (n,), this rank's row of the average; what backward of a gather is.

    Its own backward, which ``create_graph`` asks for, is a gather again.
    """

    @staticmethod
    def forward(ctx: Any, ranks: Tensor, group: Group, purpose: str) -> Tensor:
        ctx.group, ctx.purpose = group, purpose
        return average(ranks, group)[group.rank]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return GatherRanks.apply(grad, ctx.group, ctx.purpose), None, None


class _Extreme(torch.autograd.Function):
    """(ranks, n) -> (n,), the largest or smallest; backward gives each rank its share."""

    @staticmethod
    def forward(ctx: Any, ranks: Tensor, shares: Tensor, op: str) -> Tensor:
        ctx.save_for_backward(shares)
        return ranks.amax(0) if op == "max" else ranks.amin(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.saved_tensors[0], None, None


def count_ties(local: Tensor, extreme: Tensor) -> Tensor:
    """How many elements of a slice are its largest or smallest one."""
    with torch.no_grad():
        return ((local == extreme) | (local.isnan() & extreme.isnan())).sum()


def find_extreme(
    values: Tensor, counts: Tensor, op: str, groups: Sequence[Group], purpose: str
) -> Tensor:
    """The largest or smallest over all ranks; elements that are equal share its gradient.

    Args:
        values: of this rank's slices, () or (n,).
        counts: how many elements of each slice have the value.
    """
    wide = torch.promote_types(values.dtype, torch.float32)  # it holds the counts too
    found, counts = values.reshape(-1).to(wide), counts.reshape(-1).to(wide)
    for group in groups:
        if group.size > 1:
            ranks, held = GatherRanks.apply(torch.cat([found, counts]), group, purpose).chunk(2, 1)
            with torch.no_grad():
                best = ranks.amax(0) if op == "max" else ranks.amin(0)
                held = torch.where((ranks == best) | (ranks.isnan() & best.isnan()), held, 0.0)
                counts = held.sum(0)
            found = _Extreme.apply(ranks, held / counts.clamp(min=1), op)
    return found.to(values.dtype).reshape(values.shape)


def average(values: Tensor, group: Group) -> Tensor:
    return all_reduce(values.clone(memory_format=torch.contiguous_format), group) / group.size
