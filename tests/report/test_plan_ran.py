"""A plan of a module that has run knows in which order, and what backward reached."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    Prefetch,
    ShardingStrategy,
    fully_shard,
    set_backward_prefetch,
    set_forward_prefetch,
    set_reshard_after_backward,
    wrap,
)
from fsdp_compose.report import Plan, count_traffic, plan

from harness import fake_world
from models import Block, Ledger, seeded, units

WIDTH = 128
SAMPLE = torch.ones(1, WIDTH)


class Adapted(nn.Module):
    """Frozen blocks, and adapters in a list of their own, which run between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH, 2 * WIDTH) for _ in range(4))
        self.adapters = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)) for _ in range(4)
        )
        self.blocks.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block, adapter in zip(self.blocks, self.adapters, strict=True):
            x = block(x)
            x = x + adapter(x)
        return x


class Looped(nn.Module):
    """Runs its blocks in a loop, or each several times at once; some of them frozen."""

    def __init__(self, *frozen: int, times: int = 2, at_once: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 2 * WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.loops = (1, times) if at_once else (times, 1)
        for index in frozen:
            self.blocks[index].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x, (outer, inner) = self.first(x), self.loops
        for block in [b for _ in range(outer) for b in self.blocks for _ in range(inner)]:
            x = block(x)
        return self.head(x)


class Pair(nn.Module):
    """Calls a unit twice, with another between, and something of its own behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.a, self.b = Block(WIDTH, 2 * WIDTH), Block(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.a(self.b(self.a(x))))


class Pairs(Looped):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(2))


class Regions(nn.Module):
    """Runs so many blocks in each checkpointed region, between two layers where it has them."""

    def __init__(self, reentrant: bool, size: int, ends: bool = True, times: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH) if ends else nn.Identity()
        self.blocks = nn.ModuleList(Block(WIDTH, 2 * WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH) if ends else nn.Identity()
        self.reentrant, self.size, self.times = reentrant, size, times

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.clone().requires_grad_())
        for start in [*range(0, 4, self.size)] * self.times:
            region = nn.Sequential(*self.blocks[start : start + self.size])
            x = checkpoint(region, x, use_reentrant=self.reentrant)
        return self.head(x)


def measure(model: nn.Module) -> tuple[Ledger, Ledger, Any]:
    """Memory of a steady forward and backward, without shards, and the traffic of both."""
    x = torch.ones(1, WIDTH)
    for _ in range(3):
        with count_traffic() as traffic:
            shards = [param.to_local() for param in model.parameters()]
            with Ledger(x, *shards) as forward:
                loss = model(x).square().mean()
            with Ledger(x, *shards) as backward:
                backward.storages = forward.storages
                loss.backward()
        model.zero_grad()
        del loss
    return forward, backward, traffic


def check(found: Plan, forward: Ledger, backward: Ledger, traffic: Any, early: int = 0) -> None:
    """Args: early: bytes of gradients that the plan takes to be made too early."""
    activations = 100 * WIDTH  # one row
    for measured, planned in (
        (forward.peak, found.memory.forward.total),
        (backward.peak, found.memory.backward.total),
    ):
        assert planned <= 1.02 * measured + early and measured <= 1.02 * planned + activations
    step = found.step
    assert (step.gathers, step.gather_bytes) == (traffic.gathers, traffic.gather_bytes)
    assert (step.reduces, step.reduce_bytes) == (traffic.reduces, traffic.reduce_bytes)


OPTIONS: dict[str, dict[str, Any]] = {
    "released": {},
    "kept": {"reshard_after_forward": False},
    "gathered ahead by two": {"prefetch": Prefetch(2, 2)},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("classes", [{Block, nn.Sequential}, {Block}], ids=["units", "outside"])
def test_adapters_in_a_list_of_their_own(classes: set[type], options: str) -> None:
    """Units, or parts of the outermost one: backward reaches the blocks behind the first.

    When the outermost unit reads which of its parameters is not known.
    """
    with fake_world(8):
        model = seeded(Adapted).float()
        fully_shard(model, units=wrap.by_class(classes), **OPTIONS[options])
        before = plan(model).memory.backward.total
        run = measure(model)
        early = sum(p.numel() * 4 for p in model.adapters.parameters()) if classes == {Block} else 0
        check(plan(model), *run, early)
        assert plan(model).memory.backward.total > 4 * before


def test_a_forward_is_enough_for_units() -> None:
    with fake_world(8):
        model = seeded(Adapted).float()
        fully_shard(model, units=wrap.by_class({Block, nn.Sequential}))
        model(torch.ones(1, WIDTH))
        found = plan(model).memory
        run = measure(model)
        assert found == plan(model).memory
        check(plan(model), *run)


class Backwards(nn.Module):
    """Runs its blocks in the other order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [2, 8, 1, 4]
        self.blocks = nn.ModuleList(Block(WIDTH, size * WIDTH) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


def test_units_in_another_order_than_registered() -> None:
    with fake_world(8):
        model = seeded(Backwards).float()
        fully_shard(model, units=wrap.by_class({Block}))
        check(plan(model), *measure(model))


def test_what_trains_was_changed_since() -> None:
    """What backward reached before says nothing then, the order of the units does."""
    with fake_world(8):
        model = seeded(Adapted).float()
        fully_shard(model, units=wrap.by_class({Block, nn.Sequential}))
        measure(model)
        model.requires_grad_(True)
        model.adapters[:3].requires_grad_(False)
        model.blocks[:3].requires_grad_(False)
        planned = plan(model).memory
        run = measure(model)
        assert planned == plan(model).memory
        check(plan(model), *run)
        assert not any(unit.holds for unit in units(model))


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
def test_units_that_stay_gathered_over_steps(strategy: ShardingStrategy) -> None:
    """What was stepped is gathered again, and frozen weights are not."""
    with fake_world(8):
        model = seeded(Adapted).float()
        fully_shard(model, units=wrap.by_class({Block, nn.Sequential}), strategy=strategy)
        set_reshard_after_backward(model, False)
        optim = torch.optim.SGD(model.adapters.parameters(), lr=0.1)
        for _ in range(3):
            with count_traffic() as traffic:
                model(torch.ones(1, WIDTH)).sum().backward()
            optim.step()
            optim.zero_grad()
        step = plan(model).step
        assert (step.gathers, step.gather_bytes) == (traffic.gathers, traffic.gather_bytes)


def test_units_that_are_listed_to_be_gathered_ahead() -> None:
    with fake_world(8):
        model = seeded(Adapted).float()
        fully_shard(model, units=wrap.by_class({Block, nn.Sequential}))
        before = plan(model).memory
        set_forward_prefetch(model.blocks[0], [*model.blocks[1:]])
        set_backward_prefetch(model.blocks[3], [*model.blocks[:3]])
        run = measure(model)
        found = plan(model)
        check(found, *run)
        assert found.memory.forward.total == 2 * before.forward.total


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "build",
    [
        Looped,
        lambda: Looped(1),
        lambda: Looped(0, 2, times=3),
        lambda: Looped(at_once=True),
        lambda: Looped(at_once=True, times=3),
        Pairs,
    ],
    ids=["loop", "frozen", "frozen ends", "at once", "at once, three times", "nested"],
)
def test_units_that_run_several_times(build: Any, options: str) -> None:
    """Their gradients wait for those of the first call, and are added to in memory of their own."""
    with fake_world(8):
        model = seeded(build).float()
        chosen: dict[str, Any] = {"units": wrap.by_class({Block, Pair}), **OPTIONS[options]}
        before = plan(model, sample=SAMPLE, **chosen)
        run = measure(fully_shard(model, **chosen))
        check(plan(model), *run)
        assert (before.memory, before.step) == (plan(model).memory, plan(model).step)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("ends", [True, False], ids=["ends", "bare"])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_checkpointed_regions(reentrant: bool, size: int, ends: bool, options: str) -> None:
    """All units of a region are gathered; the reductions of a reentrant one end with it."""
    with fake_world(8):
        model = seeded(lambda: Regions(reentrant, size, ends)).float()
        chosen: dict[str, Any] = {"units": wrap.by_class({Block}), **OPTIONS[options]}
        before = plan(model, sample=SAMPLE, **chosen)
        run = measure(fully_shard(model, **chosen))
        check(plan(model), *run)
        assert (before.memory, before.step) == (plan(model).memory, plan(model).step)


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_checkpointed_regions_that_run_twice(reentrant: bool) -> None:
    """A reentrant one reduces the gradients of each call, another those of both together."""
    with fake_world(8):
        model = seeded(lambda: Regions(reentrant, 2, times=2)).float()
        before = plan(model, sample=SAMPLE, units=wrap.by_class({Block}))
        fully_shard(model, units=wrap.by_class({Block}))
        run = measure(model)
        assert (before.memory, before.step) == (plan(model).memory, plan(model).step)
        check(plan(model), *run)
        assert plan(model).step.reduces == (9 if reentrant else 5)


def test_forwards_without_a_backward_are_one_step() -> None:
    """What ran in several outermost forwards is planned as in one of them."""
    with fake_world(8):
        model = seeded(Looped).float()
        fully_shard(model, units=wrap.by_class({Block}))
        model(torch.ones(1, WIDTH))
        found = plan(model).memory
        model(torch.ones(1, WIDTH))
        assert plan(model).memory == found


class Outer(nn.Module):
    """A unit that returns what the unit inside it returned, which its class does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.own = Block(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.own(x))


def build_outer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Outer() for _ in range(3)))


@pytest.mark.parametrize("build", [Adapted, Backwards, build_outer])
def test_a_sample_shows_what_a_step_would(build: Any) -> None:
    """In which order units run, and which backward reaches, before any of them has run."""
    chosen = {"units": wrap.by_class({Block, Outer})}
    with fake_world(8):
        model = seeded(build).float()
        before = plan(model, sample=SAMPLE, **chosen)
        bare = plan(model, **chosen)
        run = measure(fully_shard(model, **chosen))
        found = plan(model)
        assert (before.memory, before.step) == (found.memory, found.step)
        assert before.moments == found.moments != bare.moments
        early = sum(p.numel() * 4 for p in model.adapters.parameters()) if build is Adapted else 0
        check(before, *run, early)


def test_a_sample_serves_the_advice() -> None:
    """What is advised is planned with the order and the checkpoints that the sample shows."""
    with torch.device("meta"):
        model = Regions(False, 4)
    chosen: dict[str, Any] = {"world_size": 8, "sample": SAMPLE}
    whole, split = (plan(model, units=u, **chosen) for u in (None, wrap.by_class({Block})))
    advice = next(a for a in whole.advice if "by_class" in a.paste)
    assert advice.saved_bytes == whole.needed - split.needed
