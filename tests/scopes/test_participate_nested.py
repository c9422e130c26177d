"""Ranks that skip units with units inside them join in the order in which the others run them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    Prefetch,
    ShardingStrategy,
    fully_shard,
    gathered,
    participate,
    set_debug,
    wrap,
)

from harness import simulate_ranks
from models import WIDTH, assert_at_rest, data, seeded, sgd, whole


class Residual(nn.Module):
    """Computes with what the unit inside it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Tail(Residual):
    """Returns what the unit inside it returned."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.norm(x))


class Scaled(nn.Module):
    """Two units inside, and weights that are read before and after both."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x * self.scale)) * self.scale


def build(kind: Any) -> nn.Module:
    return seeded(lambda: nn.Sequential(kind(), kind(), nn.Linear(WIDTH, 3))).double()


def shard(model: nn.Module, **options: Any) -> nn.Module:
    for layer in model[:2]:
        for part in layer.children():
            if isinstance(part, nn.Linear):
                fully_shard(part, **options)
        fully_shard(layer, **options)
    fully_shard(model[2], **options)
    return fully_shard(model, **options)


def step(model: nn.Module, ranks: range, seed: int, skips: str | None) -> None:
    """Backward of the mean loss; rank 1 skips the model, or its second layer."""
    sharded = len(ranks) == 1
    for rank in ranks:
        x = data(seed, rank)
        if skips == "all" and rank == 1:
            if sharded:
                participate(model).backward()
            continue
        for index, layer in enumerate(model):
            if skips == "layer" and rank == 1 and index == 1:
                x = participate(layer, x) if sharded else x
            else:
                x = layer(x)
        (x.square().mean() / (1 if sharded else 2)).backward()


OPTIONS: dict[str, dict[str, Any]] = {
    "ahead": {},
    "no prefetch": {"prefetch": Prefetch(0, 0, None)},
    "kept": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
}


def step_and_compare(model: nn.Module, plain: nn.Module, *optims: torch.optim.Optimizer) -> None:
    for optim in optims:
        optim.step()
    assert_at_rest(model)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(p), q.detach())


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("skips", ["all", "layer"])
@pytest.mark.parametrize("kind", [Residual, Tail, Scaled])
def test_units_in_units_are_joined_in_order(kind: Any, skips: str, options: str) -> None:
    """In a later step, and every step after it is what one process does."""

    def ranks(rank: int) -> None:
        plain, model = build(kind), shard(build(kind), **OPTIONS[options])
        ours, theirs = sgd(model.parameters()), sgd(plain.parameters())
        for seed in range(4):
            now = skips if seed in (1, 2) else None
            for optim in (ours, theirs):
                optim.zero_grad()
            if skips == "all" and (now is None or rank == 0):
                model(data(seed, rank)).square().mean().backward()
            else:
                step(model, range(rank, rank + 1), seed, now)
            step(plain, range(2), seed, now)
            step_and_compare(model, plain, ours, theirs)

    simulate_ranks(ranks, 2)


@pytest.mark.parametrize("kind", [Residual, Scaled])
def test_a_sequential_is_joined_in_the_first_step(kind: Any) -> None:
    """What it returns is what its last layer, a unit, returned: no backward has to tell."""

    def ranks(rank: int) -> None:
        model = shard(build(kind))
        for seed in range(3):
            if rank == 1 and seed == 0:
                participate(model).backward()
            else:
                model(data(seed, rank)).square().mean().backward()
            assert_at_rest(model)

    simulate_ranks(ranks, 2)


class Backwards(nn.Module):
    """Runs what is inside it in another order than it registers it in."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.last(self.first(x)))


class Expert(Backwards):
    """One with weights of its own, which a unit reads."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class Routed(nn.Module):
    """Runs some of its experts, and joins others instead of running them."""

    def __init__(self, kind: type[nn.Module], is_checkpointed: bool) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: Tensor, route: tuple[int, ...], joins: bool, hands: bool) -> Tensor:
        x = self.stem(x)
        for expert in map(self.experts.__getitem__, route):
            if not joins:
                x = x + self.run(expert, x)
            elif hands:
                x = self.run(partial(participate, expert), x)
            else:
                x = x + self.run(partial(participate, expert))
        return self.head(x)

    def run(self, function: Callable[..., Tensor], *given: Tensor) -> Tensor:
        if self.is_checkpointed:
            return checkpoint(function, *given, use_reentrant=False)
        return function(*given)


