"""Plain parameters over shards: the ways to make them, and optimizers for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compose.optim.plain_parameters import (
    flat_parameters,
    local_parameters,
)

from models import (
    Tower,
    Twin,
    by_block,
)

Plain = Callable[[nn.Module], list[nn.Parameter]]


def flat(model: nn.Module) -> list[nn.Parameter]:
    return flat_parameters(model)


def local(model: nn.Module) -> list[nn.Parameter]:
    return local_parameters(model)


WAYS: dict[str, Plain] = {"flat": flat, "local": local}


ways = pytest.mark.parametrize("way", WAYS)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "loop": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
}


def twin(
    rank: int,
    world: int,
    way: str,
    make: str = "foreach",
    build: Callable[[], nn.Module] = Tower,
    shard: Callable[[nn.Module], Any] = by_block,
) -> Twin:
    """A twin whose sharded side has its optimizer over plain parameters."""
    made = Twin(rank, world, build, shard, OPTIMIZERS[make])
    made.optim = OPTIMIZERS[make](WAYS[way](made.model))
    return made
