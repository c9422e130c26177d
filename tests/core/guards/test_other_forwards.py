"""Forwards under a transform or a functional call: their dtypes, nesting, and what they leave."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.testing import assert_close

import fsdp_compose as fc
from fsdp_compose import MixedPrecision, Prefetch, count_traffic
from fsdp_compose.core.schedule import Hold

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
    two_blocks,
    units,
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


class Inner(nn.Module):
    """Calls itself under a transform, on inputs of double precision; notes the dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.seen = nn.Parameter(torch.ones(WIDTH)), list[torch.dtype]()

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        self.seen.append(x.dtype)
        y = x * self.scale
        if again:
            inner = torch.vmap(lambda row: self(row, again=False))(x.double())
            self.seen.append(inner.dtype)
            y = y + inner
        return y


def test_a_call_under_a_transform_in_a_forward() -> None:
    """Its inputs are not the outermost ones, which alone are cast; its outputs are cast as all."""

    def ranks(rank: int) -> None:
        single, half, double = torch.float32, torch.float16, torch.float64
        policy = MixedPrecision(single, output_dtype=half, cast_forward_inputs="root")
        model = one_unit(seeded(Inner), mp_policy=policy)
        assert model(data(0, rank)).dtype is half
        assert model.seen == [single, double, half]
        square(model, data(0, rank)).backward()
        assert_at_rest(model)

    simulate_ranks(ranks)


class Named(nn.LayerNorm):
    """A norm with a second way to call it."""

    def apply_to(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (WIDTH,), self.weight, self.bias)


def test_a_method_of_a_norm_in_full_precision() -> None:
    """In evaluation it returns what it computed, in stored precision, as its forward does."""

    def ranks(rank: int) -> None:
        plain = seeded(lambda: nn.Sequential(Named(WIDTH), nn.Linear(WIDTH, WIDTH)))
        policy = MixedPrecision(
            torch.bfloat16, full_precision_classes=(Named,), full_precision_in_eval=True
        )
        model = one_unit(copy.deepcopy(plain), mp_policy=policy).eval()
        fc.register_forward_method(model[0], "apply_to")
        with torch.no_grad():
            assert_close(model[0].apply_to(data(0, rank)), plain[0](data(0, rank)))

    simulate_ranks(ranks)


def test_evaluations_on_given_tensors_gather_ahead() -> None:
    """The order of the units inside is known from the first such call that did not fail."""

    def ranks(rank: int) -> None:
        plain = seeded(two_blocks)
        model = by_block(copy.deepcopy(plain), prefetch=Prefetch(forward=1))
        names = [name for name, _ in plain.named_parameters() if not name.startswith("blocks")]
        given = {name: plain.get_parameter(name).detach() * 2 for name in names}
        first, second = units(model.blocks)
        ahead: list[bool] = []

        def note(*_: Any) -> None:
            ahead.append(Hold.PREFETCH in second.holds)

        model.blocks[0].up.register_forward_hook(note)
        with torch.no_grad():
            for _ in range(3):
                functional_call(model, given, (data(0, rank),))
        assert ahead == [False, True, True] and first.name == "blocks.0"
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_an_evaluation_between_two_forwards() -> None:
    """In stored precision it is no part of the step, whose second forward is gathered ahead."""

    def ranks(rank: int) -> None:
        policy = MixedPrecision(torch.float32, full_precision_in_eval=True)
        models = [by_block(seeded(two_blocks), prefetch=Prefetch(forward=1)) for _ in range(2)]
        teacher = one_unit(seeded(two_blocks), mp_policy=policy).eval()
        (second, *_), ahead = units(models[1]), list[bool]()
        for step in range(3):
            loss = square(models[0], data(step, rank))
            with torch.no_grad():
                teacher(data(step, rank))
            ahead.append(Hold.PREFETCH in second.holds)
            (loss + square(models[1], data(step, rank))).backward()
        assert ahead == [False, True, True]
        for model in (*models, teacher):
            assert_at_rest(model)

    simulate_ranks(ranks)


class Evaluated(nn.Module):
    """Evaluates itself inside its backward, if it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.found: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.training:
            y.register_hook(lambda grad: self.evaluate(x.double()))
        return self.last(y)

    @torch.no_grad()
    def evaluate(self, x: Tensor) -> None:
        self.eval()
        self.found.append(self(x))
        self.train()


def test_an_evaluation_inside_the_backward() -> None:
    """It reads the stored weights, not the low ones that the backward of the same unit shows."""

    def ranks(rank: int) -> None:
        plain, x = seeded(Evaluated), data(0, rank).bfloat16()
        policy = MixedPrecision(torch.bfloat16, full_precision_in_eval=True)
        model = one_unit(copy.deepcopy(plain), mp_policy=policy)
        square(model, x).backward()
        (found,) = model.found
        with torch.no_grad():
            assert torch.equal(found, plain.eval()(x.double()))
        assert_at_rest(model)

    simulate_ranks(ranks)
