"""Torch's own writers and readers keep what they are given, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
)

import fsdp_compose as fc
from fsdp_compose import ShardingStrategy

from harness import run_ranks
from models import Tower, by_block, seeded

pytest.importorskip("safetensors")


def writer(path: Path) -> Any:
    return dcp.HuggingFaceStorageWriter(path=str(path), save_distributed=True)


def reader(path: Path) -> Any:
    return dcp.HuggingFaceStorageReader(path=str(path))


def test_a_thread_that_saves_asks_for_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be the first one of the host, on which each rank would take memory."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a device is asked")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(filesystem, "_OverlappingCpuLoader", refuse)
    model = by_block(seeded(Tower))
    fc.save_checkpoint(tmp_path, model, asynchronous=True).wait()
    with pytest.raises(RuntimeError, match="a device is asked"):
        fc.save_checkpoint(tmp_path, model)  # from the device that it is on


def test_a_slice_of_several_boxes_is_refused(tmp_path: Path) -> None:
    """A file has room for one box of each tensor; the others would be lost without a word."""

    def body(rank: int) -> None:
        model = by_block(seeded(Tower))
        with pytest.raises(
            CheckpointException, match=r"(?s)is sharded.*boxes, of which.*save_full"
        ):
            dcp.save(model.state_dict(), storage_writer=writer(tmp_path / "slices"))
        fc.save_full(tmp_path / "whole", model)
        other = by_block(seeded(Tower, seed=1))
        dcp.load(other.state_dict(), storage_reader=reader(tmp_path / "whole"))
        for mine, theirs in zip(other.parameters(), seeded(Tower).parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), theirs)

    run_ranks(body, 2)


@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_slices_of_one_box_are_saved(granularity: Any, tmp_path: Path) -> None:
    """Slices that are whole rows, or whole tensors, go through torch's writer and reader."""

    def body(rank: int) -> None:
        options = {"granularity": granularity, "strategy": ShardingStrategy.FULL_SHARD}
        model, other = (by_block(seeded(Tower, seed=s), **options) for s in (0, 1))
        dcp.save(model.state_dict(), storage_writer=writer(tmp_path))
        dcp.load(other.state_dict(), storage_reader=reader(tmp_path))
        for mine, theirs in zip(other.parameters(), seeded(Tower).parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), theirs)

    run_ranks(body, 2)


def test_a_reader_that_broadcasts_is_refused(tmp_path: Path) -> None:
    """Ranks hold different numbers of boxes, so its broadcasts did not match: processes ended."""

    def body(rank: int) -> None:
        if rank == 0:
            torch.save(seeded(Tower).state_dict(), tmp_path / "file")
        model = by_block(seeded(Tower, seed=1))
        options: Any = {
            "storage_reader": BroadcastingTorchSaveReader(),
            "planner": DynamicMetaLoadPlanner(),
            "checkpoint_id": tmp_path / "file",
        }
        with pytest.raises(CheckpointException, match=r"(?s)is sharded.*broadcast_from_rank0=True"):
            dcp.load(model.state_dict(), **options)
        given = torch.load(tmp_path / "file") if rank == 0 else {}
        fc.load_state_dict(model, given, broadcast_from_rank0=True)
        for mine, theirs in zip(model.parameters(), seeded(Tower).parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), theirs)

    run_ranks(body, 2)
