"""Which unit is gathered ahead of which, where the user knows better than the recorded order."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn

from fsdp_compose.base.arguments import check_kind
from fsdp_compose.core.guards.units import require_units
from fsdp_compose.core.state import Unit


def set_forward_prefetch(module: nn.Module, modules: Iterable[nn.Module] | None) -> None:
    """When the forward of ``module`` begins, gather the units of ``modules``, in this order.

    It replaces what the recorded order and ``Prefetch.forward`` say for this unit: an empty list
    gathers nothing ahead, None goes back to the recorded order. Units that are gathered already are
    passed over, and those gathered in vain are released at the end of the pass.

    Raises:
        ValueError: one of the modules is not a unit.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        >>> model = fully_shard(model, units=wrap.by_class({nn.Linear}))
        >>> set_forward_prefetch(model[0], [model[1], model[2]])
    """
    listed = _list_units(modules, "set_forward_prefetch")
    _unit_of(module, "set_forward_prefetch").expected.forward_list = listed


def set_backward_prefetch(module: nn.Module, modules: Iterable[nn.Module] | None) -> None:
    """When the backward of ``module`` begins, gather the units of ``modules``, in this order.

    As ``set_forward_prefetch``; when it happens is what ``Prefetch.backward_moment`` says.

    Raises:
        ValueError: one of the modules is not a unit.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        >>> model = fully_shard(model, units=wrap.by_class({nn.Linear}))
        >>> set_backward_prefetch(model[2], [model[1], model[0]])
    """
    listed = _list_units(modules, "set_backward_prefetch")
    _unit_of(module, "set_backward_prefetch").expected.backward_list = listed


def _unit_of(module: nn.Module, caller: str) -> Unit:
    (unit,) = require_units(module, caller, recurse=False)
    return unit


def _list_units(modules: Iterable[nn.Module] | None, caller: str) -> list[weakref.ref[Unit]] | None:
    if modules is None:
        return None
    check_kind(caller, "modules", modules, Iterable, "a list of modules, or None")
    return [weakref.ref(_unit_of(m, caller)) for m in modules]
