"""Different meshes on the ranks, or one whose replicas do not fit, raise on every rank at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_compose import (
    ShardingStrategy,
    clip_grad_norm_,
    declare_tensor_parallel,
    fully_shard,
    refresh,
    set_gradient_divide_factor,
)
from fsdp_compose.base.process import here
from fsdp_compose.base.torch_private import KEEPS_RANK_ORDER, default_store

from harness import rank_errors, run_ranks, simulate_ranks
from models import Tower, Twin, by_block, units

Make = Callable[[int], Any]


def grid(rank: int) -> Any:
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return mesh if rank == 0 else flat


def own_group(rank: int) -> Any:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    return groups[rank]


def none_or_group(rank: int) -> Any:
    group = dist.new_group([0, 1])
    return group if rank else None


def part_of_the_world(rank: int) -> Any:
    group = dist.new_group([0, 1, 2])
    return group if rank == 2 else None


CASES: dict[str, tuple[int, Make]] = {
    "another group of the same ranks": (2, own_group),
    "no mesh or a group": (2, none_or_group),
    "one axis or two": (4, grid),
    "a part of the world": (4, part_of_the_world),
}


@pytest.mark.parametrize("case", CASES)
def test_different_meshes_are_told_on_every_rank(case: str) -> None:
    """Also where one call was right before, and where the model is refreshed."""
    world, make = CASES[case]

    def ranks(rank: int) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        fully_shard(model[0])
        refresh(model)
        started = time.monotonic()
        mesh = make(rank)
        try:
            fully_shard(model, mesh=mesh)
        finally:
            assert time.monotonic() - started < 15

    for text in rank_errors(ranks, world):
        assert text is not None and "ValueError" in text, text
        assert "given a mesh or a group over ranks (0, " in text and "mesh['dp']" in text, text


def test_what_two_of_four_ranks_find_is_raised_on_all() -> None:
    """Experts are on two ranks each; ranks of the others hear that some were edited apart."""

    def ranks(rank: int) -> None:
        torch.manual_seed(0)
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
        fully_shard(model[0], mesh=pairs[rank // 2])
        set_gradient_divide_factor(model[0], 4)
        fully_shard(model)
        model[0].append(nn.Linear(2, 2 + rank % 2 * (rank < 2)))
        with pytest.raises(ValueError, match=r"^refresh: rank 1 shards other units"):
            refresh(model)
        del model[0][1]
        refresh(model)(torch.ones(1, 2)).sum().backward()

    simulate_ranks(ranks, 4)


def test_ranks_that_wait_for_late_ones_do_not_differ() -> None:
    """Ranks of a smaller group that are slow, of which the others wait for one, in any order."""

    def ranks(rank: int) -> None:
        small = dist.new_group([0, 1])
        model, part = nn.Linear(2, 2), nn.Linear(2, 2)
        if rank == 0:
            time.sleep(2.5)
        if rank < 2:
            fully_shard(part, mesh=small)
            if rank == 0:
                time.sleep(1.5)
        fully_shard(model)

    run_ranks(ranks, 3)


def test_ranks_in_time_touch_no_store() -> None:
    """One that waits says where, and takes that back."""

    def ranks(rank: int) -> None:
        store, places = default_store(), [f"fsdp_compose/meets/{r}" for r in range(2)]
        fully_shard(nn.Linear(2, 2))
        dist.barrier()
        assert not any(store.check([place]) for place in places)
        if rank:
            here.clock.sleep(60.0)
            assert b"[0, 1]" in store.get(places[0])
        fully_shard(nn.Linear(2, 2))
        dist.barrier()
        assert store.get(places[0]) == b"" and not store.check(places[1:])

    simulate_ranks(ranks)


def test_declared_parts_over_different_meshes() -> None:
    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        other = own_group(rank)
        declare_tensor_parallel(nn.Linear(2, 2).weight, other if rank else mesh, 0)

    for text in rank_errors(ranks, 2):
        assert text is not None and "declare_tensor_parallel: rank 0 was given" in text, text


def test_exchanges_in_time_touch_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fsdp_compose.comm.meeting.default_store", lambda: pytest.fail("used the store")
    )
    run_ranks(lambda rank: len(units(fully_shard(nn.Linear(2, 2)))), 2)


HYBRIDS = (
    ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy.HYBRID_SHARD_ZERO2,
    ShardingStrategy.HYBRID_SHARD_OPTIMIZER,
)


@pytest.mark.parametrize("strategy", HYBRIDS, ids=lambda s: s.name)
@pytest.mark.parametrize("ranks", [[[1, 0], [3, 2]], [[2, 3], [0, 1]], [[3, 1], [2, 0]]], ids=str)
def test_meshes_in_another_order_train(ranks: list[list[int]], strategy: ShardingStrategy) -> None:
    """As in one process, wherever the groups number replicas of a slice alike."""
    if strategy is ShardingStrategy.HYBRID_SHARD_OPTIMIZER and not KEEPS_RANK_ORDER:
        pytest.skip("refused on this torch")

    def train(rank: int) -> None:
        mesh = DeviceMesh("cpu", ranks)
        Twin(rank, 4, Tower, partial(by_block, mesh=mesh, strategy=strategy)).train()

    simulate_ranks(train, 4)


@pytest.mark.parametrize("is_pair", [False, True], ids=["mesh", "pair"])
def test_replicas_of_other_slices_are_refused(is_pair: bool) -> None:
    """On every rank, also on those whose own copies fit; the gradients summed other slices."""

    def shard(rank: int) -> str:
        mesh = DeviceMesh("cpu", [[0, 1, 2], [3, 5, 4]])
        given: Any = (mesh.get_group(1), mesh.get_group(0)) if is_pair else mesh
        with pytest.raises(ValueError, match="are to hold copies of the same slices") as caught:
            fully_shard(nn.Linear(2, 2), mesh=given)
        return str(caught.value)

    for text in simulate_ranks(shard, 6):
        assert "ascending order" in text


@pytest.mark.skipif(not KEEPS_RANK_ORDER, reason="groups number their ranks by size")
@pytest.mark.parametrize("spread", [True, 2])
def test_a_group_in_an_order_of_its_own(spread: bool | int) -> None:
    """Ranks of smaller groups, too, are numbered as in the group that they are cut from."""

    def ranks(rank: int) -> None:
        order: dict[str, Any] = {"sort_ranks": False}
        group = dist.new_group([2, 0, 3, 1], **order)
        Twin(
            rank, 4, Tower, lambda m: by_block(m, mesh=group, reshard_after_forward=spread)
        ).train()

    simulate_ranks(ranks, 4)


@pytest.mark.parametrize("everything", [False, True], ids=["group", "all groups"])
def test_a_destroyed_mesh_is_named(everything: bool) -> None:
    """As one is that a program keeps over an elastic restart; torch names a number of a group."""

    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ep"))
        group = dist.new_group([0, 1])
        given = [(mesh, mesh["ep"]), (group, group)]
        model = fully_shard(nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        for ended in (None,) if everything else (group, mesh.get_group("ep")):
            dist.destroy_process_group(ended)
        for data, experts in given:
            with pytest.raises(ValueError, match=r"fully_shard: .* was destroyed"):
                fully_shard(nn.Linear(2, 2), mesh=data)
            with pytest.raises(ValueError, match=r"declare_tensor_parallel: .* was destroyed"):
                declare_tensor_parallel(nn.Linear(2, 2).weight, experts, 0)
            with pytest.raises(ValueError, match=r"clip_grad_norm_: .* was destroyed"):
                clip_grad_norm_(model, 1.0, expert_mesh=experts)

    run_ranks(ranks, 2)
