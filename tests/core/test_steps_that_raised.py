"""What an optimizer's step has written that ended with an error is compared between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_compose as fc
from fsdp_compose import ShardingStrategy

from harness import simulate_ranks
from models import Tolerance, Tower, adamw, by_block, compare, data, seeded, square, whole

STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD]
CASES = [
    (STRATEGIES[0], nn.Module.parameters),
    (STRATEGIES[1], nn.Module.parameters),
    (STRATEGIES[1], fc.flat_parameters),
    (STRATEGIES[0], fc.local_parameters),
]
OTHER_PLACES = (
    r"a step of Stopping that raised after 1 writes.*a step of Stopping that raised after 2 writes"
)


class OnPurpose(Exception):
    """What a step raises."""


class Stopping(torch.optim.Optimizer):
    """Gradient descent that raises ahead of parameter number ``stop``."""

    stop: int | None = None

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for index, param in enumerate(self.param_groups[0]["params"]):
            if index == self.stop:
                raise OnPurpose
            param.add_(param.grad, alpha=-0.1)


@contextmanager
def stopping(optim: Stopping, stop: int | None) -> Iterator[None]:
    """Scope of steps that raise there, which the program catches."""
    optim.stop = stop
    try:
        yield
    except OnPurpose:
        pass
    optim.stop = None


def train(model: nn.Module, optim: torch.optim.Optimizer, rank: int, seed: int) -> None:
    model.zero_grad()
    square(model, data(seed, rank)).backward()
    optim.step()


@pytest.mark.parametrize(("strategy", "take"), CASES)
def test_ranks_stop_in_other_places(
    strategy: ShardingStrategy, take: Callable[[nn.Module], Any]
) -> None:
    """Every rank raises in the next step, or as the weights are saved; loading mends it."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower), strategy=strategy)
        first = {name: p.detach().clone() for name, p in model.named_parameters()}
        optim = Stopping(take(model))
        for then in (lambda: fc.state_dict(model), lambda: train(model, optim, rank, 2)):
            train(model, optim, rank, 0)
            with stopping(optim, rank + 1):
                train(model, optim, rank, 1)
            with pytest.raises(RuntimeError, match=OTHER_PLACES):
                then()
            model.load_state_dict(first)
        train(model, optim, rank, 0)

    simulate_ranks(ranks, 2)


def test_a_step_stops_after_its_closure() -> None:
    """Which ended a step that ranks compare: what is written after it is noted one by one."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        optim = Stopping(model.parameters())

        def closure() -> None:
            model.zero_grad()
            square(model, data(0, rank)).backward()

        optim.step(closure)
        with stopping(optim, rank + 1):
            optim.step(closure)
        with pytest.raises(RuntimeError, match=r"ranks wrote in their own ways"):
            optim.step(closure)

    simulate_ranks(ranks, 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("stop", [0, 3])
def test_ranks_stop_in_one_place(strategy: ShardingStrategy, stop: int) -> None:
    """They train on as one process does, also where slices are empty."""

    def ranks(rank: int) -> None:
        model, plain = by_block(seeded(Tower), strategy=strategy), seeded(Tower)
        optim, theirs = Stopping(model.parameters()), Stopping(plain.parameters())
        for seed in range(4):
            with stopping(optim, stop if seed == 1 else None):
                train(model, optim, rank, seed)
            plain.zero_grad()
            (sum(square(plain, data(seed, r)) for r in range(3)) / 3).backward()
            with stopping(theirs, stop if seed == 1 else None):
                theirs.step()
        for (name, ours), wanted in zip(model.named_parameters(), plain.parameters()):
            compare(name, whole(ours), wanted.detach(), Tolerance())

    simulate_ranks(ranks, 3)


@pytest.mark.parametrize(("strategy", "take"), CASES)
def test_writes_after_a_step_that_raised(
    strategy: ShardingStrategy, take: Callable[[nn.Module], Any]
) -> None:
    """They are noted, as ever: one rank's alone is an error on all, and the same on all is none."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower), strategy=strategy)
        optim = adamw(take(model))
        handle = optim.register_step_pre_hook(raise_on_purpose)
        for writers in (range(2), range(1)):
            with pytest.raises(OnPurpose):
                train(model, optim, rank, 0)
            with torch.no_grad():
                if rank in writers:
                    model.head.weight.mul_(2.0)
                    torch._foreach_mul_([model.head.bias], 2.0)
            if len(writers) == 2:
                square(model, data(1, rank)).backward()
        handle.remove()
        with pytest.raises(RuntimeError, match=r"parameter 'head.weight', last by mul_\(2.0\)"):
            train(model, optim, rank, 2)

    simulate_ranks(ranks, 2)


def raise_on_purpose(*_: Any) -> None:
    raise OnPurpose
