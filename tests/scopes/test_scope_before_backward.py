"""A scope with writeback between a forward and its backward."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import fsdp_compose as fc
from fsdp_compose import ShardingStrategy

from harness import simulate_ranks
from models import Tower, Twin, assert_at_rest, by_block, data, seeded, square

STRATEGIES = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)


def shard(strategy: ShardingStrategy) -> Any:
    return lambda model: by_block(model, strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("options", [{}, {"with_grads": True}, {"offload_to_cpu": True}])
def test_weights_that_nobody_edits_are_not_written(
    strategy: ShardingStrategy, options: dict[str, bool]
) -> None:
    """The backward is right, and gradients that the scope edited are those it adds to."""

    def double(model: nn.Module) -> None:
        for param in model.parameters():
            param.grad *= 2

    def body(rank: int) -> None:
        twin = Twin(rank, 2, Tower, shard(strategy))
        twin.backward(square, 0)
        loss, plain = twin.losses(square, 1)
        with fc.gathered(twin.model, writeback=True, **options):
            if options.get("with_grads"):
                double(twin.model)
                double(twin.reference)
        loss.backward()
        plain.backward()
        assert_at_rest(twin.model)
        twin.step()
        twin.check()

    simulate_ranks(body, 2)


def test_a_weight_that_was_edited_raises_on_all_ranks() -> None:
    """Also on those that hold none of the elements, which were written through ``.data``."""

    def body(rank: int) -> str:
        model = by_block(seeded(Tower))
        loss = square(model, data(0, rank))
        with fc.gathered(model, writeback=True):
            model.blocks[1].up.weight.data[0] = 7.0
        assert bool((model.blocks[1].up.weight.full_tensor()[0] == 7.0).all())
        with pytest.raises(RuntimeError, match=r"'blocks\.1\.up\.weight'.*was written between"):
            loss.backward()
        held = model.blocks[1].up.weight.to_local()
        return "edited" if bool((held == 7.0).any()) else "other"

    assert set(simulate_ranks(body, 2)) == {"edited", "other"}
