"""Optimizer state in another shape than its parameter: an owner's, and that of blocks.

An owner's value may have any shape. It is saved as a sharded value whose buffer is ``size`` times
as large, of which the owner's part is all of it: so it is gathered and read like any other, on as
many ranks as there are. State with one row for each block that is never cut (scales of 8-bit
blocks, accumulators of rows) is cut where the parameter is, counted in blocks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compose.base.strides import contiguous_strides, flatten, storage_order
from fsdp_compose.checkpoint.optimizer.members import Member, Part
from fsdp_compose.checkpoint.ranks import groups_of
from fsdp_compose.comm.messages import gather_objects
from fsdp_compose.core.state import owner_of
from fsdp_compose.sharded import Axis, Parallel, Residence, ShardSpec, is_sharded, tag

_SCALARS = frozenset(("step", "mu_product", "eta", "mu"))


def is_one_number(key: str, value: Tensor) -> bool:
    """Whether it is state that torch.optim has once per parameter, also if that is of one number.

    Other optimizers keep it in a vector: ``step = torch.zeros(1)``.
    """
    return value.numel() == 1 and key in _SCALARS and not is_sharded(value)


def has_own_shape(part: Part, shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether optimizers keep state of ``shape`` for a parameter of shape ``whole``.

    That of a number, or of a row or column: of a keepdim mean, or one number in a vector. An owner
    also has elements that were chosen, in a vector, and projections: no more in any dimension.
    """
    if part.owner is not None and shape:
        limits = (math.prod(whole),) if len(shape) == 1 else whole
        if len(shape) == len(limits) and all(map(operator.le, shape, limits)):
            return True
    dims = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= max(len(whole), 1) and all(mine in (1, size) for mine, size in dims)


class OwnedState(dict[str, Any]):
    """The state of one parameter, by key, on the rank that has all of it."""


@dataclass(frozen=True)
class _RemoteValue:
    """A value that another rank of the group has."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    owner: int


def tag_owned_state(part: Part, values: Mapping[str, Any]) -> OwnedState:
    """Tag the owner's state of ``part`` as values that can be saved; memory is shared."""
    assert part.spec is not None and part.owner is not None
    found = OwnedState()
    for key, value in values.items():
        if isinstance(value, Tensor):
            stride = storage_order(value)
            spec = _make_spec(part.spec, key, tuple(value.shape), stride, part.owner)
            found[key] = tag(flatten(value.detach(), stride), spec)
        else:
            found[key] = value
    return found


