"""Reductions over sharded parameters are differentiated twice as those of plain ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fsdp_compose import ShardingStrategy

from harness import run_ranks
from models import Tower, Twin, by_block, mesh_of_replicas, square

pytestmark = pytest.mark.filterwarnings("error")

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda p: p.square().sum().square(),
    "mean": lambda p: p.square().mean().square(),
    "norm": lambda p: p.norm(),
    "norm of order 3": lambda p: torch.linalg.vector_norm(p, 3),
    "every norm": lambda p: torch._foreach_norm([p])[0],
    "largest": lambda p: p.abs().max().pow(3),
    "variance": lambda p: p.var().square(),
    "product": lambda p: (1 + 0.1 * p.square()).prod(),
    "dot": lambda p: torch.dot(p.flatten(), p.flatten()).square(),
}


def penalise(reduce: Callable[[Tensor], Tensor], p: Tensor) -> Tensor:
    """A penalty on the gradient of a reduction."""
    (grad,) = torch.autograd.grad(reduce(p), p, create_graph=True)
    return (grad * grad * grad).sum()


@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
def test_a_penalty_on_the_gradient_of_one(kind: str, strategy: str) -> None:
    world = 2 if strategy == "FULL_SHARD" else 4

    def train(rank: int) -> None:
        def shard(model: Tower) -> None:
            mesh = None if world == 2 else mesh_of_replicas(2, 2)
            by_block(model, strategy=ShardingStrategy[strategy], mesh=mesh)

        twin = Twin(rank, world, Tower, shard)

        def loss(model: Tower, x: Tensor) -> Tensor:  # each rank weighs the penalty by its own loss
            value = square(model, x)
            return value + value * penalise(REDUCTIONS[kind], model.blocks[0].up.weight)

        twin.train(loss, 2)

    run_ranks(train, world)
