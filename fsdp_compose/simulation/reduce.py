"""The arithmetic of reductions, and copies that no hook, mode or version counter sees.

Gloo and NCCL move memory below torch's dispatcher. So does this: what a rank has switched on (a
mode, ``inference_mode``, a transform) has no part in what arrives, on it or on another rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from fsdp_compose.base.torch_private import below_modes, raw

_BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def combine(parts: Sequence[torch.Tensor], op: object) -> torch.Tensor:
    """``parts`` combined in their order, in a tensor of its own.

    Args:
        op: a ``ReduceOp``, or what torch makes of one.

    Raises:
        RuntimeError: one of them was released while it was on its way, or they are integers, which
            have no average.
    """
    name = name_op(op)
    with below_modes():
        for part in parts:
            check_memory(part)
        total = parts[0].detach().clone()
        for part in parts[1:]:
            total = _BINARY[name](total, part.detach())
        return total.div_(len(parts)) if name == "AVG" else total


def name_op(op: object) -> str:
    """ "SUM", "MAX" and so on.

    Raises:
        NotImplementedError: the simulation does not know the operation.
    """
    known = dist.ReduceOp.RedOpType.__members__
    for name, kind in known.items():
        if op == kind and name in _BINARY:
            return name
    raise NotImplementedError(f"simulate: no reduction {op}; wanted one of {', '.join(_BINARY)}.")


def copy(into: torch.Tensor, source: torch.Tensor) -> None:
    """Overwrite ``into`` with ``source``, as one process writes another's memory.

    Raises:
        RuntimeError: one of them was released while it was on its way, or their sizes or dtypes
            differ.
    """
    with raw(), below_modes():
        if into.numel() != source.numel() or into.dtype != source.dtype:
            raise RuntimeError(
                f"{source.numel()} elements of {source.dtype} were sent, and {into.numel()} of "
                f"{into.dtype} were to be received"
            )
        check_memory(into)
        check_memory(source)
        on_host = into.device.type == source.device.type == "cpu"
        if on_host and _is_plain(into) and _is_plain(source):
            ctypes.memmove(into.data_ptr(), source.data_ptr(), into.numel() * into.element_size())
            return
        if into.device.type != "cpu":
            torch.accelerator.synchronize()
        into.detach().copy_(source.detach().view(into.shape))
        if into.device.type != "cpu":
            torch.accelerator.synchronize()


def check_memory(tensor: torch.Tensor) -> None:
    """Raise where a tensor's memory was released while a message had use of it.

    Raises:
        RuntimeError: its storage is too short.
    """
    last = tensor.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    if tensor.numel() and (last + 1) * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise RuntimeError(
            f"memory of a message of {tensor.numel()} elements was released before the message "
            "had arrived; wait for it first"
        )


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
