"""Reentrant checkpoints inside a unit's forward: one reduction, once backward is past the unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_compose as fc
from fsdp_compose import MixedPrecision, ShardingStrategy
from fsdp_compose.base.process import here
from fsdp_compose.core.state import Unit, iter_units

from harness import cell, simulate_ranks

# Of a checkpoint inside another, which runs without gradients at first.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

WIDTH = 6
again = partial(checkpoint, use_reentrant=True)


class Part(nn.Module):
    """A unit that recomputes parts of its own forward."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.mid, self.down = nn.Linear(2 * WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(3))

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.mid(self.up(self.norm(x))))

    def inside(self, x: Tensor) -> Tensor:
        return x + self.down(self.hidden(x))

    def forward(self, x: Tensor) -> Tensor:
        return WAYS[self.way](self, x)


def nest(part: Part, x: Tensor) -> Tensor:
    return x + again(part.down, again(part.hidden, x))


WAYS: dict[str, Callable[[Part, Tensor], Tensor]] = {
    "whole": lambda part, x: again(part.inside, x),
    "halves": nest,
    "not the first": lambda part, x: x + part.down(again(part.mid, part.up(part.norm(x)))),
    "not the last": lambda part, x: x + part.down(again(part.hidden, x)),
    "one inside another": lambda part, x: again(partial(nest, part), x),
    "inside and outside": lambda part, x: x + part.down(again(part.mid, part.mid(part.up(x)))),
    "the same twice": lambda part, x: x + part.down(again(part.mid, again(part.mid, part.up(x)))),
    "all twice": lambda part, x: again(part.inside, again(part.inside, x)),
    "none": lambda part, x: part.inside(x),
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, way: str, order: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__()
        self.words, self.order = nn.Embedding(8, WIDTH), order
        self.parts: Any = nn.ModuleList(Part(way) for _ in range(max(order) + 1))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for place in self.order:
            x = self.parts[place](x)
        return again(self.head, x) if self.parts[0].way == "whole" else self.head(x)


def both(way: str, order: tuple[int, ...] = (0, 1, 2), **options: Any) -> tuple[Net, Net]:
    """A sharded model and the same one whole."""
    torch.manual_seed(0)
    model, plain = Net(way, order), Net(way, order)
    plain.load_state_dict(model.state_dict())
    return fc.fully_shard(model, units=fc.wrap.by_class(Part), **options), plain


def words(rank: int, step: int) -> Tensor:
    return torch.randint(8, (5,), generator=torch.Generator().manual_seed(10 * step + rank))


def units_of(model: nn.Module) -> Iterator[Unit]:
    return iter(dict.fromkeys(iter_units(model)))


def train(model: Net, plain: Net, rank: int, steps: int = 2, microbatches: int = 1) -> list[int]:
    """Steps of SGD, equal to the whole model's on the data of all ranks; reductions of each."""
    sides = [(model, [rank]), (plain, [0, 1])]
    stepped = [torch.optim.SGD(side.parameters(), lr=0.3) for side, _ in sides]
    counts: list[int] = []
    for step in range(steps):
        before = here.traffic.reduces
        for side, ranks in sides:
            for micro in range(microbatches):
                last = micro == microbatches - 1
                fc.set_requires_gradient_sync(model, last)
                place = microbatches * step + micro
                loss = [side(words(r, place)).square().mean() for r in ranks]
                (sum(loss) / len(ranks)).backward()  # type: ignore[union-attr]
            if side is model:
                counts.append(here.traffic.reduces - before)
        for optimizer in stepped:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in fc.state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)
    return counts


