"""Whether tensors lie in the memory of gathered parameters, which their release frees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from fsdp_compose.buckets.bucket import Bucket
from fsdp_compose.sharded import part_of


def lies_in(bucket: Bucket, tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is in the memory of the bucket's gathered parameters."""
    try:
        pointer = part_of(tensor).data_ptr()
    except RuntimeError:
        return False  # a tensor without memory of its own: fake, functional, or not strided
    return _contains(bucket, [pointer])


def any_lies_in(buckets: Iterable[Bucket], grads: Iterable[torch.Tensor | None]) -> bool:
    """Whether any of ``grads`` is in memory that releasing ``buckets`` frees."""
    pointers = [grad.data_ptr() for grad in grads if grad is not None]
    return any(_contains(bucket, pointers) for bucket in buckets if not bucket.in_place)


def _contains(bucket: Bucket, pointers: Sequence[int]) -> bool:
    start = bucket.full.data_ptr()
    stop = start + bucket.full_nbytes
    return any(start <= pointer < stop for pointer in pointers)
