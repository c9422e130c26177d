"""Switches and flags take True and False: what merely looks like one of them is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_compose as fc

SWITCHES = (
    fc.set_requires_gradient_sync,
    fc.set_requires_all_reduce,
    fc.set_is_last_backward,
    fc.set_reshard_after_forward,
    fc.set_reshard_after_backward,
    fc.set_find_unused_parameters,
    fc.set_traceable,
)
GATHERED = ("writeback", "with_grads", "rank0_only", "offload_to_cpu", "recurse")
WRONG: tuple[Any, ...] = ("False", 2, 0, None, [], torch.tensor(True))


def model() -> nn.Module:
    return fc.fully_shard(nn.Linear(2, 2))


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("name", ["value", "recurse"])
def test_switches_take_booleans(switch: Callable[..., None], name: str) -> None:
    """And what was set stays as it was."""
    unit = fc.get_state(sharded := model()).unit
    before = vars(unit.switches).copy()
    for wrong in WRONG:
        with pytest.raises(TypeError, match=rf"{switch.__name__}: {name} is .*; wanted True or F"):
            switch(sharded, **{"value": False, name: wrong})
    assert vars(unit.switches) == before and unit.traced is None
    switch(sharded, False)
    before = vars(unit.switches).copy()
    fc.reduce_grads(sharded)
    for scope in (fc.no_sync(sharded), fc.accumulate(sharded, keep="unsharded")):
        with pytest.raises(KeyError), scope:
            raise KeyError
    assert vars(unit.switches) == before


@pytest.mark.parametrize("name", GATHERED)
def test_flags_of_a_scope(name: str) -> None:
    for wrong in WRONG:
        with pytest.raises(TypeError, match=rf"gathered: {name} is .*; wanted True or False"):
            with fc.gathered(model(), **{name: wrong}):
                pytest.fail("the scope was entered")


def test_flags_of_other_functions() -> None:
    calls: dict[str, Callable[[Any], object]] = {
        "unshard: async_op": lambda wrong: fc.unshard(model(), wrong),
        "units_of: root_only": lambda wrong: fc.units_of(model(), wrong),
        "set_debug: enabled": lambda wrong: fc.set_debug(wrong),
        "clip_grad_norm_: error_if_nonfinite": lambda wrong: fc.clip_grad_norm_(
            model(), 1.0, error_if_nonfinite=wrong
        ),
    }
    for what, call in calls.items():
        for wrong in WRONG:
            with pytest.raises(TypeError, match=rf"{what} is .*; wanted True or False"):
                call(wrong)
