"""How forwards begin, join and end in cases that few models bring about."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fsdp_compose import MixedPrecision, fully_shard, gathered, wrap
from fsdp_compose.base.process import here
from fsdp_compose.sharded import own_slice

from autograd_steps import leaves
from harness import simulate_ranks, single_process
from models import (
    WIDTH,
    Tower,
    by_block,
    data,
    one_unit,
    seeded,
    square,
    units,
)


def test_a_graph_over_a_scope_holds_no_unit() -> None:
    """Its tensors are the scope's own, so nothing is gathered for the graph, or kept."""

    def ranks(rank: int) -> None:
        model = one_unit(seeded(lambda: Tower(1)))
        (unit,) = units(model)
        with gathered(model):
            penalty = sum(param.square().sum() for param in model.parameters())
        here.traffic.reset()
        found = torch.autograd.grad(penalty, leaves(model), create_graph=True)
        assert here.traffic.gathers == 0 and not unit.holds
        assert all(grad.requires_grad for grad in found)

    simulate_ranks(ranks)


def test_asking_for_gradients_releases_units() -> None:
    """As in an ordinary backward: each one when its own gradients are there."""

    def ranks(rank: int) -> None:
        model, seen = by_block(seeded(Tower)), list[bool]()
        x = data(0, rank).requires_grad_()
        x.register_hook(lambda grad: seen.extend(not unit.holds for unit in units(model)[1:]))
        torch.autograd.grad(square(model, x), [*leaves(model), x])
        assert seen == [True] * 3

    simulate_ranks(ranks)


class Catching(Tower):
    """Goes on without a block that was interrupted."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.blocks[0](x)
        except KeyboardInterrupt:
            return self.head(x)
        return self.head(self.first(x))


def test_a_forward_that_catches_an_interrupt() -> None:
    """The interrupt runs no hook of the block's; the forward around it ends all the same."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def ranks(rank: int) -> None:
        model = by_block(seeded(lambda: Catching(1)))
        handle = model.blocks[0].up.register_forward_pre_hook(interrupt)
        model(data(0, rank))
        handle.remove()
        assert not units(model)[0].engine.schedule.active

    simulate_ranks(ranks)


def test_a_head_on_chunks_behind_units_in_units() -> None:
    """Its calls join although the forward before them ran several units."""

    def ranks(rank: int) -> None:
        model = seeded(lambda: nn.Sequential(Tower(1), nn.Linear(2, 2)))
        names = {"0", "0.blocks.0", "1"}
        fully_shard(model, units=wrap.by_fn(lambda name, _: name in names))
        here.traffic.reset()
        parts = model[0](data(0, rank)).chunk(3)
        sum(model[1](part).square().sum() for part in parts).backward()
        assert here.traffic.reduces == len(names)

    simulate_ranks(ranks)


def test_a_copy_begins_with_a_functional_call() -> None:
    """A copy looks through its modules at its first forward of its own."""
    with single_process():
        plain = seeded(lambda: Tower(1))
        given = {"head.bias": torch.ones(2, dtype=torch.float64)}
        wanted = functional_call(plain, given, (data(0, 0),))
        model = copy.deepcopy(one_unit(plain))
        assert torch.equal(functional_call(model, given, (data(0, 0),)), wanted)


class Opaque(nn.Linear):
    """Gives its output in an object that nothing looks into."""

    def forward(self, x: Tensor) -> Any:
        return iter([super().forward(x)])


@pytest.mark.filterwarnings("ignore:unit 'Opaque' returned")
def test_a_backward_through_what_outlives_its_model() -> None:
    """Also where no hook on an output tells when the backward begins."""
    with single_process():
        model = fully_shard(Opaque(WIDTH, 2))
        (output,) = model(torch.ones(1, WIDTH))
        del model
        gc.collect()
        with pytest.raises(RuntimeError, match="deleted after its forward"):
            output.sum().backward()


def test_second_gradients_in_a_scope_are_exact() -> None:
    """They stay in the dtype of the scope's tensors, whatever forward computes in."""

    def ranks(rank: int) -> None:
        policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float64)
        model = one_unit(seeded(lambda: nn.Linear(WIDTH, 2)), mp_policy=policy)
        full = model.weight.full_tensor()
        with gathered(model):
            loss = model.weight.pow(3).sum()
        (first,) = torch.autograd.grad(loss, model.weight, create_graph=True)
        (second,) = torch.autograd.grad((first.to_local() / 3).pow(2).sum(), model.weight)
        wanted = own_slice(4 * full.pow(3), model.weight._shard_spec)
        torch.testing.assert_close(second.to_local(), wanted)

    simulate_ranks(ranks)
