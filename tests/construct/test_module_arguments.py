"""Functions of a module that are given something else name themselves, what they got and want."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_compose as fc

OTHERS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "None": (lambda m: None, "None"),
    "a path": (lambda m: "model.pt", "'model.pt'"),
    "a class": (lambda m: nn.Linear, "<class 'torch.nn.modules.linear.Linear'>"),
    "a list": (lambda m: [m, m], "a list"),
    "parameters": (lambda m: m.parameters(), "a generator"),
    "a parameter": (lambda m: m.weight, "a ShardedParameter"),
    "an optimizer": (lambda m: torch.optim.SGD(m.parameters()), "a SGD"),
}
REST: dict[str, tuple[Any, ...]] = {
    "load_optim_state_dict": (None, {}),
    "load_state_dict": ({},),
    "optim_state_dict": (None,),
    "prefetch_units": ([],),
    "register_comm_hook": (None, fc.default_hook),
    "register_forward_method": ("forward",),
    "register_post_reduce_hook": (lambda module, params: None,),
    "seeded_init": (0,),
    "set_backward_prefetch": (None,),
    "set_forward_prefetch": (None,),
    "set_gradient_divide_factor": (2.0,),
    "set_state_dict_type": ("full",),
    "state_dict_type": ("full",),
    "apply": (lambda module: None,),
}
BY_PATH = ("save_checkpoint", "load_checkpoint", "save_full", "load_full")
LISTS_TOO = {"fully_shard", "plan"}  # their errors are in test_option_errors.py
ALIASES = {
    "get_state_dict_type": "state_dict_type",
    "set_state_dict_type": "state_dict_type",
    "summon_full_params": "gathered",
}


def functions_of_modules() -> list[str]:
    """The public functions whose first parameter is a module."""
    named = {n: getattr(fc, n) for n in fc.__all__ if inspect.isfunction(getattr(fc, n))}
    first = {n: next(iter(inspect.signature(f).parameters), None) for n, f in named.items()}
    return sorted({n for n, name in first.items() if name == "module"} - LISTS_TOO)


def call(name: str, module: Any) -> Any:
    """Call it with what else it needs, and enter or exhaust what it returns."""
    rest = REST.get(name, (True,) if name.startswith("set_") else ())
    result = getattr(fc, name)(module, *rest)
    if isinstance(result, AbstractContextManager):
        with result:
            pass
    elif inspect.isgenerator(result):
        list(result)


@pytest.mark.parametrize("name", functions_of_modules())
def test_what_is_no_module_is_refused(name: str) -> None:
    model = fc.fully_shard(nn.Linear(2, 2))
    for what, (make, found) in OTHERS.items():
        if name == "trace" and what == "None":
            continue  # all units of the process
        wanted = rf"module is {re.escape(found)}; wanted an nn\.Module, such as the model"
        with pytest.raises(TypeError, match=wanted) as raised:
            call(name, make(model))
        assert str(raised.value).startswith(f"{ALIASES.get(name, name)}: ")
    assert fc.is_fully_sharded(model)


@pytest.mark.parametrize("name", BY_PATH)
def test_swapped_path_and_module(name: str) -> None:
    model = fc.fully_shard(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=f"{name}: module is 'model.pt'; wanted an nn.Module"):
        getattr(fc, name)(model, "model.pt")


def test_many_functions_are_asked() -> None:
    assert len(functions_of_modules()) > 35


@pytest.mark.parametrize("stage", [None, "x", nn.Linear(2, 2), nn.Linear])
def test_a_pipeline_stage_is_no_module(stage: Any) -> None:
    with pytest.raises(TypeError, match=r"pipeline_stage: stage is .*; wanted a stage of torch"):
        fc.pipeline_stage(stage)
