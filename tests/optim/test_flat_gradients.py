"""Gradients of plain parameters over shards: set, accumulated, clipped and cleared."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import (
    accumulate,
    clip_grad_norm_,
    no_sync,
    register_post_reduce_hook,
)
from fsdp_compose.core.guards.moved_parameters import shard_of
from fsdp_compose.optim.plain_parameters import (
    flat_parameters,
    named_local_parameters,
)
from fsdp_compose.sharded import is_sharded, to_local

from flat_ways import WAYS, local, twin, ways
from harness import run_ranks
from models import (
    Tower,
    by_block,
    compare,
    data,
    seeded,
    square,
    units,
    whole,
)

pytestmark = pytest.mark.filterwarnings("error")


def check_gradients(model: nn.Module) -> None:
    """Every plain gradient is what the parameters have, in the same memory, and padding is zero."""
    for unit in units(model):
        for bucket in unit.buckets:
            leaf = next(
                p for p in flat_parameters(model) if p.data_ptr() == shard_of(bucket).data_ptr()
            )
            assert type(leaf.grad) is Tensor
            assert leaf.grad.is_contiguous() and leaf.grad.shape == leaf.shape
            pieces = leaf.grad.split(bucket.views.splits)
            for entry, k in zip(bucket.entries, bucket.views.pieces):
                grad = entry.param.grad
                if grad is None:
                    assert not pieces[k].any()
                    continue
                assert is_sharded(grad)
                if pieces[k].numel():
                    assert to_local(grad).data_ptr() == pieces[k].data_ptr()
            gaps = set(range(len(pieces))) - set(bucket.views.pieces)
            assert not any(pieces[k].any() for k in gaps)
    for name, leaf in named_local_parameters(model).items():
        grad = dict(model.named_parameters())[name].grad
        assert (leaf.grad is None) == (grad is None)
        if grad is not None:
            assert type(leaf.grad) is Tensor
            assert leaf.grad.data_ptr() == to_local(grad).data_ptr()


class Partly(Tower):
    """Uses some parameters only, chosen by an attribute."""

    skip_head = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x if self.skip_head else self.head(x)


def test_gradients_are_slices_of_one_buffer() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(Partly))
        kept = [*flat_parameters(model), *named_local_parameters(model).values()]
        square(model, data(0, rank)).backward()
        check_gradients(model)
        model.skip_head = True
        square(model, data(1, rank)).backward()
        check_gradients(model)
        model.zero_grad()
        square(model, data(1, rank)).backward()
        check_gradients(model)
        assert len(kept)

    run_ranks(ranks)


def test_gradients_that_exist_already_are_taken_over() -> None:
    """Gradients that are there already are taken over; what lies between them is zero."""

    def ranks(rank: int) -> None:
        torch.use_deterministic_algorithms(True)  # memory that nobody wrote is NaN
        model = by_block(seeded(Tower))
        square(model, data(0, rank)).backward()
        before = [whole(p.grad) for p in model.parameters()]
        kept = [*flat_parameters(model), *named_local_parameters(model).values()]
        check_gradients(model)
        for p, grad in zip(model.parameters(), before):
            assert torch.equal(whole(p.grad), grad)
        assert len(kept)

    run_ranks(ranks)


CLEARS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "optimizer, None": lambda model, optim: optim.zero_grad(set_to_none=True),
    "optimizer, zero": lambda model, optim: optim.zero_grad(set_to_none=False),
    "module, None": lambda model, optim: model.zero_grad(set_to_none=True),
    "module, zero": lambda model, optim: model.zero_grad(set_to_none=False),
}


@ways
@pytest.mark.parametrize("clear", CLEARS)
def test_clearing_on_either_side_clears_both(clear: str, way: str) -> None:
    def ranks(rank: int) -> None:
        made = twin(rank, 2, way)
        for seed in range(3):
            for part in range(2):  # two backwards add up
                made.backward(square, 10 * seed + part)
            made.check_grads()
            made.optim.step()
            made.plain_optim.step()
            CLEARS[clear](made.model, made.optim)
            made.plain_optim.zero_grad()
        made.check()

    run_ranks(ranks)


@ways
def test_clearing_one_parameter(way: str) -> None:
    def ranks(rank: int) -> None:
        made = twin(rank, 2, way)
        made.backward(square, 0)
        for model in (made.model, made.reference):
            model.blocks[0].up.weight.grad = None
        made.backward(square, 1)
        made.step()
        made.check()

    run_ranks(ranks)


@ways
def test_accumulation(way: str) -> None:
    def ranks(rank: int) -> None:
        made = twin(rank, 2, way)
        for seed in range(2):
            with no_sync(made.model):
                made.backward(square, 10 * seed)
                assert all(p.grad is None for p in WAYS[way](made.model))
            made.backward(square, 10 * seed + 1)
            made.step()
            with accumulate(made.model, keep="sharded"):
                made.backward(square, 10 * seed + 2)
            made.backward(square, 10 * seed + 3)
            made.step()
        made.check()

    run_ranks(ranks)


@ways
def test_clipping_the_module_clips_them(way: str) -> None:
    def ranks(rank: int) -> None:
        made = twin(rank, 2, way)
        for seed in range(3):
            made.backward(square, seed)
            norm = clip_grad_norm_(made.model, 0.01)
            wanted = nn.utils.clip_grad_norm_(made.reference.parameters(), 0.01)
            compare("norm", whole(norm), wanted, made.tolerance)
            made.step()
        made.check()

    run_ranks(ranks)


@ways
def test_gradient_hooks_that_replace_a_gradient(way: str) -> None:
    def ranks(rank: int) -> None:
        made = twin(rank, 2, way)
        for model in (made.model, made.reference):
            model.blocks[1].down.weight.register_hook(lambda grad: grad * 3)
        made.train()

    run_ranks(ranks)


@ways
def test_backward_to_some_parameters(way: str) -> None:
    """What was not asked for is not in the flat gradient either."""

    def ranks(rank: int) -> None:
        made = twin(rank, 2, way, "sgd")
        xs = made.inputs(0)
        loss = square(made.model, xs[rank])
        loss.backward(inputs=[made.model.blocks[0].up.weight, made.model.head.bias])
        plain = torch.stack([square(m, x) for m, x in zip(made.plain, xs)]).mean()
        plain.backward(inputs=[made.reference.blocks[0].up.weight, made.reference.head.bias])
        if way == "flat":
            kept = flat_parameters(made.model) + local(made.model)
            check_flat = [p for p in flat_parameters(made.model) if p.grad is not None]
            assert len(check_flat) == 2 and kept
        for p in made.reference.parameters():  # a flat tensor decays as a whole
            in_bucket = any(p is q for q in made.reference.blocks[0].parameters())
            in_root = any(
                p is q
                for q in (*made.reference.first.parameters(), *made.reference.head.parameters())
            )
            if way == "flat" and p.grad is None and (in_bucket or in_root):
                p.grad = torch.zeros_like(p)
        made.optim.step()
        made.plain_optim.step()
        made.check()

    run_ranks(ranks)


@ways
def test_a_graph_over_gradients_reaches_them(way: str) -> None:
    """With create_graph autograd accumulates gradients itself."""

    def ranks(rank: int) -> None:
        made = twin(rank, 2, way)
        for seed in range(2):
            loss, plain = made.losses(square, seed)
            ours = torch.autograd.grad(loss, list(made.model.parameters()), create_graph=True)
            theirs = torch.autograd.grad(
                plain, list(made.reference.parameters()), create_graph=True
            )
            sum(g.square().sum() for g in ours).backward()
            sum(g.square().sum() for g in theirs).backward()
            made.step()
        made.check()

    run_ranks(ranks)


def test_a_backward_that_keeps_its_graph_sets_them() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        kept = [*flat_parameters(model), *named_local_parameters(model).values()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns once in a process
            square(model, data(0, rank)).backward(create_graph=True)
        grads = [whole(p.grad) for p in model.parameters()]
        other = by_block(seeded(Tower))
        square(other, data(0, rank)).backward()
        for p, q, name in zip(
            model.parameters(), other.parameters(), dict(model.named_parameters())
        ):
            torch.testing.assert_close(whole(p.grad), whole(q.grad))
            torch.testing.assert_close(named_local_parameters(model)[name].grad, to_local(q.grad))
        theirs = flat_parameters(other)
        square(other, data(0, rank)).backward()
        for ours, wanted in zip(flat_parameters(model), theirs):
            torch.testing.assert_close(2 * ours.grad, wanted.grad)
        model.zero_grad()
        assert len(grads) and len(kept)

    run_ranks(ranks)


def test_a_graph_adds_to_what_plain_parameters_hold() -> None:
    """They were cleared, and the sharded ones do not keep the old."""

    def ranks(rank: int) -> None:
        model, other = by_block(seeded(Tower)), by_block(seeded(Tower))
        plain = named_local_parameters(model)
        square(model, data(0, rank)).backward()
        for param in plain.values():
            assert param.grad is not None
            param.grad = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns once in a process
            square(model, data(1, rank)).backward(create_graph=True)
        square(other, data(1, rank)).backward()
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(whole(ours.grad), whole(theirs.grad))

    run_ranks(ranks)


@ways
def test_an_optimizer_inside_backward_frees_gradients(way: str) -> None:
    def ranks(rank: int) -> None:
        made = twin(rank, 2, way, "sgd")
        leaves = WAYS[way](made.model)

        def step(module: nn.Module, params: list[nn.Parameter]) -> None:
            made.optim.step()
            made.optim.zero_grad()

        handle = register_post_reduce_hook(made.model, step)
        for seed in range(3):
            made.backward(square, seed)
            assert all(p.grad is None for p in leaves)
            assert all(p.grad is None for p in made.model.parameters())
            made.plain_optim.step()
            made.plain_optim.zero_grad()
        made.check()
        handle.remove()

    run_ranks(ranks)
