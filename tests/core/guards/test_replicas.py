"""Copies of a parameter that were edited on some ranks only are found, and the ranks named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fsdp_compose as fc
from fsdp_compose import ShardingStrategy, set_debug, verify_replicas
from fsdp_compose.core.guards.replicas import checksum

from harness import rank_errors, run_ranks, simulate_ranks
from models import Recomputed, Tower, by_block, data, mesh_of_replicas, seeded, sgd, square


@pytest.mark.parametrize(("strategy", "world"), [("NO_SHARD", 2), ("HYBRID_SHARD", 4)])
def test_an_edit_on_some_ranks_is_found(strategy: str, world: int) -> None:
    """By ``verify_replicas`` on every rank, and by the next backward in debug mode."""

    def build(kind: type[nn.Module] = Tower) -> nn.Module:
        mesh = mesh_of_replicas(2, 2) if world == 4 else None
        return by_block(seeded(kind), mesh=mesh, strategy=ShardingStrategy[strategy])

    def check(rank: int) -> None:
        set_debug(True)
        model = build()
        for step in range(2):
            square(model, data(step, rank)).backward()
            sgd(model.parameters()).step()
        verify_replicas(model)
        with torch.no_grad():
            if rank == world - 1:
                model.blocks[1].down.weight.mul_(2)
        wanted = r"down\.weight' of unit 'blocks\.1' is copied .* and other numbers on"
        with pytest.raises(RuntimeError, match="verify_replicas: .*" + wanted):
            verify_replicas(model)
        with pytest.raises(RuntimeError, match="debug mode.*" + wanted):
            square(model, data(9, rank)).backward()

    def drift(rank: int) -> None:
        model = build()
        if rank == 0:
            model.first.weight.data.add_(1)
        verify_replicas(model)

    def recomputed(rank: int) -> None:
        set_debug(True)
        model = build(Recomputed)
        with torch.no_grad():
            if rank == world - 1:
                model.blocks[1].down.weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"debug mode.*down\.weight' of unit 'blocks\.1'"):
            square(model, data(9, rank)).backward()

    run_ranks(check, world)
    run_ranks(recomputed, world)
    assert all("first.weight" in str(error) for error in rank_errors(drift, world))


def test_nothing_copied_is_nothing_to_verify() -> None:
    """FULL_SHARD and a world of one send nothing."""

    def check(rank: int) -> int:
        model = by_block(seeded(Tower))
        with fc.count_traffic() as traffic:
            verify_replicas(model)
        return traffic.control

    assert run_ranks(check, 2) == [0, 0]


def test_a_conversion_of_one_copy_is_refused() -> None:
    """``verify_replicas`` reads converted parameters as a forward does: all of a unit or none."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower), strategy=ShardingStrategy.NO_SHARD)
        square(model, data(0, rank)).backward()
        model.first.weight.data = model.first.weight.data.float()
        with pytest.raises(RuntimeError, match=r"'first.weight' is torch.float32 on cpu"):
            verify_replicas(model)

    simulate_ranks(check)


def test_sums_are_taken_where_the_numbers_are() -> None:
    """Whatever device new tensors are made on."""
    numbers = data(0, 0, 40)
    wanted = checksum(numbers)
    with torch.device("meta"):
        assert checksum(numbers) == wanted
