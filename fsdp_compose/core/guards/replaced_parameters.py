"""Parameters that somebody replaced since their unit was sharded."""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_compose.core.gathering import install_leaves
from fsdp_compose.core.guards.scope_parameters import leaf_of
from fsdp_compose.core.state import Unit
from fsdp_compose.sharded import TENSOR_PARALLEL_FIRST, ShardSpec


def is_shown_by_another(unit: Unit, values: dict[str, Any], name: str) -> bool:
    """Whether another unit, whose pass is under way, put its tensor at ``values[name]``."""
    others = (ref() for ref in unit.links.sharers)
    return any(
        place[0] is values and place[1] == name
        for other in others
        if other is not None and other.run.showing is not None
        for place in other.links.places
    )


def find_replaced(unit: Unit) -> list[tuple[dict[str, Any], str, int]]:
    """List the places of the unit that do not hold what they hold between passes."""
    links = unit.links
    held = links.leaves if unit.opened is None else unit.opened.tensors
    found = map(dict.get, links.tables, links.names)
    wanted = held if links.indices is None else map(held.__getitem__, links.indices)
    if all(map(is_, found, wanted)):
        return []
    return [
        place
        for place in unit.links.places
        if place[0].get(place[1]) is not held[place[2]]
        and not is_shown_by_another(unit, *place[:2])
    ]


def return_leaves(unit: Unit) -> None:
    """Put the sharded parameters back, but not over tensors that the user put into modules."""
    shown = unit.run.showing  # what the failed pass put there, if its end did not take it away
    given = [
        (values, name, value)
        for values, name, index in unit.links.places
        if isinstance(value := values.get(name), torch.Tensor)
        and unit.opened is None
        and not (shown is not None and value is shown[index])
    ]
    install_leaves(unit)
    for values, name, replaced in given:
        values[name] = replaced


def _explain_parallelized(spec: ShardSpec, unit: Unit) -> str:
    """The error for tensor parallelism that was applied to a sharded module."""
    return (
        f"parameter {spec.fqn!r} of unit {unit.name!r} was replaced by a DTensor after "
        "fully_shard, as parallelize_module and distribute_module do; wanted the parameter that "
        f"was sharded. {TENSOR_PARALLEL_FIRST}"
    )


def refuse_replaced(unit: Unit) -> None:
    """Raise when a parameter of the unit was replaced since it was sharded."""
    for values, name, index in find_replaced(unit):
        raise RuntimeError(explain_replaced(unit, index, values.get(name)))


def check_at_rest(unit: Unit) -> None:
    """Raise when, between passes, a parameter was replaced since the unit was sharded."""
    if unit.opened is None and unit.run.showing is None:
        refuse_replaced(unit)


def check_place(unit: Unit, values: dict[str, Any], name: str, index: int) -> None:
    """Raise when, between passes, a module holds another tensor there than the parameter."""
    value = values.get(name)
    if (
        leaf_of(value) is not unit.entries[index].param  # which a scope over another unit may show
        and unit.opened is None
        and unit.run.showing is None
        and not is_shown_by_another(unit, values, name)
    ):
        raise RuntimeError(explain_replaced(unit, index, value))


def explain_replaced(unit: Unit, index: int, found: object) -> str:
    """The error for a parameter of which ``found`` has taken the place."""
    if isinstance(found, DTensor):
        return _explain_parallelized(unit.entries[index].spec, unit)
    shape = tuple(getattr(found, "shape", ()))
    what = "nothing" if found is None else f"{type(found).__name__} {shape}"
    return (
        f"parameter {unit.entries[index].spec.fqn!r} of unit {unit.name!r} was replaced after "
        f"fully_shard: found {what}, wanted the parameter that was sharded. "
        "Write into that parameter instead (p.copy_(value), "
        "or with fsdp_compose.gathered(module, writeback=True)), or call "
        "fsdp_compose.refresh(model) on every rank to shard what is there now, and give it to the "
        "optimizer. To compute once with other tensors, use torch.func.functional_call(module, "
        "{name: tensor}, args)."
    )