def _count_blocks(part: Part) -> tuple[int, int]:
    """(blocks in the parameter that are never cut, elements of each)."""
    assert part.entry is not None
    extent = owner_of(part.entry).layout.extents[part.entry.index]
    return -(-extent.numel // extent.block), extent.block


def find_row_keys(members: Iterable[tuple[Member, Mapping[str, Any]]]) -> set[str]:
    """Find the keys of state with a row for each block, as far as this rank's shapes tell.

    They do not where a slice is empty or one element: there all shapes are alike.
    """
    found: set[str] = set()
    for member, values in members:
        if member.is_raw and len(member.parts) == 1 and member.param.numel() > 1:
            shape = member.param.shape
            found.update(
                k
                for k, v in values.items()
                if isinstance(v, Tensor) and v.ndim and v.shape != shape
            )
    return found


def block_spec(part: Part, key: str, row: tuple[int, ...]) -> ShardSpec | None:
    """Say where state with a row of shape ``row`` for each block lies; None without elements."""
    if part.entry is None or part.spec is None or not part.spec.numel:
        return None
    blocks, block = _count_blocks(part)
    layout, index = owner_of(part.entry).layout, part.entry.index
    owners = layout.owners(index)
    # Cut in two, the first rank may have any number of blocks; beyond that a shard is a multiple.
    shard = layout.shard_numel // block if len(owners) > 2 else blocks
    end = (owners[0] + 1) * layout.shard_numel - layout.offsets[index]
    first = end // block if len(owners) > 1 else blocks
    width = math.prod(row)
    shape = (blocks, *row)
    return ShardSpec(
        fqn=f"{key} of {part.spec.fqn}",
        unit=part.spec.unit,
        shape=torch.Size(shape),
        stride=contiguous_strides(shape),
        offset=((owners[0] + 1) * shard - first) * width,
        shard_numel=shard * width,
        group=part.spec.group,
        residence=Residence(),
    )


def tag_rows(part: Part, key: str, value: Tensor) -> Any:
    """Tag this rank's rows, one for each of its blocks, as a sharded value; memory is shared.

    Raises:
        ValueError: it is not a row for each block.
    """
    spec = block_spec(part, key, tuple(value.shape[1:]))
    if spec is None or spec.stop - spec.start != value.numel():
        raise ValueError(
            f"optimizer state: {key!r} of {part.name!r} has shape {tuple(value.shape)} on this "
            "rank, which is neither its slice nor a row for each of its blocks "
            f"({describe_blocks(part)}), so it cannot be saved. Shard with the granularity of "
            "the blocks, or step whole matrices with fsdp_compose.owner_step."
        )
    return tag(value.detach().reshape(-1), spec)


def describe_blocks(part: Part) -> str:
    """Say in a message how many blocks a parameter has, and how large they are."""
    blocks, block = _count_blocks(part)
    return f"{blocks} of {block} in all"


def _make_spec(
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
        parallel=_note_copies(of, shape, stride),
    )


def _note_copies(of: ShardSpec, shape: tuple[int, ...], stride: tuple[int, ...]) -> Parallel | None:
    """Say that the owners of all parts of a parameter have the same state; one of them saves it."""
    if of.parallel is None or not of.parallel.axes:
        return None
    axes = tuple(Axis(axis.group, None) for axis in of.parallel.axes)
    return Parallel(torch.Size(shape), stride, axes)


def add_state_of_others(
    caller: str,
    module: nn.Module,
    state: Mapping[str, Mapping[str, Any]],
    parts: Mapping[str, Part],
) -> dict[str, dict[str, Any]]:
    """Add the state that other ranks own, so that every rank has the same; a collective.

    Tensors of others are sharded values without elements, which can be gathered; numbers are the
    owner's.
    """
    found = {name: dict(values) for name, values in state.items()}
    for group in groups_of(module):
        mine = {
            name: {key: _describe_value(value) for key, value in values.items()}
            for name, values in state.items()
            if isinstance(values, OwnedState) and _find_ranks(parts, name) == group.ranks
        }
        for theirs in gather_objects(mine, group, caller):
            for name, values in theirs.items():
                if name not in found and name in parts:
                    found[name] = {
                        key: _make_absent(parts[name], key, v) for key, v in values.items()
                    }
    first = [name for name in parts if name in found]
    return {name: found[name] for name in [*first, *(n for n in found if n not in parts)]}


def _find_ranks(parts: Mapping[str, Part], name: str) -> tuple[int, ...]:
    part = parts.get(name)
    return () if part is None or part.spec is None else part.spec.group.ranks


def _describe_value(value: Any) -> Any:
    if not is_sharded(value):
        return value
    spec = value._shard_spec
    return _RemoteValue(tuple(spec.shape), spec.stride, value.dtype, spec.group.rank)


def _make_absent(part: Part, key: str, value: Any) -> Any:
    if not isinstance(value, _RemoteValue) or part.spec is None or part.entry is None:
        return value
    spec = _make_spec(part.spec, key, value.shape, value.stride, value.owner)
    return tag(torch.empty(0, dtype=value.dtype, device=part.entry.param.device), spec)


def gather_owned(value: Any, part: Part) -> Any:
    """Gather a value of owned state in memory of its own for its owner; None on other ranks.

    A collective where ``value`` is sharded.
    """
    if not isinstance(value, Tensor):
        return value
    full = value.full_tensor() if is_sharded(value) else value.detach().clone()
    return None if part.is_elsewhere else full
