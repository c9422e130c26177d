"""Hooks of submodules, and saved-tensor hooks around units, in later forwards too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from fsdp_compose import fully_shard
from fsdp_compose.base.process import here
from fsdp_compose.base.torch_private import saved_tensor_hooks
from fsdp_compose.core import forward
from fsdp_compose.core.autograd import EngineWork
from fsdp_compose.core.state import engine_of

from harness import fake_world, simulate_ranks, single_process
from models import (
    WIDTH,
    assert_at_rest,
    by_block,
    data,
    one_unit,
    seeded,
    square,
    two_blocks,
    whole,
)

META = torch.device("meta")


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


def test_an_interrupt_leaves_hooks_entered_later() -> None:
    """The forward that clears up gives its activations to the hooks that are in force then."""

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
        assert later and not before and saved_tensor_hooks() is None
        loss.backward()
        assert_at_rest(model)

    simulate_ranks(ranks)


@pytest.mark.parametrize("left", [0, 1, 2])
def test_an_interrupt_in_a_unit_in_several_scopes(left: int) -> None:
    """However many of its caller's scopes it ends, the next forward finds those that are open."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks))
        names: list[str] = []
        scopes = [contextlib.ExitStack() for _ in range(2)]
        for name, scope in zip(("outer", "inner"), scopes, strict=True):

            def pack(tensor: Tensor, name: str = name) -> Tensor:
                names.append(name)
                return tensor

            scope.enter_context(saved_tensors_hooks(pack, lambda tensor: tensor))
        handle = model.blocks[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(data(0, rank))
        handle.remove()
        for scope in scopes[::-1][:left]:
            scope.close()
        names.clear()
        square(model, data(0, rank)).backward()
        assert set(names) == ({"inner"}, {"outer"}, set())[left]
        for scope in scopes[: 2 - left][::-1]:
            scope.close()
        assert saved_tensor_hooks() is None
        assert_at_rest(model)

    simulate_ranks(ranks)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


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


def test_units_of_every_device_watch_hooked_tensors() -> None:
    """A backward from what a hook kept, where another device was used first."""

    def ranks(rank: int) -> None:
        engine_of(META, EngineWork)
        model = by_block(seeded(two_blocks))
        kept: list[Tensor] = []
        for step in range(2):
            square(model, data(step, rank)).backward()
        assert next(iter(here.engines)) == META
        model.zero_grad()
        model.blocks[1].up.register_forward_hook(lambda *given: kept.append(given[2] * 1))
        model(data(2, rank))
        kept.pop().sum().backward()
        grad = whole(model.blocks[1].up.bias.grad)
        assert_close(grad, torch.full_like(grad, len(data(2, rank))))

    simulate_ranks(ranks)


@pytest.mark.parametrize("way", ["no_grad", "checkpoint"])
def test_hooks_that_keep_no_weights_stay_in_force(way: str) -> None:
    """Without gradients, and in a checkpoint, a unit's forward runs under its caller's hooks."""
    seen: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        return tensor

    with single_process():
        model = fully_shard(seeded(two_blocks))
        model.first.register_forward_hook(lambda *_: seen.append(saved_tensor_hooks()))
        if way == "no_grad":
            with torch.no_grad(), saved_tensors_hooks(pack, pack):
                model(data(0, 0))
            assert [hooks[0] for hooks in seen] == [pack]
        else:
            checkpoint(model, data(0, 0), use_reentrant=False).sum().backward()
            modules = {hooks[0].__module__ for hooks in seen}
            assert len(seen) == 2 and modules == {"torch.utils.checkpoint"}


class Twice(nn.Module):
    """Calls itself once more, and is interrupted there if it is told to be."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.interrupted = nn.Linear(WIDTH, WIDTH), False

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        y = torch.tanh(self.layer(x))
        if again:
            return self(y, again=False)
        if self.interrupted:
            raise KeyboardInterrupt
        return y


def test_an_interrupt_of_a_unit_that_calls_itself() -> None:
    """The hooks of the caller stay in force for the next forward, and are removed once."""

    def ranks(rank: int) -> None:
        model, packed = one_unit(seeded(Twice)), list[Tensor]()

        def pack(tensor: Tensor) -> Tensor:
            packed.append(tensor)
            return tensor

        def innermost() -> Any:
            found = saved_tensor_hooks()
            return found and found[0]

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            model.interrupted = True
            with pytest.raises(KeyboardInterrupt):
                model(data(0, rank))
            model.interrupted = False
            packed.clear()
            loss = square(model, data(0, rank))
            assert innermost() is pack and len(packed) >= 2
        assert innermost() is None
        loss.backward()
        assert_at_rest(model)

    simulate_ranks(ranks)
