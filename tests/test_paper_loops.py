"""Loops of papers, unchanged, train sharded models to the weights of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fsdp_compose as fc
from fsdp_compose.simulation import simulate

from paper_loops import LOOPS, Found, Lab

SHARDED: dict[str, tuple[int, dict[str, Any]]] = {
    "FULL_SHARD": (2, {}),
    "kept, by rows": (3, {"strategy": fc.ShardingStrategy.SHARD_GRAD_OP, "granularity": "row"}),
}


@pytest.mark.filterwarnings("ignore:the forward of unit")  # of a block that is skipped
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("kind", SHARDED)
def test_a_loop_of_a_paper_is_exact(kind: str, name: str) -> None:
    world, options = SHARDED[kind]
    wanted = LOOPS[name](Lab(world))

    def ranks() -> Found:
        return LOOPS[name](Lab(world, options))

    for found in simulate(ranks, world):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=1e-7, atol=1e-9, msg=key)
