"""Ranks may list parameters, and the entries of what they load, in orders of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsdp_compose as fc

from harness import simulate_ranks
from models import Tower, by_block, data, seeded, square, whole


def turned(given: dict[str, Any]) -> dict[str, Any]:
    return dict(reversed(given.items()))


def by_layer(model: nn.Module, strategy: fc.ShardingStrategy) -> nn.Module:
    """Units other than the saved ones, so that every slice has to be gathered."""
    return fc.fully_shard(model, units=fc.wrap.by_class({nn.Linear}), strategy=strategy)


@pytest.mark.parametrize("strategy", [fc.ShardingStrategy.FULL_SHARD, fc.ShardingStrategy.NO_SHARD])
def test_slices_of_other_units_load_in_any_order(strategy: fc.ShardingStrategy) -> None:
    """Ranks gathered them in the orders of their optimizers and dictionaries, and hung."""

    def body(rank: int) -> None:
        model = by_block(seeded(Tower))
        optim = torch.optim.Adam(model.parameters(), lr=0.1)
        square(model, data(0, rank)).backward()
        optim.step()
        weights, state = model.state_dict(), fc.optim_state_dict(model, optim, kind="sharded")
        wanted = fc.optim_state_dict(model, optim)["state"]
        if rank:
            weights = turned(weights)
            state["state"] = {n: turned(values) for n, values in turned(state["state"]).items()}
        for load in (fc.load_state_dict, nn.Module.load_state_dict):
            other = by_layer(seeded(Tower, seed=1), strategy)
            load(other, weights)
            for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
                assert torch.equal(whole(mine), whole(theirs))
            params = list(other.parameters())
            again = torch.optim.Adam(params[:: -1 if rank else 1], lr=0.1)
            fc.load_optim_state_dict(other, again, state)
            found = fc.optim_state_dict(other, again)["state"]
            assert all(torch.equal(found[n][k], v) for n in wanted for k, v in wanted[n].items())

    simulate_ranks(body, 3)


def test_owners_and_others_are_listed_in_any_order() -> None:
    """State that one rank owns is gathered for its new owner, beside an optimizer for the rest."""

    def build(units: Any, swapped: int) -> tuple[nn.Module, list[Any]]:
        model = units(seeded(Tower))
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        make = lambda groups: torch.optim.Adam(groups, lr=0.1)  # noqa: E731
        optims = [fc.owner_step(matrices, make), make(others)]
        return model, optims[:: -1 if swapped else 1]

    def body(rank: int) -> None:
        model, optims = build(by_block, rank)
        square(model, data(0, rank)).backward()
        for optim in optims:
            optim.step()
        wanted = fc.optim_state_dict(model, optims)["state"]
        state = fc.optim_state_dict(model, optims, kind="sharded")
        other, again = build(fc.fully_shard, 1 - rank)
        fc.load_optim_state_dict(other, again, state)
        found = fc.optim_state_dict(other, again)["state"]
        assert all(torch.equal(found[n][k], v) for n in wanted for k, v in wanted[n].items())

    simulate_ranks(body, 2)
