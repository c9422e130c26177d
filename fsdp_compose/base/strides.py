"""How a tensor is flattened: in the order of its own strides where they are dense."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def storage_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides in which ``tensor`` is flattened: its own when they are dense, else contiguous."""
    if not tensor.numel():
        return contiguous_strides(tensor.shape)
    if tensor.is_contiguous():  # as the rest would find, sooner
        return tuple(tensor.stride())
    dims = sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size != 1
    )
    expected = 1
    for stride, size in dims:
        if stride != expected:
            return contiguous_strides(tensor.shape)
        expected *= size
    return tuple(tensor.stride())


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


def flatten(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """``tensor`` as one dimension, in the order of ``strides``; a view where it can be."""
    if tensor.stride() == strides or tensor.numel() == 0:
        return tensor.as_strided((tensor.numel(),), (1,))
    flat = tensor.new_empty(tensor.numel())
    flat.as_strided(tensor.shape, strides).copy_(tensor)
    return flat


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, of any dtype, as uint8 of one dimension."""
    real = torch.view_as_real(flat) if flat.is_complex() else flat
    return real.reshape(-1).view(torch.uint8)


def shown_once(tensor: torch.Tensor) -> tuple[slice, ...]:
    """What to index a strided ``tensor`` with to have once what ``expand`` shows several times."""
    return tuple([slice(None if stride else 1) for stride in tensor.stride()])


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """A view of ``tensor`` with each element once, so that it can be written."""
    if tensor.layout is not torch.strided or 0 not in tensor.stride():
        return tensor
    return tensor[shown_once(tensor)]
