"""Tensors of a model that share memory without being one parameter: sharding takes them apart."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn

from fsdp_compose.base.memory import StorageSpan, share_bytes, shared_memory_of
from fsdp_compose.base.torch_private import is_opaque
from fsdp_compose.buckets.entries import entry_of
from fsdp_compose.construct.names import name_cleaner
from fsdp_compose.construct.plans import UnitPlan
from fsdp_compose.sharded import is_sharded, part_of


class _TensorMemory(NamedTuple):
    """A parameter or buffer, and the memory that it shares, or did until it was sharded."""

    memory: StorageSpan
    order: int  # of registration
    name: str
    tensor: torch.Tensor


def check_overlaps(what: str, modules: Sequence[nn.Module], plans: Sequence[UnitPlan]) -> None:
    """Raise where a parameter shared elements with another parameter, or with a buffer.

    Once sharded, each parameter has slices of its own, and writing it leaves the other as it was.
    Some may have been sharded by calls before, and what is frozen may be trained or written later.

    Args:
        what: the function that the error is of.

    Raises:
        ValueError: naming both.
    """
    planned = {id(item.param) for plan in plans for item in plan.found}
    begun: list[_TensorMemory] = []  # before the one that is looked at, and not ended
    for item in sorted(_list_memories(modules), key=_position):
        memory = item.memory
        begun = [
            other
            for other in begun
            if other.memory.storage == memory.storage and other.memory.stop > memory.start
        ]
        for other in begun:
            first, second = sorted((other, item), key=lambda p: (_is_whole(p, planned), p.order))
            if not _is_whole(first, planned) and share_bytes(first.memory, second.memory):
                raise ValueError(f"{what}: {_explain(first, second)}")
        begun.append(item)


def _position(item: _TensorMemory) -> tuple[int, int]:
    storage: int = item.memory.storage.cdata
    return storage, item.memory.start


def _is_whole(item: _TensorMemory, planned: set[int]) -> bool:
    """Whether it is not sharded, and not to be."""
    return id(item.tensor) not in planned and not is_sharded(item.tensor)


def _list_memories(modules: Sequence[nn.Module]) -> list[_TensorMemory]:
    """Of every parameter and buffer whose memory is or was shared, once by its first name."""
    found: dict[int, _TensorMemory] = {}
    for position, module in enumerate(modules):
        prefix, clean = f"{position}." if len(modules) > 1 else "", name_cleaner(module)
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            memory = None if id(tensor) in found else _find_memory(tensor)
            if memory is not None:
                found[id(tensor)] = _TensorMemory(memory, len(found), prefix + clean(name), tensor)
    return list(found.values())


def _find_memory(tensor: torch.Tensor) -> StorageSpan | None:
    if is_sharded(tensor):
        entry = entry_of(tensor)  # None: of a copy of a part of a unit
        return None if entry is None else entry.origin
    if is_opaque(tensor) or nn.parameter.is_lazy(tensor) or tensor.layout is not torch.strided:
        return None
    return shared_memory_of(part_of(tensor))


def _explain(one: _TensorMemory, other: _TensorMemory) -> str:
    text = (
        f"parameter {one.name!r} and {{}} {other.name!r} are different tensors in the same memory. "
        "Sharded, a parameter is slices in memory of its own, so training or writing it would "
        "leave the other as it was. "
    )
    again = "Build the model again. " if is_sharded(one.tensor) else ""
    if isinstance(other.tensor, nn.Parameter):
        return f"{text.format('parameter')}{again}" + (
            "Tie them by being one parameter (b.weight = a.weight; a transposed weight is used in "
            "forward, as functional.linear(x, a.weight.t())), or give one of them memory of its "
            "own: nn.Parameter(weight.detach().clone())."
        )
    return f"{text.format('buffer')}{again}" + (
        "Read the parameter in forward instead, or register a clone of it as the buffer."
    )
