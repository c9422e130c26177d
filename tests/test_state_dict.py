"""Model state: what goes out equals the plain module's, and everything that fits comes in."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import rank_errors, run_ranks
from torch import nn

import fsdp_compose as fc
from fsdp_compose import comm
from fsdp_compose.checkpoint import load_state_dict, state_dict


class Net(nn.Module):
    """Tied, frozen, strided, scalar, buffers of both kinds, an integer parameter."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5) for _ in range(2)])
        self.norm = nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.randn(()))
        self.turned = nn.Parameter(torch.randn(5, 3).t())
        self.codes = nn.Parameter(torch.arange(5), requires_grad=False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("kept", torch.randn(2))
        self.register_buffer("dropped", torch.randn(2), persistent=False)
        self.blocks[0].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.emb(x)
        for block in self.blocks:
            h = h + block(h).tanh()
        return self.head(self.norm(h) * self.scale + (self.turned.sum(0)))


def shard(model: nn.Module, units: str = "blocks", **kwargs: Any) -> nn.Module:
    if units == "blocks":
        for block in model.blocks:
            fc.fully_shard(block, **kwargs)
    elif units == "head":
        fc.fully_shard(model.head, **kwargs)
    return fc.fully_shard(model, **kwargs)


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert list(a) == list(b)
    for key in a:
        assert torch.equal(a[key], b[key]), key
        assert a[key].dtype == b[key].dtype, key


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("units", ["blocks", "root", "head"])
def test_full_is_the_plain_modules(world: int, units: str) -> None:
    def run(rank: int) -> None:
        plain = Net()
        model = shard(Net(), units)
        for kwargs in ({}, {"cpu_offload": True}):
            full = state_dict(model, "full", **kwargs)
            same(full, plain.state_dict())
            assert all(type(v) is torch.Tensor for v in full.values())
            assert full["turned"].stride() == plain.turned.stride()
            assert full._metadata == plain.state_dict()._metadata
            assert full["head.weight"].data_ptr() == full["emb.weight"].data_ptr()
        Net(3).load_state_dict(full, strict=True)

    run_ranks(run, world)


def test_full_rank0_only() -> None:
    def run(rank: int) -> None:
        full = state_dict(shard(Net()), "full", rank0_only=True, cpu_offload=True)
        if rank == 0:
            same(full, Net().state_dict())
        else:
            assert full == {}

    run_ranks(run, 2)


def test_load_plain() -> None:
    def run(rank: int) -> None:
        model = shard(Net(1))
        ids = [id(p) for p in model.parameters()]
        other = Net(2)
        keys = load_state_dict(model, other.state_dict())
        assert keys == ([], [])
        same(state_dict(model), other.state_dict())
        assert ids == [id(p) for p in model.parameters()]

    run_ranks(run, 3)
