"""A tensor's attributes as torch stores them, whatever its class would answer.

They are methods of torch's own, at C speed. Use them under ``raw()`` or by ``call_raw``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
