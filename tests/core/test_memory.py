"""Memory of a step, counted in the storages that are alive after every operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    GradBucket,
    MixedPrecision,
    ShardingStrategy,
    count_traffic,
    default_hook,
    fully_shard,
    register_comm_hook,
    simulate,
    wrap,
)
from fsdp_compose.core.state import iter_units
from fsdp_compose.report import plan

from harness import fake_world, run_ranks
from models import Block, Ledger, Mirrored, seeded
from planned_models import Model

WIDTH = 256


class Words(nn.Module):
    """Embeddings and a head around blocks, all of them in the outermost unit."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(512, WIDTH)
        self.places = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 4 * WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x) + self.places(torch.arange(x.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Looped(Words):
    """Runs its blocks twice, one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(self.norm(x))


class Experts(nn.Module):
    """Blocks of fused experts, of which each row takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 8)
        self.weights = nn.Parameter(torch.randn(8, WIDTH, 64) / 16)
        self.back = nn.Parameter(torch.randn(8, 64, WIDTH) / 16)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(self.norm(x)).softmax(-1).T[:, :, None]
        hidden = torch.tanh(torch.bmm(x.expand(8, *x.shape), self.weights))
        return x + (torch.bmm(hidden, self.back) * scores).sum(0)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "layers": (lambda: Model(width=WIDTH), lambda: torch.ones(1, WIDTH)),
    "words": (Words, lambda: torch.arange(2)),
    "experts": (Experts, lambda: torch.ones(1, WIDTH)),
}
RELEASED = ("FULL_SHARD", "HYBRID_SHARD")
STRATEGIES = (*RELEASED, "SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")


class Timeline(Ledger):
    """The most that is alive from each of the model's own operators to the next, in backward."""

    EVENTS = frozenset({
        "mm", "bmm", "native_layer_norm_backward", "tanh_backward", "embedding_dense_backward",
        "_softmax_backward_data",
    })  # fmt: skip

    def __init__(self, *known: Tensor) -> None:
        super().__init__(*known)
        self.names: list[str] = []
        self.most: list[int] = []

    def begin(self) -> None:
        self.names, self.most = ["backward begins"], [self.live()]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any("DTensor" in kind.__name__ for kind in types):
            return NotImplemented
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.most:
            name = func.overloadpacket.__name__
            if name in self.EVENTS:
                self.names.append(name)
                self.most.append(0)
            self.most[-1] = max(self.most[-1], self.live())
        return out


def timeline(model: nn.Module, x: Tensor) -> Timeline:
    """Of the third step, without the shards."""
    for _ in range(3):
        shards = [getattr(p, "_local_tensor", p) for p in model.parameters()]
        with Timeline(x, *tree_leaves(shards)) as found:
            loss = model(x).square().mean()
            found.begin()
            loss.backward()
        model.zero_grad()
        del loss
    return found


def shard_by_fsdp2(model: nn.Module, mesh: DeviceMesh, released: bool | int) -> nn.Module:
    for block in model.blocks:
        fsdp2(block, mesh=mesh, reshard_after_forward=released)
    return fsdp2(model, mesh=mesh, reshard_after_forward=False)


