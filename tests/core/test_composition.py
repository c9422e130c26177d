"""What people do to a module besides calling it once: each case trains as the plain module does."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from fsdp_compose import Prefetch, ShardingStrategy, fully_shard, gathered, wrap
from fsdp_compose.comm import collectives as comm
from fsdp_compose.core.records import Hold

from harness import run_ranks
from models import (
    SHARDS,
    WIDTH,
    Block,
    Ledger,
    Tower,
    Twin,
    assert_at_rest,
    by_block,
    compare,
    data,
    nested,
    one_unit,
    seeded,
    square,
    train_twin,
    two_blocks,
    units,
    whole,
)

# Activation checkpointing


class Checkpointed(Tower):
    """Recomputes: each block, the inside of each block, pairs of blocks, or everything."""

    def __init__(self, where: str, reentrant: bool, depth: int = 4) -> None:
        super().__init__(depth)
        self.where, self.reentrant = where, reentrant
        if where == "inside":
            for block in self.blocks:
                inner = block.forward
                block.forward = lambda x, inner=inner: self.again(inner, x)

    def again(self, fn: Callable[..., Any], *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return fn(*args)
        return checkpoint(fn, *args, use_reentrant=self.reentrant)

    def run(self, x: Tensor) -> Tensor:
        x = self.first(x)
        blocks = list(self.blocks)
        if self.where == "pairs":
            for a, b in zip(blocks[::2], blocks[1::2]):
                x = self.again(lambda y, a=a, b=b: b(a(y)), x)
        elif self.where == "outside":
            for block in blocks:
                x = self.again(block, x)
        elif self.where == "nested":
            half = lambda y, part: self.again(part[1], self.again(part[0], y))  # noqa: E731
            x = self.again(lambda y: half(y, blocks[:2]), x)
            x = self.again(lambda y: half(y, blocks[2:]), x)
        else:
            for block in blocks:
                x = block(x)
        return self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "root":
            return self.again(self.run, x.requires_grad_())
        return self.run(x)


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.parametrize("frozen", ["all blocks", "one block", "some parameters"])
@pytest.mark.parametrize("shard", ["blocks", "one"])
def test_checkpointing_inside_frozen_units(frozen: str, reentrant: bool, shard: str) -> None:
    """A frozen unit is recomputed too when a gradient passes through it."""

    def build() -> nn.Module:
        model = Checkpointed("inside", reentrant)
        for name, param in model.named_parameters():
            param.requires_grad_(
                not {
                    "all blocks": "blocks" in name,
                    "one block": "blocks.1" in name,
                    "some parameters": "up" in name,
                }[frozen]
            )
        return model

    train_twin(build, shard=SHARDS[shard])


WHERE = ["outside", "inside", "pairs", "nested", "root"]


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("shard", ["blocks", "one"])
def test_checkpointing(where: str, reentrant: bool, shard: str) -> None:
    train_twin(lambda: Checkpointed(where, reentrant), shard=SHARDS[shard])


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.parametrize("where", WHERE)
def test_checkpointing_under_each_strategy(where: str, reentrant: bool) -> None:
    def ranks(rank: int) -> None:
        for strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
            shard = lambda m: by_block(m, strategy=strategy)  # noqa: E731
            Twin(rank, 2, lambda: Checkpointed(where, reentrant), shard).train(steps=2)

    run_ranks(ranks)


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.parametrize("where", WHERE)
def test_checkpointing_gathers_no_more_than_without(where: str, reentrant: bool) -> None:
    """Two gathers (forward, backward) and one reduction per unit; the outermost stays gathered."""

    def ranks(rank: int) -> tuple[int, int]:
        twin = Twin(rank, 2, lambda: Checkpointed(where, reentrant))
        for seed in range(2):  # the first step records the order that prefetching follows
            comm.traffic.reset()
            square(twin.model, data(seed, rank)).backward()
        return comm.traffic.gathers, comm.traffic.reduces

    for gathers, reduces in run_ranks(ranks):
        assert (gathers, reduces) == (2 * 4 + 1, 5)


@pytest.mark.parametrize("shard", ["blocks", "one"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
def test_checkpointing_saves_memory(reentrant: bool, shard: str) -> None:
    """What a forward leaves alive is what the plain model's leaves, plus what stays gathered."""

    def alive(model: nn.Module, x: Tensor) -> int:
        with Ledger(x, *model.parameters()) as ledger:
            loss = square(model, x)
            held = ledger.live()
        loss.backward()
        return held

    def ranks(rank: int) -> dict[str, int]:
        found = {}
        for where in ("nowhere", "outside"):
            twin = Twin(rank, 2, lambda: Checkpointed(where, reentrant), SHARDS[shard])
            for step in range(2):
                x = data(step, rank, 64, WIDTH)
                found[where] = alive(twin.model, x)
                found[f"plain {where}"] = alive(twin.reference, x)
                kept = {b for u in units(twin.model)[:1] for b in u.buckets}
                found["gathered"] = sum(b.full_nbytes for b in kept)
        return found

    for found in run_ranks(ranks):
        assert found["plain outside"] < found["plain nowhere"] / 2
        for where in ("nowhere", "outside"):
            assert found[where] <= found[f"plain {where}"] + found["gathered"] + 64, found


