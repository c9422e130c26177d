"""Selective checkpoints save and look for the model's own operators, not those of gathers."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fsdp_compose import Prefetch, ShardingStrategy

from harness import run_ranks, simulate_ranks
from models import Tower, Twin, by_block, data, mean_loss

PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def save_all(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


class Selective(Tower):
    """Recomputes parts of ``width`` blocks, but for what ``saved`` names."""

    def __init__(self, saved: Any, width: int) -> None:
        super().__init__(4)
        self.contexts = partial(create_selective_checkpoint_contexts, saved)
        self.parts = [slice(i, i + width) for i in range(0, 4, width)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for part in self.parts:
            run = nn.Sequential(*self.blocks[part])
            x = checkpoint(run, x, use_reentrant=False, context_fn=self.contexts)
        return self.head(x)


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "no prefetch": {"prefetch": Prefetch(forward=0, backward=0)},
    "all ahead": {"prefetch": Prefetch(forward=4, backward=4)},
    "kept": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "static": {"static_buffers": 4},
}


def train(rank: int, options: dict[str, Any], saved: Any, width: int) -> None:
    twin = Twin(rank, 2, lambda: Selective(saved, width), partial(by_block, **options))
    twin.train()
    pairs = [twin.losses(lambda m, x: mean_loss(m(x)), seed) for seed in (7, 8)]
    for ours, plain in pairs:  # the second forward finds weights that the first one kept
        ours.backward()
        plain.backward()
    twin.step()
    with torch.no_grad():
        twin.losses(lambda m, x: mean_loss(m(x)), 9)
    twin.train()


@pytest.mark.parametrize(
    ("saved", "widths"), [(PRODUCTS, [2]), (save_all, [1, 4])], ids=["products", "all"]
)
@pytest.mark.parametrize("name", OPTIONS)
def test_parts_that_hold_units(name: str, saved: Any, widths: list[int]) -> None:
    """Gathers may be in the forward alone, in the recomputation alone, or in both."""
    for width in widths:
        simulate_ranks(train, 2, OPTIONS[name], saved, width)


def test_over_processes() -> None:
    """What ranks tell each other is not what an earlier forward saved."""
    run_ranks(train, 2, OPTIONS["full"], save_all, 4)


class Counting(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func] += 1
        return func(*args, **(kwargs or {}))


def test_modes_of_the_user_see_what_they_saw() -> None:
    """A mode around the forward stays in place, above and below the checkpoints'."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 1, lambda: Selective(PRODUCTS, 2), by_block)
        found = []
        for model in (twin.model, twin.reference):
            with Counting() as outer:
                out = model(data(0, 0))
                mean_loss(out).backward()
            found.append([outer.seen[product] for product in PRODUCTS])
        assert found[0] == found[1]
        assert sum(found[0]) > 0

    simulate_ranks(ranks, 1)
