"""Layers that some ranks hold alone are saved and loaded with all they have, on any ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compose as fc

from harness import run_ranks, simulate_ranks

WIDTH, EXPERTS = 4, 4
Snapshot = dict[str, Tensor]


class Expert(nn.Module):
    """With buffers, which are not cut."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


class Model(nn.Module):
    """A dense layer, and the experts ``numbers`` of all."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        every = {str(number): Expert() for number in range(EXPERTS)}
        self.experts = nn.ModuleDict({str(number): every[str(number)] for number in numbers})

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        for expert in self.experts.values():
            x = x + expert(x)
        return x


def build(
    numbers: Sequence[int], seed: int = 0, ignores: bool = False, **options: Any
) -> tuple[Model, Any]:
    """Experts stay whole on their rank; they have a learning rate of their own."""
    torch.manual_seed(seed)
    model = Model(numbers)
    if len(numbers) < EXPERTS and not ignores:
        for expert in model.experts.values():
            fc.fully_shard(expert, mesh="self")
            fc.set_gradient_divide_factor(expert, 2.0)
    fc.fully_shard(model, ignored=[model.experts] if ignores else (), **options)
    experts = {"params": model.experts.parameters(), "lr": 0.05}
    return model, torch.optim.AdamW([{"params": model.dense.parameters()}, experts], lr=0.01)


def own(rank: int) -> range:
    return range(2 * rank, 2 * rank + 2)


def snapshot(model: nn.Module, optim: Any) -> Snapshot:
    """Weights, buffers and optimizer state, whole, by name."""
    found: Snapshot = dict(fc.state_dict(model))
    for name, values in fc.optim_state_dict(model, optim)["state"].items():
        found.update((f"{key} of {name}", value) for key, value in values.items())
    return {name: value.clone() for name, value in found.items()}


def train(model: nn.Module, optim: Any) -> None:
    for step in range(2):
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        model(torch.randn(8, WIDTH, generator=generator)).square().mean().backward()
        optim.step()
        optim.zero_grad()


def save(path: Path, ignores: bool = False) -> Snapshot:
    """What both ranks saved, as each found it."""

    def ranks(rank: int) -> Snapshot:
        model, optim = build(own(rank), ignores=ignores)
        train(model, optim)
        fc.save_checkpoint(path, model, optim)
        return snapshot(model, optim)

    first, second = simulate_ranks(ranks, 2)
    return {**first, **second}


@pytest.mark.parametrize("numbers", ["own", "swapped", "ignored", "all", "one process"])
def test_experts_of_one_rank_are_saved_whole(tmp_path: Path, numbers: str) -> None:
    """Buffers, steps and settings too; others' names are not unexpected, and none is missing."""
    saved = save(tmp_path, ignores=numbers == "ignored")

    def ranks(rank: int) -> None:
        swapped = own(1 - rank)
        lists = {"own": own(rank), "swapped": swapped, "ignored": swapped}
        mine = lists.get(numbers, range(EXPERTS))
        model, optim = build(mine, seed=1, ignores=numbers == "ignored")
        fc.load_checkpoint(tmp_path, model, optim)
        found = snapshot(model, optim)
        assert found and all(torch.equal(value, saved[name]) for name, value in found.items())
        assert [group["lr"] for group in optim.param_groups] == [0.01, 0.05]

    simulate_ranks(ranks, 1 if numbers == "one process" else 2)


def test_experts_of_one_name_on_ranks_of_their_own(tmp_path: Path) -> None:
    """They are not taken for one parameter where each is alone on its rank, with mesh="self"."""

    def ranks(rank: int) -> None:
        torch.manual_seed(rank)
        model = Model([0])
        fc.fully_shard(model.experts["0"], mesh="self")
        fc.set_gradient_divide_factor(model.experts["0"], 2.0)
        fc.fully_shard(model, init="broadcast")
        text = r"'experts.0.linear.weight' is held by ranks \[0\] alone, and another by ranks \[1\]"
        with pytest.raises(RuntimeError, match=text):
            fc.save_checkpoint(tmp_path, model)

    simulate_ranks(ranks, 2)


def test_ignored_experts_are_not_left_out(tmp_path: Path) -> None:
    """Of one name rank 0's are saved, with a warning; a file of the whole would lack others'."""

    def ranks(rank: int) -> None:
        model, _ = build([0], seed=rank, ignores=True, init="broadcast")
        for saves in (fc.save_checkpoint, fc.save_full):
            with pytest.warns(UserWarning, match=r"'experts.0.linear.weight' .* rank 1 holds"):
                saves(tmp_path / "alike", model)
        model, _ = build([rank], ignores=True)
        with pytest.raises(RuntimeError, match=r"'experts.0.linear.bias' .* not on every rank"):
            fc.save_full(tmp_path / "apart", model)
        with pytest.raises(RuntimeError, match=r"'experts.1.linear.* would be left out"):
            fc.state_dict(model, rank0_only=True)

    run_ranks(ranks, 2)


