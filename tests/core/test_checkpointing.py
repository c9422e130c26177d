"""Activation checkpointing around, inside and across units trains as the plain module does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from fsdp_compose import ShardingStrategy, fully_shard, wrap
from fsdp_compose.base.process import here

from harness import cell, run_ranks, simulate_ranks
from models import (
    SHARDS,
    WIDTH,
    Checkpointed,
    Forward,
    Ledger,
    Twin,
    by_block,
    data,
    seeded,
    square,
    train_twin,
    units,
)


def train_each_way(
    build: Callable[[], nn.Module], forward: Forward = square, steps: int = 3
) -> None:
    """Trains a twin with a unit for each block, and one that is a single unit."""

    def ranks(rank: int) -> None:
        for name, shard in SHARDS.items():
            with cell(name):
                Twin(rank, 2, build, shard).train(forward, steps)

    run_ranks(ranks)


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.parametrize("frozen", ["all blocks", "one block", "some parameters"])
def test_checkpointing_inside_frozen_units(frozen: str, reentrant: bool) -> None:
    """A frozen unit is recomputed too when a gradient passes through it."""

    def build() -> nn.Module:
        model = Checkpointed("inside", reentrant)
        for name, param in model.named_parameters():
            param.requires_grad_(
                not {
                    "all blocks": "blocks" in name,
                    "one block": "blocks.1" in name,
                    "some parameters": "up" in name,
                }[frozen]
            )
        return model

    train_each_way(build)


WHERE = ["outside", "inside", "pairs", "nested", "root"]


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.parametrize("where", WHERE)
def test_checkpointing(where: str, reentrant: bool) -> None:
    train_each_way(lambda: Checkpointed(where, reentrant))


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.parametrize("where", WHERE)
def test_checkpointing_under_each_strategy(where: str, reentrant: bool) -> None:
    def ranks(rank: int) -> None:
        for strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
            shard = lambda m: by_block(m, strategy=strategy)  # noqa: E731
            Twin(rank, 2, lambda: Checkpointed(where, reentrant), shard).train(steps=2)

    simulate_ranks(ranks)


class Recompute(torch.autograd.Function):
    """The checkpoint of guided-diffusion, which many repositories have: it keeps parameters."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor, *params: Tensor) -> Any:
        ctx.run, ctx.x, ctx.params = run, x, list(params)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x)
        return None, *torch.autograd.grad(out, [x, *ctx.params], grad, allow_unused=True)


class Scaled(nn.Module):
    """A parameter of its own, kept from the forward, beside one of a unit inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return Recompute.apply(lambda x: self.scale * self.inner(x), x, *self.parameters())


def test_a_checkpoint_that_keeps_parameters() -> None:
    def ranks(rank: int) -> None:
        shard = lambda m: fully_shard(m, units=wrap.by_class((Scaled, nn.Linear)))  # noqa: E731
        Twin(rank, 2, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled()), shard).train()

    simulate_ranks(ranks)


class Freezing(nn.Module):
    """Freezes a layer inside a checkpoint, before it is used there or after."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.early = early

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, x, use_reentrant=False)

    def part(self, x: Tensor) -> Tensor:
        if self.early:
            self.layer.weight.requires_grad_(False)
        y = self.layer(x)
        self.layer.weight.requires_grad_(False)
        return self.head(y)


def test_a_unit_frozen_inside_a_checkpoint() -> None:
    """As in the plain module: it may be frozen before it is used, and torch raises after.

    Troubleshooting has the text of torch's error.
    """
    by_linear = lambda m: fully_shard(m, units=wrap.by_class({nn.Linear}))  # noqa: E731
    train_twin(lambda: Freezing(early=True), shard=by_linear)

    def ranks(rank: int) -> None:
        for shard in by_linear, lambda model: model:
            model = shard(seeded(lambda: Freezing(early=False)))
            with pytest.raises(CheckpointError, match="A different number of tensors was saved"):
                square(model, data(0, rank)).backward()

    simulate_ranks(ranks)


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
def test_a_checkpoint_inside_a_recomputed_unit(reentrant: bool) -> None:
    """A part of the unit is recomputed when the unit itself has been, in the same backward."""

    def build() -> nn.Module:
        model = Checkpointed("outside", reentrant, depth=2)
        for block in model.blocks:
            down = block.down.forward
            block.down.forward = lambda x, down=down: model.again(down, x)
        return model

    simulate_ranks(lambda rank: Twin(rank, 2, build).train(steps=2))


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.parametrize("where", WHERE)
def test_checkpointing_gathers_no_more_than_without(where: str, reentrant: bool) -> None:
    """Two gathers (forward, backward) and one reduction per unit; the outermost stays gathered."""

    def ranks(rank: int) -> tuple[int, int]:
        twin = Twin(rank, 2, lambda: Checkpointed(where, reentrant))
        for seed in range(2):  # the first step records the order that prefetching follows
            here.traffic.reset()
            square(twin.model, data(seed, rank)).backward()
        return here.traffic.gathers, here.traffic.reduces

    for gathers, reduces in run_ranks(ranks):
        assert (gathers, reduces) == (2 * 4 + 1, 5)


@pytest.mark.parametrize("shard", ["blocks", "one"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
def test_checkpointing_saves_memory(reentrant: bool, shard: str) -> None:
    """What a forward leaves alive is what the plain model's leaves, plus what stays gathered."""

    def alive(model: nn.Module, x: Tensor) -> int:
        with Ledger(x, *model.parameters()) as ledger:
            loss = square(model, x)
            held = ledger.live()
        loss.backward()
        return held

    def ranks(rank: int) -> dict[str, int]:
        found = {}
        for where in ("nowhere", "outside"):
            twin = Twin(rank, 2, lambda: Checkpointed(where, reentrant), SHARDS[shard])
            for step in range(2):
                x = data(step, rank, 64, WIDTH)
                found[where] = alive(twin.model, x)
                found[f"plain {where}"] = alive(twin.reference, x)
                kept = {b for u in units(twin.model)[:1] for b in u.buckets}
                found["gathered"] = sum(b.views.nbytes for b in kept)
        return found

    for found in run_ranks(ranks):
        assert found["plain outside"] < found["plain nowhere"] / 2
        for where in ("nowhere", "outside"):
            assert found[where] <= found[f"plain {where}"] + found["gathered"] + 64, found


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.parametrize("where", WHERE)
def test_two_checkpointed_forwards_then_one_backward(where: str, reentrant: bool) -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return square(model, x) + (model(x * 2) * model(-x)).mean()

    train_each_way(lambda: Checkpointed(where, reentrant), forward, steps=2)


def test_penalties_on_weights_in_a_checkpoint() -> None:
    """What hooks are given of sharded weights has the same shape when it is recomputed."""
    plain = nn.Linear(4, 3)
    sharded = fully_shard(copy.deepcopy(plain))

    def penalise(x: Tensor, layer: nn.Module) -> Tensor:
        weight, bias = layer.weight, layer.bias
        square = (weight * weight.detach() * 2).square().mean()
        norms = sum(torch._foreach_norm([weight, bias]))
        return x.sum() * (square + bias.pow(exponent=3).sum() + norms)

    for layer in (plain, sharded):
        checkpoint(penalise, torch.ones(2), layer, use_reentrant=False).backward()
    for mine, its in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), its.grad)
