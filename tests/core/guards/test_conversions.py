"""What is called right after a conversion, ``module.to(dtype)``, before the next forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose import ShardingStrategy, fully_shard, no_sync, reduce_grads, wrap
from fsdp_compose.sharded import ShardedTensor

from harness import simulate_ranks
from models import Tolerance, Tower, Twin, by_block, data, replicas, seeded, square, whole


def twin(rank: int, world: int) -> Twin:
    return Twin(rank, world, Tower, by_block, plain_sgd, Tolerance(1e-6, 1e-6))


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    """Without state, which would keep its dtype, as it does beside a plain module."""
    return torch.optim.SGD(params, lr=0.1)


def both(pair: Twin, change: Callable[[nn.Module], Any]) -> None:
    change(pair.model)
    change(pair.reference)


def open_and_close(model: nn.Module) -> None:
    with fc.gathered(model):
        pass
    fc.unshard(model.blocks)
    fc.reshard(model.blocks)


CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "scopes": open_and_close,
    "prefetch_units": lambda model: fc.prefetch_units(model, model.blocks),
    "iter_full": lambda model: list(fc.iter_full(model)),
    "state_dict": lambda model: model.load_state_dict(fc.state_dict(model, kind="full")),
    "sharded": lambda model: model.load_state_dict(fc.state_dict(model, kind="sharded")),
    "refresh": fc.refresh,
    "apply": lambda model: fc.apply(model, lambda module: None),
    "verify_replicas": fc.verify_replicas,
    "deepcopy": copy.deepcopy,
    "grad_norm": fc.grad_norm,
    "plan": lambda model: (fc.plan(model), fc.explain(model)),
}


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "ZERO1"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls_between_a_conversion_and_a_forward(
    call: Callable[[nn.Module], Any], strategy: str
) -> None:
    def ranks(rank: int) -> None:
        plain = seeded(Tower).float()
        model = by_block(copy.deepcopy(plain), strategy=ShardingStrategy[strategy])
        x = data(0, rank, dtype=torch.float32)
        same = data(1, 0, dtype=torch.float32)
        for each in (model, plain):
            square(each, same).backward()
            each.double()
        call(model)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.dtype is theirs.dtype
            assert torch.equal(whole(ours), theirs)
        assert torch.equal(model(x.double()), plain(x.double()))
        for each in (model, plain):
            square(each, same.double()).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=1e-5, atol=1e-6)

    simulate_ranks(ranks, 2)


def test_gradients_are_clipped_after_a_conversion() -> None:
    """They lie no more in the buffer that they were cut from, which holds what they were."""

    def ranks(rank: int) -> None:
        pair = twin(rank, 2)
        pair.backward(square, 0)
        both(pair, lambda m: m.float())
        both(pair, lambda m: m.double())
        pair.backward(square, 1)
        wanted = nn.utils.clip_grad_norm_(pair.reference.parameters(), 0.1)
        torch.testing.assert_close(fc.clip_grad_norm_(pair.model, 0.1), wanted)
        pair.step()

    simulate_ranks(ranks, 2)


class Empty(nn.Module):
    """A unit without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(0, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum()


class WithEmpty(Tower):
    def __init__(self) -> None:
        super().__init__(1)
        self.first = nn.Sequential(nn.Linear(6, 6), Empty())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.head.weight.dtype)).double()


@pytest.mark.parametrize("reduced", [0, 1])
def test_gradients_are_reduced_after_a_conversion(reduced: int) -> None:
    """On request, before a forward; ``reduced`` backwards came before those that wait."""

    def ranks(rank: int) -> None:
        shard = lambda m: fully_shard(m, units=wrap.by_class({nn.Linear, Empty}))  # noqa: E731
        pair = Twin(rank, 2, WithEmpty, shard, plain_sgd, Tolerance(1e-5, 1e-6))
        for seed in range(reduced):
            pair.backward(square, seed)
        with no_sync(pair.model):
            pair.backward(square, 2)
        both(pair, lambda m: m.float())
        reduce_grads(pair.model)
        pair.check_grads()
        assert all(p.grad.dtype is torch.float32 for p in pair.model.parameters())
        pair.step()
        pair.check()

    simulate_ranks(ranks, 2)


@pytest.mark.parametrize("take", [fc.local_parameters, fc.flat_parameters])
def test_plain_parameters_are_made_after_a_conversion(take: Callable[[nn.Module], Any]) -> None:
    def ranks(rank: int) -> None:
        pair = twin(rank, 2)
        both(pair, lambda m: m.float())
        pair.plain = replicas(pair.plain[0], 2)
        pair.backward(lambda m, x: square(m, x.float()), 0)
        both(pair, lambda m: m.double())
        plain_sgd(take(pair.model)).step()
        pair.plain_optim.step()
        pair.check()

    simulate_ranks(ranks, 2)


def test_kept_weights_are_fresh_after_a_conversion() -> None:
    """What a conversion outside a forward gathers again is kept, until it is written."""

    def ranks(rank: int) -> None:
        shard = lambda m: by_block(m, strategy=ShardingStrategy.ZERO1)  # noqa: E731
        pair = Twin(rank, 2, Tower, shard, plain_sgd, Tolerance(1e-5, 1e-6))
        pair.model.float(), pair.reference.float()
        with no_sync(pair.model):
            pair.backward(lambda m, x: square(m, x.float()), 0)
        both(pair, lambda m: m.double())
        reduce_grads(pair.model)
        with torch.no_grad():
            for model in (pair.model, pair.reference):
                for param in model.parameters():
                    param.mul_(0.9)
        pair.losses(square, 1)

    simulate_ranks(ranks, 2)


def test_a_gradient_that_waited_is_converted_too() -> None:
    """Read again and again, it is a gradient, no parameter, and clipping finds where it lies."""

    def ranks(rank: int) -> None:
        pair = twin(rank, 2)
        for seed in range(2):
            with no_sync(pair.model):
                pair.backward(square, seed)
            pair.backward(square, 10 + seed)
            assert all(type(p.grad) is ShardedTensor for p in pair.model.parameters())
        both(pair, lambda m: m.float().double())
        reduce_grads(pair.model)
        pair.backward(square, 2)
        mine = fc.clip_grad_norm_(pair.model, 0.1)
        wanted = torch.nn.utils.clip_grad_norm_(pair.reference.parameters(), 0.1)
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)
        pair.check_grads()

    simulate_ranks(ranks, 2)