ROUTES = [((0,), False), ((1,), False), ((0,), True), ((), False), ((1,), True), ((1, 1), True)]
"""In each step, which experts are run, and whether rank 1 joins them instead."""


@pytest.mark.parametrize("hands", [True, False], ids=["x", "sum"])
@pytest.mark.parametrize(("kind", "again"), [(Expert, 0), (Expert, 1), (Backwards, 0)])
@pytest.mark.filterwarnings("ignore:the forward of unit")
def test_units_are_joined_after_another_route(kind: Any, again: int, hands: bool) -> None:
    """In the order they ran last, though the step before ran others, or none of them.

    One kind of expert is a unit itself, also where it is checkpointed, and the other a container.
    """

    def ranks(rank: int) -> None:
        set_debug(True)
        plain = seeded(lambda: Routed(kind, bool(again))).double()
        model = fully_shard(copy.deepcopy(plain), units=wrap.by_class((Expert, nn.Linear)))
        ours, theirs = sgd(model.parameters()), sgd(plain.parameters())
        for seed, (route, joins) in enumerate([*ROUTES, *ROUTES]):
            for optim in (ours, theirs):
                optim.zero_grad()
            model(data(seed, rank), route, joins and rank == 1, hands).square().mean().backward()
            for r in range(2):
                taken = () if joins and r == 1 else route
                (plain(data(seed, r), taken, False, hands).square().mean() / 2).backward()
            step_and_compare(model, plain, ours, theirs)

    simulate_ranks(ranks, 2)


class Twice(nn.Module):
    """Runs a container, which is no unit, two times in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Backwards(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, joins: bool) -> Tensor:
        for _ in range(2):
            x = x + (participate(self.block) if joins else self.block(x))
        return self.head(x)


def test_a_container_that_runs_twice_in_a_row() -> None:
    """The first call joins what both ran, and the second has a zero to hand back."""

    def ranks(rank: int) -> None:
        model = fully_shard(seeded(Twice).double(), units=wrap.by_class(nn.Linear))
        for seed in range(3):
            model(data(seed, rank), bool(seed) and rank == 1).square().mean().backward()
            assert_at_rest(model)

    simulate_ranks(ranks, 2)


def test_a_container_with_no_unit_around_it() -> None:
    """Its units are outermost each, and are joined in the order in which they ran."""

    def ranks(rank: int) -> None:
        model = seeded(Backwards).double()
        for part in (model.first, model.last):
            fully_shard(part)
        for seed in range(4):
            for _ in range(2):
                if rank == 1 and seed in (1, 2):
                    loss = participate(model)
                else:
                    loss = model(data(seed, rank)).square().mean()
                loss.backward()
            assert_at_rest(model)

    simulate_ranks(ranks, 2)


def test_a_container_that_the_last_step_left_out() -> None:
    """Its units are joined in the order in which they ran when they ran last."""

    def ranks(rank: int) -> None:
        experts = [seeded(Backwards).double() for _ in range(2)]
        for expert in experts:
            for part in (expert.first, expert.last):
                fully_shard(part)
        for seed, chosen in enumerate([0, 1, 1, 0, 1, 0]):
            if rank == 1 and seed > 2:
                loss = participate(experts[chosen])
            else:
                loss = experts[chosen](data(seed, rank)).square().mean()
            loss.backward()
            assert_at_rest(experts[chosen])

    simulate_ranks(ranks, 2)


class Quantized(nn.Module):
    """Weights that are integers, before one that is trained."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.ones(WIDTH, dtype=dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale * self.codes.abs()).square().mean()


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64], ids=str)
def test_a_zero_is_of_a_dtype_that_can_be_added(dtype: torch.dtype) -> None:
    """Whatever weights come first: integers would take no gradient, and a loss is real."""

    def ranks(rank: int) -> None:
        model = fully_shard(Quantized(dtype))
        loss = participate(model) if rank else model(data(0, rank))
        assert loss.dtype == torch.float64
        loss.backward()
        assert whole(model.scale.grad).isfinite().all()
        assert_at_rest(model)

    simulate_ranks(ranks, 2)


