"""Parameters of every kind: scalar, empty, complex, frozen, unused, smaller than the world."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import (
    clip_grad_norm_,
    fully_shard,
    undo,
    wrap,
)

from harness import run_ranks
from models import (
    SHARDS,
    WIDTH,
    Tower,
    Twin,
    assert_at_rest,
    by_block,
    data,
    one_unit,
    seeded,
    square,
    units,
    whole,
)


class Zoo(nn.Module):
    """Parameters of every kind, next to each other in one unit."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.randn(5, 4)
        self.scalar = nn.Parameter(torch.randn(()))
        self.one = nn.Parameter(torch.randn(1))
        self.empty = nn.Parameter(torch.empty(0))
        self.empty_matrix = nn.Parameter(torch.empty(3, 0))
        self.transposed = nn.Parameter(base.t())
        self.channels = nn.Parameter(
            torch.randn(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
        )
        self.strided = nn.Parameter(torch.randn(6, 8)[::2, ::3])
        self.part = nn.Parameter(torch.randn(9)[2:5])
        self.expanded = nn.Parameter(torch.randn(1, 3).expand(2, 3))
        self.wide = nn.Parameter(torch.randn(2, WIDTH))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.wide.t() * self.scalar + self.one
        y = y.sum() + self.transposed.square().sum() + self.channels.sin().sum()
        y = y + self.strided.cos().sum() * self.part.sum() + self.expanded.square().sum()
        return y * self.frozen.sum() + self.empty.sum() + self.empty_matrix.sum()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_zoo_of_parameters(world: int) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Zoo())

    def ranks(rank: int) -> None:
        twin = Twin(rank, world, build, one_unit)
        strides = {n: p.stride() for n, p in twin.plain[0].named_parameters()}
        seen: dict[str, Any] = {}
        zoo = twin.model[1]
        zoo.register_forward_hook(
            lambda m, a, o: seen.update((f"1.{n}", p.stride()) for n, p in m._parameters.items())
        )
        twin.train(lambda m, x: m(x).square().mean())
        for name in ("1.transposed", "1.channels"):
            assert seen[name] == strides[name]
        undo(twin.model)
        for name in ("1.transposed", "1.channels", "1.wide", "1.scalar", "1.empty_matrix"):
            assert twin.model.get_parameter(name).stride() == strides[name], name

    run_ranks(ranks, world)


def test_parameters_smaller_than_the_world() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False))

    def ranks(rank: int) -> None:
        shard = lambda m: fully_shard(m, units=wrap.by_class(nn.Linear))  # noqa: E731
        forward = lambda m, x: m(x[:, :1]).square().mean()  # noqa: E731
        Twin(rank, 4, build, shard).train(forward)

    run_ranks(ranks, 4)


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("frozen", ["first", "blocks", "some", "biases", "all but one", "head"])
def test_frozen_parameters(frozen: str, shard: str) -> None:
    def build() -> nn.Module:
        model = Tower(3)
        for name, param in model.named_parameters():
            param.requires_grad_(
                {
                    "first": not name.startswith("first"),
                    "blocks": not name.startswith(("blocks.0", "blocks.2")),
                    "some": "up" not in name,
                    "biases": "bias" not in name,
                    "all but one": name == "blocks.1.up.weight",
                    "head": "head" not in name,
                }[frozen]
            )
        return model

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, build, SHARDS[shard])
        twin.train()
        twin.train(lambda m, x: square(m, x.requires_grad_()))
        for param in twin.model.parameters():
            assert param.requires_grad or param.grad is None

    run_ranks(ranks)


@pytest.mark.parametrize("shard", SHARDS)
def test_requires_grad_may_change_between_steps(shard: str) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Tower(2), SHARDS[shard])
        patterns = ["", "first", "up", "blocks.0", "bias", ""]
        for seed, frozen in enumerate(patterns):
            for model in (twin.model, twin.plain[0]):
                for name, param in model.named_parameters():
                    param.requires_grad_(not frozen or frozen not in name)
            twin.backward(square, seed)
            for name, param in twin.model.named_parameters():
                if frozen and frozen in name:
                    assert param.grad is None, name
            assert_at_rest(twin.model)
            twin.step()
        for model in (twin.model, twin.plain[0]):
            model.requires_grad_(False)
        with pytest.raises(RuntimeError, match="does not require grad"):
            square(twin.model, data(0, rank)).backward()
        for model in (twin.model, twin.plain[0]):
            model.requires_grad_(True)
        twin.train()

    run_ranks(ranks)


