"""Marks memory that nobody has written, so that what is left for loading is recognised later."""

from __future__ import annotations

import torch


def mark_unwritten(tensor: torch.Tensor) -> None:
    """Fill with NaN, or the largest integer, so that what is never written can be told."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype is not torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
        else:
            tensor.fill_(False)


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Whether all of ``tensor`` is as ``mark_unwritten`` left it; a boolean one never is."""
    if not tensor.numel() or tensor.dtype is torch.bool:
        return False
    plain = tensor.detach()
    first = plain[(slice(1),) * plain.dim()]
    return _is_marked(first) and _is_marked(plain)


def _is_marked(tensor: torch.Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return bool((tensor == torch.iinfo(tensor.dtype).max).all())
    return bool((tensor.float() if tensor.element_size() == 1 else tensor).isnan().all())