# Several passes


@pytest.mark.parametrize("shard", SHARDS)
def test_two_forwards_then_one_backward(shard: str) -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return square(model, x) + (model(x * 2) * model(-x)).mean()

    train_twin(two_blocks, forward, SHARDS[shard], world=3)


def test_two_forwards_then_two_backwards_in_either_order() -> None:
    def ranks(rank: int) -> None:
        for order in ((0, 1), (1, 0)):
            twin = Twin(rank, 2, two_blocks)
            for step in range(3):
                pairs = [twin.losses(square, 10 * step + i) for i in range(2)]
                for i in order:
                    for loss in pairs[i]:
                        loss.backward()
                twin.step()
            twin.check()

    run_ranks(ranks)


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.parametrize("where", WHERE)
def test_two_checkpointed_forwards_then_one_backward(where: str, reentrant: bool) -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return square(model, x) + (model(x * 2) * model(-x)).mean()

    train_twin(lambda: Checkpointed(where, reentrant), forward, steps=2)
    train_twin(lambda: Checkpointed(where, reentrant), forward, one_unit, steps=2)


@pytest.mark.parametrize("shard", SHARDS)
def test_gradients_accumulate_over_backwards(shard: str) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, SHARDS[shard])
        for step in range(3):
            for micro in range(3):
                twin.backward(square, 10 * step + micro)
                twin.check_grads()
            twin.step()
        twin.check()

    run_ranks(ranks)


class Thrice(nn.Module):
    """Calls the same blocks three times, and one of them inside another's forward."""

    def __init__(self, recursive: bool = False) -> None:
        super().__init__()
        self.block = Block()
        self.other = nn.Linear(WIDTH, WIDTH)
        self.recursive = recursive

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if self.recursive:
            x = self.block(x)
            return self(self.other(x), depth - 1) if depth else x
        for _ in range(3):
            x = self.other(self.block(x))
        return x


@pytest.mark.parametrize("recursive", [False, True], ids=["loop", "recursion"])
@pytest.mark.parametrize("keep", [False, True, None], ids=["reshard", "keep", "default"])
def test_module_called_three_times_reduces_once(recursive: bool, keep: bool | None) -> None:
    def ranks(rank: int) -> None:
        options = {} if keep is None else {"reshard_after_forward": not keep}
        shard = lambda m: by_block(m, **options)  # noqa: E731
        twin = Twin(rank, 2, lambda: Thrice(recursive), shard)
        for seed in range(3):
            comm.traffic.reset()
            loss, plain = twin.losses(square, seed)
            loss.backward()
            assert comm.traffic.reduces == 2
            plain.backward()
            twin.step()
        twin.check()

    run_ranks(ranks)


@pytest.mark.parametrize("shard", SHARDS)
def test_second_backward_through_a_retained_graph(shard: str) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, SHARDS[shard])
        for seed in range(3):
            loss, plain = twin.losses(square, seed)
            for _ in range(2):
                loss.backward(retain_graph=True)
                plain.backward(retain_graph=True)
                twin.check_grads()
            loss.backward()
            plain.backward()
            twin.step()
        twin.check()

    run_ranks(ranks)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "infer"])
@pytest.mark.parametrize("shard", SHARDS)
def test_inference_first_and_between_steps(mode: Callable[[], Any], shard: str) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, SHARDS[shard])
        for seed in range(4):
            x = data(50 + seed, rank)
            with mode():
                compare("output", twin.model(x), twin.mine(x), twin.tolerance)
            assert_at_rest(twin.model)
            twin.backward(square, seed)
            with mode():
                compare("output", twin.model(x), twin.mine(x), twin.tolerance)
            twin.step()
        twin.check()

    run_ranks(ranks)


def test_inference_between_forward_and_backward() -> None:
    """The eval forward may not disturb the graph that waits, nor the weights it saved."""

    def ranks(rank: int) -> None:
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
            for mode in (torch.no_grad, torch.inference_mode):
                shard = lambda m: by_block(m, strategy=strategy)  # noqa: E731
                twin = Twin(rank, 2, two_blocks, shard)
                for seed in range(3):
                    loss, plain = twin.losses(square, seed)
                    with mode():
                        twin.model(data(9, rank))
                    loss.backward()
                    plain.backward()
                    twin.step()
                twin.check()

    run_ranks(ranks)


