"""Backwards that begin elsewhere than at a unit's first output: a later one, or what was kept."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from fsdp_compose import MixedPrecision, count_traffic, fully_shard, wrap
from fsdp_compose.core.guards.kept_tensors import KEPT

from harness import fake_world, run_ranks, simulate_ranks, single_process
from models import WIDTH, Tower, assert_at_rest, by_block, data, seeded, square, units, whole

RELEASED = {"reshard_after_forward": True}


class Forked(nn.Linear):
    """Gives two tensors, neither of which comes of the other."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), super().forward(torch.sin(x))


def test_a_backward_from_a_later_output() -> None:
    """Also after backwards that came by the first alone."""

    def ranks(rank: int) -> None:
        plain = seeded(lambda: Forked(WIDTH, WIDTH))
        model = fully_shard(copy.deepcopy(plain), **RELEASED)
        for step in range(3):
            first, second = model(data(step, rank))
            first.sum().backward()
            del first, second
        model.zero_grad()
        model(data(3, rank))[1].square().sum().backward()
        for r in range(2):
            (plain(data(3, r))[1].square().sum() / 2).backward()
        for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(whole(found.grad), wanted.grad)
        assert_at_rest(model)

    simulate_ranks(ranks)


class Branch(nn.Module):
    """Keeps in an attribute what leads to no output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kept: Tensor | None = None
        self.keeps_weight = False

    def forward(self, x: Tensor) -> Tensor:
        self.kept = torch.sin(self.last(torch.tanh(self.last(x))))
        if self.keeps_weight:
            self.kept = self.last.weight
        return self.first(x)


def test_an_attribute_is_no_slow_way(caplog: pytest.LogCaptureFixture) -> None:
    """The first backward that begins at what an attribute keeps is as usual, and logs nothing."""

    def ranks(rank: int) -> None:
        model = fully_shard(seeded(Branch), **RELEASED)
        model(data(0, rank))
        model.kept.square().mean().backward()
        assert model.last.weight.grad is not None

    with caplog.at_level("WARNING", "fsdp_compose"):
        simulate_ranks(ranks)
    assert not caplog.records


class Caching(nn.Module):
    """Passes on a tensor in a list, if it was given one."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        key = torch.tanh(self.key(x)).mul(2)
        if cache is not None:
            cache.append(key)
        return self.out(x)


