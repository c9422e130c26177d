"""What guards do for later units, tensors and forwards, and with hooks and threads of callers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from threading import get_ident
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close

from fsdp_compose import ShardingStrategy, fully_shard, set_requires_gradient_sync
from fsdp_compose.base.torch_private import pop_saved_tensor_hooks, saved_tensor_hooks
from fsdp_compose.core import forward
from fsdp_compose.core.autograd import EngineWork
from fsdp_compose.core.state import Task, engine_of

from harness import fake_world, rank_errors, simulate_ranks, single_process
from models import (
    WIDTH,
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

META = torch.device("meta")
RELEASED = {"reshard_after_forward": True}


def layer() -> nn.Module:
    return seeded(lambda: nn.Linear(WIDTH, WIDTH))


def test_submodules_without_hooks_cost_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks of a unit's own module are no reason to look through its submodules."""
    watched: list[str] = []
    monkeypatch.setattr(forward, "watch_hooked", lambda unit: watched.append(unit.name))
    with fake_world(2):
        model = by_block(seeded(two_blocks))
        for step in range(3):
            square(model, data(step, 0)).backward()
        assert not watched
        model.blocks[1].up.register_forward_hook(lambda *_: None)
        model(data(3, 0))
        assert watched == ["blocks.1"]


def test_a_forward_after_another_models_in_a_thread() -> None:
    """What an interrupted thread left of one model does not make another's forward an inner one."""

    def ranks(rank: int) -> None:
        plain = seeded(two_blocks)
        other, model = by_block(seeded(two_blocks)), by_block(copy.deepcopy(plain))
        engine = units(model)[0].engine
        engine.schedule.active.append(units(other)[0])
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
        first, last.engine = last.engine, engine_of(META, EngineWork)
        for engine in (first, last.engine):
            engine.tasks[1] = Task(1)
            engine.tasks[1].callback = None
            assert engine.has_failed
        set_requires_gradient_sync(model, True)
        assert not first.has_failed and not last.engine.has_failed

    simulate_ranks(ranks)


class Filling(nn.Linear):
    """Writes into its weight what every rank writes, and into its bias what this rank has."""

    value = 0.0

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.fill_(0.5)
            self.bias.fill_(self.value)
        return super().forward(x)


def test_each_weight_that_replicas_write_is_compared() -> None:
    """The first is alike on all ranks, the second is not."""

    def ranks(rank: int) -> None:
        model = fully_shard(Filling(WIDTH, WIDTH), strategy=ShardingStrategy.NO_SHARD)
        model.value = float(rank)
        model(torch.ones(1, WIDTH))

    for text in rank_errors(ranks, 2):
        assert text is not None and "write different weights" in text
        assert "parameter 'bias'" in text and "'weight'" not in text


class Viewing(nn.Linear):
    """Keeps a view of its weight, a new one in every forward."""

    kept: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.weight.view(-1)
        return super().forward(x)


class Looking(nn.Module):
    """Reads what its inner unit kept, after that unit's forward, while it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last, self.reads = Viewing(WIDTH, WIDTH), nn.Linear(WIDTH, 2), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return self.last(x + self.inner.kept.sum() if self.reads else x)


def test_views_are_guarded_before_the_pass_ends() -> None:
    """In later forwards too: an outer unit's forward does not read what the inner one kept."""

    def ranks(rank: int) -> None:
        model = Looking()
        fully_shard(model.inner, **RELEASED)
        fully_shard(model)
        for _ in range(3):
            model(torch.ones(1, WIDTH)).sum().backward()
        model.reads = True
        model(torch.ones(1, WIDTH))

    for text in rank_errors(ranks, 2):
        assert text is not None and "is a view of parameter 'inner.weight'" in text


class Counting(nn.Linear):
    """Gives numbers that no gradient flows through."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(-1)


class Choosing(nn.Module):
    """Has no parameters, and gives what no tensor is found in."""

    def forward(self, x: Tensor) -> Any:
        return iter([x])


def test_outputs_without_gradients_need_no_warning() -> None:
    """Integers, or what a unit without parameters gives, keep nothing gathered."""

    def ranks(rank: int) -> None:
        model = fully_shard(Counting(WIDTH, WIDTH), **RELEASED)
        assert model(torch.ones(1, WIDTH)).dtype is torch.int64
        assert_at_rest(model)

    simulate_ranks(ranks)


class Forked(nn.Linear):
    """Gives two tensors, neither of which comes of the other."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), super().forward(torch.sin(x))


def test_a_backward_from_a_later_output() -> None:
    """Also after backwards that came by the first alone."""

    def ranks(rank: int) -> None:
        plain = seeded(lambda: Forked(WIDTH, WIDTH))
        model = fully_shard(copy.deepcopy(plain), **RELEASED)
        for step in range(3):
            first, second = model(data(step, rank))
            first.sum().backward()
            del first, second
        model.zero_grad()
        model(data(3, rank))[1].square().sum().backward()
        for r in range(2):
            (plain(data(3, r))[1].square().sum() / 2).backward()
        for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(whole(found.grad), wanted.grad)
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_an_interrupt_leaves_hooks_entered_later() -> None:
    """The forward that clears up gives its activations to the hooks that are in force then."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def hooks(packed: list[Tensor]) -> saved_tensors_hooks:
        def pack(tensor: Tensor) -> Tensor:
            packed.append(tensor)
            return tensor

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def ranks(rank: int) -> None:
        model = one_unit(seeded(two_blocks))
        before, later = list[Tensor](), list[Tensor]()
        handle = model.head.register_forward_hook(interrupt)
        with hooks(before), pytest.raises(KeyboardInterrupt):
            model(data(0, rank))
        handle.remove()
        before.clear()
        with hooks(later):
            loss = square(model, data(0, rank))
        assert later and not before
        while saved_tensor_hooks() is not None:
            pop_saved_tensor_hooks()
        loss.backward()
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_saved_tensor_hooks_may_be_any_callable() -> None:
    """Also one that tells no module it was defined in."""
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    hook: Callable[[Tensor], Tensor] = pack.__call__
    assert not hasattr(hook, "__module__")
    with single_process():
        model = fully_shard(layer())
        with saved_tensors_hooks(hook, lambda tensor: tensor):
            loss = square(model, data(0, 0))
        loss.backward()
    assert packed and model.weight.grad is not None
