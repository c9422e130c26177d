"""Models and losses for tests of scopes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose.scopes.gathered import gathered

from models import WIDTH, Block


class Oddities(nn.Module):
    """Scalars, empties, integers, complex numbers, strides, frozen and tied parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.strided = nn.Parameter(torch.randn(5, 3).t())
        self.codes = nn.Parameter(torch.arange(7), requires_grad=False)
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.low = nn.Parameter(torch.randn(5).bfloat16())
        self.block = Block()
        self.lstm = nn.LSTM(WIDTH, 3)
        self.twin = nn.Linear(WIDTH, 7)
        self.twin.weight = self.block.up.weight


def seeded_oddities() -> nn.Module:
    torch.manual_seed(0)
    return Oddities()


@contextmanager
def open_until_reshard(model: Any) -> Iterator[None]:
    """As ``gathered``, for a scope of two calls."""
    fc.unshard(model)
    yield
    fc.reshard(model)


def both(model: nn.Module, x: Tensor) -> Tensor:
    """The head by its forward and by its weight, before and after."""
    with gathered(model):
        early = model.head.weight.square().mean()
    out = model(x)
    with gathered(model.head):
        late = (x @ model.first.weight @ model.head.weight.T).square().mean()
    return out.square().mean() + late + early
