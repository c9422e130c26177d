"""Ranks that meet in different calls are told which: they read each other's messages before."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
from torch import nn

import fsdp_compose as fc
from fsdp_compose.comm import messages

from harness import rank_errors, simulate_ranks
from models import Tower, by_block, mesh_of_replicas, seeded, sgd

CALLS: dict[str, Callable[[nn.Module, dict[str, Any]], Any]] = {
    "load_state_dict": lambda model, _: fc.load_state_dict(model, seeded(Tower).state_dict()),
    "load_state_dict(broadcast_from_rank0=True)": lambda model, _: fc.load_state_dict(
        model, seeded(Tower).state_dict(), broadcast_from_rank0=True
    ),
    "optim_state_dict": lambda model, _: fc.optim_state_dict(model, sgd(model.parameters())),
    "load_optim_state_dict": lambda model, saved: fc.load_optim_state_dict(
        model, sgd(model.parameters()), saved
    ),
    "refresh": lambda model, _: fc.refresh(model),
}
PAIRS = list(permutations(CALLS, 2))


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=map(" and ".join, PAIRS))
def test_both_calls_are_named(first: str, second: str) -> None:
    """On every rank, and the next call that all ranks make is right."""

    def ranks(rank: int) -> str:
        model = by_block(seeded(Tower))
        saved = fc.optim_state_dict(model, sgd(model.parameters()))
        with pytest.raises(RuntimeError, match="Call the same functions in the same") as error:
            CALLS[second if rank else first](model, saved)
        fc.load_state_dict(model, seeded(Tower).state_dict())
        return str(error.value)

    texts = simulate_ranks(ranks)
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"rank 0 calls {first} and rank 1 calls {second} at the same time")


def test_real_ranks_in_different_calls() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        CALLS["refresh" if rank else "load_state_dict"](model, {})

    errors = rank_errors(ranks, 2, timeout=10)
    assert errors[0] == errors[1]
    assert "rank 0 calls load_state_dict and rank 1 calls refresh at the" in str(errors[0])


def test_ranks_of_other_groups_are_told() -> None:
    """A rank whose own groups agree raises too, where one that it shares a group with differs."""

    def ranks(rank: int) -> str:
        strategy = fc.ShardingStrategy.HYBRID_SHARD
        model = by_block(seeded(Tower), mesh=mesh_of_replicas(2, 2), strategy=strategy)
        name = "optim_state_dict" if rank == 1 else "load_state_dict"
        with pytest.raises(RuntimeError, match="at the same time") as error:
            CALLS[name](model, {})
        return str(error.value)

    for text in simulate_ranks(ranks, 4):
        assert "load_state_dict" in text and "calls optim_state_dict" in text


def test_every_meeting_says_in_which_call() -> None:
    """Without a name, ranks in different calls would read each other's messages."""

    def ranks(rank: int) -> None:
        group = next(iter(by_block(seeded(Tower)).parameters()))._shard_spec.group
        with pytest.raises(AssertionError, match="in which call"):
            messages.gather_objects(rank, group)
        assert messages.gather_objects(rank, group, "a test") == [0, 1]

    simulate_ranks(ranks)


def test_an_error_of_all_ranks_stays_one() -> None:
    """Also where another one was raised from it, and where scopes lie in each other."""
    known = messages.first_error([(1, ("ValueError", "no such file"))])
    assert str(known) == "no such file (found on rank 1)"
    again = messages.first_error([(0, messages.describe_error(known))])
    assert type(again) is ValueError and str(again) == str(known)
    outer = RuntimeError("cannot load")
    outer.__cause__ = known
    assert not messages.is_on_all_ranks(outer)
    known.__dict__[messages.ON_ALL_RANKS] = True
    assert messages.is_on_all_ranks(outer)
