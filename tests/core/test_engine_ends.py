"""How passes end: what a failed one leaves, what is gathered behind it, who compares."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    MixedPrecision,
    Offload,
    Prefetch,
    fully_shard,
    gathered,
    no_sync,
    reshard,
    set_backward_prefetch,
    unshard,
)
from fsdp_compose.buckets.bucket import Phase
from fsdp_compose.core import passes
from fsdp_compose.core.gathering import announce
from fsdp_compose.core.schedule import Hold
from fsdp_compose.core.state import routes_of

from harness import fake_world, simulate_ranks, single_process
from models import (
    WIDTH,
    Tower,
    Twin,
    assert_at_rest,
    by_block,
    data,
    seeded,
    square,
    two_blocks,
    units,
)


def fail(*_: Any) -> None:
    raise ZeroDivisionError


def test_clearing_a_failed_step_leaves_nothing() -> None:
    """Nor gradients on their way to the host, nor copies that read what the caller may write."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower), offload_policy=Offload(params=True))
        engine, waits = units(model)[0].engine, list[str]()
        x = data(0, rank).requires_grad_()
        x.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            square(model, x).backward()
        engine.host_reads = SimpleNamespace(synchronize=lambda: waits.append("copy"))
        assert engine.landing and engine.reached
        model.zero_grad()
        with no_sync(model):  # clears what the failed step left
            assert_at_rest(model)
        assert waits == ["copy"]

    simulate_ranks(ranks)


@pytest.mark.parametrize("where", ["backward", "hook", "forward"])
def test_a_model_deleted_after_an_error_is_freed(where: str) -> None:
    """All but a unit whose gradients are being reduced at once, and that before the next model."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with fake_world(2):
        model = by_block(seeded(Tower))
        square(model, data(0, 0)).backward()
        if where == "backward":
            model.blocks[1].register_forward_hook(lambda module, given, out: Broken.apply(out))
        elif where == "hook":
            model.first.weight.register_post_accumulate_grad_hook(stop)
        else:
            model.blocks[1].register_forward_hook(stop)
        found = [weakref.ref(unit) for unit in units(model)]
        with suppress(KeyboardInterrupt):
            square(model, data(0, 0)).backward()
        del model
        left = [unit.name for unit in (ref() for ref in found) if unit is not None]
        assert left == {"backward": ["blocks.2"], "hook": []}.get(where, left)
        fully_shard(seeded(Tower))
        assert not any(ref() for ref in found)


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise KeyboardInterrupt


def test_backward_drops_what_was_gathered_for_forward() -> None:
    """Units of a further forward, which the step before had: they are the last of the backward."""

    def ranks(rank: int) -> None:
        model, seen = by_block(seeded(two_blocks), prefetch=Prefetch(2, 0)), list[Phase]()
        (first,) = units(model.blocks[0])[0].buckets
        kept: list[Tensor] = []
        model.blocks[1].register_forward_hook(lambda *call: kept.append(call[-1]))
        losses = [square(model, data(i, rank)) for i in range(2)]
        sum(losses).backward()
        output = model(data(2, rank))
        assert first.phase is not Phase.SHARDED
        kept[-1].register_hook(lambda _: seen.append(first.phase))
        output.sum().backward()
        assert seen == [Phase.SHARDED]
        assert_at_rest(model)

    simulate_ranks(ranks)


@pytest.mark.parametrize("way", ["backward", "graph", "end"])
def test_gathering_ahead_behind_a_backward(way: str) -> None:
    """When gradients arrived, with a graph over them too, and not where the backward has ended."""

    def ranks(rank: int) -> None:
        policy = Prefetch(0, 1, backward_moment="post")
        model, told = by_block(seeded(two_blocks), prefetch=policy), list[Any]()
        first, second = model.blocks
        first.requires_grad_(way != "end")
        set_backward_prefetch(model, [])
        set_backward_prefetch(first if way == "end" else second, [model.blocks[way == "end"]])

        def part(x: Tensor) -> Tensor:
            return second(first(x.detach()) + x)

        x = data(0, rank).requires_grad_()
        loss = (checkpoint(part, x, use_reentrant=False) if way == "end" else model(x)).sum()
        units(model)[0].engine.schedule.work.announce = lambda unit, why: told.append(why)
        if way == "graph":
            torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        else:
            loss.backward()
        assert told.count(Hold.PREFETCH) == (way != "end")

    simulate_ranks(ranks)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_step_over_two_groups_ends_in_both(frozen: bool) -> None:
    """Ranks compare what they ran over each, in the same order where both have the same ranks."""

    def ranks(rank: int) -> None:
        model = seeded(two_blocks)
        model.blocks[0].requires_grad_(not frozen)
        for block in model.blocks:
            fully_shard(block, mesh=dist.new_group([0, 1]))
        for step in range(2):
            square(nn.Sequential(*model.blocks), data(step, rank)).backward()
            logs = [log for unit in units(model) for log in unit.links.logs]
            assert [log.step for log in logs] == [step + 2] * 2
            assert not any(log.events or log.is_stepwise for log in logs)

    simulate_ranks(ranks)


def test_a_forward_after_a_backward_failed_inside_it() -> None:
    """A unit that is kept reads weights that were written between the two."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            y.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                y.sum().backward()
            with torch.no_grad():
                self.inner.weight.mul_(2)
            return self.inner(x)

    def ranks(rank: int) -> None:
        model, plain = seeded(Outer), seeded(Outer)
        fully_shard(model.inner, reshard_after_forward=False)
        fully_shard(model)
        x = data(0, rank)
        torch.testing.assert_close(model(x), plain(x))

    simulate_ranks(ranks)


