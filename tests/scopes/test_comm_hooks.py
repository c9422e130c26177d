"""Communication hooks and hooks behind the reduction."""

from __future__ import annotations

import copy
import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compose as fc
from fsdp_compose import ShardingStrategy
from fsdp_compose.base.process import here
from fsdp_compose.comm.grad_bucket import GradBucket

from harness import rank_errors, run_ranks, simulate_ranks
from models import Tower


def reduce_by_torch(state: None, grads: GradBucket) -> Tensor:
    """Over both groups, whatever their sizes: None as a group is all ranks to torch."""
    dist.all_reduce(grads.flat, group=grads.shard.pg)
    part = grads.parts[grads.shard.rank].mul_(grads.scale)
    dist.all_reduce(part, group=grads.replicate.pg)
    return part


HOOKS = {
    "default": (None, fc.default_hook, 1e-6),
    "torch's": (None, reduce_by_torch, 1e-6),
    "bf16": (None, fc.bf16_compress_hook, 4e-3),
    "fp16": (None, fc.fp16_compress_hook, 1e-3),
}


def build(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Tower()
    for block in model.blocks:
        fc.fully_shard(block, **options)
    return fc.fully_shard(model, **options)


def batch(ranks: int) -> Tensor:
    return torch.randn(2 * ranks, 6, generator=torch.Generator().manual_seed(1))


def sharded_grads(model: nn.Module, rank: int, ranks: int) -> list[Tensor]:
    model(batch(ranks)[2 * rank : 2 * rank + 2]).square().mean().backward()
    return [p.grad.full_tensor() for p in model.parameters()]


def plain_grads(ranks: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = Tower()
    model(batch(ranks)).square().mean().backward()
    return [p.grad for p in model.parameters()]


def options_of(strategy: str, ranks: int) -> dict[str, Any]:
    chosen: dict[str, Any] = {"strategy": ShardingStrategy[strategy]}
    if "HYBRID" in strategy:
        chosen["mesh"] = init_device_mesh("cpu", (2, ranks // 2))
    return chosen


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_gives_the_averaged_gradient(name: str, strategy: str) -> None:
    state, hook, tolerance = HOOKS[name]

    def train(rank: int, ranks: int) -> None:
        model = build(**options_of(strategy, ranks))
        fc.register_comm_hook(model, state, hook)
        for got, want in zip(sharded_grads(model, rank, ranks), plain_grads(ranks)):
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * want.abs().max())
        assert all(p.grad.dtype is torch.float32 for p in model.parameters())

    run_ranks(train, 4, 4)


def test_half_precision_hooks_move_half_the_bytes() -> None:
    def train(rank: int) -> list[tuple[int, int]]:
        moved = []
        for hook in (fc.default_hook, fc.bf16_compress_hook, fc.fp16_compress_hook):
            model = build(**options_of("HYBRID_SHARD", 4))
            fc.register_comm_hook(model, None, hook)
            here.traffic.reset()
            sharded_grads(model, rank, 4)
            moved.append((here.traffic.reduce_bytes, here.traffic.all_reduce_bytes))
        return moved

    full, bf16, fp16 = run_ranks(train, 4)[0]
    assert bf16 == fp16 and full == (2 * bf16[0], 2 * bf16[1]) and min(full) > 0


def test_fp16_hook_does_not_overflow() -> None:
    """The fp16 hook does not overflow where a sum of halves, or one rank's gradient, would."""

    def train(rank: int) -> float:
        model = fc.fully_shard(nn.Linear(4, 1, bias=False))
        fc.register_comm_hook(model, None, fc.fp16_compress_hook)
        model(torch.full((1, 4), 4 * 49152.0)).sum().backward()
        return float(model.weight.grad.full_tensor().max())

    assert run_ranks(train, 4) == [4 * 49152.0] * 4


def int8_run(rank: int, ranks: int, restart: bool) -> list[Tensor]:
    model, state = build(), fc.Int8ErrorFeedback(block=32)
    fc.register_comm_hook(model, state, fc.int8_error_feedback_hook)
    total: list[Tensor] = []
    for step in range(12):
        if restart and step == 6:
            saved = io.BytesIO()
            torch.save(state.state_dict(), saved)
            saved.seek(0)
            state = fc.Int8ErrorFeedback(block=1)
            state.load_state_dict(torch.load(saved, weights_only=True))
            fc.register_comm_hook(model, state, fc.int8_error_feedback_hook)
        grads = sharded_grads(model, rank, ranks)
        model.zero_grad()
        total = [a + b for a, b in zip(total, grads)] if total else grads
    return total


def int8_saved(rank: int, path: Path, part: int, how: str = "") -> list[Tensor]:
    """The gradients of two steps: straight on, or from a checkpoint of the first."""
    if how == "whole":
        torch.manual_seed(0)
        model = fc.fully_shard(Tower())
    else:
        model = build()
    if how != "none":
        state = fc.Int8ErrorFeedback(block=32)
        fc.register_comm_hook(model, state, fc.int8_error_feedback_hook)
    if part:
        fc.load_checkpoint(path, model)
        if how:
            return []
    else:
        sharded_grads(model, rank, 2)
        fc.save_checkpoint(path, model)
        model.zero_grad()
    return sharded_grads(model, rank, 2)


def test_a_checkpoint_keeps_what_hooks_remember(tmp_path: Path) -> None:
    straight = run_ranks(int8_saved, 2, tmp_path / "saved", 0)
    resumed = run_ranks(int8_saved, 2, tmp_path / "saved", 1)
    fresh = run_ranks(sharded_int8, 2)
    assert all(torch.equal(a, b) for a, b in zip(straight[0], resumed[0]))
    assert not all(torch.equal(a, b) for a, b in zip(straight[0], fresh[0]))
    for error in rank_errors(int8_saved, 2, tmp_path / "saved", 1, "none"):
        assert error is not None and "call register_comm_hook before load_checkpoint" in error
    for error in rank_errors(int8_saved, 2, tmp_path / "saved", 1, "whole"):
        assert error is not None and "holds no state of communication hooks" in error


class Momentum:
    """State of ``average``: the running mean of each bucket's gradients, which it returns."""

    def __init__(self) -> None:
        self.means: dict[str, Tensor] = {}

    def state_dict(self) -> dict[str, Tensor]:
        return self.means

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        self.means = saved


def average(state: Momentum, grads: fc.GradBucket, kept: bool = True) -> Tensor:
    found = fc.default_hook(None, grads)
    mean = state.means.setdefault(grads.key, torch.zeros_like(found)).add_(found)
    return mean if kept else mean.clone()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD_OPTIMIZER"])
def test_a_hook_may_keep_what_it_returns(strategy: str) -> None:
    """Neither later microbatches nor clipping nor ``zero_grad`` writes into it."""

    def ranks(rank: int) -> list[list[Tensor]]:
        found = []
        for kept in (True, False):
            model, state = build(**options_of(strategy, 2)), Momentum()
            fc.register_comm_hook(model, state, partial(average, kept=kept))
            for _ in range(2):
                sharded_grads(model, rank, 2)
                sharded_grads(model, rank, 2)
                fc.clip_grad_norm_(model, 0.01)
                model.zero_grad(set_to_none=False)
            found.append([*state.means.values()])
        return found

    for kept, copied in simulate_ranks(ranks):
        assert kept and all(map(torch.equal, kept, copied))
        assert any(mean.abs().max() > 0.1 for mean in kept)


def test_a_skipped_step_puts_back_what_hooks_remember() -> None:
    def ranks(rank: int) -> None:
        model, state = build(), Momentum()
        fc.register_comm_hook(model, state, average)
        sharded_grads(model, rank, 2)
        before = copy.deepcopy(state.means)
        with fc.skippable_step(model) as step:
            sharded_grads(model, rank, 2)
            assert not all(torch.equal(before[key], state.means[key]) for key in before)
            if rank:
                raise FloatingPointError
        assert step.skipped
        assert before and all(torch.equal(before[key], state.means[key]) for key in before)

    simulate_ranks(ranks)


def sharded_int8(rank: int) -> list[Tensor]:
    model = build()
    fc.register_comm_hook(model, fc.Int8ErrorFeedback(block=32), fc.int8_error_feedback_hook)
    return sharded_grads(model, rank, 2)


@pytest.mark.parametrize("ranks", [2, 3])
def test_int8_errors_are_fed_back(ranks: int) -> None:
    """Over many steps of one gradient, what rounding takes is given back: the mean converges."""
    got = run_ranks(int8_run, ranks, ranks, False)[0]
    want = plain_grads(ranks)
    for mean, exact in zip([g / 12 for g in got], want):
        once = exact.abs().max() / 127  # the most that rounding one gradient may cost
        assert (mean - exact).abs().max() < once / 2


def test_the_state_of_a_hook_survives_a_checkpoint() -> None:
    straight, resumed = (run_ranks(int8_run, 2, 2, restart)[0] for restart in (False, True))
    for a, b in zip(straight, resumed):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_int8_moves_about_a_quarter_of_the_bytes() -> None:
    def train(rank: int) -> tuple[int, int]:
        moved = []
        for hook in (fc.default_hook, fc.int8_error_feedback_hook):
            model = fc.fully_shard(nn.Linear(64, 64))
            fc.register_comm_hook(model, fc.Int8ErrorFeedback(), hook)
            here.traffic.reset()
            model(torch.ones(1, 64)).sum().backward()
            moved.append(here.traffic.reduce_bytes)
        return moved[0], moved[1]

    full, small = run_ranks(train, 2)[0]
    assert small < 0.3 * full


def test_a_hook_can_be_taken_back_or_is_refused() -> None:
    """A hook can be taken back and is refused when it cannot be called."""

    def train(rank: int) -> None:
        calls: list[str] = []

        def hook(state: list[str], grads: GradBucket) -> Tensor:
            state.append(grads.key)
            return fc.default_hook(None, grads)

        model = build()
        fc.register_comm_hook(model, calls, hook)
        sharded_grads(model, rank, 2)
        assert len(calls) == len(set(calls)) == 4  # three blocks and the root
        fc.register_comm_hook(model, None, None)
        sharded_grads(model, rank, 2)
        assert len(calls) == 4
        with pytest.raises(TypeError, match=r"wanted a function of \(state, grads\)"):
            fc.register_comm_hook(model, None, "bf16")
        with pytest.raises(ValueError, match="Linear is not a unit"):
            fc.register_comm_hook(nn.Linear(2, 2), None, hook)

    run_ranks(train, 2)


def test_a_hook_that_returns_the_wrong_part_is_named() -> None:
    def train(rank: int) -> None:
        model = build()
        fc.register_comm_hook(model, None, lambda state, grads: grads.flat)
        sharded_grads(model, rank, 2)

    for error in rank_errors(train, 2):
        assert error is not None
        assert "communication hook of unit" in error
        assert "wanted this rank's part" in error


def test_a_post_reduce_hook_can_step_in_backward() -> None:
    """A post reduce hook can step and drop gradients inside backward."""

    def train(rank: int, ranks: int) -> None:
        model = build()
        torch.manual_seed(0)
        plain = Tower()
        plain(batch(ranks)).square().mean().backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        most_grads = 0
        leaves = list(model.parameters())  # in backward, modules hold what forward computed with

        def step(module: nn.Module, parameters: list[nn.Parameter]) -> None:
            nonlocal most_grads
            held = [p for p in leaves if p.grad is not None]
            most_grads = max(most_grads, len(held))
            torch.optim.SGD(parameters, lr=0.1).step()
            for parameter in parameters:
                parameter.grad = None

        handle = fc.register_post_reduce_hook(model, step)
        model(batch(ranks)[2 * rank : 2 * rank + 2]).square().mean().backward()
        assert all(p.grad is None for p in model.parameters())
        assert most_grads == max(len(list(block.parameters())) for block in model.blocks)
        handle.remove()
        for mine, want in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(mine.full_tensor(), want.detach())
        model(batch(ranks)[:2]).sum().backward()
        assert all(p.grad is not None for p in model.parameters())

    run_ranks(train, 2, 2)