def test_owned_state_of_experts_of_one_name() -> None:
    """What the owner of one expert counts is no state of another of that name, on other ranks."""

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for param in self.param_groups[0]["params"]:
                if param.grad is not None:
                    self.state[param]["count"] = self.state[param].get("count", 0) + 1

    def ranks(rank: int) -> int:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        torch.manual_seed(rank % 2)
        expert = fc.fully_shard(nn.Linear(WIDTH, WIDTH, bias=False), mesh=mesh["dp"])
        model = fc.fully_shard(nn.Sequential(expert, nn.Linear(WIDTH, WIDTH)), init="broadcast")
        optim = fc.owner_step([expert.weight], Counting)
        for _ in range(1 + rank % 2):
            expert.weight.grad = torch.ones_like(expert.weight)
            optim.step()
        count: int = fc.optim_state_dict(model, optim)["state"]["0.weight"]["count"]
        return count

    assert simulate_ranks(ranks, 4) == [1, 2, 1, 2]


def test_experts_on_one_rank_only(tmp_path: Path) -> None:
    """A rank without experts takes part; exports name the ranks that have them."""

    def ranks(rank: int) -> None:
        model, optim = build([] if rank else [0, 1])
        train(model, optim)
        fc.save_checkpoint(tmp_path, model, optim)
        saved = snapshot(model, optim)
        again, other = build([] if rank else [0, 1], seed=1)
        fc.load_checkpoint(tmp_path, again, other)
        found = snapshot(again, other)
        assert found.keys() == saved.keys()
        assert all(torch.equal(value, saved[name]) for name, value in found.items())
        with pytest.raises(RuntimeError, match=r"held by ranks \[0\] alone"):
            fc.save_full(tmp_path / "full", model)

    simulate_ranks(ranks, 2)


def test_experts_with_replicas_are_saved(tmp_path: Path) -> None:
    """Ranks that hold slices and copies of one expert are not taken for holders of another."""

    def ranks(rank: int) -> None:
        mesh = dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("ep", "copies", "slices"))
        torch.manual_seed(0)
        model = Model([mesh.get_local_rank("ep")])
        for expert in model.experts.values():
            fc.fully_shard(expert, mesh=mesh["copies", "slices"])
            fc.set_gradient_divide_factor(expert, 8.0)
        fc.fully_shard(model, init="broadcast")
        saved = {name: value.clone() for name, value in fc.state_dict(model).items()}
        fc.save_checkpoint(tmp_path, model)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        fc.load_checkpoint(tmp_path, model)
        assert all(torch.equal(value, saved[n]) for n, value in fc.state_dict(model).items())

    simulate_ranks(ranks, 8)


def test_names_that_no_rank_has_are_unexpected(tmp_path: Path) -> None:
    """Beside those of others, which are left out; a dictionary says to pass strict=False."""
    saved = save(tmp_path)

    def ranks(rank: int) -> None:
        model, _ = build([rank], seed=1)
        with pytest.raises(RuntimeError) as raised:
            fc.load_checkpoint(tmp_path, model)
        assert "unexpected keys: 'experts.2." in str(raised.value)
        assert f"'experts.{1 - rank}." not in str(raised.value)
        with pytest.raises(RuntimeError, match="strict=False to leave them out, as where other"):
            fc.load_state_dict(model, {k: v for k, v in saved.items() if " of " not in k})

    simulate_ranks(ranks, 2)


def test_rank_0_alone_does_not_have_all_experts() -> None:
    """What would be left out is refused, on every rank; the dense part alone is not."""

    def ranks(rank: int) -> None:
        model, optim = build([2 * rank, 2 * rank + 1])
        model(torch.ones(2, WIDTH)).sum().backward()
        optim.step()
        only: Any = {"kind": "full", "rank0_only": True}
        for ask in (
            lambda: fc.state_dict(model, **only),
            lambda: fc.optim_state_dict(model, optim, **only),
            lambda: fc.checkpoint.set_state_dict_type(model, **only),
        ):
            with pytest.raises(RuntimeError, match=rf"'experts\.{2 * rank}\..* would be left out"):
                ask()
        assert f"experts.{2 * rank}.linear.weight" in fc.state_dict(model)
        assert len(fc.state_dict(model.dense, **only)) == (0 if rank else 2)
        assert len(fc.state_dict(model.experts, **only)) == (0 if rank else 14)

    simulate_ranks(ranks, 2)


def test_rank_0_alone_has_what_others_repeat() -> None:
    """A part on two of four ranks whose values the others hold too."""

    def ranks(rank: int) -> None:
        torch.manual_seed(0)
        model = Model(range(EXPERTS))
        pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("apart", "pair"))["pair"]
        fc.fully_shard(model.dense, mesh=pairs)
        fc.set_gradient_divide_factor(model.dense, 2)
        fc.fully_shard(model)
        assert bool(fc.state_dict(model, rank0_only=True)) == (rank == 0)

    simulate_ranks(ranks, 4)
