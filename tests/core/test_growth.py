"""What is done once for a model grows with its units, and no faster: bytecodes are counted."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_compose as fc
from fsdp_compose import wrap

from harness import fake_world
from models import Block


def _count(call: Callable[[], object]) -> int:
    """Bytecodes that ``call`` executes, in Python called from C too."""
    executed = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal executed
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        executed += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.collect()
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return executed


def _open(model: nn.Module) -> None:
    with fc.gathered(model):
        pass


def _unshard(model: nn.Sequential) -> None:
    for block in model:
        fc.unshard(block)
        fc.reshard(block)


def _costs(units: int) -> dict[str, int]:
    """By what is done: the bytecodes for a model of so many units."""
    model = nn.Sequential(*(Block(2) for _ in range(units)))
    x = torch.ones(1, 2, requires_grad=True)
    optim = torch.optim.AdamW(model.parameters())
    calls = {
        "fully_shard": lambda: fc.fully_shard(model, units=wrap.by_class({Block})),
        "first step": lambda: model(x).sum().backward(),
        "clip_grad_norm_": lambda: fc.clip_grad_norm_(model, 1.0),
        "gathered": lambda: _open(model),
        "unshard": lambda: _unshard(model),
        "iter_full": lambda: list(fc.iter_full(model)),
        "optimizer's first step": lambda: optim.step(),
        "optim_state_dict": lambda: fc.optim_state_dict(model, optim, kind="sharded"),
        "deepcopy": lambda: copy.deepcopy(model),
        "explain": lambda: fc.explain(model),
        "state_dict": lambda: fc.state_dict(model, kind="sharded"),
        "to": lambda: model.double(),
        "refresh": lambda: fc.refresh(model),
        "undo": lambda: fc.undo(model),
    }
    return {name: _count(call) for name, call in calls.items()}


def test_set_up_grows_with_the_units() -> None:
    """A model of 3n units costs as much more than one of 2n as that more than one of n."""
    with fake_world(2):
        _costs(2)  # what is done once in a process
        small, middle, large = (_costs(units) for units in (4, 8, 12))
    for name in small:
        first, second = middle[name] - small[name], large[name] - middle[name]
        assert second == pytest.approx(first, rel=1e-3), name


class _Weights(nn.Module):
    """Parameters without a forward."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for index in range(count):
            self.register_parameter(f"p{index}", nn.Parameter(torch.ones(4)))


def _count_kept(units: int, params: int) -> int:
    """Objects that ``fully_shard`` leaves Python's garbage collector to look at, over and over."""
    model = nn.Sequential(*(_Weights(params) for _ in range(units)))
    gc.collect()
    before = len(gc.get_objects())
    fc.fully_shard(model, units=wrap.by_class({_Weights}))
    for _ in range(3):  # tuples of tuples of numbers are let go of from the inside out
        gc.collect()
    return len(gc.get_objects()) - before


def test_objects_of_a_parameter_and_a_unit() -> None:
    """A collection takes time for each: FSDP2 keeps 26 for a parameter and 34 for a unit.

    Nor are there more for more ranks.
    """
    with fake_world(64):
        _count_kept(2, 2)  # what is done once in a process
        few, more, units = _count_kept(4, 4), _count_kept(4, 14), _count_kept(14, 4)
    parameter = (more - few) / 40
    assert parameter <= 10
    assert (units - few) / 10 - 4 * parameter <= 70
