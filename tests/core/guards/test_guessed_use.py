"""What ranks of an accelerator take others to have used: groups here are as those of one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    ShardingStrategy,
    accumulate,
    flat_parameters,
    fully_shard,
    no_sync,
    reduce_grads,
    register_post_reduce_hook,
)
from fsdp_compose.core.guards import collective_log

from fuzz import groups_named
from harness import simulate_ranks
from laws import Choosy, check_steps, choose
from models import Twin, adamw, data, mesh_of_replicas, seeded, square, units

ALIKE: list[list[tuple[int, ...]]] = [
    [(0,)],
    [(1,)],
    [(1,)],
    [(0, 2)],
    [(2,)],
    [(0, 1, 2)],
    [(0, 1)],
]
"""By step: what every rank uses."""


def decayed(params: Any) -> torch.optim.Optimizer:
    """It moves a parameter whose gradient is zero, not one without a gradient."""
    return torch.optim.SGD(params, 0.1, weight_decay=0.1)


def run(ranks: Callable[[int], None], world: int = 2) -> None:
    with groups_named("nccl"):
        simulate_ranks(ranks, world)


@pytest.mark.parametrize("optimizer", [adamw, decayed])
def test_all_ranks_may_turn_to_others(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as another head; a rank waits for the others' word in the steps of such turns alone."""
    turns: list[int] = []
    known = collective_log.take_back_zeros
    monkeypatch.setattr(collective_log, "take_back_zeros", lambda g: (turns.append(0), known(g)))

    def ranks(rank: int) -> None:
        check_steps(Twin(rank, 2, Choosy, fully_shard, optimizer), ALIKE)

    run(ranks)
    assert len(turns) == 2 * 5, "the first step compares at once, and one step is as the last"


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "NO_SHARD"])
def test_replicas_may_turn_to_others(strategy: str) -> None:
    def ranks(rank: int) -> None:
        chosen = ShardingStrategy[strategy]
        mesh = None if strategy == "NO_SHARD" else mesh_of_replicas(2, 2)
        twin = Twin(rank, 4, Choosy, partial(fully_shard, mesh=mesh, strategy=chosen), decayed)
        check_steps(twin, ALIKE)

    run(ranks, 4)


