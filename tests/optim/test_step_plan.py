"""A step whose lists are filled by plan is, bit for bit, one that asks each sharded tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compose.base.group import SELF
from fsdp_compose.optim.slice_step import _plans
from fsdp_compose.sharded import ShardedWeightError, is_sharded, spec_of, tag, to_local

from checked_steps import assert_steps_agree, give, guard, same, tensors
from optimizers import O
from sharded_values import shard

Change = Callable[[Any, list[Any]], None]


def replace_state(optimizer: Any, params: list[Any]) -> None:
    state = optimizer.state[params[1]]
    state["exp_avg"] = state["exp_avg"].clone().mul_(0.5)


def replace_memory(optimizer: Any, params: list[Any]) -> None:
    """The same objects over other memory, as when state or parameters are moved."""
    state = optimizer.state[params[1]]
    state["exp_avg"].data = state["exp_avg"].clone().mul_(0.5)
    params[1].data = params[1].detach().clone().mul_(0.5)


def write_state(optimizer: Any, params: list[Any]) -> None:
    optimizer.state[params[1]]["exp_avg"].mul_(0.5)
    optimizer.state[params[2]]["step"].fill_(7.0)


def add_group(optimizer: Any, params: list[Any]) -> None:
    params += shard(tensors(7), SELF)[:1]
    optimizer.add_param_group({"params": params[-1:], "lr": 0.3})


def exchange_parameter(optimizer: Any, params: list[Any]) -> None:
    """A sharded parameter in the place of another, and without state."""
    params[1] = optimizer.param_groups[0]["params"][1] = shard(tensors(7), SELF)[1]


def rename(optimizer: Any, params: list[Any]) -> None:
    tag(params[1], replace(spec_of(params[1]), fqn="other"))


def set_options(**options: Any) -> Change:
    return lambda optimizer, params: optimizer.param_groups[0].update(options)


PLANNED: dict[str, Change] = {
    "nothing": lambda optimizer, params: None,
    "numbers": set_options(lr=0.2, betas=(0.8, 0.9), weight_decay=0.2),
    "state written": write_state,
    "memory replaced": replace_memory,
}
ASKED: dict[str, Change] = {
    "state replaced": replace_state,
    "state loaded": lambda optimizer, _: optimizer.load_state_dict(optimizer.state_dict()),
    "state of one removed": lambda optimizer, params: optimizer.state.pop(params[1]),
    "state of all removed": lambda optimizer, params: optimizer.state.clear(),
    "a gradient missing": lambda optimizer, params: setattr(params[1], "grad", None),
    "a group added": add_group,
    "another parameter": exchange_parameter,
    "a parameter renamed": rename,
    "a tensor as learning rate": set_options(lr=torch.tensor(0.2)),
    "weight decay off": set_options(weight_decay=0.0),
    "maximize": set_options(maximize=True),
}


@pytest.mark.parametrize("name", [*PLANNED, *ASKED])
def test_changes_between_steps(name: str) -> None:
    """Torch is asked in the first two steps, and once more after what may change the lists."""
    change = {**PLANNED, **ASKED}[name]
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        if name == "a tensor as learning rate" and "foreach" in options:
            continue
        assert assert_steps_agree(change, **options)[:4] == [True, True, False, name in ASKED]


@pytest.mark.parametrize("whole", [True, False])
def test_state_that_changed_owners_is_refused(whole: bool) -> None:
    """Dictionaries of state, or tensors in them, that two parameters exchange."""
    guard()
    params = shard([torch.ones(4), torch.ones(4)], SELF)
    optimizer = O.AdamW(params, 0.1)
    for _ in range(3):
        give(params, [torch.ones(4)] * 2)
        optimizer.step()
    first, second = optimizer.state.values()
    if whole:
        optimizer.state.clear()
        optimizer.state.update({params[1]: first, params[0]: second})
    else:
        first["exp_avg"], second["exp_avg"] = second["exp_avg"], first["exp_avg"]
    with pytest.raises(ShardedWeightError, match="is cut differently"):
        optimizer.step()
    assert all(map(is_sharded, params)) and is_sharded(first["exp_avg"])


def test_two_gradients_that_were_one_tensor() -> None:
    """Each parameter is stepped by its own as soon as there are two."""
    guard()
    params = [shard([torch.ones(4)], SELF)[0] for _ in range(2)]
    plain = [torch.nn.Parameter(torch.ones(4)) for _ in params]
    pairs = [(side, O.AdamW(side, 0.1)) for side in (params, plain)]
    for step in range(4):
        for (first, second), optimizer in pairs:
            first.grad = torch.ones(4)
            second.grad = first.grad if step < 2 else torch.full((4,), -3.0)
            optimizer.step()
    for param, other in zip(params, plain, strict=True):
        assert torch.equal(to_local(param), other)


def test_a_plan_keeps_nothing_alive() -> None:
    """State may be moved away between steps, and what takes its address is another tensor."""
    guard()
    params = shard(tensors(0), SELF)
    optimizer = O.AdamW(params, 0.1, foreach=True)
    for number in range(3):
        give(params, tensors(number))
        optimizer.step()
    plan = _plans[optimizer]
    state = optimizer.state[params[1]]
    held = [weakref.ref(state["exp_avg"]), weakref.ref(to_local(params[0].grad))]
    other = state["exp_avg"].clone()
    del state["exp_avg"]
    optimizer.zero_grad()
    assert [watched() for watched in held] == [None, None]
    optimizer.state[params[1]] = {"step": state["step"], "exp_avg": other, **state}
    values = [v for values in optimizer.state.values() for v in values.values()]
    plan.ids[:] = map(id, values)  # as if the new one had got the address of the old one
    give(params, tensors(5))
    optimizer.step()
    assert _plans.get(optimizer) is not plan


def test_state_in_other_mappings_is_left_to_torch() -> None:
    guard()
    from collections import UserDict

    params = shard(tensors(0), SELF)
    optimizer = O.SGD(params, 0.1, momentum=0.9, foreach=True)
    for number in range(4):
        give(params, tensors(number))
        optimizer.step()
        for p in params:
            optimizer.state[p] = UserDict(optimizer.state[p])
    twin = shard(tensors(0), SELF)
    plain = O.SGD(twin, 0.1, momentum=0.9, foreach=True)
    for number in range(4):
        give(twin, tensors(number))
        plain.step()
    assert all(same(p, q) for p, q in zip(params, twin))


class Kernels(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def test_a_planned_step_reads_no_number() -> None:
    """The host would wait for a learning rate, or a step count, that lies on a device."""
    guard()
    params = shard(tensors(0), SELF)
    optimizer = O.AdamW(params, torch.tensor(0.1), fused=True)
    for number in range(4):
        give(params, tensors(number))
        with Kernels() as kernels:
            optimizer.step()
    called = [name for name in kernels.names if not name.startswith("_record_function")]
    assert called == ["_foreach_add_", "_fused_adamw_"]
