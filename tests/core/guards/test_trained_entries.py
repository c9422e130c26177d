"""Parameters are frozen and unfrozen at any time; they are asked again only when one was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import fully_shard, gathered
from fsdp_compose.base.torch_private import raw
from fsdp_compose.core.guards import trained_entries as guard
from fsdp_compose.core.guards.trained_entries import trained_entries

from harness import simulate_ranks
from models import data, seeded, square, two_blocks, units


def by_property(model: nn.Module, param: Any, value: bool) -> None:
    param.requires_grad = value


def by_method(model: nn.Module, param: Any, value: bool) -> None:
    assert param.requires_grad_(value) is param


def by_function(model: nn.Module, param: Any, value: bool) -> None:
    assert Tensor.requires_grad_(param, requires_grad=value) is param


def by_setter(model: nn.Module, param: Any, value: bool) -> None:
    setter: Any = Tensor.requires_grad
    setter.__set__(param, value)


def as_plain(model: nn.Module, param: Any, value: bool) -> None:
    with raw():
        param.requires_grad_(value)


def by_module(model: nn.Module, param: Any, value: bool) -> None:
    owner = next(m for m in model.modules() if param in set(m.parameters(recurse=False)))
    rest = {p: p.requires_grad for p in owner.parameters() if p is not param}
    owner.requires_grad_(value)
    for other, trains in rest.items():
        other.requires_grad = trains


def in_a_scope(model: nn.Module, param: Any, value: bool) -> None:
    name = next(name for name, other in model.named_parameters() if other is param)
    with gathered(model):
        dict(model.named_parameters())[name].requires_grad = value


def by_detaching(model: nn.Module, param: Any, value: bool) -> None:
    assert (param.requires_grad_() if value else param.detach_()) is param
    assert param.requires_grad == value


def by_torchs_detaching(model: nn.Module, param: Any, value: bool) -> None:
    assert (param.requires_grad_() if value else torch.detach_(param)) is param
    assert param.requires_grad == value


def detached_in_a_scope(model: nn.Module, param: Any, value: bool) -> None:
    with gathered(model):
        by_detaching(model, param, value)


WAYS = [
    *(by_property, by_method, by_function, by_setter, as_plain, by_module, in_a_scope),
    *(by_detaching, by_torchs_detaching, detached_in_a_scope),
]


@pytest.mark.parametrize(
    "freeze",
    WAYS,
    ids=lambda function: function.__name__,
)
def test_a_change_is_heeded(freeze: Callable[..., None]) -> None:
    """In whatever way it is made, and in both directions, from the next forward on."""

    def ranks(rank: int) -> None:
        model = seeded(two_blocks)
        fully_shard(model)
        param = next(model.parameters())
        for trains in (True, False, True):
            freeze(model, param, trains)
            model.zero_grad()
            square(model, data(0, rank)).backward()
            assert (param.grad is not None) == trains
            assert all(p.grad is not None for p in model.parameters() if p is not param)

    simulate_ranks(ranks)


def test_a_change_before_backward_is_heeded() -> None:
    """What is frozen between a forward and its backward gets no gradient."""

    def ranks(rank: int) -> None:
        model = seeded(two_blocks)
        fully_shard(model)
        param = next(model.parameters())
        loss = square(model, data(0, rank))
        param.requires_grad_(False)
        loss.backward()
        assert param.grad is None
        assert sum(p.grad is not None for p in model.parameters()) > 1

    simulate_ranks(ranks)


def test_parameters_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps ask no parameter whether it trains, until a parameter was told to or not to."""
    asked: list[Any] = []

    def note(param: Tensor) -> bool:
        asked.append(param)
        return torch.Tensor.requires_grad.__get__(param)  # type: ignore[attr-defined]

    def ranks(rank: int) -> None:
        model = seeded(two_blocks)
        fully_shard(model)
        square(model, data(0, rank)).backward()
        asked.clear()
        for step in range(2):
            model.zero_grad()
            square(model, data(step, rank)).backward()
        model.zero_grad(set_to_none=False)  # gradients are told to need none
        assert not asked
        param = next(model.parameters())
        param.requires_grad_(False)
        every = [trained_entries(unit) for unit in units(model)]
        assert len(asked) == sum(len(unit.entries) for unit in units(model))
        assert sum(map(len, every)) == len(asked) - 1

    monkeypatch.setattr(guard, "requires_grad", note)
    simulate_ranks(ranks, 1)
