"""A plan counts what a step with a weight tied between units communicates, no more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import count_traffic, fully_shard, plan

from harness import run_ranks


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tied, self.own = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.tied(x))


class Outer(nn.Module):
    """Its head is the inner unit's weight, which the inner unit owns as it is sharded first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.inner.tied.weight
        self.last = nn.Linear(4, 4, bias=False)

    first = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.head(x)) if self.first else self.head(self.inner(x))
        return self.last(x)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("released", [True, False])
def test_a_tie_that_the_inner_unit_owns(released: bool, first: bool) -> None:
    """One reduction for each of two buckets, as counted in a step after the first."""

    def ranks(rank: int) -> None:
        torch.manual_seed(0)
        model = Outer()
        model.first = first
        for module in (model.inner, model):
            fully_shard(module, reshard_after_forward=released)
        for _ in range(2):
            with count_traffic() as traffic:
                model(torch.ones(2, 4)).sum().backward()
        assert traffic.reduces == 2
        assert plan(model).step.reduces == traffic.reduces

    run_ranks(ranks, 2)
