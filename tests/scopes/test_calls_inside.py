"""What would change the units of a model is refused while its parameters are shown whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from fsdp_compose import fully_shard, gathered, refresh, undo

from harness import run_ranks, simulate_ranks
from models import Tower, Twin, by_block, data, seeded, square


def shard_a_part(model: nn.Module) -> None:
    fully_shard(model.blocks[1].up)


def undo_a_unit(model: nn.Module) -> None:
    undo(model.blocks[1])


def undo_all(model: nn.Module) -> None:
    undo(model)


CALLS = {
    shard_a_part: r"parameter 'weight' of unit 'Linear' is sharded, and shown whole now",
    undo_a_unit: r"undo: unit 'blocks.1' is inside a scope of gathered",
    undo_all: r"undo: unit 'Tower' is inside a scope of gathered",
}


@pytest.mark.parametrize("writeback", [False, True])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_units_change_in_no_scope(call: Callable[[Any], None], writeback: bool) -> None:
    """The scope closes as ever, and training goes on as one process."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.train(steps=1)
        with gathered(twin.model, writeback=writeback):
            with pytest.raises(RuntimeError, match=CALLS[call]):
                call(twin.model)
        twin.train()

    run_ranks(ranks)


def test_no_part_is_sharded_in_the_forward_of_its_unit() -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Tower)

        def hook(module: nn.Module, args: Any) -> None:
            with pytest.raises(RuntimeError, match="is sharded, and shown whole now"):
                shard_a_part(twin.model)

        handle = twin.model.blocks[1].register_forward_pre_hook(hook)
        twin.train(steps=1)
        handle.remove()
        twin.train()

    run_ranks(ranks)


def test_units_change_in_no_forward() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))

        def hook(module: nn.Module, args: Any) -> None:
            for call in (undo, refresh):
                with pytest.raises(RuntimeError, match="'Tower' is inside its forward or backward"):
                    call(model)
            with pytest.raises(RuntimeError, match=r"refresh: unit 'blocks.1' is inside its"):
                refresh(module)

        model.blocks[1].register_forward_pre_hook(hook)
        square(model, data(0, rank)).backward()

    simulate_ranks(ranks)
