"""A module whose parameters belong to the unit around it is saved and loaded as a unit is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compose as fc

from harness import rank_errors, run_ranks, simulate_ranks
from models import sgd, whole


def build() -> Any:
    torch.manual_seed(0)
    return fc.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


def filled(value: float) -> dict[str, Tensor]:
    return {"weight": torch.full((4, 4), value), "bias": torch.full((4,), value)}


def test_rank0s_state_is_sent_to_all() -> None:
    """Of the model and of the optimizer."""

    def ranks(rank: int) -> None:
        model = build()
        given = filled(1.0) if rank == 0 else {}
        fc.load_state_dict(model[1], given, broadcast_from_rank0=True)
        assert bool((whole(model[1].weight) == 1).all())
        optim = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(2, 4)).sum().backward()
        optim.step()
        state: Any = fc.optim_state_dict(model[1], optim)
        for values in state["state"].values():
            values["momentum_buffer"].fill_(1.0 + rank)
        fc.load_optim_state_dict(model[1], optim, state, broadcast_from_rank0=True)
        momentum = whole(optim.state[model[1].weight]["momentum_buffer"])
        assert bool((momentum == 1).all())

    simulate_ranks(ranks)


def test_ranks_compare_what_they_are_given() -> None:
    def load(rank: int) -> None:
        model = build()
        fc.load_state_dict(model[1], filled(1.0 + rank))

    for error in rank_errors(load, 2):
        assert "the ranks were given different things" in str(error)


def test_records_are_compared_before_a_part_is_saved(tmp_path: Path) -> None:
    """One rank alone has stepped since."""

    def save(rank: int, call: Callable[[nn.Module], object]) -> None:
        model = build()
        optim = sgd(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optim.step()
            optim.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        if rank == 0:
            optim.step()
        call(model[1])

    for call in (
        lambda part: fc.save_full(tmp_path / "full", part),
        lambda part: fc.save_checkpoint(tmp_path / "checkpoint", part),
        fc.state_dict,
    ):
        for error in rank_errors(save, 2, call):
            assert "optimizer.step() was left out on rank 1" in str(error)


class Stage(nn.Module):
    """The layers whose number is ``rank`` modulo 2, by the names that the whole model has."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(4, 4) for number in numbers})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def test_the_layers_of_stages_are_saved_together(tmp_path: Path) -> None:
    """Where the units are the stages around them."""
    world = dist.group

    def ranks(rank: int) -> None:
        stage = fc.fully_shard(Stage([rank, rank + 2]), mesh="self")
        optim = torch.optim.SGD(stage.layers.parameters(), lr=0.1, momentum=0.9)
        stage(torch.ones(2, 4)).sum().backward()
        optim.step()
        before = {name: whole(p).clone() for name, p in stage.layers.named_parameters()}
        fc.save_checkpoint(tmp_path / "a", stage.layers, optim, process_group=world.WORLD)
        fc.save_full(tmp_path / "b", stage.layers, process_group=world.WORLD)
        with torch.no_grad():
            for p in stage.layers.parameters():
                p.zero_()
        fc.load_checkpoint(tmp_path / "a", stage.layers, optim, process_group=world.WORLD)
        for name, p in stage.layers.named_parameters():
            assert torch.equal(whole(p), before[name])

    run_ranks(ranks, 2)
    model = Stage([0, 1, 2, 3]).layers
    fc.load_full(tmp_path / "b", model)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fc.load_checkpoint(tmp_path / "a", model, optim)
    assert len(optim.state) == 8


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_rank0s_experts_replace_no_others(what: str) -> None:
    """Each rank has another expert by one name, and loads its own full state."""

    def ranks(rank: int) -> None:
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.5)
            model[1].weight.fill_(1.0 + rank)
        fc.fully_shard(model[1], mesh="self")
        fc.set_gradient_divide_factor(model[1], 2.0)
        fc.fully_shard(model)
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.full((2, 4), 1.0 + rank)).sum().backward()
        optim.step()
        if what == "model":
            state = fc.state_dict(model)
            for load in (model.load_state_dict, lambda given: fc.load_state_dict(model, given)):
                load(state)
            assert torch.equal(whole(model[1].weight), state["1.weight"])
            fc.load_state_dict(model, state, broadcast_from_rank0=True)
        else:
            own = fc.optim_state_dict(model, optim)
            fc.load_optim_state_dict(model, optim, own)
            fc.load_optim_state_dict(model, optim, own, broadcast_from_rank0=True)

    for error in rank_errors(ranks, 2):
        assert "'1.weight' is one parameter on ranks [0] and another on ranks [1]" in str(error)


class Layers(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.values():
            x = layer(x)
        return x


def test_whole_files_of_experts_load_everywhere() -> None:
    """Experts named by number take theirs out of the model's, and are compared by nobody."""

    def ranks(rank: int) -> None:
        whole_model = Layers({name: nn.Linear(4, 4) for name in ("dense", "0", "1")})
        torch.manual_seed(0)
        for p in whole_model.parameters():
            nn.init.normal_(p)
        state = {name: p.detach().clone() for name, p in whole_model.named_parameters()}
        mine: Any = Layers({name: nn.Linear(4, 4) for name in ("dense", str(rank))})
        fc.fully_shard(mine[str(rank)], mesh="self")
        fc.set_gradient_divide_factor(mine[str(rank)], 2.0)
        fc.fully_shard(mine)
        found = fc.load_state_dict(mine, state, strict=False)
        assert found.unexpected_keys == [f"{1 - rank}.weight", f"{1 - rank}.bias"]
        for name, p in mine.named_parameters():
            assert torch.equal(whole(p), state[name])
        state["dense.weight"] = state["dense.weight"] + rank
        with pytest.raises(RuntimeError, match="the ranks were given different things"):
            fc.load_state_dict(mine, state, strict=False)

    simulate_ranks(ranks)


@pytest.mark.parametrize("differs", ["expert", "rank", "dense"])
def test_experts_are_compared_by_the_ranks_they_are_on(differs: str) -> None:
    """Two ranks hold each expert; those of other ranks have other values."""

    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fc.fully_shard(model[1], mesh=mesh["edp"])
        fc.set_gradient_divide_factor(model[1], 4.0)
        fc.fully_shard(model)
        state = {name: torch.zeros_like(value) for name, value in fc.state_dict(model).items()}
        expert = mesh.get_local_rank("ep")
        state["1.weight"] += expert
        state["1.bias"] += rank if differs == "rank" else 0
        state["0.bias"] += rank if differs == "dense" else 0
        fc.load_state_dict(model, state)
        assert bool((whole(model[1].weight) == expert).all())

    if differs == "expert":
        run_ranks(ranks, 4)
        return
    for error in rank_errors(ranks, 4):
        assert "the ranks were given different things" in str(error)
