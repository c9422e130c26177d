"""Adds up what ranks bring to a sum, and scales it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from fsdp_compose.base.microbatches import add_in_tree
from fsdp_compose.base.torch_private import below_modes


def scale_in_place(total: torch.Tensor, scale: float) -> torch.Tensor:
    """Multiply ``total`` by a number; on a CPU a tensor of no dimension takes a third of the time.

    Such a tensor has the dtype of ``total``, so the product is the same in wide dtypes alone.
    """
    if total.is_cpu and total.dtype in _WIDE and type(total) is torch.Tensor:
        return total.mul_(_as_tensor(scale, total.dtype))
    return total.mul_(scale)


_WIDE = frozenset((torch.float32, torch.float64))


@functools.lru_cache(maxsize=64)
def _as_tensor(scale: float, dtype: torch.dtype) -> torch.Tensor:
    with below_modes():  # it is kept
        return torch.tensor(scale, dtype=dtype, device="cpu")


_IN_CACHE = 1 << 17  # elements


def add_up(parts: Sequence[torch.Tensor], total: torch.Tensor, scale: float, in_tree: bool) -> None:
    """Set ``total`` to the sum of ``parts``, in their order or as a tree, times ``scale``.

    It is added in no less than float32, whatever the dtypes of both, and rounded once; in a tree,
    whose nodes may be summed on several ranks, in the dtype of ``total``. On a CPU piece by piece,
    so that what is added to has not left the cache.
    """
    dtype = total.dtype if in_tree else _wide_for(parts[0].dtype, total.dtype)
    size = _IN_CACHE if total.device.type == "cpu" else total.numel()
    room = None if dtype == total.dtype else total.new_empty(min(size, len(total)), dtype=dtype)
    for rows in zip(total.split(size), *(part.split(size) for part in parts), strict=True):
        piece, *terms = rows
        sums = piece if room is None else room[: len(piece)]
        first = len(terms) if in_tree else 2
        add_in_tree(terms[:first], sums)
        for other in terms[first:]:
            sums += other
        if scale != 1.0:
            sums.mul_(scale)
        if sums is not piece:
            piece.copy_(sums)


def _wide_for(given: torch.dtype, total: torch.dtype) -> torch.dtype:
    """The dtype to add up in what is of ``given``, for a sum that is kept in ``total``."""
    wide = torch.promote_types(given, total)
    return torch.promote_types(wide, torch.float32) if wide.is_floating_point else wide
