"""Units over other groups of ranks than the model around them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

import fsdp_compose as fc
from fsdp_compose import ShardingStrategy

from harness import simulate_ranks
from models import Block, assert_at_rest, data, mesh_of_replicas, seeded, square, whole

INNER = {
    "replicas of 2": ShardingStrategy.HYBRID_SHARD,
    "optimizer over both": ShardingStrategy.HYBRID_SHARD_OPTIMIZER,
    "copies": ShardingStrategy.NO_SHARD,
}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("inner", INNER)
def test_a_hybrid_unit_inside_a_sharded_model(inner: str, swapped: bool) -> None:
    """Ranks end a step with their groups in one order, so none waits for another for ever."""

    def ranks(rank: int) -> None:
        flat = init_device_mesh("cpu", (4,))
        mesh = flat if inner == "copies" else mesh_of_replicas(2, 2)
        ways: Any = [{"mesh": mesh, "strategy": INNER[inner]}, {"mesh": flat}]
        plain = seeded(lambda: nn.Sequential(Block(), Block()))
        model = copy.deepcopy(plain)
        fc.fully_shard(model[0], **ways[swapped])
        fc.fully_shard(model, **ways[not swapped])
        for step in range(3):
            model.zero_grad(), plain.zero_grad()
            square(model, data(step, rank)).backward()
            sum(square(plain, data(step, r)) for r in range(4)).div(4).backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert_close(whole(p.grad), q.grad, rtol=1e-12, atol=1e-12)
            with torch.no_grad():
                assert_close(model(data(9, rank)), plain(data(9, rank)))
        if inner != "copies":
            assert_at_rest(model)

    simulate_ranks(ranks, 4)
