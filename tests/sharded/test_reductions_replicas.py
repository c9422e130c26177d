"""Gradients of reductions over sharded parameters are averaged over replicas too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import ShardingStrategy

from harness import simulate_ranks
from models import Tower, Twin, adamw, by_block, mesh_of_replicas, square

STRATEGIES = ("NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "HYBRID_SHARD_OPTIMIZER")
Penalty = Callable[[nn.Module], Tensor]
PENALTIES: dict[str, Penalty] = {
    "sum": lambda m: m.blocks[1].up.weight.square().sum(),
    "mean": lambda m: m.head.weight.square().mean(),
    "largest": lambda m: m.head.weight.amax() + m.first.bias.max(),
    "norm": lambda m: m.blocks[0].down.weight.norm(1) + torch.linalg.norm(m.head.bias),
    "variance": lambda m: m.head.weight.var() + m.first.weight.std(),
    "product": lambda m: m.head.bias.exp().prod(),
    "every norm": lambda m: torch.stack(torch._foreach_norm(list(m.parameters()))).sum(),
}


def train(rank: int, name: str, penalty: Penalty) -> None:
    world = 2 if name == "NO_SHARD" else 4
    strategy = ShardingStrategy[name]
    mesh = None if name == "NO_SHARD" else mesh_of_replicas(2, 2)
    twin = Twin(rank, world, Tower, partial(by_block, strategy=strategy, mesh=mesh), adamw)
    twin.train(lambda model, x: (loss := square(model, x)) + loss.exp() * penalty(model))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", PENALTIES)
def test_penalties_that_ranks_weigh(kind: str, strategy: str) -> None:
    """Each rank scales a penalty by its own loss; replicas step with the average of all ranks."""
    world = 2 if strategy == "NO_SHARD" else 4
    simulate_ranks(train, world, strategy, PENALTIES[kind])


@pytest.mark.parametrize("strategy", ["NO_SHARD", "HYBRID_SHARD"])
def test_norms_in_another_order_on_each_rank(strategy: str) -> None:
    """Of a list that ranks put together differently, each norm keeps its own gradient."""
    names = ("head.weight", "first.bias", "blocks.1.up.weight")

    def penalty(model: nn.Module, loss: Tensor, turn: int) -> Tensor:
        order = [*names[turn:], *names[:turn]]
        norms = dict(zip(order, torch._foreach_norm([model.get_parameter(n) for n in order])))
        return loss * (norms[names[0]] + 2 * norms[names[1]] + 3 * norms[names[2]])

    def ranks(rank: int) -> None:
        shard = partial(by_block, strategy=ShardingStrategy[strategy])
        if strategy == "HYBRID_SHARD":
            shard = partial(shard, mesh=mesh_of_replicas(2, 2))
        twin = Twin(rank, 2 if strategy == "NO_SHARD" else 4, Tower, shard)
        turns = {id(twin.model): rank % 3} | {id(m): 0 for m in twin.plain}
        twin.train(lambda model, x: penalty(model, square(model, x), turns[id(model)]), 2)

    simulate_ranks(ranks, 2 if strategy == "NO_SHARD" else 4)
