"""Marks memory that nobody has written, so that what is left for loading is recognised later."""

from __future__ import annotations

import weakref

import torch

from fsdp_compose.base.torch_private import raw, read_version


class UnwrittenMark:
    """A tensor that nobody has written, and how often it had been written until then.

    The count tells a tensor that was written with the mark's own value, as False into a mask, from
    one that was not. None stands for a tensor that is not known yet: its value alone tells.
    """

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self._ref = None if tensor is None else weakref.ref(tensor)
        self._version = _count(tensor)
        self._kind = None if tensor is None else (tensor.dtype, tensor.device)

    def is_on(self, tensor: torch.Tensor, values: torch.Tensor | None = None) -> bool:
        """Whether ``tensor``, or what is in its place now, was still not written.

        Args:
            tensor: what the count is of.
            values: its values, where those of ``tensor`` cannot be read themselves.
        """
        if self._ref is not None:
            if self._ref() is not tensor:  # either converted or assigned
                if self._kind == (tensor.dtype, tensor.device):
                    return False
            elif _count(tensor) != self._version:
                return False
        return is_unwritten(tensor if values is None else values)


def _count(tensor: torch.Tensor | None) -> int:
    with raw():
        return 0 if tensor is None or tensor.is_inference() else read_version(tensor)


def mark_unwritten(tensor: torch.Tensor) -> None:
    """Fill with NaN, the largest integer or False, so that what is never written can be told."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype is not torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
        else:
            tensor.fill_(False)


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Whether all of ``tensor``, if there is any, has the value that ``mark_unwritten`` gave it."""
    if not tensor.numel():
        return False
    plain = tensor.detach()
    first = plain[(slice(1),) * plain.dim()]
    return _is_marked(first) and _is_marked(plain)


def _is_marked(tensor: torch.Tensor) -> bool:
    if tensor.dtype is torch.bool:
        return not bool(tensor.any())
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return bool((tensor == torch.iinfo(tensor.dtype).max).all())
    return bool((tensor.float() if tensor.element_size() == 1 else tensor).isnan().all())
