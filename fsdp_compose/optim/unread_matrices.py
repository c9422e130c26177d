"""The values of matrices are not read while an optimizer of them is made: no rank has them yet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fsdp_compose.base.tree import find_in_lists

__all__ = ["RefuseReads"]


class RefuseReads(TorchFunctionMode):
    """Raise inside it for a function that computes with tensors over the memory of ``plain``.

    Views of them, and what takes their shape alone (``zeros_like``), are no reads.
    """

    def __init__(self, plain: Iterable[Tensor]) -> None:
        super().__init__()
        self._memory = frozenset(map(_memory_of, plain))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if not name.endswith("_like") and not name.startswith("new_"):
            given = (args, tuple((kwargs or {}).values()))
            made = [t for t in find_in_lists((out,), Tensor) if _memory_of(t) not in self._memory]
            if made and any(_memory_of(t) in self._memory for t in find_in_lists(given, Tensor)):
                raise RuntimeError(
                    f"owner_step: make reads the values of parameters ({name}), which this rank "
                    "has in a step alone, so that each owner is sent only what it steps. Let the "
                    "optimizer make that state in its first step, where p.grad is not None."
                )
        return out


def _memory_of(tensor: Tensor) -> int | None:
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if is_plain else None
