"""Tied weights, inside a unit and across units, are one parameter with one gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose import (
    Prefetch,
    ShardingStrategy,
    fully_shard,
    undo,
    wrap,
)

from harness import run_ranks, simulate_ranks
from models import (
    WIDTH,
    Block,
    Tower,
    Twin,
    by_block,
    compare,
    data,
    sgd,
    square,
    whole,
)


def test_undo_refuses_to_cut_a_tie() -> None:
    def ranks(rank: int) -> None:
        model = Tied("across").double()
        shard_tied(model)
        for part in (model.body[0], model.body[1]):
            with pytest.raises(ValueError, match="tied between units inside and outside"):
                undo(part)
        undo(model)
        assert model.body[0].up.weight is model.body[1].up.weight

    run_ranks(ranks)


@pytest.mark.parametrize("tie", ["inside", "across", "three"])
def test_deep_copy_keeps_ties(tie: str) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Tied(tie), shard_tied)
        twin.train()
        twin.model = copy.deepcopy(twin.model)
        twin.optim = sgd(twin.model.parameters())
        twin.plain_optim = sgd(twin.plain[0].parameters())
        twin.train()

    run_ranks(ranks)


class Tied(nn.Module):
    """The same weight in one unit twice, in two units, in three places, or in an idle owner."""

    def __init__(self, tie: str) -> None:
        super().__init__()
        self.tie = tie
        self.emb = nn.Linear(WIDTH, WIDTH)
        self.body = nn.ModuleList(Block(hidden=WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        if tie == "inside":
            self.body[0].down.weight = self.body[0].up.weight
            self.head.weight = self.emb.weight
        elif tie == "across":
            self.body[1].up.weight = self.body[0].up.weight
        elif tie == "root":
            self.body[1].up.weight = self.emb.weight
            self.head.weight = self.emb.weight
        elif tie == "three":
            self.body[1].up.weight = self.body[0].up.weight
            self.body[2].down.weight = self.body[0].up.weight
            self.head.weight = self.body[0].up.weight
        elif tie == "module":
            self.body[2] = self.body[0]
        elif tie == "idle":
            self.body[1].up.weight = self.body[0].up.weight
            self.body[2].up.weight = self.body[0].up.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x)
        for i, block in enumerate(self.body):
            if self.tie != "idle" or i > 0:
                x = block(x)
        return self.head(x)


def shard_tied(model: nn.Module, **options: Any) -> nn.Module:
    return fully_shard(model, units=wrap.by_class({Block}), **options)


TIES = ["inside", "across", "root", "three", "module", "idle"]


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("strategy", [None, ShardingStrategy.SHARD_GRAD_OP])
def test_tied_weights(tie: str, strategy: ShardingStrategy | None) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Tied(tie), lambda m: shard_tied(m, strategy=strategy))
        pairs = dict(twin.model.named_parameters(remove_duplicate=False))
        theirs = dict(twin.plain[0].named_parameters(remove_duplicate=False))
        for a in pairs:
            for b in pairs:
                assert (pairs[a] is pairs[b]) == (theirs[a] is theirs[b])
        twin.train()
        for seed in range(2):
            twin.backward(square, seed)
            twin.backward(square, seed + 10)
            twin.step()
        twin.check()

    run_ranks(ranks)


@pytest.mark.filterwarnings("ignore:the forward of unit")
@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("way", ["unshard", "unshard all", "gathered", "prefetch_units"])
def test_a_weight_kept_by_one_unit_is_read_by_another(way: str, kept: int) -> None:
    """What was written since is read, also where the other unit holds it for a scope."""

    def ranks(rank: int) -> None:
        shard = lambda m: shard_tied(m, strategy=ShardingStrategy.SHARD_GRAD_OP)  # noqa: E731
        twin = Twin(rank, 2, lambda: Tied("across"), shard)
        twin.model.body[kept](data(0, rank))
        with torch.no_grad():
            for model in (twin.model, twin.reference):
                model.body[0].up.weight.mul_(0.5)
        other, wanted = twin.model.body[1 - kept], twin.reference.body[0].up.weight
        if way == "gathered":
            with fc.gathered(other):
                assert torch.equal(other.up.weight, wanted)
        elif way == "prefetch_units":
            fc.prefetch_units(twin.model, [other])
            twin.model.body[2](data(0, rank))  # a pass that does not use it
        else:
            opened = other if way == "unshard" else twin.model.body
            fc.unshard(opened)
            assert torch.equal(other.up.weight, wanted)
            fc.reshard(opened)
        twin.losses(square, 1)
        twin.train()

    simulate_ranks(ranks)


@pytest.mark.filterwarnings("ignore:the forward of unit")
def test_a_bucket_beside_a_kept_one_is_fresh() -> None:
    """A unit that is gathered ahead has one bucket that another keeps, and one of its own."""

    def build() -> nn.Module:
        model = Tied("across")
        model.body[0].down.weight.requires_grad_(False)
        return model

    def ranks(rank: int) -> None:
        shard = lambda m: shard_tied(m, strategy=ShardingStrategy.SHARD_GRAD_OP)  # noqa: E731
        twin = Twin(rank, 2, build, shard)
        twin.model.body[1](data(0, rank))
        fc.prefetch_units(twin.model, [twin.model.body[0]])
        for model in (twin.model, twin.reference):
            model.body[0].down.weight.mul_(0.5)
        twin.losses(square, 1)

    simulate_ranks(ranks)


@pytest.mark.filterwarnings("ignore:the forward of unit")
@pytest.mark.parametrize("first", [0, 1])
def test_a_tied_weight_kept_by_an_idle_unit_is_fresh(first: int) -> None:
    """One unit stays gathered, its loss dropped; the other trains the weight they share."""

    def ranks(rank: int) -> None:
        shard = lambda m: shard_tied(m, strategy=ShardingStrategy.SHARD_GRAD_OP)  # noqa: E731
        twin = Twin(rank, 2, lambda: Tied("across"), shard)
        idle, used = (0, 1) if first == 0 else (1, 0)
        twin.model.body[idle](data(0, rank))
        for seed in range(3):
            twin.backward(lambda m, x: square(m.body[used], x), seed)
            twin.step()
        twin.train(steps=2)

    run_ranks(ranks)


@pytest.mark.parametrize("strategy", [None, ShardingStrategy.SHARD_GRAD_OP])
@pytest.mark.parametrize("between", ["inference", "failure", "dropped loss"])
def test_kept_weights_are_fresh_after_every_change(
    between: str, strategy: ShardingStrategy | None
) -> None:
    """Kept by a dropped loss, changed, read by a forward that keeps nothing, and changed again."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Tower(2), lambda m: by_block(m, strategy=strategy))
        x = data(9, rank)
        for seed in range(2):
            square(twin.model, x)
            for _ in range(3):
                with torch.no_grad():
                    for model in (twin.model, twin.reference):
                        for param in model.parameters():
                            param.mul_(0.9)
                if between == "inference":
                    with torch.no_grad():
                        compare("output", twin.model(x), twin.reference(x), twin.tolerance)
                elif between == "failure":
                    handle = twin.model.head.register_forward_pre_hook(lambda m, a: 1 / 0)
                    with pytest.raises(ZeroDivisionError):
                        twin.model(x)
                    handle.remove()
                else:
                    compare("output", twin.model(x), twin.reference(x), twin.tolerance)
            twin.backward(square, seed)
            twin.step()

    run_ranks(ranks)


