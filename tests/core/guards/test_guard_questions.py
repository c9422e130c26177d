"""Questions about units: memory, passes, places that others show, names, trees and divisors."""

from __future__ import annotations

import copy
from threading import get_ident
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.testing import assert_close

import fsdp_compose as fc
from fsdp_compose import fully_shard, gathered, set_requires_gradient_sync, unshard
from fsdp_compose.core.autograd import EngineWork
from fsdp_compose.core.guards.connect import is_running
from fsdp_compose.core.guards.gathered_memory import any_lies_in, lies_in
from fsdp_compose.core.guards.replaced_parameters import is_shown_by_another
from fsdp_compose.core.guards.units import require_units
from fsdp_compose.core.state import Task, engine_of

from harness import simulate_ranks
from models import (
    WIDTH,
    Block,
    Tower,
    assert_at_rest,
    by_block,
    data,
    one_unit,
    seeded,
    square,
    two_blocks,
    units,
    whole,
)


def test_memory_of_a_bucket_begins_and_ends() -> None:
    """Its first byte lies in it, the one behind its last does not, nor what has no memory."""

    def ranks(rank: int) -> None:
        model = one_unit(seeded(lambda: nn.Linear(WIDTH, 4)))
        frozen = seeded(lambda: nn.Linear(WIDTH, 4))
        unshard(model)
        (bucket,) = units(model)[0].buckets
        full = bucket.full
        last, behind = full[-1:], torch.empty(0, dtype=full.dtype)
        behind.set_(full.untyped_storage(), full.numel(), (0,), (1,))
        other = torch.ones(3)
        for tensor in (full, full[1:], last, full.view(torch.uint8)[-1:]):
            assert lies_in(bucket, tensor) is True
            assert any_lies_in([bucket], [other, tensor]) is True
        for tensor in (other, torch.empty(2, device="meta"), torch.eye(2).to_sparse()):
            assert lies_in(bucket, tensor) is False
        start, size = full.data_ptr(), full.numel() * full.element_size()
        for address, inside in ((start, True), (start - 1, False), (start + size, False)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.Tensor, "data_ptr", lambda t, at=address: at if t is other
                              else start)  # fmt: skip
                assert any_lies_in([bucket], [other]) is inside
                assert lies_in(bucket, other) is inside
        assert any_lies_in([bucket], []) is any_lies_in([], [full]) is False
        alone = fully_shard(frozen, mesh="self")
        (own,) = units(alone)[0].buckets
        assert own.in_place and any_lies_in([own], [own.full]) is False
        assert any_lies_in([own, bucket], [own.full, full[2:]]) is True

    simulate_ranks(ranks)


def test_units_are_asked_for_by_module() -> None:
    """Own ones or all below; else the error says what is wanted, and ends without a space."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks))
        assert require_units(model, "ask") == units(model)
        assert require_units(model.blocks, "ask") == units(model)[1:]
        assert require_units(model, "ask", recurse=False) == units(model)[:1]
        with pytest.raises(ValueError, match=r"^ask: Linear is not a unit and contains none; "):
            require_units(model.head, "ask")
        with pytest.raises(
            ValueError, match=r"^ask: ModuleList is not a unit; .* chose\. Do so\.$"
        ):
            require_units(model.blocks, "ask", recurse=False, advice="Do so.")

    simulate_ranks(ranks)


def test_trees_of_sums_refuse_what_postpones() -> None:
    """Also of the second unit; units without a tree are left alone."""

    def ranks(rank: int) -> None:
        plain, tree = fully_shard(seeded(Block)), fully_shard(seeded(Block), deterministic=2)
        calls = (fc.set_requires_gradient_sync, fc.set_is_last_backward)
        for call in calls:
            for model in (tree, nn.Sequential(plain, tree), nn.Sequential(tree, plain)):
                with pytest.raises(ValueError, match="was sharded with deterministic=2"):
                    call(model, False)
                call(model, True)
            call(plain, False)
        other = seeded(two_blocks)
        fully_shard(other.blocks[0], deterministic=2), fully_shard(other, deterministic=2)
        loss = square(other, data(0, rank))
        with pytest.raises(RuntimeError, match=r"was sharded with deterministic=2.*autograd\.grad"):
            torch.autograd.grad(loss, list(other.parameters()))

    simulate_ranks(ranks)


@pytest.mark.parametrize("shard", [by_block, one_unit])
def test_a_replaced_parameter_is_named(shard: Any) -> None:
    """In whatever order the unit lists its places: the name, what was found, and what to do."""

    def ranks(rank: int) -> None:
        for name in ("head.bias", "blocks.1.up.weight", "first.weight"):
            model = shard(seeded(two_blocks))
            module, _, last = name.rpartition(".")
            owner = model.get_submodule(module)
            before = getattr(owner, last)
            setattr(owner, last, nn.Parameter(torch.ones(2, 3)))
            wanted = rf"parameter '{name}' of unit .*: found Parameter \(2, 3\), wanted .*refresh"
            with pytest.raises(RuntimeError, match=wanted):
                model(data(0, rank))
            assert getattr(owner, last).shape == (2, 3)
            setattr(owner, last, before)
            square(model, data(0, rank)).backward()
            assert_at_rest(model)

    simulate_ranks(ranks)


def test_experts_on_fewer_ranks_need_a_divisor() -> None:
    """Trained ones of the backward only; the error names the widest and the narrowest unit."""

    def ranks(rank: int) -> None:
        def make(frozen: bool = False) -> nn.Module:
            model = seeded(Tower)
            fully_shard(model.blocks[1].requires_grad_(not frozen), mesh="self")
            return fully_shard(model)

        model = make()
        with pytest.raises(
            RuntimeError, match=r"of unit 'Tower' over 2, of unit 'blocks.1' over 1\. "
        ):
            square(model, data(0, rank)).backward()
        frozen, told = make(frozen=True), make()
        square(frozen, data(0, rank)).backward()
        fc.set_gradient_divide_factor(told.blocks[1], 2)
        square(told, data(0, rank)).backward()

    simulate_ranks(ranks)


class Asking(nn.Module):
    """Notes in forward and in backward whether its unit says that a pass is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen, self.ask = nn.Linear(WIDTH, WIDTH), list[bool](), None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.note()
        if y.requires_grad:
            y.register_hook(self.note)
        return torch.tanh(y)

    def note(self, *_: Any) -> None:
        self.seen.append(self.ask())


