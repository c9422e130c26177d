"""``static_buffers=``: addresses of gathers and packed gradients stay, and nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compose as fc
from fsdp_compose import MixedPrecision, Prefetch, ShardingStrategy, fully_shard, get_state, wrap
from fsdp_compose.base.group import Started
from fsdp_compose.buckets import gradients
from fsdp_compose.buckets.bucket import Bucket, Phase
from fsdp_compose.comm.transports import PAIRS
from fsdp_compose.core import gathering

from harness import fake_world, run_ranks, simulate_ranks
from models import (
    WIDTH,
    Block,
    Checkpointed,
    Ledger,
    ThreeBuckets,
    Tower,
    Twin,
    by_block,
    data,
    mesh_of_replicas,
    seeded,
    sgd,
    square,
    units,
)
from planned_models import BLOCKS, Model


class Watched:
    """Where units were gathered and packed, in order, while it is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        self.gathered: list[tuple[str, int]] = []
        self.packed: list[tuple[str, int]] = []
        self.fill, self.lend = gathering.start_fills, gradients.open_grad_buffer

    def __enter__(self) -> Watched:
        def filled(buckets: Sequence[Bucket]) -> None:
            self.fill(buckets)
            for bucket in buckets:
                self.gathered.append((bucket.entries[0].spec.unit, bucket.full.data_ptr()))

        def opened(bucket: Bucket) -> Any:
            buffer = self.lend(bucket)
            self.packed.append((bucket.entries[0].spec.unit, buffer.flat.data_ptr()))
            return buffer

        gathering.start_fills, gradients.open_grad_buffer = filled, opened
        return self

    def __exit__(self, *_: object) -> None:
        gathering.start_fills, gradients.open_grad_buffer = self.fill, self.lend


def train(model: nn.Module, rank: int, steps: int = 2, micro: int = 1, scope: Any = None) -> Any:
    """Losses and parameters after some steps, and where each was gathered and packed."""
    optim = sgd(model.parameters())
    losses, places = [], []
    for step in range(steps):
        with Watched() as watched:
            for part in range(micro):
                is_last = part == micro - 1
                with nullcontext() if is_last or scope is None else scope(model):
                    loss = square(model, data(10 * step + part, rank))
                    loss.backward()
                losses.append(loss.item())
        optim.step()
        optim.zero_grad()
        places.append((watched.gathered, watched.packed))
    return losses, [p.full_tensor() for p in model.parameters()], places


def both(rank: int, make: Callable[[bool], nn.Module], **how: Any) -> list[Any]:
    """Trains with the mode off and on; equal to the last bit. Returns where the last was."""
    plain, fixed = (train(make(static), rank, **how) for static in (False, True))
    assert plain[0] == fixed[0]
    assert all(map(torch.equal, plain[1], fixed[1]))
    names = [[[name for name, _ in found] for found in step] for step in plain[2]]
    assert names == [[[name for name, _ in found] for found in step] for step in fixed[2]]
    return fixed[2]


def check_addresses(places: list[Any], gathers: int, packs: int) -> None:
    """Each unit is always gathered at one address, and in as many buffers as were promised."""
    where: dict[str, set[int]] = {}
    for gathered, _ in places:
        for name, pointer in gathered:
            where.setdefault(name, set()).add(pointer)
    assert all(len(pointers) == 1 for pointers in where.values())
    assert len(set.union(*where.values())) == gathers
    assert all(step[1] == places[-1][1] for step in places)
    assert len({pointer for _, packed in places for _, pointer in packed}) == packs


STRATEGIES = {
    "FULL_SHARD": 3,  # two for blocks, and the outermost unit's
    "SHARD_GRAD_OP": 4,  # one for each unit, since all stay gathered
    "HYBRID_SHARD": 3,
    "HYBRID_SHARD_OPTIMIZER": 3,
}


def strategies(rank: int) -> None:
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    mesh = mesh_of_replicas(2, 2)
    for name, buffers in STRATEGIES.items():
        chosen = {
            "strategy": ShardingStrategy[name],
            "mesh": mesh if name.startswith("HYBRID") else flat,
        }
        places = both(rank, lambda s, c=chosen: by_block(seeded(Tower), static_buffers=s, **c))
        check_addresses(places, buffers, 2)


