"""Hooks on parameters fire once, with the reduced gradient, and may change it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.flop_counter
from torch import Tensor, nn

from fsdp_compose import ShardingStrategy, clip_grad_norm_, fully_shard, undo, wrap

from harness import run_ranks, simulate_ranks
from models import (
    SHARDS,
    WIDTH,
    Tower,
    Twin,
    by_block,
    compare,
    data,
    seeded,
    square,
    whole,
)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("shard", SHARDS)
def test_hooks_fire_once_with_the_reduced_gradient(shard: str, when: str) -> None:
    def ranks(rank: int) -> None:
        log: list[tuple[str, Tensor]] = []
        wanted: list[tuple[str, Tensor]] = []

        def attach(model: nn.Module, log: list[Any]) -> None:
            for name, param in model.named_parameters():
                param.register_hook(lambda g, n=name: log.append((f"hook {n}", whole(g))))
                param.register_hook(lambda g: g * 2)
                param.register_hook(lambda g, n=name: log.append((f"twice {n}", whole(g))))
                param.register_post_accumulate_grad_hook(
                    lambda p, n=name: log.append(
                        (f"post {n}, gradients {torch.is_grad_enabled()}", whole(p.grad))
                    )
                )

        def sharded(model: nn.Module) -> None:
            if when == "before":
                attach(model, log)
            SHARDS[shard](model)
            if when == "after":
                attach(model, log)

        twin = Twin(rank, 2, lambda: Tower(2), sharded)
        attach(twin.plain[0], wanted)
        for seed in range(3):
            log.clear()
            wanted.clear()
            twin.backward(square, seed)
            found = dict(log)
            assert len(found) == len(log) == len(wanted)
            for name, value in wanted:
                compare(name, found[name], value, twin.tolerance)
            twin.step()
        twin.check()

    run_ranks(ranks)


def test_hooks_on_parameters_can_be_removed() -> None:
    def ranks(rank: int) -> None:
        log: list[str] = []
        twin = Twin(rank, 2, lambda: Tower(1))
        weight = twin.model.first.weight
        handles = [
            weight.register_hook(lambda g: log.append("hook")),
            weight.register_post_accumulate_grad_hook(lambda p: log.append("post")),
        ]
        twin.backward(square, 0)
        assert log == ["hook", "post"]
        for handle in handles:
            handle.remove()
        twin.step()
        twin.train()
        assert log == ["hook", "post"]

    run_ranks(ranks)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "ZERO1", "NO_SHARD"])
def test_hooks_registered_in_their_forward_raise(strategy: str) -> None:
    """They would see this rank's gradient, once; in later forwards too. What follows is right."""

    def ranks(rank: int) -> None:
        shard = partial(by_block, strategy=ShardingStrategy[strategy])
        twin = Twin(rank, 2, lambda: Tower(1), shard)
        up = twin.model.blocks[0].up
        for seed in range(2):
            twin.train(square, seed + 1)
            clamp = up.register_forward_pre_hook(
                lambda module, _: module.weight.register_hook(lambda g: g.clamp(max=0)) and None
            )
            with pytest.raises(RuntimeError, match="weight' inside the forward of"):
                twin.model(twin.inputs(0)[rank])
            clamp.remove()
            twin.train()

    simulate_ranks(ranks)


class Bank(nn.Module):
    """Returns its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self) -> Tensor:
        return self.weight


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bank = Bank()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.bank() @ self.bank()


def test_a_unit_that_returns_its_weight_runs_twice() -> None:
    """Hooks of the library and of torch's tools on what it returns are not taken for the user's."""

    def ranks(rank: int) -> None:
        shard = partial(fully_shard, units=wrap.by_class(Bank))
        twin = Twin(rank, 2, Reader, shard)
        twin.train()
        with torch.utils.flop_counter.FlopCounterMode(display=False):
            twin.train()

    simulate_ranks(ranks)


def test_hooks_from_before_sharding_can_be_removed() -> None:
    def ranks(rank: int) -> None:
        log: list[str] = []
        model = seeded(lambda: Tower(1))
        first = model.first.weight.register_hook(lambda g: log.append("hook"))
        second = model.first.bias.register_post_accumulate_grad_hook(lambda p: log.append("post"))
        by_block(model)
        first.remove()
        second.remove()
        square(model, data(0, rank)).backward()
        assert not log

    run_ranks(ranks)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", ["slice", "whole", "in place"])
def test_a_hook_may_change_the_gradient(change: str, when: str) -> None:
    """It may return a sharded tensor, a whole one of the parameter's shape, or write into it."""

    def hook(grad: Tensor) -> Tensor | None:
        if change == "slice":
            return grad * 3
        if change == "whole":
            return torch.full(grad.shape, 0.5, dtype=grad.dtype)
        grad.mul_(3)
        return None

    def ranks(rank: int) -> None:
        def attach(model: nn.Module) -> None:
            for name in ("first.weight", "blocks.0.up.bias", "head.bias"):
                model.get_parameter(name).register_hook(hook)

        def sharded(model: nn.Module) -> None:
            if when == "before":
                attach(model)
            by_block(model)
            if when == "after":
                attach(model)

        twin = Twin(rank, 2, lambda: Tower(1), sharded)
        attach(twin.plain[0])
        twin.train(steps=2)

    run_ranks(ranks)


