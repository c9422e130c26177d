"""Ranks that reduce gradients in different ways raise, and say how each of them does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from fsdp_compose import (
    Int8ErrorFeedback,
    ShardingStrategy,
    bf16_compress_hook,
    default_hook,
    int8_error_feedback_hook,
    register_comm_hook,
    set_gradient_divide_factor,
    set_requires_all_reduce,
)

from harness import rank_errors, simulate_ranks
from models import Tower, Twin, by_block, seeded
from watching import step

Change = Callable[[nn.Module, int], Any]

CHANGES: dict[str, tuple[Change, str]] = {
    "divisors": (lambda m, rank: set_gradient_divide_factor(m, 4 + rank), ", divided by 5.0)"),
    "a divisor": (
        lambda m, rank: set_gradient_divide_factor(m, 4 if rank else None),
        ", divided by 4.0)",
    ),
    "a hook": (
        lambda m, rank: register_comm_hook(m, None, bf16_compress_hook if rank else None),
        ", by the hook bf16_compress_hook)",
    ),
    "hooks": (
        lambda m, rank: register_comm_hook(m, None, bf16_compress_hook if rank else default_hook),
        ", by the hook bf16_compress_hook)",
    ),
    "blocks": (
        lambda m, rank: register_comm_hook(
            m, Int8ErrorFeedback(16 << rank), int8_error_feedback_hook
        ),
        ", by the hook int8_error_feedback_hook in blocks of 32)",
    ),
    "replicas": (lambda m, rank: set_requires_all_reduce(m, not rank), ", not over replicas)"),
}


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("steps", [0, 2], ids=["the first step", "a later step"])
@pytest.mark.parametrize("name", CHANGES)
def test_ranks_reduce_in_different_ways(name: str, steps: int, strategy: str) -> None:
    """Both raise at once and say how each reduces: sums were mixed, or ranks waited or ended."""
    change, wanted = CHANGES[name]

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower), strategy=ShardingStrategy[strategy])
        for seed in range(steps):
            step(model, rank, seed)
        change(model, rank)
        step(model, rank, steps)

    errors = rank_errors(ranks, 2, timeout=10)
    assert errors[0] == errors[1]
    text = str(errors[0])
    place = f"in different ways in step {steps + 1}: rank 0 reduces unit 'blocks.2' (backward"
    assert place in text and f"where rank 1 reduces unit 'blocks.2' (backward{wanted}" in text
    assert "alike on every rank" in text


def test_the_right_step_after_different_ways() -> None:
    """Once the ranks agree again, the next step is what one process computes."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        set_gradient_divide_factor(twin.model, 4 if rank else None)
        with pytest.raises(RuntimeError, match="ranks reduce gradients in different ways"):
            step(twin.model, rank)
        set_gradient_divide_factor(twin.model, None)
        twin.zero_grad()
        twin.train()

    simulate_ranks(ranks)


def test_the_number_of_ranks_is_no_other_way() -> None:
    """A rank that says the number of ranks divides as one that says nothing."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        set_gradient_divide_factor(twin.model, 2 if rank else None)
        twin.train()

    simulate_ranks(ranks)
