"""Loss scaling: an overflow on one rank is one on all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import (
    MixedPrecision,
    ShardingStrategy,
    flat_parameters,
    fully_shard,
    local_parameters,
    set_gradient_divide_factor,
)
from fsdp_compose.base.group import Group
from fsdp_compose.base.process import here
from fsdp_compose.optim.scaler import GradScaler

from harness import run_ranks
from models import Tower, Twin, adamw, by_block, data, seeded, square, whole

pytestmark = pytest.mark.filterwarnings("error")

SCALERS = {"ours": GradScaler, "torch": torch.amp.GradScaler}


def make(kind: Any, **options: Any) -> Any:
    return kind("cpu", init_scale=2.0**8, growth_interval=2, **options)


def spoil(model: nn.Module, value: float) -> bool:
    """Put ``value`` into this rank's slice of the first gradient that has one here."""
    for param in model.parameters():
        if param.grad is not None and param.grad.to_local().numel():
            param.grad.to_local()[0] = value
            return True
    return False


@pytest.mark.parametrize("kind", SCALERS.values(), ids=SCALERS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_scaled_training_equals_unscaled(kind: Any, world: int) -> None:
    def check(rank: int) -> None:
        twin = Twin(rank, world, Tower, optimizer=adamw)
        scaler = make(kind)
        for seed in range(4):
            loss, plain = twin.losses(square, seed)
            scaler.scale(loss).backward()
            plain.backward()
            scaler.unscale_(twin.optim)
            twin.check_grads()
            scaler.step(twin.optim)
            scaler.update()
            twin.plain_optim.step()
            twin.zero_grad()
        assert scaler.get_scale() == 2.0**10
        twin.check()

    run_ranks(check, world)


@pytest.mark.parametrize("kind", SCALERS.values(), ids=SCALERS)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("culprit", [0, 2])
def test_an_infinity_in_one_slice_skips_all_steps(kind: Any, bad: float, culprit: int) -> None:
    """An infinity in one rank's slice skips the step on all."""

    def check(rank: int) -> float:
        model = by_block(seeded(Tower))
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        before = [whole(p) for p in model.parameters()]
        scaler = make(kind)
        scaler.scale(square(model, data(0, rank))).backward()
        if rank == culprit:
            assert spoil(model, bad)
        scaler.step(optim)
        scaler.update()
        assert all(torch.equal(whole(p), b) for p, b in zip(model.parameters(), before))
        return scaler.get_scale()

    assert run_ranks(check, 3) == [2.0**7] * 3


def test_ranks_agree_between_different_groups() -> None:
    """Experts are sharded over pairs; only one pair overflows, and all four ranks skip."""

    def check(rank: int) -> tuple[float, bool]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "expert"))
        model = seeded(Tower)
        model.blocks.requires_grad_(False)
        fully_shard(model.head, mesh=mesh["expert"])
        set_gradient_divide_factor(model.head, 4)
        fully_shard(model.first)
        optim = torch.optim.SGD([*model.head.parameters(), *model.first.parameters()], lr=0.1)
        scaler = make(GradScaler)
        scaler.scale(square(model, data(0, rank))).backward()
        if rank == 3:
            assert spoil(model.head, float("inf"))
        before = whole(model.first.weight)
        scaler.step(optim)
        scaler.update()
        return scaler.get_scale(), torch.equal(whole(model.first.weight), before)

    assert run_ranks(check, 4) == [(2.0**7, True)] * 4


