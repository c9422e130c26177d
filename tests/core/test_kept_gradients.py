"""Gradients kept in the reduce dtype, where a scope, a conversion or ``fully_shard`` meets them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fsdp_compose as fc
from fsdp_compose import MixedPrecision

from harness import simulate_ranks
from models import data, whole

KEPT = [torch.bfloat16, torch.float64]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def shard(model: nn.Module, kept: torch.dtype) -> nn.Module:
    """Its gradients are reduced, and kept, in another dtype than its parameters."""
    policy = MixedPrecision(reduce_dtype=kept, keep_low_precision_grads=True)
    return fc.fully_shard(model, units=fc.wrap.by_class(nn.Linear), mp_policy=policy)


def run(model: nn.Module, rank: int, dtype: torch.dtype = torch.float32) -> None:
    model(data(0, rank, 4, 6, dtype=dtype)).square().mean().backward()


def plain_grads(times: int = 1) -> list[torch.Tensor]:
    """The average over two ranks, as often as it was added."""
    plain = build()
    for rank in range(2):
        run(plain, rank)
    return [times * p.grad / 2 for p in plain.parameters()]


def check_grads(model: nn.Module, kept: torch.dtype, times: int) -> None:
    for p, wanted in zip(model.parameters(), plain_grads(times)):
        assert p.grad.dtype is kept
        torch.testing.assert_close(whole(p.grad).float(), wanted, rtol=0.03, atol=3e-3)


@pytest.mark.parametrize("kept", KEPT)
def test_kept_gradients_in_a_scope(kept: torch.dtype) -> None:
    """Inside gathered(with_grads=True) they are whole, in their dtype, and may be written."""

    def check(rank: int) -> None:
        model = shard(build(), kept)
        run(model, rank)
        with fc.gathered(model, with_grads=True):
            check_grads(model, kept, 1)
            assert model[0].weight.grad_dtype is kept
        with fc.gathered(model, with_grads=True, writeback=True):
            for p in model.parameters():
                p.grad = p.grad * 2
        check_grads(model, kept, 2)

    simulate_ranks(check, 2)


@pytest.mark.parametrize("kept", KEPT)
def test_kept_gradients_through_a_conversion(kept: torch.dtype) -> None:
    """Gradients of before module.to(dtype) are added to in the dtype in which they are kept."""

    def check(rank: int) -> None:
        model = shard(build(), kept)
        run(model, rank)
        model.double()
        run(model, rank, torch.float64)
        check_grads(model, kept, 2)

    simulate_ranks(check, 2)


@pytest.mark.parametrize("kept", KEPT)
def test_kept_gradients_of_before_sharding(kept: torch.dtype) -> None:
    """Gradients that a plain model has when it is sharded are kept in that dtype too."""

    def check(rank: int) -> None:
        model = build()
        for p, grad in zip(model.parameters(), plain_grads()):
            p.grad = grad
        shard(model, kept)
        check_grads(model, kept, 1)
        run(model, rank)
        check_grads(model, kept, 2)

    simulate_ranks(check, 2)


@pytest.mark.parametrize("kept", KEPT)
def test_undo_ends_kept_gradients(kept: torch.dtype) -> None:
    """After undo gradients have the dtype that they had before fully_shard, old ones too."""

    def check(rank: int) -> None:
        model = build()
        model[0].bias.grad_dtype = kept
        shard(model, kept)
        run(model, rank)
        copied = fc.undo(copy.deepcopy(model))
        assert copied[0].bias.grad_dtype is kept
        assert copied[2].weight.grad_dtype is torch.float32
        fc.undo(model)
        for name, p in model.named_parameters():
            assert p.grad_dtype is p.grad.dtype is (kept if name == "0.bias" else torch.float32)
        for p, wanted in zip(model.parameters(), plain_grads()):
            torch.testing.assert_close(p.grad.float(), wanted, rtol=0.03, atol=3e-3)
        model[0].bias.grad_dtype = None
        run(fc.fully_shard(model), rank)

    simulate_ranks(check, 2)
