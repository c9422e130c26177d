"""A parameter whose class computes in ``__torch_dispatch__`` and keeps its values in other tensors.

torchao's weights are such. A class around one dense tensor, as for float8 and int8 training, says
how modules compute with it: the dense tensor is sharded and trained. A frozen class around several,
as quantized weights are, is sharded as the bytes of all of them. What modules read in a forward is
the class around what was gathered, as in one process. Classes say what they keep by
``__tensor_flatten__`` and ``__tensor_unflatten__``, as torch.compile asks them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fsdp_compose.base.strides import as_bytes, flatten, storage_order
from fsdp_compose.base.torch_private import is_opaque
from fsdp_compose.sharded.parallel import part_of

_ALIGN = 16  # bytes: any dtype's, of what lies in a pack


@dataclass(frozen=True, slots=True)
class _Dense:
    """A plain tensor that a class keeps, and where its bytes begin."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.size.numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Kept:
    """An instance of a class: what it keeps by name, and what it is built with besides."""

    kind: Any
    parts: Mapping[str, _Part]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


_Part: TypeAlias = "_Dense | _Kept"


@dataclass(frozen=True, slots=True)
class Wrapper:
    """How the class of a parameter is put around what is sharded of it.

    Attributes:
        kept: the parameter before it was sharded.
        name: the attribute that has the one tensor, of its own place; None where bytes are packed.
        nbytes: of the pack.
        device: where the parameter was.
    """

    kept: _Kept
    name: str | None
    nbytes: int
    device: torch.device

    def fits(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is of the class too, and keeps the same."""
        found = find_wrapper(tensor.detach().to(self.device))
        return found is not None and found.kept == self.kept

    def unwrap(self, tensor: Tensor) -> Tensor:
        """What is sharded of a tensor of the class; any other as it is."""
        if not isinstance(tensor, self.kept.kind):
            return tensor
        if self.name is not None:
            found: Tensor = getattr(tensor, self.name)
            return found
        packed = torch.zeros(self.nbytes, dtype=torch.uint8, device=tensor.device)
        _pack(tensor, self.kept, packed)
        return packed

    def build(self, dense: Tensor) -> Any:
        """A new instance of the class around ``dense``, outside autograd."""
        if self.name is not None:
            kept, found = self.kept, {self.name: dense}
            return kept.kind.__tensor_unflatten__(found, kept.context, dense.size(), dense.stride())
        if dense.storage_offset() % _ALIGN:
            dense = dense.clone()
        return _unpack(self.kept, dense)

    def wrap(self, dense: Tensor) -> Any:
        """As ``build``, differentiable, also where gradients are turned on later."""
        if not dense.requires_grad:
            return self.build(dense.detach())
        with torch.enable_grad():
            return _Around.apply(dense, self)


class _Around(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dense: Tensor, wrapper: Wrapper) -> Any:
        ctx.set_materialize_grads(False)
        return wrapper.build(dense.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return grad, None


def find_wrapper(tensor: Tensor) -> Wrapper | None:
    """How the class of ``tensor`` is put around what it keeps.

    None for a plain tensor; for a class that does not say what it keeps; and for one around several
    tensors, or one of another place, that is trained or has no memory yet.
    """
    kept, end = _describe(tensor, 0) if is_opaque(tensor) else (None, 0)
    if not isinstance(kept, _Kept):
        return None
    alone = _Dense(kept.size, kept.stride, tensor.dtype, 0)
    if list(kept.parts.values()) == [alone]:
        return Wrapper(kept, next(iter(kept.parts)), 0, tensor.device)
    if tensor.requires_grad or tensor.is_meta:
        return None
    return Wrapper(kept, None, end, tensor.device)


def dense_of(tensor: Tensor) -> Tensor:
    """What is sharded of a parameter: of a class around tensors these, of a DTensor its part."""
    wrapper = find_wrapper(tensor)
    return part_of(tensor) if wrapper is None else wrapper.unwrap(tensor)


def tensors_in(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold the values of a parameter or a buffer."""
    wrapper = find_wrapper(tensor)
    return [part_of(tensor)] if wrapper is None else _list_dense(tensor, wrapper.kept)


def _list_dense(tensor: Tensor, part: _Part) -> list[Tensor]:
    if isinstance(part, _Dense):
        return [tensor]
    inner = [(getattr(tensor, name), kept) for name, kept in part.parts.items()]
    return [dense for found, kept in inner for dense in _list_dense(found, kept)]


def _describe(tensor: Tensor, start: int) -> tuple[_Part | None, int]:
    """What a tensor is made of, its bytes beginning at ``start``, and where they end."""
    if tensor.layout is not torch.strided:
        return None, start
    if not is_opaque(tensor):
        dense = _Dense(tensor.size(), storage_order(tensor), tensor.dtype, start)
        return dense, start + -(-(dense.stop - start) // _ALIGN) * _ALIGN
    kind: Any = type(tensor)
    if getattr(kind, "__tensor_flatten__", None) is None:
        return None, start
    names, context = kind.__tensor_flatten__(tensor)
    parts: dict[str, _Part] = {}
    for name in names:
        inner = getattr(tensor, name)
        part, start = _describe(inner, start)
        if part is None or inner.device != tensor.device:
            return None, start
        parts[name] = part
    return _Kept(kind, parts, context, tensor.size(), tensor.stride()), start


def _pack(tensor: Tensor, part: _Part, packed: Tensor) -> None:
    """Copy the bytes of what ``tensor`` is made of to where ``part`` says."""
    if isinstance(part, _Kept):
        for name, inner in part.parts.items():
            _pack(getattr(tensor, name), inner, packed)
        return
    flat = flatten(tensor.detach(), part.stride)
    packed[part.start : part.stop].copy_(as_bytes(flat))


def _unpack(part: _Part, packed: Tensor) -> Any:
    """What ``_pack`` has packed, over the memory of ``packed``."""
    if isinstance(part, _Dense):
        flat = packed[part.start : part.stop].view(part.dtype)
        return flat.as_strided(part.size, part.stride)
    found = {name: _unpack(inner, packed) for name, inner in part.parts.items()}
    return part.kind.__tensor_unflatten__(found, part.context, part.size, part.stride)
