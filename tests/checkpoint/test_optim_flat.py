"""Optimizer state by name, for optimizers over the tensors of ``plain_parameters.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_compose import (
    flat_parameters,
    fully_shard,
    load_checkpoint,
    load_optim_state_dict,
    local_parameters,
    optim_state_dict,
    save_checkpoint,
)

from harness import run_ranks
from models import Tower


def batch(ranks: int) -> torch.Tensor:
    return torch.randn(2 * ranks, 6, generator=torch.Generator().manual_seed(1))


def build() -> nn.Module:
    torch.manual_seed(0)
    return Tower()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("make", [flat_parameters, local_parameters])
def test_state_is_the_plain_optimizers_and_loads_back(make, ranks: int) -> None:
    """State is that of the plain optimizer and loads back."""

    def check(rank: int) -> None:
        plain = build()
        plain_optim = torch.optim.AdamW(plain.parameters(), lr=0.1)
        model = build()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optim = torch.optim.AdamW(make(model), lr=0.1)
        for _ in range(2):
            plain(batch(ranks)).square().mean().backward()
            model(batch(ranks)[2 * rank : 2 * rank + 2]).square().mean().backward()
            plain_optim.step()
            optim.step()
            plain_optim.zero_grad()
            optim.zero_grad()
        full = optim_state_dict(model, optim, kind="full")
        names = [name for name, _ in plain.named_parameters()]
        for name, state in zip(names, plain_optim.state_dict()["state"].values()):
            for key in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(full["state"][name][key], state[key])
        fresh = torch.optim.AdamW(make(model), lr=0.1)
        load_optim_state_dict(model, fresh, full)
        for mine, theirs in zip(optim.param_groups[0]["params"], fresh.param_groups[0]["params"]):
            for key in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(fresh.state[theirs][key], optim.state[mine][key])

    run_ranks(check, ranks)


@pytest.mark.parametrize("way", ["state dict", "checkpoint"])
def test_different_steps_have_no_place_in_a_buffer(way: str, tmp_path: Path) -> None:
    """Nothing is loaded over ``flat_parameters``; over ``local_parameters`` each keeps its own."""

    def check(rank: int) -> None:
        model = fully_shard(build())
        optim = torch.optim.Adam(model.parameters(), lr=0.1)
        for step in range(3):
            model(batch(2)[2 * rank : 2 * rank + 2]).square().mean().backward()
            if step:
                model.head.bias.grad = None
            optim.step()
            optim.zero_grad()
        saved = optim_state_dict(model, optim, kind="full")
        save_checkpoint(tmp_path / "saved", model, optim)
        before = model.head.weight.full_tensor()

        def load(into: torch.optim.Optimizer) -> None:
            if way == "state dict":
                load_optim_state_dict(model, into, saved)
            else:
                load_checkpoint(tmp_path / "saved", model, into)

        flat = torch.optim.Adam(flat_parameters(model), lr=0.1)
        with torch.no_grad():
            model.head.weight.add_(1)
        with pytest.raises(RuntimeError, match=r"'step' is 3 of .* and 1 of 'head.bias', for "):
            load(flat)
        assert not flat.state and torch.equal(model.head.weight.full_tensor(), before + 1)
        local = torch.optim.Adam(local_parameters(model), lr=0.1)
        load(local)
        assert [float(values["step"]) for values in local.state.values()][-2:] == [3.0, 1.0]

    run_ranks(check, 2)
