"""What ranks are given to load is the same, and readable, or every rank says what is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_compose as fc

from harness import simulate_ranks
from models import adamw, by_block, data, mesh_of_replicas, seeded, square, two_blocks

HYBRID = fc.ShardingStrategy.HYBRID_SHARD
NAME = "first.weight"


def stepped(rank: int, seed: int = 0, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = by_block(seeded(two_blocks), **options)
    optim = adamw(model.parameters())
    square(model, data(seed, rank)).backward()
    optim.step()
    return model, optim


def change(state: dict[str, Any], what: str) -> None:
    if what == "exp_avg":
        state["state"][NAME][what] = state["state"][NAME][what] + 1
    elif what == "step":
        state["state"][NAME][what] += 5
    else:
        state["param_groups"][0][what] = 0.5


@pytest.mark.parametrize(
    ("kind", "what"),
    [("full", "exp_avg"), ("full", "step"), ("full", "lr"), ("sharded", "step"), ("sharded", "lr")],
)
def test_ranks_given_other_optimizer_state(kind: Any, what: str) -> None:
    """State, step counts and settings of two files are not stitched together; nothing changes."""

    def body(rank: int) -> None:
        model, optim = stepped(rank)
        before = fc.optim_state_dict(model, optim)
        given = copy.deepcopy(fc.optim_state_dict(model, optim, kind=kind))
        fc.load_optim_state_dict(model, optim, given)
        if rank == 1:
            change(given, what)
        with pytest.raises(RuntimeError, match=f"given different things: .*{what}.*{NAME}"):
            fc.load_optim_state_dict(model, optim, given)
        after = fc.optim_state_dict(model, optim)
        torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
        assert after["param_groups"] == before["param_groups"]

    simulate_ranks(body)


def test_ranks_of_other_groups_hear_it_too() -> None:
    """Over two axes a difference in one group is an error on every rank, in loading and saving."""

    def body(rank: int) -> list[str]:
        model, optim = stepped(rank, mesh=mesh_of_replicas(2, 2), strategy=HYBRID)
        given = fc.optim_state_dict(model, optim)
        if rank == 1:
            change(given, "lr")
            optim.param_groups[0]["lr"] = 0.5
        errors = []
        for call in (
            lambda: fc.load_optim_state_dict(model, optim, given),
            lambda: fc.optim_state_dict(model, optim),
        ):
            with pytest.raises(RuntimeError, match=f"setting 'lr' of {NAME!r}") as caught:
                call()
            errors.append(str(caught.value))
        return errors

    assert all(len(errors) == 2 for errors in simulate_ranks(body, 4))
