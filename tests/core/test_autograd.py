"""``autograd.grad`` and gradients of gradients equal one process on plain modules."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwd
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import (
    MixedPrecision,
    ShardingStrategy,
    accumulate,
    fully_shard,
    gathered,
    get_state,
    is_fully_sharded,
    no_sync,
    reduce_grads,
    wrap,
)
from fsdp_compose.sharded import own_slice

from autograd_steps import STRATEGIES, Recomputed, agree, leaves, penalty
from harness import run_ranks, simulate_ranks
from models import (
    SHARDS,
    WIDTH,
    Block,
    Tower,
    Twin,
    assert_at_rest,
    by_block,
    compare,
    data,
    square,
    train_twin,
    two_blocks,
    whole,
)


@pytest.mark.parametrize(("shard", "world"), [("blocks", 2), ("one", 2), ("blocks", 4)])
def test_grad_of_parameters_and_inputs_in_one_call(shard: str, world: int) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, world, two_blocks, SHARDS[shard])
        xs = [x.requires_grad_() for x in twin.inputs(1)]
        ys = [x.detach().clone().requires_grad_() for x in xs]
        plain = torch.stack([square(m, y) for m, y in zip(twin.plain, ys)]).mean()
        *ours, mine = torch.autograd.grad(
            square(twin.model, xs[rank]), [*leaves(twin.model), xs[rank]]
        )
        *theirs, wanted = torch.autograd.grad(plain, [*leaves(twin.reference), ys[rank]])
        for found, full in zip(ours, theirs):
            compare("gradient", whole(found), full, twin.tolerance)
        compare("input gradient", mine, wanted * world, twin.tolerance)
        assert_at_rest(twin.model)
        twin.train(steps=1)

    run_ranks(ranks, world)


@pytest.mark.parametrize("shard", SHARDS)
def test_gradients_of_several_calls_added_up(shard: str) -> None:
    """Gradients of several calls added up by the user."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, SHARDS[shard])
        for step in range(2):
            for micro in range(3):
                losses = twin.losses(square, 10 * step + micro)
                for model, loss in zip((twin.model, twin.reference), losses):
                    for param, g in zip(leaves(model), torch.autograd.grad(loss, leaves(model))):
                        param.grad = g if param.grad is None else param.grad + g
            twin.step()
        twin.check()

    run_ranks(ranks)


@pytest.mark.parametrize("inside", [False, True], ids=["after", "inside"])
@pytest.mark.parametrize("shard", SHARDS)
def test_grad_while_gradients_wait_to_be_reduced(shard: str, inside: bool) -> None:
    """It returns the gradient of its own loss, and what waits is reduced as if it had not run."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, SHARDS[shard])

        def look() -> None:
            loss, plain = twin.losses(square, 7)
            ours = torch.autograd.grad(loss, leaves(twin.model))
            theirs = torch.autograd.grad(plain, leaves(twin.reference))
            for found, full in zip(ours, theirs):
                compare("gradient", whole(found), full, twin.tolerance)

        for step in range(2):
            with no_sync(twin.model):
                twin.backward(square, 3 * step)
                if inside:
                    look()
            if not inside:
                look()
            if step:
                twin.backward(square, 3 * step + 1)
            else:
                reduce_grads(twin.model)
            twin.step()
        twin.check()

    run_ranks(ranks)


def test_grad_while_gradients_wait_for_the_replicas() -> None:
    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        twin = Twin(rank, 4, two_blocks, lambda m: by_block(m, mesh=mesh))
        with accumulate(twin.model, keep="no_all_reduce"):
            twin.backward(square, 0)
            loss, plain = twin.losses(square, 1)
            ours = torch.autograd.grad(loss, leaves(twin.model))
            theirs = torch.autograd.grad(plain, leaves(twin.reference))
            for found, full in zip(ours, theirs):
                compare("gradient", whole(found), full, twin.tolerance)
            twin.backward(square, 2)
        twin.step()
        twin.check()

    run_ranks(ranks, 4)


def test_grad_in_a_scope_while_gradients_wait() -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks)
        with no_sync(twin.model):
            twin.backward(square, 0)
        x = data(1, rank)
        with gathered(twin.model):
            ours = torch.autograd.grad(square(twin.model, x), twin.model.head.weight)
        plain = [square(m, x) for m, x in zip(twin.plain, twin.inputs(1))]
        (wanted,) = torch.autograd.grad(torch.stack(plain).mean(), twin.reference.head.weight)
        compare("gradient of the whole", ours[0], wanted, twin.tolerance)
        loss, plain = twin.losses(lambda m, x: scoped(m, x), 2)
        ours = torch.autograd.grad(loss, leaves(twin.model))
        theirs = torch.autograd.grad(plain, leaves(twin.reference))
        for found, full in zip(ours, theirs):
            compare("gradient", whole(found), full, twin.tolerance)
        twin.backward(square, 1)
        twin.step()
        twin.check()

    def scoped(model: nn.Module, x: Tensor) -> Tensor:
        with gathered(model) if is_fully_sharded(model) else contextlib.nullcontext():
            return square(model, x)

    run_ranks(ranks)


class Spare(nn.Module):
    """Half of it is not used, as a part of a unit and as a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.spare_block = Block(), Block()
        self.spare, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x))