@pytest.mark.filterwarnings("ignore:the forward of unit")
def test_evaluation_of_a_part_before_the_whole() -> None:
    """USERS 25: the encoder is called alone, with and without gradients, before the model is."""

    def ranks(rank: int) -> None:
        for shard in (by_block, nested):
            twin = Twin(rank, 2, two_blocks, shard)
            x = data(3, rank)
            with torch.no_grad():
                mine, theirs = twin.model.blocks[0](x), twin.mine.blocks[0](x)
            compare("encoder", mine, theirs, twin.tolerance)
            part = lambda m, x: m.blocks[1](m.blocks[0](x)).square().mean()  # noqa: E731
            twin.backward(part, 1)
            assert_at_rest(twin.model)
            twin.step()
            twin.train()
            twin.backward(part, 2)
            twin.step()
            twin.check()

    run_ranks(ranks)


def test_loss_that_is_dropped() -> None:
    def ranks(rank: int) -> None:
        for strategy in ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP:
            twin = Twin(rank, 2, two_blocks, lambda m: by_block(m, strategy=strategy))
            for seed in range(3):
                twin.losses(square, 70 + seed)
                twin.backward(square, seed)
                twin.losses(square, 80 + seed)
                twin.step()
            twin.train()

    run_ranks(ranks)


# autograd.grad and graphs over gradients


def grads_of(model: nn.Module, loss: Tensor, **options: Any) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), **options))


@pytest.mark.parametrize("shard", SHARDS)
def test_autograd_grad_of_parameters_and_inputs(shard: str) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, SHARDS[shard])
        for seed in range(3):
            loss, plain = twin.losses(square, seed)
            found, wanted = grads_of(twin.model, loss), grads_of(twin.reference, plain)
            for ours, theirs in zip(found, wanted):
                compare("gradient", whole(ours), theirs, twin.tolerance)
            assert all(p.grad is None for p in twin.model.parameters())
            assert_at_rest(twin.model)
            x, y = data(seed, rank).requires_grad_(), data(seed, rank).requires_grad_()
            (ours,) = torch.autograd.grad(square(twin.model, x), x)
            (theirs,) = torch.autograd.grad(square(twin.mine, y), y)
            compare("input gradient", ours, theirs, twin.tolerance)
            assert all(p.grad is None for p in twin.model.parameters())
            twin.backward(square, seed)
            twin.step()
        twin.check()

    run_ranks(ranks)


@pytest.mark.parametrize("shard", SHARDS)
def test_autograd_grad_of_one_parameter(shard: str) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, SHARDS[shard])
        for pick in ("first.weight", "blocks.1.down.weight", "head.bias"):
            loss, plain = twin.losses(square, 1)
            (ours,) = torch.autograd.grad(loss, twin.model.get_parameter(pick))
            (theirs,) = torch.autograd.grad(plain, twin.reference.get_parameter(pick))
            compare(pick, whole(ours), theirs, twin.tolerance)
            assert all(p.grad is None for p in twin.model.parameters())
        twin.train()

    run_ranks(ranks)


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("names", [["first.weight"], ["blocks.0.up.bias", "head.weight"]])
def test_backward_into_some_parameters(shard: str, names: list[str]) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, SHARDS[shard])
        for seed in range(2):
            loss, plain = twin.losses(square, seed)
            loss.backward(inputs=[twin.model.get_parameter(n) for n in names])
            plain.backward(inputs=[twin.reference.get_parameter(n) for n in names])
            for name, param in twin.model.named_parameters():
                assert (param.grad is not None) == (name in names), name
            twin.step()
        twin.train()

    run_ranks(ranks)


@pytest.mark.parametrize("shard", SHARDS)
def test_backward_into_the_inputs_only(shard: str) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, SHARDS[shard])
        x, y = data(1, rank).requires_grad_(), data(1, rank).requires_grad_()
        square(twin.model, x).backward(inputs=[x])
        square(twin.mine, y).backward(inputs=[y])
        compare("input gradient", x.grad, y.grad, twin.tolerance)
        assert all(p.grad is None for p in twin.model.parameters())
        twin.train()

    run_ranks(ranks)


