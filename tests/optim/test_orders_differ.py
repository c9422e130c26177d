"""Ranks that list parameters of several groups in other orders agree all the same."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

import fsdp_compose as fc
from fsdp_compose import ShardingStrategy

from harness import simulate_ranks
from models import Block, Twin, mesh_of_replicas, whole

INNER = [
    ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy.HYBRID_SHARD_OPTIMIZER,
    ShardingStrategy.NO_SHARD,
]


def _build() -> nn.Module:
    return nn.Sequential(Block(), Block())


def _shard(model: nn.Module, strategy: ShardingStrategy) -> nn.Module:
    """A unit of ``strategy`` inside a model that is sharded over all four ranks."""
    inner: Any = model[0]  # type: ignore[index]
    mesh = mesh_of_replicas(2, 2)
    is_hybrid = strategy is not ShardingStrategy.NO_SHARD
    fc.fully_shard(inner, mesh=mesh if is_hybrid else mesh["shard"], strategy=strategy)
    fc.set_gradient_divide_factor(inner, 4.0 if is_hybrid else 2.0)
    return fc.fully_shard(model, mesh=init_device_mesh("cpu", (4,)))


def _in_own_order(model: nn.Module, rank: int) -> list[nn.Parameter]:
    """As from a set, whose order is another one in each process."""
    params = list(model.parameters())
    return params[rank:] + params[:rank] if rank % 2 else params[::-1]


@pytest.mark.parametrize("clip", [fc.clip_grad_norm_, nn.utils.clip_grad_norm_])
@pytest.mark.parametrize("strategy", INNER[:2], ids=lambda s: s.name)
def test_norms_of_parameters_in_any_order(strategy: ShardingStrategy, clip: Any) -> None:
    """Clipping waits for nobody, and takes the norm of the whole gradient."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 4, _build, partial(_shard, strategy=strategy))
        for seed, order in enumerate((2.0, float("inf"), 1.0)):
            twin.backward(lambda model, x: model(x).square().mean(), seed)
            wanted = torch.nn.utils.clip_grad_norm_(twin.reference.parameters(), 0.1, order)
            found = clip(_in_own_order(twin.model, rank), 0.1, order)
            assert_close(whole(found), wanted.to(found.dtype))
            twin.step()

    simulate_ranks(ranks, 4)


@pytest.mark.parametrize("make", [fc.GradScaler, torch.amp.GradScaler], ids=["own", "torch"])
@pytest.mark.parametrize("strategy", INNER, ids=lambda s: s.name)
def test_a_scaler_over_parameters_in_any_order(strategy: ShardingStrategy, make: Any) -> None:
    """An overflow on any rank has all skip the step, and nobody waits for ever."""

    def ranks(rank: int) -> list[float]:
        torch.manual_seed(0)
        model = _shard(_build().double(), strategy)
        optim = torch.optim.SGD(_in_own_order(model, rank), lr=0.1)
        scaler, scales = make("cpu", init_scale=8.0), []
        for hit in (None, 3, 0, None):
            loss = model(torch.ones(2, 6, dtype=torch.float64)).sum()
            scaler.scale(loss * (float("inf") if rank == hit else 1.0)).backward()
            scaler.step(optim)
            scaler.update()
            scales.append(scaler.get_scale())
            optim.zero_grad()
        return scales

    assert simulate_ranks(ranks, 4) == [[8.0, 4.0, 2.0, 2.0]] * 4


def test_gradients_in_any_order_are_counted() -> None:
    """Those that are not all zero; one that is zero has another place on each rank."""

    def ranks(rank: int) -> None:
        model = fc.fully_shard(_build())
        model(torch.randn(2, 6)).square().sum().backward()
        params = _in_own_order(model, rank)
        next(model.parameters()).grad.zero_()
        assert fc.grad_norm(params, 0) == sum(bool(whole(p.grad).any()) for p in model.parameters())

    simulate_ranks(ranks, 4)


def test_the_gradient_that_is_not_finite_is_named() -> None:
    """Also where each rank lists the parameters in another order."""

    def ranks(rank: int) -> str:
        torch.manual_seed(0)
        model = fc.fully_shard(_build().double())
        params = _in_own_order(model, rank)
        model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        grad = dict(model.named_parameters())["1.up.weight"].grad
        assert grad is not None
        grad.fill_(float("nan"))
        with pytest.raises(RuntimeError, match="not finite") as caught:
            fc.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
        return str(caught.value)

    for text in simulate_ranks(ranks, 2):
        assert "1.up.weight" in text
