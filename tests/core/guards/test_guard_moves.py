"""Moved parameters: what a bucket, its gradients and its unit are after other memory was given."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fsdp_compose as fc
from fsdp_compose import Offload, ShardingStrategy, fully_shard
from fsdp_compose.base import mesh as mesh_module
from fsdp_compose.base.process import here
from fsdp_compose.buckets import build
from fsdp_compose.buckets.bucket import Bucket, Phase
from fsdp_compose.comm.transports import AT_ONCE
from fsdp_compose.core.autograd import EngineWork
from fsdp_compose.core.guards import moved_parameters
from fsdp_compose.core.guards.static_buffers import StaticWork
from fsdp_compose.core.state import engine_of
from fsdp_compose.sharded import is_sharded, spec_of, to_local

from harness import simulate_ranks
from models import (
    assert_at_rest,
    by_block,
    data,
    mesh_of_replicas,
    one_unit,
    seeded,
    square,
    two_blocks,
    units,
    whole,
)

META = torch.device("meta")
MESHES: dict[str, dict[str, Any]] = {
    "hybrid": {"strategy": ShardingStrategy.HYBRID_SHARD},
    "fused": {"strategy": ShardingStrategy.HYBRID_SHARD_OPTIMIZER},
    "spread": {"reshard_after_forward": 2},
    "microbatches": {"deterministic": 4},
}


def play_a_move(bucket: Bucket) -> None:
    """As if parameters were on the meta device, which a process without others has."""
    bucket.residence.moved = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moved_parameters, "to_local", lambda p: to_local(p).to(META))
        patch.setattr(build, "set_local", lambda param, local: None)
        patch.setattr(mesh_module, "_backend", lambda pg, device: f"of {device}")
        moved_parameters.shard_of(bucket)


@pytest.mark.parametrize("kind", MESHES)
def test_a_move_to_another_device(kind: str) -> None:
    """Groups, buffers, gradients that wait, specs and engine are those of the new device."""

    def ranks(rank: int) -> None:
        options = {"transport": AT_ONCE, **MESHES[kind]}
        if kind in ("hybrid", "fused"):
            options["mesh"] = mesh_of_replicas(2, 2)
        model = one_unit(seeded(lambda: nn.Linear(6, 4)), **options)
        (unit,) = units(model)
        (bucket,) = unit.buckets
        before, spread, inner = bucket.mesh, bucket.spread, bucket.inner
        bucket.arriving.partial = torch.ones(3)
        bucket.arriving.sums.nodes.append(torch.ones(3))
        play_a_move(bucket)
        mesh = bucket.mesh
        assert mesh.device == bucket.stored.device == bucket.full.device == META
        groups = [before.shard, before.replicate, *(before.axes or ()), spread]
        moved = [mesh.shard, mesh.replicate, *(mesh.axes or ()), bucket.spread]
        for old, new in zip(groups, moved, strict=True):
            if old is None or old.pg is None:
                assert new is old
            else:
                assert new == replace(old, backend="of meta") and new.pg is old.pg
                assert new.transport is old.transport is not None
        assert mesh.microbatches == before.microbatches and (mesh.microbatches == 4) == (
            kind == "microbatches"
        )
        assert (mesh.axes is not None) == (kind == "fused")
        assert (spread is not None) == (kind == "spread")
        assert (bucket.inner is None) == (inner is None)
        for entry, param in zip(bucket.entries, model.parameters(), strict=True):
            assert entry.spec.group is mesh.shard and spec_of(param) is entry.spec
            assert entry.owner() is bucket
        assert bucket.arriving.partial.device == bucket.arriving.sums.nodes[0].device == META
        assert bucket.arriving.sums.nodes[0].dtype is torch.float64
        engine = here.engines[META]
        assert unit.engine is engine and unit in engine.units
        assert unit not in here.engines[torch.device("cpu")].units

    simulate_ranks(ranks, 4)


@pytest.mark.parametrize("static", [True, False])
def test_the_engine_of_a_device_a_unit_moves_to(static: bool) -> None:
    """It does what the unit needs: static buffers where that, or a unit there before, has them."""

    def ranks(rank: int) -> None:
        engine = engine_of(META, EngineWork if static else StaticWork)
        model = one_unit(seeded(lambda: nn.Linear(6, 4)), static_buffers=static)
        (unit,) = units(model)
        (bucket,) = unit.buckets
        assert type(unit.engine.schedule.work) is (StaticWork if static else EngineWork)
        play_a_move(bucket)
        assert unit.engine is engine and type(engine.schedule.work) is StaticWork
        assert engine.schedule.work.engine is engine

    simulate_ranks(ranks)


@pytest.mark.parametrize("policy", [Offload(params=True), Offload(optimizer=True)])
def test_offloaded_parameters_stay_on_the_host(policy: Offload) -> None:
    """A move elsewhere is refused and names the first parameter; another dtype is taken over."""

    def ranks(rank: int) -> None:
        plain = seeded(two_blocks).float()
        model = by_block(seeded(two_blocks), offload_policy=policy)
        model(data(0, rank))
        model.float()
        assert_close(model(data(0, rank).float()), plain(data(0, rank).float()))
        square(model, data(0, rank).float()).backward()
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        (bucket,) = units(model.blocks[0])[0].buckets
        copied = bucket.device_copy
        assert policy.params or copied.tensor.dtype is torch.float32
        with pytest.raises(RuntimeError) as caught:
            play_a_move(bucket)
        wanted = r"parameter 'blocks\.0\.norm\.weight' of unit 'blocks\.0' was moved to meta"
        assert re.match(wanted, str(caught.value)) and "undo(module)" in str(caught.value)

    simulate_ranks(ranks)


def test_a_copy_on_the_device_follows_a_move() -> None:
    """The copy of a host shard is made again, also where a bucket has one parameter."""

    def ranks(rank: int) -> None:
        plain = seeded(lambda: nn.Linear(6, 4, bias=False))
        model = one_unit(copy.deepcopy(plain), offload_policy=Offload(optimizer=True))
        x = data(0, rank)
        for step in range(3):
            assert_close(model(x), plain(x))
            plain.weight.data = plain.weight.detach() * (step + 2)
            model.weight.data = model.weight.detach() * (step + 2)
        assert_close(model(x), plain(x))
        assert_close(model(x), plain(x))

    simulate_ranks(ranks)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("read", [True, False])
def test_kept_units_read_what_was_moved(world: int, read: bool) -> None:
    """Where they are gathered when the values are taken over, by a forward or by a read."""

    def ranks(rank: int) -> None:
        plain = seeded(two_blocks)
        model = by_block(copy.deepcopy(plain), strategy=ShardingStrategy.ZERO1)
        model(data(0, rank))
        buckets = [bucket for unit in units(model) for bucket in unit.buckets]
        assert all(bucket.phase is Phase.GATHERED for bucket in buckets) or world == 1
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            mine.data = mine.detach() * 3
            other.data = other.detach() * 3
        if read:
            for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                with torch.no_grad(), fc.gathered(model):
                    assert_close(mine, other)
            assert all(bucket.fill.is_superseded is (world > 1) for bucket in buckets)
        assert_close(model(data(0, rank)), plain(data(0, rank)))
        assert not any(b.fill.is_superseded or b.residence.moved for b in buckets)
        square(model, data(0, rank)).backward()

    simulate_ranks(ranks, world)


def test_a_resting_unit_is_not_superseded_by_a_move() -> None:
    """Only what is gathered lies in memory that the move left behind."""

    def ranks(rank: int) -> None:
        model = one_unit(seeded(lambda: nn.Linear(6, 4)))
        (bucket,) = units(model)[0].buckets
        model.weight.data = model.weight.detach() * 2
        epoch = units(model)[0].checks.epoch
        assert moved_parameters.shard_of(bucket) is bucket.stored
        assert not bucket.fill.is_superseded and not bucket.residence.moved
        assert units(model)[0].checks.epoch == epoch
        for kind in (torch.float32, torch.float16):
            model.to(kind)
            moved_parameters.shard_of(bucket)
            assert units(model)[0].checks.epoch > epoch
            epoch = units(model)[0].checks.epoch

    simulate_ranks(ranks)


def test_a_move_that_an_inference_takes_over() -> None:
    """What is built then is trained on later."""

    def ranks(rank: int) -> None:
        for kind in (torch.float64, torch.float32):
            plain = seeded(two_blocks)
            model = by_block(copy.deepcopy(plain))
            for module in (model, plain):
                for param in module.parameters():
                    param.data = param.detach().to(kind) * 2
            with torch.inference_mode():
                assert_close(model(data(0, rank).to(kind)), plain(data(0, rank).to(kind)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            reference = torch.optim.SGD(plain.parameters(), lr=0.1)
            square(model, data(0, rank).to(kind)).backward()
            sum(square(plain, data(0, r).to(kind)) / 2 for r in range(2)).backward()
            optimizer.step(), reference.step()
            for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert_close(whole(mine), other.detach())

    simulate_ranks(ranks)


def test_gradients_follow_assigned_data() -> None:
    """``p.data = x`` leaves ``.grad`` as it was; the forward after it gives them one dtype."""

    def ranks(rank: int) -> None:
        model = one_unit(seeded(lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))))
        square(model, data(0, rank)).backward()
        model[0].bias.grad = None
        before = {n: None if p.grad is None else p.grad for n, p in model.named_parameters()}
        for param in model.parameters():
            param.data = param.detach().float()
        model(data(0, rank).float())
        for name, param in model.named_parameters():
            if before[name] is None:
                assert param.grad is None
                continue
            assert param.grad.dtype is torch.float32 and is_sharded(param.grad)
            assert param.grad.shape == param.shape
            assert_close(whole(param.grad), whole(before[name]).float())
        square(model, data(0, rank).float()).backward()
        for name, param in model.named_parameters():
            if before[name] is not None:
                assert_close(whole(param.grad), 2 * whole(before[name]).float())
        model.double()
        after = [p.grad for p in model.parameters()]
        model(data(0, rank))
        for param, grad in zip(model.parameters(), after, strict=True):
            assert param.grad is grad  # module.double() converted it

    simulate_ranks(ranks)


def wait_over_replicas(model: nn.Module, wait: bool) -> None:
    fc.set_requires_all_reduce(model, not wait)


def wait_for_the_last(model: nn.Module, wait: bool) -> None:
    fc.set_is_last_backward(model, not wait)


def wait_packed(model: nn.Module, wait: bool) -> None:
    fc.set_requires_gradient_sync(model, not wait)


WAITS: dict[str, tuple[Any, dict[str, Any]]] = {
    "partial": (wait_over_replicas, {"strategy": ShardingStrategy.HYBRID_SHARD}),
    "waiting": (wait_for_the_last, {"offload_policy": Offload(params=True)}),
    "packed": (wait_packed, {}),
    "nodes": (lambda model, wait: None, {"deterministic": 8}),
}


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("kind", WAITS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradients_on_their_way_follow_a_move(kind: str, dtype: torch.dtype) -> None:
    """What a microbatch before the conversion left is part of the sum, in the new dtype."""
    switch, options = WAITS[kind]
    after = torch.complex64 if dtype.is_complex else torch.float32

    def loss(model: nn.Module, seed: int, rank: int, kind: torch.dtype) -> Tensor:
        return model(data(seed, rank).to(kind)).abs().square().mean()

    def ranks(rank: int) -> None:
        given = dict(options)
        if kind == "partial":
            given["mesh"] = mesh_of_replicas(2, 2)
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).to(dtype)
        model = one_unit(copy.deepcopy(plain), **given)
        switch(model, True)
        loss(model, 0, rank, dtype).backward()
        (bucket,) = units(model)[0].buckets
        arriving = bucket.arriving
        if kind != "nodes":
            waits = (arriving.partial, arriving.waiting, arriving.packed or None)
            assert sum(each is not None for each in waits) == 1
        model.to(after)
        switch(model, False)
        loss(model, 1, rank, after).backward()
        for r in range(4):
            (loss(plain, 0, r, dtype) / 4).backward()
            (loss(plain, 1, r, dtype) / 4).backward()
        scale = 2 if kind == "nodes" else 1  # of a mean over microbatches
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.grad.dtype is after
            found = whole(mine.grad) * scale
            assert_close(found, other.grad.to(after), rtol=1e-4, atol=1e-5)

    simulate_ranks(ranks, 4)


def layers(count: int = 3) -> nn.Module:
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(count)))


def converted(count: int) -> str:
    """The error of a unit of six parameters, the last ``count`` of which became half precision."""
    model = one_unit(seeded(layers))
    for param in list(model.parameters())[6 - count :]:
        param.data = param.detach().half()
    with pytest.raises(RuntimeError) as caught:
        model(data(0, 0))
    return str(caught.value)


def test_a_conversion_in_part_says_which_and_how_many() -> None:
    """Four names at most, what the others are, and one of them."""

    def ranks(rank: int) -> None:
        half, double = "is torch.float16 on cpu", "torch.float64 on cpu"
        one, four, five = (converted(count) for count in (1, 4, 5))
        assert f": '2.bias' {half}, '0.weight' and 4 more are {double}. Convert" in one
        names = f": '1.weight' {half}, '1.bias' {half}, '2.weight' {half}, '2.bias' {half}, "
        assert names + f"'0.weight' and 1 more are {double}. Convert" in four
        names = f": '0.bias' {half}, '1.weight' {half}, '1.bias' {half}, '2.weight' {half}, ..., "
        assert names + f"'0.weight' is {double}. Convert" in five
        model = one_unit(seeded(layers))
        for index, param in enumerate(model.parameters()):
            param.data = param.detach().to(torch.float16 if index else torch.float32)
        with pytest.raises(RuntimeError, match=rf"float16 on cpu, \.\.\., none is {double}\. "):
            model(data(0, rank))
        model.double()
        square(model, data(0, rank)).backward()

    simulate_ranks(ranks)


@pytest.mark.parametrize("bias", [True, False])
def test_a_change_before_backward_counts_others(bias: bool) -> None:
    """Only where the bucket has more than the one parameter that is named."""

    def ranks(rank: int) -> None:
        model = one_unit(seeded(lambda: nn.Linear(6, 4, bias=bias)))
        loss = square(model, data(0, rank))
        model.weight.data = model.weight.detach() * 2
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        others = " or others of its 2" if bias else ""
        assert f"unit 'Linear' ('weight'{others}) were given other storage" in str(caught.value)

    simulate_ranks(ranks)


class Tied(nn.Module):
    """Both of its layers have one weight, and each is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_every_unit_with_a_moved_weight_reads_it() -> None:
    """A weight that two units have is converted for both."""

    def ranks(rank: int) -> None:
        plain = seeded(Tied)
        model = copy.deepcopy(plain)
        fully_shard(model.second)
        fully_shard(model)
        model(data(0, rank))
        for kind in (torch.float32, torch.float64):
            model.to(kind), plain.to(kind)
            x = data(1, rank, dtype=kind)
            assert_close(model(x), plain(x))
            square(model, x).backward()
            assert_at_rest(model)
            model.zero_grad()

    simulate_ranks(ranks)


