"""Tensors of a model that share memory without being one parameter: sharding takes them apart."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn

from fsdp_compose.base.torch_private import is_opaque
from fsdp_compose.construct.names import name_cleaner
from fsdp_compose.construct.plans import UnitPlan
from fsdp_compose.sharded import is_sharded, part_of


class _Extent(NamedTuple):
    """The bytes of a storage from a tensor's first element to its last."""

    storage: int
    start: int
    stop: int
    place: int  # in the order of registration
    name: str
    tensor: torch.Tensor


def check_overlaps(what: str, modules: Sequence[nn.Module], plans: Sequence[UnitPlan]) -> None:
    """Raise where a trained parameter shares elements with another parameter, or with a buffer.

    Once sharded, each parameter has slices of its own, and training it leaves the other as it was.

    Args:
        what: the function that the error is of.

    Raises:
        ValueError: naming both.
    """
    planned = {id(item.param) for plan in plans for item in plan.found}
    begun: list[_Extent] = []  # before the one that is looked at, and not ended
    for extent in sorted(_list_extents(modules), key=lambda extent: extent[:3]):
        begun = [e for e in begun if e.storage == extent.storage and e.stop > extent.start]
        for other in begun:
            pair = (other, extent)
            are_planned = not planned.isdisjoint(id(e.tensor) for e in pair)
            if are_planned and any(e.tensor.requires_grad for e in pair) and _share(*pair):
                one, two = sorted(pair, key=lambda e: (id(e.tensor) not in planned, e.place))
                raise ValueError(f"{what}: {_explain(one, two)}")
        begun.append(extent)


def _list_extents(modules: Sequence[nn.Module]) -> list[_Extent]:
    """Of every parameter and buffer that is not sharded and has memory, once by its first name."""
    found: dict[int, _Extent] = {}
    for position, module in enumerate(modules):
        prefix, clean = f"{position}." if len(modules) > 1 else "", name_cleaner(module)
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            if id(tensor) in found or is_sharded(tensor) or is_opaque(tensor):
                continue
            part = part_of(tensor)
            if nn.parameter.is_lazy(part) or part.layout is not torch.strided or not part.numel():
                continue
            start = int(part.storage_offset()) * part.itemsize
            last = sum((n - 1) * step for n, step in zip(part.shape, part.stride(), strict=True))
            stop = start + (last + 1) * part.itemsize
            storage = part.untyped_storage()._cdata
            label = prefix + clean(name)
            found[id(tensor)] = _Extent(storage, start, stop, len(found), label, tensor)
    return list(found.values())


def _share(one: _Extent, other: _Extent) -> bool:
    """Whether a byte belongs to both: columns of one matrix lie between each other's."""
    pieces = [(start, stop, 0) for start, stop in _list_pieces(one)]
    pieces += [(start, stop, 1) for start, stop in _list_pieces(other)]
    ends = [0, 0]  # of the pieces before
    for start, stop, which in sorted(pieces):
        if start < ends[1 - which]:
            return True
        ends[which] = max(ends[which], stop)
    return False


def _list_pieces(extent: _Extent) -> list[tuple[int, int]]:
    """Where each contiguous piece of a tensor begins and ends, in bytes."""
    part = part_of(extent.tensor)
    starts, length = [extent.start], part.itemsize
    for step, count in sorted(zip(part.stride(), part.shape, strict=True)):
        nbytes = step * part.itemsize
        if nbytes == length and len(starts) == 1:
            length *= count
        elif nbytes:  # 0: an expanded dimension
            starts = [start + nbytes * i for i in range(count) for start in starts]
    return [(start, start + length) for start in starts]


def _explain(one: _Extent, other: _Extent) -> str:
    text = (
        f"parameter {one.name!r} and {{}} {other.name!r} are different tensors in the "
        "same memory. Sharded, a parameter is slices in memory of its own, so training it would "
        "leave the other as it was. "
    )
    if isinstance(other.tensor, nn.Parameter):
        return text.format("parameter") + (
            "Tie them by being one parameter (b.weight = a.weight; a transposed weight is used in "
            "forward, as functional.linear(x, a.weight.t())), or give one of them memory of its "
            "own: nn.Parameter(weight.detach().clone())."
        )
    return text.format("buffer") + (
        "Read the parameter in forward instead, or register a clone of it as the buffer."
    )
