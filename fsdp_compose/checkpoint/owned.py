"""Optimizer state that one rank has all of: as sharded values of which the others hold nothing.

Such a value may have any shape. Its slices are those of a buffer of its own, ``size`` times as
large, of which the owner's part is the whole value: so it is saved, gathered and read like any
sharded value, on as many ranks as there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compose import comm
from fsdp_compose.bucket import flatten, storage_order
from fsdp_compose.checkpoint.consensus import groups_of
from fsdp_compose.checkpoint.members import Part
from fsdp_compose.sharded import Residence, ShardSpec, is_sharded, tag


class Owned(dict[str, Any]):
    """The state of one parameter, by key, on the rank that has all of it."""


@dataclass(frozen=True)
class _Outline:
    """A value that another rank of the group has."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    owner: int


def owned(part: Part, values: Mapping[str, Any]) -> Owned:
    """The owner's state of ``part`` as values that are saved; memory is shared.

    Raises:
        TypeError: a value is neither a tensor, a number, a string nor None.
    """
    assert part.spec is not None and part.owner is not None
    found = Owned()
    for key, value in values.items():
        if isinstance(value, Tensor):
            stride = storage_order(value)
            spec = _spec(part.spec, key, tuple(value.shape), stride, part.owner)
            found[key] = tag(flatten(value.detach(), stride), spec)
        elif value is None or isinstance(value, bool | int | float | str):
            found[key] = value
        else:
            raise TypeError(
                f"optimizer state: {key!r} of {part.name!r} is a {type(value).__name__}; wanted "
                "tensors, numbers and strings, each under a key of its own."
            )
    return found


def _spec(
    of: ShardSpec, key: str, shape: tuple[int, ...], stride: tuple[int, ...], owner: int
) -> ShardSpec:
    numel = math.prod(shape)
    return ShardSpec(
        fqn=f"{key} of {of.fqn}",
        unit=of.unit,
        shape=torch.Size(shape),
        stride=stride,
        offset=owner * numel,
        shard_numel=numel,
        group=of.group,
        residence=Residence(),
    )


def complete(
    module: nn.Module, state: Mapping[str, Mapping[str, Any]], parts: Mapping[str, Part]
) -> dict[str, dict[str, Any]]:
    """``state`` with what other ranks own of it, alike on every rank; a collective.

    Tensors of others are sharded values without elements, which can be gathered; numbers are the
    owner's.
    """
    found = {name: dict(values) for name, values in state.items()}
    for group in groups_of(module):
        mine = {
            name: {key: _outline(value) for key, value in values.items()}
            for name, values in state.items()
            if isinstance(values, Owned) and _group(parts, name) == group.ranks
        }
        for theirs in comm.gather_objects(mine, group):
            for name, values in theirs.items():
                if name not in found and name in parts:
                    found[name] = {key: _absent(parts[name], key, v) for key, v in values.items()}
    first = [name for name in parts if name in found]
    return {name: found[name] for name in [*first, *(n for n in found if n not in parts)]}


def _group(parts: Mapping[str, Part], name: str) -> tuple[int, ...]:
    part = parts.get(name)
    return () if part is None or part.spec is None else part.spec.group.ranks


def _outline(value: Any) -> Any:
    if not is_sharded(value):
        return value
    spec = value._shard_spec
    return _Outline(tuple(spec.shape), spec.stride, value.dtype, spec.group.rank)


def _absent(part: Part, key: str, outline: Any) -> Any:
    if not isinstance(outline, _Outline) or part.spec is None or part.entry is None:
        return outline
    spec = _spec(part.spec, key, outline.shape, outline.stride, outline.owner)
    return tag(torch.empty(0, dtype=outline.dtype, device=part.entry.param.device), spec)


def restored(value: Any, part: Part) -> Any:
    """A value of owned state as its owner keeps it, in memory of its own; None on other ranks.

    A collective where ``value`` is sharded.
    """
    if not isinstance(value, Tensor):
        return value
    full = value.full_tensor() if is_sharded(value) else value.detach().clone()
    return None if part.is_elsewhere else full