OPTIONS: dict[str, dict[str, Any]] = {
    "released": {},
    "kept": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "static": {"static_buffers": True},
    "copies": {"strategy": ShardingStrategy.NO_SHARD},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_unit_is_reduced_once(way: str) -> None:
    """Whatever its checkpoints bring and in how many parts, as without any."""

    def program(rank: int) -> None:
        for name, options in OPTIONS.items():
            for microbatches in (1, 2) if name == "released" else (1,):
                with cell(name, microbatches):
                    found = train(*both(way, **options), rank, microbatches=microbatches)
                    assert found == [0 if name == "copies" else 4] * 2

    simulate_ranks(program)


@pytest.mark.parametrize("way", WAYS)
def test_the_weights_are_released_behind_the_unit(way: str) -> None:
    """As backward is past what made the unit's input, nothing of it is gathered or packed."""

    def program(rank: int) -> None:
        model, _ = both(way)
        told: list[int] = []

        def entered(place: int, module: nn.Module, args: Any) -> None:
            if args[0].requires_grad and args[0].grad_fn is not None:
                args[0].grad_fn.register_hook(partial(look, place))

        def look(place: int, *grads: Any) -> None:
            told.append(place)
            unit = next(units_of(model.parts[place]))
            assert not unit.holds and not unit.buckets[0].arriving.packed, place

        for place, part in enumerate(model.parts):
            part.register_forward_pre_hook(partial(entered, place))
        for step in range(2):  # the first of which knows no more than the second
            told.clear()
            model(words(rank, step)).square().mean().backward()
            assert told[-1] == 0 and set(told) == {0, 1, 2}

    simulate_ranks(program)


def test_hooks_get_the_sum_of_all_parts() -> None:
    """Of a parameter that two checkpoints read, once in each backward."""

    def program(rank: int) -> None:
        model, plain = both("the same twice")
        got: dict[str, list[Tensor]] = {"sharded": [], "plain": []}
        for name, side in (("sharded", model), ("plain", plain)):
            for part in side.parts:
                weight = part.mid.weight
                weight.register_post_accumulate_grad_hook(lambda p, n=name: got[n].append(p.grad))
            side(words(0, 0)).square().mean().backward()
        assert len(got["sharded"]) == len(model.parts)
        for mine, whole in zip(got["sharded"], got["plain"][1::2], strict=True):
            torch.testing.assert_close(mine.full_tensor(), whole)  # type: ignore[attr-defined]

    simulate_ranks(program)


def test_a_unit_called_again_behind_others() -> None:
    """Its calls' gradients add up, and the ranks reduce as often."""

    def program(rank: int) -> None:
        for way in WAYS:
            for name in ("released", "kept"):
                with cell(way, name):
                    train(*both(way, (0, 1, 0), **OPTIONS[name]), rank)

    simulate_ranks(program)


def test_parts_add_up_in_the_dtype_that_is_reduced() -> None:
    """In fp32, where bf16 would lose the smaller of two parts."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            small = again(lambda y: (y * self.weight).sum() * 2.0**-10, x)
            return small + again(lambda y: (y * self.weight).sum(), x)

    def program(rank: int) -> None:
        model = nn.Sequential(nn.Linear(4, 4), Twice())
        policy = MixedPrecision(torch.bfloat16, torch.float32)
        fc.fully_shard(model, units=fc.wrap.by_class(Twice), mp_policy=policy)
        nn.init.zeros_(model[0].weight)
        nn.init.ones_(model[0].bias)
        model(torch.ones(1, 4)).backward()
        found = model[1].weight.grad.full_tensor()
        assert found.tolist() == [1 + 2.0**-10] * 4

    simulate_ranks(program)


def test_a_failure_between_parts_leaves_nothing() -> None:
    """What was kept for a backward that failed is no part of the next one's gradients."""

    def program(rank: int) -> None:
        model, plain = both("halves")

        def fail(grad: Tensor) -> None:
            raise ZeroDivisionError

        def watch(module: nn.Module, args: Any) -> None:
            if torch.is_grad_enabled() and args[0].requires_grad:
                args[0].register_hook(fail)

        handle = model.parts[1].norm.register_forward_pre_hook(watch)
        with pytest.raises(ZeroDivisionError):
            model(words(rank, 0)).square().mean().backward()
        handle.remove()
        model.zero_grad()
        assert train(model, plain, rank) == [4, 4]

    simulate_ranks(program)


def test_units_with_nothing_older_than_they_are() -> None:
    """What their checkpoints bring is reduced as the whole backward ends."""

    def program(rank: int) -> None:
        for way in WAYS:
            torch.manual_seed(0)
            model, plain = Part(way), Part(way)
            plain.load_state_dict(model.state_dict())
            fc.fully_shard(model)
            for side in (model, plain):
                side(torch.ones(2, WIDTH, requires_grad=True)).square().mean().backward()
            with cell(way):
                torch.testing.assert_close(
                    model.mid.weight.grad.full_tensor(), plain.mid.weight.grad
                )
                assert not any(unit.holds for unit in units_of(model))

    simulate_ranks(program)


def test_a_second_backward_over_the_graph() -> None:
    """With ``retain_graph`` both bring the whole, which is released behind each."""

    def program(rank: int) -> None:
        for way in ("whole", "not the first"):
            grads = []
            for side in both(way):
                loss = side(words(0, 0)).square().mean()
                loss.backward(retain_graph=True)
                loss.backward()
                grads.append(side.parts[0].up.weight.grad)
                if len(grads) == 1:
                    assert not any(unit.holds for unit in units_of(side))
            with cell(way):
                torch.testing.assert_close(grads[0].full_tensor(), grads[1])

    simulate_ranks(program)
