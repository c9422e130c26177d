"""Raises where a model has trainable parameters in no unit beside sharded ones.

Nothing reduces their gradients, so every rank would train them on its own data. A unit does not
know the model around it. Its first forward finds that model on the stack, as the outermost module
whose call is under way, and its first backward looks through it, once for each such module. They
look again after the first step of another optimizer, which may train what was added around it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_compose.base.modules import walk_modules
from fsdp_compose.base.process import here
from fsdp_compose.base.torch_private import parameter_slots
from fsdp_compose.base.torch_stack import calling_modules
from fsdp_compose.base.wording import quote_names
from fsdp_compose.core.guards.scope_parameters import is_whole
from fsdp_compose.core.state import Unit, find_state, iter_units
from fsdp_compose.sharded import is_sharded

UNAVERAGED = "Nothing averages their gradients, so every rank would train them on its own data."


def find_surroundings(unit: Unit) -> None:
    """Record the outermost module whose forward is running, for the unit's first backward."""
    unit.checks.looked_around = True
    if all(bucket.mesh.size == 1 for bucket in unit.gathered):
        return
    outermost = list(calling_modules())[-1:]
    for module in outermost:
        if find_state(module) is None and module not in unit.engine.surveyed:
            unit.checks.surroundings = weakref.ref(module)


def look_again() -> None:
    """Have each unit look for the model around it in its next forward and backward."""
    for engine in here.engines.values():
        engine.surveyed.clear()
        for unit in engine.units:
            unit.checks.looked_around = False


def check_noted(unit: Unit) -> None:
    """At the unit's first backward, look through the module that its forward ran in.

    Raises:
        RuntimeError: naming trainable parameters that are in no unit.
    """
    assert unit.checks.surroundings is not None
    module = unit.checks.surroundings()
    if module is not None and any(inner is unit for inner in iter_units(module)):
        check_once(module, "backward")
    unit.checks.surroundings = None


def check_once(module: nn.Module, caller: str) -> None:
    """As ``check_surroundings``, unless ``module`` was looked through before."""
    surveyed = {id(unit.engine): unit.engine.surveyed for unit in iter_units(module)}.values()
    if all(module in known for known in surveyed):
        return
    check_surroundings(module, caller)
    for known in surveyed:
        known.add(module)


def check_surroundings(module: nn.Module, caller: str) -> None:
    """Raise when ``module`` has units over several ranks and trainable parameters in none.

    Raises:
        RuntimeError: naming them.
    """
    units = [u for u in iter_units(module) if any(b.mesh.size > 1 for b in u.gathered)]
    if not units:
        return
    names = list(_outside(module, units))
    if names:
        raise RuntimeError(
            f"{caller}: trainable parameters of the {type(module).__name__} around unit "
            f"{units[0].name!r} are in no unit: {quote_names(names)}. {UNAVERAGED} Shard the "
            "model around its units too, with fully_shard(model), or freeze these parameters. If "
            "something else averages their gradients, say so when sharding: "
            "fully_shard(..., ignored=[parameter, ...])."
        )


def _outside(module: nn.Module, units: list[Unit]) -> Iterator[str]:
    """List the names of trainable parameters that no unit has or was told to ignore."""
    known = {(id(values), name) for unit in units for values, name, _ in unit.links.places}
    left_alone = {
        key for u in units for key, ref in u.checks.left_alone.items() if ref() is not None
    }

    def is_averaged(one: nn.Module) -> bool:
        return isinstance(one, DistributedDataParallel) or id(one) in left_alone

    for path, current in () if is_averaged(module) else walk_modules(module, is_averaged):
        values = parameter_slots(current)
        for name, value in values.items():
            if (
                isinstance(value, nn.Parameter)
                and value.requires_grad
                and (id(values), name) not in known
                and not is_sharded(value)
                and not is_whole(value)
                and id(value) not in left_alone
            ):
                yield f"{path}.{name}" if path else name
