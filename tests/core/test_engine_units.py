"""What units know of each other: shared modules, groups, meshes, and lists of what comes next."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import get_ident
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from fsdp_compose import Prefetch, fully_shard, no_sync, set_forward_prefetch
from fsdp_compose.buckets.gather import channels_of
from fsdp_compose.core.gathering import announce
from fsdp_compose.core.schedule import Hold

from harness import run_ranks, simulate_ranks, single_process
from models import Tower, assert_at_rest, by_block, data, seeded, square, two_blocks, units


def test_a_unit_linked_again_finds_its_sharers() -> None:
    """As ``refresh`` links it, whichever of the two owns the parameters."""
    with single_process():
        shared = seeded(two_blocks)
        shared.blocks[0].up = shared.blocks[1].up
        _, owner, borrower = units(by_block(shared))
        for unit, other in ((owner, borrower), (borrower, owner)):
            unit.link()
            assert {ref() for ref in unit.links.sharers} == {other}


def test_groups_that_data_travels_over() -> None:
    """Among them the part of a group that weights are kept in after forward."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks), reshard_after_forward=2)
        for unit in units(model):
            (bucket,) = unit.buckets
            (log,) = unit.links.logs
            assert bucket.inner is not None
            assert {*log.channels} >= {bucket.inner.group, *channels_of(bucket)}

    simulate_ranks(ranks, world_size=4)


def test_lists_wait_for_what_was_gathered_ahead() -> None:
    """No more units wait than it names, whichever list they came from."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower), prefetch=Prefetch(0, 0))
        first, second, third = model.blocks
        set_forward_prefetch(model, [first, third])
        set_forward_prefetch(first, [second])
        held: list[bool] = []
        first.up.register_forward_pre_hook(lambda *_: held.append(bool(units(second)[0].holds)))
        square(model, data(0, rank)).backward()
        assert held == [False]

    simulate_ranks(ranks)


def test_groups_that_are_gone_are_forgotten() -> None:
    """All of them, once a group of other ranks or another communicator is seen."""

    def ranks(rank: int) -> None:
        groups = [dist.new_group([0, 1]) for _ in range(3)]
        models: list[Any] = [fully_shard(seeded(two_blocks), mesh=group) for group in groups[:2]]
        (unit,) = units(models[0])
        engine = unit.engine
        before = set(engine.logs)
        for group in groups[:2]:
            dist.destroy_process_group(group)
        fully_shard(seeded(two_blocks), mesh=groups[2])
        assert len(before) >= 2 and not before & set(engine.logs)

    simulate_ranks(ranks)


def test_a_backward_inside_another_drops_nothing() -> None:
    """What the outer one gathered ahead is for it: each unit is gathered ahead once."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(lambda: Tower(4)), prefetch=Prefetch(0, 2))
        work, told = units(model)[0].engine.schedule.work, list[str]()

        def note(unit: Any, reason: Hold) -> None:
            if reason is Hold.PREFETCH:
                told.append(unit.name)
            announce(unit, reason)

        for step in range(2):
            told.clear()
            x = data(step, rank).requires_grad_()
            for block in model.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            work.announce = note
            x.square().mean().backward()
            work.announce = announce
        assert told and len(told) == len(set(told))

    simulate_ranks(ranks)


def test_a_backward_that_fails_in_its_end_is_cleared() -> None:
    """Where a hook raises on the gradient that is reduced last, as anywhere else."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks))
        weight = model.first.weight
        handle = weight.register_post_accumulate_grad_hook(fail)
        loss = square(model, data(0, rank))
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        engine = units(model)[0].engine
        assert engine.has_failed
        model.zero_grad()
        with no_sync(model):  # clears what the failed step left
            assert not engine.has_failed
            assert_at_rest(model)
        square(model, data(1, rank)).backward()
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_recomputation_does_not_move_forwards() -> None:
    """A device's thread recomputes in backward; the caller's still clears what fails in it."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks))
        engine = units(model)[0].engine
        x = data(0, rank).requires_grad_()
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(x.square().mean().backward).result()
        assert engine.thread == get_ident()
        assert_at_rest(model)

    run_ranks(ranks, 1)


def fail(*_: Any) -> None:
    raise ZeroDivisionError
