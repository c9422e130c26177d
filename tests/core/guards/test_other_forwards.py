"""Forwards under a transform or a functional call: their dtypes, nesting, and what they leave."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fsdp_compose import MixedPrecision, count_traffic

from harness import run_ranks, simulate_ranks, single_process
from models import (
    WIDTH,
    Block,
    Tower,
    Twin,
    assert_at_rest,
    by_block,
    data,
    one_unit,
    seeded,
    square,
    whole,
)

HALF = MixedPrecision(torch.bfloat16, cast_forward_inputs=True)


class Rows(nn.Module):
    """Calls itself on each row under a transform, in double precision, and then its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        h = torch.tanh(self.first(x))
        if again:
            h = vmap(lambda row: self(row.double(), False))(h)
            for block in self.blocks:
                h = block(h)
        return h


def test_dtypes_of_transformed_and_functional_calls() -> None:
    """Inputs are cast to the compute dtype, and outputs to the dtype that was chosen for them."""

    def ranks(rank: int) -> None:
        x = data(0, rank)
        own = by_block(seeded(Rows), mp_policy=HALF)
        assert own(x).dtype is torch.bfloat16
        norms = MixedPrecision(
            torch.bfloat16, output_dtype=torch.float32, full_precision_classes=(nn.LayerNorm,)
        )
        for policy in (replace(HALF, output_dtype=torch.float32), norms):
            model = one_unit(seeded(Tower), mp_policy=policy)
            full = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
            wanted = model(x.to(torch.bfloat16))
            assert wanted.dtype is torch.float32
            for found in (vmap(model)(x.bfloat16()), functional_call(model, full, (x.bfloat16(),))):
                assert found.dtype is torch.float32
                torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)

    simulate_ranks(ranks)


def test_units_after_a_call_of_itself_stay_nested() -> None:
    """What follows a transform in a forward is of the same pass: gathered ahead, reduced once."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Rows)
        twin.train(steps=2)
        with count_traffic() as traffic:
            twin.backward(square, 5)
        assert (traffic.gathers, traffic.reduces) == (5, 3)
        assert_at_rest(twin.model)

    run_ranks(ranks)


@pytest.mark.parametrize("change", ["dtype", "data"])
def test_changed_parameters_in_the_first_transform(change: str) -> None:
    """What was changed since the last forward is taken over, as it is outside of a transform."""
    with single_process():
        plain = seeded(Tower)
        model = by_block(copy.deepcopy(plain))
        for changed in (plain, model):
            if change == "dtype":
                changed.float()
            else:
                changed.first.weight.data = changed.first.weight.data * 2
        x = data(0, 0).to(plain.first.weight.dtype)
        found, wanted = (grad(lambda z, m=m: square(m, z))(x) for m in (model, plain))
        torch.testing.assert_close(found, wanted)
        square(model, x).backward()
        square(plain, x).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(p.grad), q.grad)
        assert_at_rest(model)


class Probed(Tower):
    """Calls itself under a transform when backward is in the middle of it."""

    probe: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.probe is not None and x.requires_grad:
            x.register_hook(self.look)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def look(self, _: Tensor) -> None:
        with torch.no_grad():
            self.found = vmap(self)(self.probe)


def test_a_transform_inside_the_units_own_backward() -> None:
    """It computes as outside of it, and the backward goes on."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Probed)
        twin.model.probe = data(7, 0)
        twin.train(steps=1)
        with torch.no_grad():
            twin.model.probe = data(8, 0)
            wanted = twin.model(data(8, 0))
        twin.backward(square, 1)
        torch.testing.assert_close(twin.model.found, wanted)
        assert_at_rest(twin.model)

    run_ranks(ranks)


class Exact(NamedTuple("Exact", [("value", Tensor)])):
    """Refuses to hold numbers in half precision."""

    def __new__(cls, value: Tensor) -> Exact:
        if value.dtype is torch.bfloat16:
            raise ValueError("not exact")
        return super().__new__(cls, value)


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
        with pytest.raises(ValueError, match="not exact"):
            vmap(broken)(x)
        assert other(x).dtype is torch.bfloat16
        square(other, x).backward()
        assert_at_rest(other)

    simulate_ranks(ranks)
