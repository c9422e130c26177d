"""Parameters are frozen and unfrozen between steps, during accumulation, and in turns."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import (
    Offload,
    ShardingStrategy,
    accumulate,
    count_traffic,
    fully_shard,
    gathered,
    no_sync,
    reduce_grads,
    wrap,
)

from harness import rank_errors, run_ranks, simulate_ranks
from models import (
    WIDTH,
    MakeOptimizer,
    Tolerance,
    Tower,
    Twin,
    adamw,
    assert_at_rest,
    by_block,
    compare,
    data,
    one_unit,
    seeded,
    sgd,
    square,
    units,
    whole,
)
from surgery import (
    same,
)


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("shard", [by_block, one_unit])
def test_progressive_unfreezing(shard: Any, optimizer: MakeOptimizer) -> None:
    """From the head down, with one optimizer over everything; half of a unit at a time."""
    order = ["head", "blocks.1.down", "blocks.1", "blocks.0.norm", "blocks.0", "first"]

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Tower(2), shard, optimizer)
        for seed in range(len(order) + 2):
            open_now = tuple(order[: seed + 1])
            for model in (twin.model, twin.reference):
                for name, param in model.named_parameters():
                    param.requires_grad_(name.startswith(open_now))
            with count_traffic() as traffic:
                twin.backward(square, seed)
            assert_at_rest(twin.model)
            trains_now = [
                bucket
                for unit in units(twin.model)
                for bucket in unit.buckets
                if any(entry.param.requires_grad for entry in bucket.entries)
            ]
            assert traffic.reduces == len(trains_now)
            for name, param in twin.model.named_parameters():
                assert (param.grad is None) == (not name.startswith(open_now)), name
            twin.step()
        twin.check()

    run_ranks(ranks, 2)


@pytest.mark.parametrize("keep", ["sharded", "unsharded", "no_all_reduce"])
@pytest.mark.parametrize(("pattern", "shard"), [("up", one_unit), ("blocks.0", by_block)])
def test_freezing_during_accumulation_keeps_gradients(shard: Any, pattern: str, keep: Any) -> None:
    """What is frozen during accumulation keeps what it had."""

    def ranks(rank: int) -> None:
        world = 4 if keep == "no_all_reduce" else 2
        mesh = torch.distributed.init_device_mesh("cpu", (world // 2, 2))
        twin = Twin(rank, world, lambda: Tower(2), lambda m: shard(m, mesh=mesh))
        for first in (False, True, False):
            with accumulate(twin.model, keep=keep):
                for seed, frozen in enumerate((first, not first)):
                    for model in (twin.model, twin.reference):
                        for name, param in model.named_parameters():
                            param.requires_grad_(not frozen or pattern not in name)
                    twin.backward(square, seed)
            wanted = dict(twin.reference.named_parameters())
            for name, param in twin.model.named_parameters():
                assert param.grad is not None, f"{name} lost its gradient"
                compare(name, whole(param.grad), wanted[name].grad, Tolerance())
            twin.optim.step()
            twin.plain_optim.step()
            twin.zero_grad()
        for model in (twin.model, twin.reference):
            for name, param in model.named_parameters():
                param.requires_grad_(pattern not in name)
        twin.backward(square, 3)
        for name, param in twin.model.named_parameters():
            assert (param.grad is None) == (pattern in name), name
        twin.step()
        twin.check()

    run_ranks(ranks, 4 if keep == "no_all_reduce" else 2)


def test_gradients_of_a_unit_frozen_late_are_asked_for() -> None:
    """Nothing of it runs in the last backward, so the step says what to call (D12)."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Tower(2))
        with no_sync(twin.model):
            twin.backward(square, 0)
        for model in (twin.model, twin.reference):
            model.blocks[0].requires_grad_(False)
        twin.backward(square, 1)
        with pytest.raises(RuntimeError, match=r"'blocks\.0\..*reduce_grads\(module\)"):
            twin.optim.step()
        reduce_grads(twin.model)
        twin.step()
        twin.check()

    run_ranks(ranks, 2)


@pytest.mark.parametrize("keep", ["unsharded", "no_all_reduce"])
def test_a_discarded_accumulation_leaves_nothing(keep: Any) -> None:
    """A discarded accumulation leaves nothing to what is frozen."""

    def ranks(rank: int) -> None:
        mesh = torch.distributed.init_device_mesh("cpu", (2, 2))
        twin = Twin(rank, 4, lambda: Tower(2), lambda m: by_block(m, mesh=mesh))

        def spoil() -> None:
            with accumulate(twin.model, keep=keep):
                square(twin.model, data(0, rank)).backward()
                raise KeyError

        with pytest.raises(KeyError):
            spoil()
        for model in (twin.model, twin.reference):
            for block in model.blocks:
                block.up.requires_grad_(False)
        twin.backward(square, 1)
        assert twin.model.blocks[0].up.weight.grad is None
        twin.step()
        twin.check()

    run_ranks(ranks, 4)


