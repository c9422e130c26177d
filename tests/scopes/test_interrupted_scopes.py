"""Ctrl-C at any line of a scope of full parameters leaves parameters that hold their slices."""

from __future__ import annotations

import contextlib
import copy
import dis
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from fsdp_compose import MixedPrecision, fully_shard, gathered, reshard, unshard

from models import assert_at_rest, data, seeded, sgd, square, units

FILES = {
    str(Path(str(sys.modules[name].__file__)))
    for name in (
        "fsdp_compose.buckets.entries",
        "fsdp_compose.core.guards.scope_parameters",
        "fsdp_compose.scopes.gathered",
        "fsdp_compose.scopes.module_edits",
        "fsdp_compose.scopes.open_scope",
        "fsdp_compose.scopes.unshard",
    )
}


def interrupt_at(number: int, call: Callable[[], Any]) -> bool:
    """Press Ctrl-C at the place ``number`` of ``FILES`` that ``call`` comes to; whether it did.

    By the signal, in the main thread, where Python looks for it: as a function begins, when a call
    has returned, and as a loop goes on.
    """
    left, before = number, dict[int, str]()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        last = before.get(id(frame), "")
        before[id(frame)] = "CALL"
        if event == "opcode":
            before[id(frame)] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            left -= last.startswith(("CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE"))
            if left == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return trace

    found = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(found)
    return left <= 0


def edit(model: nn.Module) -> None:
    with torch.no_grad(), gathered(model, writeback=True):
        model.weight.mul_(1)


def keep(model: nn.Module) -> None:
    unshard(model)
    reshard(model)


def step(model: nn.Module) -> None:
    """A step that writes every parameter and leaves it as it is."""
    unshard(model)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    reshard(model)


@pytest.mark.parametrize("call", [edit, keep, step])
def test_an_interrupt_at_each_place(call: Callable[[nn.Module], None]) -> None:
    """The parameters are what they were, and a step trains them as one process does."""
    plain = seeded(lambda: nn.Linear(6, 2))
    model = fully_shard(copy.deepcopy(plain))
    (unit,), optims = units(model), [sgd(twin.parameters()) for twin in (plain, model)]
    number, more = 0, True
    while more:
        number += 1
        more = interrupt_at(number, partial(call, model))
        reshard(model)
        model.zero_grad()
        assert unit.opened is None, number
        for entry in unit.entries:
            assert entry.held is entry.param and not entry.layers, number
            assert type(entry.param).__name__ == "ShardedParameter", number
        if number % 50 == 0 or not more:
            for twin, optim in zip((plain, model), optims, strict=True):
                optim.zero_grad()
                square(twin, data(number, 0)).backward()
                optim.step()
            for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                assert_close(found.full_tensor(), wanted.detach())
    assert number > 100
    model.zero_grad()
    assert_at_rest(model)


class Stopped(nn.Module):
    """A linear layer whose forward is interrupted on its first call, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 2), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        outputs: torch.Tensor = self.layer(inputs)
        if self.calls == 1:
            raise KeyboardInterrupt
        return outputs


def stop_once(model: nn.Module) -> None:
    with pytest.raises(KeyboardInterrupt):
        model(data(0, 0))


@pytest.mark.parametrize("goes_on", [False, True])
def test_an_interrupted_forward_in_a_scope(goes_on: bool) -> None:
    """What is written back is the scope's tensor, and not the copy the forward computed on."""
    plain = seeded(Stopped)
    model = fully_shard(copy.deepcopy(plain), mp_policy=MixedPrecision(torch.bfloat16))
    (unit,) = units(model)
    with torch.no_grad(), gathered(model, writeback=True):
        stop_once(model)
        if goes_on:
            model(data(0, 0))
            assert model.layer.weight.dtype == torch.float64
            model.layer.weight.add_(1e-5)
            plain.layer.weight.add_(1e-5)
    assert not unit.run.modes
    assert unit.opened is None
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(found.full_tensor(), wanted.detach(), rtol=0, atol=0)


def test_an_interrupt_that_ends_the_scope_too() -> None:
    model = fully_shard(seeded(Stopped))
    with pytest.raises(KeyboardInterrupt), gathered(model):
        model(data(0, 0))
    (unit,) = units(model)
    assert not unit.run.modes
    square(model, data(0, 0)).backward()
    model.zero_grad()
    assert_at_rest(model)


def test_a_write_into_an_interrupted_copy() -> None:
    """The copy is in the forward's dtype, and a write into it would be lost."""
    model = fully_shard(seeded(Stopped), mp_policy=MixedPrecision(torch.bfloat16))
    before = model.layer.weight.full_tensor().clone()
    lost = r"'layer.weight' of unit 'Stopped' was written while it was gathered for a forward"
    with pytest.raises(RuntimeError, match=lost):
        write_after_interrupt(model)
    assert_close(model.layer.weight.full_tensor(), before, rtol=0, atol=0)


def write_after_interrupt(model: nn.Module) -> None:
    with torch.no_grad(), gathered(model, writeback=True):
        stop_once(model)
        model.layer.weight.mul_(2)


def test_scopes_inside_an_interrupted_forward() -> None:
    """A call that goes on keeps its own entry, whichever scope the interrupted one was in."""
    model = seeded(Stopped)
    fully_shard(model)
    (unit,) = units(model)
    found: list[int] = []

    def look(module: nn.Module, args: Any) -> None:
        if not found:
            found.append(0)
            with gathered(module):
                stop_once(module)
            found[0] = len(unit.run.modes)

    with gathered(model):
        model.register_forward_pre_hook(look)
        model(data(0, 0))
        assert found == [1]
    assert not unit.run.modes


class Again(nn.Module):
    """Calls itself, goes on when that is interrupted, and calls itself again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.depth, self.read = nn.Linear(6, 2), 0, list[torch.dtype]()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.depth += 1
        if self.depth == 2:
            raise KeyboardInterrupt
        if self.depth == 1:
            with contextlib.suppress(KeyboardInterrupt):
                self(inputs)
            self(inputs)
        self.read.append(self.layer.weight.dtype)
        outputs: torch.Tensor = self.layer(inputs)
        return outputs


def test_an_interrupted_call_inside_one_that_goes_on() -> None:
    """The one around it keeps what it computes on, and its end shows the scope's tensors."""
    model = fully_shard(seeded(Again), mp_policy=MixedPrecision(torch.bfloat16))
    (unit,) = units(model)
    with torch.no_grad(), gathered(model):
        assert model(data(0, 0)).dtype == torch.bfloat16
        assert model.read == [torch.bfloat16, torch.bfloat16]
        assert model.layer.weight.dtype == torch.float64
        assert unit.opened is not None
        assert unit.opened.calls == 0
        assert not unit.run.modes
