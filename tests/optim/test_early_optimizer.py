"""Optimizers that were built before fully_shard step the sharded parameters they then hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsdp_compose as fc

from harness import simulate_ranks
from models import whole

WAYS: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]


class Scaled(nn.Module):
    """With a scalar and a transposed weight, whose storage has another order."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.weight = nn.Parameter(torch.arange(15.0).reshape(5, 3).T / 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * (x @ self.weight)


@pytest.mark.parametrize("way", WAYS)
def test_adagrad_built_before_fully_shard(way: Any) -> None:
    """The sums that it makes when it is built are cut as the parameters are."""

    def body(rank: int) -> None:
        plain, model = Scaled(), Scaled()
        optims = [
            torch.optim.Adagrad(m.parameters(), 0.1, initial_accumulator_value=0.5, **way)
            for m in (plain, model)
        ]
        fc.fully_shard(model)
        for step in range(3):
            for m, optim in zip((plain, model), optims, strict=True):
                m(torch.full((2, 3), 1.0 + step)).square().mean().backward()
                optim.step()
                optim.zero_grad()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(mine), theirs.detach())
            torch.testing.assert_close(
                whole(optims[1].state[mine]["sum"]), optims[0].state[theirs]["sum"]
            )

    for ranks in (1, 2, 3):
        simulate_ranks(body, ranks)


def test_state_that_was_stepped_is_not_cut() -> None:
    """It may differ between ranks, so it has to be loaded."""

    def body(rank: int) -> None:
        model = Scaled()
        optim = torch.optim.Adagrad(model.parameters(), 0.1)
        model(torch.full((2, 3), 1.0 + rank)).sum().backward()
        optim.step()
        optim.zero_grad()
        fc.fully_shard(model, init="broadcast")
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(RuntimeError, match="optimizer's state stays whole through fully_shard"):
            optim.step()

    simulate_ranks(body, 2)
