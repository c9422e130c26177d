"""Cuts this rank's elements out of a whole tensor."""

from __future__ import annotations

from torch import Tensor

from fsdp_compose.sharded.spec import ShardSpec


def own_slice(full: Tensor, spec: ShardSpec) -> Tensor:
    """Cut this rank's elements from a plain tensor that broadcasts to the shape it reads as.

    For a DTensor parameter, ``full`` may be another DTensor on its mesh.
    """
    if spec.parallel is not None and spec.reads_whole:
        full = spec.parallel.cut(full)
    return part_slice(full, spec)


def part_slice(full: Tensor, spec: ShardSpec) -> Tensor:
    """Cut this rank's elements from what it would hold without sharding."""
    dense = full.to_dense()  # if it is sparse
    flat = dense.expand(spec.shape).permute(spec.storage_dims).reshape(-1)
    return flat[spec.start : spec.stop]
