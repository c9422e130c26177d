"""Ranks that skip units with units inside them join in the order in which the others run them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import Prefetch, ShardingStrategy, fully_shard, participate

from harness import simulate_ranks
from models import WIDTH, assert_at_rest, data, seeded, sgd, whole


class Residual(nn.Module):
    """Computes with what the unit inside it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Tail(Residual):
    """Returns what the unit inside it returned."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.norm(x))


class Scaled(nn.Module):
    """Two units inside, and weights that are read before and after both."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x * self.scale)) * self.scale


def build(kind: Any) -> nn.Module:
    return seeded(lambda: nn.Sequential(kind(), kind(), nn.Linear(WIDTH, 3))).double()


def shard(model: nn.Module, **options: Any) -> nn.Module:
    for layer in model[:2]:
        for part in layer.children():
            if isinstance(part, nn.Linear):
                fully_shard(part, **options)
        fully_shard(layer, **options)
    fully_shard(model[2], **options)
    return fully_shard(model, **options)


def step(model: nn.Module, ranks: range, seed: int, skips: str | None) -> None:
    """Backward of the mean loss; rank 1 skips the model, or its second layer."""
    sharded = len(ranks) == 1
    for rank in ranks:
        x = data(seed, rank)
        if skips == "all" and rank == 1:
            if sharded:
                participate(model).backward()
            continue
        for index, layer in enumerate(model):
            if skips == "layer" and rank == 1 and index == 1:
                x = participate(layer, x) if sharded else x
            else:
                x = layer(x)
        (x.square().mean() / (1 if sharded else 2)).backward()


OPTIONS: dict[str, dict[str, Any]] = {
    "ahead": {},
    "no prefetch": {"prefetch": Prefetch(0, 0, None)},
    "kept": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("skips", ["all", "layer"])
@pytest.mark.parametrize("kind", [Residual, Tail, Scaled])
def test_units_in_units_are_joined_in_order(kind: Any, skips: str, options: str) -> None:
    """In a later step, and every step after it is what one process does."""

    def ranks(rank: int) -> None:
        plain, model = build(kind), shard(build(kind), **OPTIONS[options])
        ours, theirs = sgd(model.parameters()), sgd(plain.parameters())
        for seed in range(4):
            now = skips if seed in (1, 2) else None
            for optim in (ours, theirs):
                optim.zero_grad()
            if skips == "all" and (now is None or rank == 0):
                model(data(seed, rank)).square().mean().backward()
            else:
                step(model, range(rank, rank + 1), seed, now)
            step(plain, range(2), seed, now)
            for optim in (ours, theirs):
                optim.step()
            assert_at_rest(model)
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(whole(p), q.detach())

    simulate_ranks(ranks, 2)


@pytest.mark.parametrize("kind", [Residual, Scaled])
def test_a_sequential_is_joined_in_the_first_step(kind: Any) -> None:
    """What it returns is what its last layer, a unit, returned: no backward has to tell."""

    def ranks(rank: int) -> None:
        model = shard(build(kind))
        for seed in range(3):
            if rank == 1 and seed == 0:
                participate(model).backward()
            else:
                model(data(seed, rank)).square().mean().backward()
            assert_at_rest(model)

    simulate_ranks(ranks, 2)
