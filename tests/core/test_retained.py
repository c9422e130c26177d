"""Graphs over a backward read the weights again: units stay gathered for them, and no longer."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from fsdp_compose import fully_shard, gathered

from harness import run_ranks
from laws import check_two_graphs, slope_of
from models import Tower, Twin, assert_at_rest, data, seeded, square, units


def frozen_in_the_middle() -> nn.Module:
    model = Tower()
    model.blocks[1].requires_grad_(False)
    return model


def frozen() -> nn.Module:
    return Tower().requires_grad_(False)


@pytest.mark.parametrize("build", [Tower, frozen_in_the_middle])
def test_two_graphs_over_gradients_at_once(build: Callable[[], nn.Module]) -> None:
    run_ranks(check_two_graphs, 2, build)


def test_a_kept_graph_is_walked_twice() -> None:
    def train(rank: int) -> None:
        twin = Twin(rank, 2, frozen_in_the_middle)
        for loss in twin.losses(slope_of, 0):
            loss.backward(retain_graph=True)
            loss.backward()
        assert_at_rest(twin.model)
        twin.step()
        twin.check()

    run_ranks(train, 2)


def test_one_rank_keeps_graphs_that_were_run() -> None:
    """As a log of losses does: the units are released on every rank alike."""

    def train(rank: int) -> None:
        twin, kept = Twin(rank, 2, Tower), []
        for seed in range(4):
            for loss in twin.losses(slope_of if seed % 2 else square, seed):
                loss.backward()
                kept += [loss] if rank == 0 else []
            assert_at_rest(twin.model)
            twin.step()
        twin.check()

    run_ranks(train, 2)


def test_graphs_that_are_dropped_release_units() -> None:
    """A graph that nobody consumes holds the units until it is gone and another step was made."""

    def run(rank: int) -> None:
        for build in (Tower, frozen):
            twin = Twin(rank, 2, build)
            slope = slope_of(twin.model, data(0, rank))
            assert any(unit.holds for unit in units(twin.model))
            del slope
            gc.collect()
            for seed in (1, 2):
                twin.model(data(seed, rank).requires_grad_()).sum().backward()
            assert_at_rest(twin.model)

    run_ranks(run, 2)


def test_a_frozen_model_is_differentiated_twice() -> None:
    """Nothing is trained, and the input's gradient is right, as in an attack on the input."""

    def run(rank: int) -> None:
        twin = Twin(rank, 2, frozen)
        inputs = []
        for model in (twin.model, twin.mine):
            x = data(0, rank)
            slope_of(model, x).backward()
            inputs.append(x.grad)
        torch.testing.assert_close(*inputs, rtol=1e-9, atol=1e-11)
        assert_at_rest(twin.model)

    run_ranks(run, 2)


class First(nn.Module):
    """Computes with its first input only."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 2)

    def forward(self, used: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        return self.up(used)


def test_a_graph_that_reads_no_weight_is_no_reader() -> None:
    """A gradient without a graph over it, or none at all, keeps a frozen unit for nobody."""
    model = fully_shard(First().requires_grad_(False))
    inputs = [torch.randn(4, 3, requires_grad=True) for _ in range(2)]
    output = model(*inputs).sum()
    used, unused = torch.autograd.grad(output, inputs, create_graph=True, allow_unused=True)
    with gathered(model):
        torch.testing.assert_close(used, model.up.weight.sum(0).expand(4, 3))
    assert unused is None
    model(*inputs).sum().backward()
    assert_at_rest(model)


def test_a_dropped_graph_and_a_step_release_units() -> None:
    """The next forward of any kind does; a graph that somebody keeps still reads its weights."""

    def run(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        params = list(twin.model.parameters())
        loss = twin.model(data(0, rank)).square().sum()
        grads = torch.autograd.grad(loss, params, create_graph=True)
        with torch.no_grad():
            for param in params:
                param.mul_(2)
            twin.model(data(1, rank))
        assert any(unit.holds for unit in units(twin.model))
        del loss, grads
        with torch.no_grad():
            twin.model(data(1, rank))
        assert_at_rest(twin.model)

    run_ranks(run, 2)


def test_a_frozen_part_is_recomputed_twice() -> None:
    """Its weights are those that the first forward read until every graph over them has run."""

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6).requires_grad_(False)

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    def run(rank: int) -> None:
        plain = seeded(Recomputed)
        model = fully_shard(copy.deepcopy(plain))
        slopes = []
        for each in (plain, model):
            x = data(0, rank).requires_grad_()
            loss = each(x).square().mean()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + slope.square().sum()).backward()
            slopes.append(x.grad)
        assert_close(*slopes)
        with torch.no_grad():
            model(data(1, rank))
        assert_at_rest(model)

    run_ranks(run, 2)