def test_parameters_may_be_frozen_in_training() -> None:
    """A frozen one is left as it is, whatever the ranks used when they last compared it."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Choosy, fully_shard, decayed)
        for step, frozen in enumerate(["", "layers.0", "layers", "", "layers.1.bias", "scale"]):
            for model in (twin.model, twin.reference):
                for name, param in model.named_parameters():
                    param.requires_grad_(not (frozen and name.startswith(frozen)))
            choose(twin, [(0, 1)] if frozen != "layers" else [(0, 1, 2)])
            if frozen == "layers":
                for either in (twin.model, *twin.plain):
                    either.layers[2].requires_grad_(True)
            twin.backward(square, step)
            twin.check_grads()
            twin.step()
        twin.check()

    run(ranks)


@pytest.mark.parametrize("keep", ["sharded", "unsharded", "no_all_reduce"])
def test_microbatches_may_turn_to_others(keep: Any) -> None:
    """What one of them used keeps its gradient, though the last did not use it."""

    def ranks(rank: int) -> None:
        chosen = {"strategy": ShardingStrategy.HYBRID_SHARD, "mesh": mesh_of_replicas(2, 2)}
        twin = Twin(rank, 4, Choosy, partial(fully_shard, **chosen), decayed)
        check_steps(twin, ALIKE[:1])
        for plans in (ALIKE[1:4], ALIKE[2:3], ALIKE[3:5]):
            with accumulate(twin.model, keep=keep):
                for seed, plan in enumerate(plans):
                    choose(twin, plan)
                    twin.backward(square, seed)
            twin.check_grads()
            twin.step()
        twin.check()

    run(ranks, 4)


class Twice(nn.Module):
    """Recomputes its unit twice in a backward, which is reduced each time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Choosy()
        self.plans = [(0, 1, 2), (0, 1, 2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for plan in self.plans:
            x = checkpoint(self._call, x.requires_grad_(), plan, use_reentrant=True)
        return x

    def _call(self, x: torch.Tensor, plan: tuple[int, ...]) -> torch.Tensor:
        self.inner.chosen = plan
        found: torch.Tensor = self.inner(x)
        return found


def test_a_backward_that_reduces_twice() -> None:
    """What either reduction brought keeps its gradient, the rest has none."""

    def shard(model: Twice) -> nn.Module:
        fully_shard(model.inner)
        return fully_shard(model)

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Twice, shard, decayed)
        for seed, plans in enumerate([[(0, 1, 2)] * 2, [(0,), (1,)], [(1,), (0,)], [(2,), (2,)]]):
            for model in (twin.model, *twin.plain):
                model.plans = plans
            twin.backward(square, seed)
            twin.check_grads()
            twin.step()
        twin.check()

    run(ranks)


def test_sums_that_waited_are_settled_when_reduced() -> None:
    """``reduce_grads`` runs outside any backward, whose end would compare what was used."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Choosy, fully_shard, decayed)
        check_steps(twin, ALIKE[:1])
        for plan in ALIKE[1:]:
            with no_sync(twin.model):
                choose(twin, plan)
                twin.backward(square, 1)
            reduce_grads(twin.model)
            twin.check_grads()
            twin.step()
        twin.check()

    run(ranks)


def test_reduce_grads_waits_only_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it asks the other ranks is read where this rank used others than before."""
    read, reads = collective_log._Pending.read, [0, 0]

    def noted(pending: Any) -> Any:
        reads[dist.get_rank()] += 1
        return read(pending)

    monkeypatch.setattr(collective_log._Pending, "read", noted)

    def ranks(rank: int) -> None:
        model = fully_shard(seeded(Choosy))
        for step, chosen in enumerate([(0,), (0,), (1,), (1,)]):
            model.chosen = chosen
            with no_sync(model):
                square(model, data(step, rank)).backward()
            before = reads[rank]
            reduce_grads(model)
            assert step == 0 or reads[rank] - before == (step == 2)

    run(ranks)


def test_flat_gradients_follow() -> None:
    """An optimizer over flat tensors has zeros where no rank used a parameter."""

    def ranks(rank: int) -> None:
        bare = partial(torch.optim.SGD, lr=0.1)
        twin = Twin(rank, 2, Choosy, fully_shard, bare)
        twin.optim = bare(flat_parameters(twin.model))
        for step, plan in enumerate(ALIKE):
            choose(twin, plan)
            twin.backward(square, step)
            twin.step()
        twin.check()

    run(ranks)


def hook_on_parameters(model: Choosy, told: list[Any]) -> None:
    model.layers[0].weight.register_post_accumulate_grad_hook(told.append)


def hook_on_units(model: Choosy, told: list[Any]) -> None:
    register_post_reduce_hook(model, lambda module, params: told.append(params))


@pytest.mark.parametrize("hook", [hook_on_parameters, hook_on_units])
def test_zeros_that_a_hook_was_told_of_are_an_error(hook: Any) -> None:
    """It may have stepped the parameter already; all ranks hear of it."""

    def ranks(rank: int) -> None:
        model = fully_shard(seeded(Choosy))
        told: list[Any] = []
        if rank == 0:
            hook(model, told)
        square(model, data(0, rank)).backward()
        model.chosen = (1,)
        loss = square(model, data(1, rank))
        with pytest.raises(RuntimeError, match=r"'layers.0.bias'.*in step 2 no rank used it"):
            loss.backward()
        assert len(told) == 2 * (rank == 0)

    run(ranks)


def test_hooks_are_not_told_of_what_is_frozen() -> None:
    """An optimizer's step in backward leaves a parameter alone that trains no more."""

    def ranks(rank: int) -> None:
        model, told = fully_shard(seeded(Choosy)), list[nn.Parameter]()
        model.chosen = (0, 1)
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(told.append)
        for step in range(3):
            model.layers[1].requires_grad_(step == 0)
            square(model, data(step, rank)).backward()
            assert len(told) == (2 if step else 4)
            told.clear()

    run(ranks)


def test_ranks_that_part_are_told() -> None:
    """One that turns to others alone is no turn of all; what it left alone counts as zero."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Choosy, fully_shard, decayed)
        check_steps(twin, [[(0, 1)], [(0, 1), (0,)], [(0,), (0, 1)], [(0, 1)]])
        log = next(iter(units(twin.model)[0].links.logs))
        choose(twin, [(0,), (2,)])
        twin.backward(square, 4)
        assert log.pending is None  # read at once here, where no device is waited for

    with pytest.raises(Exception, match="some rank began to use it"):
        run(ranks)
