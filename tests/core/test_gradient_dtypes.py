"""Gradients are summed in ``reduce_dtype`` over every axis, and kept in the dtype asked for."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compose as fc
from fsdp_compose import MixedPrecision, ShardingStrategy, declare_tensor_parallel, fully_shard

from harness import rank_errors, run_ranks, simulate_ranks

LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
HYBRID = (
    ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy.HYBRID_SHARD_ZERO2,
    ShardingStrategy.HYBRID_SHARD_OPTIMIZER,
)


class Scaled(nn.Module):
    """Its weight's gradient is the input in every element."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.ones(8, dtype=dtype)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.weight + self.bias) * x).sum()


def gradient(model: nn.Module, value: float) -> Tensor:
    model(torch.tensor(value, dtype=torch.bfloat16)).backward()
    grad = model.weight.grad
    assert grad is not None
    return grad.full_tensor()


@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_one_reduce_dtype_for_every_axis(strategy: ShardingStrategy) -> None:
    """256 + 1 - 256 + 0 over four ranks is 1, wherever each of them is; in bf16 it would be 0.

    Rank 0 has the 0: so 1 comes beside each of the others on every axis, and before and after them.
    """

    def ranks(rank: int) -> None:
        mesh: Any = None
        if strategy in HYBRID:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            if strategy is ShardingStrategy.HYBRID_SHARD_OPTIMIZER:
                grid = torch.arange(4).view(2, 2).T
                mesh = torch.distributed.device_mesh.DeviceMesh("cpu", grid)
        for storage in (torch.float32, torch.bfloat16):
            model = fully_shard(Scaled(storage), mesh=mesh, strategy=strategy, mp_policy=LOW)
            for values in permutations((256.0, 1.0, -256.0)):
                model.zero_grad()
                grad = gradient(model, (0.0, *values)[rank])
                assert grad.dtype == storage
                assert torch.equal(grad, torch.full((8,), 0.25, dtype=storage)), (values, grad)

    run_ranks(ranks, 4)


def test_reduce_dtype_beside_tensor_parallelism() -> None:
    """Over dp what tensor parallelism split is summed in ``reduce_dtype`` as all else is."""

    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = Scaled()
        declare_tensor_parallel([model.weight, model.bias], mesh["tp"], 0)
        fully_shard(model, mesh=mesh["dp"], mp_policy=LOW)
        model(torch.tensor((256.0, 1.0)[rank // 2], dtype=torch.bfloat16)).backward()
        model(torch.tensor((-256.0, 0.0)[rank // 2], dtype=torch.bfloat16)).backward()
        grad = model.weight.grad
        assert grad is not None
        assert torch.equal(grad.full_tensor(), torch.full((8,), 0.5))

    run_ranks(ranks, 4)


def test_gradients_kept_in_the_dtype_asked_for() -> None:
    """bf16 parameters, fp32 gradients: 256 + 1 - 256 over three backwards is 1."""

    def ranks(rank: int) -> None:
        kept = MixedPrecision(reduce_dtype=torch.float32, keep_low_precision_grads=True)
        policy = lambda fqn, param: kept if fqn == "weight" else None  # noqa: E731
        model = Scaled(torch.bfloat16)
        model.weight.grad_dtype = torch.float32
        fully_shard(model, mp_policy=policy)
        for value in (256.0, 1.0, -256.0):
            grad = gradient(model, value)
        assert grad.dtype == torch.float32 and torch.equal(grad, torch.ones(8))
        assert model.bias.grad is not None and model.bias.grad.dtype == torch.bfloat16

    run_ranks(ranks, 2)


def test_a_grad_dtype_that_would_not_be_kept() -> None:
    """One clear error instead of torch's in the first backward; the model stays plain."""

    def ranks(rank: int) -> None:
        model = Scaled(torch.bfloat16)
        model.bias.grad_dtype = torch.float32
        fully_shard(model)

    for text in rank_errors(ranks, 2):
        assert text is not None and "'bias'" in text and "grad_dtype torch.float32" in text
        assert "keep_low_precision_grads=True" in text


def test_a_grad_dtype_that_is_set_too_late() -> None:
    """The dtype that gradients have, and None, may be set; another is an error at once."""

    def ranks(rank: int) -> None:
        model = fully_shard(Scaled())
        for allowed in (None, torch.float32):
            model.weight.grad_dtype = allowed
            assert model.weight.grad_dtype is allowed
        with pytest.raises(ValueError, match=r"'weight' .*float64 after fully_shard"):
            model.weight.grad_dtype = torch.float64
        model.weight.grad_dtype = None
        model.weight.grad = torch.ones(8, dtype=torch.float64)  # of any dtype now
        with fc.gathered(model, with_grads=True, writeback=True):
            assert model.weight.grad.dtype == torch.float64
            model.weight.grad.mul_(3)
        assert torch.equal(model.weight.grad.full_tensor(), torch.full((8,), 3.0).double())
        model.weight.grad, model.weight.grad_dtype = None, torch.float32
        assert torch.equal(gradient(model, 2.0), torch.full((8,), 2.0))

    simulate_ranks(ranks, 2)
