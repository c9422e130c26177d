"""What people do to a module besides calling it once: each case trains as the plain module does."""

from __future__ import annotations

import collections
import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from harness import rank_errors, run_ranks
from models import (
    WIDTH,
    Block,
    Ledger,
    Tower,
    Twin,
    assert_at_rest,
    by_block,
    compare,
    data,
    mean_loss,
    nested,
    one_unit,
    square,
    units,
    whole,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from fsdp_compose import ShardingStrategy, comm, fully_shard, wrap
from fsdp_compose.engine import drop
from fsdp_compose.state import Hold

pytestmark = pytest.mark.filterwarnings("error")

SHARDS = {"blocks": by_block, "one": one_unit, "nested": nested}


def train(
    build: Callable[[], nn.Module],
    forward: Callable[[nn.Module, Tensor], Tensor] = square,
    shard: Callable[[nn.Module], Any] = by_block,
    world: int = 2,
    steps: int = 3,
) -> None:
    """Train a twin on real ranks; the whole of most tests."""
    run_ranks(lambda rank: Twin(rank, world, build, shard).train(forward, steps), world)


# Activation checkpointing


class Checkpointed(Tower):
    """Recomputes: each block, the inside of each block, pairs of blocks, or everything."""

    def __init__(self, where: str, reentrant: bool, depth: int = 4) -> None:
        super().__init__(depth)
        self.where, self.reentrant = where, reentrant
        if where == "inside":
            for block in self.blocks:
                inner = block.forward
                block.forward = lambda x, inner=inner: self.again(inner, x)

    def again(self, fn: Callable[..., Any], *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return fn(*args)
        return checkpoint(fn, *args, use_reentrant=self.reentrant)

    def run(self, x: Tensor) -> Tensor:
        x = self.first(x)
        blocks = list(self.blocks)
        if self.where == "pairs":
            for a, b in zip(blocks[::2], blocks[1::2]):
                x = self.again(lambda y, a=a, b=b: b(a(y)), x)
        elif self.where == "outside":
            for block in blocks:
                x = self.again(block, x)
        elif self.where == "nested":
            half = lambda y, part: self.again(part[1], self.again(part[0], y))  # noqa: E731
            x = self.again(lambda y: half(y, blocks[:2]), x)
            x = self.again(lambda y: half(y, blocks[2:]), x)
        else:
            for block in blocks:
                x = block(x)
        return self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "root":
            return self.again(self.run, x.requires_grad_())
        return self.run(x)


WHERE = ["outside", "inside", "pairs", "nested", "root"]


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("shard", ["blocks", "one"])
def test_checkpointing(where: str, reentrant: bool, shard: str) -> None:
    train(lambda: Checkpointed(where, reentrant), shard=SHARDS[shard])


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.parametrize("where", WHERE)
def test_checkpointing_under_each_strategy(where: str, reentrant: bool) -> None:
    def ranks(rank: int) -> None:
        for strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
            shard = lambda m: by_block(m, strategy=strategy)  # noqa: E731
            Twin(rank, 2, lambda: Checkpointed(where, reentrant), shard).train()

    run_ranks(ranks)


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.parametrize("where", WHERE)
def test_checkpointing_gathers_no_more_than_without(where: str, reentrant: bool) -> None:
    """Two gathers (forward, backward) and one reduction per unit; the outermost stays gathered."""

    def ranks(rank: int) -> tuple[int, int]:
        twin = Twin(rank, 2, lambda: Checkpointed(where, reentrant))
        for seed in range(2):  # the first step records the order that prefetching follows
            comm.traffic.reset()
            square(twin.model, data(seed, rank)).backward()
        return comm.traffic.gathers, comm.traffic.reduces

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
                found["gathered"] = sum(b.full_nbytes for b in kept)
        return found

    for found in run_ranks(ranks):
        assert found["plain outside"] < found["plain nowhere"] / 2
        for where in ("nowhere", "outside"):
            assert found[where] <= found[f"plain {where}"] + found["gathered"] + 64, found
