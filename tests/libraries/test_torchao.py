"""torchao's weights, trained or frozen under adapters, on two ranks beside one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fsdp_compose as fc

from harness import run_ranks

pytest.importorskip("torchao")  # what is installed for docs/recipes.md has it, where it installs

from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.quantized_training import bitnet_training, int8_mixed_precision_training
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]
WIDTH = 256


class Nf4Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear_nf4(x, self.weight)


class Adapted(nn.Module):
    """A frozen linear layer that was quantized, with an adapter of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.base(x) + self.up(self.down(x)))


def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))


def float8() -> nn.Module:
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    return convert_to_float8_training(dense(), config=config)


def int8() -> nn.Module:
    model = dense()
    quantize_(model, int8_mixed_precision_training())
    return model


def bitnet() -> nn.Module:
    model = dense()
    quantize_(model, bitnet_training())
    return model


def frozen_int8() -> nn.Module:
    torch.manual_seed(0)
    base = nn.Linear(WIDTH, WIDTH, bias=False)
    quantize_(base, Int8WeightOnlyConfig())
    base.weight.requires_grad_(False)
    return nn.Sequential(Adapted(base))


def frozen_nf4() -> nn.Module:
    torch.manual_seed(0)
    base = Nf4Linear(WIDTH, WIDTH, bias=False)
    base.weight = nn.Parameter(to_nf4(base.weight.detach(), 64, 256), requires_grad=False)
    return nn.Sequential(Adapted(base))


@pytest.mark.parametrize("build", [float8, int8, bitnet, frozen_int8, frozen_nf4])
def test_it_trains_as_in_one_process(build: Callable[[], nn.Module]) -> None:
    def ranks(rank: int) -> None:
        model, reference = build(), build()
        kinds = [type(p) for p in model.parameters()]
        assert any(kind is not nn.Parameter for kind in kinds)
        fc.fully_shard(model, units=fc.wrap.by_class({nn.Linear, Adapted}))
        for step in range(3):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
            for side, cuts in (model, [x.chunk(2)[rank]]), (reference, x.chunk(2)):
                optim = torch.optim.SGD([p for p in side.parameters() if p.requires_grad], lr=0.3)
                for cut in cuts:
                    (side(cut).square().mean() / len(cuts)).backward()
                optim.step()
                optim.zero_grad()
        wanted = reference(x)
        torch.testing.assert_close(model(x), wanted)
        fc.undo(model)
        assert [type(p) for p in model.parameters()] == kinds
        torch.testing.assert_close(model(x), wanted)

    run_ranks(ranks, 2, timeout=120)