@pytest.mark.parametrize("shard", SHARDS)
def test_gradient_penalty(shard: str) -> None:
    """A graph over the gradient of the input, then a backward through it."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + slope.square().sum(1).mean()

    train_twin(two_blocks, forward, SHARDS[shard])


@pytest.mark.parametrize("shard", SHARDS)
def test_hessian_vector_product(shard: str) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, SHARDS[shard])
        for seed in range(2):
            loss, plain = twin.losses(square, seed)
            ours = grads_of(twin.model, loss, create_graph=True)
            theirs = grads_of(twin.reference, plain, create_graph=True)
            ours = grads_of(twin.model, sum(g.square().sum() for g in ours))
            theirs = grads_of(twin.reference, sum(g.square().sum() for g in theirs))
            for mine, wanted in zip(ours, theirs):
                compare("second derivative", whole(mine), wanted, twin.tolerance)
            twin.backward(square, seed)
            twin.step()
        twin.check()

    run_ranks(ranks)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("shard", SHARDS)
def test_backward_with_create_graph(shard: str) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, SHARDS[shard])
        for seed in range(2):
            twin.backward(square, seed, create_graph=True)
            for ours, theirs in zip(twin.model.parameters(), twin.reference.parameters()):
                compare("gradient", whole(ours.grad), theirs.grad.detach(), twin.tolerance)
                ours.grad = theirs.grad = None
        twin.train()

    run_ranks(ranks)


# Errors, then a normal step


class Fragile(Tower):
    """Raises where ``at`` says: in its own forward, in a block's, or in a backward."""

    at: Any = None
    error: type[BaseException] = ValueError

    def __init__(self, depth: int = 3) -> None:
        super().__init__(depth)
        for i, block in enumerate(self.blocks):
            inner = block.up.forward

            def forward(x: Tensor, i: int = i, inner: Any = inner) -> Tensor:
                if self.at == i:
                    raise self.error("on purpose")
                return inner(x)

            block.up.forward = forward

    def forward(self, x: Tensor) -> Tensor:
        if self.at == "start":
            raise self.error("on purpose")
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if self.at == f"backward {i}":
                x.register_hook(self._fail)
        if self.at == "end":
            raise self.error("on purpose")
        return self.head(x)

    def _fail(self, grad: Tensor) -> None:
        raise self.error("on purpose")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("strategy", [None, ShardingStrategy.SHARD_GRAD_OP])
@pytest.mark.parametrize("shard", ["blocks", "one"])
def test_a_failed_step_leaves_nothing_behind(
    shard: str, strategy: ShardingStrategy | None, error: type[BaseException]
) -> None:
    """An interrupt ends a forward without running any forward hook."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Fragile, lambda m: SHARDS[shard](m, strategy=strategy))
        for seed, at in enumerate(("start", 0, 1, 2, "end", "backward 0", "backward 2")):
            twin.backward(square, seed)
            twin.step()
            twin.model.at, twin.model.error = at, error
            with pytest.raises(error, match="on purpose"):
                square(twin.model, data(99, rank)).backward()
            twin.model.at = None
            twin.zero_grad()
        twin.train(steps=1)

    run_ranks(ranks)


@pytest.mark.parametrize("at", [1, "end", "backward 1"])
def test_a_failed_first_step(at: Any) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Fragile)
        twin.model.at = at
        with pytest.raises(ValueError, match="on purpose"):
            square(twin.model, data(99, rank)).backward()
        twin.model.at = None
        twin.zero_grad()
        twin.train()

    run_ranks(ranks)


@pytest.mark.parametrize("at", [1, "backward 1"])
def test_gradients_from_before_a_failed_micro_batch_stay(at: Any) -> None:
    """A failed forward changes no gradient; a failed backward leaves those that were complete."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Fragile)
        twin.backward(square, 0)
        before = [whole(p.grad) for p in twin.model.blocks[0].parameters()]
        twin.model.at = at
        with pytest.raises(ValueError, match="on purpose"):
            square(twin.model, data(99, rank)).backward()
        twin.model.at = None
        if at == 1:
            twin.check_grads()
            twin.backward(square, 1)
            twin.step()
            twin.check()
        else:
            with torch.no_grad():
                twin.model(data(1, rank))
            after = [whole(p.grad) for p in twin.model.blocks[0].parameters()]
            assert all(torch.equal(a, b) for a, b in zip(before, after))

    run_ranks(ranks)


@pytest.mark.parametrize("strategy", [None, ShardingStrategy.SHARD_GRAD_OP])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("depth", [1, 3])
def test_an_update_after_a_failed_micro_batch_is_read_by_the_next_forward(
    error: type[BaseException], strategy: ShardingStrategy | None, depth: int
) -> None:
    """What was gathered ahead of the failure holds the weights from before the update."""

    def ranks(rank: int) -> None:
        ahead = Prefetch(depth, depth)
        shard = lambda m: by_block(m, strategy=strategy, prefetch=ahead)  # noqa: E731
        twin = Twin(rank, 2, Fragile, shard)
        twin.train(steps=2)
        for seed, at in enumerate(("start", 0, 1, 2, "end")):
            twin.backward(square, seed)
            twin.model.at, twin.model.error = at, error
            with pytest.raises(error, match="on purpose"):
                square(twin.model, data(99, rank))
            twin.model.at = None
            for optim in (twin.optim, twin.plain_optim):
                optim.step()
            twin.zero_grad()
        twin.train(steps=1)

    run_ranks(ranks)


