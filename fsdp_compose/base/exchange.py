"""Exchange what two tensor objects hold, which torch refuses where it holds one of them weakly."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fsdp_compose.base.torch_private import profiler_enabled, swap_tensors
from fsdp_compose.base.torch_stack import count_modes, refuse_fakes


def swap_contents(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange the contents; attributes, hooks and references stay with the objects.

    Autocast's cache holds weakly what it has cast; what is in it is cast again.
    """
    try:
        swap_tensors(first, second)
    except RuntimeError:
        torch.clear_autocast_cache()
        swap_tensors(first, second)


def check_exchangeable(call: str, tensors: Iterable[torch.Tensor]) -> None:
    """Raise, before anything is changed, where ``swap_contents`` would for one of ``tensors``.

    Or for one that is made now: a profile that records shapes holds what it sees while it lives.

    Args:
        call: the function that is to exchange them.
    """
    if count_modes():
        refuse_fakes(f"call {call}")
    try:
        for tensor in tensors:
            swap_contents(tensor, tensor)
        if profiler_enabled():
            seen = torch.zeros(1, device="cpu").add_(1)
            swap_contents(seen, seen)
    except RuntimeError as error:
        raise RuntimeError(
            f"{call}: torch's profiler holds the tensors that it saw (record_shapes, with_flops, "
            f"with_stack), so that parameters cannot be exchanged. Call {call} outside of the "
            "profile, once its object is gone, or profile without these; nothing has been "
            f"changed. torch says: {error}"
        ) from error
