"""Modules, parameters and buffers that sharding leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import (
    MixedPrecision,
    fully_shard,
    is_fully_sharded,
    wrap,
)
from fsdp_compose.sharded import is_sharded

from harness import run_ranks, single_process
from models import WIDTH, Block, Tower, assert_at_rest, data, seeded, square


class Buffered(Tower):
    """Blocks with a buffer each, and one of its own."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__(depth)
        for block in self.blocks:
            block.register_buffer("scale", torch.tensor([1.1]))
        self.register_buffer("shift", torch.tensor([0.1]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.shift.to(x.dtype)
        for block in self.blocks:
            x = block(x) * block.scale.to(x.dtype)
        return self.head(x)


def test_ignored_parameters_train_by_themselves() -> None:
    """Nobody averages them: here each rank gets the same data, so that they stay equal."""

    def ranks(rank: int) -> None:
        model, plain = seeded(Tower), seeded(Tower)
        ignored = [model.blocks[1], model.head.bias]
        fully_shard(model, units=wrap.by_class(Block), ignored=ignored)
        assert not is_fully_sharded(model.blocks[1])
        left = {name for name, p in model.named_parameters() if not is_sharded(p)}
        inside = {f"blocks.1.{name}" for name, _ in Block().named_parameters()}
        assert left == inside | {"head.bias"}
        pairs = [(m, torch.optim.SGD(m.parameters(), 0.1)) for m in (model, plain)]
        for step in range(3):
            for m, optimizer in pairs:
                square(m, data(step, 0)).backward()
                optimizer.step()
                optimizer.zero_grad()
        for p, q in zip(model.parameters(), plain.parameters()):
            whole = p.full_tensor() if is_sharded(p) else p.detach()
            torch.testing.assert_close(whole, q.detach())

    run_ranks(ranks)


def test_buffers_are_ignored_by_module_or_one_by_one() -> None:
    with single_process():
        mp = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)
        model = Buffered()
        fully_shard(model, mp_policy=mp, ignored=[model.blocks[0], model.shift])
        dtypes = {name: b.dtype for name, b in model.named_buffers()}
        assert dtypes == {
            "shift": torch.float32,
            "blocks.0.scale": torch.float32,
            "blocks.1.scale": torch.bfloat16,
            "blocks.2.scale": torch.bfloat16,
        }


def test_ignored_buffers_are_not_broadcast() -> None:
    def ranks(rank: int) -> list[float]:
        model = seeded(Buffered)
        model.shift.fill_(rank)
        for block in model.blocks:
            block.scale.fill_(rank + 1)
        fully_shard(model, init="broadcast", ignored=[model.shift, model.blocks[2]])
        return [float(b) for b in model.buffers()]

    zero, one = run_ranks(ranks)
    assert zero == [0, 1, 1, 1]
    assert one == [1, 1, 1, 2]


def test_an_ignored_module_keeps_the_units_inside_it() -> None:
    def ranks(rank: int) -> None:
        def shard(model: Any) -> None:
            fully_shard(model.blocks[1].up)
            outer = nn.Module()
            outer.inside = model.blocks[1]
            fully_shard(model, units=wrap.by_class(Block), ignored=[outer.inside])

        model = seeded(Tower)
        shard(model)
        assert is_fully_sharded(model.blocks[1].up)
        assert not is_fully_sharded(model.blocks[1])
        assert not is_sharded(model.blocks[1].down.weight)
        plain = seeded(Tower)
        square(model, data(0, 0)).backward()
        square(plain, data(0, 0)).backward()
        for p, q in zip(model.parameters(), plain.parameters()):
            grad = p.grad.full_tensor() if is_sharded(p) else p.grad
            torch.testing.assert_close(grad, q.grad)
        assert_at_rest(model)

    run_ranks(ranks)


def test_an_ignored_parameter_is_ignored_everywhere() -> None:
    with single_process():
        for pick in (lambda m: m.first.weight, lambda m: m.first):
            model = Tower(2)
            model.blocks[0].up = nn.Linear(WIDTH, WIDTH)
            model.blocks[0].down = nn.Linear(WIDTH, WIDTH, bias=False)
            model.blocks[0].up.weight = model.first.weight
            fully_shard(model, units=wrap.by_class(Block), ignored=[pick(model)])
            assert model.blocks[0].up.weight is model.first.weight
            assert not is_sharded(model.first.weight)
            assert is_sharded(model.blocks[0].up.bias)
            square(model, torch.ones(2, WIDTH)).backward()
            assert model.first.weight.grad is not None


def test_what_cannot_be_ignored() -> None:
    with pytest.raises(TypeError, match="ignored holds 'head'; wanted"):
        fully_shard(Tower(), ignored=["head"])  # type: ignore[list-item]
    model = Tower()
    with pytest.raises(TypeError, match=r"ignored is a Linear; wanted a sequence"):
        fully_shard(model, ignored=model.head)  # type: ignore[arg-type]
