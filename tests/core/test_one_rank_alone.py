"""One rank alone may run what is gathered already: what all ranks do later does not follow it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import (
    Prefetch,
    ShardingStrategy,
    fully_shard,
    reshard,
    simulate,
    unshard,
)

from models import assert_at_rest, seeded


class Stack(nn.Sequential):
    """Four layers; the last one is gathered with the model."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(4, 4) for _ in range(4)))


def all_layers(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def some_layers(model: nn.Sequential, x: Tensor) -> None:
    with torch.no_grad():
        model[2](x)
        model[0](x)


def with_gradients(model: nn.Module, x: Tensor) -> None:
    model(x)


def some_with_gradients(model: nn.Sequential, x: Tensor) -> None:
    model[2](x)
    model[0](x)


def run_alone(rank: int, strategy: str, alone: Callable[..., None], when: str) -> list[bool]:
    """Train and evaluate; rank 0 also runs ``alone`` at some time, while all is gathered."""
    model, plain = (seeded(Stack).double() for _ in range(2))
    ahead = Prefetch(forward=2, backward=2)
    units = [*list(model)[:3], model]
    for unit in units:
        fully_shard(unit, strategy=ShardingStrategy[strategy], prefetch=ahead)
    pair = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (model, plain)]
    x = torch.ones(2, 4, dtype=torch.float64)

    def gather_and_run() -> None:
        for unit in units:
            unshard(unit)
        if rank == 0:
            alone(model, x)
        for unit in units:
            reshard(unit)

    def train(is_interrupted: bool = False) -> None:
        for each, optim in pair:
            for _ in range(2):
                loss = each(x).square().sum()
                if is_interrupted and each is model:
                    gather_and_run()
                loss.backward()
            optim.step()
            optim.zero_grad()

    if when == "later":
        train()
        train()
    if when == "between forward and backward":
        train()
        train(is_interrupted=True)
        train(is_interrupted=True)
    else:
        gather_and_run()
    equal = []
    for _ in range(2):
        with torch.no_grad():
            equal.append(torch.allclose(model(x), plain(x)))
            equal.append(torch.allclose(model[2](x), plain[2](x)))
        train()
    assert_at_rest(model)
    return equal


@pytest.mark.parametrize(
    ("strategy", "alone", "when"),
    [
        ("FULL_SHARD", all_layers, "at first"),
        ("FULL_SHARD", with_gradients, "at first"),
        ("FULL_SHARD", some_layers, "later"),
        ("FULL_SHARD", some_with_gradients, "between forward and backward"),
        ("FULL_SHARD", with_gradients, "between forward and backward"),
        ("SHARD_GRAD_OP", some_with_gradients, "at first"),
        ("SHARD_GRAD_OP", all_layers, "later"),
        ("SHARD_GRAD_OP", all_layers, "between forward and backward"),
    ],
)
def test_one_rank_runs_what_is_gathered(
    strategy: str, alone: Callable[..., None], when: str
) -> None:
    def run() -> list[bool]:
        return run_alone(torch.distributed.get_rank(), strategy, alone, when)

    for equal in simulate(run, 2):
        assert equal == [True] * 4