def test_gradients_asked_for_lie_where_shards_do() -> None:
    """Weights that are gathered elsewhere, as those of offloaded shards on a GPU, do not decide."""
    model = fully_shard(nn.Linear(2, 2))
    (bucket,) = get_state(model).unit.buckets
    bucket.stored = bucket.stored.detach().to("meta")
    loss = model(torch.ones(1, 2)).sum()
    assert all(grad.is_meta for grad in torch.autograd.grad(loss, leaves(model)))


def _grad_through_a_backward_of_its_own(model: nn.Module, how: str) -> tuple[Tensor, list[str]]:
    """A gradient, and when hooks ran, where a backward reads weights and asks for gradients."""
    weight, calls = model[0].weight, list[str]()
    weight.register_hook(lambda grad: (calls.append("hook"), 2 * grad)[1])

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, given: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return model(x).detach()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            with torch.enable_grad():
                out = model(ctx.saved_tensors[0])
            (inner,) = torch.autograd.grad(out, [weight], grad * model[1].weight.norm())
            calls.append("inner")
            return None, inner

    x = torch.ones(2, 3)
    loss = model(x).sum() + Own.apply(x, weight).sum()  # whose backward runs first
    if how == "grad":
        return torch.autograd.grad(loss, [weight])[0], calls
    loss.backward(inputs=[weight] if how == "inputs" else None)
    return weight.grad, calls


@pytest.mark.parametrize("how", ["grad", "inputs", "backward"])
def test_own_backwards_see_whole_weights(how: str) -> None:
    """They run in a call that is given sharded parameters as they do in any other backward."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))

    def ranks(rank: int) -> None:
        found, calls = _grad_through_a_backward_of_its_own(fully_shard(make()), how)
        assert calls == theirs
        torch.testing.assert_close(whole(found), wanted)

    wanted, theirs = _grad_through_a_backward_of_its_own(make(), how)
    simulate_ranks(ranks, 2)


@pytest.mark.parametrize("option", ["allow_unused", "materialize_grads"])
@pytest.mark.parametrize("shard", SHARDS)
def test_grad_of_parameters_that_were_not_used(shard: str, option: str) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Spare, SHARDS[shard])
        loss, plain = twin.losses(square, 1)
        ours = torch.autograd.grad(loss, leaves(twin.model), **{option: True})
        theirs = torch.autograd.grad(plain, leaves(twin.reference), **{option: True})
        for found, full in zip(ours, theirs):
            assert (found is None) == (full is None)
            if full is not None:
                compare("gradient", whole(found), full, twin.tolerance)
        loss, _ = twin.losses(square, 2)
        with pytest.raises(RuntimeError, match="not have been used"):
            torch.autograd.grad(loss, leaves(twin.model))
        twin.train()

    run_ranks(ranks)


@pytest.mark.parametrize("shard", SHARDS)
def test_batches_of_gradients_for_inputs_alone(shard: str) -> None:
    """Batches of gradients reach inputs and are refused for parameters."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, SHARDS[shard])
        rows = torch.eye(6, dtype=torch.float64).reshape(6, 3, 2)

        def rows_of(model: nn.Module, x: Tensor) -> Any:
            x = x.requires_grad_()
            return torch.autograd.grad(model(x), x, rows, is_grads_batched=True)

        agree(twin, rows_of)
        out = twin.model(data(1, rank))
        wanted = r"is_grads_batched=True\), or inside torch.vmap, of sharded 'first.weight'"
        params = leaves(twin.model)
        for batched in (
            lambda: torch.autograd.grad(out, params, rows, is_grads_batched=True),
            lambda: torch.vmap(lambda row: torch.autograd.grad(out, params, row))(rows),
        ):
            with pytest.raises(RuntimeError, match=wanted):
                batched()
        twin.train()

    run_ranks(ranks)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("shard", SHARDS)
