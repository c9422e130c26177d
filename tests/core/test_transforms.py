"""Transforms of ``torch.func`` over inputs and full weights equal those of the plain module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

from fsdp_compose import (
    ShardedWeightError,
    ShardingStrategy,
    fully_shard,
    gathered,
)
from fsdp_compose.base.process import here

from autograd_steps import STRATEGIES, Forward, agree, fulls, leaves
from harness import run_ranks, simulate_ranks
from models import (
    SHARDS,
    WIDTH,
    Block,
    Twin,
    assert_at_rest,
    by_block,
    data,
    seeded,
    square,
    train_twin,
    two_blocks,
)

TRANSFORMS: dict[str, Forward] = {
    "grad": lambda m, x: grad(lambda z: square(m, z))(x),
    "vjp": lambda m, x: vjp(m, x)[1](torch.ones(3, 2, dtype=x.dtype)),
    "jvp": lambda m, x: jvp(m, (x,), (x + 1,)),
    "vmap": lambda m, x: vmap(m)(x),
    "jacrev": lambda m, x: jacrev(m)(x),
    "jacfwd": lambda m, x: jacfwd(m)(x),
    "hessian": lambda m, x: hessian(lambda z: square(m, z))(x),
    "vmap of grad": lambda m, x: vmap(grad(lambda z: m(z).square().sum()))(x),
}


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("kind", TRANSFORMS)
def test_transforms_over_inputs(kind: str, frozen: bool) -> None:
    def ranks(rank: int) -> None:
        for shard in SHARDS.values():
            twin = Twin(rank, 2, lambda: two_blocks().requires_grad_(not frozen), shard)
            agree(twin, TRANSFORMS[kind])
            with torch.no_grad():
                agree(twin, TRANSFORMS[kind])
            assert_at_rest(twin.model)
            if not frozen:
                twin.train(steps=1)

    run_ranks(ranks)


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_training_through_transforms(kind: str) -> None:
    """The loss is a function of what a transform gives; its gradients reach the leaves."""

    def ranks(rank: int) -> None:
        for shard in SHARDS.values():
            twin = Twin(rank, 2, two_blocks, shard)

            def forward(model: nn.Module, x: Tensor) -> Tensor:
                found = tree_leaves(TRANSFORMS[kind](model, x))
                return sum(t.square().mean() for t in found) + square(model, x)

            def penalised(model: nn.Module, x: Tensor) -> Tensor:
                """A transform computes from sharded weights, whose graphs lie below it."""
                scaled = scale_of(model)
                return forward(lambda z: scaled(z) * (2 * model.head.weight).square().mean(), x)

            twin.train(forward, steps=1)
            twin.train(penalised, steps=2)

    run_ranks(ranks)


def test_sharded_weights_lie_below_transforms() -> None:
    """What a transform wraps is not cut: each rank would take its part of a batch by itself."""
    weight = fully_shard(nn.Linear(4, 4)).weight
    other = torch.randn(3, 4, 4)
    for transform in (vmap, lambda fn: grad(lambda x: fn(x.detach()) * x.sum())):
        with pytest.raises(ShardedWeightError, match=r"a transform of torch\.func.*gathered"):
            transform(lambda x: (weight * x).sum())(other)
        assert transform(lambda x: x.sum().type_as(weight))(other).dtype == weight.dtype
    penalise = grad(lambda x: (x.sum(), weight.square().sum()), has_aux=True)
    for records in (True, False):
        with torch.set_grad_enabled(records):
            assert penalise(other)[1].requires_grad is records


def test_a_transform_gathers_each_unit_once() -> None:
    """A transform gathers and reduces each unit once."""

    def ranks(rank: int) -> tuple[int, int]:
        twin = Twin(rank, 2, two_blocks)
        here.traffic.reset()
        grad(lambda z: square(twin.model, z))(data(0, rank)).square().sum().backward()
        return here.traffic.gathers, here.traffic.reduces

    assert run_ranks(ranks) == [(3, 3), (3, 3)]


@pytest.mark.parametrize("shard", SHARDS)
def test_transforms_over_full_weights(shard: str) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, SHARDS[shard])
        given = fulls(twin.model)
        pair = {name: torch.stack([v, 2 * v]) for name, v in given.items()}
        call = lambda m, x: lambda p: functional_call(m, p, (x,))  # noqa: E731
        loss = lambda m: lambda p, x: functional_call(m, p, (x,)).square().sum()  # noqa: E731
        here.traffic.reset()
        for fn in (
            lambda m, x: grad(loss(m))(given, x),
            lambda m, x: jacrev(call(m, x))(given),
            lambda m, x: jvp(call(m, x), (given,), (given,)),
            lambda m, x: vmap(call(m, x))(pair),
            lambda m, x: vmap(grad(loss(m)), in_dims=(None, 0))(given, x),  # per sample
        ):
            agree(twin, fn)
        assert here.traffic.gathers == 0
        some = {"head.weight": given["head.weight"]}
        agree(twin, lambda m, x: grad(loss(m))(some, x))
        twin.train()

    run_ranks(ranks)


def test_ensemble_through_a_sharded_skeleton() -> None:
    def ranks(rank: int) -> None:
        members = [seeded(two_blocks, seed) for seed in range(3)]
        params, buffers = torch.func.stack_module_state(members)
        skeleton = by_block(seeded(two_blocks))
        x = data(0, rank)
        run = lambda p, b: functional_call(skeleton, (p, b), (x,))  # noqa: E731
        out = vmap(run)(params, buffers)
        wanted = torch.stack([member(x) for member in members])
        torch.testing.assert_close(out, wanted)
        ours = torch.autograd.grad(out.square().sum(), list(params.values()))
        theirs = [
            torch.autograd.grad(wanted.square().sum(), leaves(m), retain_graph=True)
            for m in members
        ]
        for found, *each in zip(ours, *theirs):
            torch.testing.assert_close(found, torch.stack(each))
        assert_at_rest(skeleton)

    run_ranks(ranks)


class Energy(nn.Module):
    """Uses transforms in its own forward, over a nested unit and over its own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.block, self.out = nn.Linear(WIDTH, WIDTH), Block(), nn.Linear(WIDTH, 1)

    def energy(self, x: Tensor) -> Tensor:
        return self.out(self.block(torch.tanh(self.inner(x)))).sum()

    def forward(self, x: Tensor) -> Tensor:
        return grad(self.energy)(x) + jvp(self.block, (x,), (x,))[1] + vmap(self.inner)(x)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shard", SHARDS)
