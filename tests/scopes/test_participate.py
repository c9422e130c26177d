"""Ranks that skip units join what the others communicate for them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    MixedPrecision,
    Prefetch,
    ShardingStrategy,
    fully_shard,
    gathered,
    no_sync,
    pending_gradients,
    set_debug,
    wrap,
)
from fsdp_compose.scopes.participate import participate

from harness import rank_errors, run_ranks, single_process
from models import (
    Block,
    Tolerance,
    Tower,
    Twin,
    assert_at_rest,
    by_block,
    compare,
    data,
    nested,
    seeded,
    sgd,
    square,
    units,
    whole,
)


class Routed(Tower):
    """Each rank runs some of the blocks and skips the rest."""

    form = "x"
    reentrant: bool | None = None  # None: no checkpointing

    def forward(self, x: Tensor, mine: tuple[int, ...] = ()) -> Tensor:
        x = self.first(x)
        zero: Any = 0.0
        for index, block in enumerate(self.blocks):
            sharded = bool(units(block))
            if index in mine:
                x = self.run(block, x)
            elif sharded and self.form == "x":
                x = self.run(lambda y, b=block: participate(b, y), x)
            elif sharded:
                zero = zero + participate(block)
        return self.head(x) + zero

    def run(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.reentrant is None:
            return function(x)
        return checkpoint(function, x, use_reentrant=self.reentrant)


class RoutedSum(Routed):
    form = "sum"


class RoutedCheckpoint(Routed):
    reentrant = False


class RoutedReentrant(Routed):
    reentrant = True


def branch(rank: int, world: int) -> tuple[int, ...]:
    """Rank r runs the blocks whose number is r modulo 2."""
    return tuple(i for i in range(3) if i % 2 == rank % 2)


def depth(rank: int, world: int) -> tuple[int, ...]:
    """Rank r stops after r blocks."""
    return tuple(range(min(rank, 3)))


class RoutedTwin(Twin):
    """Beside the plain model, whose replicas skip without a word."""

    route: Callable[[int, int], tuple[int, ...]] = staticmethod(branch)

    def losses(self, forward: Any, seed: int, *shape: int) -> tuple[Tensor, Tensor]:
        xs = self.inputs(seed, *shape)
        loss = self.model(xs[self.rank], self.route(self.rank, self.world)).square().mean()
        plain = [
            m(x, self.route(r, self.world)).square().mean()
            for r, (m, x) in enumerate(zip(self.plain, xs))
        ]
        compare("loss", loss.detach().double(), plain[self.rank].detach(), self.tolerance)
        return loss, torch.stack(plain).mean()


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "grad_op": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "no_shard": {"strategy": ShardingStrategy.NO_SHARD},
    "no prefetch": {"prefetch": Prefetch(forward=0, backward=0)},
    "deep prefetch": {"prefetch": Prefetch(forward=2, backward=2)},
}


def trains(rank: int, world: int, build: Any, options: dict[str, Any], route: Any) -> None:
    set_debug(True)
    for shard in (by_block, nested):
        twin = RoutedTwin(rank, world, build, lambda m, s=shard: s(m, **options))
        twin.route = route
        twin.train(steps=3)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_ranks_run_different_branches(options: dict[str, Any], world: int) -> None:
    run_ranks(trains, world, world, lambda: Routed(3), options, branch)


@pytest.mark.parametrize("build", [RoutedSum, RoutedCheckpoint, RoutedReentrant])
@pytest.mark.parametrize("options", [OPTIONS["full"], OPTIONS["no prefetch"]])
def test_other_forms_and_checkpointing(build: Any, options: dict[str, Any]) -> None:
    run_ranks(trains, 2, 2, lambda: build(3), options, branch)


@pytest.mark.parametrize("world", [2, 4])
def test_early_exit(world: int) -> None:
    run_ranks(trains, world, world, lambda: Routed(3), {}, depth)
    run_ranks(trains, world, world, lambda: RoutedSum(3), {}, depth)


def accumulates(rank: int) -> None:
    twin = RoutedTwin(rank, 2, lambda: Routed(3))
    for step in range(2):
        with no_sync(twin.model):
            twin.backward(square, 3 * step)
        twin.backward(square, 3 * step + 1)
        twin.backward(square, 3 * step + 2)
        twin.step()
    twin.check()


def test_accumulation() -> None:
    run_ranks(accumulates, 2)
    model = fully_shard(nn.Linear(2, 2))
    with no_sync(model):  # others may have used any of its parameters
        participate(model).backward()
    assert [*pending_gradients(model)] == [*model.parameters()]
    with pytest.raises(RuntimeError, match="was accumulated without synchronisation"):
        _ = model.bias.grad.norm()


def mixed(rank: int) -> None:
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    tolerance = Tolerance(rtol=0.1, atol=0.02)

    def shard(model: nn.Module) -> nn.Module:
        return by_block(model, mp_policy=policy)

    twin = RoutedTwin(rank, 2, lambda: Routed(3), shard, tolerance=tolerance)
    twin.train()
    x = data(0, rank)
    out = participate(twin.model.blocks[0], x)
    assert out.dtype == torch.bfloat16
    assert participate(twin.model.blocks[0]).dtype == torch.bfloat16


def test_mixed_precision() -> None:
    run_ranks(mixed, 2)


def uneven(rank: int, world: int, shard: Any) -> None:
    """Rank r has r + 1 batches; the others of a step participate in the whole of it."""
    set_debug(True)
    model, plain = shard(seeded(Tower)), seeded(Tower)
    optim, plain_optim = sgd(model.parameters()), sgd(plain.parameters())
    for step in range(world):
        if rank >= step:
            loss = square(model, data(step, rank))
        else:
            loss = participate(model)
            assert loss.item() == 0.0
        loss.backward()
        assert_at_rest(model)
        terms = [square(plain, data(step, r)) for r in range(step, world)]
        (sum(terms) / world).backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters()):
            compare(name, whole(p.grad), q.grad, Tolerance())
        for o in (optim, plain_optim):
            o.step()
            o.zero_grad()
    with torch.no_grad():
        if rank:
            model(data(9, rank))
        else:
            assert participate(model).item() == 0.0
    assert_at_rest(model)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("shard", [by_block, nested])
def test_uneven_numbers_of_batches(world: int, shard: Any) -> None:
    run_ranks(uneven, world, world, shard)


class Backwards(Tower):
    """Runs its blocks in the reverse of their order, the first of them twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in [*reversed(self.blocks), self.blocks[-1]]:
            x = block(x)
        return self.head(x)


