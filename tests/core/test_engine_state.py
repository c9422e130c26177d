"""What the engine remembers between the phases of a step, and what it does not do twice."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_compose import fully_shard
from fsdp_compose.core import forward
from fsdp_compose.core.gathering import announce
from fsdp_compose.core.schedule import Hold
from fsdp_compose.core.state import Unit

from harness import simulate_ranks, single_process
from models import (
    WIDTH,
    Tower,
    Twin,
    assert_at_rest,
    by_block,
    data,
    one_unit,
    seeded,
    square,
    two_blocks,
    units,
)


def test_each_bucket_of_a_unit_is_announced() -> None:
    """Ranks compare what each of them gathers, not only the first bucket."""

    def ranks(rank: int) -> None:
        model = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()))
        (unit,) = units(model)
        (log,) = unit.links.logs
        noted: list[Any] = []
        log.note = noted.append
        announce(unit, Hold.FORWARD)
        assert len(noted) == len(unit.gathered) == 2

    simulate_ranks(ranks)


def test_links_of_a_unit() -> None:
    """Made in inference mode or not; a parameter tied to another place is no shared module."""
    with single_process(), torch.inference_mode():
        assert not units(fully_shard(nn.Linear(2, 2)))[0].links.anchor.is_inference()
    with single_process():
        tied = seeded(two_blocks)
        tied.blocks[0].up.weight = tied.blocks[1].up.weight
        assert not any(unit.links.sharers for unit in units(by_block(tied)))
        shared = seeded(two_blocks)
        shared.blocks[0].up = shared.blocks[1].up
        root, *blocks = units(by_block(shared))
        found = [[ref() for ref in unit.links.sharers] for unit in (root, *blocks)]
        assert found == [[], blocks[1:], blocks[:1]]


def test_a_backward_ends_the_pass_of_its_units() -> None:
    """A later call in the same forward pass must not join what backward has used up."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks))
        square(model, data(0, rank)).backward()
        assert [unit.run.live.pass_id for unit in units(model)] == [0] * 3

    simulate_ranks(ranks)


def test_a_graph_that_died_holds_no_unit() -> None:
    """Units kept for a graph over backward are released when the next forward begins."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks))
        blocks, held = units(model)[1:], []
        weights = list(model.parameters())
        found = torch.autograd.grad(square(model, data(0, rank)), weights, create_graph=True)
        assert all(Hold.RETAINED in unit.holds for unit in blocks)
        del found
        model(data(1, rank))  # its graph takes the place of the one that was kept
        gc.collect()
        look = lambda *_: held.extend(unit.holds for unit in blocks)  # noqa: E731
        model.first.register_forward_pre_hook(look)
        model(data(2, rank))
        assert not any(Hold.RETAINED in holds for holds in held) and len(held) == 2

    simulate_ranks(ranks)


class Nested(nn.Module):
    """Calls itself once, and checkpoints its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        x = checkpoint(self.layer, x, use_reentrant=False)
        return self(x, False) if again else x


def test_moved_parameters_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the outermost call of a unit begins, not in calls inside it or in a recomputation."""
    looked: list[str] = []
    take = forward.take_over_changes

    def note(unit: Unit) -> None:
        looked.append(unit.name)
        take(unit)

    monkeypatch.setattr(forward, "take_over_changes", note)
    with single_process():
        model = one_unit(seeded(Nested))
        fully = by_block(seeded(two_blocks))
        square(model, data(0, 0)).backward()
        assert len(looked) == 1
        checkpoint(fully, data(0, 0), use_reentrant=False).sum().backward()
        assert len(looked) == 1 + len(units(fully))


def test_buffers_of_a_failed_backward_are_let_go() -> None:
    """Another rank may read from them until it hears of the failure."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks)
        hook = twin.model.blocks[0].register_full_backward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            square(twin.model, data(0, rank)).backward()
        hook.remove()
        before = [bucket.grads for unit in units(twin.model) for bucket in unit.buckets]
        assert any(before)
        with torch.no_grad():
            twin.model(data(0, rank))
        assert not any(bucket.grads for unit in units(twin.model) for bucket in unit.buckets)
        assert_at_rest(twin.model)
        twin.train(steps=1)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    simulate_ranks(ranks)


def test_a_frozen_unit_watches_no_earlier_tensors() -> None:
    """What the caller keeps of the time before its forward is no way into its backward."""

    def ranks(rank: int) -> None:
        model, kept = seeded(Tower), list[Tensor]()
        frozen = fully_shard(model.blocks[1]).requires_grad_(False)
        frozen.register_forward_pre_hook(lambda _, given: kept.append(given[0].exp()))
        loss = square(model, data(0, rank))
        assert not kept[0]._backward_hooks
        loss.backward()

    simulate_ranks(ranks)