def test_a_bucket_without_other_ranks_comes_first() -> None:
    """Ranks compare the gathers of the buckets behind it."""

    def ranks(rank: int) -> None:
        alone = [dist.new_group([other]) for other in range(2)][rank]
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        fully_shard(model[0])
        fully_shard(model, mesh=alone)
        noted: list[Any] = []
        (log,) = units(model)[0].links.logs
        log.note = noted.append
        announce(units(model)[0], Hold.FORWARD)
        assert len(noted) == 1

    simulate_ranks(ranks)


def test_gradients_that_arrive_together() -> None:
    """Where none is missing they are packed without looking for None among them."""
    with single_process():
        (unit,) = units(fully_shard(nn.Linear(2, 2)))
        assert [route.is_whole for route in routes_of(unit, (0, 1))] == [True]
        assert [route.is_whole for route in routes_of(unit, (0,))] == [False]


@pytest.mark.parametrize("makes_graph", [False, True])
def test_grad_mode_of_hooks(makes_graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a plain parameter's hooks: gradients are recorded while a graph over them is made."""
    ends: list[bool] = []

    def end_in_another_mode(callback: Callable[[], None]) -> None:
        def end() -> None:
            with torch.set_grad_enabled(not makes_graph):  # as a device's thread of autograd may
                callback()
            ends.append(True)

        queue(end)

    queue = passes.on_backward_end
    monkeypatch.setattr(passes, "on_backward_end", end_in_another_mode)

    def modes(model: nn.Module) -> list[Any]:
        seen: list[Any] = []
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(
                lambda p, name=name: seen.append(
                    (name, torch.is_grad_enabled(), p.grad.requires_grad)
                )
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of a cycle between parameter and gradient
            square(model, data(0, 0)).backward(create_graph=makes_graph)
        model.zero_grad()
        return sorted(seen)

    with single_process():
        assert modes(by_block(seeded(two_blocks))) == modes(seeded(two_blocks))
    assert ends


def test_a_recomputation_reads_what_was_written_since() -> None:
    """By a unit that is kept from the forward, in which reentrant checkpoints record nothing."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, partial(by_block, reshard_after_forward=False))

        def forward(model: nn.Module, x: Tensor) -> Tensor:
            return checkpoint(model.blocks[0], x.requires_grad_(), use_reentrant=True).sum()

        loss, plain = twin.losses(forward, 0)
        with torch.no_grad():
            for model in (twin.model, twin.reference):
                model.blocks[0].up.weight.mul_(2)
        loss.backward()
        plain.backward()
        twin.step()

    simulate_ranks(ranks)


class Short(Tower):
    """Runs as many of its blocks as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.depth = nn.Sequential(*self.blocks), 3

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[: self.depth](x)


def test_a_forward_that_ends_early_releases_units() -> None:
    with fake_world(2):
        model = by_block(seeded(Short))
        model(data(0, 0)).sum().backward()
        model.depth = 1
        with pytest.warns(UserWarning, match="ended where the forward before ran unit 'blocks.1'"):
            output = model(data(1, 0))
        (ahead,) = units(model.blocks[1])[0].buckets
        assert ahead.phase is Phase.SHARDED
        output.sum().backward()


def test_weights_gathered_for_a_further_forward() -> None:
    """Units that were gathered ahead of it are gathered again where weights were written since."""

    def ranks(rank: int) -> None:
        model, plain = seeded(Tower), seeded(Tower)
        by_block(model, prefetch=Prefetch(3, 0))
        sum(square(model, data(i, rank)) for i in range(2)).backward()
        square(model, data(2, rank))
        with torch.no_grad():
            for block in (*model.blocks, *plain.blocks):
                block.up.weight.mul_(2)
        torch.testing.assert_close(model(data(3, rank)), plain(data(3, rank)))

    simulate_ranks(ranks)


def test_units_that_get_no_gradient_are_released() -> None:
    """Several frozen ones, which one checkpointed region runs again on inputs without gradients."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks))
        model.requires_grad_(False)

        def part(x: Tensor) -> Tensor:
            return torch.tanh(sum((block(x.detach()) for block in model.blocks), x))

        checkpoint(part, data(0, rank).requires_grad_(), use_reentrant=False).sum().backward()
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_a_reduction_ends_behind_a_frozen_unit() -> None:
    """As behind a trained one: its buffer is not held while further frozen units are passed."""
    with fake_world(2):
        model = seeded(Tower)
        model.blocks[:2].requires_grad_(False)
        by_block(model)
        engine, under_way = units(model)[0].engine, list[int]()
        for block in model.blocks:
            block.register_full_backward_pre_hook(
                lambda *_: under_way.append(len(engine.reductions))
            )
        square(model, data(0, 0)).backward()
        assert under_way == [0, 1, 0]


def test_a_forward_that_cannot_gather_ahead() -> None:
    """The next one runs in the order of the one before, with no word of a change."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks))
        work = units(model)[0].engine.schedule.work

        def refuse(unit: Any, reason: Hold) -> None:
            if reason is Hold.PREFETCH:
                raise ZeroDivisionError
            announce(unit, reason)

        square(model, data(0, rank)).backward()
        work.announce = refuse
        with pytest.raises(ZeroDivisionError):
            model(data(1, rank))
        work.announce = announce
        square(model, data(2, rank)).backward()
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_an_order_that_gathers_nothing_may_change() -> None:
    """On one rank there is no word of it."""
    with single_process():
        model = by_block(seeded(Short))
        for model.depth in (3, 1, 2):
            model(data(0, 0)).sum().backward()


def test_backward_expects_no_unit_that_ran_gathered() -> None:
    """A forward between ``unshard`` and ``reshard`` gathers nothing, and backward follows."""

    def ranks(rank: int) -> None:
        model, told = by_block(seeded(two_blocks), prefetch=Prefetch(0, 2)), list[str]()
        first, second = model.blocks
        unshard(first)
        first(data(0, rank))
        reshard(first)
        loss = second(data(0, rank)).sum()
        work = units(model)[0].engine.schedule.work
        work.announce = lambda unit, reason: told.append(unit.name)
        loss.backward()
        assert told == ["blocks.1"]

    simulate_ranks(ranks)


def test_a_forward_in_a_scope_casts_its_inputs() -> None:
    with single_process():
        model = fully_shard(nn.Linear(2, 2), mp_policy=MixedPrecision(torch.bfloat16))
        with gathered(model):
            assert model(torch.ones(1, 2)).dtype is torch.bfloat16


def test_what_waits_for_the_end_is_reduced_in_turn() -> None:
    """Each reduction ends before the next begins, so that one flat buffer exists at a time."""

    def ranks(rank: int) -> None:
        model, under_way = by_block(seeded(two_blocks)), list[int]()
        engine = units(model)[0].engine
        work = engine.schedule.work
        reduce = work.reduce
        work.reduce = lambda part: (under_way.append(len(engine.reductions)), reduce(part))
        x = data(0, rank).requires_grad_()
        for block in model.blocks:
            block.up.weight.register_hook(lambda grad: None)
            x = checkpoint(block, x, use_reentrant=True)
        x.sum().backward()
        assert under_way == [0, 0]

    simulate_ranks(ranks)


def test_backwards_over_a_graph_over_gradients() -> None:
    """Units stay gathered while it is kept; its last backward releases all of them."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks))
        loss = square(model, data(0, rank))
        found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        penalty = sum(grad.square().sum() for grad in found)
        penalty.backward(retain_graph=True)
        assert all(Hold.RETAINED in unit.holds for unit in units(model))
        penalty.backward()
        assert_at_rest(model)
        assert found and loss.grad_fn is not None  # the graphs live

    simulate_ranks(ranks)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_evaluation_leaves_no_order() -> None:
    """The training forward behind it is recorded, so that the first backward gathers ahead."""

    def ranks(rank: int) -> None:
        model, told = by_block(seeded(two_blocks), prefetch=Prefetch(0, 1)), list[Any]()
        handle = model.blocks[1].register_forward_pre_hook(interrupt)
        with torch.no_grad(), pytest.raises(KeyboardInterrupt):
            model(data(0, rank))
        handle.remove()
        loss = square(model, data(1, rank))
        units(model)[0].engine.schedule.work.announce = lambda unit, why: told.append(why)
        loss.backward()
        assert told.count(Hold.PREFETCH) == 2

    simulate_ranks(ranks)


def test_an_interrupted_functional_call_is_over() -> None:
    """The next forward reads the parameters, not what the call was given in their place."""

    def ranks(rank: int) -> None:
        model, plain = fully_shard(seeded(two_blocks)), seeded(two_blocks)
        zeros = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
        handle = model.blocks[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            functional_call(model, zeros, data(0, rank))
        handle.remove()
        torch.testing.assert_close(model(data(0, rank)), plain(data(0, rank)))

    simulate_ranks(ranks)


def test_a_backward_after_ranks_differed() -> None:
    """Of a forward from before: what some ranks ran since is no order, on any of them."""

    def ranks(rank: int) -> None:
        model, told = by_block(seeded(two_blocks), prefetch=Prefetch(0, 1)), list[Any]()
        square(model, data(0, rank)).backward()
        loss = square(model, data(1, rank))
        with pytest.raises(RuntimeError, match="different units"):
            model.blocks[rank](data(2, rank)).sum().backward()
        units(model)[0].engine.schedule.work.announce = lambda unit, why: told.append(why)
        loss.backward()
        assert Hold.BACKWARD in told and Hold.PREFETCH not in told
        assert_at_rest(model)

    simulate_ranks(ranks)
