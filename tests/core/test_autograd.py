"""Autograd beyond ``.backward()``: each case equals one process on plain modules."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwd
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.modules import module as every_module
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fsdp_compose import (
    MixedPrecision,
    ShardingStrategy,
    accumulate,
    fully_shard,
    gathered,
    is_fully_sharded,
    no_sync,
    reshard,
    unshard,
    wrap,
)
from fsdp_compose.comm import collectives as comm
from fsdp_compose.sharded import own_slice

from harness import run_ranks
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
    one_unit,
    seeded,
    square,
    train_twin,
    two_blocks,
    units,
    whole,
)

with warnings.catch_warnings():  # torch imports it in the first dual level, with a warning
    warnings.simplefilter("ignore")
    import torch._decomp.decompositions_for_jvp

STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]
Forward = Callable[[nn.Module, Tensor], Any]


def agree(twin: Twin, fn: Forward, seed: int = 3) -> None:
    """``fn`` gives the same on the sharded model as on this rank's plain one."""
    x = data(seed, twin.rank)
    ours, theirs = (tree_leaves(fn(model, x)) for model in (twin.model, twin.mine))
    for found, wanted in zip(ours, theirs, strict=True):
        compare("result", found.detach(), wanted.detach(), twin.tolerance)


def leaves(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def fulls(model: nn.Module, scale: float = 1.0) -> dict[str, Tensor]:
    return {name: whole(p) * scale for name, p in model.named_parameters()}


# autograd.grad


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
def test_gradients_of_several_calls_added_up_by_the_user(shard: str) -> None:
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
            twin.backward(square, 3 * step + 1)
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
def test_batches_of_gradients_reach_inputs_and_are_refused_for_parameters(shard: str) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, SHARDS[shard])
        rows = torch.eye(6, dtype=torch.float64).reshape(6, 3, 2)

        def rows_of(model: nn.Module, x: Tensor) -> Any:
            x = x.requires_grad_()
            return torch.autograd.grad(model(x), x, rows, is_grads_batched=True)

        agree(twin, rows_of)
        out = twin.model(data(1, rank))
        with pytest.raises(
            RuntimeError, match=r"is_grads_batched=True\) of sharded 'first.weight'"
        ):
            torch.autograd.grad(out, leaves(twin.model), rows, is_grads_batched=True)
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


# Second order


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """WGAN-GP: the loss, and the distance from one of the norm of the input's gradient."""
    x = x.clone().requires_grad_()
    out = model(x).float() if x.dtype == torch.float32 else model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + (slope.norm(dim=1) - 1).square().mean()


class Recomputed(Tower):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


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


# torch.func.functional_call


@pytest.mark.parametrize("shard", SHARDS)
def test_functional_call_computes_with_what_it_is_given(shard: str) -> None:
    """Nothing is gathered, and the caller's dictionary still holds the caller's tensors."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, SHARDS[shard])
        given = fulls(twin.model, 1.1)
        before = dict(given)
        comm.traffic.reset()
        agree(twin, lambda m, x: functional_call(m, given, (x,)))
        assert comm.traffic.gathers == 0
        assert all(given[name] is before[name] for name in given)
        twin.train()

    run_ranks(ranks)


@pytest.mark.parametrize(
    "names",
    [
        ["head.weight"],
        ["blocks.0.up.bias", "first.weight"],
        ["first.weight", "first.bias", "head.weight", "head.bias"],  # all of the outermost unit's
    ],
    ids=["one", "two", "outermost"],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shard", SHARDS)
def test_functional_call_with_some_parameters(
    shard: str, strategy: ShardingStrategy, names: list[str]
) -> None:
    """The others are gathered and trained; what was given gets its gradient where it lies."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, lambda m: SHARDS[shard](m, strategy=strategy))
        shapes = {name: twin.reference.get_parameter(name).shape for name in names}
        given = {n: data(5, 0, *shape).requires_grad_() for n, shape in shapes.items()}
        for seed in range(2):
            twin.backward(lambda m, x: functional_call(m, given, (x,)).square().mean(), seed)
            twin.step()
        twin.check()
        agree(twin, lambda m, x: torch.autograd.grad(
            functional_call(m, given, (x,)).square().mean(), list(given.values())
        ))  # fmt: skip
        order = units(twin.model)[0].lane.forward_order
        order.close()
        recorded = order.recorded
        with torch.no_grad():
            agree(twin, lambda m, x: functional_call(m, given, (x,)))
        assert order.recorded is recorded  # the order of training is not that of inference
        twin.train()

    run_ranks(ranks)


