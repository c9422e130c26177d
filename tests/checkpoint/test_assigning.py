"""``load_state_dict(assign=True)`` of a sharded module leaves it sharded as it was."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose.checkpoint.formats.export import find_stored
from fsdp_compose.checkpoint.formats.safetensors import SAFETENSORS

from harness import simulate_ranks
from models import seeded


class Scaled(nn.Module):
    """A layer, a parameter that every rank keeps whole, and running averages."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)) * self.scale


def test_an_ignored_parameter_stays_ignored(tmp_path: Path) -> None:
    """What is assigned in its place is trained and saved as it was, from the given memory."""

    def body(rank: int) -> None:
        model = seeded(Scaled)
        fc.fully_shard(model, ignored=[model.scale])
        given = dict(seeded(Scaled, 1).state_dict())
        given["scale"] = torch.full((6,), 3.0, dtype=torch.float64)
        model.load_state_dict(given, assign=True)
        assert model.scale.data_ptr() == given["scale"].data_ptr()
        model(torch.randn(4, 6, dtype=torch.float64)).sum().backward()
        assert model.scale.grad is not None
        fc.save_full(tmp_path / "full", model)
        fc.save_checkpoint(tmp_path / "saved", model)
        found = fc.state_dict(model)
        assert torch.equal(found["scale"], given["scale"])
        assert torch.equal(found["layer.weight"], given["layer.weight"])

    simulate_ranks(body)


def test_state_that_was_assigned_before() -> None:
    """Torch notes ``assign`` in the dictionary; another model's parameters stay what they are."""

    def body(rank: int) -> None:
        given = seeded(Scaled, 1).state_dict()
        seeded(Scaled).load_state_dict(given, assign=True)
        model = fc.fully_shard(seeded(Scaled))
        params = list(model.parameters())
        fc.load_state_dict(model, given)
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        assert torch.equal(fc.state_dict(model)["layer.weight"], given["layer.weight"])
        model(torch.randn(4, 6, dtype=torch.float64)).sum().backward()

    simulate_ranks(body)


def test_cast_buffers_stay_cast_and_are_saved_whole(tmp_path: Path) -> None:
    """With ``buffer_dtype`` forward finds the dtype it wants, and a full dict has the plain one."""
    half = fc.MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)

    def body(rank: int) -> None:
        plain = seeded(Scaled).float()
        model = fc.fully_shard(seeded(Scaled).float(), mp_policy=half)
        model.load_state_dict(plain.state_dict(), assign=True)
        assert model.norm.running_mean.dtype == torch.bfloat16
        model(torch.randn(4, 6)).sum().backward()
        with fc.state_dict_type(model, "full"):
            found = model.state_dict()
        fc.save_full(tmp_path, model)
        for state in (found, fc.state_dict(model), find_stored(tmp_path, SAFETENSORS).tensors):
            dtypes = {name: value.dtype for name, value in state.items()}
            assert dtypes == {name: value.dtype for name, value in plain.state_dict().items()}
            assert dtypes["norm.running_mean"] is torch.float32

    simulate_ranks(body)
