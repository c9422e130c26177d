"""Frozen weights stay readable for a backward through gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import fully_shard

from harness import simulate_ranks
from models import Tolerance, assert_at_rest, compare, data, seeded, units, whole


class Scale(nn.Module):
    """One trained number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tanh(self.weight)


class LowRank(nn.Module):
    """A frozen layer, which reads a view of its weight too; an adapter or a bias may be trained."""

    def __init__(self, adapts: bool = False, biased: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 6), requires_grad=False)
        self.adapter = nn.Parameter(torch.rand(6)) if adapts else None
        self.bias = nn.Parameter(torch.zeros(6)) if biased else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.adapter is None else x * self.adapter
        y = torch.tanh(x @ self.weight.t()) @ self.weight
        return x + y if self.bias is None else y + self.bias


def inside(model: nn.Module) -> nn.Module:
    """A trained unit inside one that trains nothing."""
    fully_shard(model[0])  # type: ignore[index]
    return fully_shard(model)


def beside(model: nn.Module) -> nn.Module:
    """Trained and frozen units beside each other."""
    for child in model.children():
        fully_shard(child)
    return fully_shard(model)


def ignoring(model: nn.Module) -> nn.Module:
    """Adapters are plain parameters, on every rank in full."""
    adapters = [p for p in model.parameters() if p.requires_grad]
    for child in model.children():
        fully_shard(child, ignored=adapters)
    return fully_shard(model, ignored=adapters)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], nn.Module]]] = {
    "a trained unit inside": (lambda: nn.Sequential(Scale(), LowRank()), inside),
    "beside trained units": (lambda: nn.Sequential(Scale(), LowRank(), Scale(), LowRank()), beside),
    "a trained bias behind": (lambda: nn.Sequential(Scale(), LowRank(biased=True)), beside),
    "ignored adapters": (lambda: nn.Sequential(LowRank(True), LowRank(True)), ignoring),
}

RELEASED = ("a trained unit inside", "beside trained units")
"""By the second backward, which reaches all trained units; else by the next forward."""


@pytest.mark.parametrize("is_linear", [False, True], ids=["square", "linear"])
@pytest.mark.parametrize("wants_input", [False, True], ids=["fixed input", "input"])
@pytest.mark.parametrize("case", CASES)
def test_frozen_weights_are_read_twice(case: str, wants_input: bool, is_linear: bool) -> None:
    """A penalty on gradients of parameters, where no unit's own gradients keep it gathered."""
    build, shard = CASES[case]

    def ranks(rank: int) -> None:
        plain, model = seeded(build), shard(seeded(build))
        for _ in range(2):
            for either in (model, plain):
                x = data(0, 0).requires_grad_(wants_input)  # one batch, as penalties do not average
                output = either(x)
                loss = output.mean() if is_linear else output.square().mean()
                del output
                trained = [p for p in either.parameters() if p.requires_grad]
                grads = torch.autograd.grad(loss, trained, create_graph=True)
                del loss  # and with it what only the first backward read
                sum(g.square().sum() for g in grads if g.requires_grad).backward()
            wanted = dict(plain.named_parameters())
            for name, param in model.named_parameters():
                if param.grad is not None or wanted[name].grad is not None:
                    assert param.grad is not None
                    compare(name, whole(param.grad), wanted[name].grad, Tolerance())
        if case in RELEASED:
            assert_at_rest(model)
        del grads
        model(x).mean().backward()
        assert not any(unit.holds for unit in units(model))

    simulate_ranks(ranks, 2)
