"""One call on the world's group saves and loads every stage of a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp_compose as fc
from fsdp_compose.checkpoint.metadata import read_metadata
from fsdp_compose.checkpoint.source import CheckpointSource

from harness import rank_errors, run_ranks
from models import Block, by_block, seeded, whole

WIDTH = 6


class Model(nn.Module):
    """Stages by name: a tied table at both ends, blocks and a buffer between them."""

    def __init__(self, stages: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        table = nn.Embedding(5, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block(WIDTH) for i in range(4)})
        norm = nn.BatchNorm1d(WIDTH)
        norm.running_mean.fill_(3.0)
        if 0 in stages or 1 in stages:
            self.table = table  # which both ends read
        if 1 in stages:
            self.norm = norm
        for i in range(4):
            if i // 2 not in stages:
                del self.layers[str(i)]


def world() -> Any:
    return dist.group.WORLD


def two_by_two() -> tuple[DeviceMesh, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    return mesh, mesh["pp"].get_local_rank()


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Matrices decay and others do not; what is in the blocks of later stages learns slower."""
    wide = [p for p in model.parameters() if p.ndim == 2]
    thin = [p for p in model.parameters() if p.ndim != 2]
    return torch.optim.AdamW(
        [{"params": wide, "weight_decay": 0.1}, {"params": thin, "weight_decay": 0.0}], lr=0.01
    )


def step(model: nn.Module, optim: torch.optim.Optimizer, seed: int) -> None:
    """Gradients that depend on the name alone."""
    for name, param in model.named_parameters():
        generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
        param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)
    optim.step()


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    wanted: dict[str, Tensor] = plain.state_dict()
    for name, value in fc.state_dict(model).items():
        assert torch.equal(value, wanted[name]), name


def trained(seeds: tuple[int, ...] = (0, 1)) -> tuple[nn.Module, torch.optim.Optimizer]:
    plain = seeded(Model)
    optim = optimizer(plain)
    for seed in seeds:
        step(plain, optim, seed)
    return plain, optim


def test_stages_are_saved_and_loaded_together(tmp_path: Path) -> None:
    """Weights, buffers, optimizer state and groups, whoever loads them: stages, one rank, two."""

    def save(rank: int) -> None:
        mesh, stage = two_by_two()
        full = seeded(Model)
        part = seeded(lambda: Model((stage,)))
        part.load_state_dict({k: v for k, v in full.state_dict().items() if k in part.state_dict()})
        by_block(part, mesh=mesh["dp"])
        optim = optimizer(part)
        for seed in (0, 1):
            step(part, optim, seed)
        for asynchronous in (False, True):
            saving = fc.save_checkpoint(
                tmp_path / "saved", part, optim, extra={"rank": rank},
                asynchronous=asynchronous, process_group=world(),
            )  # fmt: skip
            saving.wait()
        fc.save_full(tmp_path / "full", part, process_group=world())
        plain, other = trained()
        assert_same(part, plain)
        step(part, optim, 2), step(plain, other, 2)
        for load, name in ((fc.load_checkpoint, "saved"), (fc.load_full, "full")):
            with pytest.raises(RuntimeError, match=r"unexpected keys(.|\n)*process_group=torch"):
                load(tmp_path / name, part)
        extra = fc.load_checkpoint(tmp_path / "saved", part, optim, process_group=world())
        assert extra == {"rank": rank}
        step(part, optim, 2)
        assert_same(part, plain)
        fc.load_full(tmp_path / "full", part, process_group=world())
        assert_same(part, trained()[0])

    def load(rank: int) -> None:
        model = by_block(seeded(Model, 1))
        optim = optimizer(model)
        fc.load_checkpoint(tmp_path / "saved", model, optim)
        plain, other = trained()
        assert_same(model, plain)
        step(model, optim, 2), step(plain, other, 2)
        assert_same(model, plain)
        assert [g["weight_decay"] for g in optim.param_groups] == [0.1, 0.0]
        found = CheckpointSource(
            tmp_path / "saved", read_metadata(tmp_path / "saved")[0]
        ).optimizer()
        names = [name for group in found["param_groups"] for name in group["params"]]
        assert sorted(names) == sorted(found["state"])  # a tied one once
        fc.save_checkpoint(tmp_path / "whole", model, optim)
        fc.save_full(tmp_path / "whole_full", model)
        fc.load_full(tmp_path / "full", model)
        assert_same(model, trained()[0])

    def split(rank: int) -> None:
        """Out of a checkpoint of the whole model, by stages on ranks of their own."""
        alone = [dist.new_group([r]) for r in range(2)]
        part = by_block(seeded(lambda: Model((rank,)), 2), mesh=alone[rank])
        optim = optimizer(part)
        fc.load_checkpoint(tmp_path / "whole", part, optim)
        plain, other = trained((0, 1, 2))
        step(plain, other, 3), step(part, optim, 3)
        assert_same(part, plain)
        fc.load_full(tmp_path / "whole_full", part, process_group=world())
        assert_same(part, trained((0, 1, 2))[0])
        fc.save_full(tmp_path / "alone", part)  # the default is all ranks, where none is shared

    run_ranks(save, 4)
    run_ranks(load, 2)
    run_ranks(split, 2)
    files = {path.name for path in (tmp_path / "alone").iterdir()}
    assert "model-00002-of-00002.safetensors" in files
    plain = seeded(Model, 5)
    fc.load_full(tmp_path / "alone", plain)
    assert_same(plain, trained((0, 1, 2))[0])
    assert whole(plain.norm.running_mean).eq(3.0).all()


