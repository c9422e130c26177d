"""A backward may start inside a unit, at a tensor that a hook on a submodule kept."""

from __future__ import annotations

import copy
import gc
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from fsdp_compose import ShardingStrategy, fully_shard, gathered, undo, wrap
from fsdp_compose.base.process import here

from harness import run_ranks, simulate_ranks, single_process
from models import (
    Block,
    Tower,
    assert_at_rest,
    by_block,
    data,
    one_unit,
    seeded,
    square,
    train_twin,
    whole,
)


def keep(model: nn.Module, where: str, kept: dict[str, Tensor]) -> Any:
    """Keep what a submodule gives or takes, as attribution and feature extraction do."""
    name, side = where.split(":")
    module = model.get_submodule(name)
    if side == "output":
        return module.register_forward_hook(lambda m, args, out: kept.update(x=out))
    return module.register_forward_pre_hook(lambda m, args: kept.update(x=args[0]))


@pytest.mark.parametrize("shard", [by_block, one_unit])
def test_backward_from_a_tensor_a_hook_kept(shard: Any) -> None:
    """Gradients of parameters and of inputs, then a usual step; copies and ``undo`` too.

    The hook comes before the first step, or after it.
    """

    def check(rank: int) -> None:
        for where in ("blocks.1.up:output", "blocks.1.norm:output", "blocks.1.down:input"):
            plain = seeded(Tower)
            model = shard(copy.deepcopy(plain))
            twin = copy.deepcopy(model)
            square(twin, data(1, rank)).backward()  # it comes by the outputs
            twin.zero_grad()
            for sharded in (model, twin):
                ours: dict[str, Tensor] = {}
                theirs: dict[str, Tensor] = {}
                handles = keep(sharded, where, ours), keep(plain, where, theirs)
                x = data(0, rank).requires_grad_()
                sharded(x)
                neuron = torch.autograd.grad(ours["x"][0, 1], x, retain_graph=True)[0]
                ours["x"].square().mean().backward()
                y = data(0, rank).requires_grad_()
                plain(y)
                assert_close(neuron, torch.autograd.grad(theirs["x"][0, 1], y)[0])
                plain.zero_grad()
                for r in range(2):
                    plain(data(0, r))
                    (theirs["x"].square().mean() / 2).backward()
                for p, q in zip(sharded.parameters(), plain.parameters(), strict=True):
                    wanted = torch.zeros_like(q) if q.grad is None else q.grad
                    found = wanted * 0 if p.grad is None else whole(p.grad)
                    assert_close(found, wanted, rtol=1e-12, atol=1e-12)
                for handle in handles:
                    handle.remove()
                sharded.zero_grad(), plain.zero_grad()
                square(sharded, data(1, rank)).backward()
                assert_at_rest(sharded)
            undo(model)
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

    run_ranks(check, 2)