class Turning(Backwards):
    """Runs what is inside it in another order in an evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.first, self.last) if torch.is_grad_enabled() else (self.last, self.first)
        return torch.tanh(parts[1](parts[0](x)))


def test_an_evaluation_follows_the_one_before() -> None:
    """Not the training between, though the evaluation before this one ran other experts."""

    def ranks(rank: int) -> None:
        set_debug(True)
        model = fully_shard(seeded(lambda: Routed(Turning, False)).double(), units=by_linear)
        for seed, (route, trains) in enumerate(EVALUATIONS):
            joins = seed == len(EVALUATIONS) - 1 and rank == 1
            with torch.set_grad_enabled(trains):
                loss = model(data(seed, rank), route, joins, True).square().mean()
            if trains:
                loss.backward()
            assert_at_rest(model)

    simulate_ranks(ranks, 2)


by_linear = wrap.by_class(nn.Linear)
EVALUATIONS = [((0,), False), ((0,), True), ((1,), False), ((0,), False)]
"""In each forward, which expert is run, and whether it trains."""


@pytest.mark.parametrize("hands", [True, False], ids=["x", "none"])
def test_gradients_turned_on_in_inference_mode(hands: bool) -> None:
    """Autograd records nothing in it, so the rank that skips the unit keeps nothing either."""

    def ranks(rank: int) -> None:
        model = fully_shard(nn.Linear(WIDTH, WIDTH))
        x = torch.ones(1, WIDTH, requires_grad=True)
        with torch.inference_mode(), torch.enable_grad():
            if rank == 0:
                model(x)
            else:
                participate(model, x if hands else None)
        model(data(0, rank).float()).square().mean().backward()
        assert_at_rest(model)

    simulate_ranks(ranks, 2)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("way", ["scope", "scope of a part", "functional call"])
def test_what_a_scope_hid_is_joined(way: str, trained: bool) -> None:
    """An evaluation in a scope runs units unseen; the next ones, and training, run all again."""

    def evaluate(model: nn.Module) -> None:
        if way == "functional call":
            average = {name: whole(param) for name, param in model.named_parameters()}
            torch.func.functional_call(model, average, (data(9, 0),))
            return
        with gathered(model if way == "scope" else model[1]):
            model(data(9, 0))

    def train(rank: int) -> None:
        model, plain = shard(build(Residual)), build(Residual)
        if trained:
            model(data(0, rank)).square().mean().backward()
            model.zero_grad()
        with torch.no_grad():
            evaluate(model)
            participate(model) if rank else model(data(1, rank))
        (participate(model) if rank else model(data(2, 0)).square().mean()).backward()
        (plain(data(2, 0)).square().mean() / 2).backward()
        for (name, param), wanted in zip(model.named_parameters(), plain.parameters()):
            torch.testing.assert_close(whole(param.grad), wanted.grad, msg=name)
        assert_at_rest(model)

    simulate_ranks(train, 2)


@pytest.mark.filterwarnings("ignore:the forward of unit")  # the next one runs what was hidden
@pytest.mark.parametrize("trained", [False, True])
def test_a_container_joins_what_a_scope_hid(trained: bool) -> None:
    """It is no unit itself; a layer inside it ran with one of its two units in a scope."""

    def layers() -> nn.Module:
        linear = partial(nn.Linear, WIDTH, WIDTH)
        return nn.Sequential(*(nn.Sequential(linear(), linear()) for _ in range(3))).double()

    def train(rank: int) -> None:
        model, plain = seeded(layers), seeded(layers)
        for layer in model:
            fully_shard(layer, units=wrap.by_class(nn.Linear))
        if trained:
            model(data(0, rank)).square().mean().backward()
        with gathered(model[1][0]):
            model(data(1, rank)).square().mean().backward()
        model.zero_grad()
        (participate(model) if rank else model(data(2, 0)).square().mean()).backward()
        (plain(data(2, 0)).square().mean() / 2).backward()
        for (name, param), wanted in zip(model.named_parameters(), plain.parameters()):
            torch.testing.assert_close(whole(param.grad), wanted.grad, msg=name)

    simulate_ranks(train, 2)
