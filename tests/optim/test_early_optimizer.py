"""Optimizers that were built before fully_shard step the sharded parameters they then hold."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp_compose as fc
from fsdp_compose.optim.state_cut import check_state

from harness import simulate_ranks
from models import whole
from tp_models import mesh_of

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
        assert check_state(optims[1])  # where a scalar has a number of steps
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            sums = optims[1].state[mine]["sum"].to_local()
            assert sums.untyped_storage().nbytes() == sums.nbytes  # nothing of the whole stays
            torch.testing.assert_close(whole(mine), theirs.detach())
            torch.testing.assert_close(
                whole(optims[1].state[mine]["sum"]), optims[0].state[theirs]["sum"]
            )

    for ranks in (1, 2, 3):
        simulate_ranks(body, ranks)


@pytest.mark.parametrize("by_hand", [False, True])
def test_adagrad_over_parts_built_before(by_hand: bool) -> None:
    """Sums of what tensor parallelism split are cut where the parts are."""

    def body(rank: int) -> None:
        mesh = mesh_of(dp=2, tp=2)
        torch.manual_seed(0)
        plain = nn.Linear(3, 4, bias=False)
        model = copy.deepcopy(plain)
        if by_hand:
            part = plain.weight.detach().chunk(2)[mesh["tp"].get_local_rank()]
            model.weight = nn.Parameter(part.clone())
            fc.declare_tensor_parallel(model.parameters(), mesh["tp"], 0)
        else:
            parallelize_module(model, mesh["tp"], ColwiseParallel())
        optims = [
            torch.optim.Adagrad(m.parameters(), 0.1, initial_accumulator_value=0.5)
            for m in (plain, model)
        ]
        fc.fully_shard(model, mesh=mesh["dp"])
        for seed in range(2):
            x = torch.arange(6.0).reshape(2, 3) + seed
            grad = torch.autograd.grad(plain(x).square().sum(), plain.weight)[0]
            plain.weight.grad = grad
            mine = grad.chunk(2)[mesh["tp"].get_local_rank()] if by_hand else grad
            model.weight.grad = mine
            for optim in optims:
                optim.step()
        assert torch.equal(fc.state_dict(model)["weight"], plain.weight)
        saved = fc.optim_state_dict(model, optims[1])["state"]["weight"]
        assert torch.equal(saved["sum"], optims[0].state[plain.weight]["sum"])

    simulate_ranks(body, 4)


def test_adagrad_built_early_resumes() -> None:
    """What is loaded before its first step takes the place of sums that are whole yet."""

    def body(rank: int) -> None:
        def train(m: nn.Module, optim: torch.optim.Optimizer) -> None:
            m(torch.full((2, 3), 2.0)).square().mean().backward()
            optim.step()
            optim.zero_grad()

        plain, model = stack(), stack()
        theirs, mine = (torch.optim.Adagrad(m.parameters(), 0.1) for m in (plain, model))
        train(plain, theirs)
        fc.fully_shard(model)
        fc.load_state_dict(model, plain.state_dict())
        fc.load_optim_state_dict(model, mine, theirs.state_dict())
        train(plain, theirs)
        train(model, mine)
        for leaf, parameter in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(leaf), parameter.detach())

    for ranks in (1, 2):
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


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))


def shard_again(model: nn.Module) -> None:
    fc.undo(model)
    fc.fully_shard(model, units=fc.wrap.by_class({nn.Linear}))


CHANGES: dict[str, tuple[Any, Any]] = {  # before and after the first steps
    "whole, and the parameter is cut": (lambda m: m, fc.fully_shard),
    "cut over ranks, and the parameter is whole": (fc.fully_shard, fc.undo),
    "cut differently than the parameter": (fc.fully_shard, shard_again),
}
KINDS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, 0.1),
    "foreach": lambda params: torch.optim.Adam(params, 0.1, foreach=True),
    "momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", CHANGES)
def test_a_refused_step_leaves_the_state_as_it_was(how: str, kind: str) -> None:
    """What the error says to do then trains as one process does."""

    def body(rank: int) -> None:
        def train(m: nn.Module, optim: torch.optim.Optimizer, *steps: int) -> None:
            for step in steps:
                optim.zero_grad()
                m(torch.full((2, 3), 1.0 + step)).square().mean().backward()
                optim.step()

        before, after = CHANGES[how]
        plain, model = stack(), before(stack())
        theirs, mine = KINDS[kind](plain.parameters()), KINDS[kind](model.parameters())
        train(plain, theirs, 0, 1, 2)
        train(model, mine, 0, 1)
        after(model)
        for _ in range(2):
            with pytest.raises(fc.ShardedWeightError, match=rf"state '\w+' .*{how}"):
                train(model, mine, 2)
        saved = fc.optim_state_dict(model, mine, kind="full")
        new = KINDS[kind](model.parameters())
        fc.load_optim_state_dict(model, new, saved)
        train(model, new, 2)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(p), q.detach())

    simulate_ranks(body, 2)


def test_state_that_no_step_uses_may_be_cut_otherwise() -> None:
    """After ``undo`` of a part that gets no gradient from then on, until it does."""

    def body(rank: int) -> None:
        model = stack()
        for layer in model:
            fc.fully_shard(layer)
        optim = torch.optim.Adam(model.parameters(), 0.1)
        model(torch.ones(2, 3)).sum().backward()
        optim.step()
        fc.undo(model)
        optim.zero_grad()
        model[1](torch.ones(2, 4)).sum().backward()
        with pytest.raises(fc.ShardedWeightError, match=r"the state '\w+' of parameter 'weight'"):
            optim.step()
        fresh = torch.optim.Adam(model.parameters(), 0.1)
        fresh.state[model[0].weight] = optim.state[model[0].weight]
        for _ in range(2):
            fresh.step()
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(fc.ShardedWeightError, match=r"the state '\w+' of parameter 'weight'"):
            fresh.step()

    simulate_ranks(body, 2)


def test_state_is_looked_at_after_every_undo() -> None:
    """Also that of an optimizer whose plain steps were found right before."""

    def body(rank: int) -> None:
        model = stack()
        other = fc.fully_shard(stack())  # from the first unit on, steps are looked at
        optim = torch.optim.Adam(model.parameters(), 0.1)
        for change in (lambda m: m, fc.fully_shard, fc.undo):
            change(model)
            model(torch.ones(2, 3)).sum().backward()
            if change is not fc.undo:
                optim.state.clear()
                optim.step()
        with pytest.raises(fc.ShardedWeightError, match="and the parameter is whole"):
            optim.step()
        del other

    simulate_ranks(body, 2)
