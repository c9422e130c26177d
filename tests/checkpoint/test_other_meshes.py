"""Sharded state loads over ranks in another order, of which some have the same slices already."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import fsdp_compose as fc
from fsdp_compose.base.torch_private import KEEPS_RANK_ORDER

from harness import simulate_ranks
from models import adamw, by_block, data, mesh_of_replicas, seeded, square, two_blocks

MESHES: dict[str, Any] = {
    "one axis": dict,
    "pairs": lambda: hybrid([[0, 1], [2, 3]], "HYBRID_SHARD"),
    "other pairs": lambda: hybrid([[0, 2], [1, 3]], "HYBRID_SHARD"),
    "both axes": lambda: {
        "mesh": mesh_of_replicas(2, 2),
        "strategy": fc.ShardingStrategy.HYBRID_SHARD_OPTIMIZER,
    },
}


def hybrid(rows: list[list[int]], strategy: str) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", torch.tensor(rows), mesh_dim_names=("replicate", "shard"))
    return {"mesh": mesh, "strategy": fc.ShardingStrategy[strategy]}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("both axes", "one axis"), ("one axis", "both axes"), ("pairs", "other pairs")],
)
def test_slices_of_another_mesh_load(saved: str, loaded: str) -> None:
    """All ranks gather what some have; torch's own loading, which cannot, raises on all."""

    def body(rank: int) -> None:
        model = by_block(seeded(two_blocks), **MESHES[saved]())
        optim = adamw(model.parameters())
        square(model, data(0, rank)).backward()
        optim.step()
        other = by_block(seeded(two_blocks, 1), **MESHES[loaded]())
        fresh = adamw(other.parameters())
        fc.load_state_dict(other, fc.state_dict(model, kind="sharded"))
        fc.load_optim_state_dict(other, fresh, fc.optim_state_dict(model, optim, kind="sharded"))
        found, wanted = fc.state_dict(other), fc.state_dict(model)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        state, saved_state = fc.optim_state_dict(other, fresh), fc.optim_state_dict(model, optim)
        torch.testing.assert_close(state["state"], saved_state["state"], rtol=0, atol=0)
        # Where torch orders groups by rank, so are the slices over both axes: those of one axis.
        with (
            pytest.raises(RuntimeError, match="which cuts state of any layout")
            if KEEPS_RANK_ORDER or saved == "pairs"
            else nullcontext()
        ):
            fresh.load_state_dict(optim.state_dict())

    simulate_ranks(body, 4)