def test_error_in_inference_then_training() -> None:
    def ranks(rank: int) -> None:
        for error in (ValueError, KeyboardInterrupt):
            twin = Twin(rank, 2, Fragile)
            for at in (0, 2, "end"):
                twin.model.at, twin.model.error = at, error
                with pytest.raises(error, match="on purpose"), torch.no_grad():
                    twin.model(data(99, rank))
                twin.model.at = None
                twin.train(steps=1)

    run_ranks(ranks)


def test_error_in_recomputation_then_a_normal_step() -> None:
    def ranks(rank: int) -> None:
        for reentrant in (False, True):
            for where in ("outside", "inside", "root"):
                twin = Twin(rank, 2, lambda: Checkpointed(where, reentrant))
                calls = [0]

                def fail(module: nn.Module, args: Any, calls: list[int] = calls) -> None:
                    calls[0] += 1
                    if calls[0] == 2:
                        raise ValueError("on purpose")

                handle = twin.model.blocks[1].norm.register_forward_pre_hook(fail)
                with pytest.raises(ValueError, match="on purpose"):
                    square(twin.model, data(99, rank)).backward()
                handle.remove()
                twin.zero_grad()
                twin.train(steps=1)

    run_ranks(ranks)


@pytest.mark.parametrize(
    ("at", "error"),
    # An interrupt in forward runs no hook, so there the leaves are back in the next forward only.
    [(1, ValueError), ("backward 1", ValueError), ("backward 1", KeyboardInterrupt)],
)
def test_after_a_failure_the_model_holds_its_leaves(at: Any, error: type[BaseException]) -> None:
    """What follows an error is often ``model.zero_grad()``, or a checkpoint of what was trained."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Fragile)
        twin.train(steps=1)
        before = list(twin.model.parameters())
        twin.model.at, twin.model.error = at, error
        with pytest.raises(error, match="on purpose"):
            square(twin.model, data(99, rank)).backward()
        after = list(twin.model.parameters())
        assert all(a is b for a, b in zip(after, before, strict=True))
        twin.model.zero_grad()

    run_ranks(ranks)


# Modules with ways of their own


class Attention(nn.Module):
    """Reads out_proj.weight without calling out_proj."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out, weights = self.attention(x[None], x[None], x[None])
        return self.norm(out[0]) + weights.sum()


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, 5, num_layers=2, bidirectional=True)
        self.head = nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH, padding_idx=0)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 4).long().clamp(max=10)
        return self.block(self.embedding(tokens)).mean(0)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, affine=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.norm(self.first(x)))


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spectral = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.weight = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.orthogonal = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.orthogonal(self.weight(self.spectral(x))))


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.up = nn.ConvTranspose1d(WIDTH, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.conv(x[None, None]).mean((0, 1)).t())


MODULES = {
    "attention": Attention,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "embedding": Embedded,
    "batch_norm": Normalised,
    "parametrized": Parametrized,
    "convolution": Convolutional,
    "transformer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 5, dropout=0.0),
    "prelu": lambda: nn.Sequential(nn.Linear(WIDTH, 3), nn.PReLU(3), nn.GroupNorm(3, 3)),
}


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("split", [False, True], ids=["one", "children"])
def test_modules(kind: str, split: bool) -> None:
    """As one unit, and with every child a unit of its own."""

    def shard(model: nn.Module) -> nn.Module:
        if not split:
            return fully_shard(model)
        children = list(model.children())
        return fully_shard(model, units=wrap.by_fn(lambda _, m: any(m is c for c in children)))

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, MODULES[kind], shard)
        twin.train()
        x = data(7, rank)
        twin.model.eval()
        for plain in twin.plain:
            plain.eval()
        with torch.no_grad():
            compare("evaluation", twin.model(x), twin.mine(x), twin.tolerance)
        compare("evaluation", twin.model(x), twin.mine(x), twin.tolerance)
        twin.model.train()
        for plain in twin.plain:
            plain.train()
        twin.train()

    run_ranks(ranks)


