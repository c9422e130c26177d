"""Modules that are odd as Python objects keep working, and so do their backward hooks."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_compose import fully_shard, get_state
from fsdp_compose.base.process import here
from fsdp_compose.base.streams import Streams
from fsdp_compose.core.autograd import EngineWork
from fsdp_compose.core.state import Engine

from harness import run_ranks
from models import (
    WIDTH,
    Block,
    Tolerance,
    Tower,
    assert_at_rest,
    by_block,
    compare,
    data,
    one_unit,
    seeded,
    square,
    whole,
)
from surgery import (
    Built,
)


class Abstract(abc.ABC):
    @abc.abstractmethod
    def encode(self, x: Tensor) -> Tensor: ...


class Concrete(Tower, Abstract):
    def encode(self, x: Tensor) -> Tensor:
        return self(x)


class Registry(type):
    """Counts the calls of its classes."""

    made = 0

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        Registry.made += 1
        return super().__call__(*args, **kwargs)


class Registered(Tower, metaclass=Registry):
    pass


class WithSlots(nn.Module):
    __slots__ = ("factor",)

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2)
        self.factor = 3

    @property
    def weight(self) -> nn.Parameter:
        return self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.factor + F.linear(x, self.weight)


class Delegating(nn.Module):
    """Looks up in another module what it does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Tower(2)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inside"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


class Renaming(nn.Module):
    """Names its parameters otherwise than it holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Tower(2)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, param in self.inside.named_parameters(*args, **kwargs):
            yield name.replace("blocks", "layers"), param

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ParameterList(torch.randn(WIDTH, WIDTH) * 0.3 for _ in range(3))
        self.named = nn.ParameterDict({"a": torch.randn(WIDTH), "b": torch.randn(WIDTH, 2)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.steps:
            x = x @ weight
        extra = sum(value.sum() for value in self.named.values())
        return (x + self.named["a"]) @ self.named["b"] + extra + self.steps[-1].sum()


class TwoNames(nn.Module):
    """One parameter under two names, and in a submodule under a third."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH, 2))
        self.b = self.a
        self.linear = nn.Linear(2, WIDTH)
        self.linear.weight = self.a

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.a + (2 * x) @ self.b + self.linear(x @ self.a).sum()


@pytest.mark.parametrize(
    "build", [Concrete, Registered, WithSlots, Delegating, Renaming, Containers, TwoNames]
)
def test_odd_modules(build: Callable[[], nn.Module]) -> None:
    def ranks(rank: int) -> None:
        def shard(model: nn.Module) -> nn.Module:
            blocks = any(isinstance(m, Block) for m in model.modules())
            return by_block(model) if blocks else one_unit(model)

        twin = Built(rank, 2, build, shard)
        kind = type(twin.model)
        twin.train()
        assert type(twin.model) is kind

    run_ranks(ranks, 2)


def test_module_backward_hooks_change_gradients() -> None:
    """Backward hooks of modules see and change gradients."""

    def hook(model: nn.Module) -> list[tuple[int, ...]]:
        seen: list[tuple[int, ...]] = []
        for block in model.blocks:
            block.register_full_backward_hook(
                lambda module, into, out: seen.append(tuple(into[0].shape)) or (2 * into[0],)
            )
            block.up.register_full_backward_hook(lambda m, into, out: seen.append((1,)))
        model.register_full_backward_pre_hook(lambda module, out: (3 * out[0],))
        return seen

    def ranks(rank: int) -> None:
        model, plain = seeded(Tower), seeded(Tower)
        by_block(model)
        seen, wanted = hook(model), hook(plain)
        square(model, data(0, rank).requires_grad_()).backward()
        assert_at_rest(model)
        xs = [data(0, r).requires_grad_() for r in range(2)]
        torch.stack([square(plain, x) for x in xs]).mean().backward()
        assert seen == wanted[: len(seen)] and len(seen) == 6
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters()):
            compare(name, whole(ours.grad), theirs.grad, Tolerance())

    run_ranks(ranks, 2)


def test_a_module_of_units_alone_is_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a backward that fails in it would drop nothing of what waits in the units on theirs."""
    device = torch.device("meta")
    engine = Engine(Streams(device, None, None), EngineWork)
    monkeypatch.setitem(here.engines, device, engine)
    inner = fully_shard(nn.Linear(2, 2))
    monkeypatch.setattr(get_state(inner).unit, "engine", engine)
    model = fully_shard(nn.Sequential(nn.Sequential(inner), nn.BatchNorm1d(2, affine=False)))
    assert get_state(model).unit.engine is engine
