"""Weights that a unit returns, or that are kept in a class of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fsdp_compose as fc
from fsdp_compose import Prefetch
from fsdp_compose.core.schedule import Hold

from harness import run_ranks
from models import assert_at_rest, data, seeded, square, units, whole


class Marked(Tensor):
    """A class of the user's."""


class Shows(nn.Module):
    """Returns its weight beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight, self.weight


class Tied(nn.Module):
    """Its head is the weight that its first part returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Shows(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h, weight = self.first(x)
        return torch.tanh(self.last(h)) @ weight.t()


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_second_backward_over_a_returned_weight(ahead: int) -> None:
    """It reads the weight again, which stays gathered for it; then, or without it, it is freed."""

    def ranks(rank: int) -> None:
        plain = seeded(Tied)
        model, prefetch = copy.deepcopy(plain), Prefetch(forward=ahead, backward=ahead)
        fc.fully_shard(model.first, prefetch=prefetch)
        fc.fully_shard(model, prefetch=prefetch)
        (unit,) = units(model.first)
        for times in (2, 1, 3):
            model.zero_grad(), plain.zero_grad()
            losses = [square(plain, data(times, r, 3, 6)) for r in range(2)]
            loss, wanted = square(model, data(times, rank, 3, 6)), sum(losses) / 2
            for left in reversed(range(times)):
                loss.backward(retain_graph=left > 0)
                wanted.backward(retain_graph=left > 0)
                assert (Hold.RETAINED in unit.holds) == (left > 0)
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert_close(whole(p.grad), q.grad, rtol=1e-12, atol=1e-12)
            assert_at_rest(model)
        square(model, data(0, rank, 3, 6)).backward(retain_graph=True)
        square(model, data(0, rank, 3, 6)).backward()
        assert_at_rest(model)

    run_ranks(ranks, 2)


KINDS: dict[str, Any] = {
    "Parameter": lambda weight: nn.Parameter(weight.detach()),
    "a class of the user's": lambda weight: weight.detach()[1:].as_subclass(Marked),
}


class Keeps(nn.Linear):
    kept: list[Any] = []
    kind = ""

    def forward(self, x: Tensor) -> Tensor:
        Keeps.kept.append(KINDS[Keeps.kind](self.weight))
        return super().forward(x)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_view_of_another_class_raises(kind: str) -> None:
    """As a plain one does, whatever class it was given in the forward."""

    def ranks(rank: int) -> None:
        Keeps.kind = kind
        model = nn.Sequential(Keeps(6, 6), nn.Linear(6, 6))
        fc.fully_shard(model, units=fc.wrap.by_class({nn.Linear, Keeps}))
        for grad in (True, False, True):
            with torch.set_grad_enabled(grad):
                loss = model(torch.ones(1, 6)).sum()
            with pytest.raises(RuntimeError, match=r"of parameter '0\.weight' of unit '0'"):
                Keeps.kept.pop() + 1
            if grad:
                loss.backward()

    run_ranks(ranks, 2)