def test_backward_looks_for_weights_of_each_dtype() -> None:
    """The first are the shard itself, the second were released."""
    with single_process():
        model = Caching()
        model.key.double()
        policy = MixedPrecision(param_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(model, mp_policy=policy, **RELEASED)
        assert [bucket.in_place for bucket in units(model)[0].gathered] == [True, False]
        for _ in range(3):
            model(torch.ones(1, WIDTH)).sum().backward()
        units(model)[0].checks.warned.clear()  # a tensor of another test may look like a kept one
        cache: list[Tensor] = []
        model(torch.ones(1, WIDTH), cache)
        with pytest.raises(RuntimeError, match="computed with weights of unit 'Caching'"):
            cache[0].sum().backward()


def test_an_attribute_that_held_a_weight_first() -> None:
    """A later backward may begin at what it holds then."""

    def ranks(rank: int) -> None:
        plain = seeded(Branch)
        model = fully_shard(copy.deepcopy(plain), **RELEASED)
        model.keeps_weight = True
        model(data(0, rank)).sum().backward()
        model.keeps_weight = False
        model.zero_grad()
        model(data(1, rank))
        model.kept.square().mean().backward()
        for r in range(2):
            plain(data(1, r))
            (plain.kept.square().mean() / 2).backward()  # type: ignore[operator, union-attr]
        assert_close(whole(model.last.weight.grad), plain.last.weight.grad)

    simulate_ranks(ranks)


class Taking(nn.Linear):
    """Keeps its inputs in a list."""

    def __init__(self, taken: list[Tensor]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.take = taken.append

    def forward(self, x: Tensor) -> Tensor:
        self.take(x)
        return super().forward(x)


def test_a_backward_from_inputs_of_a_frozen_unit() -> None:
    """It needs no weight of that unit, which is not gathered."""
    taken: list[Tensor] = []
    with fake_world(2):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Taking(taken).requires_grad_(False))
        fully_shard(model[1], **RELEASED)
        fully_shard(model)
        for _ in range(2):  # the first learns where backwards begin
            model(torch.ones(1, WIDTH))
            with count_traffic() as traffic:
                taken.pop().sum().backward()
        assert traffic.gathers == 0
        assert model[0].weight.grad is not None


class Solved(torch.autograd.Function):
    """A layer whose backward runs it again, and a backward over that."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor, *params: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, *params)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, *params = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            found = torch.autograd.grad(torch.tanh(ctx.layer(x)), (x, *params), grad)
        return None, *found


class Solving(nn.Module):
    """Calls a layer of its own unit through ``Solved``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Solved.apply(self.layer, self.first(x), *self.layer.parameters())


@pytest.mark.parametrize("kind", [Tower, Solving])
def test_graphs_over_a_backward_keep_no_tensor(
    kind: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    """A gradient penalty, or a backward inside one, enters units without outputs being reached."""

    def ranks(rank: int) -> None:
        model = seeded(kind)
        model = (by_block if kind is Tower else fully_shard)(model, **RELEASED)
        for step in range(4):
            x = data(step, rank).requires_grad_()
            loss = square(model, x)
            if step and kind is Tower:
                (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
                loss = grad.square().sum()
            loss.backward()
        assert all(KEPT not in unit.checks.warned for unit in units(model))

    with caplog.at_level("WARNING", "fsdp_compose"):
        simulate_ranks(ranks)
    assert not caplog.records


def test_a_tensor_in_a_list_is_said_to_be_kept(caplog: pytest.LogCaptureFixture) -> None:
    """Once for the unit, where a backward begins at it, which nothing else had gathered."""

    def ranks(rank: int) -> None:
        model, cache = fully_shard(seeded(Caching), **RELEASED), list[Tensor]()
        for step in range(3):
            model(data(step, rank), cache)
            cache.pop().sum().backward()
        assert [KEPT in unit.checks.warned for unit in units(model)] == [True]

    with caplog.at_level("WARNING", "fsdp_compose"):
        simulate_ranks(ranks)
    assert ["kept outside the attributes" in r.message for r in caplog.records] == [True] * 2


LOSSES: list[Tensor] = []


class Mixture(nn.Module):
    """Appends a loss of its own to a global list, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        LOSSES.append(gates.square().mean() + self.gate.weight.square().sum())
        return x + torch.tanh(self.up(x)) * gates[..., :1]


class Mixed(nn.Module):
    """Two mixtures, and a head that belongs to the unit around them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixture() for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train_mixtures(model: nn.Module, batches: Any, steps: Sequence[str]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    params = list(model.parameters())
    for step, way in enumerate(steps):
        LOSSES.clear()
        main: Any = sum(square(model, batch) / len(batches(step)) for batch in batches(step))
        aside: Any = sum(LOSSES) / len(batches(step))
        if way == "together":
            (main + aside).backward()
        elif way == "main":
            main.backward()
        elif way == "aside":
            aside.backward()
        elif way == "main first":
            main.backward(retain_graph=True)
            aside.backward()
        elif way == "aside first":
            aside.backward(retain_graph=True)
            main.backward()
        else:
            found = [
                torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
                for loss in (aside, main)
            ]
            for p, *grads in zip(params, *found, strict=True):
                p.grad = sum(grad for grad in grads if grad is not None)
        optimizer.step()
        optimizer.zero_grad()


WAYS = ("aside", "aside first", "main first", "apart")


@pytest.mark.parametrize("before", ["together", "main"])
def test_losses_in_a_list_from_the_second_step_on(before: str) -> None:
    """Every forward keeps such losses; that a backward begins at one comes later."""

    def ranks(rank: int) -> None:
        for way in WAYS:
            plain, steps = seeded(Mixed), (before, way, before, way)
            train_mixtures(plain, lambda step: [data(step, r) for r in range(2)], steps)
            model = fully_shard(seeded(Mixed), units=wrap.by_class(Mixture))
            train_mixtures(model, lambda step: [data(step, rank)], steps)
            for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                assert_close(whole(found), wanted.detach())

    run_ranks(ranks)


def test_units_are_gone_through_in_one_order() -> None:
    """Not by their addresses: hooks and gathers that follow it are the same on every rank."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(40)))
    with single_process():
        fully_shard(model, units=wrap.by_class(nn.Linear), mesh="self")
        engine = units(model)[0].engine
        mine = [unit for unit in engine.units if unit in units(model)]
        assert [unit.name for unit in mine] == [*map(str, range(40)), "Sequential"]
        for unit in reversed(mine):
            engine.inspected.add(unit)
        engine.inspected.discard(mine[7])
        assert list(engine.inspected) == [u for u in reversed(mine) if u is not mine[7]]
        engine.inspected.clear()
