"""A plan is what a real step then does: collectives, bytes and peak memory, in every cell."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compose import (
    MixedPrecision,
    Offload,
    Prefetch,
    ShardingStrategy,
    fully_shard,
)
from fsdp_compose.comm.codecs import bf16_codec
from fsdp_compose.comm.transports import PAIRS
from fsdp_compose.core.guards.moved_parameters import shard_of
from fsdp_compose.report import TrafficReport, count_traffic, plan

from harness import fake_world, run_ranks
from models import (
    Block,
    Ledger,
    by_block,
    data,
    mesh_of_replicas,
    nested,
    one_unit,
    seeded,
    square,
    units,
)
from planned_models import BF16, BF16_FP32, BLOCKS, NORMS_FP32, WIDTH, Model, Tied, TiedEnds

pytestmark = pytest.mark.filterwarnings("error")


COUNTED = [f.name for f in fields(TrafficReport) if f.name != "control"]


S = ShardingStrategy


CELLS: dict[str, tuple[int, dict[str, Any], Callable[[], nn.Module]]] = {
    "default": (2, {}, Model),
    "3 ranks": (3, {}, Model),
    "1 rank": (1, {}, Model),
    "1 rank, bf16": (1, {"mp_policy": BF16}, Model),
    "full": (4, {"strategy": S.FULL_SHARD}, Model),
    "grad op": (2, {"strategy": S.SHARD_GRAD_OP}, Model),
    "zero1": (3, {"strategy": S.ZERO1}, Model),
    "no shard": (2, {"strategy": S.NO_SHARD}, Model),
    "no shard, bf16": (2, {"strategy": S.NO_SHARD, "mp_policy": BF16}, Model),
    "hybrid": (4, {"strategy": S.HYBRID_SHARD, "mesh": (2, 2)}, Model),
    "hybrid zero2": (4, {"strategy": S.HYBRID_SHARD_ZERO2, "mesh": (2, 2)}, Model),
    "hybrid optimizer": (4, {"strategy": S.HYBRID_SHARD_OPTIMIZER, "mesh": (2, 2)}, Model),
    "hybrid optimizer, bf16": (
        4,
        {"strategy": S.HYBRID_SHARD_OPTIMIZER, "mesh": (2, 2), "mp_policy": BF16_FP32},
        Model,
    ),
    "hybrid optimizer, reduced in bf16": (
        4,
        {"strategy": S.HYBRID_SHARD_OPTIMIZER, "mesh": (2, 2), "mp_policy": BF16},
        Model,
    ),
    "hybrid optimizer over replicas alone": (
        2,
        {"strategy": S.HYBRID_SHARD_OPTIMIZER, "mesh": (2, 1)},
        Model,
    ),
    "hybrid optimizer, frozen": (
        4,
        {"strategy": S.HYBRID_SHARD_OPTIMIZER, "mesh": (2, 2)},
        lambda: Model("first blocks.0 blocks.1 blocks.2 blocks.3"),
    ),
    "gathers in bf16": (2, {"mp_policy": MixedPrecision(gather_codec=bf16_codec())}, Model),
    "reshard": (2, {"reshard_after_forward": True}, Model),
    "no reshard": (2, {"reshard_after_forward": False}, Model),
    "spread over 2 of 4": (4, {"reshard_after_forward": 2}, Model),
    "bf16": (2, {"mp_policy": BF16}, Model),
    "bf16, reduced in fp32": (3, {"mp_policy": BF16_FP32}, Model),
    "low precision gradients": (
        2,
        {"mp_policy": MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)},
        Model,
    ),
    "norms in fp32": (2, {"mp_policy": NORMS_FP32}, Model),
    "rows": (3, {"granularity": "row"}, Model),
    "tensors": (3, {"granularity": "tensor"}, Model),
    "frozen start": (2, {}, lambda: Model("first blocks.0 blocks.1")),
    "frozen middle": (2, {}, lambda: Model("blocks.1 blocks.2")),
    "frozen base": (3, {}, lambda: Model("first blocks.0 blocks.1 blocks.2 blocks.3")),
    "frozen head": (2, {}, lambda: Model("first head")),
    "frozen parts": (2, {}, lambda: Model("blocks.0.up blocks.1.norm blocks.2.down blocks.3.up")),
    "all frozen but one": (2, {"strategy": S.SHARD_GRAD_OP}, lambda: Model("first blocks head.w")),
    "checkpointed": (2, {}, lambda: Model(again=True)),
    "checkpointed, spread": (4, {"reshard_after_forward": 2}, lambda: Model(again=True)),
    "checkpointed, kept": (2, {"reshard_after_forward": False}, lambda: Model(again=True)),
    "checkpointed, frozen": (2, {}, lambda: Model("blocks.1 blocks.2", again=True)),
    "no prefetch": (2, {"prefetch": Prefetch(0, 0, None)}, Model),
    "prefetch 2": (2, {"prefetch": Prefetch(2, 2)}, Model),
    "prefetch late": (2, {"prefetch": Prefetch(1, 1, "post")}, Model),
    "ignored": (2, {"ignored": "head"}, Model),
    "offload optimizer": (2, {"offload_policy": Offload(optimizer=True, pin_memory=False)}, Model),
    "tied": (2, {}, Tied),
    "tied, grad op": (2, {"strategy": S.SHARD_GRAD_OP}, Tied),
    "tied ends": (2, {}, TiedEnds),
    "tied ends, bf16": (2, {"mp_policy": BF16_FP32}, TiedEnds),
    "three tied": (2, {"strategy": S.NO_SHARD}, lambda: TiedEnds(3)),
}


def resolved(options: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    options = dict(options)
    if "mesh" in options:
        options["mesh"] = mesh_of_replicas(*options["mesh"])
    if "ignored" in options:
        options["ignored"] = [model.get_submodule(options["ignored"])]
    return options


def trained_step(rank: int, model: nn.Module) -> tuple[dict[str, int], int, int]:
    """(traffic, peak of forward, peak of backward) of the third step, which is a steady one."""
    params = [p for p in model.parameters() if p.requires_grad]
    optim = torch.optim.SGD(params, lr=0.1) if params else None
    for seed in range(2):
        square(model, data(seed, rank, 1, WIDTH, dtype=torch.float32)).backward()
        if optim is not None:
            optim.step()
            optim.zero_grad()
    x = data(2, rank, 1, WIDTH, dtype=torch.float32)
    kept = [b for u in units(model) for b in u.buckets]
    known = [shard_of(b) for b in kept] + [
        b.device_copy.tensor for b in kept if b.device_copy is not None
    ]
    known += [b.inner.store for b in kept if b.inner is not None and b.inner.source is not None]
    outside = [p for p in params if not hasattr(p, "to_local")]
    with Ledger(x, *known, *outside) as ledger, count_traffic() as traffic:
        loss = square(model, x)
        forward, ledger.peak = ledger.peak, ledger.live()
        loss.backward()
    return {name: getattr(traffic, name) for name in COUNTED}, forward, ledger.peak


@pytest.mark.parametrize("cell", CELLS)
def test_traffic_and_memory_are_those_of_a_real_step(cell: str) -> None:
    """Bytes and collectives exactly, peak memory within 2 % and the activations of one row."""
    world, options, build = CELLS[cell]

    def ranks(rank: int) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        model = seeded(build).float()
        opened = resolved(options, model)
        before = plan(model, units=BLOCKS, **opened).to_dict()
        by_block(model, transport=PAIRS, **opened)  # as between hosts
        return trained_step(rank, model), before, plan(model).to_dict()

    activations = 100 * WIDTH  # one row in each layer, 30 of them
    for (traffic, forward, backward), before, after in run_ranks(ranks, world):
        assert {name: after["step"][name] for name in COUNTED} == traffic
        assert before["step"] == after["step"]
        assert before["memory"] == after["memory"]
        assert before["replicas"] == after["replicas"] >= 1
        gradients = after["memory"]["outside"] // 2  # of no unit, beside the parameters
        for measured, planned in (
            (forward, after["memory"]["forward"]["total"]),
            (backward, after["memory"]["backward"]["total"] + gradients),
        ):
            assert planned <= 1.02 * measured, (cell, measured, planned)
            assert measured <= 1.02 * planned + activations, (cell, measured, planned)


def in_pairs(model: nn.Module) -> None:
    """Two blocks are a unit, inside of that of the model."""
    fully_shard([*model.blocks][:2])
    fully_shard(model)


@pytest.mark.parametrize("shard", [one_unit, nested, in_pairs])
def test_other_choices_of_units(shard: Callable[..., Any]) -> None:
    def ranks(rank: int) -> None:
        model = seeded(Model).float()
        shard(model)
        traffic, *_ = trained_step(rank, model)
        step = plan(model).to_dict()["step"]
        assert {name: step[name] for name in COUNTED} == traffic

    run_ranks(ranks)


def test_what_is_read_where_it_lies_is_not_received() -> None:
    """Ranks of one host read each other's gradients; with messages there is room for them."""

    def ranks(rank: int) -> None:
        for transport in (None, PAIRS):  # of the same groups
            model = by_block(seeded(Model).float(), transport=transport)
            received = max(moment.peak.received for moment in plan(model).moments)
            assert (received == 0) is (transport is None)

    run_ranks(ranks)


