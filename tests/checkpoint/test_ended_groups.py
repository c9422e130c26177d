"""Saving and loading after the process group has ended, and under another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_compose as fc

from harness import run_ranks
from saved import equal

Call = Callable[[Path, nn.Module], Any]

CALLS: dict[str, Call] = {
    "save_checkpoint": lambda at, model: fc.save_checkpoint(at / "parts", model),
    "save_full": lambda at, model: fc.save_full(at / "whole", model),
    "load_checkpoint": lambda at, model: fc.load_checkpoint(at / "parts", model),
    "load_full": lambda at, model: fc.load_full(at / "whole", model),
}


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def refuse(folder: Path, model: nn.Module) -> None:
    for name, call in CALLS.items():
        with pytest.raises(RuntimeError, match=rf"{name}: the process group over ranks \[0, 1\]"):
            call(folder, model)


def test_an_ended_group_neither_saves_nor_loads(tmp_path: Path) -> None:
    """Each rank would save its own slices as the whole; the good checkpoint stays."""

    def run(rank: int) -> None:
        model = fc.fully_shard(net(0))
        for call in CALLS.values():
            call(tmp_path, model)
        changed = fc.fully_shard(net(1))
        dist.barrier()
        dist.destroy_process_group()
        refuse(tmp_path, changed)
        for load in ("load_checkpoint", "load_full"):
            alone = fc.fully_shard(net(2), mesh="self")
            CALLS[load](tmp_path, alone)
            equal(fc.state_dict(alone), fc.state_dict(net(0)))

    run_ranks(run, 2)


def test_a_second_group_saves_models_of_its_own(tmp_path: Path) -> None:
    """A model of the first group, and the group itself, are refused by name."""

    def run(rank: int) -> None:
        old, group = fc.fully_shard(net(0)), dist.group.WORLD
        fc.save_checkpoint(tmp_path / "parts", old)
        dist.barrier()
        dist.destroy_process_group()
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        refuse(tmp_path, old)
        with pytest.raises(RuntimeError, match=r"save_full: the process group passed"):
            fc.save_full(tmp_path / "whole", net(1), process_group=group)
        new = fc.fully_shard(net(1))
        for call in CALLS.values():
            call(tmp_path, new)
        equal(fc.state_dict(new), fc.state_dict(net(1)))

    run_ranks(run, 2)
