"""Second-order losses, full values, and how to compare any function of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    checkpoint,
)

from fsdp_compose import (
    ShardingStrategy,
)

from models import (
    Tower,
    Twin,
    compare,
    data,
    whole,
)

STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]


Forward = Callable[[nn.Module, Tensor], Any]


def agree(twin: Twin, fn: Forward, seed: int = 3) -> None:
    """``fn`` gives the same on the sharded model as on this rank's plain one."""
    x = data(seed, twin.rank)
    ours, theirs = (tree_leaves(fn(model, x)) for model in (twin.model, twin.mine))
    for found, wanted in zip(ours, theirs, strict=True):
        compare("result", found.detach(), wanted.detach(), twin.tolerance)


def leaves(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def fulls(model: nn.Module, scale: float = 1.0) -> dict[str, Tensor]:
    return {name: whole(p) * scale for name, p in model.named_parameters()}


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """WGAN-GP: the loss, and the distance from one of the norm of the input's gradient."""
    x = x.clone().requires_grad_()
    out = model(x).float() if x.dtype == torch.float32 else model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + (slope.norm(dim=1) - 1).square().mean()


class Recomputed(Tower):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)