@pytest.mark.parametrize("shard", SHARDS)
def test_functional_call_with_the_sharded_leaves(shard: str) -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return functional_call(model, dict(model.named_parameters()), (x,)).square().mean()

    train_twin(two_blocks, forward, SHARDS[shard], steps=2)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shard", SHARDS)
def test_inner_step_on_shards(shard: str, strategy: ShardingStrategy) -> None:
    """MAML with the inner update on slices: fast weights are gathered, differentiably."""

    def adapt(model: nn.Module, inner: Tensor) -> dict[str, Tensor]:
        named = dict(model.named_parameters())
        grads = torch.autograd.grad(inner, list(named.values()), create_graph=True)
        return {name: p - 0.1 * g for (name, p), g in zip(named.items(), grads)}

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, lambda m: SHARDS[shard](m, strategy=strategy))
        for seed in range(2):
            inner, plain = twin.losses(square, seed)
            fast, full = adapt(twin.model, inner), adapt(twin.reference, plain)
            xs = twin.inputs(seed + 10)
            comm.traffic.reset()
            functional_call(twin.model, fast, (xs[rank],)).square().mean().backward()
            outer = [functional_call(m, full, (x,)).square().mean() for m, x in zip(twin.plain, xs)]
            torch.stack(outer).mean().backward()
            twin.step()
        twin.check()

    run_ranks(ranks)


def open_if_sharded(model: nn.Module) -> Any:
    return gathered(model) if is_fully_sharded(model) else contextlib.nullcontext()


@pytest.mark.parametrize("way", ["autograd", "func"])
@pytest.mark.parametrize("shard", SHARDS)
def test_inner_step_on_gathered_weights(shard: str, way: str) -> None:
    """MAML with every rank's own inner loss, as data parallelism of tasks wants it: gradients of
    tensors made of the parameters, where those of the parameters would be averaged."""

    def loss(model: nn.Module, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, params, (x,)).square().mean()

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with open_if_sharded(model):
            named = {name: p.clone() for name, p in model.named_parameters()}
            if way == "func":
                grads = grad(functools.partial(loss, model))(named, x)
            else:
                values = list(named.values())
                found = torch.autograd.grad(loss(model, named, x), values, create_graph=True)
                grads = dict(zip(named, found))
            fast = {name: p - 0.1 * grads[name] for name, p in named.items()}
            return loss(model, fast, x * 2)

    train_twin(two_blocks, forward, SHARDS[shard], steps=2)


