"""Ranks that communicate over NCCL, on a GPU each or on one they share: run with ``-m cuda``."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_compose as fc
from fsdp_compose import MixedPrecision, Prefetch, ShardingStrategy

from harness import rank_errors, run_ranks
from laws import Choosy, check_steps
from models import (
    Block,
    Recomputed,
    Tower,
    Twin,
    by_block,
    data,
    mesh_of_replicas,
    nested,
    seeded,
    square,
)

pytestmark = pytest.mark.cuda

LOW = MixedPrecision(torch.bfloat16, torch.float32)
CELLS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "zero1": {"strategy": ShardingStrategy.ZERO1},
    "no shard": {"strategy": ShardingStrategy.NO_SHARD},
    "no prefetch": {"prefetch": Prefetch(0, 0)},
    "deep prefetch": {"prefetch": Prefetch(3, 3, "post")},
    "static": {"static_buffers": True},
}


@pytest.mark.parametrize("cell", CELLS)
def test_training_equals_one_process(cell: str) -> None:
    def ranks(rank: int) -> None:
        Twin(rank, 2, Tower, partial(by_block, **CELLS[cell])).train()

    run_ranks(ranks, 2)


@pytest.mark.parametrize("shard", [by_block, nested])
def test_recomputed_blocks_train_as_one_process(shard: Any) -> None:
    run_ranks(lambda rank: Twin(rank, 2, Recomputed, shard).train(), 2)


@pytest.mark.parametrize(
    "strategy", ["HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "HYBRID_SHARD_OPTIMIZER"]
)
def test_replicas_train_as_one_process(strategy: str) -> None:
    def ranks(rank: int) -> None:
        chosen = {"strategy": ShardingStrategy[strategy], "mesh": mesh_of_replicas(2, 2)}
        Twin(rank, 4, Tower, partial(by_block, **chosen)).train()

    run_ranks(ranks, 4)


@pytest.mark.parametrize("cell", CELLS)
def test_a_step_never_waits(cell: str) -> None:
    """Neither passes, nor clipping by either function, nor the optimizer."""

    def ranks(rank: int) -> None:
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        model = by_block(seeded(Tower).float(), mp_policy=LOW, **CELLS[cell])
        optim = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        x = data(0, rank).float()
        for step in range(6):
            torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
            with fc.accumulate(model):
                for _ in range(2):
                    square(model, x).backward()
            fc.clip_grad_norm_(model, 1.0)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optim.step()
            optim.zero_grad()
            torch.cuda.set_sync_debug_mode("default")

    run_ranks(ranks, 2)


class Turned(Tower):
    """Calls its blocks in an order that ranks can turn round."""

    turned = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in reversed(self.blocks) if self.turned else self.blocks:
            x = block(x)
        return self.head(x)


def test_ranks_that_differ_from_the_start_hear_of_it() -> None:
    """Later one may gather ahead what others do not, and NCCL waits (docs/limits.md)."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Turned))
        model.turned = rank == 1
        square(model, data(0, rank)).backward()

    errors = rank_errors(ranks, 2)
    assert all(error and "ranks run different units" in error for error in errors), errors


def test_norms_and_scales_are_those_of_a_plain_module() -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        scaler, theirs = fc.GradScaler(init_scale=4.0), torch.amp.GradScaler("cuda", init_scale=4.0)
        for seed in range(3):
            loss, plain = twin.losses(square, seed)
            scaler.scale(loss).backward()
            theirs.scale(plain).backward()
            scaler.unscale_(twin.optim)
            theirs.unscale_(twin.plain_optim)
            norm = fc.clip_grad_norm_(twin.model, 0.1)
            wanted = nn.utils.clip_grad_norm_(twin.reference.parameters(), 0.1)
            torch.testing.assert_close(norm, wanted.to(norm.dtype))
            scaler.step(twin.optim)
            theirs.step(twin.plain_optim)
            scaler.update()
            theirs.update()
            twin.zero_grad()
        twin.check()

    run_ranks(ranks, 2)


def test_half_precision_sums_are_scaled_on_the_way() -> None:
    """A sum of two gradients near the largest float16, of which the mean is wanted."""

    def ranks(rank: int) -> None:
        model = nn.Linear(4, 4, bias=False, device="cuda")
        fc.fully_shard(model, mp_policy=MixedPrecision(torch.float16, torch.float16))
        (model(torch.ones(1, 4, device="cuda")) * 40000.0).sum().backward()
        assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 4), 40000.0).cuda())

    run_ranks(ranks, 2)


def test_states_are_saved_and_loaded(tmp_path: Any) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Tower, optimizer=partial(torch.optim.AdamW, lr=0.01, fused=True))
        twin.train(steps=2)
        fc.save_checkpoint(tmp_path / "saved", twin.model, twin.optim)
        whole = fc.state_dict(twin.model, kind="full")
        again = by_block(seeded(Tower, 5))
        optim = torch.optim.AdamW(again.parameters(), lr=0.01, fused=True)
        fc.load_checkpoint(tmp_path / "saved", again, optim)
        for name, value in fc.state_dict(again, kind="full").items():
            assert value.device == whole[name].device and torch.equal(value, whole[name])
        twin.model, twin.optim = again, optim
        twin.train(steps=2)

    run_ranks(ranks, 2)


def test_what_is_frozen_or_unused_has_no_gradient() -> None:
    """The host waits for what others used in the steps alone in which that changes."""

    def ranks(rank: int) -> None:
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        decayed = partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)
        twin = Twin(rank, 2, Choosy, fc.fully_shard, decayed)
        check_steps(twin, [[(0,)], [(1,)], [(1,)], [(0, 2)], [(0, 2)]])
        for model in (twin.model, twin.reference):
            model.get_submodule("layers.2").requires_grad_(False)
        for step in range(3):
            x = data(step, rank)
            torch.cuda.set_sync_debug_mode("error" if step else "default")
            square(twin.model, x).backward()
            torch.cuda.set_sync_debug_mode("default")
            torch.stack(
                [square(p, data(step, r)) for r, p in enumerate(twin.plain)]
            ).mean().backward()
            twin.check_grads()
            twin.step()
        twin.check()

    run_ranks(ranks, 2)


def test_meta_models_start_alike() -> None:
    def ranks(rank: int) -> None:
        with torch.device("meta"):
            model = Tower()
        by_block(model)
        found = [p.full_tensor() for p in model.parameters()]
        assert all(p.device.type == "cuda" and p.isfinite().all() for p in found)
        square(model, data(0, rank).float()).backward()

    run_ranks(ranks, 2)


def test_offloaded_shards_may_be_written_at_once() -> None:
    """Between steps the host overwrites what the device was copying from."""

    def ranks(rank: int) -> None:
        offload = fc.Offload(params=True)
        twin = Twin(rank, 2, Tower, partial(by_block, offload_policy=offload))
        twin.train(steps=4)

    run_ranks(ranks, 2)


def test_compiled_blocks_train_as_one_process() -> None:
    def ranks(rank: int) -> None:
        warnings.simplefilter("ignore")  # torch's, of what it asks gathered weights
        twin = Twin(rank, 2, Tower)
        for block in twin.model.modules():
            if isinstance(block, Block):
                block.compile(fullgraph=True)
        twin.train(steps=2)

    run_ranks(ranks, 2, timeout=150)
