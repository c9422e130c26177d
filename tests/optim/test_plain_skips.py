"""Units that some steps skip, or that are frozen in between, beside plain optimizers.

What the optimizer's ``zero_grad()`` cleared reaches the gradients of units in which none arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import Prefetch, flat_parameters, fully_shard, local_parameters, wrap

from harness import run_ranks
from models import Block, Tower, data, replicas, seeded, whole

LIMIT = 0.05
WAYS: dict[str, Callable[[nn.Module], Iterable[nn.Parameter]]] = {
    "sharded": nn.Module.parameters,
    "local": local_parameters,
    "flat": flat_parameters,
}
every_way = pytest.mark.parametrize("way", WAYS)


class Skipping(Tower):
    """Runs without one of its blocks, another in each step."""

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index != step % len(self.blocks):
                x = block(x)
        return self.head(x)


def clip(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    norm = nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    return whole(norm)


def count(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    return torch.tensor(sum(p.grad is not None for p in model.parameters()))


def edit(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """Decay of one's own, where there is a gradient."""
    for param in model.parameters():
        if param.grad is not None:
            param.grad = 0.5 * param.grad + 0.01 * param.detach()
    return torch.zeros(())


def edit_plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """The same, on what the optimizer has; the module's own gradients are cleared."""
    for param in optimizer.param_groups[0]["params"]:
        if param.grad is not None:
            param.grad = 0.5 * param.grad + 0.01 * param.detach()
    return torch.zeros(())


def fill(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """Zeros where there is none, so that momentum goes on."""
    for param in model.parameters():
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    return torch.zeros(())


Look = Callable[[nn.Module, torch.optim.Optimizer], Tensor]


def steps(
    model: Any, others: list[Any], params: Iterable[nn.Parameter], rows: list[int], look: Look
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Trains ``model`` on the data of ``rows``; ``others`` are replicas with the same gradients."""
    optimizer, seen = torch.optim.SGD(params, lr=0.1, momentum=0.9), []
    for step in range(5):
        losses = [
            one(data(step, row), step).square().mean()
            for one, row in zip([model, *others], rows, strict=True)
        ]
        torch.stack(losses).mean().backward()
        seen.append(look(model, optimizer))
        optimizer.step()
        (model if look is edit_plain else optimizer).zero_grad()
    return seen, {name: whole(param) for name, param in model.named_parameters()}


def assert_equal_to_one_process(way: str, look: Look) -> None:
    def ranks(rank: int) -> None:
        plain = seeded(lambda: Skipping(3))
        model = fully_shard(
            seeded(lambda: Skipping(3)), units=wrap.by_class({Block}), prefetch=Prefetch(0, 0)
        )
        ours = steps(model, [], WAYS[way](model), [rank], look)
        alone, *others = replicas(plain, 2)
        theirs = steps(alone, others, alone.parameters(), [0, 1], look)
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)

    run_ranks(ranks)


@every_way
@pytest.mark.parametrize("look", [clip, count, edit, fill], ids=lambda look: look.__name__)
def test_units_that_are_skipped_have_no_gradient(way: str, look: Look) -> None:
    """Neither for torch's clipping nor for a caller that reads, replaces or sets gradients."""
    assert_equal_to_one_process(way, look)


def test_nor_for_who_reads_the_plain_parameters() -> None:
    """The module's own ``zero_grad()`` reaches the plain parameters of units that are skipped."""
    assert_equal_to_one_process("local", edit_plain)


def test_frozen_units_have_no_gradient_left() -> None:
    """A block that is frozen for some steps counts in no norm."""

    def train(model: Any, others: list[Any], params: Any, rows: list[int]) -> list[Tensor]:
        optimizer, norms = torch.optim.SGD(params, lr=0.1), []
        for step in range(4):
            for one in [model, *others]:
                one.blocks[0].requires_grad_(step % 2 == 0)
            outputs = [one(data(step, r)) for one, r in zip([model, *others], rows, strict=True)]
            torch.stack([output.square().mean() for output in outputs]).mean().backward()
            norms.append(clip(model, optimizer))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    def ranks(rank: int) -> None:
        alone, other = replicas(seeded(Tower), 2)
        model = fully_shard(seeded(Tower), units=wrap.by_class({Block}))
        ours = train(model, [], local_parameters(model), [rank])
        theirs = train(alone, [other], alone.parameters(), [0, 1])
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)

    run_ranks(ranks)
