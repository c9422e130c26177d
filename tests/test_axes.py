"""What belongs to every axis of the mesh: whole matrices, replicas, seeds and degenerate shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_owner import MAKE, wholes
from test_tensor_parallel import MLP, mesh_of, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp_compose as fc
from fsdp_compose.parallel import declare_tensor_parallel

from harness import run_ranks
from models import data

# Optimizers of whole matrices


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def two_layers(mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    """Column, then row parallel with a norm beside them; plain without a mesh."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), MLP(8, 12)).double()
    if mesh is not None:
        parallelize_module(
            model[1], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        fc.fully_shard(model, mesh=mesh["dp"], **options)
    return model


def backward(model: nn.Module, rank: int, seed: int) -> None:
    model.zero_grad()
    model(data(seed, rank, 3, 8)).square().mean().backward()


@pytest.mark.parametrize("shape", [(2, 2), (1, 2)], ids=str)
def test_owners_step_the_whole_of_split_matrices(shape: tuple[int, int], tmp_path: Path) -> None:
    """Bit-equal to one process, in updates and in state, also after saving and loading."""

    def ranks(rank: int) -> None:
        mesh = mesh_of(dp=shape[0], tp=shape[1])
        here = mesh["dp"].get_local_rank()
        for name, granularity in (("muon", wholes), ("muon", 1), ("soap", wholes), ("sgd", 1)):
            model, plain = two_layers(mesh, granularity=granularity), two_layers()
            optim, wanted = fc.owner_step(matrices(model), MAKE[name]), MAKE[name](matrices(plain))
            for seed in range(2):
                backward(model, here, seed)
                for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                    theirs.grad = whole(ours.grad)
                optim.step(), wanted.step()
            for (key, ours), theirs in zip(model.named_parameters(), plain.parameters()):
                assert torch.equal(whole(ours), theirs), key
            state = fc.optim_state_dict(model, optim)["state"]
            for key, theirs in plain.named_parameters():
                for what, value in wanted.state.get(theirs, {}).items():
                    found = state[key][what]
                    assert torch.equal(torch.as_tensor(found), torch.as_tensor(value)), key
            if name == "sgd":
                continue
            fc.save_checkpoint(tmp_path / name, model, optim)
            other = two_layers(mesh, granularity=1)
            resumed = fc.owner_step(matrices(other), MAKE[name])
            fc.load_checkpoint(tmp_path / name, other, resumed)
            for each, one in ((model, optim), (other, resumed)):
                backward(each, here, 7)
                one.step()
            for ours, theirs in zip(model.parameters(), other.parameters()):
                assert torch.equal(whole(ours), whole(theirs))

    run_ranks(ranks, shape[0] * shape[1])


def test_owners_of_parts_that_were_split_by_hand() -> None:
    """Parts of unequal sizes lie whole on other ranks of each shard group."""

    def ranks(rank: int) -> None:
        mesh = mesh_of(dp=2, tp=2)
        sizes = ((5, 2), (1, 6))
        for granularity in ("tensor", 1):
            torch.manual_seed(0)
            full = [torch.randn(7, 4, dtype=torch.float64) for _ in sizes]
            plain = nn.ParameterList(tensor.clone() for tensor in full)
            tp = mesh["tp"].get_local_rank()
            parts = [t.split(size)[tp].clone() for t, size in zip(full, sizes, strict=True)]
            model = nn.Sequential(*(nn.Linear(4, len(part), bias=False) for part in parts))
            for layer, part in zip(model, parts, strict=True):
                layer.weight = nn.Parameter(part)
            declare_tensor_parallel(model.parameters(), mesh["tp"], 0)
            fc.fully_shard(model, mesh=mesh["dp"], granularity=lambda *_, g=granularity: g)
            optim = fc.owner_step(model.parameters(), MAKE["muon"])
            wanted = MAKE["muon"](plain.parameters())
            for seed in range(2):
                for ours, theirs, size in zip(model.parameters(), plain, sizes, strict=True):
                    theirs.grad = data(seed, 0, 7, 4)
                    ours.grad = theirs.grad.split(size)[tp].clone()
                optim.step(), wanted.step()
            found: dict[str, Tensor] = fc.state_dict(model)
            for key, theirs in plain.named_parameters():
                assert torch.equal(found[f"{key}.weight"], theirs), key

    run_ranks(ranks, 4)
