"""Buckets of one unit over one group travel in one call, where a transport has one.

Gloo ranks compare what they do ahead of each gather, so the ranks here are told that they do not,
and use the collectives of their group, as on NCCL.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose import MixedPrecision, Prefetch, ShardingStrategy
from fsdp_compose.base.group import SELF, Group, Transport
from fsdp_compose.base.mesh import group_of
from fsdp_compose.base.parts import cut_by_rank
from fsdp_compose.base.process import here
from fsdp_compose.buckets.bucket import Bucket, Phase
from fsdp_compose.comm import collectives as comm
from fsdp_compose.comm import transports
from fsdp_compose.comm.transports import AT_ONCE
from fsdp_compose.core import reducing

from harness import fake_world, run_ranks, simulate_ranks
from models import ThreeBuckets, by_block, data, mesh_of_replicas, seeded, sgd, square, units

APART = replace(AT_ONCE, gather_all=None, reduce_all=None)
DOUBLE = MixedPrecision(torch.float64, torch.float64)
KEPT = ShardingStrategy.SHARD_GRAD_OP


def buckets_of(model: nn.Module) -> list[Bucket]:
    return [bucket for unit in units(model) for bucket in unit.buckets]


class Calls:
    """By rank, how many buffers each call of a group gathered or reduced."""

    def __init__(self) -> None:
        self.gathers: defaultdict[int, list[int]] = defaultdict(list)
        self.reduces: defaultdict[int, list[int]] = defaultdict(list)


@contextmanager
def at_once(is_simulated: bool) -> Iterator[Calls]:
    """Inside, buffers travel through the group's collectives, and the calls are noted."""
    calls = Calls()

    def noted(counts: defaultdict[int, list[int]], theirs: Any, name: str) -> Any:
        def call(pg: Any, outs: Any, *rest: Any) -> Any:
            counts[dist.get_rank()].append(len(outs) if isinstance(outs, list) else 1)
            return getattr(pg, name)(outs, *rest) if is_simulated else theirs(pg, outs, *rest)

        return call

    names = {
        "all_gather_several": (calls.gathers, "all_gather_single_coalesced"),
        "all_gather_single": (calls.gathers, "all_gather_single"),
        "reduce_scatter_several": (calls.reduces, "reduce_scatter_single_coalesced"),
        "reduce_scatter_single": (calls.reduces, "reduce_scatter_single"),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "is_point_to_point", lambda group: False)
        for ours, (counts, name) in names.items():
            patch.setattr(transports, ours, noted(counts, getattr(transports, ours), name))
        yield calls


def train(rank: int, transport: Transport | None, options: dict[str, Any]) -> list[Tensor]:
    """Losses and this rank's slices after steps with all that is gathered again in them."""
    if "mesh" in options:
        options = {**options, "mesh": mesh_of_replicas(*options["mesh"])}
    model = by_block(seeded(ThreeBuckets), **{"mp_policy": DOUBLE, **options}, transport=transport)
    optim = sgd(p for p in model.parameters() if p.requires_grad)
    found: list[Tensor] = []
    for step in range(2):
        with fc.no_sync(model):
            square(model, data(step, rank)).backward()
        loss = square(model, data(10 + step, rank))
        loss.backward()
        fc.clip_grad_norm_(model, 1.0)
        found += [loss.detach(), *(p.grad.to_local() for p in optim.param_groups[0]["params"])]
        optim.step()
        optim.zero_grad()
    with torch.no_grad():
        found.append(model(data(0, rank)))
        model.blocks[0].up.bias.data.mul_(2.0)  # frozen, and gathered again where it was kept
        found.append(model(data(0, rank)))
    return found + [p.to_local().detach() for p in model.parameters()]


CELLS: dict[str, tuple[int, dict[str, Any]]] = {
    "default": (2, {}),
    "uneven": (3, {}),
    "kept": (2, {"strategy": KEPT}),
    "no shard": (2, {"strategy": ShardingStrategy.NO_SHARD}),
    "hybrid": (4, {"strategy": ShardingStrategy.HYBRID_SHARD, "mesh": (2, 2)}),
    "fused": (4, {"strategy": ShardingStrategy.HYBRID_SHARD_OPTIMIZER, "mesh": (2, 2)}),
    "spread": (4, {"reshard_after_forward": 2}),
    "codec": (2, {"mp_policy": replace(DOUBLE, gather_codec=fc.bf16_codec())}),
    "deep prefetch": (2, {"prefetch": Prefetch(3, 3, "post")}),
    "static": (2, {"static_buffers": 4}),
    "offload": (2, {"offload_policy": fc.Offload(params=True, grads=True)}),
}


