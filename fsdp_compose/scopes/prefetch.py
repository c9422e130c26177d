"""Which unit is gathered ahead of which, where the user knows better than the recorded order."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn

from fsdp_compose.construct.trace import ExecutionOrder
from fsdp_compose.core.guards.units import require_units
from fsdp_compose.core.state import Unit, find_state


def set_forward_prefetch(module: nn.Module, modules: Iterable[nn.Module] | None) -> None:
    """When the forward of ``module`` begins, gather the units of ``modules``, in this order.

    It replaces what the recorded order and ``Prefetch.forward`` say for this unit: an empty list
    gathers nothing ahead, None goes back to the recorded order. Units that are gathered already are
    passed over, and those gathered in vain are released at the end of the pass.

    Raises:
        ValueError: one of the modules is not a unit.
    """
    listed = _listed(modules, "set_forward_prefetch")
    _unit_of(module, "set_forward_prefetch").forward_list = listed


def set_backward_prefetch(module: nn.Module, modules: Iterable[nn.Module] | None) -> None:
    """When the backward of ``module`` begins, gather the units of ``modules``, in this order.

    As ``set_forward_prefetch``; when it happens is what ``Prefetch.backward_moment`` says.

    Raises:
        ValueError: one of the modules is not a unit.
    """
    listed = _listed(modules, "set_backward_prefetch")
    _unit_of(module, "set_backward_prefetch").backward_list = listed


def _unit_of(module: nn.Module, caller: str) -> Unit:
    (unit,) = require_units(module, caller, recurse=False)
    return unit


def _listed(modules: Iterable[nn.Module] | None, caller: str) -> list[weakref.ref[Unit]] | None:
    return None if modules is None else [weakref.ref(_unit_of(m, caller)) for m in modules]


def seed_order(module: nn.Module, order: ExecutionOrder) -> None:
    """Expect the units of ``module`` in the traced order, so that the first iteration prefetches.

    Args:
        module: what was traced, now sharded.
        order: what ``trace_execution_order`` found before.

    Raises:
        ValueError: ``order`` names submodules that ``module`` does not have, or none of them is a
            unit.
    """
    known = dict(module.named_modules(remove_duplicate=False))
    missing = next((name for name in order.modules if name not in known), None)
    if missing is not None:
        raise ValueError(
            f"seed_order: the trace has a submodule {missing!r}, {type(module).__name__} has none; "
            "pass the order that trace_execution_order gave for this module."
        )
    passes: list[list[Unit]] = []
    outermost = ""
    for name in order.modules:
        state = find_state(known[name])
        if state is None:
            continue
        if not passes or not f"{name}.".startswith(f"{outermost}." if outermost else ""):
            outermost = name
            passes.append([])
        if len(state.unit.modules) == 1 or state.unit not in passes[-1]:
            passes[-1].append(state.unit)
    if not passes:
        raise ValueError(
            f"seed_order: no unit of {type(module).__name__} is called in the trace; call "
            "fully_shard first."
        )
    passes[0][0].lane.schedule.forward_order.seed(passes)
    for visits in passes:
        visits[0].eval_order.seed([visits])