class Buffered(nn.Module):
    """Six parameters in two buckets, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("shift", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale + self.shift


def unwritten(**options: Any) -> nn.Module:
    with torch.device("meta"):
        model = Buffered().double()
    model.layers[0].requires_grad_(False)
    return one_unit(model, param_init_fn=lambda module: None, **options)


def error_of(model: nn.Module, rank: int) -> str:
    with pytest.raises(
        RuntimeError, match=r"^unit 'Buffered': .* nothing has written it"
    ) as caught:
        model(data(0, rank))
    return str(caught.value)


def test_what_one_rank_did_not_load_stops_all() -> None:
    """Also ranks of other replicas and shards than those of the rank that lacks it."""

    def ranks(rank: int) -> None:
        mesh = mesh_of_replicas(2, 2)
        model = unwritten(mesh=mesh, strategy=ShardingStrategy.HYBRID_SHARD)
        tensors = [*model.parameters(), *model.buffers()]
        for param in model.parameters():
            param._shard_spec.residence.writes = None  # which are noted otherwise
        with torch.no_grad():
            for tensor in tensors:
                if rank != 3:
                    tensor.fill_(0.5)
        assert "unit 'Buffered': parameter '" in error_of(model, rank)
        with torch.no_grad():
            for tensor in tensors[:-1]:
                tensor.fill_(0.5)
        assert error_of(model, rank).startswith("unit 'Buffered': buffer 'shift' came from")
        with torch.no_grad():
            tensors[-1].fill_(0.5)
        square(model, data(0, rank)).backward()
        (unit,) = units(model)
        assert not unit.checks.unready_buffers and len(unit.gathered) == 2
        assert not any(bucket.history.unready for bucket in unit.gathered)

    simulate_ranks(ranks, 4)


def test_five_names_of_what_was_not_loaded() -> None:
    """Five at the most, then how many more; what was loaded is not among them."""

    def ranks(rank: int) -> None:
        model = unwritten()
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for name in ("layers.0.weight", "layers.2.bias"):
                tensors.pop(name).fill_(0.5)
        for count in (6, 5, 4, 1):
            while len(tensors) > count:
                with torch.no_grad():
                    tensors.popitem()[1].fill_(0.5)
            text = error_of(model, rank)
            assert text.count("parameter '") + text.count("buffer '") == min(count, 5)
            assert ("and 1 more came from" in text) is (count == 6)
            assert "more came" not in text or count == 6
        model.to_empty(device="cpu")
        assert " and 1 more came from" in error_of(model, rank)
        for tensor in (*model.parameters(), *model.buffers()):
            with torch.no_grad():
                tensor.fill_(0.5)
        square(model, data(0, rank)).backward()
        (unit,) = units(model)
        assert not any(bucket.residence.emptied for bucket in unit.gathered)
        model.float()
        model(data(0, rank).float())
        assert not any(bucket.residence.emptied for bucket in unit.gathered)

    simulate_ranks(ranks)
