"""A gradient that arrives in parts is seen once, as the sum: ties, several forwards, hooks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import (
    MixedPrecision,
    ShardingStrategy,
    accumulate,
    fully_shard,
    register_post_reduce_hook,
)
from fsdp_compose.base.process import here

from harness import rank_errors, run_ranks
from laws import Levels, inside_out
from models import Tower, Twin, by_block, data, seeded, square, step_in_backward, whole


def outside_in(model: nn.Module, **options: Any) -> nn.Module:
    """The unit around owns the weight, and those inside borrow it."""
    fully_shard([model.layer], **options)
    return inside_out(model, **options)


def two_levels(model: nn.Module, **options: Any) -> nn.Module:
    fully_shard(model.middle.inner, **options)
    return fully_shard(model, **options)


SHARDS = {"inside_out": inside_out, "outside_in": outside_in, "two_levels": two_levels}


def watch(twin: Twin, seen: list[Tensor], wanted: list[Tensor]) -> None:
    """Gradient and post-accumulate hooks on both models' shared weight; the first scales it."""
    for model, found in ((twin.model, seen), (twin.reference, wanted)):
        weight = model.layer.weight
        weight.register_hook(lambda grad, found=found: found.append(whole(grad)) or grad * 2)
        weight.register_post_accumulate_grad_hook(
            lambda p, found=found: found.append(whole(p.grad))
        )


