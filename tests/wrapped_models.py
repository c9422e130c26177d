"""Models with weights of classes that compute in ``__torch_dispatch__``, and training beside one
process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fsdp_compose as fc
from fsdp_compose import fully_shard

__all__ = [
    "UNITS",
    "Adapted",
    "Build",
    "Coded",
    "Scaled",
    "Silent",
    "batch",
    "check",
    "coded",
    "part",
    "scaled",
    "shard",
    "tied",
    "train",
]

aten = torch.ops.aten
SAME = (aten.t.default, aten.detach.default, aten.clone.default, aten.view.default)
SAME += (aten._to_copy.default, aten.empty_like.default)


class Scaled(Tensor):
    """One tensor, of which matrix products are multiplied by a factor, as fp8 weights are."""

    @staticmethod
    def __new__(cls, data: Tensor, factor: float) -> Scaled:
        found = (data.shape, data.stride(), data.storage_offset())
        return Tensor._make_wrapper_subclass(cls, *found, dtype=data.dtype, device=data.device)

    def __init__(self, data: Tensor, factor: float) -> None:
        self._data, self._factor = data, factor

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_data"], (self._factor,)

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Scaled:
        return cls(inner["_data"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, named = pytree.tree_map_only(cls, lambda t: t._data, (args, kwargs or {}))
        factor = next(t._factor for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, cls))
        out = func(*given, **named)
        if func is aten.copy_.default:
            return args[0]
        if func in SAME:
            return pytree.tree_map_only(Tensor, lambda t: cls(t, factor), out)
        return out * factor if func in (aten.mm.default, aten.addmm.default) else out


class Silent(Scaled):
    """Does not say what it keeps."""

    __tensor_flatten__ = None  # type: ignore[assignment]


class Coded(Tensor):
    """A frozen weight as int8 codes with a scale for each row, and a wrapper in it besides."""

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, zero: Tensor, block: int) -> Coded:
        return Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=scales.dtype, device=codes.device
        )

    def __init__(self, codes: Tensor, scales: Tensor, zero: Tensor, block: int) -> None:
        self.codes, self.scales, self.zero, self.block = codes, scales, zero, block

    @classmethod
    def of(cls, weight: Tensor, block: int = 1) -> Coded:
        scales = weight.detach().abs().amax(1, keepdim=True) / 127
        codes = (weight.detach() / scales).round().to(torch.int8)
        return cls(codes.t().contiguous().t(), scales, Scaled(torch.zeros(3), 1.0), block)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales", "zero"], self.block

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Coded:
        return cls(inner["codes"], inner["scales"], inner["zero"], context)

    def plain(self) -> Tensor:
        assert isinstance(self.zero, Scaled)
        return self.codes * self.scales

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            one = args[0]
            return cls(*(func(t, *args[1:], **kwargs) if t is one.zero else t.clone()
                         for t in (one.codes, one.scales, one.zero)), one.block)  # fmt: skip
        given, named = pytree.tree_map_only(cls, lambda t: t.plain(), (args, kwargs))
        return func(*given, **named)


class Adapted(nn.Module):
    """A frozen weight of such a class, with a trained adapter."""

    def __init__(self, block: int = 1) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6, bias=False)
        self.base.weight = nn.Parameter(Coded.of(self.base.weight, block), requires_grad=False)
        self.odd = nn.Parameter(torch.ones(5, dtype=torch.uint8), requires_grad=False)
        self.shift = nn.Parameter(torch.ones(6), requires_grad=False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.base(x + self.shift) + self.up(self.down(x))) * self.odd[0]


def scaled() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(Scaled(layer.weight.detach(), 1.5))
    return model


def coded() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Adapted(), Adapted())


class Tied(nn.Sequential):
    """Two layers that read one weight of such a class."""

    def __init__(self) -> None:
        layers = [nn.Linear(6, 6) for _ in range(3)]
        layers[0].weight = layers[1].weight = nn.Parameter(Scaled(layers[0].weight.detach(), 1.5))
        super().__init__(layers[0], nn.Tanh(), *layers[1:])


def tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


Build = Callable[[], nn.Module]
UNITS = fc.wrap.by_class({nn.Linear, Adapted})


def shard(model: nn.Module, **options: Any) -> nn.Module:
    for unit in model:
        if next(unit.parameters(), None) is not None:
            fully_shard(unit, **options)
    return fully_shard(model, **options)


def batch(seed: int, device: str = "cpu") -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)).to(device)


def part(x: Tensor, rank: int, world: int) -> Tensor:
    return x.chunk(world)[rank]


def train(
    model: nn.Module, reference: nn.Module, rank: int, world: int, device: str = "cpu"
) -> Tensor:
    """Three steps of SGD beside one process; both must compute the same then."""
    sides = (model, part), (reference, lambda x, *_: x)
    optims = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.3) for m, _ in sides
    ]
    for step in range(3):
        for (side, cut), optim in zip(sides, optims, strict=True):
            side(cut(batch(step, device), rank, world)).square().mean().backward()
            optim.step()
            optim.zero_grad()
    check(model, reference, device)
    return batch(9, device)


def check(model: nn.Module, reference: nn.Module, device: str = "cpu") -> None:
    with torch.no_grad():
        torch.testing.assert_close(model(batch(9, device)), reference(batch(9, device)))
