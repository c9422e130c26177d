"""Layers that are skipped, early exits and uneven batches train as in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import (
    ShardingStrategy,
    count_traffic,
    fully_shard,
    gathered,
    participate,
    refresh,
    set_gradient_divide_factor,
)

from harness import run_ranks, single_process
from models import (
    WIDTH,
    Tower,
    Twin,
    adamw,
    assert_at_rest,
    by_block,
    data,
    one_unit,
    seeded,
    square,
    units,
)
from surgery import (
    CHANGES,
    blocks_with,
    change_to_packed,
    low_rank,
    same,
    together,
)


class Dropping(Tower):
    """Layers dropped at random; ``shared`` says whether ranks draw alike."""

    draw: Callable[[int], bool] = staticmethod(lambda layer: True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            if self.draw(i):
                x = block(x)
            elif units(block):
                x = participate(block, x)
        return self.head(x)


@pytest.mark.filterwarnings("ignore:the forward of unit")
@pytest.mark.parametrize("shared", [True, False])
def test_layer_drop(shared: bool) -> None:
    """Ranks that draw differently participate; where they draw alike, it costs what it saves."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Dropping(4), by_block, adamw)
        for step in range(3):
            for r, model in [(rank, twin.model), *enumerate(twin.plain)]:
                key = 10 * step + (0 if shared else r)
                keep = torch.rand(4, generator=torch.Generator().manual_seed(key)) > 0.4
                model.draw = lambda layer, keep=keep: bool(keep[layer])
            twin.backward(square, step)
            twin.step()
        twin.check()

    run_ranks(ranks, 2)


class Exiting(Tower):
    """Returns from any depth, through the head."""

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        x = self.first(x)
        for block in self.blocks[:depth]:
            x = block(x)
        return self.head(x)


@pytest.mark.filterwarnings("ignore:the forward of unit")
def test_early_exit_gathers_only_what_ran() -> None:
    """Early exit that is the same everywhere gathers only what ran."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Exiting)
        for step, depth in enumerate([3, 1, 1, 0, 0, 2, 2]):
            with count_traffic() as traffic:
                twin.backward(lambda m, x, d=depth: m(x, d).square().mean(), step)
            assert traffic.reduces == 1 + depth
            if step in (2, 4, 6):  # the order is known by now, and nothing is gathered in vain
                assert traffic.gathers == 1 + 2 * depth
            twin.step()
        twin.check()

    run_ranks(ranks, 2)


class Forked(nn.Module):
    """One unit in which each rank may use other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)
        self.never = nn.Linear(WIDTH, 2)
        self.side = 0

    def forward(self, x: Tensor) -> Tensor:
        return (self.left, self.right)[self.side](x)


def test_parameters_unused_on_some_ranks_count_as_zero() -> None:
    """Parameters that some ranks do not use count as zero there."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Forked, one_unit)
        for step in range(3):
            for r, model in [(rank, twin.model), *enumerate(twin.plain)]:
                model.side = (r + step) % 2
            twin.backward(square, step)
            assert twin.model.never.weight.grad is None
            twin.step()
        twin.check()

    run_ranks(ranks, 2)


def join(model: nn.Module, batches: list[Tensor], optim: torch.optim.Optimizer) -> int:
    """Train until every rank has run out of batches; the loss is the mean over those that have one.

    A rank that ran out keeps participating, so nobody waits for it.
    """
    steps, remaining = 0, iter(batches)
    while True:
        batch = next(remaining, None)
        active = torch.tensor(float(batch is not None))
        torch.distributed.all_reduce(active)
        if not active:
            return steps
        set_gradient_divide_factor(model, active.item())
        loss = participate(model) if batch is None else square(model, batch)
        loss.backward()
        optim.step()
        optim.zero_grad()
        steps += 1


@pytest.mark.parametrize("world", [2, 4])
def test_uneven_numbers_of_batches_that_nobody_knows(world: int) -> None:
    counts = [2, 4, 1, 0][:world]

    def ranks(rank: int) -> None:
        batches = [[data(10 * r + i, r) for i in range(n)] for r, n in enumerate(counts)]
        model, plain = by_block(seeded(Tower)), seeded(Tower)
        assert join(model, batches[rank], adamw(model.parameters())) == max(counts)
        optim = adamw(plain.parameters())
        for step in range(max(counts)):
            square(plain, torch.cat([b[step] for b in batches if step < len(b)])).backward()
            optim.step()
            optim.zero_grad()
        same(model, plain)
        assert_at_rest(model)

    run_ranks(ranks, world)


def test_a_world_without_a_process_group() -> None:
    with single_process():
        model, plain = by_block(seeded(blocks_with(low_rank))), seeded(blocks_with(low_rank))
        together(model, plain, 0, world=1)
        with torch.no_grad(), gathered(model, writeback=True):
            CHANGES["parametrize"](model.first)
        CHANGES["parametrize"](plain.first)
        refresh(model)
        together(model, plain, 0, world=1)
        kept = {"strategy": ShardingStrategy.SHARD_GRAD_OP}
        model, plain = seeded(blocks_with(change_to_packed)), seeded(blocks_with(change_to_packed))
        together(fully_shard(model, **kept), plain, 0, world=1)