@pytest.mark.parametrize("shard", SHARDS)
def test_functional_call_with_another_models_parameters(shard: str) -> None:
    """Plain ``nn.Parameter`` stand-ins, which outside functional_call would be a mistake (D5)."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, SHARDS[shard])
        given = [{n: nn.Parameter(v) for n, v in fulls(twin.model, 1.2).items()} for _ in range(2)]
        for model, params in zip((twin.model, twin.mine), given):
            functional_call(model, params, (data(0, rank),)).square().mean().backward()
        for name, param in given[0].items():
            compare(name, param.grad, given[1][name].grad, twin.tolerance)
        twin.train()
        twin.model.head.weight = nn.Parameter(twin.reference.head.weight.detach().clone())
        with pytest.raises(RuntimeError, match=r"'head.weight' .* was replaced after fully_shard"):
            twin.model(data(0, rank))

    run_ranks(ranks)


def test_functional_call_with_slices_of_something_else_is_refused() -> None:
    def ranks(rank: int) -> None:
        twin, other = Twin(rank, 2, two_blocks), Twin(rank, 2, two_blocks, one_unit)
        wrong = {"head.weight": other.model.get_parameter("head.weight")}
        with pytest.raises(RuntimeError, match=r"'head.weight' .* is sharded otherwise than it"):
            functional_call(twin.model, wrong, (data(0, rank),))
        named = dict(twin.model.named_parameters())
        with pytest.raises(RuntimeError, match=r"is its shard, wrapped by a transform"):
            grad(lambda p: functional_call(twin.model, p, (data(0, rank),)).sum())(named)
        twin.train()

    run_ranks(ranks)


@pytest.mark.parametrize("shard", SHARDS)
def test_functional_call_inside_scopes(shard: str) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, SHARDS[shard])
        given = fulls(twin.model, 1.1)
        some = {"head.weight": given["head.weight"]}
        for params in (given, some):
            with open_if_sharded(twin.model):
                agree(twin, lambda m, x, p=params: functional_call(m, p, (x,)))
            unshard(twin.model)
            agree(twin, lambda m, x, p=params: functional_call(m, p, (x,)))
            agree(twin, lambda m, x: m(x))
            reshard(twin.model)
        twin.train()

    run_ranks(ranks)


def test_a_parameter_replaced_in_a_scope_is_what_forward_reads() -> None:
    def ranks(rank: int) -> None:
        for shard in SHARDS.values():
            twin = Twin(rank, 2, two_blocks, shard)
            new = torch.ones(2, WIDTH, dtype=torch.float64)
            with torch.no_grad():
                twin.reference.head.weight.copy_(new)
            with gathered(twin.model, writeback=True):
                twin.model.head.weight = nn.Parameter(new)
                agree(twin, lambda m, x: m(x))
            twin.check()

    run_ranks(ranks)


@pytest.mark.parametrize("training", [True, False])
def test_functional_call_with_full_precision_in_eval(training: bool) -> None:
    def ranks(rank: int) -> None:
        mp = MixedPrecision(param_dtype=torch.bfloat16, full_precision_in_eval=True)
        twin = Twin(rank, 2, two_blocks, lambda m: by_block(m, mp_policy=mp))
        for model in (twin.model, *twin.plain):
            model.train(training)
        given = fulls(twin.model, 1.1)
        if training:
            out = functional_call(twin.model, given, (data(0, rank),))
            assert out.dtype is torch.bfloat16
            return
        for params in (given, {"head.weight": given["head.weight"]}):
            agree(twin, lambda m, x, p=params: functional_call(m, p, (x,)))
        agree(twin, lambda m, x: vmap(m)(x))
        assert_at_rest(twin.model)

    run_ranks(ranks)


class Fragile(Tower):
    error: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error("on purpose")
        return super().forward(x)


@pytest.mark.parametrize("names", ["all", "some", "transform", "hooks"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_call_leaves_nothing_behind(error: type[BaseException], names: str) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Fragile(2))
        twin.train(steps=1)
        given = fulls(twin.model)
        if names == "some":
            given = {"head.weight": given["head.weight"]}
        twin.model.error = error
        packed: list[Tensor] = []

        def call() -> None:
            if names == "transform":
                vmap(twin.model)(data(0, rank))
            elif names == "hooks":
                with saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
                    twin.model(data(0, rank))
            else:
                functional_call(twin.model, given, (data(0, rank),))

        with pytest.raises(error, match="on purpose"):
            call()
        twin.model.error = None
        packed.clear()
        agree(twin, lambda m, x: m(x))
        assert not packed
        twin.train(steps=1)

    run_ranks(ranks)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.block, self.b = nn.Linear(WIDTH, WIDTH), Block(), nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.block(self.a(x)))


@pytest.mark.filterwarnings("ignore:.*tied")
def test_tied_weights_in_functional_calls_and_transforms() -> None:
    def shard(model: nn.Module) -> Any:
        children = {"a", "block", "b"}
        return fully_shard(model, units=wrap.by_fn(lambda name, _: name in children))

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Tied, shard)
        twin.train(lambda m, x: grad(lambda z: m(z).sum())(x).square().mean() + square(m, x))
        twin.train(lambda m, x: vmap(m)(x).square().mean())
        given = fulls(twin.model, 2.0)
        agree(twin, lambda m, x: functional_call(m, given, (x,)))
        agree(twin, lambda m, x: functional_call(m, {"b.weight": given["a.weight"]}, (x,)))
        both, x = fully_shard(seeded(Tied)), data(0, rank)
        with pytest.raises(RuntimeError, match="is tied, and was replaced under some"):
            functional_call(both, {"b.weight": given["a.weight"]}, (x,), tie_weights=False)
        twin.train()

    run_ranks(ranks)


# Transforms of torch.func

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

            twin.train(forward, steps=2)

    run_ranks(ranks)


def test_a_transform_gathers_and_reduces_each_unit_once() -> None:
    def ranks(rank: int) -> tuple[int, int]:
        twin = Twin(rank, 2, two_blocks)
        comm.traffic.reset()
        grad(lambda z: square(twin.model, z))(data(0, rank)).square().sum().backward()
        return comm.traffic.gathers, comm.traffic.reduces

    assert run_ranks(ranks) == [(3, 3), (3, 3)]


@pytest.mark.parametrize("shard", SHARDS)
def test_transforms_over_full_weights(shard: str) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, SHARDS[shard])
        given = fulls(twin.model)
        pair = {name: torch.stack([v, 2 * v]) for name, v in given.items()}
        call = lambda m, x: lambda p: functional_call(m, p, (x,))  # noqa: E731
        loss = lambda m: lambda p, x: functional_call(m, p, (x,)).square().sum()  # noqa: E731
        comm.traffic.reset()
        for fn in (
            lambda m, x: grad(loss(m))(given, x),
            lambda m, x: jacrev(call(m, x))(given),
            lambda m, x: jvp(call(m, x), (given,), (given,)),
            lambda m, x: vmap(call(m, x))(pair),
            lambda m, x: vmap(grad(loss(m)), in_dims=(None, 0))(given, x),  # per sample
        ):
            agree(twin, fn)
        assert comm.traffic.gathers == 0
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


# Saved tensors


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
def test_saved_tensor_hooks_see_activations_and_no_weights(shard: str) -> None:
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


# Hooks


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


# Losses


class Layered(nn.Module):
    """Gives what every block computed, of which a loss may use what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        states = []
        for block in self.blocks:
            x = block(x)
            states.append(x)
        return self.head(x), states