@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODELS)
def test_no_event_of_backward_takes_more_than_fsdp2(name: str, strategy: str) -> None:
    """At no operator is more alive than there, but for what aligns shards to 16 bytes.

    And for one number that is kept, 4 bytes, by which gradients are scaled. Where weights are kept,
    a first reduction receives while autograd still has the gradients.
    """
    build, data = MODELS[name]
    is_hybrid, is_kept = strategy.startswith("HYBRID"), strategy not in RELEASED
    with fake_world(8):
        shape, names = ((2, 4), ("replicate", "shard")) if is_hybrid else ((8,), ("shard",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = seeded(build).float()
        units = wrap.by_class({Block, Expert})
        fully_shard(model, units=units, strategy=ShardingStrategy[strategy], mesh=mesh)
        ours = timeline(model, data())
        theirs = timeline(shard_by_fsdp2(seeded(build).float(), mesh, not is_kept), data())
        assert ours.names == theirs.names
        found = plan(model)
        more = 4 + 2 * sum(bucket.padding_bytes for bucket in found.buckets)
        received = max(bucket.received_bytes for bucket in found.buckets)
        above = [(event, a, b) for event, a, b in zip(ours.names, ours.most, theirs.most) if a > b]
        firsts = [event for event in above if event[1] > event[2] + more]
        assert len(firsts) <= is_kept, firsts
        assert all(a <= b + more + received for _, a, b in firsts), (firsts, received)
        planned = found.memory.backward.total
        assert planned <= max(ours.most) <= 1.02 * planned


@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_one_unit_takes_no_more_than_fsdp2(param_dtype: torch.dtype | None) -> None:
    """What receives the last reduction comes when autograd has let go of the gradients."""
    build, data = MODELS["words"]
    dtypes = {"param_dtype": param_dtype, "reduce_dtype": torch.float32}
    with fake_world(2):
        mesh, model = init_device_mesh("cpu", (2,)), seeded(build).float()
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecision(**dtypes))
        ours = timeline(model, data())
        policy = MixedPrecisionPolicy(**dtypes)
        theirs = timeline(fsdp2(seeded(build).float(), mesh=mesh, mp_policy=policy), data())
        assert ours.names == theirs.names
        found = plan(model)
        more = 4 + sum(bucket.padding_bytes for bucket in found.buckets)
        assert all(a <= b + more for a, b in zip(ours.most, theirs.most))
        planned = found.memory.backward.total
        assert planned <= max(ours.most) <= 1.02 * planned


@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
def test_spread_units_take_no_more_than_fsdp2() -> None:
    """What a rank keeps of a unit for its backward is freed once the unit is gathered there."""
    build, data = MODELS["words"]
    with fake_world(8):
        mesh, model = init_device_mesh("cpu", (8,)), seeded(build).float()
        fully_shard(model, mesh=mesh, units=wrap.by_class({Block}), reshard_after_forward=2)
        ours = timeline(model, data())
        theirs = timeline(shard_by_fsdp2(seeded(build).float(), mesh, 2), data())
        assert ours.names == theirs.names
        found = plan(model)
        received = max(bucket.received_bytes for bucket in found.buckets)
        more = 4 + 2 * sum(bucket.padding_bytes for bucket in found.buckets)
        above = [(a, b) for a, b in zip(ours.most, theirs.most) if a > b + more]
        assert len(above) <= 1 and all(a <= b + more + received for a, b in above)
        planned = found.memory.backward.total
        assert planned <= max(ours.most) <= 1.02 * planned


def test_plan_knows_what_an_outer_unit_returns() -> None:
    """Backward reaches the inner unit first, and gathers one for which the outer one has no use."""

    def build() -> nn.Module:
        group = lambda: nn.Sequential(Block(WIDTH), nn.Linear(WIDTH, WIDTH), Block(WIDTH))  # noqa: E731
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), group(), group(), group())

    with fake_world(8):
        units = wrap.by_class({Block, nn.Sequential})
        before = plan(model := seeded(build).float(), units=units)
        fully_shard(model, units=units)
        most = max(timeline(model, torch.ones(1, WIDTH)).most)
        planned = plan(model).memory.backward.total
        assert planned == before.memory.backward.total and planned <= most <= 1.02 * planned


@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
def test_units_called_again_take_no_more_than_fsdp2() -> None:
    """With others between: gathered weights wait for no earlier call, one whole gradient does."""
    with fake_world(8):
        mesh, model, words = init_device_mesh("cpu", (8,)), seeded(Looped).float(), torch.arange(2)
        fully_shard(model, mesh=mesh, units=wrap.by_class({Block}))
        ours = timeline(model, words)
        theirs = timeline(shard_by_fsdp2(seeded(Looped).float(), mesh, True), words)
        assert ours.names == theirs.names and max(ours.most) <= max(theirs.most)


