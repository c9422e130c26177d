"""Find the units of a module, its own, or those around it, or say that it has none."""

from __future__ import annotations

from torch import nn

from fsdp_compose.base.arguments import check_flags, check_module
from fsdp_compose.base.process import here
from fsdp_compose.buckets.entries import entry_of
from fsdp_compose.core.guards.scope_parameters import leaf_of
from fsdp_compose.core.state import Unit, _FSDPState, find_state, iter_units, owner_of, unit_of


def require_units(
    module: nn.Module, caller: str, recurse: bool = True, advice: str = ""
) -> list[Unit]:
    """Find the units of ``module`` and its submodules; without ``recurse`` only its own.

    Raises:
        ValueError: there is none. The text ends with ``advice``.
        TypeError: ``module`` is none, or ``recurse`` is no bool.
    """
    check_module(caller, module)
    check_flags(caller, recurse=recurse)
    state = find_state(module)
    own = [] if state is None else [state.unit]
    units = list(iter_units(module)) if recurse else own
    if units:
        return units
    found = f"{type(module).__name__} is not a unit{' and contains none' if recurse else ''}"
    wanted = "one that contains such modules" if recurse else "one that its units= policy chose"
    raise ValueError(
        f"{caller}: {found}; pass a module that fully_shard was called on, or {wanted}. "
        f"{advice}".strip()
    )


def list_all_units() -> list[Unit]:
    """The units of all models in this process."""
    return [unit for engine in here.engines.values() for unit in engine.units]


def list_opened() -> list[Unit]:
    """The units of all models over which a scope is open."""
    found: list[Unit] = []
    for engine in here.engines.values():
        for unit in engine.opened:
            if unit.opened is not None:
                found.append(unit)
            else:
                engine.opened.discard(unit)
    return found


def modules_of(unit: Unit) -> list[nn.Module]:
    """The unit's modules, without those that nobody has any more."""
    return [module for ref in unit.modules if (module := ref()) is not None]


def list_nested(unit: Unit) -> list[Unit]:
    """The unit and those nested in it, in the order its modules register them."""
    nested = (inner for module in modules_of(unit) for inner in iter_units(module))
    return list(dict.fromkeys(nested))


def units_holding(module: nn.Module) -> list[Unit]:
    """Units of ``module`` and its submodules, then those around it that hold parameters of it."""
    found = dict.fromkeys(iter_units(module))
    for param in module.parameters():
        entry = entry_of(leaf_of(param))
        if entry is not None and entry.owner is not None:
            found.setdefault(unit_of(owner_of(entry)))
    return list(found)


def get_state(module: nn.Module) -> _FSDPState:
    """The state ``fully_shard`` attached to ``module``.

    Raises:
        ValueError: ``module`` is not a unit.
        TypeError: it is no module.

    Example:
        >>> get_state(fully_shard(nn.Linear(2, 2))).unit.name
        'Linear'
    """
    check_module("get_state", module)
    state = find_state(module)
    if state is None:
        raise ValueError(
            f"{type(module).__name__} is not a unit; pass a module that fully_shard was called on, "
            "or one that its units= policy chose."
        )
    return state


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` made ``module`` a unit.

    >>> is_fully_sharded(fully_shard(nn.Linear(2, 2)))
    True
    """
    check_module("is_fully_sharded", module)
    return find_state(module) is not None
