"""HYBRID_SHARD_OPTIMIZER: weights over one mesh axis, optimizer state over both."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_compose as fc
from fsdp_compose import MixedPrecision, Offload, ShardingStrategy, fully_shard
from fsdp_compose.base import mesh as mesh_module
from fsdp_compose.base import torch_private
from fsdp_compose.base.process import here
from fsdp_compose.comm.shared_memory import segments_of
from fsdp_compose.construct.wrap import by_fn

from harness import rank_errors, run_ranks, simulate_ranks
from models import (
    Tower,
    Twin,
    assert_at_rest,
    by_block,
    data,
    mesh_of_replicas,
    seeded,
    sgd,
    square,
    units,
)

FUSED = ShardingStrategy.HYBRID_SHARD_OPTIMIZER
SHAPES = [(2, 2), (2, 1), (1, 2), (4, 1), (1, 4)]


def mesh_of(shape: tuple[int, int]) -> Any:
    return mesh_of_replicas(*shape)


def fused(model: nn.Module, shape: tuple[int, int] = (2, 2), **options: Any) -> nn.Module:
    return by_block(model, mesh=mesh_of(shape), strategy=FUSED, **options)


def train(model: nn.Module, optim: Any, rank: int, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        square(model, data(step, rank)).backward()
        optim.step()
        optim.zero_grad()


def trained_plain(world: int, steps: int = 3) -> dict[str, torch.Tensor]:
    plain = seeded(Tower)
    optim = sgd(plain.parameters())
    for step in range(steps):
        square(plain, torch.cat([data(step, r) for r in range(world)])).backward()
        optim.step()
        optim.zero_grad()
    return plain.state_dict()


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_equal_one_process(shape: tuple[int, int]) -> None:
    world = shape[0] * shape[1]

    def ranks(rank: int) -> None:
        model = fused(seeded(Tower), shape)
        train(model, sgd(model.parameters()), rank, 3)
        assert_equal(fc.state_dict(model), trained_plain(world))
        assert_at_rest(model)

    run_ranks(ranks, world)


def test_state_is_cut_over_every_rank() -> None:
    """State is cut over every rank and weights over one axis."""

    def ranks(rank: int) -> None:
        model = fused(seeded(Tower))
        optim = torch.optim.AdamW(model.parameters())
        train(model, optim, rank, 1)
        numel = sum(b.layout.numel for u in units(model) for b in u.buckets)
        for values in (
            [p.to_local() for p in model.parameters()],
            [p.grad.to_local() for p in model.parameters() if p.grad is not None],
            [s["exp_avg"].to_local() for s in optim.state.values()],
        ):
            assert sum(v.numel() for v in values) <= numel // 4
        kept = fc.explain(model)
        assert sum(u.weight_copies for u in kept.units) == numel // 2 * 8
        for unit in units(model):  # ranks of one host need no messages for it
            assert all(segments_of(bucket.mesh.shard) is not None for bucket in unit.buckets)

    run_ranks(ranks, 4)


def test_weights_cross_the_replicas_once_a_step() -> None:
    """A second microbatch, and inference behind it, gather over the shard axis alone."""

    def ranks(rank: int) -> None:
        model = fused(seeded(Tower))
        optim = sgd(model.parameters())
        train(model, optim, rank, 2)
        count = len(units(model))
        here.traffic.reset()
        with fc.accumulate(model, keep="no_all_reduce"):
            square(model, data(0, rank)).backward()
            first = here.traffic.gathers
            square(model, data(1, rank)).backward()
        assert first - count == here.traffic.gathers - first
        with torch.no_grad():
            here.traffic.reset()
            model(data(0, rank))
            assert here.traffic.gathers == count
        assert (here.traffic.all_reduces, here.traffic.reduces) == (0, 0)

    run_ranks(ranks, 4)


@pytest.mark.parametrize(
    "options",
    [
        {"mp_policy": MixedPrecision(torch.float32, torch.float32)},
        {"offload_policy": Offload(params=True)},
        {"offload_policy": Offload(optimizer=True, grads=True)},
        {"granularity": "row"},
    ],
    ids=str,
)
def test_with_other_options(options: dict[str, Any]) -> None:
    def ranks(rank: int) -> None:
        model = fused(seeded(Tower), **options)
        train(model, sgd(model.parameters()), rank, 3)
        loose = "mp_policy" in options
        for name, value in fc.state_dict(model).items():
            torch.testing.assert_close(
                value, trained_plain(4)[name], rtol=1e-4 if loose else 1e-10, atol=1e-6
            )

    run_ranks(ranks, 4)


@pytest.mark.parametrize("name", ["default_hook", "bf16_compress_hook"])
def test_communication_hooks(name: str) -> None:
    def ranks(rank: int) -> None:
        model = fused(seeded(Tower))
        fc.register_comm_hook(model, None, getattr(fc, name))
        train(model, sgd(model.parameters()), rank, 2)
        rtol = 1e-10 if name == "default_hook" else 1e-2
        for key, value in fc.state_dict(model).items():
            torch.testing.assert_close(value, trained_plain(4, 2)[key], rtol=rtol, atol=rtol)

    run_ranks(ranks, 4)


def test_written_converted_copied_and_undone() -> None:
    """Whatever changes the shards is read by the next gather."""

    def ranks(rank: int) -> None:
        model, plain = fused(seeded(Tower)), seeded(Tower)
        x = data(0, rank)
        model(x)
        for change in (
            lambda m: [p.mul_(1.5) for p in m.parameters()],
            lambda m: [p.data.mul_(1.5) for p in m.parameters()],
        ):
            with torch.no_grad():
                change(model), change(plain)
            torch.testing.assert_close(model(x), plain(x))
        with fc.gathered(model, writeback=True), torch.no_grad():
            model.head.weight.fill_(2.0)
        nn.init.constant_(plain.head.weight, 2.0)
        torch.testing.assert_close(model(x), plain(x))
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.head.weight.mul_(3.0)
        torch.testing.assert_close(model(x), plain(x))
        with pytest.raises(AssertionError):
            torch.testing.assert_close(twin(x), plain(x))
        model.to(torch.float32)
        torch.testing.assert_close(model(x.float()), plain(x).float(), rtol=1e-4, atol=1e-4)
        fc.undo(model)
        assert_equal(model.state_dict(), {k: v.float() for k, v in plain.state_dict().items()})

    run_ranks(ranks, 4)


def test_writes_that_replicas_cannot_see_are_refused() -> None:
    """They keep copies, which are made anew once a write is counted."""

    def ranks(rank: int) -> None:
        model, x = fused(seeded(Tower), (2, 1)), data(0, rank)
        slices = [p.to_local() for p in model.blocks[0].parameters()]
        model(x)
        for part in slices:
            part.data.add_(1.0)
        text = r"'blocks.0.*' of unit 'blocks.0' was written .* so replicas keep copies"
        with pytest.raises(RuntimeError, match=text):
            model(x)
        with torch.no_grad():
            for part in slices:
                part.mul_(1.0)
        model(x)

    simulate_ranks(ranks)


def test_checkpoints_to_another_arrangement_and_back(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        model = fused(seeded(Tower))
        optim = torch.optim.AdamW(model.parameters())
        train(model, optim, rank, 2)
        fc.save_checkpoint(tmp_path / "fused", model, optim)
        train(model, optim, rank, 2, first=2)
        fc.save_full(tmp_path / "wanted", model)

    def load(rank: int, strategy: Any) -> None:
        options = {"strategy": strategy}
        if strategy is not None and "HYBRID" in strategy.name:
            options["mesh"] = mesh_of((2, 2))
        model = by_block(seeded(Tower, 5), **options)
        optim = torch.optim.AdamW(model.parameters())
        fc.load_checkpoint(tmp_path / "fused", model, optim)
        train(model, optim, rank, 2, first=2)
        wanted = by_block(seeded(Tower, 6))
        fc.load_full(tmp_path / "wanted", wanted)
        assert_equal(fc.state_dict(model), fc.state_dict(wanted))

    run_ranks(save, 4)
    for strategy in (FUSED, None, ShardingStrategy.HYBRID_SHARD):
        run_ranks(load, 4, strategy)


def test_tied_and_frozen_parameters() -> None:
    def ranks(rank: int) -> None:
        class Tied(Tower):
            def __init__(self) -> None:
                super().__init__()
                self.blocks[2].up.weight = self.blocks[0].up.weight
                self.blocks[1].requires_grad_(False)

        Twin(rank, 4, Tied, fused).train()

    run_ranks(ranks, 4)


def test_a_torch_that_orders_groups_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.11: replicas next to each other in the mesh work, and others are refused."""
    monkeypatch.setattr(mesh_module, "KEEPS_RANK_ORDER", False)
    monkeypatch.setattr(torch_private, "KEEPS_RANK_ORDER", False)
    names = ("replicate", "shard")

    def adjacent(rank: int) -> None:
        mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2).T, mesh_dim_names=names)
        model = by_block(seeded(Tower), mesh=mesh, strategy=FUSED)
        train(model, sgd(model.parameters()), rank, 3)
        assert_equal(fc.state_dict(model), trained_plain(4))

    def apart(rank: int) -> None:
        mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=names)
        fully_shard(Tower(), mesh=mesh, strategy=FUSED)

    run_ranks(adjacent, 4)
    for error in rank_errors(apart, 4):
        assert error is not None and "numbers the ranks of every group by size" in error


def test_arguments_that_contradict_it() -> None:
    def no_mesh(rank: int) -> None:
        fully_shard(Tower(), strategy=FUSED)

    def pair(rank: int) -> None:
        groups = [torch.distributed.new_group(r) for r in ([0, 1], [2, 3], [0, 2], [1, 3])]
        pair = groups[rank // 2], groups[2 + rank % 2]
        fully_shard(Tower(), strategy=FUSED, mesh=pair, init="as_is")

    def number(rank: int) -> None:
        fully_shard(Tower(), strategy=FUSED, mesh=mesh_of((2, 2)), reshard_after_forward=2)

    def override(rank: int) -> None:
        rule = by_fn(lambda n, m: {"reshard_after_forward": 2} if n == "blocks.0" else False)
        fully_shard(Tower(), strategy=FUSED, mesh=mesh_of((2, 2)), units=rule)

    for function, text in (
        (no_mesh, "need (replicate, shard)"),
        (pair, "pass a DeviceMesh"),
        (number, "keeps weights over the shard axis"),
        (override, "unit 'blocks.0' overrides reshard_after_forward with 2"),
    ):
        errors = rank_errors(function, 4)
        for error in errors:
            assert error is not None and error.startswith("ValueError: ") and text in error