@pytest.mark.parametrize("sharded", [True, False])
def test_stages_of_a_pipeline_agree(sharded: bool) -> None:
    """One stage overflows on one rank, and the other one skips too; without a mesh it steps."""

    def check(rank: int) -> list[tuple[float, bool]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        found = []
        for stages in (mesh["pp"], mesh["pp"].get_group(), *([None] if sharded else [])):
            model = seeded(Tower)
            if sharded:
                by_block(model, mesh=mesh["dp"])
            optim = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = GradScaler("cpu", init_scale=2.0**8, pipeline_mesh=stages)
            scaler.scale(square(model, data(0, rank))).backward()
            if rank == 3:
                bad = float("inf")
                assert spoil(model, bad) if sharded else [model.head.bias.grad.add_(bad)]
            if rank == 1 and not sharded:
                optim.zero_grad()  # this stage has nothing to step
            before = [whole(p) for p in model.parameters()]
            scaler.step(optim)
            scaler.update()
            stays = all(torch.equal(whole(p), q) for p, q in zip(model.parameters(), before))
            found.append((scaler.get_scale(), stays))
        return found

    first, second, _, last = run_ranks(check, 4)
    agreed = [(2.0**7, True)] * 2
    if sharded:
        assert first == second == [*agreed, (2.0**8, False)]
        assert last == [*agreed, (2.0**7, True)]
    else:
        assert second == last == agreed
    with pytest.raises(TypeError, match=r"pipeline_mesh.*a DeviceMesh or process group"):
        GradScaler("cpu", pipeline_mesh=2)


def test_replicas_and_plain_parameters_agree() -> None:
    def check(rank: int) -> float:
        model = seeded(Tower)
        by_block(model, strategy=ShardingStrategy.NO_SHARD, ignored=[model.head])
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = make(GradScaler)
        scaler.scale(square(model, data(0, rank))).backward()
        if rank == 1:
            model.head.weight.grad[0, 0] = float("nan")
        scaler.step(optim)
        scaler.update()
        return scaler.get_scale()

    assert run_ranks(check, 2) == [2.0**7] * 2


def test_one_all_reduce_per_group() -> None:
    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = make(GradScaler)
        scaler.scale(square(model, data(0, rank))).backward()
        here.traffic.reset()
        scaler.step(optim)
        assert here.traffic.all_reduces == 1
        assert isinstance(model.first.weight._shard_spec.group, Group)

    run_ranks(check, 2)


def test_disabled_and_without_gradients() -> None:
    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        off = make(GradScaler, enabled=False)
        off.scale(square(model, data(0, rank))).backward()
        off.step(optim)
        off.update()
        assert off.get_scale() == 1.0
        model.zero_grad()
        scaler = make(GradScaler)
        scaler.scale(torch.ones(()))
        with pytest.raises(RuntimeError, match=r"SGD.step\(\): no parameter has a gradient"):
            scaler.step(optim)
        scaler.update()
        assert scaler.get_scale() == 2.0**8

    run_ranks(check, 2)


def test_unscaling_outside_the_optimizer() -> None:
    """Unscaling outside the optimizer sees what torch sees."""
    with pytest.raises(AssertionError, match="scale"):
        make(GradScaler).unscale_(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))


class OnDevice:
    """Stands for a number on a GPU, of which ``.cpu()`` waits, and torch's own copies do not."""

    device = torch.device("cuda")

    def __init__(self, value: float) -> None:
        self.value = torch.tensor(value)

    def cpu(self) -> torch.Tensor:
        return self.value

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(3.0)  # it has not arrived


@pytest.mark.parametrize("over", [nn.Module.parameters, flat_parameters, local_parameters])
def test_offloaded_gradients_wait_for_the_scale(over: Any) -> None:
    """Those of plain tensors over the shards too."""
    model = fully_shard(nn.Linear(2, 2))
    optim = torch.optim.SGD(over(model), lr=0.1)
    scaler = make(GradScaler)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    found = scaler._unscale_grads_(optim, OnDevice(1.0), OnDevice(0.0), True)
    assert found == {torch.device("cpu"): torch.tensor(0.0)}
    model.bias.grad.to_local()[0] = float("inf")
    found = scaler._unscale_grads_(optim, OnDevice(0.5), OnDevice(0.0), True)
    assert found == {torch.device("cpu"): torch.tensor(1.0)}
    assert model.weight.grad.full_tensor().eq(2.0**7).all()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_fused_step_of_offloaded_ones_waits_too(kind: Any) -> None:
    """It unscales by itself, and is told of an overflow by a tensor."""
    models = [fully_shard(seeded(Tower)) for _ in range(2)]
    optims = [kind(model.parameters(), lr=0.1, fused=True) for model in models]
    for seed, inf in enumerate([0.0, 1.0, 0.0]):
        for model, optim, stands in zip(models, optims, (torch.tensor, OnDevice)):
            square(model, data(seed, 0)).backward()
            optim.found_inf, optim.grad_scale = stands(inf), stands(2.0)
            optim.step()
            optim.zero_grad()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters()):
        assert torch.equal(whole(ours), whole(theirs))


def test_torchs_scaler_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies to offloaded gradients are on the current stream of the device."""
    waits: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    stream = SimpleNamespace(synchronize=lambda: waits.append(0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    model = fully_shard(nn.Linear(2, 2))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = make(torch.amp.GradScaler)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optim)
    assert waits


@pytest.mark.parametrize("kind", ["half", "mixed"])
def test_gradients_in_fp16_are_unscaled(kind: str) -> None:
    """As by FSDP1's scaler: of a model in fp16, or with ``keep_low_precision_grads``."""

    def ranks(rank: int) -> None:
        half = torch.float16
        mp = MixedPrecision(half, half, keep_low_precision_grads=True)
        model = seeded(lambda: Tower(1)).float()
        model = fully_shard(model.half() if kind == "half" else model, mp_policy=mp)
        scaler, optim = GradScaler("cpu", 64.0), torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for bad in (False, True):
            loss = square(model, data(0, rank).to(half)).float()
            scaler.scale(loss * (1e9 if bad and rank else 1.0)).backward()
            scaler.unscale_(optim)
            losses.append(model.head.weight.grad.norm())
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
        assert 0 < losses[0] < 1 and not losses[1].isfinite() and scaler.get_scale() == 32.0

    run_ranks(ranks, 2)
