"""Memory of a step, counted in the storages that are alive after every operator."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fsdp_compose import fully_shard

from harness import run_ranks
from models import seeded


class Mirrored(torch.autograd.Function):
    """Multiplies, with a gradient of the weight that lies in the weight's own memory."""

    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight.detach()  # type: ignore[attr-defined]
        return x * weight

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, Tensor]:
        weight = ctx.weight  # type: ignore[attr-defined]
        return grad * weight, weight


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1000))

    def forward(self, x: Tensor) -> Tensor:
        return Mirrored.apply(x, self.weight)


def test_a_gradient_in_the_weights_is_packed_first() -> None:
    """A gradient that lies in the gathered weights is read before these are released."""

    def ranks(rank: int) -> None:
        model = seeded(lambda: nn.Sequential(Scale(), Scale()))
        weights = [layer.weight.detach().clone() for layer in model]
        for layer in model:
            fully_shard(layer)
        model(torch.ones(1000, requires_grad=True)).sum().backward()
        for layer, weight in zip(model, weights):
            assert torch.equal(layer.weight.grad.full_tensor(), weight)

    run_ranks(ranks)
