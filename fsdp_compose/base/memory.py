"""The bytes that a tensor has in its storage, known also after it has left it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_compose.base.torch_private import storage_use_count

_SHARED = "_fsdp_compose_shared"
"""The attribute of a storage that several tensors had at some time, which it keeps for good."""


class StorageSpan(NamedTuple):
    """Bytes of a storage, which it does not keep alive; strides are in bytes too."""

    storage: StorageWeakRef
    start: int
    stop: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def pieces(self) -> list[tuple[int, int]]:
        """Where each contiguous piece begins and ends."""
        starts, length = [self.start], self.itemsize
        for step, count in sorted(zip(self.strides, self.shape, strict=True)):
            if step == length:
                length *= count
            elif step:  # 0: an expanded dimension
                starts = [start + step * i for i in range(count) for start in starts]
        return [(start, start + length) for start in starts]


def shared_memory_of(tensor: torch.Tensor) -> StorageSpan | None:
    """The memory of a strided tensor; None where no other has, or had, elements in its storage."""
    count, itemsize, storage = tensor.numel(), tensor.itemsize, tensor.untyped_storage()
    if storage_use_count(storage._cdata) > 2:  # ``tensor``, and ``storage`` itself
        storage.__dict__[_SHARED] = True  # for tensors that stay in it when others have left
    if not count or _SHARED not in storage.__dict__:
        return None
    shape = tuple(tensor.shape)
    strides = tuple([int(step) * itemsize for step in tensor.stride()])
    start = int(tensor.storage_offset()) * itemsize
    stop = start + count * itemsize
    if not tensor.is_contiguous():
        last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        stop = start + last + itemsize
    return StorageSpan(StorageWeakRef(storage), start, stop, shape, strides, itemsize)


def share_bytes(one: StorageSpan, other: StorageSpan) -> bool:
    """Whether a byte of one storage is in both: columns of a matrix lie between each other's."""
    found = [(start, stop, 0) for start, stop in one.pieces()]
    found += [(start, stop, 1) for start, stop in other.pieces()]
    ends = [0, 0]  # of the pieces before
    for start, stop, which in sorted(found):
        if start < ends[1 - which]:
            return True
        ends[which] = max(ends[which], stop)
    return False


def nbytes_of(tensor: torch.Tensor) -> int:
    """What its values take, and the indices of a sparse one."""
    if tensor.layout is not torch.sparse_coo:
        return tensor.nbytes
    found = tensor.detach().coalesce()
    return found.indices().nbytes + found.values().nbytes
