"""Copies of a parameter that ranks write, or edit, each for itself are found, and named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose import (
    ShardingStrategy,
    count_traffic,
    fully_shard,
    reduce_grads,
    set_debug,
    set_requires_all_reduce,
    unshard,
    verify_replicas,
    wrap,
)
from fsdp_compose.comm.collectives import is_point_to_point
from fsdp_compose.core import passes
from fsdp_compose.core.guards import forward_writes, replicas
from fsdp_compose.core.guards.replicas import checksum
from fsdp_compose.core.guards.used_parameters import is_known_at_once

from harness import fake_world, rank_errors, run_ranks, simulate_ranks
from models import (
    WIDTH,
    Ledger,
    Recomputed,
    Tower,
    by_block,
    data,
    mesh_of_replicas,
    one_unit,
    seeded,
    sgd,
    square,
    units,
)


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
                model.blocks[1].down.weight.to_local().mul_(2)
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
                model.blocks[1].down.weight.to_local().mul_(2)
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


class Filling(nn.Linear):
    """Writes one number into its weight, another into its bias."""

    filling, value = 0.5, 0.0

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.fill_(self.filling)
            self.bias.fill_(self.value)
        return super().forward(x)


def test_each_weight_that_replicas_write_is_compared() -> None:
    """The first is alike on all ranks, the second is not."""

    def ranks(rank: int) -> None:
        model = fully_shard(Filling(WIDTH, WIDTH), strategy=ShardingStrategy.NO_SHARD)
        model.value = float(rank)
        model(torch.ones(1, WIDTH))

    for text in rank_errors(ranks, 2):
        assert text is not None and "write different weights" in text
        assert "parameter 'bias'" in text and "'weight'" not in text


def test_borrowed_weights_that_ranks_write_differ() -> None:
    """Also where the unit's own parameters are on one rank alone."""

    def ranks(rank: int) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Filling(WIDTH, WIDTH))
        model[0].weight = model[1].weight
        fully_shard(model[0], strategy=ShardingStrategy.NO_SHARD)
        fully_shard(model[1], mesh="self")
        own, borrowed = units(model[1])[0].gathered
        assert own.mesh.size == 1 and borrowed.mesh.size == 2
        model[1].filling = float(rank)
        model(torch.ones(1, WIDTH))

    for text in rank_errors(ranks, 2):
        assert text is not None and "write different weights" in text
        assert "unit 'Filling' (parameter 'weight'" in text


def test_messages_between_pairs_stall_no_accelerator() -> None:
    """Ranks are asked at once on a CPU, and elsewhere where every group has such messages."""

    def ranks(rank: int) -> None:
        (bucket,) = units(one_unit(seeded(lambda: nn.Linear(WIDTH, WIDTH))))[0].buckets
        groups = list(bucket.mesh.groups)
        assert is_known_at_once(bucket, groups)
        bucket.mesh = replace(bucket.mesh, device=torch.device("meta"))
        assert is_known_at_once(bucket, groups) == all(map(is_point_to_point, groups))
        bare = replace(groups[0], transport=None, backend="none")
        assert not is_known_at_once(bucket, [*groups, bare])

    simulate_ranks(ranks)


def test_replicas_that_nobody_compares_are_summed() -> None:
    """In a world that moves nothing, gradients that wait for replicas are reduced and set."""
    with fake_world(4):
        options = {"mesh": mesh_of_replicas(2, 2), "strategy": ShardingStrategy.HYBRID_SHARD}
        model = one_unit(seeded(lambda: nn.Linear(WIDTH, WIDTH)), **options)
        set_requires_all_reduce(model, False)
        square(model, data(0, 0)).backward()
        assert "not reduced yet" in repr(model.weight.grad)
        with count_traffic() as traffic:
            reduce_grads(model)
        assert "not reduced yet" not in repr(model.weight.grad)
        assert traffic.control == 0


def test_ranks_that_write_into_different_units() -> None:
    """Each says which weight it wrote, and the ranks know that they have parted."""

    def ranks(rank: int) -> None:
        model = nn.Sequential(Filling(WIDTH, WIDTH), Filling(WIDTH, WIDTH))
        fully_shard(model, units=wrap.by_class({Filling}))
        unshard(model[0])
        unshard(model[1])
        (log,) = units(model[0])[0].links.logs
        with pytest.raises(RuntimeError, match=rf"parameter '{rank}\.weight' of unit '{rank}'"):
            model[rank](torch.ones(1, WIDTH))
        assert log.disagreements == 1

    simulate_ranks(ranks)


def test_checksums_take_memory_for_one_piece() -> None:
    """However large the parameter is."""
    peaks: list[int] = []
    for words in (1 << 20, 1 << 21):
        tensor = torch.zeros(words, dtype=torch.float64)
        with Ledger(tensor) as ledger:
            replicas.sum_bytes(tensor)
        peaks.append(ledger.peak)
    assert peaks[0] == peaks[1]


def test_copies_of_a_part_of_a_unit_are_compared() -> None:
    def ranks(rank: int) -> None:
        model = fully_shard(
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            strategy=ShardingStrategy.NO_SHARD,
            init="broadcast",
        )
        verify_replicas(model[1])
        fc.named_local_parameters(model)["1.bias"].data.fill_(float(rank))
        verify_replicas(model[1])

    for text in rank_errors(ranks, 2):
        assert text is not None and "'1.bias'" in text


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_a_captured_step_reads_no_values(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In debug mode too, and of whatever kind: a CUDA graph computes none until it is replayed."""
    read: list[str] = []

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower), strategy=ShardingStrategy[strategy])
        for _ in range(2):
            square(model, data(0, rank)).backward()
        with torch.no_grad():
            model.eval()(data(0, rank))

    for module in (forward_writes, passes):
        monkeypatch.setattr(module, "is_capturing", lambda: True)
    monkeypatch.setattr(replicas, "checksum", lambda tensor: read.append("checksum") or 0)
    monkeypatch.setattr(forward_writes, "find_difference", lambda bucket: read.append("value"))
    set_debug(True)
    try:
        simulate_ranks(ranks)
    finally:
        set_debug(False)
    assert not read