@pytest.mark.parametrize("mode", ["eager", "checkpointed"])
def test_recurrent_modules_inside_a_unit(mode: str) -> None:
    """The unit is a module around the recurrent one, which reads its second list of weights."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Recurrent(nn.LSTM)

        def forward(self, x: Tensor) -> Tensor:
            if mode == "checkpointed":
                return checkpoint(self.inner, x, use_reentrant=False)
            return self.inner(x)

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Wrapped, one_unit)
        twin.train()
        flat = twin.model.inner.rnn._flat_weights
        assert all(a is b for a, b in zip(flat, twin.model.inner.rnn.parameters(), strict=True))

    run_ranks(ranks)


# What goes in and out


class Pair(NamedTuple):
    first: Tensor
    second: Any


@dataclasses.dataclass
class Record:
    first: Tensor
    second: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    first: Tensor
    second: Any = None


@dataclasses.dataclass(slots=True)
class Slotted:
    first: Tensor
    second: Any = None


class ModelOutput(collections.OrderedDict):
    """As in Hugging Face transformers: fields are attributes and items, None left out."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if value is not None:
                super().__setitem__(f.name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        args = tuple(getattr(self, f.name) for f in dataclasses.fields(self))
        return (self.__class__, args)


@dataclasses.dataclass
class TextOutput(ModelOutput):
    first: Tensor | None = None
    loss: Tensor | None = None
    second: Any = None


class Plain:
    def __init__(self, first: Tensor, second: Any = None) -> None:
        self.first, self.second = first, second


class Sealed:
    """No tensor in it can be found: it hides behind a closure."""

    __slots__ = ("get",)

    def __init__(self, first: Tensor, second: Any = None) -> None:
        self.get = lambda: (first, second)


PACK: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda a, b: (a, b), lambda o: o),
    "list": (lambda a, b: [a, [b, "text", None]], lambda o: (o[0], o[1][0])),
    "dict": (lambda a, b: {"a": a, "n": {"b": [b], 3: None}}, lambda o: (o["a"], o["n"]["b"][0])),
    "unsortable": (lambda a, b: {1: a, "b": b}, lambda o: (o[1], o["b"])),
    "named": (Pair, lambda o: (o.first, o.second)),
    "record": (Record, lambda o: (o.first, o.second)),
    "frozen": (Frozen, lambda o: (o.first, o.second)),
    "slotted": (Slotted, lambda o: (o.first, o.second)),
    "nested": (lambda a, b: Record((a,), {"x": Frozen(b)}),
               lambda o: (o.first[0], o.second["x"].first)),
    "ordered": (lambda a, b: collections.OrderedDict(a=a, b=b), lambda o: (o["a"], o["b"])),
    "model": (lambda a, b: TextOutput(first=a, second=(b,)), lambda o: (o["first"], o.second[0])),
    "default": (lambda a, b: collections.defaultdict(list, a=a, b=b), lambda o: (o["a"], o["b"])),
    "deque": (lambda a, b: collections.deque([a, b]), tuple),
    "object": (Plain, lambda o: (o.first, o.second)),
    "object in list": (lambda a, b: [Plain(a, {"x": Plain(b)})],
                       lambda o: (o[0].first, o[0].second["x"].first)),
}  # fmt: skip


class Talkative(nn.Module):
    """A stack of modules that speak to one another in structures."""

    def __init__(self, kind: str, depth: int = 2) -> None:
        super().__init__()
        self.kind = kind
        self.parts = nn.ModuleList(Part(kind) for _ in range(depth))

    def forward(self, x: Tensor) -> Any:
        message = PACK[self.kind][0](x, x * 2)
        for part in self.parts:
            message = part(message, scale=torch.ones(1, dtype=x.dtype))
        return message


class Part(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.block = Block()
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, message: Any, *, scale: Tensor, missing: Any = None) -> Any:
        pack, unpack = PACK[self.kind]
        first, second = unpack(message)
        return pack(self.block(first) * scale, self.side(second))


def by_part(model: nn.Module, **options: Any) -> nn.Module:
    return fully_shard(model, units=wrap.by_class({Part}), **options)


@pytest.mark.parametrize("kind", PACK)
def test_structures(kind: str) -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        assert type(out) is type(PACK[kind][0](x, x))
        first, second = PACK[kind][1](out)
        return first.square().mean() + second.mean()

    train_twin(lambda: Talkative(kind), forward, by_part)


