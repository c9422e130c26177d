"""Full tensors out of shards, one bucket at a time: the only transient is one gathered bucket."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from fsdp_compose.bucket import Bucket, find_entry
from fsdp_compose.checkpoint.names import buckets_of
from fsdp_compose.gather import gather_flat
from fsdp_compose.state import owner_of


def full_parameters(
    leaves: Iterable[nn.Parameter],
) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yield each leaf with its full tensor, in the parameter's own shape and strides.

    The tensor is valid until the next one is asked for. Every rank must run through all of it.
    """
    leaves = list(leaves)
    by_bucket: dict[int, list[nn.Parameter]] = {}
    seen: set[int] = set()
    for leaf in leaves:
        if id(leaf) not in seen:
            seen.add(id(leaf))
            by_bucket.setdefault(id(owner_of(find_entry(leaf))), []).append(leaf)
    for bucket in buckets_of(leaves):
        with torch.no_grad():
            flat = gather_flat(bucket, bucket.shard, bucket.shard.dtype)
        for leaf in by_bucket[id(bucket)]:
            yield leaf, full_view(bucket, flat, find_entry(leaf).index)
        del flat


def full_view(bucket: Bucket, flat: torch.Tensor, index: int) -> torch.Tensor:
    """Parameter ``index`` of the bucket, as a view of a gathered flat tensor."""
    spec = bucket.entries[index].spec
    return flat.as_strided(spec.shape, spec.stride, spec.offset)


def own_copy(tensor: torch.Tensor, cpu: bool) -> torch.Tensor:
    """A tensor that shares nothing with ``tensor``; on the CPU if asked for."""
    source = tensor.detach()
    return source.to("cpu", copy=True) if cpu else source.clone()
