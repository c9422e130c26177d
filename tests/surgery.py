"""What tests of changed modules share: how to change blocks, and how to train and compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from models import (
    WIDTH,
    Tolerance,
    Tower,
    Twin,
    adamw,
    assert_at_rest,
    compare,
    data,
    seeded,
    square,
    trainable,
    whole,
)

Change = Callable[[nn.Module], Any]


def blocks_with(change: Change, depth: int = 2) -> Callable[[], nn.Module]:
    """Towers whose blocks had a change each."""

    def build() -> nn.Module:
        model = Tower(depth)
        for block in model.blocks:
            change(block)
        return model

    return build


class Built(Twin):
    """The plain replicas are built, not copied: legacy norms hold tensors that cannot be copied."""

    def replicate(self, model: nn.Module) -> list[nn.Module]:
        others = [seeded(self.build, self.seed) for _ in range(1, self.world)]
        for other in others:
            for mine, first in zip(other.modules(), model.modules()):
                mine._parameters.update(first._parameters)
        return [model, *others]


def together(
    model: nn.Module, plain: nn.Module, rank: int, world: int = 2, steps: int = 3, start: int = 0
) -> None:
    """Steps of both with fresh optimizers of what is trained now, then all parameters agree."""
    ours, theirs = adamw(trainable(model)), adamw(trainable(plain))
    for step in range(start, start + steps):
        square(model, data(step, rank)).backward()
        assert_at_rest(model)
        square(plain, torch.cat([data(step, r) for r in range(world)])).backward()
        for optim in (ours, theirs):
            optim.step()
            optim.zero_grad()
    same(model, plain)


def same(model: nn.Module, plain: nn.Module) -> None:
    found, wanted = dict(model.named_parameters()), dict(plain.named_parameters())
    assert list(found) == list(wanted)
    for name, param in found.items():
        compare(name, whole(param), wanted[name].detach(), Tolerance())


class LoRALinear(nn.Module):
    """A frozen weight and a trained update of rank 2, in one module."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width) * 0.3, requires_grad=False)
        self.a = nn.Parameter(torch.randn(2, width))
        self.b = nn.Parameter(torch.randn(out, 2) * 0.1)
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight)
        return out if self.merged else out + F.linear(F.linear(x, self.a), self.b)

    def merge(self, sign: int) -> None:
        with torch.no_grad():
            self.weight += sign * (self.b @ self.a)
        self.merged = sign > 0


def low_rank(block: nn.Module) -> None:
    block.requires_grad_(False)
    block.up = LoRALinear(WIDTH, 7)


class Packed(nn.Parameter):
    """Bytes that carry their scale, as 4-bit weights of quantisation libraries do."""

    scale: Tensor

    def __new__(cls, data: Tensor, scale: Tensor) -> Packed:
        packed = torch.Tensor._make_subclass(cls, data, False)
        packed.scale = scale
        return packed

    def __deepcopy__(self, memo: dict[int, Any]) -> Packed:
        memo[id(self)] = twin = Packed(self.detach().clone(), self.scale.clone())
        return twin

    def dequantize(self) -> Tensor:
        return self.as_subclass(Tensor).to(self.scale.dtype) * self.scale


class PackedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        q = torch.randint(0, 255, (7, WIDTH), dtype=torch.uint8)
        self.weight = Packed(q, torch.rand(7, 1, dtype=torch.float64) * 0.01)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, Packed)
        return F.linear(x, self.weight.dequantize())


def change_to_packed(block: nn.Module) -> None:
    block.up = PackedLinear()


class Squash(nn.Module):
    """A parametrisation of a user."""

    def forward(self, weight: Tensor) -> Tensor:
        return torch.tanh(weight) * 1.5

    def right_inverse(self, weight: Tensor) -> Tensor:
        return torch.atanh((weight / 1.5).clamp(-0.9, 0.9))


def seeded_spectral(norm: Callable[[nn.Module], Any], module: nn.Module) -> None:
    """Its first vectors are random."""
    torch.manual_seed(3)
    norm(module)


CHANGES: dict[str, Change] = {
    "parametrize": lambda m: parametrize.register_parametrization(m, "weight", Squash()),
    "orthogonal": lambda m: parametrizations.orthogonal(m, orthogonal_map="matrix_exp"),
    "cayley": lambda m: parametrizations.orthogonal(m, orthogonal_map="cayley"),
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": lambda m: seeded_spectral(parametrizations.spectral_norm, m),
    "legacy weight_norm": torch.nn.utils.weight_norm,
    "legacy spectral_norm": lambda m: seeded_spectral(torch.nn.utils.spectral_norm, m),
    "prune": lambda m: prune.l1_unstructured(m, "weight", 0.4),
}
