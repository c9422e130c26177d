"""Ranks may list parameters, and the entries of what they load, in orders of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import fsdp_compose as fc

from harness import run_ranks, simulate_ranks
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


def squares() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3)))


def named(model: nn.Module, is_turned: bool, part: bool = False) -> torch.optim.Optimizer:
    """Over parameters that torch is told the names of, which are those of a part for ``part``."""
    modules = [model[2], model[0]] if part else [model]
    params = [item for module in modules for item in module.named_parameters()]
    if part:  # torch wants names once
        params = [(f"{i // 2}.{name}", param) for i, (name, param) in enumerate(params)]
    return torch.optim.AdamW(params[::-1] if is_turned else params, lr=0.1)


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("way", ["dictionary", "file", "checkpoint"])
def test_state_by_number_follows_saved_names(way: str, part: bool, tmp_path: Any) -> None:
    """Of equal shapes, as ``param_names`` of torch's optimizers tell them; theirs, or the model's.

    Names that are not those of the parameters here say nothing, and the order tells.
    """

    def body(rank: int) -> None:
        plain = seeded(squares)
        theirs = named(plain, is_turned=True, part=part)
        train(plain, theirs, 0)
        saved = {"model": plain.state_dict(), "optim": theirs.state_dict()}
        if rank == 0:
            torch.save(saved, tmp_path / "b")
        dcp.save(saved, checkpoint_id=tmp_path / "a")
        model = fc.fully_shard(seeded(squares, seed=1))
        mine = named(model, is_turned=False, part=part)
        if way == "file" and not part:
            mine = torch.optim.AdamW(model.parameters(), lr=0.1)
        if way == "checkpoint":
            fc.load_checkpoint(tmp_path / "a", model, mine)
        else:
            given = torch.load(tmp_path / "b") if way == "file" else saved
            model.load_state_dict(given["model"])
            fc.load_optim_state_dict(model, mine, given["optim"])
        train(plain, theirs, 1)
        train(model, mine, 1)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(p), q.detach())

    run_ranks(body, 2)


def train(model: nn.Module, optim: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    optim.zero_grad()
    model(x).square().mean().backward()
    optim.step()


def test_names_of_others_leave_numbers_their_order() -> None:
    def body(rank: int) -> None:
        plain, model = seeded(squares), fc.fully_shard(seeded(squares))
        theirs = named(plain, is_turned=False)
        train(plain, theirs, 0)
        saved = theirs.state_dict()
        saved["param_groups"][0]["param_names"] = [f"old.{i}" for i in range(6)]
        mine = torch.optim.AdamW(model.parameters(), lr=0.1)
        fc.load_optim_state_dict(model, mine, saved)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.state[p]["exp_avg"]), theirs.state[q]["exp_avg"])

    simulate_ranks(body, 2)
