"""Whether tensors lie in the memory of gathered parameters, which their release frees."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import torch

from fsdp_compose.buckets.bucket import Bucket
from fsdp_compose.sharded import part_of


def lies_in(bucket: Bucket, tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is in the memory of the bucket's gathered parameters."""
    try:
        pointer = (tensor if type(tensor) is torch.Tensor else part_of(tensor)).data_ptr()
    except RuntimeError:
        return False  # a tensor without memory of its own: fake, functional, or not strided
    start = bucket.full.data_ptr()
    return start <= pointer < start + bucket.views.nbytes


def any_lies_in(buckets: Iterable[Bucket], tensors: Iterable[torch.Tensor]) -> bool:
    """Whether any of ``tensors`` is in memory that releasing ``buckets`` frees."""
    pointers = sorted(map(torch.Tensor.data_ptr, tensors))
    for bucket in buckets:
        if not bucket.in_place:
            start = bucket.full.data_ptr()
            first = bisect_left(pointers, start)
            if first < len(pointers) and pointers[first] < start + bucket.views.nbytes:
                return True
    return False
