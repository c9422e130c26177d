"""Saved-tensor hooks, offloading wrappers and hooks on parameters and modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.nn.modules import module as every_module
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fsdp_compose import (
    ShardingStrategy,
    fully_shard,
    wrap,
)

from autograd_steps import STRATEGIES, Forward, Recomputed, leaves, penalty
from harness import run_ranks
from models import (
    SHARDS,
    Tower,
    Twin,
    by_block,
    compare,
    data,
    one_unit,
    square,
    train_twin,
    two_blocks,
    whole,
)


def copied(model: nn.Module, x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        return square(model, x)


def on_cpu(model: nn.Module, x: Tensor) -> Tensor:
    with save_on_cpu():
        return penalty(model, x)


@pytest.mark.parametrize("forward", [copied, on_cpu])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shard", SHARDS)
def test_saved_tensor_hooks(shard: str, strategy: ShardingStrategy, forward: Forward) -> None:
    build = Recomputed if forward is copied else Tower
    apply = lambda m: SHARDS[shard](m, strategy=strategy)  # noqa: E731
    train_twin(lambda: build(2), forward, apply, steps=2)


@pytest.mark.parametrize("shard", SHARDS)
def test_saved_tensor_hooks_see_no_weights(shard: str) -> None:
    """What the plain model's hooks see, less its weights, in the same order."""

    def ranks(rank: int, world: int) -> None:
        twin = Twin(rank, world, two_blocks, SHARDS[shard])

        def seen(model: nn.Module, weights: bool) -> list[Tensor]:
            found: list[Tensor] = []
            with saved_tensors_hooks(lambda t: found.append(t.detach()) or t, lambda t: t):
                square(model, data(0, rank)).backward()
            known = {p.untyped_storage().data_ptr() for p in model.parameters()} if weights else ()
            return [t for t in found if t.untyped_storage().data_ptr() not in known]

        for _ in range(2):
            ours, theirs = seen(twin.model, False), seen(twin.mine, True)
            for found, wanted in zip(ours, theirs, strict=True):
                compare("saved", found, wanted, twin.tolerance)
        twin.zero_grad()
        twin.train()

    run_ranks(ranks, 2, 2)
    run_ranks(ranks, 1, 1)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "offload": offload_wrapper,
    "recompute": checkpoint_wrapper,
    "reentrant": lambda m: checkpoint_wrapper(m, checkpoint_impl=CheckpointImpl.REENTRANT),
    "both": lambda m: offload_wrapper(checkpoint_wrapper(m)),
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_wrappers_that_offload_and_recompute(kind: str) -> None:
    """Around a unit, inside one, and as the unit itself."""

    class Wrapped(Tower):
        def __init__(self) -> None:
            super().__init__(2)
            self.blocks = nn.ModuleList(WRAPPERS[kind](block) for block in self.blocks)

    def as_unit(model: nn.Module) -> Any:
        wrapped = {id(block) for block in model.blocks}
        return fully_shard(model, units=wrap.by_fn(lambda _, m: id(m) in wrapped))

    for shard in (by_block, one_unit, as_unit):
        train_twin(Wrapped, shard=shard, steps=2)


@pytest.mark.parametrize("shard", SHARDS)
def test_selective_checkpointing(shard: str) -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        save = op in products
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    class Selective(Tower):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            return self.head(x)

    for strategy in STRATEGIES:
        apply = lambda m, s=strategy: SHARDS[shard](m, strategy=s)  # noqa: E731
        train_twin(lambda: Selective(2), shard=apply, steps=2)


@pytest.mark.parametrize("shard", SHARDS)
def test_tensor_hooks_on_parameters(shard: str) -> None:
    """They change, and see, the reduced gradient, of backward and of autograd.grad alike."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, SHARDS[shard])
        seen: list[list[tuple[str, float]]] = [[], []]
        for log, model in zip(seen, (twin.model, twin.reference)):
            for name, param in model.named_parameters():
                param.register_hook(lambda g: g * 2)
                param.register_hook(
                    lambda g, n=name, log=log: log.append((n, g.square().sum().item()))
                )
                param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 0.5))
        twin.train()
        loss, plain = twin.losses(square, 5)
        ours = torch.autograd.grad(loss, leaves(twin.model))
        theirs = torch.autograd.grad(plain, leaves(twin.reference))
        for found, full in zip(ours, theirs):
            compare("gradient", whole(found), full, twin.tolerance)
        first, second = (sorted(log) for log in seen)
        assert [name for name, _ in first] == [name for name, _ in second]
        assert [v for _, v in first] == pytest.approx([v for _, v in second])

    run_ranks(ranks)


@pytest.mark.parametrize("shard", SHARDS)
def test_hooks_on_every_module(shard: str) -> None:
    def ranks(rank: int) -> None:
        log: list[tuple[str, str, Tensor]] = []

        def note(kind: str) -> Callable[..., None]:
            return lambda m, *args: log.append((kind, type(m).__name__, last(args)))

        def last(args: Any) -> Tensor:
            return [t for t in tree_leaves(args) if t is not None][-1].detach().clone()

        handles = [
            every_module.register_module_full_backward_hook(note("backward")),
            every_module.register_module_full_backward_pre_hook(note("before backward")),
            every_module.register_module_forward_hook(note("forward")),
            every_module.register_module_forward_pre_hook(note("before forward")),
        ]
        twin = Twin(rank, 2, two_blocks, SHARDS[shard])
        for seed in range(2):
            seen = []
            for model in (twin.model, twin.mine):
                log.clear()
                square(model, data(seed, rank).requires_grad_()).backward()
                seen.append(list(log))
            ours, theirs = seen
            assert [(k, m) for k, m, _ in ours] == [(k, m) for k, m, _ in theirs]
            for (kind, name, found), (_, _, wanted) in zip(ours, theirs):
                compare(f"{kind} {name}", found, wanted, twin.tolerance)
        for handle in handles:
            handle.remove()
        twin.zero_grad()
        twin.train()

    run_ranks(ranks)


def hooked(model: nn.Module) -> None:
    """Hooks that replace what goes in, what comes out, and both gradients, in every position."""
    for module in (model, model.blocks[0], model.blocks[0].up):
        module.register_forward_pre_hook(
            lambda m, a, k: ((a[0] * 1.1, *a[1:]), k), with_kwargs=True, prepend=True
        )
        module.register_forward_pre_hook(lambda m, a: (a[0] + 0.1,))
        module.register_forward_hook(lambda m, a, k, o: o * 1.3, with_kwargs=True, prepend=True)
        module.register_forward_hook(lambda m, a, o: torch.tanh(o), always_call=True)
        module.register_full_backward_hook(
            lambda m, i, o: tuple(None if g is None else g * 1.5 for g in i)
        )
        module.register_full_backward_pre_hook(lambda m, o: (o[0] * 0.7,))
    model.blocks[1].register_forward_hook(lambda m, a, o: o + m.up.weight.mean(), prepend=True)


@pytest.mark.parametrize("before", [True, False], ids=["hooks first", "sharded first"])
@pytest.mark.parametrize("shard", SHARDS)
def test_hooks_that_replace_what_they_see(shard: str, before: bool) -> None:
    def ranks(rank: int) -> None:
        def apply(model: nn.Module) -> None:
            steps = [hooked, SHARDS[shard]]
            for step in steps if before else reversed(steps):
                step(model)

        twin = Twin(rank, 2, two_blocks, apply)
        for plain in twin.plain:
            hooked(plain)
        twin.train(lambda m, x: square(m, x.clone().requires_grad_()))

    run_ranks(ranks)