def test_same_bits_at_fixed_addresses() -> None:
    run_ranks(strategies, 4)


WAYS: dict[str, tuple[Callable[[bool], nn.Module], dict[str, Any], int]] = {
    "checkpointed": (
        lambda s: by_block(seeded(lambda: Checkpointed("outside", False)), static_buffers=s), {}, 3,
    ),
    "reentrant": (
        lambda s: by_block(seeded(lambda: Checkpointed("outside", True)), static_buffers=s), {}, 3,
    ),
    "pairs": (
        lambda s: by_block(
            seeded(lambda: Checkpointed("pairs", False)), static_buffers=4 if s else False
        ), {}, 5,
    ),
    "deep": (
        lambda s: by_block(seeded(Tower), prefetch=Prefetch(2, 2), static_buffers=s), {}, 4,
    ),
    "late": (
        lambda s: by_block(
            seeded(Tower), prefetch=Prefetch(0, 1, "post"), static_buffers=s
        ), {}, 3,
    ),
    "mixed": (
        lambda s: by_block(
            seeded(Tower), mp_policy=MixedPrecision(torch.bfloat16, torch.float32), static_buffers=s
        ), {}, 3,
    ),
    "sharded": (
        lambda s: by_block(seeded(Tower), static_buffers=s),
        {"micro": 3, "scope": lambda m: fc.accumulate(m, keep="sharded")}, 3,
    ),
    "without blocks": (
        lambda s: by_block(
            seeded(Tower), reshard_after_forward=True, static_buffers=s
        ), {}, 3,
    ),
}  # fmt: skip


def ways(rank: int) -> None:
    for make, how, buffers in WAYS.values():
        check_addresses(both(rank, make, **how), buffers, 2)


def test_same_bits_with_checkpoints_and_prefetch() -> None:
    run_ranks(ways, 2)