def auxiliary(model: nn.Module, x: Tensor) -> Tensor:
    out, states = model(x)
    return out.square().mean() + sum(s.abs().mean() for s in states)


def one_state(model: nn.Module, x: Tensor) -> Tensor:
    _, states = model(x)
    return states[1].square().mean()


def part_of_a_state(model: nn.Module, x: Tensor) -> Tensor:
    _, states = model(x)
    return states[0][:1].square().sum() + states[2][:, 1].sum()


def detached_state(model: nn.Module, x: Tensor) -> Tensor:
    out, states = model(x)
    return out.square().mean() * states[0].detach().mean() + states[1].mean()


def captured(model: nn.Module, x: Tensor) -> Tensor:
    found: list[Tensor] = []
    handles = [b.register_forward_hook(lambda m, a, o: found.append(o)) for b in model.blocks]
    out, _ = model(x)
    for handle in handles:
        handle.remove()
    return out.square().mean() + sum(f.square().mean() for f in found[:2])


def adversarial(model: nn.Module, x: Tensor) -> Tensor:
    """Two steps up the gradient of the input, then the loss there."""
    z = x.clone().requires_grad_()
    for _ in range(2):
        (slope,) = torch.autograd.grad(auxiliary(model, z), z)
        z = (z + 0.1 * slope.sign()).detach().requires_grad_()
    return auxiliary(model, z)


def edited_in_place(model: nn.Module, x: Tensor) -> Tensor:
    out, states = model(x)
    return out.mul_(2).add_(1).square().mean() + (states[1] * 1).mul_(3).sum()


LOSSES = [
    auxiliary, one_state, part_of_a_state, detached_state, captured, adversarial, edited_in_place,
]  # fmt: skip


@pytest.mark.parametrize("forward", LOSSES)
@pytest.mark.parametrize("shard", SHARDS)
def test_losses_of_several_units(shard: str, forward: Forward) -> None:
    def ranks(rank: int) -> None:
        for strategy in STRATEGIES:
            twin = Twin(rank, 2, Layered, lambda m, s=strategy: SHARDS[shard](m, strategy=s))
            for seed in range(2):
                twin.backward(forward, seed)
                for module in (twin.model, *twin.model.blocks):
                    if is_fully_sharded(module):
                        reshard(module)  # a unit that no loss used waits for the next one
                twin.step()
                twin.check()

    run_ranks(ranks)


@pytest.mark.parametrize("shard", SHARDS)
def test_only_the_inputs_have_gradients(shard: str) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Layered().requires_grad_(False), SHARDS[shard])
        for seed in range(2):
            x, y = (data(seed, rank).requires_grad_() for _ in range(2))
            for _ in range(2):  # accumulated
                adversarial(twin.model, x).backward()
                auxiliary(twin.model, x).backward()
                adversarial(twin.mine, y).backward()
                auxiliary(twin.mine, y).backward()
            compare("input gradient", x.grad, y.grad, twin.tolerance)
            assert_at_rest(twin.model)

    run_ranks(ranks)


# A loss in chunks


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.top = Block(), Block()
        self.head = nn.Linear(WIDTH, 5)

    def states(self, x: Tensor) -> Tensor:
        return self.top(self.body(x))


