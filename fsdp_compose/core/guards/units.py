"""Find the units of a module, or say that it has none."""

from __future__ import annotations

from torch import nn

from fsdp_compose.core.state import Unit, find_state, iter_units


def require_units(
    module: nn.Module, caller: str, recurse: bool = True, advice: str = ""
) -> list[Unit]:
    """Find the units of ``module`` and its submodules; without ``recurse`` only its own.

    Raises:
        ValueError: there is none. The text ends with ``advice``.
    """
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
