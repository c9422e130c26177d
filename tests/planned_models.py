"""Models and dtypes that tests of plans share."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    MixedPrecision,
    wrap,
)

from models import (
    Block,
)

WIDTH = 128


BLOCKS = wrap.by_class({Block})


class Model(nn.Module):
    """Blocks between two layers; activations of one row are small beside the parameters."""

    def __init__(self, frozen: str = "", again: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, 2 * width) for _ in range(4))
        self.head = nn.Linear(width, width)
        self.again = again
        for name, param in self.named_parameters():
            param.requires_grad_(not any(name.startswith(start) for start in frozen.split()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(x)


class Tied(Model):
    """Blocks share a weight with each other, and the head one with the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.first.weight
        self.blocks[3].up.weight = self.blocks[1].up.weight


class TiedEnds(Model):
    """Most of its memory is one weight that two or three layers of the outermost unit read."""

    def __init__(self, times: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(WIDTH, 8)])
        self.middle = nn.Linear(WIDTH, WIDTH) if times == 3 else nn.Identity()
        for layer in (self.head, *([self.middle] if times == 3 else [])):
            layer.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.blocks[0](self.first(x))))


BF16 = MixedPrecision(param_dtype=torch.bfloat16)


BF16_FP32 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


NORMS_FP32 = lambda fqn, p: None if "norm" in fqn else BF16_FP32  # noqa: E731
