"""The guard on optimizer steps: what would train nothing, or on the wrong values, raises (D12)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp_compose.buckets.bucket import Entry
from fsdp_compose.buckets.entries import find_entry
from fsdp_compose.core.guards.scope_parameters import end_rests, rest
from fsdp_compose.core.reducing import get_grad, requires_grad
from fsdp_compose.core.state import all_engines, owner_of
from fsdp_compose.optim.unaveraged_parameters import check_unaveraged
from fsdp_compose.scopes.unshard import check_reduced, is_open
from fsdp_compose.sharded import (
    QUANTIZING,
    is_sharded_parameter,
    spec_of,
)


def guard_steps() -> None:
    """Check every optimizer step of the process from the first unit on; called once."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any] | None:
    """Let parameters that a scope shows in full hold their shards for the step, and check it."""
    rested = _rest_parameters(optimizer)
    try:
        _check_step(optimizer, args, kwargs)
    except BaseException:
        end_rests(rested)
        raise
    if not rested:
        return None
    if len(args) > 1 and args[1] is not None:
        return (args[0], _in_full(args[1], rested), *args[2:]), kwargs
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": _in_full(kwargs["closure"], rested)}
    return None


def _in_full(closure: Callable[[], Any], rested: list[Entry]) -> Callable[[], Any]:
    """``closure`` for a step inside a scope: its forward sees the parameters in full."""

    def call() -> Any:
        end_rests(rested)
        result = closure()
        for entry in rested:
            rest(entry)
        return result

    return call


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    end_rests(_shown_entries())


def _shown_entries() -> list[Entry]:
    return [
        entry
        for engine in all_engines()
        for unit in engine.units
        if unit.opened is not None
        for entry in unit.entries
    ]


def _rest_parameters(optimizer: torch.optim.Optimizer) -> list[Entry]:
    """The optimizer's parameters that a scope shows in full, which now hold their shards."""
    shown = {id(entry.held): entry for entry in _shown_entries()}
    if not shown:
        return []
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [e for p in params if (e := shown.get(id(p))) is not None and rest(e)]


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse a step that would train nothing or without gradients that wait to be reduced, and drop
    weights gathered ahead."""
    if type(optimizer).__module__.startswith("torchao."):
        _refuse_torchao(optimizer)
    caller = f"{type(optimizer).__name__}.step()"
    for engine in all_engines():
        waits = any(is_open(bucket) for unit in engine.units for bucket in unit.buckets)
        if not waits and not engine.schedule.prefetched:
            continue
        for group in optimizer.param_groups:
            for param in group["params"]:
                if not is_sharded_parameter(param):
                    continue
                if waits:
                    check_reduced([owner_of(find_entry(param))], caller, param)
                if engine.schedule.prefetched:
                    engine.schedule.drop_prefetched()
    check_unaveraged(optimizer)
    if len(args) < 2 and kwargs.get("closure") is None:
        _check_any_gradient(optimizer)


def _refuse_torchao(optimizer: torch.optim.Optimizer) -> None:
    """Raise where its compiled step would be given sharded parameters.

    Raises:
        RuntimeError: naming one.
    """
    for group in optimizer.param_groups:
        for param in filter(is_sharded_parameter, group["params"]):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step(): it was given {spec_of(param).fqn!r} (unit "
                f"{spec_of(param).unit!r}), which is sharded. {QUANTIZING}"
            )


def _check_any_gradient(optimizer: torch.optim.Optimizer) -> None:
    """Raise when no parameter has a gradient, though a sharded one is to be trained (D12)."""
    idle: nn.Parameter | None = None
    for group in optimizer.param_groups:
        for param in group["params"]:
            if get_grad(param) is not None:
                return
            if idle is None and is_sharded_parameter(param) and requires_grad(param):
                idle = param
    if idle is not None:
        spec = spec_of(idle)
        raise RuntimeError(
            f"{type(optimizer).__name__}.step(): no parameter has a gradient, so nothing would be "
            f"trained; found .grad None for all, {spec.fqn!r} (unit {spec.unit!r}) among them. "
            "Call loss.backward() between zero_grad() and step(), with a loss that depends on them."
        )