def test_a_tied_weight_gathered_ahead_is_fresh() -> None:
    """A forward fails when the weight's owner is gathered ahead; then the weight is changed; then
    the unit that borrows it runs first."""

    def ranks(rank: int) -> None:
        shard = lambda m: shard_tied(m, prefetch=Prefetch(3, 1))  # noqa: E731
        twin = Twin(rank, 2, lambda: Tied("root"), shard)
        twin.train(steps=2)
        handle = twin.model.body[0].norm.register_forward_pre_hook(lambda m, a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            twin.model(data(9, rank))
        handle.remove()
        with torch.no_grad():
            for model in (twin.model, twin.reference):
                for param in model.parameters():
                    param.mul_(0.9)
        twin.backward(square, 5)
        twin.step()

    run_ranks(ranks)


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_tied_weights_with_checkpointing(tie: str, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    def build() -> nn.Module:
        model = Tied(tie)
        for block in {*model.body}:
            inner = block.forward
            block.forward = lambda x, inner=inner: inner(x)
        return model

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        x = model.emb.forward(x) if False else x
        return checkpoint(model, x.requires_grad_(), use_reentrant=reentrant).square().mean()

    def ranks(rank: int) -> None:
        Twin(rank, 2, build, shard_tied).train(forward)

    run_ranks(ranks)


@pytest.mark.parametrize("tie", TIES)
def test_tied_weights_and_autograd_grad(tie: str) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Tied(tie), shard_tied)
        for graph in (False, True):
            loss, plain = twin.losses(square, 0)
            options = {"allow_unused": True, "create_graph": graph}
            ours = torch.autograd.grad(loss, list(twin.model.parameters()), **options)
            theirs = torch.autograd.grad(plain, list(twin.plain[0].parameters()), **options)
            for name, mine, wanted in zip(dict(twin.model.named_parameters()), ours, theirs):
                if wanted is not None:
                    compare(name, whole(mine), wanted.detach(), twin.tolerance)
                else:
                    assert mine is None or not whole(mine).any()
        del ours, theirs, loss, mine  # the graph over the gradients keeps units gathered
        if tie != "idle":
            twin.model.zero_grad()
            twin.train()

    run_ranks(ranks)
