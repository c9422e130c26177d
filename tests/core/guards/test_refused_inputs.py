"""Inputs that refuse the cast to the compute dtype, and failed backwards inside a forward."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.testing import assert_close

import fsdp_compose as fc
from fsdp_compose import MixedPrecision
from fsdp_compose.core.schedule import Hold

from harness import simulate_ranks
from models import Tower, assert_at_rest, by_block, data, one_unit, seeded, square, units, whole

HALF = MixedPrecision(torch.bfloat16, cast_forward_inputs=True)


class Exact(NamedTuple("Exact", [("x", Tensor)])):
    """An input that is never of half precision."""

    def __new__(cls, x: Tensor) -> Exact:
        if getattr(x, "dtype", None) is torch.bfloat16:
            raise ValueError("not in half precision")
        return super().__new__(cls, x)


class Takes(nn.Linear):
    def forward(self, x: Any) -> Tensor:
        return super().forward((x.x if isinstance(x, Exact) else x).to(self.weight.dtype))


class Gives(nn.Module):
    """Hands its inner unit an input that refuses the cast, while ``bad``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.bad = Takes(6, 6), Takes(6, 6), False

    def forward(self, x: Any) -> Tensor:
        return self.last(self.first(Exact(x.float()) if self.bad else x))


def call(way: str, model: nn.Module, x: Any) -> Any:
    if way == "functional":
        full = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
        return functional_call(model, full, (x,))
    if way == "transformed":
        return vmap(model)(x)
    if way == "scope":
        with fc.gathered(model):
            return model(x)
    with torch.set_grad_enabled(way != "eval"):
        return model(x)


@pytest.mark.parametrize("outermost", [False, True])
@pytest.mark.parametrize("way", ["train", "eval", "functional", "transformed", "scope"])
def test_a_unit_whose_inputs_refuse_the_cast_is_left(way: str, outermost: bool) -> None:
    """It is released, the next forward is right, and ``undo`` works."""

    def ranks(rank: int) -> None:
        plain = seeded(Gives).bfloat16()
        model = copy.deepcopy(plain).float()
        fc.fully_shard(model.first, mp_policy=HALF)
        root = model.first if outermost else fc.fully_shard(model, mp_policy=HALF)
        x = data(0, rank, 3, 6).bfloat16()
        for _ in range(2):
            model.bad = True
            with pytest.raises(ValueError, match="not in half precision"):
                call(way, root, Exact(x.float()) if outermost else x)
            model.bad = False
            assert not any(Hold.FORWARD in unit.holds for unit in units(root))
            assert not any(unit.run.calls or unit.run.modes for unit in units(root))
            assert_close(call(way, model.first, x), plain.first(x), rtol=0.02, atol=0.02)
        square(root, x).backward()
        assert_at_rest(root)
        fc.undo(root)
        assert_close(model.first.weight, plain.first.weight.float())

    simulate_ranks(ranks)


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("fails")


class Tries(nn.Module):
    """Tries a backward through a unit, which fails, and calls the unit under a transform."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head, self.late = nn.Linear(6, 6), nn.Linear(6, 6), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.late:
            return self.head(self.attempt(x))
        h = self.head(self.block(x))
        h.register_hook(lambda grad: self.attempt(x).sum() * 0 + grad)
        return h * 1

    def attempt(self, x: Tensor) -> Tensor:
        z = x.detach().requires_grad_()
        with pytest.raises(ValueError, match="fails"), torch.enable_grad():
            torch.autograd.grad(self.block(Fail.apply(z)).sum(), z)
        return vmap(self.block)(x)


@pytest.mark.parametrize("late", [False, True])
def test_a_failed_backward_ends_no_other_pass(late: bool) -> None:
    """A transform behind it leaves the forward, or the backward, that runs around it alone."""

    def ranks(rank: int) -> None:
        plain = seeded(Tries)
        plain.late = late
        model = copy.deepcopy(plain)
        fc.fully_shard(model.block)
        fc.fully_shard(model)
        for step in range(2):
            for m in (model, plain):
                m.zero_grad()
            square(model, data(step, rank, 3, 6)).backward()
            sum(square(plain, data(step, r, 3, 6)) for r in range(2)).div(2).backward()
            assert_close(whole(model.head.weight.grad), plain.head.weight.grad)

    simulate_ranks(ranks)


class Handing(Tower):
    """Hands its first block what that block's input cast fails on."""

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](Exact(x.float()))


def test_an_input_that_refuses_the_cast() -> None:
    """Its error comes through, and the next model's forward is an outermost one all the same."""

    def ranks(rank: int) -> None:
        broken = by_block(seeded(Handing), mp_policy=HALF)
        other = one_unit(seeded(Tower), mp_policy=replace(HALF, cast_forward_inputs="root"))
        x = data(0, rank)
        with pytest.raises(ValueError, match="not in half precision"):
            vmap(broken)(x)
        assert other(x).dtype is torch.bfloat16
        square(other, x).backward()
        assert_at_rest(other)

    simulate_ranks(ranks)