class Part(Block):
    """A unit that recomputes parts of its own forward, in a backward of their own."""

    def __init__(self, way: str) -> None:
        super().__init__(WIDTH, 4 * WIDTH)
        self.way = way

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(self.norm(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "whole":
            return checkpoint(super().forward, x, use_reentrant=True)
        if self.way == "halves":
            hidden = checkpoint(self.hidden, x, use_reentrant=True)
            return x + checkpoint(self.down, hidden, use_reentrant=True)
        hidden = torch.tanh(checkpoint(self.up, self.norm(x), use_reentrant=True))
        return x + self.down(hidden)


@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("way", ["whole", "halves", "middle"])
def test_reentrant_checkpoints_in_units(way: str, strategy: str) -> None:
    """At no event more than FSDP2's: what a part's backward brings is packed behind the unit's.

    And as planned, before a step has run, with one that is recorded, and after it.
    """

    def build() -> nn.Module:
        model = Words()
        model.blocks = nn.ModuleList(Part(way) for _ in range(3))
        return model

    with fake_world(8):
        mesh, model, words = init_device_mesh("cpu", (8,)), seeded(build).float(), torch.arange(2)
        options = {"units": wrap.by_class({Part}), "strategy": ShardingStrategy[strategy]}
        before = plan(seeded(build).float(), mesh=mesh, sample=words, **options)
        fully_shard(model, mesh=mesh, **options)
        first = plan(model).memory.backward.total
        ours = timeline(model, words)
        released = strategy == "FULL_SHARD"
        theirs = timeline(shard_by_fsdp2(seeded(build).float(), mesh, released), words)
        assert ours.names == theirs.names
        found = plan(model)
        more = 4 + 2 * sum(bucket.padding_bytes for bucket in found.buckets)
        above = [(a, b) for a, b in zip(ours.most, theirs.most) if a > b + more]
        received = max(bucket.received_bytes for bucket in found.buckets)
        assert len(above) <= (not released) and all(a <= b + more + received for a, b in above)
        assert max(ours.most) <= max(theirs.most) + more
        planned = found.memory.backward.total
        assert planned == first == before.memory.backward.total
        assert max(ours.most) <= 1.02 * planned
        assert way == "halves" or planned <= max(ours.most)  # which makes its gradients in turns


class Recurrent(nn.Module):
    """Two units, each called several times in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH, 4 * WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            for _ in range(4):
                x = block(x)
        return x


@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
def test_calls_in_a_row_take_no_more_than_fsdp2() -> None:
    """What the unit before is reduced from is free when backward comes to an earlier call."""
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    with fake_world(8):
        mesh, model, x = (
            init_device_mesh("cpu", (8,)),
            seeded(Recurrent).float(),
            torch.ones(1, 256),
        )
        units = wrap.by_class({Block})
        fully_shard(model, mesh=mesh, units=units, mp_policy=MixedPrecision(**dtypes))
        ours = timeline(model, x)
        other, policy = seeded(Recurrent).float(), MixedPrecisionPolicy(**dtypes)
        for block in other.blocks:
            fsdp2(block, mesh=mesh, mp_policy=policy)
        theirs = timeline(fsdp2(other, mesh=mesh, mp_policy=policy), x)
        assert ours.names == theirs.names and max(ours.most) <= 1.001 * max(theirs.most)


class TwoStreams(nn.Module):
    """A block that hands on two tensors, and says how many reductions its backward finds."""

    def __init__(self, found: list[int]) -> None:
        super().__init__()
        self.layer, self.found = nn.Linear(6, 6), found

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        a, b = map(self.layer, pair)
        for tensor in (a, b):
            tensor.register_hook(self.look)
        return torch.tanh(a), torch.tanh(b)

    def look(self, grad: Tensor) -> None:
        self.found.append(len(next(iter_units(self)).engine.reductions))


def test_a_second_output_finishes_no_reduction() -> None:
    """It belongs to the same call, beside whose backward the one before is still reduced."""
    found: list[int] = []
    with fake_world(2):
        model = nn.Sequential(*(TwoStreams(found) for _ in range(4)))
        for block in model:
            fully_shard(block, reshard_after_forward=True)
        a, b = model((torch.ones(1, 6), torch.ones(1, 6)))
        (a + b).sum().backward()
    assert found == [0] * 2 + [1] * 6


def test_calls_with_others_between_add_up() -> None:
    """Each is gathered by itself, unless the unit is kept gathered, and all are reduced once."""

    def ranks() -> list[tuple[int, int]]:
        plain, kept, released = (
            seeded(lambda: nn.Sequential(a := Block(), b := Block(), a, a, b)) for _ in range(3)
        )
        xs = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.double)
        plain(xs).square().mean().backward()
        counts: list[tuple[int, int]] = []
        for model in (released, kept):
            is_released, units = model is released, wrap.by_class({Block})
            fully_shard(model, units=units, reshard_after_forward=is_released)
            with count_traffic() as traffic:
                model(xs[dist.get_rank()]).square().mean().backward()
            counts.append((traffic.gathers, traffic.reduces))
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
        register_comm_hook(released, calls := [], count_and_reduce)
        released(xs[0]).sum().backward()
        return [*counts, (len(calls), len(set(calls)))]

    assert simulate(ranks, 2) == [[(5 + 4, 2), (2, 2), (2, 2)]] * 2


def count_and_reduce(calls: list[str], grads: GradBucket) -> Tensor:
    """A hook is to have the whole gradient, as one that adds noise or cuts it off."""
    calls.append(grads.key)
    return default_hook(calls, grads)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_ranks_of_a_host_take_less_than_fsdp2(strategy: str) -> None:
    """They read gradients where they lie: below from the first reduction on, and as planned."""

    def ranks(rank: int) -> None:
        build, data = MODELS["words"]
        mesh, is_kept = init_device_mesh("cpu", (2,)), strategy not in RELEASED
        model = seeded(build).float()
        units = wrap.by_class({Block})
        fully_shard(model, units=units, strategy=ShardingStrategy[strategy], mesh=mesh)
        ours = timeline(model, data())
        theirs = timeline(shard_by_fsdp2(seeded(build).float(), mesh, not is_kept), data())
        assert ours.names == theirs.names and max(ours.most) < 0.92 * max(theirs.most)
        heads = 1024  # what ranks tell each other ahead of data
        assert all(a <= b + heads for a, b in zip(ours.most, theirs.most))
        planned = plan(model).memory.backward.total
        assert planned <= 1.02 * max(ours.most) and max(ours.most) <= 1.02 * planned

    run_ranks(ranks)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))
        self.weight = nn.Parameter(torch.randn(1000))

    def forward(self, x: Tensor) -> Tensor:
        return Mirrored.apply(x, self.weight) + self.shift


@pytest.mark.parametrize("buckets", [1, 2])
def test_a_gradient_in_the_weights_is_packed_first(buckets: int) -> None:
    """A gradient that lies in the gathered weights is read before these are released."""

    def ranks(rank: int) -> None:
        model = seeded(lambda: nn.Sequential(Scale(), Scale()))
        weights = [layer.weight.detach().clone() for layer in model]
        for layer in model if buckets == 2 else ():
            layer.shift.data = layer.shift.data.float()
        for layer in model:
            fully_shard(layer)
        model(torch.ones(1000, requires_grad=True)).sum().backward()
        for layer, weight in zip(model, weights):
            assert torch.equal(layer.weight.grad.full_tensor(), weight)

    run_ranks(ranks)