class Parts(nn.Module):
    """Units next to each other with nothing around them, one of them of two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(part(x))
        return x


def test_units_without_an_outer_one() -> None:
    """Units without an outer one and of several modules."""

    def ranks(rank: int) -> None:
        model = Parts()
        torch.manual_seed(0)
        fully_shard(model.parts[0], init="as_is")
        fully_shard([model.parts[1], model.parts[2]], init="as_is")
        fully_shard(model.parts[3], init="as_is")
        fully_shard(model.parts[4], init="as_is", reshard_after_forward=True)
        traffic, *_ = trained_step(rank, model)
        found = plan(model)
        assert len(found.units) == 4
        assert {name: getattr(found.step, name) for name in COUNTED} == traffic

    run_ranks(ranks)


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {}),
        (3, {"mp_policy": BF16_FP32}),
        (4, {"reshard_after_forward": 2}),
        ((2, 2), {"strategy": S.HYBRID_SHARD}),
        ((2, 2), {"strategy": S.HYBRID_SHARD_OPTIMIZER}),
        (4, {"strategy": S.NO_SHARD}),
    ],
)
def test_a_plan_without_a_process_group_is_the_same(world: Any, options: dict[str, Any]) -> None:
    """Meta device, one process, imagined ranks: the plan that real ranks make."""

    def ranks(rank: int) -> dict[str, Any]:
        model = seeded(Model).float()
        opened = resolved({**options, **({"mesh": world} if type(world) is tuple else {})}, model)
        return plan(model, units=BLOCKS, optimizer="adamw", **opened).to_dict()

    with torch.device("meta"):
        model = Model()
    found = plan(
        model, world_size=world, units=BLOCKS, optimizer="adamw", backend="gloo", **options
    )
    size = math.prod(world) if type(world) is tuple else world
    for wanted in run_ranks(ranks, size):
        assert found.to_dict() == wanted
    assert not dist.is_initialized()
    assert all(p.is_meta for p in model.parameters())


def test_a_fake_world_of_any_rank() -> None:
    with fake_world(64, rank=13):
        model = by_block(Model())
        found = plan(model)
    assert found.ranks == 64 and found.is_sharded
    with torch.device("meta"):
        model = Model()
    imagined = plan(model, world_size=64, units=BLOCKS)
    assert found.step == imagined.step
    assert found.memory == imagined.memory


@pytest.mark.parametrize("world", [1, 7, 1000, 16384])
def test_padding_is_small_at_any_world_size(world: int) -> None:
    with torch.device("meta"):
        model = Model(width=512)
    found = plan(model, world_size=world, units=BLOCKS)
    assert found.ranks == world
    for bucket in found.buckets:
        assert bucket.padding_bytes < 16 * world
        assert bucket.shard_numel * world == bucket.numel + bucket.padding
    assert found.numel == sum(p.numel() for p in model.parameters())


def test_the_design_formula() -> None:
    """Two gathered units, gradients of one, one flat buffer, what is received, and the root."""
    P = sum(p.numel() for p in Block(WIDTH, 2 * WIDTH).parameters())
    with torch.device("meta"):
        model = Model("first head")  # the root trains nothing
    for backend, received in (("gloo", 7 / 8), ("nccl", 1 / 8)):
        found = plan(model, world_size=8, units=BLOCKS, mp_policy=BF16_FP32, backend=backend)
        root = found.units[-1].full_bytes
        shards = found.units[0].buckets[0].grad_shard_bytes
        a, r = 2, 4
        peak = found.memory.backward
        wanted = root + 2 * a * P + a * P + r * P + received * r * P + peak.reduced
        assert peak.total == pytest.approx(wanted, rel=0.02)
        assert peak.gathered == pytest.approx(root + 2 * a * P, rel=0.02)
        assert peak.reduced <= 4 * shards


@pytest.mark.parametrize(
    ("optimizer", "tensors"),
    [
        ("sgd", 0),
        ("sgd_momentum", 1),
        ("adamw", 2),
        ("AdamW", 2),
        ("adam_amsgrad", 3),
        (5, 5),
        (None, 0),
    ],
)
def test_optimizer_state(optimizer: Any, tensors: int) -> None:
    model = Model("first blocks.0")
    found = plan(model, world_size=4, units=BLOCKS, optimizer=optimizer)
    trained = sum(b.shard_bytes for b in found.buckets if b.trained_numel)
    assert found.memory.optimizer == tensors * trained
    assert found.memory.gradients == trained
    assert found.memory.shards == sum(b.shard_bytes for b in found.buckets)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD([{"params": p, "momentum": 0.9}], lr=0.1),
        torch.optim.Adadelta,
        torch.optim.ASGD,
        torch.optim.Rprop,
        lambda p: torch.optim.AdamW(p),
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.RMSprop(p),
        lambda p: torch.optim.RMSprop(p, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, centered=True),
        lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
        lambda p: torch.optim.Adam(p),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.RAdam(p),
        lambda p: torch.optim.Adamax(p),
    ],
)
def test_optimizer_state_is_what_the_optimizer_makes(make: Callable[[Any], Any]) -> None:
    model = by_block(seeded(Model))
    optim = make(model.parameters())
    square(model, data(0, 0, 1, WIDTH)).backward()
    optim.step()
    made = sum(
        value.numel() * value.element_size()
        for state in optim.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.numel() > 1
    )
    assert plan(model, optimizer=optim).memory.optimizer == pytest.approx(made, rel=0.01)


def test_an_unknown_optimizer() -> None:
    with pytest.raises(ValueError, match="optimizer 'magic' is not known; wanted one of"):
        plan(Model(), world_size=2, optimizer="magic")


def test_buffers_and_what_is_in_no_unit() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    found = plan(model, world_size=2, ignored=[model[2]], optimizer="adamw")
    assert found.memory.buffers == 8 * 4 + 8 * 4 + 8
    assert found.memory.outside == 4 * (64 + 8) * 4  # parameter, gradient, two of state
    policy = MixedPrecision(buffer_dtype=torch.float16)
    half = plan(model, world_size=2, mp_policy=policy)
    assert half.memory.buffers == 8 * 2 + 8 * 2 + 8
    assert half.memory.outside == 0
    left = plan(model, world_size=2, mp_policy=policy, ignored=[model[1].running_mean])
    assert left.memory.buffers == 8 * 4 + 8 * 2 + 8


def test_total_is_persistent_plus_the_larger_peak() -> None:
    memory = plan(Model(), world_size=4, units=BLOCKS, optimizer="adamw").memory
    assert memory.persistent == memory.shards + memory.optimizer
    assert memory.total == memory.persistent + memory.backward.total
    assert memory.backward.total > memory.forward.total


def test_offload_moves_everything_to_the_host() -> None:
    """Offload moves shards gradients and state to the host."""
    model = Model()
    found = plan(model, world_size=4, units=BLOCKS, optimizer="adamw", offload_policy=Offload(True))
    assert found.memory.host == found.memory.shards + found.memory.optimizer
    assert found.memory.persistent == 0
    kept = plan(model, world_size=4, mp_policy=BF16, offload_policy=Offload(optimizer=True))
    assert kept.memory.weight_copies == kept.memory.shards // 2 == kept.memory.persistent
    cast, there = (
        plan(model, world_size=4, mp_policy=BF16, offload_policy=policy).memory
        for policy in (Offload(True), Offload())
    )
    assert cast.forward.gathered == there.forward.gathered + there.shards


def test_meta_parameters_beside_one_in_memory() -> None:
    """As ``torch.FloatTensor(n)`` makes one in a model that is built on the meta device."""
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    model.scale = nn.Parameter(torch.FloatTensor(4).uniform_())
    assert plan(model, world_size=8).units[0].buckets[0].numel == 24
    alone = plan(model, world_size=1, backend="gloo", offload_policy=Offload(True))
    assert alone.units[0].full_bytes == 0  # one rank on the host reads its shards where they are
