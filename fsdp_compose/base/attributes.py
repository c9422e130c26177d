"""A tensor's attributes as torch stores them, whatever its class would answer.

They are methods of torch's own, at C speed. Use them under ``raw()`` or by ``call_raw``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fsdp_compose.base.torch_private import call_raw

_plain: Any = torch.Tensor

get_grad: Callable[[torch.Tensor], torch.Tensor | None] = _plain.grad.__get__
set_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = _plain.grad.__set__
requires_grad: Callable[[torch.Tensor], bool] = _plain.requires_grad.__get__
set_requires_grad: Callable[[torch.Tensor, bool], None] = _plain.requires_grad.__set__

ABOUT_SHAPES: frozenset[Callable[..., Any]] = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in "device dtype grad_fn is_leaf ndim requires_grad shape".split()
) | {torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.size}
"""Functions of torch's that read no element of a tensor, as ``__torch_function__`` sees them."""


class Cached:
    """An attribute that is read from torch once, and kept in the instance's own dictionary.

    Optimizers read dtype and device of every sharded tensor in every step. Who gives a tensor other
    memory, which may have another dtype or device, removes what was kept.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.read = getattr(_plain, name).__get__

    def __get__(self, tensor: Any, owner: type) -> Any:
        if tensor is None:
            return self
        value = tensor.__dict__[self.name] = call_raw(self.read, (), (tensor,))
        return value