@pytest.mark.parametrize("cell", CELLS)
def test_together_and_apart_are_the_same_bits(cell: str) -> None:
    """With fewer calls of the group; what is counted as traffic is the same."""
    world, options = CELLS[cell]

    def ranks(rank: int) -> list[Tensor]:
        counts, results, traffic = [], [], []
        for transport in (AT_ONCE, APART):
            both = calls.gathers[rank], calls.reduces[rank]
            for noted in both:
                noted.clear()
            here.traffic.reset()
            results.append(train(rank, transport, options))
            moved = here.traffic
            traffic.append((moved.gathers, moved.gather_bytes, moved.reduces, moved.reduce_bytes))
            counts.append([list(noted) for noted in both])
        assert all(map(torch.equal, *results)) and traffic[0] == traffic[1]
        for together, apart, several in zip(*counts, (3, 2)):
            assert sum(together) == len(apart) and set(apart) <= {1}
            assert set(together) <= {1, several}
            assert several in together or cell == "no shard"
        return results[0]

    with at_once(is_simulated=True) as calls:
        found = simulate_ranks(ranks, world)
    torch.testing.assert_close(found, simulate_ranks(train, world, None, options))


def test_one_call_for_each_group() -> None:
    """What travels over other ranks, or by another transport, has a call of its own."""
    asked: list[int] = []

    def gather_all(wholes: Any, parts: Any, owns: Any, call: Any) -> Any:
        asked.append(len(wholes))
        assert AT_ONCE.gather_all is not None
        return AT_ONCE.gather_all(wholes, parts, owns, call)

    def ranks(rank: int) -> None:
        mine = replace(AT_ONCE, gather_all=gather_all)
        pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
        halves = replace(group_of(pairs[rank // 2], torch.device("cpu")), transport=mine)
        world = replace(group_of(dist.group.WORLD, torch.device("cpu")), transport=mine)
        plans = []
        one = replace(SELF, transport=mine)  # which nothing travels to
        for index, group in enumerate((world, halves, world, halves, one, one)):
            whole = torch.zeros(4 * group.size, dtype=torch.uint8)
            own = torch.full((4,), 10 * index + rank, dtype=torch.uint8)
            parts = cut_by_rank(whole, group.size)
            plans.append(comm.plan_gather(whole, parts, own, group, "gather"))
        alone = replace(world, transport=replace(mine))  # another one, of which there is one gather
        plans.append(comm.plan_gather(whole.new_zeros(16), (), own, alone, "gather"))
        asked.clear()
        comm.start_gathers(plans)
        for index, plan in enumerate(plans[:4]):
            plan.exchange.wait()
            members = plan.call.group.ranks
            wanted = [10 * index + r for r in members for _ in range(4)]
            assert plan.whole.tolist() == wanted
        plans[6].exchange.wait()
        assert plans[6].whole.tolist() == [50 + r for r in range(4) for _ in range(4)]
        assert asked == [2, 2]

    run_ranks(ranks, 4)


@pytest.mark.parametrize(("backend", "is_one"), [("nccl", True), ("mpi", False), ("gloo", False)])
def test_backends_that_are_known_to(backend: str, is_one: bool) -> None:
    """Another backend may lack the call, and gathers one bucket after the other."""
    group = Group(None, 0, 2, backend, (0, 1))
    assert (transports.transport_of(group).gather_all is not None) == is_one


class Broken:
    """As a collective's work, whose first wait fails."""

    waits = 0

    def wait(self) -> None:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("the connection was closed")


@pytest.mark.parametrize("fails", ["memory for the last bucket", "the call", "the wait for it"])
def test_a_unit_that_could_not_be_gathered(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of its buckets is gathered then, and the next forward gathers all of them."""
    broken = Broken()

    def fail(*_: Any) -> Broken:
        if fails == "the call":
            raise MemoryError
        return broken

    def resize(storage: Any, nbytes: int) -> None:
        if nbytes and storage is last.full.untyped_storage():
            raise MemoryError
        resized(storage, nbytes)

    resized = torch.UntypedStorage.resize_
    with fake_world(2):
        model = by_block(seeded(ThreeBuckets), mp_policy=DOUBLE)
        model(data(0, 0))
        unit = units(model)[1]
        assert unit.name == "blocks.0" and len(unit.buckets) == 3
        last = unit.gathered[-1]
        with monkeypatch.context() as patch:
            if fails.startswith("memory"):
                patch.setattr(torch.UntypedStorage, "resize_", resize)
            else:
                patch.setattr(transports, "all_gather_several", fail)
            with pytest.raises((MemoryError, RuntimeError)):
                model(data(0, 0))
        for bucket in unit.gathered:
            assert bucket.phase is Phase.SHARDED and bucket.full.untyped_storage().nbytes() == 0
        square(model, data(0, 0)).backward()


@pytest.mark.parametrize("transport", [AT_ONCE, APART])
def test_a_held_unit_that_could_not_be_gathered(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is held still, and gathered when it runs next, though a gather had begun that is lost."""
    works = [Broken()] if transport is APART else []

    def fail(*_: Any) -> Broken:
        if not works:
            raise MemoryError
        return works.pop()

    with fake_world(2), torch.no_grad():
        strategy = ShardingStrategy.SHARD_GRAD_OP
        options = {"mp_policy": DOUBLE, "transport": transport, "strategy": strategy}
        block = by_block(seeded(ThreeBuckets), **options).blocks[0]
        unit = fc.get_state(block).unit
        block(data(0, 0))
        for param in block.parameters():
            param.mul_(2.0)
        with monkeypatch.context() as patch:
            patch.setattr(transports, "all_gather_several", fail)
            patch.setattr(transports, "all_gather_single", fail)
            with pytest.raises(MemoryError):
                fc.unshard(block)
        assert unit.holds
        assert [bucket.phase for bucket in unit.gathered] == [Phase.SHARDED] * 3
        block(data(0, 0))
        for bucket in unit.gathered:
            for part in bucket.full.view(2, -1):  # the other rank is played by this one
                assert torch.equal(part, bucket.stored.to(part.dtype))


def test_each_bucket_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A profile names the one call that gathers or reduces them, by the unit."""
    with fake_world(2), caplog.at_level(logging.DEBUG, "fsdp_compose"):
        plain = seeded(ThreeBuckets)
        for block in plain.blocks:
            block.down.bfloat16()
        model = by_block(plain, mp_policy=DOUBLE, strategy=KEPT)
        with torch.profiler.profile() as profile:
            square(model, data(0, 0)).backward()
        unit = units(model)[1]
    trained = [bucket for bucket in unit.buckets if bucket.grads is not None]
    for phase, buckets in (("gather", unit.gathered), ("reduce", trained)):
        lines = [r.message for r in caplog.records if f"{phase} blocks.0:" in r.message]
        sizes = [f"{bucket.views.nbytes} bytes" for bucket in buckets]
        assert len(lines) == len(sizes) == (4 if phase == "gather" else 3)
        assert all(size in line for size, line in zip(sizes, lines))
        ranges = [event.name for event in profile.events() if f"{phase} blocks.0" in event.name]
        assert ranges == [f"fsdp_compose.{phase} blocks.0"]


def test_a_hook_reduces_each_bucket_itself() -> None:
    """Also where the library would reduce a unit's buckets together."""

    def ranks(rank: int) -> list[Tensor]:
        asked: list[str] = []

        def hook(state: None, grads: Any) -> Tensor:
            asked.append(grads.key)
            return fc.default_hook(state, grads)

        model = by_block(seeded(ThreeBuckets), mp_policy=DOUBLE, transport=AT_ONCE)
        if hooked[0]:
            fc.register_comm_hook(model, None, hook)
        square(model, data(0, rank)).backward()
        grads = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
        trained = sum(any(p.requires_grad for p in b.views.params) for b in buckets_of(model))
        assert len(asked) == len(set(asked)) == (trained if hooked[0] else 0)
        assert (2 in calls.reduces[rank]) != hooked[0]
        calls.reduces[rank].clear()
        return grads

    hooked, found = [False], []
    with at_once(is_simulated=True) as calls:
        for hooked[0] in (False, True):
            found.append(simulate_ranks(ranks, 2))
    torch.testing.assert_close(*found)


def test_a_reduction_is_known_before_the_next_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the second of a unit's buckets cannot be reduced, the first is waited for."""
    asked: defaultdict[int, int] = defaultdict(int)

    def fail(bucket: Bucket, *rest: Any) -> Any:
        asked[dist.get_rank()] += 1
        if asked[dist.get_rank()] == 2:  # the last block, whose backward is the first, has two
            raise MemoryError
        return start(bucket, *rest)

    def ranks(rank: int) -> None:
        model = by_block(seeded(ThreeBuckets), mp_policy=DOUBLE)
        engine = fc.get_state(model).unit.engine
        with pytest.raises(MemoryError):
            square(model, data(0, rank)).backward()
        known = len(engine.reductions)
        assert known == 1
        model.zero_grad()
        square(model, data(0, rank)).backward()
        twin = by_block(seeded(ThreeBuckets), mp_policy=DOUBLE)
        square(twin, data(0, rank)).backward()
        for mine, wanted in zip(model.parameters(), twin.parameters()):
            if wanted.grad is not None:
                assert torch.equal(mine.grad.full_tensor(), wanted.grad.full_tensor())

    start = reducing.start_scatter
    monkeypatch.setattr(reducing, "start_scatter", fail)
    simulate_ranks(ranks, 2)


def test_ranks_over_gloo_travel_together() -> None:
    """As above, through the call of a group of torch's."""

    def ranks(rank: int) -> None:
        with at_once(is_simulated=False) as calls:
            results = [train(rank, way, {}) for way in (AT_ONCE, APART)]
        assert all(map(torch.equal, *results)) and 3 in calls.gathers[rank]
        assert 2 in calls.reduces[rank]

    run_ranks(ranks)
