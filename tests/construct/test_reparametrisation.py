"""Reparametrised modules train as in one process, whenever the change is made."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fsdp_compose import (
    fully_shard,
    gathered,
    refresh,
    wrap,
)

from harness import rank_errors, run_ranks
from models import (
    Tower,
    adamw,
    by_block,
    data,
    fqns,
    one_unit,
    seeded,
    sgd,
    square,
    train_twin,
)
from surgery import (
    CHANGES,
    Built,
    blocks_with,
    together,
)


def by_linear(model: nn.Module) -> nn.Module:
    return fully_shard(model, units=wrap.by_class(nn.Linear))


@pytest.fixture(autouse=True)
def _legacy() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*weight_norm.*is deprecated", FutureWarning)
        yield


@pytest.mark.parametrize("change", CHANGES)
def test_reparametrised_before_sharding(change: str) -> None:
    """In a unit's submodule, and on the unit's own module, which has hooks of both."""
    build = blocks_with(lambda block: CHANGES[change](block.up))

    def ranks(rank: int) -> None:
        Built(rank, 2, build, by_block, sgd).train()
        Built(rank, 2, build, by_linear, adamw).train()

    run_ranks(ranks, 2)


@pytest.mark.parametrize(
    ("change", "shard"),
    [*((change, by_block) for change in CHANGES), ("weight_norm", one_unit), ("prune", by_linear)],
)
def test_reparametrised_after_sharding(change: str, shard: Any) -> None:
    """Inside ``gathered(writeback=True)``, then ``refresh``; forgetting it is an error."""

    def ranks(rank: int) -> None:
        model, plain = shard(seeded(lambda: Tower(2))), seeded(lambda: Tower(2))
        together(model, plain, rank)
        kept = {id(p) for p in model.parameters()}
        with torch.no_grad(), gathered(model, writeback=True):
            CHANGES[change](model.blocks[0].up)
        with torch.no_grad():
            CHANGES[change](plain.blocks[0].up)
        with pytest.raises(RuntimeError, match=r"refresh\(model\) on every rank"):
            model(data(0, rank))
        refresh(model)
        names = [name for name, _ in plain.named_parameters()]
        assert sorted(fqns(model)) == sorted(names)
        made = 2 if "weight_norm" in change else 0
        assert len([p for p in model.parameters() if id(p) not in kept]) == made
        together(model, plain, rank, start=3)

    run_ranks(ranks, 2)


@pytest.mark.parametrize(
    ("change", "leave"), [("parametrize", True), ("parametrize", False), ("weight_norm", True)]
)
def test_a_parametrisation_is_removed(change: str, leave: bool) -> None:
    """Out of two originals torch makes a new parameter, in grad mode only."""

    def ranks(rank: int) -> None:
        build = blocks_with(lambda block: CHANGES[change](block.up))
        model, plain = by_block(seeded(build)), seeded(build)
        together(model, plain, rank)
        with torch.no_grad(), gathered(model, writeback=True), torch.enable_grad():
            parametrize.remove_parametrizations(model.blocks[0].up, "weight", leave)
        parametrize.remove_parametrizations(plain.blocks[0].up, "weight", leave)
        refresh(model)
        assert type(model.blocks[0].up) is nn.Linear
        together(model, plain, rank, start=3)

    run_ranks(ranks, 2)


def test_parametrised_values_may_be_cached() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with parametrize.cached():
            return square(model, x) + square(model, 2 * x)

    train_twin(blocks_with(lambda b: CHANGES["parametrize"](b.up)), forward, optimizer=adamw)


def test_spectral_vectors_agree_between_ranks() -> None:
    """They follow the weights alone, which are the same everywhere."""

    def ranks(rank: int) -> list[Tensor]:
        build = blocks_with(lambda block: CHANGES["spectral_norm"](block.up))
        model = by_block(seeded(build))
        start = [b.clone() for b in model.buffers()]
        for step in range(3):
            square(model, data(step, rank)).backward()
        assert not any(torch.equal(a, b) for a, b in zip(start, model.buffers()))
        return list(model.buffers())

    for ours, theirs in zip(*run_ranks(ranks, 2)):
        assert torch.equal(ours, theirs)


def leave_open(model: nn.Module, change: str, fail: bool) -> None:
    """Change a layer in a scope that writes nothing back: without writeback, or as it fails."""
    with torch.no_grad(), gathered(model, writeback=fail):
        CHANGES[change](model.get_submodule("blocks.0.up"))
        if fail:
            raise KeyError("in the scope")


@pytest.mark.parametrize("change", ["prune", "spectral_norm", "legacy weight_norm"])
def test_surgery_that_is_not_written_back(change: str) -> None:
    """An error, and the layer is as it was: no parameter, buffer, hook or class of the change."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(lambda: Tower(2)))
        up = model.blocks[0].up
        before = [type(up), *up.state_dict(), len(up._forward_pre_hooks), *up._modules]
        with pytest.raises(RuntimeError) as raised:
            leave_open(model, change, fail=False)
        assert "'blocks.0.up.weight' of unit 'blocks.0' was taken out" in str(raised.value)
        assert "writeback=True" in str(raised.value) and "refresh(model)" in str(raised.value)
        with pytest.raises(KeyError, match="in the scope"):
            leave_open(model, change, fail=True)
        assert [type(up), *up.state_dict(), len(up._forward_pre_hooks), *up._modules] == before
        together(model, seeded(lambda: Tower(2)), rank)

    run_ranks(ranks, 2)


def test_a_parameter_that_was_moved_is_named() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(lambda: Tower(2)))
        model.blocks[0].spare = model.head.weight
        model(data(0, rank))

    for error in rank_errors(ranks, 2):
        assert error is not None and "'blocks.0': its modules have sharded" in error
        assert "'blocks.0.spare'" in error and "fsdp_compose.refresh(model) on every rank" in error