def by_child(model: nn.Module, **options: Any) -> Any:
    children = {"body", "top", "head"}
    return fully_shard(model, units=wrap.by_fn(lambda name, _: name in children), **options)


CHUNKS = 3


def chunk_losses(head: nn.Module, states: Tensor) -> list[Tensor]:
    return [head(part).logsumexp(-1).sum() / states.shape[0] for part in states.chunk(CHUNKS)]


def chunked(model: nn.Module, x: Tensor) -> Tensor:
    return sum(chunk_losses(model.head, model.states(x)))


def chunked_and_recomputed(model: nn.Module, x: Tensor) -> Tensor:
    def loss(part: Tensor) -> Tensor:
        return model.head(part).logsumexp(-1).sum() / x.shape[0]

    parts = model.states(x).chunk(CHUNKS)
    return sum(checkpoint(loss, part, use_reentrant=False) for part in parts)


@pytest.mark.filterwarnings("ignore:the forward of unit")
@pytest.mark.parametrize("forward", [chunked, chunked_and_recomputed])
@pytest.mark.parametrize("strategy", [None, ShardingStrategy.SHARD_GRAD_OP])
def test_a_head_on_chunks_is_gathered_and_reduced_once(
    strategy: ShardingStrategy | None, forward: Forward
) -> None:
    """The head is called for each chunk outside the model's forward; one backward."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Headed, lambda m: by_child(m, strategy=strategy))
        for seed in range(3):
            comm.traffic.reset()
            forward(twin.model, data(seed, rank)).backward()
            assert (comm.traffic.gathers, comm.traffic.reduces) == (3, 3)
            twin.zero_grad()
            twin.backward(forward, seed)
            twin.step()
        twin.check()

    run_ranks(ranks)


@pytest.mark.filterwarnings("ignore:the forward of unit")
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_a_backward_for_each_chunk_with_one_gather_and_one_reduction(
    strategy: ShardingStrategy | None, world: int
) -> None:
    """Memory-saving cross-entropy: no more than one chunk of logits exists at a time."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, world, Headed, lambda m: by_child(m, strategy=strategy))
        for seed in range(3):
            states = twin.model.states(data(seed, rank))
            cut = states.detach().requires_grad_()
            comm.traffic.reset()
            unshard(twin.model.head)
            with accumulate(twin.model.head, keep="unsharded"):
                for part in cut.chunk(CHUNKS):
                    loss = twin.model.head(part).logsumexp(-1).sum() / cut.shape[0]
                    loss.backward()
            reshard(twin.model.head)
            assert (comm.traffic.gathers, comm.traffic.reduces) == (1, 1)
            states.backward(cut.grad)
            xs = twin.inputs(seed)
            torch.stack([chunked(m, x) for m, x in zip(twin.plain, xs)]).mean().backward()
            twin.step()
        twin.check()

    run_ranks(ranks, world)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_calls_whose_gradients_could_go_together_may_also_be_apart(order: tuple[int, int]) -> None:
    """Two forwards of one unit, then a backward of each, with weights read between them."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, one_unit)
        for step in range(2):
            pairs = [twin.losses(square, 10 * step + i) for i in range(2)]
            for i in order:
                for loss in pairs[i]:
                    loss.backward()
            twin.step()
        together = lambda m, x: square(m, x) + square(m, 2 * x)  # noqa: E731
        twin.train(together)
        comm.traffic.reset()
        twin.backward(together, 3)
        assert comm.traffic.reduces == 1
        twin.step()
        xs = twin.inputs(5)
        for models in ([twin.model], twin.plain):  # the second call has a node of its own
            models[0].head.requires_grad_(False)
            x = xs[rank:] if len(models) == 1 else xs
            first = [square(m, y) for m, y in zip(models, x)]
            models[0].head.requires_grad_(True)
            second = [square(m, 2 * y) for m, y in zip(models, x)]
            torch.stack(first + second).mean().backward()
        twin.step()
        twin.check()
        blocks = Twin(rank, 2, two_blocks)
        blocks.train(together)
        comm.traffic.reset()
        blocks.backward(together, 3)  # a model's gradients do not wait for its first forward's
        assert comm.traffic.reduces == 6

    run_ranks(ranks)


def test_head_weights_that_change_between_chunks_are_read_anew() -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: nn.Linear(WIDTH, 2), one_unit)
        outs = []
        for model in (twin.model, twin.mine):
            model(data(0, rank))
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(2)
            outs.append(model(data(0, rank)).detach())
        compare("output", *outs, twin.tolerance)

    run_ranks(ranks)