class Keeping(nn.Module):
    """Leaves a tensor of its forward in an attribute, or in a list of the caller's."""

    def __init__(self, inner: nn.Module | None, bag: list[Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.inner = inner
        self.to_list, self.bag = False, bag
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        if self.inner is not None:
            x = self.inner(x)
        h = torch.tanh(self.last(x))
        if self.to_list:
            self.bag.append(h)
        else:
            self.kept = {"h": h}
        return self.last(h)


class Bag(list[Tensor]):
    """Nothing that is looked for in attributes."""

    def __deepcopy__(self, memo: Any) -> Bag:
        return Bag()


def kept_by(model: Any, depth: int) -> Keeping:
    for _ in range(depth):
        model = model.inner
    return model


@pytest.mark.parametrize("strategy", list(ShardingStrategy)[:2])
def test_backward_from_what_a_forward_kept(strategy: ShardingStrategy) -> None:
    """In an attribute at any time; in a list where the first backwards come that way."""

    def check(rank: int) -> None:
        for depth, frozen, listed in product(range(3), (False, True), (False, True)):
            plain = seeded(lambda: Keeping(Keeping(Keeping(None, Bag()), Bag()), Bag()))
            module = kept_by(plain, depth)
            module.to_list = listed
            kept_by(plain, 1).requires_grad_(not frozen)
            model = copy.deepcopy(plain)
            for inner in (kept_by(model, 2), kept_by(model, 1), model):
                fully_shard(inner, strategy=strategy)

            def loss(model: nn.Module, r: int, depth: int = depth, listed: bool = listed) -> Tensor:
                model(data(0, r).requires_grad_())
                module = kept_by(model, depth)
                kept = module.bag.pop() if listed else module.kept["h"]
                return kept.square().mean()

            if not listed:
                square(model, data(1, rank)).backward()  # it comes by the outputs
                model.zero_grad()
            for _ in range(2):
                loss(model, rank).backward()
                sum(loss(plain, r) / 2 for r in range(2)).backward()
                for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                    assert (p.grad is None) == (q.grad is None)
                    if q.grad is not None:
                        assert_close(whole(p.grad), q.grad, rtol=1e-12, atol=1e-12)
            square(model, data(1, rank)).backward()
            assert_at_rest(model)

    run_ranks(check, 2)


class Checkpointed(nn.Module):
    """Blocks that are recomputed in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


@pytest.mark.parametrize("shard", [by_block, one_unit])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_in_a_scope_recompute_after_it(shard: Any, reentrant: bool) -> None:
    """Right where the block is a unit, which gathers again; else an error that names the weight."""

    def check(rank: int) -> None:
        plain = seeded(lambda: Checkpointed(reentrant))
        for inside in (True, False):
            model = shard(copy.deepcopy(plain))
            plain.zero_grad()
            with gathered(model):
                loss = square(model, data(0, rank).requires_grad_())
                if inside:
                    loss.backward()
            if not inside and shard is one_unit:
                with pytest.raises(RuntimeError, match=r"needs the whole of .blocks"):
                    loss.backward()
                continue
            if not inside:
                loss.backward()
            sum(square(plain, data(0, r).requires_grad_()) / 2 for r in range(2)).backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert_close(whole(p.grad), q.grad, rtol=1e-12, atol=1e-12)

    run_ranks(check, 2)


class Passing(nn.Module):
    """Gives its input back beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.last(torch.tanh(self.first(x)))


class Passed(nn.Module):
    """Adds what a unit passed through to what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(6, 6), Passing(), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x, y = self.inner(self.first(x))
        return self.head(x + y)


def test_a_result_after_an_input_passed_through() -> None:
    """The unit is gathered for the backward of its result, whatever it returned before that."""
    train_twin(Passed, shard=lambda m: fully_shard(m, units=wrap.by_class({Passing})))


class Inside(nn.Module):
    """Part of a unit: it leaves a tensor of its forward in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [self.last(torch.tanh(self.first(x)))]
        return torch.tanh(self.kept[0])


def inside() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Inside(), nn.Linear(6, 2))


def test_backward_from_what_a_submodule_kept() -> None:
    """After backwards by the outputs: right, wherever in the unit the tensor was left."""

    def ranks(rank: int) -> None:
        plain = seeded(lambda: nn.Sequential(inside(), nn.Linear(2, 2)))
        model = copy.deepcopy(plain)
        fully_shard(model[0])
        fully_shard(model)
        for step in range(4):
            square(model, data(step, rank)).backward()
        model.zero_grad()
        model(data(4, rank))
        model[0][1].kept[0].square().mean().backward()
        for r in range(2):
            plain(data(4, r))
            (plain[0][1].kept[0].square().mean() / 2).backward()
        for p, q in zip(model[0][:2].parameters(), plain[0][:2].parameters(), strict=True):
            assert_close(whole(p.grad), q.grad, rtol=1e-12, atol=1e-12)

    run_ranks(ranks, 2)


def test_kept_tensors_get_one_hook_each() -> None:
    """However many forwards ran before the first backward."""

    def ranks(rank: int) -> None:
        model = fully_shard(seeded(inside))
        losses = [square(model, data(step, rank)) for step in range(3)]
        sum(losses).backward()
        square(model, data(4, rank))
        assert len(model[1].kept[0]._backward_hooks) == 1

    run_ranks(ranks, 2)


class TwoInputs(nn.Module):
    """Reads two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.lin(x)) * torch.tanh(self.lin(y))


@pytest.mark.parametrize("which", [0, 1])
def test_second_derivatives_of_one_input_release(which: int) -> None:
    """A frozen unit that a graph over its backward reads goes once that was run from any input."""

    def ranks(rank: int) -> None:
        plain = seeded(TwoInputs).requires_grad_(False)
        model = fully_shard(copy.deepcopy(plain), reshard_after_forward=True)
        found = []
        for one in (model, plain):
            inputs = [data(seed, rank).requires_grad_() for seed in range(2)]
            grads = torch.autograd.grad(one(*inputs).sum(), inputs, create_graph=True)
            found.append(torch.autograd.grad(grads[which].square().sum(), inputs))
            if one is model:
                assert_at_rest(model)
        assert_close(*found)

    simulate_ranks(ranks)


def test_backward_from_inside_a_deleted_unit() -> None:
    """The first backward begins inside the unit, whose module is gone: the error says so."""

    def ranks(rank: int) -> None:
        model = seeded(lambda: Keeping(None, Bag()))
        model.to_list, bag = True, model.bag
        fully_shard(model)(data(0, rank))
        del model
        gc.collect()
        with pytest.raises(RuntimeError, match="a sharded module that was undone or deleted"):
            bag.pop().square().mean().backward()

    run_ranks(ranks, 2)


class Reading(nn.Linear):
    """Hands its weight to a submodule, as a regulariser of weights takes it."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.through = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.through(self.weight), self.bias)


def test_backward_from_a_penalty_on_the_weight() -> None:
    """A hook computes it from the gathered weight; the loss is it alone, after usual losses."""

    def ranks(rank: int) -> None:
        model = seeded(lambda: nn.Sequential(Reading(), nn.Linear(6, 2)))
        fully_shard(model[0])
        fully_shard(model)
        found: dict[str, Tensor] = {}
        factors = data(9, 0, 6, 6)
        model[0].through.register_forward_pre_hook(
            lambda _, args: found.update(penalty=(args[0] * factors).sum())
        )
        for step in range(4):
            square(model, data(step, rank)).backward()
        model.zero_grad()
        model(data(4, rank))
        found.pop("penalty").backward()
        assert_close(whole(model[0].weight.grad), factors)
        assert_at_rest(model)

    run_ranks(ranks, 2)


class Sealed:
    """Nothing in which tensors are found."""

    def __init__(self, held: Tensor) -> None:
        self.held = iter([held])


class Sealing(nn.Linear):
    def forward(self, x: Tensor) -> Sealed:
        return Sealed(super().forward(x))


def test_hidden_outputs_are_told_where_they_train() -> None:
    """A unit whose outputs cannot be watched says so, but not in inference."""
    with single_process():
        model = fully_shard(seeded(lambda: Sealing(6, 6)))
        with torch.no_grad():
            model(data(0, 0))
            assert_at_rest(model)
        with pytest.warns(UserWarning, match="returned a Sealed with something in it"):
            out = model(data(0, 0))
        next(out.held).sum().backward()
        assert_at_rest(model)


def test_evaluation_leaves_its_input_alone() -> None:
    """A backward through what was evaluated without gradients does not gather the model."""

    def ranks(rank: int) -> None:
        model = one_unit(seeded(Tower), reshard_after_forward=True)
        model.first.register_forward_pre_hook(lambda module, args: None)
        model.first.register_forward_hook(lambda module, args, out: None)
        x = data(0, rank).requires_grad_() * 2
        with torch.no_grad():
            model(x)
        before = here.traffic.gathers
        x.sum().backward()
        assert here.traffic.gathers == before
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_an_attribute_is_no_slow_way(caplog: pytest.LogCaptureFixture) -> None:
    """A first backward from a tensor in an attribute gathers the unit without a warning."""

    def ranks(rank: int) -> None:
        model = fully_shard(seeded(lambda: Keeping(None, Bag())), reshard_after_forward=True)
        model(data(0, rank))
        model.kept["h"].sum().backward()
        assert_at_rest(model)

    simulate_ranks(ranks)
    assert not caplog.records


class Weights(nn.Module):
    """Returns its parameters themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.weight, self.bias


def test_a_backward_over_weights_alone_is_checked() -> None:
    """Where a unit returns nothing but its parameters, which were moved since, it raises."""

    def ranks(rank: int) -> None:
        model = fully_shard(Weights())
        for moved in (False, True):
            weight, bias = model(data(0, rank))
            if moved:
                model.double()
                with pytest.raises(RuntimeError, match="were given other storage"):
                    (weight.square().sum() + bias.sum()).backward()
            else:
                (weight.square().sum() + bias.sum()).backward()
                assert_close(whole(model.weight.grad), 2 * whole(model.weight))
                assert_at_rest(model)

    simulate_ranks(ranks)
