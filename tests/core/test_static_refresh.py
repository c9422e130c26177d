"""``static_buffers=``: units that share parameters, also since ``refresh``, share no buffer."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import refresh

from harness import simulate_ranks
from models import Block, Tower, Twin, by_block, data, seeded, sgd, square, units

Edit = Callable[[nn.Module], None]


def tie(model: nn.Module) -> None:
    model.blocks[1].up.weight = model.blocks[0].up.weight


def tie_what_has_one_buffer(model: nn.Module) -> None:
    model.blocks[2].up.weight = model.blocks[0].up.weight


def swap_parts(model: nn.Module) -> None:
    first, last = model.blocks[0], model.blocks[2]
    first.up, last.up = last.up, first.up
    first.norm.weight, model.blocks[1].norm.weight = model.blocks[1].norm.weight, first.norm.weight


def add(model: nn.Module) -> None:
    model.blocks.append(seeded(Block, 3))


EDITS: dict[str, Edit] = {
    "tie": tie,
    "tie what has one buffer": tie_what_has_one_buffer,
    "swap parts": swap_parts,
    "add": add,
    "copy": lambda m: m.blocks.__setitem__(2, copy.deepcopy(m.blocks[0])),
}


def edited(rank: int, edits: tuple[str, ...], keep_graph: bool) -> None:
    twin = Twin(rank, 2, lambda: Tower(4), lambda m: by_block(m, static_buffers=True))
    twin.train(steps=1)
    for name in edits:
        kept = square(twin.model, data(9, rank)) if keep_graph else None
        for model in (twin.model, twin.reference):
            EDITS[name](model)
        refresh(twin.model)
        twin.plain = twin.replicate(twin.reference)
        twin.optim, twin.plain_optim = (
            sgd(twin.model.parameters()),
            sgd(twin.reference.parameters()),
        )
        twin.train()
        with torch.no_grad():
            twin.losses(square, 7)
        del kept


class Backwards(Tower):
    """Runs its blocks in reverse, so that what shares a weight runs before the unit that has it."""

    def __init__(self) -> None:
        super().__init__(4)
        self.blocks[2].up.weight = self.blocks[0].up.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)


def test_a_tied_weight_is_read_before_its_unit_runs() -> None:
    """The unit that has the weight is not moved to its buffer while a graph reads it elsewhere."""
    simulate_ranks(
        lambda rank: Twin(rank, 2, Backwards, lambda m: by_block(m, static_buffers=True)).train()
    )


@pytest.mark.parametrize("keep_graph", [False, True])
@pytest.mark.parametrize("edit", EDITS)
def test_edits_of_units_that_take_turns(edit: str, keep_graph: bool) -> None:
    """The next steps equal the plain model's, also where a graph from before is alive."""
    simulate_ranks(edited, 2, (edit,), keep_graph)


def test_edits_one_after_the_other() -> None:
    """Buffers are chosen again after each of several edits."""
    simulate_ranks(edited, 2, ("tie", "swap parts", "add", "tie what has one buffer"), False)


def test_a_refresh_without_edits_keeps_addresses() -> None:
    """Buffers are chosen again only where units gather other things."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower), static_buffers=True)
        square(model, data(0, rank)).backward()
        before = [b.full.data_ptr() for unit in units(model) for b in unit.buckets]
        refresh(model)
        square(model, data(0, rank)).backward()
        assert [b.full.data_ptr() for unit in units(model) for b in unit.buckets] == before

    simulate_ranks(ranks)
