"""What the engine remembers between the phases of a step, and what it does not do twice."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fsdp_compose import Prefetch, fully_shard, gathered, reshard
from fsdp_compose.base.process import here
from fsdp_compose.comm.collectives import Exchange
from fsdp_compose.core import forward, gathering
from fsdp_compose.core.gathering import announce
from fsdp_compose.core.schedule import Hold

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
        assert repr(root).endswith("held by nothing)")
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


def test_what_happens_once_for_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moved parameters are looked for when its outermost call begins, not in a recomputation.

    It is opened once, however many calls run inside that one, and closed once by its backward.
    """
    seen: list[str] = []

    def note(home: Any, name: str) -> None:
        original = getattr(home, name)
        noted = lambda *given: (seen.append(name), original(*given))[1]  # noqa: E731
        monkeypatch.setattr(home, name, noted)

    note(forward, "take_over_changes")
    note(forward, "_open_forward")
    with single_process():
        model = one_unit(seeded(Nested))
        model(data(0, 0))
        assert seen == ["take_over_changes", "_open_forward"]
        model = by_block(seeded(two_blocks))
        note(units(model)[0].engine.schedule, "leave_backward")
        seen.clear()
        checkpoint(model, data(0, 0), use_reentrant=False).sum().backward()
        assert [seen.count(name) for name in sorted(set(seen))] == [3 * 2, 3, 3]


def test_a_scope_and_a_forward_are_reduced_together() -> None:
    """Where one backward brings gradients of weights that were read in both."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks))
        loss = square(model, data(0, rank))
        with gathered(model):
            penalty = sum(param.square().sum() for param in model.parameters())
        here.traffic.reset()
        (loss + penalty).backward()
        assert here.traffic.reduces == len(units(model))
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_buffers_of_a_failed_backward_are_let_go() -> None:
    """Each bucket's: another rank may read from them until it hears of the failure."""

    def ranks(rank: int) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).double())
        model[1].register_forward_pre_hook(lambda _, given: given[0].double())
        (unit,) = units(fully_shard(model))
        first = fully_shard(nn.Linear(8, 8))
        given = first(torch.ones(1, 8))
        given.register_hook(fail)  # reached when the unit's gradients are on their way
        with pytest.raises(ZeroDivisionError):
            model(given).sum().backward()
        assert [bucket.grads is None for bucket in unit.buckets] == [False, False]
        with torch.no_grad():
            model(torch.ones(1, 8))
        assert [bucket.grads for bucket in unit.buckets] == [None, None]
        assert_at_rest(model)

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    simulate_ranks(ranks)


def test_a_frozen_unit_watches_no_earlier_tensors() -> None:
    """What the caller keeps of the time before its forward is no way into its backward."""

    def ranks(rank: int) -> None:
        model, kept = seeded(Tower), list[Tensor]()
        fully_shard(model.blocks[1]).requires_grad_(False)
        model.blocks[0].register_forward_hook(lambda _, given, out: kept.append(out.exp()))
        loss = square(model, data(0, rank))
        assert not kept[0]._backward_hooks
        loss.backward()

    simulate_ranks(ranks)


