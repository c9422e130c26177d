"""Sums of what was computed with each rank's own plain tensor raise, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_compose import fully_shard, gathered

from harness import run_ranks, simulate_ranks
from models import WIDTH, Tower, data, mesh_of_replicas, seeded, square

WAYS: dict[str, Callable[[Any, Tensor], Any]] = {
    "product": lambda p, x: (p * x).sum(),
    "other way round": lambda p, x: ((x - p) ** 2).mean(),
    "joined later": lambda p, x: (2 * p * p + p * x).norm(),
    "a row": lambda p, x: torch.exp(p + x[0]).amax(),
    "lists": lambda p, x: torch._foreach_norm([p, p + x])[1],
    "dot": lambda p, x: torch.dist(p, x),
    "loss": lambda p, x: F.mse_loss(p, x),
    "flattened": lambda p, x: (p * x).flatten().norm(),
    "a part": lambda p, x: (p * x)[1, 1:].sum(),
    "chunks": lambda p, x: (p + x).chunk(2)[1].square().mean(),
}


BOTH = torch.enable_grad, torch.no_grad


def values(rank: int) -> Tensor:
    return torch.arange(2 * WIDTH, dtype=torch.float64).view(2, WIDTH) + rank


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_of_its_own_on_each_rank(way: str) -> None:
    def ranks(rank: int) -> None:
        plain, model = seeded(Tower), fully_shard(seeded(Tower))
        weight: Any = model.head.weight
        for mode in (torch.enable_grad,) if way == "joined later" else BOTH:
            with mode():
                found, wanted = (WAYS[way](m.head.weight, values(0)) for m in (model, plain))
                torch.testing.assert_close(found, wanted)
                with pytest.raises(RuntimeError, match="with plain tensors of shape") as raised:
                    WAYS[way](weight, values(rank))
            text = str(raised.value)
            assert "'head.weight'" in text and "gathered(model)" in text, text
        with gathered(model):
            loss = WAYS[way](model.head.weight, values(rank))
        torch.testing.assert_close(loss, WAYS[way](plain.head.weight, values(rank)))

    run_ranks(ranks)


def test_a_number_of_its_own_on_each_rank() -> None:
    def ranks(rank: int) -> None:
        model = fully_shard(seeded(Tower))
        with pytest.raises(RuntimeError, match=r"plain tensors of shape \(\)"):
            (model.head.weight * torch.tensor(1.0 + rank)).sum()

    simulate_ranks(ranks)


def test_a_view_as_real_numbers_remembers_too() -> None:
    def ranks(rank: int) -> None:
        layer = nn.Linear(4, 2, dtype=torch.complex128)
        weight: Any = fully_shard(layer, init="broadcast").weight
        torch.view_as_real(weight * torch.ones(2, 4)).square().sum()
        with pytest.raises(RuntimeError, match="with plain tensors of shape"):
            torch.view_as_real(weight * (torch.ones(2, 4) + rank)).square().sum()

    simulate_ranks(ranks)


def test_writes_remember_nothing() -> None:
    """Optimizers and masks write parameters: the parameter is no result of what it was given."""

    def ranks(rank: int) -> None:
        model = fully_shard(seeded(Tower))
        weight: Any = model.head.weight
        spec = weight._shard_spec
        with torch.no_grad():
            weight.mul_(values(0)).add_(weight * values(0))
            assert weight._shard_spec is spec and not spec.partners
            assert (weight * torch.tensor(2.0))._shard_spec is spec
            assert weight.gt(values(rank))._shard_spec is spec
            weight.norm()

    simulate_ranks(ranks)


def test_what_is_kept_of_gradients_holds_no_tensors() -> None:
    """A mean over steps of masked gradients would otherwise keep the mask of each step."""

    def ranks(rank: int) -> None:
        model = fully_shard(seeded(Tower))
        square(model, data(0, rank, 3, WIDTH)).backward()
        grad: Any = model.head.weight.grad
        for mode in BOTH:
            with mode():
                mean = grad * values(0)
                for step in range(3):
                    mean = 0.9 * mean + grad * values(step)
                assert not mean._shard_spec.partners

    simulate_ranks(ranks)


def test_replicas_with_tensors_of_their_own() -> None:
    """Each would step its copy of the parameter by another gradient."""

    def ranks(rank: int) -> None:
        model = fully_shard(seeded(Tower), mesh=mesh_of_replicas(2, 2))
        weight: Any = model.head.weight
        (weight * values(0)).sum().backward()
        torch.testing.assert_close(weight.grad.full_tensor(), values(0))
        with pytest.raises(RuntimeError, match="with plain tensors of shape"):
            (weight * values(rank // 2)).sum()

    run_ranks(ranks, 4)
