"""A slice as chunks of a distributed checkpoint, which saves and reads it without communication.

A slice is a contiguous run of the flattened parameter, so it is a few rectangular boxes of the
original shape (``layout.boxes``). Each box is a chunk of the checkpoint, and any other cut of the
same shape reads the boxes that it overlaps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fsdp_compose.base.torch_stack import is_broadcast_to_ranks, is_saved_as_safetensors
from fsdp_compose.layout.boxes import Box, boxes
from fsdp_compose.sharded.spec import ShardSpec


def cut_chunks(spec: ShardSpec, local: Tensor) -> list[tuple[Box, Tensor]]:
    """List the boxes of the whole that the slice ``local`` holds, each with a view of its data."""
    first = (0,) * len(spec.shape) if spec.parallel is None else spec.parallel.offsets
    dims = spec.storage_dims
    back = [dims.index(d) for d in range(len(dims))]
    shape = [spec.shape[d] for d in dims]
    found: list[tuple[Box, Tensor]] = []
    position = 0
    for box in boxes(shape, spec.start, spec.stop):
        numel = math.prod(box.sizes)
        data = local[position : position + numel].view(box.sizes).permute(back)
        position += numel
        offsets = tuple(box.offsets[i] + first[at] for at, i in enumerate(back))
        found.append((Box(offsets, tuple(box.sizes[i] for i in back)), data))
    if spec.whole_shape.numel() == 0 and spec.group.rank == 0:
        empty = Box((0,) * len(spec.shape), tuple(spec.shape))
        found.append((empty, local.view(spec.shape)))
    return found


def list_write_items(fqn: str, spec: ShardSpec, local: Tensor) -> list[WriteItem]:
    """What this rank writes of the tensor; nothing where another rank writes the same part.

    Raises:
        RuntimeError: the writer would keep only one of the slice's chunks.
    """
    if spec.parallel is not None and not spec.parallel.is_first:
        return []  # the other ranks' boxes may be cut elsewhere, so torch could not tell
    chunks = cut_chunks(spec, local)
    if len(chunks) > 1 and is_saved_as_safetensors():
        raise RuntimeError(
            f"torch.distributed.checkpoint.save: {fqn!r} (unit {spec.unit!r}) is sharded, and what "
            f"rank {spec.group.rank} holds of it, {spec.held}, is {len(chunks)} boxes, of which a "
            "safetensors file of torch's writers keeps the last. Call fsdp_compose.save_full(path, "
            "module), which writes the whole as safetensors, or save without that writer."
        )
    return [
        WriteItem(
            index=MetadataIndex(fqn, torch.Size(box.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=_describe(box),
                properties=TensorProperties.create_from_tensor(local),
                size=spec.whole_shape,
            ),
        )
        for box, _ in chunks
    ]


def list_chunks(spec: ShardSpec, local: Tensor) -> list[ChunkStorageMetadata]:
    """Where this rank's chunks lie in the whole tensor.

    Raises:
        RuntimeError: the reader needs as many chunks on every rank.
    """
    if spec.group.size > 1 and is_broadcast_to_ranks():
        raise RuntimeError(
            f"torch.distributed.checkpoint.load: {spec.fqn!r} (unit {spec.unit!r}) is sharded, and "
            "BroadcastingTorchSaveReader waits for as many pieces of it on every rank as on rank "
            "0. Call fsdp_compose.load_state_dict(module, state_dict, broadcast_from_rank0=True) "
            "with torch.load(path) on rank 0."
        )
    return [_describe(box) for box, _ in cut_chunks(spec, local)]


def find_chunk(spec: ShardSpec, local: Tensor, index: MetadataIndex) -> Tensor:
    """The data of this rank's chunk at ``index``.

    Raises:
        ValueError: this rank holds no such chunk.
    """
    wanted = None if index.offset is None else tuple(index.offset)
    for box, data in cut_chunks(spec, local):
        if box.offsets == wanted:
            return data
    raise ValueError(f"{index.fqn!r}: no box at {wanted}; this rank holds {spec.held} of it")


def _describe(box: Box) -> ChunkStorageMetadata:
    """A box in torch's words."""
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
