"""Full tensors out of shards, one bucket at a time: the only transient is one gathered bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from fsdp_compose.checkpoint.names import buckets_of
from fsdp_compose.core.bucket import Bucket, find_entry
from fsdp_compose.core.receiving import gather_flat
from fsdp_compose.core.state import owner_of


def each_full(
    leaves: Iterable[nn.Parameter], visit: Callable[[nn.Parameter, torch.Tensor], None]
) -> None:
    """Call ``visit`` with each leaf and its full tensor, in the parameter's shape and strides.

    Of parameters that tensor parallelism split it is the whole too. The tensor is valid during the
    call only. Every rank must pass the same leaves.
    """
    leaves = list(leaves)
    by_bucket: dict[int, list[nn.Parameter]] = {}
    seen: set[int] = set()
    for leaf in leaves:
        if id(leaf) not in seen:
            seen.add(id(leaf))
            by_bucket.setdefault(id(owner_of(find_entry(leaf))), []).append(leaf)
    for bucket in buckets_of(leaves):
        flat = gather_bucket(bucket, bucket.shard)
        for leaf in by_bucket[id(bucket)]:
            visit(leaf, full_view(bucket, flat, find_entry(leaf).index))
        del flat


def gather_bucket(bucket: Bucket, shard: torch.Tensor) -> torch.Tensor:
    """Every rank's ``shard``, cut as the bucket's own, on the device that communicates."""
    with torch.no_grad():
        return gather_flat(bucket, shard.detach().to(bucket.mesh.device), shard.dtype)


def full_view(bucket: Bucket, flat: torch.Tensor, index: int) -> torch.Tensor:
    """Parameter ``index`` of the bucket in a gathered flat tensor: a view, unless it was split."""
    spec = bucket.entries[index].spec
    part = flat.as_strided(spec.shape, spec.stride, spec.offset)
    return part if spec.parallel is None else spec.parallel.assemble(part)


def own_copy(tensor: torch.Tensor, cpu: bool) -> torch.Tensor:
    """A tensor that shares nothing with ``tensor``; on the CPU if asked for."""
    source = tensor.detach()
    return source.to("cpu", copy=True) if cpu else source.clone()