def recorded(rank: int) -> None:
    set_debug(True)
    twin = Twin(rank, 2, Backwards)
    twin.train()
    for step in range(3):
        if rank == step % 2:
            loss = square(twin.model, data(step, rank))
        else:
            loss = participate(twin.model)
        loss.backward()
        (square(twin.reference, data(step, step % 2)) / 2).backward()
        twin.step()
    twin.check()


def test_nested_units_are_joined_in_order() -> None:
    """Nested units are joined in the order in which they ran."""
    run_ranks(recorded, 2)


class Pair(nn.Module):
    """A unit with units inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner:
            x = block(x)
        return x * self.scale


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.pairs = nn.ModuleList(Pair() for _ in range(2))

    def forward(self, x: Tensor, mine: tuple[int, ...] = (0, 1)) -> Tensor:
        x = self.first(x)
        for i, pair in enumerate(self.pairs):
            if i in mine:
                x = pair(x)
            elif units(self):
                x = participate(pair, x)
        return x


def shard_deep(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module)
    for module in model.modules():
        if isinstance(module, Pair):
            fully_shard(module)
    return fully_shard(model)


def deep(rank: int) -> None:
    set_debug(True)
    twin = RoutedTwin(rank, 2, Deep, shard_deep)
    twin.route = lambda r, w: (r,)
    twin.train()


def test_units_inside_units() -> None:
    run_ranks(deep, 2)


def frozen(rank: int) -> None:
    """Adapters train in some units, others only pass gradients on."""

    def build() -> nn.Module:
        model = Routed(3)
        model.blocks[1].requires_grad_(False)
        model.blocks[2].norm.requires_grad_(False)
        return model

    set_debug(True)
    twin = RoutedTwin(rank, 2, build)
    twin.train()


def test_frozen_units() -> None:
    run_ranks(frozen, 2)


def asked(rank: int) -> None:
    """autograd.grad gives every rank its part of the average."""
    model, plain = by_block(seeded(lambda: Routed(2))), seeded(lambda: Routed(2))
    mine = lambda r: (r,)  # noqa: E731
    loss = model(data(0, rank), mine(rank)).square().mean()
    found = torch.autograd.grad(loss, list(model.parameters()))
    terms = [plain(data(0, r), mine(r)).square().mean() for r in range(2)]
    wanted = torch.autograd.grad(sum(terms) / 2, list(plain.parameters()))
    for (name, _), f, w in zip(plain.named_parameters(), found, wanted):
        compare(name, whole(f), w, Tolerance())


def test_autograd_grad() -> None:
    run_ranks(asked, 2)


def twice_differentiated(rank: int) -> None:
    model = by_block(seeded(lambda: Routed(2)))
    model(data(0, rank), (0,)).sum().backward(create_graph=True)


def test_a_graph_over_the_backward_is_refused() -> None:
    for error in rank_errors(twice_differentiated, 2):
        assert "participate()" in str(error) and "create_graph" in str(error)


def out_of_place(rank: int) -> None:
    set_debug(True)
    model = by_block(seeded(Tower))
    x = model.blocks[0](data(0, rank))
    if rank:
        participate(model.blocks[1], x)
    else:
        model.blocks[2](x)


def test_the_wrong_place_is_an_error_that_names_both() -> None:
    for error in rank_errors(out_of_place, 2):
        assert "blocks.1" in str(error) and "blocks.2" in str(error)


def test_a_result_that_is_dropped_is_told() -> None:
    """A backward that does not reach what participate returned leaves its reduction out."""

    def ranks(rank: int) -> None:
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        for layer in model:
            fully_shard(layer)
        x = model[0](data(0, rank, 3, 4))
        if rank:
            participate(model[1])
        else:
            x = model[1](x)
        x.sum().backward()

    for error in rank_errors(ranks, 2):
        assert error is not None and "run x = fsdp_compose.participate(unit, x)" in error
        assert "have the loss depend on what that returns" in error


def test_other_numbers_of_calls_are_for_a_scope() -> None:
    """A loop that ends by rank, as one that halts by itself; the error names what runs it."""

    def loop(model: nn.Module, rank: int) -> Tensor:
        x = data(0, rank, 3, 4)
        with torch.no_grad():
            for _ in range(2 - rank):
                x = model(x).tanh()
        for _ in range(1 + rank):
            x = model(x).tanh()
        return x.square().mean()

    def layers() -> nn.Module:
        return seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))

    def ranks(rank: int, scope: bool) -> None:
        model = fully_shard(layers(), units=wrap.by_class(nn.Linear))
        with gathered(model) if scope else nullcontext():
            loop(model, rank).backward()
        plain = layers()
        ((loop(plain, 0) + loop(plain, 1)) / 2).backward()
        for param, wanted in zip(model.parameters(), plain.parameters()):
            compare("gradient", whole(param.grad), wanted.grad, Tolerance())

    run_ranks(ranks, 2, scope=True)
    for error in rank_errors(ranks, 2, scope=False):
        assert error is not None and "ranks run different units" in error
        assert "with fsdp_compose.gathered(model):`, which every rank enters" in error


def test_wrong_arguments() -> None:
    with single_process():
        with pytest.raises(ValueError, match="is not a unit and contains none"):
            participate(nn.Linear(2, 2))
        model = by_block(seeded(Tower))
        with pytest.raises(TypeError, match=r"torch.int64; wanted a floating-point"):
            participate(model, torch.ones(2, dtype=torch.int64))
        with pytest.raises(TypeError, match="list; wanted"):
            participate(model, [1])  # type: ignore[arg-type]
        x = data(0, 0)
        out = participate(model, x)
        assert torch.equal(out, x)
        out.sum().backward()
        assert_at_rest(model)
        participate(model.blocks, x).sum().backward()
        assert_at_rest(model)
