"""``torch.func.functional_call`` computes with exactly the tensors that it is given."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, grad, vmap

from fsdp_compose import (
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
    gathered,
    is_fully_sharded,
    reshard,
    unshard,
    wrap,
)
from fsdp_compose.base.process import here

from autograd_steps import STRATEGIES, agree, fulls
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
    one_unit,
    seeded,
    square,
    train_twin,
    two_blocks,
    units,
)


@pytest.mark.parametrize("shard", SHARDS)
def test_functional_call_uses_what_it_is_given(shard: str) -> None:
    """Nothing is gathered, and the caller's dictionary still holds the caller's tensors."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, SHARDS[shard])
        given = fulls(twin.model, 1.1)
        before = dict(given)
        here.traffic.reset()
        agree(twin, lambda m, x: functional_call(m, given, (x,)))
        assert here.traffic.gathers == 0
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
        order = units(twin.model)[0].engine.schedule.forward_order
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


def train_by_inner_steps(
    rank: int, shard: Callable[[nn.Module], Any], names: str = "", create_graph: bool = False
) -> None:
    """Two steps by a loss of parameters that a step has changed, those called ``names`` alone."""

    def adapt(model: nn.Module, inner: Tensor) -> dict[str, Tensor]:
        named = {name: p for name, p in model.named_parameters() if names in name}
        grads = torch.autograd.grad(inner, list(named.values()), create_graph=create_graph)
        return {name: p - 0.1 * g for (name, p), g in zip(named.items(), grads)}

    twin = Twin(rank, 2, two_blocks, shard)
    for seed in range(2):
        inner, plain = twin.losses(square, seed)
        fast, full = adapt(twin.model, inner), adapt(twin.reference, plain)
        xs = twin.inputs(seed + 10)
        functional_call(twin.model, fast, (xs[rank],)).square().mean().backward()
        outer = [functional_call(m, full, (x,)).square().mean() for m, x in zip(twin.plain, xs)]
        torch.stack(outer).mean().backward()
        twin.step()
    twin.check()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shard", SHARDS)
def test_inner_step_on_shards(shard: str, strategy: ShardingStrategy) -> None:
    """MAML with the inner update on slices: fast weights are gathered, differentiably."""
    apply = lambda m: SHARDS[shard](m, strategy=strategy)  # noqa: E731
    run_ranks(lambda rank: train_by_inner_steps(rank, apply, create_graph=True))


def open_if_sharded(model: nn.Module) -> Any:
    return gathered(model) if is_fully_sharded(model) else contextlib.nullcontext()


@pytest.mark.parametrize("names", ["up.weight", "weight", "head"])
@pytest.mark.parametrize("shard", SHARDS)
def test_inner_step_on_some_slices(shard: str, names: str) -> None:
    """The rest of a unit is reduced in the same backward, beside the slices that were updated."""
    simulate_ranks(lambda rank: train_by_inner_steps(rank, SHARDS[shard], names))


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
def test_functional_call_with_other_parameters(shard: str) -> None:
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


def test_functional_call_refuses_foreign_slices() -> None:
    """Functional call with slices of something else is refused."""

    def ranks(rank: int) -> None:
        twin, other = Twin(rank, 2, two_blocks), Twin(rank, 2, two_blocks, one_unit)
        wrong = {"head.weight": other.model.get_parameter("head.weight")}
        with pytest.raises(RuntimeError, match=r"'head.weight' .* sharded in another way"):
            functional_call(twin.model, wrong, (data(0, rank),))
        named = dict(twin.model.named_parameters())
        with pytest.raises(RuntimeError, match=r"given its shard, wrapped by a transform"):
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


def test_forward_reads_what_a_scope_replaced() -> None:
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
def test_tied_weights_in_functional_calls() -> None:
    """Tied weights in functional calls and transforms."""

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