@pytest.mark.parametrize("make", [sgd, adamw])
def test_adversaries_take_turns(make: MakeOptimizer) -> None:
    """A critic with clipped weights and a generator; each is frozen in the other's turn."""

    def build() -> nn.Module:
        critic = nn.Sequential(nn.Linear(2, WIDTH), Tower(1))
        return nn.ModuleDict({"generator": Tower(2), "critic": critic})

    def turn(models: nn.Module, optims: Any, inputs: list[Tensor]) -> None:
        generator, critic = models["generator"], models["critic"]
        for acts, rests, optim in ((critic, generator, 1), (generator, critic, 0)):
            acts.requires_grad_(True)
            rests.requires_grad_(False)
            losses = []
            for z in inputs:
                fake = generator(z)
                loss = critic(fake).square().mean()
                losses.append(loss - critic(z[:, :2]).mean() if acts is critic else -loss)
            torch.stack(losses).mean().backward()
            assert all(p.grad is None for p in rests.parameters())
            optims[optim].step()
            optims[optim].zero_grad()
            with torch.no_grad():
                for i, p in enumerate(critic.parameters()):
                    (p if i % 2 else p.data).clamp_(-0.3, 0.3)

    def ranks(rank: int) -> None:
        model, plain = seeded(build), seeded(build)
        for part in model.values():
            by_block(part)
        optims = [[make(part.parameters()) for part in m.values()] for m in (model, plain)]
        for step in range(3):
            turn(model, optims[0], [data(step, rank)])
            turn(plain, optims[1], [data(step, r) for r in range(2)])
        same(model, plain)
        for part in model.values():
            assert_at_rest(part)

    run_ranks(ranks, 2)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"strategy": ShardingStrategy.NO_SHARD},
    {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    {"offload_policy": Offload(params=True, pin_memory=False)},
]


def freeze_at_random(model: nn.Module, seed: int, frozen: bool) -> None:
    chosen = random.Random(seed)
    for param in model.parameters():
        if chosen.random() < 0.5:
            param.requires_grad_(not frozen)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("way", ["backward", "create_graph", "no_sync", "gathered"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shard", [by_block, one_unit])
def test_freezing_between_forward_and_backward(shard: Any, options: Any, way: str) -> None:
    """What is frozen by then gets no gradient, and keeps the one it has, as in a plain model."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Tower(2), lambda model: shard(model, **options))
        twin.backward(square, 0)
        twin.check_grads()
        for seed in (1, 2):
            scope = no_sync if way == "no_sync" and seed == 1 else nullcontext
            with gathered(twin.model) if way == "gathered" else scope(twin.model):
                losses = twin.losses(square, seed)
                for model in (twin.model, twin.reference):
                    freeze_at_random(model, seed, True)
                for loss in losses:
                    loss.backward(create_graph=way == "create_graph")
                del loss, losses
            for model in (twin.model, twin.reference):
                freeze_at_random(model, seed, False)
        twin.check_grads()
        twin.zero_grad()
        twin.train(steps=1)
        assert_at_rest(twin.model)

    simulate_ranks(ranks)


@pytest.mark.parametrize("parts", ["first", "blocks", ""])
def test_freezing_on_one_rank_before_the_backward(parts: str) -> None:
    """The ranks would train different parameters: both are told which (D17)."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(lambda: Tower(2)))
        for step in range(2):
            loss = square(model, data(step, rank))
            if step and rank:
                model.get_submodule(parts).requires_grad_(False)
            loss.backward()

    for text in rank_errors(ranks, 2):
        assert text is not None and "requires a gradient on rank 0 and not on rank 1" in text


def test_each_rank_freezes_another_parameter() -> None:
    """Each trains as many, and reduces as it always does."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(lambda: Tower(2)))
        for step in range(2):
            loss = square(model, data(step, rank))
            if step:
                (model.blocks[0].up.weight, model.blocks[0].up.bias)[rank].requires_grad_(False)
            loss.backward()

    for text in rank_errors(ranks, 2):
        assert text is not None and "requires a gradient on rank" in text


class Alternating(nn.Module):
    """Calls a layer several times in a forward, and freezes it for some of the calls."""

    def __init__(self, calls: str) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for call in self.calls:
            self.layer.weight.requires_grad_(call in "tw")
            self.layer.bias.requires_grad_(call in "tb")
            x = torch.tanh(self.layer(x)) + x
        self.layer.requires_grad_(True)
        return x


@pytest.mark.parametrize("calls", ["ft", "tf", "ftft", "tftf", "wb", "fwtb"])
def test_a_layer_frozen_for_some_of_its_calls(calls: str) -> None:
    """In one forward of the model around it; the calls that train it give its gradient."""

    def ranks(rank: int, strategy: ShardingStrategy) -> None:
        def shard(model: nn.Module) -> nn.Module:
            return fully_shard(model, units=wrap.by_class({nn.Linear}), strategy=strategy)

        Twin(rank, 2, lambda: Alternating(calls), shard, sgd).train()

    for strategy in ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP:
        simulate_ranks(ranks, 2, strategy)
