"""A rank that steps without having reduced gradients: those that wait for them raise at once."""

from __future__ import annotations

from functools import partial

import pytest

from fsdp_compose import ShardingStrategy, no_sync, reduce_grads, set_requires_gradient_sync

from harness import rank_errors, simulate_ranks
from models import Tower, Twin, by_block, data, seeded, sgd, square
from watching import step


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("steps", [0, 2], ids=["the first step", "a later step"])
def test_one_rank_steps_without_reducing(steps: int, world: int) -> None:
    """Nothing is gathered with NO_SHARD, so its end of a step is compared with nothing."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower), strategy=ShardingStrategy.NO_SHARD)
        optim = sgd(model.parameters())
        for seed in range(steps):
            step(model, rank, seed)
            optim.step()
            optim.zero_grad()
        set_requires_gradient_sync(model, rank != 1)
        square(model, data(5, rank)).backward()
        optim.step()

    errors = rank_errors(ranks, world, timeout=10)
    assert set(errors) == {errors[0]}
    text = str(errors[0])
    assert f"in step {steps + 1}: as collective 1 of it" in text
    assert "reduce" in text and "unit 'blocks.2' (backward)" in text
    assert "where rank 1 accumulates unit" in text and "(without synchronisation)" in text


def test_all_ranks_step_without_reducing() -> None:
    """Each says how to reduce, and the gradients are kept for that."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Tower, partial(by_block, strategy=ShardingStrategy.NO_SHARD))
        with no_sync(twin.model):
            twin.backward(square, 0)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"call fsdp_compose.reduce_grads"):
                twin.optim.step()
        reduce_grads(twin.model)
        twin.step()
        twin.check()
        for _ in range(2):
            twin.train()

    simulate_ranks(ranks)


def test_the_right_step_after_one_rank_alone() -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Tower, partial(by_block, strategy=ShardingStrategy.NO_SHARD))
        for _ in range(2):
            set_requires_gradient_sync(twin.model, rank == 0)
            with pytest.raises(RuntimeError, match="ranks run different units"):
                _step_once(twin)
            set_requires_gradient_sync(twin.model, True)
            twin.zero_grad()
        twin.train()

    simulate_ranks(ranks)


def _step_once(twin: Twin) -> None:
    square(twin.model, data(0, twin.rank)).backward()
    twin.optim.step()