@pytest.mark.parametrize("kind", PACK)
def test_structures_are_released_on_time(kind: str) -> None:
    """A unit is released by its own backward, not by the end of everybody's."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Talkative(kind, depth=3), by_part)
        first, middle, last = (u for u in units(twin.model) if "parts" in u.name)
        seen: list[bool] = []

        def look(grad: Tensor) -> None:
            seen.append(bool(last.holds & {Hold.KEPT, Hold.BACKWARD}))

        x = data(1, rank).requires_grad_()
        handle = twin.model.parts[0].register_forward_hook(
            lambda m, a, out: PACK[kind][1](out)[0].register_hook(look) and None
        )
        a, b = PACK[kind][1](twin.model(x))
        (a.mean() + b.mean()).backward()
        handle.remove()
        assert seen == [False]
        assert not middle.holds and not first.holds

    run_ranks(ranks)


def test_structures_that_hide_their_tensors() -> None:
    """D14: a warning, once, and right results."""
    PACK["sealed"] = (Sealed, lambda o: o.get())

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Talkative("sealed"), by_part)
        forward = lambda m, x: sum(t.square().mean() for t in m(x).get())  # noqa: E731
        with pytest.warns(UserWarning, match="unit '[a-zA-Z.0-9]*' returned a Sealed") as found:
            twin.train(forward)
        assert len(found) == 2  # one for each unit with parameters, not for each step

    try:
        run_ranks(ranks)
    finally:
        del PACK["sealed"]


class Quirky(nn.Module):
    """Outputs with a catch."""

    def __init__(self, quirk: str) -> None:
        super().__init__()
        self.quirk = quirk
        self.block = Block()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.odd = Odd(quirk)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.block(x))
        out = self.odd(y)
        if self.quirk == "in-place":
            out.mul_(2)
            out += 1
            return self.inner(out.relu_())
        if self.quirk == "view":
            out[:, 0] = 3.0
            return out
        return self.inner(out)


class Odd(nn.Module):
    def __init__(self, quirk: str) -> None:
        super().__init__()
        self.quirk = quirk
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.quirk == "input":
            return x
        if self.quirk == "detached":
            return self.layer(x).detach()
        if self.quirk == "in-place on input":
            return x.mul_(2).add_(self.layer(torch.ones_like(x)))
        if self.quirk == "bare weight":
            return x + self.layer.weight.mean(0)
        if self.quirk == "view of weight":
            return self.layer.weight[:3]
        if self.quirk == "no_grad":
            with torch.no_grad():
                return self.layer(x)
        if self.quirk == "partly no_grad":
            with torch.no_grad():
                scale = self.layer(x).mean()
            return self.layer(x) * scale
        if self.quirk == "slice":
            return self.layer(x)[:, :]
        if self.quirk == "twice":
            return self.layer(x) + self.layer(x * 2)
        return self.layer(x)


QUIRKS = ("input", "detached", "in-place on input", "bare weight", "view of weight", "no_grad",
          "partly no_grad", "slice", "in-place", "view", "twice")  # fmt: skip


@pytest.mark.parametrize("quirk", QUIRKS)
def test_quirks_of_outputs(quirk: str) -> None:
    shard = lambda m: fully_shard(m, units=wrap.by_class({Block, Odd}))  # noqa: E731
    train_twin(lambda: Quirky(quirk), shard=shard)


# Hooks of the user


def test_forward_and_backward_hooks_of_the_user_see_what_they_would_see() -> None:
    def attach(model: nn.Module, log: list[Any]) -> None:
        for module in (model, model.blocks[0], model.blocks[0].up, model.head):
            module.register_forward_pre_hook(lambda m, a: log.append(("pre", a[0].detach())))
            module.register_forward_hook(lambda m, a, o: log.append(("out", o.detach())))
            module.register_full_backward_hook(
                lambda m, i, o: log.extend(("grad", g.clone()) for g in (*i, *o) if g is not None)
            )
            module.register_full_backward_pre_hook(
                lambda m, o: log.append(("before", o[0].detach().clone()))
            )
            module.register_forward_hook(lambda m, a, o: o * 1.5)

    def ranks(rank: int, first: bool) -> None:
        for shard in (by_block, one_unit):
            log: list[Any] = []
            wanted: list[Any] = []

            def build() -> nn.Module:
                return Tower(2)

            def hooked(model: nn.Module, log: list[Any] = log) -> None:
                if first:
                    attach(model, log)
                shard(model)
                if not first:
                    attach(model, log)

            twin = Twin(rank, 2, build, hooked)
            for i, plain in enumerate(twin.plain):
                attach(plain, wanted if i == rank else [])
            for seed in range(2):
                log.clear()
                wanted.clear()
                twin.backward(lambda m, x: square(m, x.clone().requires_grad_()), seed)
                assert [kind for kind, _ in log] == [kind for kind, _ in wanted]
                for (kind, ours), (_, theirs) in zip(log, wanted):
                    scale = 2 if kind in ("grad", "before") else 1
                    compare(kind, ours, theirs * scale, twin.tolerance)
                twin.step()
            twin.check()

    run_ranks(ranks, 2, True)
    run_ranks(ranks, 2, False)


def test_forward_hook_of_the_user_may_use_the_weight() -> None:
    """A regulariser written as a forward hook, registered before sharding: it sees full weights."""

    def build() -> nn.Module:
        model = Tower(2)
        for block in model.blocks:
            block.up.register_forward_hook(lambda m, a, o: o + m.weight.square().mean())
        return model

    train_twin(build)


# Several models


def test_teacher_and_student_interleaved() -> None:
    """A frozen teacher runs layer by layer between the student's layers, on the same device."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = Tower(2), Tower(2)
            self.teacher.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            s = t = x
            for mine, theirs in zip(self.student.blocks, self.teacher.blocks):
                s = mine(s)
                with torch.no_grad():
                    t = theirs(t)
                s = s + t * 0.1
            return self.student.head(s) - self.teacher.head(t.detach())

    train_twin(Both)


