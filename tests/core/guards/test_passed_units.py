"""A backward that asks for no gradients of parameters releases each unit once it is past it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_compose as fc
from fsdp_compose import ShardingStrategy
from fsdp_compose.base.process import here
from fsdp_compose.buckets.bucket import Phase
from fsdp_compose.sharded import is_sharded

from harness import simulate_ranks
from models import units

DEPTH, WIDTH = 5, 6


class Block(nn.Module):
    """A unit; one with units inside it computes before and after them."""

    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inside = nn.Sequential(*inside)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(self.inside(self.before(x).tanh()).sin())


class Stack(nn.Module):
    def __init__(self, blocks: list[Block], segment: int) -> None:
        super().__init__()
        self.blocks, self.segment = nn.ModuleList(blocks), segment
        self.mix = nn.Parameter(torch.ones(len(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        step = self.segment or 1
        for start in range(0, len(self.blocks), step):
            part = self._run, start, start + step, x
            x = checkpoint(*part, use_reentrant=False) if self.segment else self._run(*part[1:])
        return x

    def _run(self, start: int, stop: int, x: Tensor) -> Tensor:
        for weight, block in zip(self.mix[start:stop], self.blocks[start:stop], strict=True):
            x = weight * block(x)
        return x


def ask(how: str, loss: Tensor, x: Tensor, model: Stack) -> Tensor:
    if how == "backward":
        loss.backward(inputs=[x])
        assert x.grad is not None
        return x.grad
    (grad,) = torch.autograd.grad(loss, [model.mix if how == "own" else x])
    return grad.full_tensor() if is_sharded(grad) else grad


@pytest.mark.parametrize(
    ("how", "segment", "nested", "options", "most"),
    [
        ("grad", 0, False, {}, 3),
        ("backward", 0, False, {"strategy": ShardingStrategy.SHARD_GRAD_OP}, 3),
        ("grad", 0, True, {}, 5),
        ("grad", 2, True, {}, 7),
        ("grad", 1, False, {}, 3),
        ("own", 0, False, {"static_buffers": True}, 3),
    ],
)
def test_units_are_released_in_turn(how, segment, nested, options, most):
    def program(rank: int) -> None:
        torch.manual_seed(0)
        inside = [[Block(), Block()] if nested else [] for _ in range(DEPTH)]
        model = Stack([Block(*blocks) for blocks in inside], segment)
        plain = Stack([Block(*([Block(), Block()] if nested else [])) for _ in inside], 0)
        plain.load_state_dict(model.state_dict())
        fc.fully_shard(model, units=fc.wrap.by_class(Block), **options)
        counts: list[int] = []

        def count(grad: Tensor) -> None:
            counts.append(sum(u.buckets[0].phase is not Phase.SHARDED for u in units(model)))

        for block in model.blocks:
            block.register_forward_hook(lambda *args: args[2].register_hook(count) and None)
        for step in range(3):
            counts.clear()
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))
            x, same = x.requires_grad_(), x.clone().requires_grad_()
            found = ask(how, model(x).square().sum(), x, model)
            wanted = ask(how, plain(same).square().sum(), same, plain)
            torch.testing.assert_close(found, wanted)
            # Of all that SHARD_GRAD_OP keeps, the last units alone are left at the end.
            kept = "strategy" in options
            assert max(counts[-2:] if kept else counts) <= most, counts
            for side, data in ((model, x), (plain, same)):  # an ordinary step after it
                side(data).square().sum().backward()
                torch.optim.SGD(side.parameters(), lr=1e-3).step()
                side.zero_grad()
        for name, value in fc.state_dict(model).items():
            torch.testing.assert_close(value, plain.state_dict()[name])

    simulate_ranks(program)


def test_a_unit_is_past_at_the_first_of_its_calls() -> None:
    """Called again behind another unit, it stays gathered until backward is past both calls."""

    def program(rank: int) -> None:
        twice = Block()
        model = nn.Sequential(twice, Block(), twice)
        fc.fully_shard(model, units=fc.wrap.by_class(Block))
        for _ in range(2):
            x = torch.randn(3, WIDTH, requires_grad=True)
            loss = model(x).square().sum()
            before = here.traffic.gathers
            torch.autograd.grad(loss, x)
            assert here.traffic.gathers - before <= 2, "each unit once"
            assert {b.phase for u in units(model) for b in u.buckets} == {Phase.SHARDED}

    simulate_ranks(program)