class Held(Ledger):
    """Counts memory at its addresses, since units that take turns have a storage each."""

    def live(self) -> int:
        super().live()  # forgets storages that are gone
        spans = sorted(
            (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
            for ref in self.storages.values()
            if (storage := torch.UntypedStorage._new_with_weak_ptr(ref.cdata)) is not None
        )
        total = end = 0
        for start, stop in spans:
            total, end = total + max(0, stop - max(start, end)), max(end, stop)
        return total


PLANNED: dict[str, dict[str, Any]] = {
    "released": {},
    "kept": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "mixed": {"mp_policy": MixedPrecision(torch.bfloat16, torch.float32)},
    "deep": {"prefetch": Prefetch(2, 2)},
}


@pytest.mark.parametrize("name", PLANNED)
def test_memory_is_what_plan_says(name: str) -> None:
    """From the first step to the last, with one shard of gradients for the next backward."""
    with fake_world(8):
        model, options = Model(), {"static_buffers": True, **PLANNED[name]}
        before = fc.plan(model, units=BLOCKS, **options)
        by_block(model, **options)
        x = torch.ones(1, 128)
        square(model, x).backward()
        model.zero_grad()
        shards = [p.to_local() for p in model.parameters()]
        with Held(x, *shards) as ledger, fc.trace(model) as timeline:
            square(model, x).backward()
    plan = fc.plan(model)
    memory = plan.memory
    assert [span.lane for span in timeline.spans].count("gather") == plan.step.gathers
    assert timeline.moments[-1].gathered == timeline.moments[-1].packed == 0
    assert memory == before.memory
    planned = memory.static_buffers + memory.backward.total
    assert planned <= 1.02 * ledger.peak
    assert ledger.peak <= 1.02 * planned + 100 * 128 * 4  # activations of one row
    assert memory.forward.gathered == memory.backward.gathered == memory.backward.packed == 0
    held = {b.full_bytes for u in before.units for b in u.buckets}
    assert memory.static_buffers >= 2 * max(held)


def test_units_that_take_turns_make_room() -> None:
    """A unit gathered ahead gives way; one that is used is an error that says what to do."""
    with fake_world(2):
        model = by_block(seeded(lambda: Tower(4)), static_buffers=True)
        blocks = list(model.blocks)
        x = data(0, 0)
        square(model, x).backward()
        fc.unshard(blocks[0])
        fc.unshard(blocks[1])
        where = [get_state(block).unit.buckets[0].full.data_ptr() for block in blocks]
        assert where == where[:2] * 2 and len(set(where)) == 2
        fc.prefetch_units(model, [blocks[2]])
        assert get_state(blocks[2]).unit.buckets[0].phase is Phase.SHARDED
        wanted = (
            "unit 'blocks.2' is to be gathered .asked for by the caller. into a static buffer that"
        )
        with pytest.raises(RuntimeError, match=f"{wanted} unit 'blocks.0' is in"):
            fc.unshard(blocks[2])
        fc.reshard(blocks[0])
        fc.prefetch_units(model, [blocks[0]])
        fc.unshard(blocks[2])  # blocks.0 was gathered ahead, and gives way
        assert get_state(blocks[0]).unit.buckets[0].phase is Phase.SHARDED
        for block in blocks[1:3]:
            fc.reshard(block)
        with fc.gathered(model):
            assert all(p.shape.numel() for p in model.parameters())
        square(model, x).backward()


@pytest.mark.parametrize("give_up", [fc.unshard, fc.reshard])
def test_a_gather_given_up_keeps_its_buffer(give_up: Callable[..., Any]) -> None:
    """What may yet come there, as a rank has died, meets no unit that had turns in it."""
    is_cut = False

    class Work:
        def wait(self) -> None:
            if is_cut:
                raise RuntimeError("the connection was closed")

    def visit(*blocks: nn.Module) -> list[Tensor]:
        for block in blocks:
            fc.unshard(block)
            fc.reshard(block)
        return [get_state(block).unit.buckets[0].full for block in blocks]

    with fake_world(2):
        way = replace(PAIRS, gather=lambda *_: Started((Work(),)))
        model = by_block(seeded(lambda: Tower(4)), static_buffers=True, transport=way)
        before = visit(*model.blocks)  # alive, as where a message is yet to come
        fc.prefetch_units(model, [model.blocks[0]])
        is_cut = True
        with pytest.raises(RuntimeError, match="was closed"):
            give_up(model.blocks[0])
        fc.reshard(model.blocks[0])
        is_cut = False
        pointers = [[full.data_ptr() for full in each] for each in (before, visit(*model.blocks))]
        assert set(pointers[0]).isdisjoint(pointers[1])


class Twice(Tower):
    """Goes through its blocks twice: each call is gathered and released by itself."""

    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return super().forward(x)


def test_units_that_are_called_again_take_turns_too() -> None:
    with fake_world(2):
        model = by_block(seeded(Twice), static_buffers=True)
        for _ in range(2):
            square(model, data(0, 0)).backward()
        where = {get_state(block).unit.buckets[0].full.data_ptr() for block in model.blocks}
        assert len(where) == 2


class Keeper(Block):
    """Keeps a view of its weight from a forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.up.weight.t()
        return super().forward(x)


def test_a_kept_view_raises_though_memory_is_there() -> None:
    with fake_world(2):
        model = seeded(lambda: nn.Sequential(*(Keeper(WIDTH) for _ in range(4))))
        fully_shard(model, units=wrap.by_class({Keeper}), static_buffers=True)
        square(model, data(0, 0)).backward()
        kept = model[0].kept
        assert kept.untyped_storage().nbytes() > 0
        with pytest.raises(RuntimeError, match="kept from a forward is a view of parameter"):
            kept + 1
        assert "released" in repr(kept)


class Leaves(Block):
    """Leaves tensors of its forward in a list, from the second step on."""

    left: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        self.left.append(hidden)
        return self.down(hidden)


def test_a_backward_over_other_weights_raises() -> None:
    """Where nothing says that a backward begins, and memory holds the weights of other units."""
    with fake_world(2):
        model = seeded(lambda: nn.Sequential(*(Leaves(WIDTH) for _ in range(4))))
        model.requires_grad_(False)
        fully_shard(model, units=wrap.by_class({Leaves}), static_buffers=True)
        for _ in range(2):
            x = data(0, 0).requires_grad_()
            square(model, x).backward()
            Leaves.left.clear()
        for module in fc.units_of(model):
            get_state(module).unit.checks.warned.clear()  # as if the first forwards had kept none
        model(x)
        kept = Leaves.left[0]
        model(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.sum().backward()
        Leaves.left.clear()


def pointers_of(model: nn.Module) -> set[int]:
    """Where the units of a model are gathered."""
    units = [get_state(module).unit for module in fc.units_of(model)]
    return {bucket.full.data_ptr() for unit in units for bucket in unit.buckets}


def convert_while_gathered(rank: int, static: bool) -> Any:
    """Converts a model while a unit is gathered ahead for its second forward of a step."""
    model = by_block(
        seeded(lambda: nn.Sequential(*(Block(WIDTH) for _ in range(3)))),
        prefetch=Prefetch(2, 2),
        static_buffers=static,
    )
    for _ in range(2):
        (square(model, data(0, rank)) + square(model, data(1, rank))).backward()
        model.zero_grad()
    square(model, data(2, rank))
    assert get_state(model).unit.engine.schedule.prefetched
    model.float()
    square(model, data(3, rank).float()).backward()
    return [], [p.grad.full_tensor() for p in model.parameters()]


def converted(rank: int) -> None:
    """Conversions, copies, several models, unfrozen parameters, and microbatches that wait."""
    found = []
    for static in (False, True):
        model = by_block(seeded(lambda: Tower(4)), static_buffers=static)
        twin = copy.deepcopy(model)
        model.blocks.requires_grad_(False)
        results = [train(m, rank, steps=1) for m in (model, twin)]
        model.blocks.requires_grad_(True)
        results += [train(m, rank, micro=3, scope=fc.no_sync) for m in (model, twin)]
        wider = by_block(seeded(lambda: Tower(4)).float(), static_buffers=static)
        square(wider, data(0, rank).float()).backward()
        wider.zero_grad()
        results += [train(wider.double(), rank), convert_while_gathered(rank, static)]
        for m, dtype in ((model, torch.float), (twin, torch.double), (model, torch.double)):
            m.to(dtype)
            optim = sgd(m.parameters())
            for _ in range(2):
                square(m, data(0, rank, dtype=dtype)).backward()
                optim.step()
                optim.zero_grad()
            results.append(([], [p.full_tensor() for p in m.parameters()]))
        found.append([(losses, values) for losses, values, *_ in results])
        if static:
            places = [pointers_of(m) for m in (model, twin)]
            assert all(len(pointers) == 3 for pointers in places)
            assert places[0].isdisjoint(places[1])
    for plain, fixed in zip(*found, strict=True):
        assert plain[0] == fixed[0]
        assert all(map(torch.equal, plain[1], fixed[1]))


def test_same_bits_through_conversions_and_copies() -> None:
    run_ranks(converted, 2)


def test_simulated_ranks_have_their_own() -> None:
    def ranks() -> tuple[Any, set[int]]:
        model = by_block(seeded(Tower), static_buffers=True)
        return train(model, torch.distributed.get_rank(), steps=2)[:2], pointers_of(model)

    def plain() -> Any:
        return train(by_block(seeded(Tower)), torch.distributed.get_rank(), steps=2)[:2]

    (first, here), (second, there) = fc.simulate(ranks, 2)
    assert len(here) == len(there) == 3 and here.isdisjoint(there)
    for found, expected in zip((first, second), fc.simulate(plain, 2), strict=True):
        assert found[0] == expected[0]
        assert all(map(torch.equal, found[1], expected[1]))


class Tied(Tower):
    """Its third block, whose turn it is in the first one's buffer, has a weight of the first."""

    def __init__(self) -> None:
        super().__init__(4)
        self.blocks[2].up.weight = self.blocks[0].up.weight


def test_units_with_a_tied_weight_share_no_buffer() -> None:
    """They are gathered at once, and train as the plain model does."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Tied, lambda model: by_block(model, static_buffers=True))
        twin.train(steps=2)
        found = [get_state(block).unit.buckets[0].full.data_ptr() for block in twin.model.blocks]
        assert len(set(found)) == 4

    simulate_ranks(ranks)


class Halves(nn.Module):
    """Two towers, of which each is a unit around units."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(Tower(2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.halves[0](x) + self.halves[1](x)


def test_the_innermost_unit_is_gathered_first() -> None:
    """All units of the outermost one are found then: units of one height take turns in two."""

    def ranks(rank: int) -> None:
        def shard(model: nn.Module) -> None:
            fully_shard(model, units=wrap.by_class({Block, Tower}), static_buffers=True)

        twin = Twin(rank, 2, Halves, shard)
        fc.unshard(twin.model.halves[1].blocks[0])
        fc.reshard(twin.model.halves[1].blocks[0])
        twin.train(steps=2)
        halves = twin.model.halves
        heights = [*halves[0].blocks, *halves[1].blocks], list(halves)
        for modules in heights:
            found = [get_state(module).unit.buckets[0].full.data_ptr() for module in modules]
            assert len(set(found)) == 2

    simulate_ranks(ranks)


def test_ranks_that_gather_different_units() -> None:
    """They are told so, as they are without fixed addresses."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower), static_buffers=True)
        fc.unshard(model.blocks[rank])

    wanted = r"ranks run different units.*unit 'blocks\.0'.* unit 'blocks\.1'"
    with pytest.raises(RuntimeError, match=wanted):
        simulate_ranks(ranks)


def test_a_converted_part_keeps_its_address() -> None:
    """From the next gather on, in whichever bucket of its unit it is."""
    with fake_world(2):
        double = MixedPrecision(torch.float64, torch.float64)
        model = by_block(seeded(ThreeBuckets), mp_policy=double, static_buffers=True)
        assert len(get_state(model.blocks[0]).unit.buckets) == 3
        places: list[set[tuple[str, int]]] = []
        for names in ([], ["up", "down"], ["norm"]):
            for module in [block.get_submodule(name) for block in model.blocks for name in names]:
                module.to(torch.bfloat16)
            with Watched() as watched:
                square(model, data(0, 0)).backward()
            model.zero_grad()
            places.append(set(watched.gathered))
        assert len(places[0]) == 10 and places[0] == places[1] == places[2]


@pytest.mark.parametrize("value", [1, "two", 2.0])
def test_what_is_refused(value: Any) -> None:
    error = ValueError if value == 1 else TypeError
    with pytest.raises(error, match=r"static_buffers is .*; wanted"):
        fully_shard(nn.Linear(2, 2), static_buffers=value)
    policy = wrap.by_fn(lambda name, module: {"static_buffers": value} if name else False)
    with pytest.raises(error, match=r"override of unit .*: static_buffers is"):
        fully_shard(nn.Sequential(nn.Linear(2, 2)), units=policy)


def test_units_that_stay_gathered_share_no_buffer() -> None:
    """With ``static_buffers=``, where nothing is released after backward either."""

    def ranks(rank: int) -> None:
        def shard(model: nn.Module) -> None:
            by_block(model, static_buffers=True)
            fc.set_reshard_after_backward(model, False)

        twin = Twin(rank, 2, lambda: Tower(4), shard)
        for step in range(3):
            twin.backward(square, step)
            twin.step()
        blocks = [unit for block in twin.model.blocks for unit in units(block)]
        assert len({unit.buckets[0].full.data_ptr() for unit in blocks}) == 4
        fc.reshard(twin.model)

    simulate_ranks(ranks)


def test_a_part_converted_while_a_graph_lives() -> None:
    """The other parts of its unit stay where the graph reads them until the graph is gone."""
    with fake_world(2):
        double = MixedPrecision(torch.float64, torch.float64)
        model = by_block(seeded(ThreeBuckets), mp_policy=double, static_buffers=True)
        loss = square(model, data(0, 0))
        (unit,) = units(model.blocks[0])
        before = [bucket.full for bucket in unit.buckets]
        for block in model.blocks:
            block.norm.to(torch.bfloat16)
        with torch.no_grad():
            model(data(0, 0))
        moved = [b.full is not full for b, full in zip(unit.buckets, before, strict=True)]
        assert sum(moved) == 1
        with pytest.raises(RuntimeError, match="backward"):
            loss.backward()
        del loss
        square(model, data(0, 0)).backward()
        assert all(bucket.static is not None for bucket in unit.buckets)
