"""State of an optimizer over slices, saved as torch saves it, is of one rank: no other takes it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_compose as fc
from fsdp_compose import ShardingStrategy

from harness import simulate_ranks
from models import data, mean_loss, whole

Make = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return fc.owner_step(model.parameters(), lambda groups: torch.optim.Muon(groups, lr=0.1))


OVER_SLICES: dict[str, Make] = {
    "flat": lambda model: adamw(fc.flat_parameters(model)),
    "local": lambda model: adamw(fc.local_parameters(model)),
    "groups": lambda model: adamw([{"params": [p]} for p in fc.local_parameters(model)]),
}


def build(strategy: str = "FULL_SHARD") -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6, bias=False) for _ in range(2)]
    model = nn.Sequential(*layers).double()
    units = fc.wrap.by_class(nn.Linear)
    return fc.fully_shard(model, units=units, strategy=ShardingStrategy[strategy])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    mean_loss(model(data(seed, dist.get_rank(), 3, 6))).backward()
    optimizer.step()
    optimizer.zero_grad()


def saved_by(rank: int, state: object) -> Any:
    """What one rank saved, on every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, state)
    return copy.deepcopy(found[rank])


@pytest.mark.parametrize("was_stepped", [False, True])
@pytest.mark.parametrize("name", OVER_SLICES)
def test_state_of_another_rank_is_refused(name: str, was_stepped: bool) -> None:
    """By what is loaded into an optimizer that was stepped, and by the first step of a new one."""

    def ranks(rank: int) -> None:
        model = build()
        optimizer = OVER_SLICES[name](model)
        train(model, optimizer, 0)
        state = saved_by(0, optimizer.state_dict())
        if not was_stepped:
            optimizer = OVER_SLICES[name](model)
        if rank == 0:
            optimizer.load_state_dict(state)
            return
        act = partial(optimizer.load_state_dict, state)
        if not was_stepped:
            act()
            for param in optimizer.param_groups[0]["params"]:
                param.grad = torch.zeros_like(param)
            act = optimizer.step
        with pytest.raises(RuntimeError, match="is of other slices than this rank's"):
            act()

    simulate_ranks(ranks)


def test_state_that_an_owner_has_is_refused_elsewhere() -> None:
    def ranks(rank: int) -> None:
        model = build()
        optimizer = muon(model)
        train(model, optimizer, 0)
        own, other = optimizer.state_dict(), saved_by(1 - rank, optimizer.state_dict())
        assert other["state"]
        with pytest.raises(RuntimeError, match="of parameters that other ranks own"):
            optimizer.load_state_dict(other)
        optimizer.load_state_dict(own)
        train(model, optimizer, 1)

    simulate_ranks(ranks)


@pytest.mark.parametrize("name", OVER_SLICES)
def test_state_of_the_same_slices_is_taken(name: str) -> None:
    """Each rank's own, also in a model made anew; and any rank's where nothing is sharded."""

    def ranks(rank: int) -> None:
        for strategy in ("FULL_SHARD", "NO_SHARD"):
            model, make = build(strategy), OVER_SLICES[name]
            optimizer = make(model)
            train(model, optimizer, 0)
            state = saved_by(rank if strategy == "FULL_SHARD" else 0, optimizer.state_dict())
            weights = {key: whole(value).clone() for key, value in model.state_dict().items()}
            train(model, optimizer, 1)
            again = build(strategy)
            again.load_state_dict(weights)
            resumed = make(again)
            resumed.load_state_dict(state)
            train(again, resumed, 1)
            for key, value in model.state_dict().items():
                assert torch.equal(whole(value), whole(again.state_dict()[key]))

    simulate_ranks(ranks)


def test_nothing_of_it_is_left_in_what_is_kept() -> None:
    """Neither in the optimizer's groups nor in the state that this library saves."""

    def ranks(rank: int) -> None:
        model = build()
        optimizer = OVER_SLICES["flat"](model)
        train(model, optimizer, 0)
        before = set(optimizer.param_groups[0])
        state = optimizer.state_dict()
        assert set(state["param_groups"][0]) - before == {"fsdp_compose_slices"}
        assert set(optimizer.param_groups[0]) == before
        optimizer.load_state_dict(state)
        assert set(optimizer.param_groups[0]) == before
        saved = fc.optim_state_dict(model, optimizer)
        assert set(saved["param_groups"][0]) == before
        other = OVER_SLICES["flat"](model)
        other.load_state_dict(state)
        train(model, other, 1)
        assert set(other.param_groups[0]) == before

    simulate_ranks(ranks)
