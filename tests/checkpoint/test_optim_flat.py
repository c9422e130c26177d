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
    rekey_optim_state_dict,
    save_checkpoint,
)

from harness import run_ranks, simulate_ranks
from models import Tower, by_block, data, seeded, square


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


class Alike(nn.Module):
    """Layers of one shape; of three units, the outermost has the first and the last of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.last = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, *self.blocks, self.last):
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("make", [flat_parameters, local_parameters])
def test_numbers_go_by_the_order_of_the_model(make) -> None:
    """State by number of a plain optimizer loads, and is given back, parameter by parameter."""

    def check(rank: int) -> None:
        plain = seeded(Alike)
        plain_optim = torch.optim.Adam(plain.parameters())
        square(plain, data(0, 0)).backward()
        plain_optim.step()
        wanted = plain_optim.state_dict()
        model = seeded(Alike)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optim = torch.optim.Adam(make(model))
        load_optim_state_dict(model, optim, wanted)
        found = rekey_optim_state_dict(optim_state_dict(model, optim), "id", model)
        for number, state in wanted["state"].items():
            torch.testing.assert_close(found["state"][number], state)
        by_name = rekey_optim_state_dict(wanted, "name", model, optim)
        first = wanted["state"][2]["exp_avg"]
        assert torch.equal(by_name["state"]["blocks.0.weight"]["exp_avg"], first)

    simulate_ranks(check)


@pytest.mark.parametrize("make", [flat_parameters, local_parameters])
def test_state_of_two_models_is_refused_for_one(make) -> None:
    """Parameters of the two have the same names, and state of one would go by the other's."""

    def check(rank: int) -> None:
        model, other = by_block(build()), by_block(build())
        optim = torch.optim.Adam([*make(model), *make(other)])
        saved = optim_state_dict(nn.ModuleList([model, other]), optim)
        assert {"0.first.weight", "1.first.weight"} <= set(saved["param_groups"][0]["params"])
        with pytest.raises(ValueError, match="is not a parameter of the module"):
            optim_state_dict(model, optim)
        with pytest.raises(ValueError, match="is not a parameter of the module"):
            load_optim_state_dict(model, torch.optim.Adam(make(other)), saved)

    simulate_ranks(check)


def test_state_that_some_parameters_of_a_buffer_lack() -> None:
    """As those that had no gradient: they are before their first step, and the others are not."""

    def check(rank: int) -> None:
        model = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), init="broadcast")
        stepped = torch.optim.AdamW(model.parameters())
        for p in model[1].parameters():
            p.grad = torch.ones_like(p)
        stepped.step()
        state = optim_state_dict(model, stepped)
        flat = torch.optim.AdamW(flat_parameters(model))
        with pytest.raises(RuntimeError, match=r"'step' is 1 of '1\..*' and 0 of '0\."):
            load_optim_state_dict(model, flat, state)
        local = torch.optim.AdamW(local_parameters(model))
        load_optim_state_dict(model, local, state)
        assert optim_state_dict(model, local)["state"].keys() == {"1.weight", "1.bias"}

    run_ranks(check, 1)