def test_stages_that_save_by_themselves_are_an_error(tmp_path: Path) -> None:
    """Each would overwrite what another has written."""

    def ranks(rank: int, save: str) -> None:
        mesh, stage = two_by_two()
        part = by_block(seeded(lambda: Model((stage,))), mesh=mesh["dp"])
        for turn in range(2):
            if turn == stage:
                getattr(fc, save)(tmp_path / save, part)
            dist.barrier()

    for save in ("save_checkpoint", "save_full"):
        errors = rank_errors(ranks, 4, save)
        for error in errors[2:]:
            assert error is not None and "process_group=torch.distributed.group.WORLD" in error
            assert "ranks 0, 1 have saved" in error


def test_one_name_for_two_parameters_is_an_error(tmp_path: Path) -> None:
    """Equal names in two stages are a tied weight, or nothing that a checkpoint can hold."""

    def ranks(rank: int) -> list[str]:
        mesh, stage = two_by_two()
        part = by_block(seeded(lambda: Model((0,)), stage), mesh=mesh["dp"])
        found = []
        for save in (fc.save_checkpoint, fc.save_full):
            try:
                save(tmp_path / "saved", part, process_group=world())
            except RuntimeError as error:
                found.append(str(error))
        numbered = nn.ModuleDict({str(stage): part})
        fc.save_checkpoint(tmp_path / "saved", numbered, process_group=world())
        before = {name: p.full_tensor() for name, p in part.named_parameters()}
        with torch.no_grad():
            for param in part.parameters():
                param.zero_()
        fc.load_checkpoint(tmp_path / "saved", numbered, process_group=world())
        for name, param in part.named_parameters():
            assert torch.equal(param.full_tensor(), before[name])
        # Tied weights whose optimizer states have drifted apart.
        tied = by_block(seeded(lambda: Model((stage,))), mesh=mesh["dp"])
        with torch.no_grad():
            tied.table.weight.fill_(1.0)
        optim = optimizer(tied)
        tied.table.weight.grad = torch.full((5, WIDTH), 1e-9 * (stage + 1), dtype=torch.float64)
        optim.param_groups[0]["lr"] = 0.0
        optim.step()
        try:
            fc.save_checkpoint(tmp_path / "tied", tied, optim, process_group=world())
        except RuntimeError as error:
            found.append(str(error))
        return found

    for messages in run_ranks(ranks, 4):
        assert len(messages) == 3
        for message in messages:
            assert "on ranks [0, 1] and another on ranks [2, 3]" in message
        assert "'exp_avg of table.weight' has one value" in messages[2]
