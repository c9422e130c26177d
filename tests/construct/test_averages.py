"""Averages of weights equal those of the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from fsdp_compose import (
    Offload,
    ShardedWeightError,
    ShardingStrategy,
    count_traffic,
    fully_shard,
    load_checkpoint,
    save_checkpoint,
    state_dict,
)
from fsdp_compose.sharded import is_sharded

from harness import rank_errors, run_ranks, simulate_ranks
from models import (
    WIDTH,
    Tolerance,
    Tower,
    adamw,
    assert_at_rest,
    by_block,
    compare,
    data,
    one_unit,
    seeded,
    square,
)
from surgery import (
    same,
)


def averaged(before: bool, multi: bool) -> Callable[[int], None]:
    """A model and its average, averaged before either is sharded or after the model is."""
    options: dict[str, Any] = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)} if multi else {}

    def ranks(rank: int) -> None:
        model, plain = seeded(lambda: Tower(2)), seeded(lambda: Tower(2))
        if before:
            mean = AveragedModel(model, **options)
            by_block(mean.module)
        by_block(model)
        if not before:
            mean = AveragedModel(model, **options)
        wanted = AveragedModel(plain, **options)
        ours, theirs = adamw(model.parameters()), adamw(plain.parameters())
        for step in range(3):
            square(model, data(step, rank)).backward()
            square(plain, torch.cat([data(step, r) for r in range(2)])).backward()
            for optim in (ours, theirs):
                optim.step()
                optim.zero_grad()
            mean.update_parameters(model)
            wanted.update_parameters(plain)
        same(mean, wanted)
        assert all(is_sharded(p) for p in mean.parameters())
        with torch.no_grad():
            compare("output", mean(data(9, rank)), wanted(data(9, rank)), Tolerance())
        full = state_dict(mean, kind="full")
        assert list(full) == list(wanted.state_dict())
        assert_at_rest(mean)

    return ranks


@pytest.mark.parametrize("multi", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_averaged_model(before: bool, multi: bool) -> None:
    run_ranks(averaged(before, multi), 2)


def test_an_average_of_pinned_weights_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an offloaded model, which a GPU reads while the host goes on."""
    model = fully_shard(nn.Linear(2, 2), offload_policy=Offload(params=True, pin_memory=False))
    asked: list[Any] = []
    make = torch.empty_like

    def noted(tensor: torch.Tensor, pin_memory: Any = False, **options: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return make(tensor, **options)

    monkeypatch.setattr(torch, "empty_like", noted)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: "as it is")
    average = AveragedModel(model)
    assert "as it is" in asked
    assert torch.equal(average.module.weight.full_tensor(), model.weight.full_tensor())


def test_batch_statistics_of_an_averaged_model() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

    def ranks(rank: int) -> None:
        model, plain = one_unit(seeded(build)), seeded(build)
        mean, wanted = AveragedModel(model), AveragedModel(plain)
        for average, source in ((mean, model), (wanted, plain)):
            average.update_parameters(source)
            update_bn([data(step, rank) for step in range(3)], average)
        assert wanted.module[1].running_mean.any()
        for (name, found), buffer in zip(mean.named_buffers(), wanted.buffers()):
            compare(name, found, buffer, Tolerance())
        with torch.no_grad():
            compare("output", mean(data(9, rank)), wanted(data(9, rank)), Tolerance())

    run_ranks(ranks, 2)


@pytest.mark.parametrize("world", [2, 4])
def test_averages_by_hand_and_in_checkpoints(world: int, tmp_path: Path) -> None:
    """A deep copy is sharded on its own; three ways to average, none communicates."""

    def update(average: nn.Module, model: nn.Module, step: int) -> None:
        pairs = list(zip(average.parameters(), model.parameters()))
        with torch.no_grad():
            if step == 0:
                for a, b in pairs:
                    a.lerp_(b, 0.1)
            elif step == 1:
                torch._foreach_lerp_([a for a, _ in pairs], [b for _, b in pairs], 0.1)
            else:
                for a, b in pairs:
                    a.data.mul_(0.9).add_(b.data, alpha=0.1)

    def ranks(rank: int) -> None:
        model, plain = by_block(seeded(lambda: Tower(2))), seeded(lambda: Tower(2))
        mean, wanted = (copy.deepcopy(m).requires_grad_(False).eval() for m in (model, plain))
        ours, theirs = adamw(model.parameters()), adamw(plain.parameters())
        for step in range(3):
            square(model, data(step, rank)).backward()
            square(plain, torch.cat([data(step, r) for r in range(world)])).backward()
            for optim in (ours, theirs):
                optim.step()
                optim.zero_grad()
            with count_traffic() as traffic:
                update(mean, model, step)
            assert traffic.collectives == traffic.control == 0
            update(wanted, plain, step)
            with torch.no_grad():
                compare("output", mean(data(9, rank)), wanted(data(9, rank)), Tolerance())
        both = nn.ModuleDict({"model": model, "mean": mean})
        save_checkpoint(tmp_path / "both", both, ours)
        fresh = nn.ModuleDict(
            {
                "model": by_block(seeded(lambda: Tower(2), 1)),
                "mean": one_unit(seeded(lambda: Tower(2), 2)).requires_grad_(False),
            }
        )
        load_checkpoint(tmp_path / "both", fresh, adamw(fresh["model"].parameters()))
        same(fresh["model"], plain)
        same(fresh["mean"], wanted)

    run_ranks(ranks, world)


def test_averages_of_another_layout_are_refused() -> None:
    """Averages of a model that is cut differently are refused by name."""

    def ranks(rank: int) -> None:
        model = seeded(lambda: Tower(2))
        mean = one_unit(copy.deepcopy(model))
        by_block(model)
        with torch.no_grad():
            for a, b in zip(mean.parameters(), model.parameters()):
                a.lerp_(b, 0.1)

    for error in rank_errors(ranks, 2):
        assert error is not None and "'first.weight', is cut differently" in error


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_another_layout_is_told_apart(strategy: ShardingStrategy) -> None:
    """Where this rank's slices hold the same, the error says what differs: units, positions."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(lambda: Tower(2)), strategy=strategy)
        mean = one_unit(seeded(lambda: Tower(2)), strategy=strategy)
        ours, theirs = model.blocks[1].up.weight, mean.blocks[1].up.weight
        begins = r"begins at element \d+ of unit 'blocks\.1'.*, not at element \d+ of unit 'Tower'"
        with pytest.raises(ShardedWeightError, match=begins), torch.no_grad():
            theirs.lerp_(ours, 0.1)
        one, other = (torch.optim.SGD([p], 0.1, momentum=0.9) for p in (ours, theirs))
        ours.grad, theirs.grad = ours.detach().clone(), theirs.detach().clone()
        one.step()
        other.step()
        with pytest.raises(RuntimeError, match=begins):
            other.load_state_dict(one.state_dict())

    simulate_ranks(ranks, 1)