def test_whether_a_pass_of_a_unit_is_under_way() -> None:
    """In a forward or a backward, also in a scope and a functional call; not between them."""

    def ranks(rank: int) -> None:
        model = one_unit(seeded(Asking))
        (unit,) = units(model)
        x = data(0, rank)
        model.ask = lambda: is_running(unit)
        assert is_running(unit) is False
        loss = square(model, x)
        assert is_running(unit) is False
        loss.backward()
        assert model.seen == [True, True] and is_running(unit) is False
        with gathered(model):
            assert is_running(unit) is False
            model(x)
            assert is_running(unit) is False
        functional_call(model, {n: torch.ones_like(p) for n, p in
                                seeded(Asking).named_parameters()}, (x,))  # fmt: skip
        assert model.seen == [True] * 4 and is_running(unit) is False

    simulate_ranks(ranks)


class Sharing(nn.Module):
    """Two units that have a layer in common, in which it looks around."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.Sequential(nn.Tanh())
        self.two.append(self.one[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


def test_a_place_that_two_units_share() -> None:
    """One shows its tensors there while its pass is under way, which the other is told."""

    def ranks(rank: int) -> None:
        plain = seeded(Sharing)
        model = copy.deepcopy(plain)
        fully_shard(model.one), fully_shard(model.two)
        (one,), (two,) = units(model.one), units(model.two)
        tables, seen = (model.one[0]._parameters, dict(model.one[0]._parameters)), list[Any]()

        def look(*_: Any) -> None:
            for unit in (one, two):
                seen.append(
                    [
                        is_shown_by_another(unit, table, name)
                        for table in tables
                        for name in ("weight", "bias", "other")
                    ]
                )

        look()
        model.one[0].register_forward_hook(look)
        square(model, data(0, rank)).backward()
        look()
        shown, nothing = [True, True, False] + [False] * 3, [False] * 6
        assert seen == [nothing, nothing, nothing, shown, shown, nothing, nothing, nothing]
        sum(square(plain, data(0, r)) / 2 for r in range(2)).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(whole(mine.grad), theirs.grad)

    simulate_ranks(ranks)


@pytest.mark.parametrize("of_another", [False, True])
def test_a_forward_after_one_that_a_thread_left(of_another: bool) -> None:
    """What an interrupt left, without its hooks, makes no forward of any model an inner one."""

    def ranks(rank: int) -> None:
        plain = seeded(two_blocks)
        other, model = by_block(seeded(two_blocks)), by_block(copy.deepcopy(plain))
        engine = units(model)[0].engine
        engine.schedule.active.append(units(other if of_another else model)[0])
        engine.thread = -1
        with torch.no_grad():
            assert_close(model(data(0, rank)), plain(data(0, rank)))
        assert engine.thread == get_ident() and not engine.schedule.active
        square(model, data(0, rank)).backward()
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_a_switch_clears_what_failed_on_every_device() -> None:
    """Each device has an engine; a step that failed on any of them is over."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks))
        last = units(model)[-1]
        first, last.engine = last.engine, engine_of(torch.device("meta"), EngineWork)
        for engine in (first, last.engine):
            engine.tasks[1] = Task(1, False)
            engine.tasks[1].callback = None
            assert engine.has_failed
        set_requires_gradient_sync(model, True)
        assert not first.has_failed and not last.engine.has_failed

    simulate_ranks(ranks)