def test_a_functional_call_that_could_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory for the weights that were not given: the next forward reads its own."""

    def fail(*_: Any) -> None:
        raise MemoryError

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, one_unit)
        given = {"head.weight": torch.zeros(2, WIDTH, dtype=torch.float64)}
        with monkeypatch.context() as patch:
            patch.setattr(gathering, "_start_gather", fail)
            with pytest.raises(MemoryError):
                functional_call(twin.model, given, (data(0, rank),))
        assert_at_rest(twin.model)
        twin.train(steps=1)

    simulate_ranks(ranks)


def test_each_bucket_keeps_its_part_for_backward() -> None:
    """With ``reshard_after_forward=2``, the part of 2 of 4 ranks, until backward has used it."""

    def ranks(rank: int) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).double())
        fully_shard(model, reshard_after_forward=2)
        model[1].register_forward_pre_hook(lambda _, given: given[0].double())
        (unit,) = units(model)
        output = model(torch.ones(1, 8))
        kept = [bucket.inner.store is not None for bucket in unit.buckets]
        assert kept == [True, True]
        output.sum().backward()
        assert_at_rest(model)
        output = model(torch.ones(1, 8))
        reshard(model)  # frees it, and backward gathers from all
        assert_at_rest(model)
        output.sum().backward()

    simulate_ranks(ranks, 4)


def test_a_failure_forgets_what_was_gathered_ahead() -> None:
    with single_process():
        model = by_block(seeded(two_blocks))
        schedule, ahead = units(model)[0].engine.schedule, units(model)[1:]
        schedule.prefetch(ahead)
        assert schedule.prefetched == ahead
        schedule.fail(units(model))
        assert not schedule.prefetched
        assert_at_rest(model)


def test_a_forward_that_failed_holds_no_unit() -> None:
    """What it gathered ahead is released, so a model that is deleted then is gone."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks))
        square(model, data(0, rank)).backward()
        hook = model.blocks[0].register_forward_hook(lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            model(data(0, rank))
        assert_at_rest(model)
        hook.remove()
        left = weakref.WeakSet(model.parameters())
        del hook, model
        gc.collect()
        assert not left

    simulate_ranks(ranks)


def test_a_failure_releases_what_a_graph_kept() -> None:
    """Also while the graph lives: no backward over it can follow."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks))
        weights = list(model.parameters())
        found = torch.autograd.grad(square(model, data(0, rank)), weights, create_graph=True)
        hook = model.blocks[0].register_full_backward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            square(model, data(0, rank)).backward()
        hook.remove()
        with torch.no_grad():
            model(data(0, rank))
        assert_at_rest(model)
        assert found

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    simulate_ranks(ranks)


def test_units_that_stay_gathered_in_evaluation() -> None:
    """As ``reshard_after_forward=False`` asks: a second evaluation gathers nothing."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks), reshard_after_forward=False)
        with torch.no_grad():
            model(data(0, rank))
            here.traffic.reset()
            model(data(1, rank))
        assert here.traffic.gathers == 0

    simulate_ranks(ranks)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_unit_that_gets_no_gradient(reentrant: bool) -> None:
    """A frozen one on inputs without gradients: it is released when the backward has ended."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks))
        model.blocks[0].requires_grad_(False)

        def part(x: Tensor) -> Tensor:
            return model.blocks[1](model.blocks[0](x.detach()) + x)

        x = data(0, rank).requires_grad_()
        checkpoint(part, x, use_reentrant=reentrant).sum().backward()
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_what_was_gathered_in_vain_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its memory is freed: until then the other ranks' shards may be written there."""
    ended: list[Any] = []
    end = Exchange.end
    monkeypatch.setattr(Exchange, "end", lambda self: (ended.append(self), end(self))[1])

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks))
        schedule, ahead = units(model)[0].engine.schedule, units(model)[1:]
        schedule.prefetch(ahead)
        waits = [bucket.fill.exchange for unit in ahead for bucket in unit.buckets]
        schedule.drop_prefetched()
        assert all(any(wait is one for one in ended) for wait in waits) and len(waits) == 2
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_another_backward_right_after_one_that_failed() -> None:
    """Of a forward from before the failure: it begins with nothing of the failed one."""

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks)
        output = twin.model(data(5, rank))
        output.register_hook(fail)
        loss, plain = twin.losses(square, 0)
        with pytest.raises(ZeroDivisionError):
            output.sum().backward()
        loss.backward()
        assert_at_rest(twin.model)
        plain.backward()
        twin.step()
        twin.check()

    simulate_ranks(ranks)


def test_parts_of_two_inner_backwards_are_seen_once() -> None:
    """Reentrant checkpoints run a backward each; a hook sees the sum of what both bring."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks))
        seen: list[Any] = []
        for name, param in model.blocks.named_parameters():
            param.register_hook(lambda grad, name=name: seen.append(name))
        x = data(0, rank).requires_grad_()
        for block in (*model.blocks, *model.blocks):
            x = checkpoint(block, x, use_reentrant=True)
        x.sum().backward()
        assert sorted(seen) == sorted(name for name, _ in model.blocks.named_parameters())
        assert_at_rest(model)

    simulate_ranks(ranks)


@pytest.mark.parametrize("moment", ["pre", "post"])
def test_backward_gathers_ahead(moment: Any) -> None:
    """When a unit's backward begins, or when its gradients have arrived."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower), prefetch=Prefetch(0, 1, backward_moment=moment))
        schedule, told = units(model)[0].engine.schedule, list[Any]()
        square(model, data(0, rank)).backward()
        loss = square(model, data(1, rank))
        schedule.work.announce = lambda unit, reason: told.append(reason)
        loss.backward()
        assert told.count(Hold.PREFETCH) == 3 - (moment == "post")

    simulate_ranks(ranks)