def test_trained_parameters_that_were_sharded_frozen() -> None:
    def ranks(rank: int) -> None:
        model = seeded(lambda: Tower(2)).requires_grad_(False)
        by_block(model)
        square(model, data(0, rank))
        model.requires_grad_(True)
        plain = seeded(lambda: Tower(2))
        for step in range(2):
            square(model, data(step, rank)).backward()
            square(plain, torch.cat([data(step, 0), data(step, 1)])).backward()
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters()):
            torch.testing.assert_close(whole(ours.grad), theirs.grad, msg=name)

    run_ranks(ranks)


class Choosy(Tower):
    """Skips blocks and parameters, differently in every step."""

    skip: tuple[Any, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            if i not in self.skip:
                x = block(x) if "down" not in self.skip else x + block.norm(x)
        return self.head(x)


@pytest.mark.filterwarnings("ignore:the forward of unit")
@pytest.mark.parametrize("shard", SHARDS)
def test_unused_in_a_step(shard: str) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Choosy(3), SHARDS[shard])
        for seed, skip in enumerate([(), (1,), (0, 2), (), ("last",), (0, 1, 2), ()]):
            for model in (twin.model, *twin.plain):
                model.skip = skip
            twin.backward(square, seed)
            assert_at_rest(twin.model)
            if shard != "one":
                for i in (0, 1, 2):
                    for param in twin.model.blocks[i].parameters():
                        assert (param.grad is None) == (i in skip)
            twin.step()
        twin.check()

    run_ranks(ranks)


def test_a_parameter_of_a_unit_that_ran_is_unused() -> None:
    """Its gradient counts as zero, so that ranks may differ in what they use."""

    class Maybe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.use = True

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x) if self.use else self.a(x)

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Maybe, one_unit)
        for seed in range(3):
            twin.model.use = rank == 0 or seed == 0
            for r, plain in enumerate(twin.plain):
                plain.use = r == 0 or seed == 0
            twin.backward(square, seed)
            twin.step()
        twin.check()

    run_ranks(ranks)


class Numbers(nn.Module):
    """Complex, integer, bool and low-precision parameters beside ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.complex = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128))
        self.integer = nn.Parameter(torch.arange(7), requires_grad=False)
        self.byte = nn.Parameter(torch.arange(13, dtype=torch.uint8), requires_grad=False)
        self.flag = nn.Parameter(torch.arange(5) % 2 == 0, requires_grad=False)
        self.low = nn.Parameter(torch.randn(3).half(), requires_grad=False)
        self.weight = nn.Parameter(torch.randn(WIDTH, 5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        z = (x @ self.weight).to(torch.complex128) @ self.complex
        y = torch.view_as_real(z).sum(-1) * self.integer.sum() / 10 + self.byte[12]
        return y * self.flag.sum() + self.low.double()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_numbers_of_every_kind(world: int) -> None:
    class Model(nn.Sequential):
        def double(self) -> Model:
            return self

    def ranks(rank: int) -> None:
        twin = Twin(rank, world, lambda: Model(Numbers()), one_unit)
        twin.train()
        assert len(units(twin.model)[0].buckets) == 6
        undo(twin.model)
        for name, param in twin.model.named_parameters():
            assert param.dtype == twin.plain[0].get_parameter(name).dtype

    run_ranks(ranks, world)


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_a_model_becomes_complex() -> None:
    """Its gradients were packed before, as as many real numbers as it has elements."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: nn.Sequential(nn.Linear(WIDTH, 3)), one_unit)
        twin.backward(square, 0)
        clip_grad_norm_(twin.model, 1.0)
        for model in (twin.model, *twin.plain):
            model.zero_grad()
            model.to(torch.complex128)
        twin.backward(absolute, 1)
        wanted = nn.utils.clip_grad_norm_(twin.reference.parameters(), 0.1)
        torch.testing.assert_close(clip_grad_norm_(twin.model, 0.1), wanted)
        twin.check_grads()

    run_ranks(ranks, 2)


def absolute(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x.to(torch.complex128)).abs() ** 2).mean()
