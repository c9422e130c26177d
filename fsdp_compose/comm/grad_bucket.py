"""The gradients of a bucket, as a communication hook is given them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fsdp_compose.base.group import Group


@dataclass(frozen=True, eq=False, repr=False)
class GradBucket:
    """The gradients of a bucket, as a communication hook is given them.

    Attributes:
        unit: name of the unit.
        key: the same on every rank and in every step; for per-bucket state.
        flat: packed gradients, real, in the reduce dtype; every parameter in full.
        parts: ``flat`` by rank of ``shard``.
        shard: the group over which gradients are reduced and scattered.
        replicate: the group over which the scattered sum is reduced.
        scale: what the sum over both groups is to be multiplied with, ``1 / ranks`` by default.
        dtype: of the parameters' shards, in which the result is kept.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> def reduce(state, grads):
        ...     print(grads.unit, grads.flat.numel(), len(grads.parts))
        ...     return default_hook(state, grads)
        >>> register_comm_hook(model, None, reduce)
        >>> model(torch.ones(1, 2)).sum().backward()
        Linear 8 1
    """

    unit: str
    key: str
    flat: torch.Tensor
    parts: Sequence[torch.Tensor]
    shard: Group
    replicate: Group
    scale: float
    dtype: torch.dtype
