"""Several forwards and backwards, gradients of some tensors, weights that change between passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import MixedPrecision, Offload, ShardingStrategy, gathered, int8_codec, simulate
from fsdp_compose.base.process import here

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
    nested,
    one_unit,
    seeded,
    square,
    train_twin,
    two_blocks,
    whole,
)


@pytest.mark.parametrize("shard", SHARDS)
def test_two_forwards_then_one_backward(shard: str) -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return square(model, x) + (model(x * 2) * model(-x)).mean()

    train_twin(two_blocks, forward, SHARDS[shard], world=3)


def test_two_forwards_then_two_backwards() -> None:
    """Two forwards then two backwards in either order."""

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
            here.traffic.reset()
            loss, plain = twin.losses(square, seed)
            loss.backward()
            assert here.traffic.reduces == 2
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


@pytest.mark.parametrize("way", [by_block, one_unit])
def test_a_model_that_was_made_in_inference(way: Any) -> None:
    """Its parameters are sharded as others are, and train as those of the plain model do."""

    def ranks(rank: int) -> None:
        plain = seeded(Tower)
        with torch.inference_mode():
            model = seeded(Tower)
        way(model)
        for made in (model, plain):
            optim = torch.optim.SGD(made.parameters(), 0.1)
            for seed in range(2):
                with torch.inference_mode():
                    made(data(seed, 0))
                square(made, data(seed, 0)).backward()
                optim.step()
                optim.zero_grad()
        for name, param in model.named_parameters():
            assert torch.allclose(whole(param), plain.get_parameter(name))

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


def test_kept_weights_are_those_of_the_forward() -> None:
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


@pytest.mark.parametrize(
    "options",
    [
        {"offload_policy": Offload(optimizer=True)},
        {"offload_policy": Offload(params=True)},
        {"strategy": ShardingStrategy.HYBRID_SHARD, "mesh": (2, 2)},
        {"strategy": ShardingStrategy.ZERO1},
        {"mp_policy": MixedPrecision(gather_codec=int8_codec(64))},
        {"reshard_after_forward": 2},
    ],
    ids=["optimizer", "params", "hybrid", "zero1", "codec", "inner"],
)
def test_what_inference_made_does_not_break_training(options: dict[str, Any]) -> None:
    """What the first use of a unit makes and keeps is made while inference runs."""

    def ranks() -> None:
        given = dict(options)
        if "mesh" in given:
            given["mesh"] = init_device_mesh("cpu", given["mesh"])
        model = by_block(seeded(two_blocks), **given)
        optim = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            with torch.inference_mode():
                before = model(data(0, 0))
            for _ in range(2):
                square(model, data(0, dist.get_rank())).backward()
                optim.step()
                optim.zero_grad()
            with torch.inference_mode():
                assert not torch.equal(before, model(data(0, 0)))

    simulate(ranks, 4)


def test_a_model_sharded_in_inference_mode_trains() -> None:
    model = Tower().double()
    with torch.inference_mode():
        by_block(model)
    model(data(0, 0)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
