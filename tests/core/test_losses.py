"""Losses made from several units' outputs, and a head that is applied to chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    checkpoint,
)

from fsdp_compose import (
    ShardingStrategy,
    accumulate,
    fully_shard,
    is_fully_sharded,
    reshard,
    unshard,
    wrap,
)
from fsdp_compose.base.process import here

from autograd_steps import STRATEGIES, Forward
from harness import run_ranks
from models import (
    SHARDS,
    WIDTH,
    Block,
    Twin,
    assert_at_rest,
    compare,
    data,
    one_unit,
    square,
    two_blocks,
)


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
            here.traffic.reset()
            forward(twin.model, data(seed, rank)).backward()
            assert (here.traffic.gathers, here.traffic.reduces) == (3, 3)
            twin.zero_grad()
            twin.backward(forward, seed)
            twin.step()
        twin.check()

    run_ranks(ranks)


@pytest.mark.filterwarnings("ignore:the forward of unit")
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_a_backward_for_each_chunk(strategy: ShardingStrategy | None, world: int) -> None:
    """Memory-saving cross-entropy: no more than one chunk of logits exists at a time."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, world, Headed, lambda m: by_child(m, strategy=strategy))
        for seed in range(3):
            states = twin.model.states(data(seed, rank))
            cut = states.detach().requires_grad_()
            here.traffic.reset()
            unshard(twin.model.head)
            with accumulate(twin.model.head, keep="unsharded"):
                for part in cut.chunk(CHUNKS):
                    loss = twin.model.head(part).logsumexp(-1).sum() / cut.shape[0]
                    loss.backward()
            reshard(twin.model.head)
            assert (here.traffic.gathers, here.traffic.reduces) == (1, 1)
            states.backward(cut.grad)
            xs = twin.inputs(seed)
            torch.stack([chunked(m, x) for m, x in zip(twin.plain, xs)]).mean().backward()
            twin.step()
        twin.check()

    run_ranks(ranks, world)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_calls_whose_gradients_arrive_apart(order: tuple[int, int]) -> None:
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
        here.traffic.reset()
        twin.backward(together, 3)
        assert here.traffic.reduces == 1
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
        here.traffic.reset()
        blocks.backward(together, 3)  # a model's gradients do not wait for its first forward's
        assert here.traffic.reduces == 6

    run_ranks(ranks)


def test_head_weights_changed_between_chunks() -> None:
    """Head weights that change between chunks are read anew."""

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
