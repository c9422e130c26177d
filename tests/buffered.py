"""A model with buffers of every kind, on the meta device too, and how to compare it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from models import (
    WIDTH,
    Tower,
    whole,
)


class Buffered(Tower):
    """With parameters and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__(2)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("table", torch.randn(4, 3).t())  # dense, not contiguous
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("scratch", torch.randn(7), persistent=False)
        self.register_buffer("none", None)
        self.shared = self.table
        self.codes = nn.Parameter(torch.randint(0, 9, (5,), dtype=torch.uint8), False)
        self.wave = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.channels = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.head.weight = nn.Parameter(torch.randn(2, WIDTH))
        self.tied = nn.Linear(WIDTH, 2, bias=False)
        self.tied.weight = self.head.weight


def full(model: nn.Module) -> dict[str, Tensor]:
    params = {n: whole(p) for n, p in model.named_parameters(remove_duplicate=False)}
    return params | {n: b.detach().clone() for n, b in model.named_buffers(remove_duplicate=False)}


def equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)


def unlike(rank: int, build: Callable[[], nn.Module] = Buffered) -> nn.Module:
    """A model that differs between ranks."""
    torch.manual_seed(rank)
    return build()


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()
