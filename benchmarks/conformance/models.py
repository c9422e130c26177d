"""Small models of the rows, with parameters of odd sizes, so that cuts fall inside them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["Block", "Scaled", "Tied", "Tower", "tower"]


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tower(nn.Module):
    """A first layer, two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


tower = Tower


class Tied(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Linear(6, 6, bias=False)
        self.blocks = nn.ModuleList([Block()])
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](self.emb(x)))


_aten = torch.ops.aten
_SAME = {
    *(_aten.detach.default, _aten.t.default, _aten.clone.default, _aten.view.default),
    *(_aten.split.Tensor, _aten.slice.Tensor, _aten.as_strided.default, _aten._to_copy.default),
    *(_aten.new_zeros.default, _aten.empty_like.default),
}


class Scaled(Tensor):
    """A weight whose products are multiplied by a factor, around a tensor, as torchao's are.

    It has what torch.compile and FSDP2 ask of such a class.
    """

    @staticmethod
    def __new__(cls, data: Tensor, factor: float) -> Scaled:
        place = data.shape, data.stride(), data.storage_offset()
        return Tensor._make_wrapper_subclass(
            cls, *place, dtype=data.dtype, device=data.device, requires_grad=data.requires_grad
        )

    def __init__(self, data: Tensor, factor: float) -> None:
        self._data, self._factor = data, factor

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_data"], self._factor

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Scaled:
        return cls(inner["_data"], context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        every = pytree.tree_leaves((args, kwargs))
        factor = next(t._factor for t in every if isinstance(t, cls))
        given, named = pytree.tree_map_only(cls, lambda t: t._data, (args, kwargs or {}))
        out = func(*given, **named)
        if func is _aten.copy_.default:
            return args[0]
        if func in _SAME:
            return pytree.tree_map_only(Tensor, lambda t: cls(t, factor), out)
        return out * factor if func in (_aten.mm.default, _aten.addmm.default) else out

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        return (self._data,), self._factor

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        (data,) = gathered
        return None if out is not None else (Scaled(data, metadata), (data,))