def test_hooks_of_both_times_outlive_undo() -> None:
    """Registered before or while sharded, they see plain gradients afterwards, and can go."""

    def ranks(rank: int) -> None:
        model, log = seeded(lambda: Tower(1)), []
        note = lambda g: log.append((type(g), g.shape))  # noqa: E731
        handles = [model.first.weight.register_hook(note)]
        by_block(model)
        handles += [
            model.first.weight.register_hook(note),
            model.first.weight.register_post_accumulate_grad_hook(lambda p: note(p.grad)),
        ]
        square(model, data(0, rank)).backward()
        assert len(log) == 3 and all(shape == (WIDTH, WIDTH) for _, shape in log)
        undo(model)
        log.clear()
        square(model, data(0, rank)).backward()
        assert log == [(Tensor, (WIDTH, WIDTH))] * 3
        for handle in handles:
            handle.remove()
        log.clear()
        square(model, data(0, rank)).backward()
        assert not log

    run_ranks(ranks)


@pytest.mark.parametrize("shard", SHARDS)
def test_optimizer_in_backward(shard: str) -> None:
    """Each parameter has an optimizer, which steps and clears the gradient in the hook."""

    def attach(model: nn.Module) -> None:
        for param in model.parameters():
            optim = torch.optim.AdamW([param], lr=0.01)

            def step(p: Tensor, optim: Any = optim) -> None:
                optim.step()
                optim.zero_grad()

            param.register_post_accumulate_grad_hook(step)

    def ranks(rank: int) -> None:
        def sharded(model: nn.Module) -> None:
            SHARDS[shard](model)
            attach(model)

        twin = Twin(rank, 2, lambda: Tower(2), sharded)
        attach(twin.plain[0])
        for seed in range(3):
            twin.backward(square, seed)
            assert all(p.grad is None for p in twin.model.parameters())
            twin.check()

    run_ranks(ranks)


def test_hooks_see_the_sum_that_autograd_grad_returns() -> None:
    """A hook runs once where a parameter was used in a forward and its slice beside it."""

    def ranks(rank: int, world: int) -> None:
        model = fully_shard(nn.Linear(3, 3))
        weight, seen = model.weight, []
        weight.register_hook(lambda g: seen.append(g) or g.clamp(max=0.5))
        loss = model(data(0, rank)[:, :3].float()).square().sum() + (weight.to_local() ** 2).sum()
        (found,) = torch.autograd.grad(loss, [weight], retain_graph=True)
        assert len(seen) == 1 and torch.equal(found.to_local(), seen[0].to_local().clamp(max=0.5))
        assert weight.grad is None and model.bias.grad is None
        loss.backward(inputs=[weight])
        assert weight.grad is not None and model.bias.grad is None

    run_ranks(ranks, 2, 2)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_hooks_may_keep_their_gradients(strategy: str) -> None:
    """Those they are given and those they return: nothing that follows writes into them."""

    def attach(model: nn.Module) -> tuple[dict[nn.Parameter, Tensor], list[Tensor]]:
        means: dict[nn.Parameter, Tensor] = {}
        given: list[Tensor] = []
        for param in model.parameters():

            def average(grad: Tensor, param: nn.Parameter = param) -> Tensor:
                given.append(grad)
                if param not in means:
                    means[param] = torch.zeros_like(grad)
                return means[param].mul_(0.5).add_(grad)

            param.register_hook(average)
        return means, given

    def ranks(rank: int) -> None:
        build = lambda: Tower(2)  # noqa: E731
        shard = partial(by_block, strategy=ShardingStrategy[strategy])
        twin = Twin(rank, 2, build, shard)
        means, given = attach(twin.model)
        plain_means, plain_given = attach(twin.plain[0])
        for seed in range(2):
            twin.backward(square, 2 * seed)
            twin.backward(square, 2 * seed + 1)
            twin.check()
            clip_grad_norm_(twin.model, 0.01)
            nn.utils.clip_grad_norm_(twin.plain[0].parameters(), 0.01)
            twin.check()
            for model in (twin.model, twin.plain[0]):
                model.zero_grad(set_to_none=False)
        assert len(given) == len(plain_given) > 0
        found, wanted = [*given, *means.values()], [*plain_given, *plain_means.values()]
        compare_lists = sorted(whole(t).norm().item() for t in found)
        assert compare_lists == pytest.approx(sorted(t.norm().item() for t in wanted))
        assert compare_lists[0] > 0

    simulate_ranks(ranks)