def test_forward_mode_over_inputs(shard: str, frozen: bool) -> None:
    """A dual number goes through, and what comes out has a gradient of its own."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: two_blocks().requires_grad_(not frozen), SHARDS[shard])

        def tangent(model: nn.Module, x: Tensor) -> Tensor:
            with fwd.dual_level():
                dual = fwd.make_dual(x, torch.ones_like(x))
                out = fwd.unpack_dual(model(dual))
                return out.tangent + out.primal

        def slope(model: nn.Module, x: Tensor) -> Any:
            x = x.clone().requires_grad_()
            return torch.autograd.grad(tangent(model, x).square().sum(), x)

        agree(twin, tangent)
        agree(twin, slope)
        with torch.no_grad():
            agree(twin, tangent)
        if not frozen:
            twin.train(lambda m, x: tangent(m, x).square().mean())
        assert_at_rest(twin.model)

    run_ranks(ranks)


class Deep(nn.Module):
    """Of its layers, each is a unit, and the model around them has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh()).tanh()


def test_a_backward_from_the_tangent() -> None:
    """It reaches a unit by what forward-mode AD computes beside the output, which has no hook."""

    def ranks(rank: int) -> None:
        def shard(model: nn.Module) -> nn.Module:
            return fully_shard(model, units=wrap.by_class({nn.Linear}))

        def tangent(model: nn.Module, x: Tensor) -> Tensor:
            with fwd.dual_level():
                out = fwd.unpack_dual(model(fwd.make_dual(x, torch.ones_like(x))))
                return out.tangent.square().mean() + out.primal.sum()

        twin = Twin(rank, 2, lambda: nn.Sequential(*(Deep() for _ in range(2))), shard)
        twin.train(tangent)
        assert_at_rest(twin.model)

    run_ranks(ranks)


@pytest.mark.parametrize("build", [Tower, Recomputed])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shard", SHARDS)
def test_gradient_penalty(shard: str, strategy: ShardingStrategy, build: type[Tower]) -> None:
    def apply(model: nn.Module) -> Any:
        return SHARDS[shard](model, strategy=strategy)

    train_twin(lambda: build(2), penalty, apply, steps=2)


def test_gradient_penalty_on_four_ranks() -> None:
    train_twin(two_blocks, penalty, world=4, steps=2)


def test_gradient_penalty_in_mixed_precision() -> None:
    """Within what bfloat16 weights allow of fp32."""

    def ranks(rank: int) -> None:
        mp = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        twin = Twin(rank, 2, two_blocks, lambda m: by_block(m.float(), mp_policy=mp))
        xs = [x.float() for x in twin.inputs(0)]
        penalty(twin.model, xs[rank]).backward()
        torch.stack([penalty(m.float(), x) for m, x in zip(twin.plain, xs)]).mean().backward()
        for (name, ours), theirs in zip(twin.model.named_parameters(), leaves(twin.reference)):
            error = (whole(ours.grad) - theirs.grad).norm()
            assert error < 0.05 * theirs.grad.norm() + 0.01, name

    run_ranks(ranks)


@pytest.mark.parametrize("build", [Tower, Recomputed])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shard", SHARDS)
def test_hessian_vector_product(shard: str, strategy: ShardingStrategy, build: type) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: build(2), lambda m: SHARDS[shard](m, strategy=strategy))
        loss, plain = twin.losses(square, 0)
        ours = torch.autograd.grad(loss, leaves(twin.model), create_graph=True)
        theirs = torch.autograd.grad(plain, leaves(twin.reference), create_graph=True)
        vector = [data(i, 0, *g.shape) for i, g in enumerate(theirs)]
        mine = sum(
            (g.to_local() * own_slice(v, p._shard_spec)).sum()
            for g, v, p in zip(ours, vector, leaves(twin.model))
        )
        ours = torch.autograd.grad(mine, leaves(twin.model))
        total = sum((g * v).sum() for g, v in zip(theirs, vector))
        theirs = torch.autograd.grad(total, leaves(twin.reference))
        for found, full in zip(ours, theirs):
            compare("product", whole(found), full, twin.tolerance)
        twin.train(steps=1)

    run_ranks(ranks)