@pytest.mark.filterwarnings("ignore:the forward of unit")
def test_separate_models_step_by_step() -> None:
    """GAN-like: two models, one feeding the other, updated in turn; each sharded on its own."""

    def ranks(rank: int) -> None:
        def build() -> nn.Module:
            return nn.ModuleDict(
                {"maker": Tower(1), "judge": nn.Sequential(nn.Linear(2, WIDTH), Tower(1))}
            )

        def shard(pair: nn.Module) -> None:
            by_block(pair["maker"])
            by_block(pair["judge"])

        twin = Twin(rank, 2, build, shard)
        fake = lambda m, x: m["judge"](m["maker"](x)).square().mean()  # noqa: E731
        real = lambda m, x: (m["judge"](x[:, :2]) - 1).square().mean()  # noqa: E731

        def judged(m: nn.Module, x: Tensor) -> Tensor:
            with torch.no_grad():
                made = m["maker"](x)
            return real(m, x) + m["judge"](made).square().mean()

        def both(m: nn.Module, x: Tensor) -> Tensor:
            return real(m, x) + m["judge"](m["maker"](x).detach()).square().mean()

        for seed, forward in enumerate((judged, fake, both, fake, judged, real)):
            twin.backward(forward, seed)
            twin.step()
        twin.check()

    run_ranks(ranks)


def test_backward_of_one_model_inside_the_backward_of_another() -> None:
    """A tensor hook in one model's backward runs a whole training step of another's."""

    def ranks(rank: int) -> None:
        outer = Twin(rank, 2, two_blocks)
        inner = Twin(rank, 2, lambda: Tower(1), seed=1)

        def nested_step(grad: Tensor) -> None:
            with torch.enable_grad():
                inner.backward(square, 5)

        for seed in range(2):
            xs = outer.inputs(seed)
            handle = outer.model.blocks[0].register_forward_hook(
                lambda m, a, out: out.register_hook(nested_step) and None
            )
            loss = square(outer.model, xs[rank])
            handle.remove()
            loss.backward()
            torch.stack([square(m, x) for m, x in zip(outer.plain, xs)]).mean().backward()
            inner.step()
            outer.step()
        inner.check()
        outer.check()

    run_ranks(ranks)


def test_training_in_a_thread() -> None:
    """Autograd state is per thread; the library's must follow."""
    import threading

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks)
        errors: list[BaseException] = []

        def work() -> None:
            try:
                twin.train()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert not errors, errors
        twin.train()

    run_ranks(ranks)


@pytest.mark.parametrize("strategy", [None, ShardingStrategy.SHARD_GRAD_OP])
def test_a_frozen_model_is_released_after_a_forward_in_grad_mode(
    strategy: ShardingStrategy | None,
) -> None:
    """A teacher called without no_grad: no backward will come that could release it."""

    def ranks(rank: int) -> None:
        teacher = by_block(Tower(2).double().requires_grad_(False), strategy=strategy)
        teacher(data(0, rank))
        assert_at_rest(teacher)

    run_ranks(ranks)


# Weights that change between forward and backward (D8)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("how", ["optimizer", "by hand", "scope"])
def test_weights_written_before_backward_are_an_error(strategy: str, how: str) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Tower, lambda m: by_block(m, strategy=ShardingStrategy[strategy]))
        twin.backward(square, 0)
        loss = square(twin.model, data(1, rank))
        if how == "optimizer":
            twin.step()
        elif how == "by hand":
            for model in (twin.model, twin.reference):
                with torch.no_grad():
                    model.blocks[1].up.weight.mul_(2.0)
        else:
            with gathered(twin.model, writeback=True), torch.no_grad():
                twin.model.blocks[1].up.weight.mul_(2.0)
            with torch.no_grad():
                twin.reference.blocks[1].up.weight.mul_(2.0)
        name = "blocks.1.up.weight" if how == "by hand" else "blocks"  # the others write more
        with pytest.raises(RuntimeError, match=f"parameter '{name}.*between the unit's forward"):
            loss.backward()
        twin.zero_grad()
        twin.train()

    run_ranks(ranks)


def test_weights_that_stayed_gathered_are_those_of_the_forward() -> None:
    """Plain torch refuses this; kept weights are read by nobody else, so it is exact here."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower), strategy=ShardingStrategy.SHARD_GRAD_OP)
        plain = seeded(Tower)
        loss = square(model, data(1, rank))
        with torch.no_grad():
            model.blocks[1].up.weight.mul_(2.0)
        loss.backward()
        square(plain, torch.cat([data(1, 0), data(1, 1)])).backward()
        for param, other in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(param.grad.full_tensor(), other.grad)

    run_ranks(ranks)


def test_an_optimizer_in_backward_after_two_uses() -> None:
    """A weight that two forwards used is stepped once, with the sum of both gradients."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Tower)

        @torch.no_grad()
        def step(param: nn.Parameter) -> None:
            param.sub_(param.grad, alpha=0.1)
            param.grad = None

        for model in (twin.model, twin.reference):
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(step)
        for seed in range(2):
            twin.backward(lambda m, x: square(m, x) + square(m, 2 * x), seed)
        twin.check()

    run_ranks(ranks)