def same(seen: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(seen) == len(wanted) > 0
    for ours, theirs in zip(seen, wanted):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shard", SHARDS)
def test_hooks_on_a_weight_of_three_units(shard: str) -> None:
    """Hooks run once a backward on the sum; one reduction for each unit."""

    def train(rank: int) -> None:
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
            twin = Twin(rank, 2, Levels, lambda m: SHARDS[shard](m, strategy=strategy))
            seen: list[Tensor] = []
            wanted: list[Tensor] = []
            watch(twin, seen, wanted)
            twin.train()
            assert len(seen) == 6
            same(seen, wanted)
            here.traffic.reset()
            twin.backward(square, 9)
            reductions = here.traffic.reduces + here.traffic.all_reduces
            assert reductions == (2 if shard == "two_levels" else 4 if shard == "outside_in" else 3)

    run_ranks(train, 2)


def test_reentrant_checkpoint_around_a_part() -> None:
    """The part inside has a backward of its own, and waits for the rest."""

    def build() -> nn.Module:
        model = Levels()
        model.middle.reentrant = True
        return model

    def train(rank: int) -> None:
        twin = Twin(rank, 2, build, inside_out)
        seen: list[Tensor] = []
        wanted: list[Tensor] = []
        watch(twin, seen, wanted)
        twin.backward(square, 0)
        torch.testing.assert_close(whole(twin.model.layer.weight.grad), seen[-1])
        assert len(seen) == 2

    run_ranks(train, 2)


def twice(model: nn.Module, x: Tensor) -> Tensor:
    """A loss over two forwards, as in contrastive training and DPO."""
    return model(x).square().mean() - model(x * 0.5).tanh().mean()


@pytest.mark.parametrize("forward", [square, twice])
def test_an_optimizer_in_backward_steps_on_sums(forward: Callable[..., Tensor]) -> None:
    """With a weight in three units, and with two forwards for one backward."""

    def train(rank: int) -> None:
        for build, shard in ((Levels, inside_out), (Tower, by_block)):
            twin = Twin(rank, 2, build, shard)
            step_in_backward(twin.model)
            step_in_backward(twin.reference)
            for seed in range(3):
                twin.backward(forward, seed)
                assert all(p.grad is None for p in twin.model.parameters())
            twin.check()

    run_ranks(train, 2)


def test_post_reduce_hooks_see_sums() -> None:
    """They run once a backward for each bucket."""

    def train(rank: int) -> None:
        twin = Twin(rank, 2, Levels, inside_out)
        seen: list[str] = []

        def step(module: nn.Module, params: list[nn.Parameter]) -> None:
            seen.append(type(module).__name__)
            with torch.no_grad():
                for param in params:
                    param -= 0.1 * param.grad
                    param.grad = None

        register_post_reduce_hook(twin.model, step)
        for seed in range(2):
            twin.backward(twice, seed)
            with torch.no_grad():
                for param in twin.reference.parameters():
                    param -= 0.1 * param.grad
                    param.grad = None
        twin.check()
        assert len(seen) == 6

    run_ranks(train, 2)


def test_backward_of_chosen_inputs_leaves_no_part() -> None:
    """What was not asked for is as if it had not been used, also with what accumulated before."""

    def train(rank: int) -> None:
        twin = Twin(rank, 2, Levels, inside_out)
        names = [
            ["first.bias"],
            ["middle.layer.bias"],
            ["middle.inner.layer.weight"],
            ["layer.bias"],
        ]
        for seed, chosen in enumerate([*names, [*names[0], *names[2]]]):
            loss, plain = twin.losses(square, seed)
            for model, value in ((twin.model, loss), (twin.reference, plain)):
                value.backward(inputs=[dict(model.named_parameters())[n] for n in chosen])
            twin.step()
        with accumulate(twin.model, keep="unsharded"):
            twin.backward(square, 7)
            loss, plain = twin.losses(square, 8)
            loss.backward(inputs=[twin.model.first.bias])
            plain.backward(inputs=[twin.reference.first.bias])
        twin.step()
        twin.check()

    run_ranks(train, 2)


def test_hooks_when_autograd_gives_the_gradient() -> None:
    """``autograd.grad`` and ``create_graph``: gradient hooks on the sum, post hooks in backward."""

    def train(rank: int) -> None:
        twin = Twin(rank, 2, Levels, inside_out)
        seen: list[Tensor] = []
        wanted: list[Tensor] = []
        watch(twin, seen, wanted)
        for create_graph in (False, True):
            loss, plain = twin.losses(square, 0)
            ours = torch.autograd.grad(loss, twin.model.layer.weight, create_graph=create_graph)
            theirs = torch.autograd.grad(
                plain, twin.reference.layer.weight, create_graph=create_graph
            )
            same([whole(ours[0].detach())], [theirs[0].detach()])
        loss, plain = twin.losses(square, 1)
        with warnings.catch_warnings():  # of a reference cycle
            warnings.simplefilter("ignore")
            loss.backward(create_graph=True)
            plain.backward(create_graph=True)
        same([g.detach() for g in seen], [g.detach() for g in wanted])
        twin.check_grads()

    run_ranks(train, 2)


@pytest.mark.parametrize("when", ["first", "later"])
def test_a_parameter_frozen_on_one_rank_is_named(when: str) -> None:
    """Every rank raises before any gradient is used (D17); also where its bucket is all frozen."""

    def train(rank: int, names: list[str], options: dict[str, Any]) -> None:
        model = by_block(seeded(Tower), **options)
        for step in range(2):
            if rank == 1 and step == (when == "later"):
                for name in names:
                    model.get_parameter(name).requires_grad_(False)
            square(model, data(step, rank)).backward()

    whole_block = [n for n, _ in Tower().named_parameters() if n.startswith("blocks.1.")]
    for names, options in (
        (["blocks.1.up.bias"], {}),
        (["head.bias"], {"strategy": ShardingStrategy.NO_SHARD}),
        (whole_block, {}),
    ):
        for error in rank_errors(train, 2, names, options):
            assert error is not None and "ranks disagree on what is trained" in error
            assert any(repr(name) in error for name in names)
            assert "on rank 0 and not on rank 1" in error


@pytest.mark.parametrize("when", ["before", "after"])
def test_torchs_optimizer_in_backward_is_refused(when: str) -> None:
    """It steps at nodes that sharded gradients do not pass; the error says what to call."""
    with warnings.catch_warnings():  # of torch.jit
        warnings.simplefilter("ignore")
        from torch.distributed.optim import _apply_optimizer_in_backward

    def train(rank: int) -> None:
        model = seeded(Tower)
        if when == "after":
            by_block(model)
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        by_block(model)

    for error in rank_errors(train, 2):
        assert "register_post_accumulate_grad_hook" in str(error)


def test_dtypes_that_gradients_are_kept_in() -> None:
    """256 + 1 - 256 in bf16 is 1 where gradients add up in fp32 (USERS.md 31)."""

    def train(rank: int) -> None:
        model = nn.Linear(1, 1, bias=False)
        policy = MixedPrecision(torch.bfloat16, torch.float32)
        fully_shard(model, mp_policy=policy)
        for keep in ("sharded", "unsharded"):
            with accumulate(model, keep=keep):
                for value in (256.0, 1.0, -256.0):
                    model(torch.full((1, 1), value)).sum().backward()
            assert model.weight.grad.dtype == torch.float32
            assert whole(model.weight.grad).item() == 1.0
            model.zero_grad()

    run_ranks(train, 2)