def test_transforms_inside_a_forward(shard: str, strategy: ShardingStrategy) -> None:
    train_twin(Energy, shard=lambda m: SHARDS[shard](m, strategy=strategy), steps=2)


class Recursive(nn.Module):
    """Calls itself under a transform."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.block = nn.Linear(WIDTH, WIDTH), Block()

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        x = self.block(torch.tanh(self.layer(x)))
        return x + grad(lambda z: self(z, False).square().sum())(x) if again else x


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("shard", SHARDS)
def test_a_unit_that_calls_itself_under_a_transform(shard: str, frozen: bool) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Recursive().requires_grad_(not frozen), SHARDS[shard])
        agree(twin, lambda m, x: torch.autograd.grad(square(m, x.requires_grad_()), x))
        if not frozen:
            twin.train()
        with torch.no_grad():
            agree(twin, lambda m, x: m(x))
        assert_at_rest(twin.model)

    run_ranks(ranks)


def hooked_blocks() -> nn.Module:
    """Blocks with a forward hook on a layer inside, as adapters and feature extraction have."""
    model = two_blocks()
    for block in model.blocks:
        block.up.register_forward_pre_hook(lambda layer, args: (0.5 * args[0],))
        block.up.register_forward_hook(lambda layer, args, output: output + 0.1 * args[0].sum())
    return model


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_transforms_over_layers_with_hooks(kind: str) -> None:
    """And over the tensors of a scope, after a step on tensors made of the parameters."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, hooked_blocks)
        for scaled in (True, False):
            twin.train(lambda model, x: square(scale_of(model) if scaled else model, x), steps=1)
            with gathered(twin.model):
                agree(twin, TRANSFORMS[kind])
            agree(twin, TRANSFORMS[kind])
        twin.train()

    run = run_ranks if kind in ("jvp", "jacfwd", "hessian") else simulate_ranks  # no forward mode
    run(ranks)


def scale_of(model: nn.Module) -> Any:
    return lambda x: functional_call(model, {n: 2 * p for n, p in model.named_parameters()}, x)
