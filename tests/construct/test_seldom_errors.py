"""Errors of models and meshes that seldom come, on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor

import fsdp_compose as fc
from fsdp_compose import (
    MixedPrecision,
    ShardingStrategy,
    declare_tensor_parallel,
    fully_shard,
    int8_codec,
    simulate,
)
from fsdp_compose.simulation import SimulationError


def axes(dp: int = 1) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, 2), mesh_dim_names=("dp", "tp"))


def encode_gathers_in_two_steps() -> None:
    options = {"mp_policy": MixedPrecision(gather_codec=int8_codec())}
    mesh = init_device_mesh("cpu", (2, 1))
    strategy = ShardingStrategy.HYBRID_SHARD_OPTIMIZER
    fully_shard(nn.Linear(8, 8), mesh=mesh, strategy=strategy, **options)


def repeat_other_values_beside_parts() -> None:
    mesh = axes()
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    nn.init.constant_(model[1].weight, mesh["tp"].get_local_rank())
    declare_tensor_parallel([*model[0].parameters()], mesh["tp"], 0)
    fully_shard(model, mesh=mesh["dp"])


class Replaces(nn.Linear):
    """Initialises a weight of another shape once it is sharded."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            self.weight = nn.Parameter(torch.zeros(3, 3))


def replace_while_initialising() -> None:
    with torch.device("meta"):
        model = Replaces(4, 4)
    fully_shard(model)


def load_one_name_twice() -> None:
    model = fully_shard(nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2))))
    state = fc.state_dict(model)
    state["0._checkpoint_wrapped_module.weight"] = state["0.weight"]
    fc.load_state_dict(model, state)


def declare_over_two_axes() -> None:
    declare_tensor_parallel(nn.Linear(2, 2).weight, axes(), 0)


def change_what_was_declared() -> None:
    mesh, model = axes(), nn.Linear(2, 2)
    declare_tensor_parallel(model.weight, mesh["tp"], 0)
    model.weight.data = torch.zeros(3, 2)
    fully_shard(model, mesh=mesh["dp"])


def shard_placed(placement: Placement, rows: Sequence[int]) -> None:
    """A weight of 4 rows, of which each rank of the tp axis has so many."""
    mesh, model = axes(), nn.Linear(2, 4, bias=False)
    local = torch.zeros(rows[mesh["tp"].get_local_rank()], 2)
    weight = DTensor.from_local(
        local, mesh["tp"], [placement], run_check=False, shape=torch.Size([4, 2]), stride=(2, 1)
    )
    model.weight = nn.Parameter(weight)
    fully_shard(model, mesh=mesh["dp"])


def add_up_parts_in_a_tree() -> None:
    mesh, model = axes(), nn.Linear(2, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh["tp"], [Shard(0)]))
    fully_shard(model, mesh=mesh["dp"], deterministic=2)


PROGRAMS: dict[str, tuple[Callable[[], None], str]] = {
    "a codec, two steps": (
        encode_gathers_in_two_steps,
        "in two steps, which a codec cannot encode",
    ),
    "other norms": (
        repeat_other_values_beside_parts,
        "'1.weight' of unit 'Sequential' differs between rank 0 and rank 1, which hold parts",
    ),
    "replaced": (
        replace_while_initialising,
        "initialisation replaced 'weight' of Replaces, (4, 4), with a tensor of shape (3, 3)",
    ),
    "twice": (load_one_name_twice, "weight' and another key both mean '0.weight'"),
    "two axes": (declare_over_two_axes, "mesh has 2 dimensions ('dp', 'tp'); wanted one"),
    "changed": (change_what_was_declared, "has shape (3, 2), but was declared as a part of shape"),
    "uneven": (
        lambda: shard_placed(Shard(0), (3, 1)),
        "; wanted (2, 2), as torch.distributed.tensor.distribute_tensor cuts it",
    ),
    "partial": (lambda: shard_placed(Partial(), (4, 4)), "wanted Shard and Replicate only"),
    "in a tree": (add_up_parts_in_a_tree, "whose sums over ranks have an order of their own"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_an_error_on_every_rank(name: str) -> None:
    program, text = PROGRAMS[name]
    with pytest.raises(SimulationError) as caught:
        simulate(program, 2)
    errors = caught.value.errors
    assert set(errors) == {0, 1}
    for error in errors.values():
        assert isinstance(error, ValueError) and re.search(re.escape(text), str(error)), error
