"""Ranks that were launched together and have no process group are told, not trained apart (D19)."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_compose as fc
from fsdp_compose.cli.launch import PORTS, free_port

from harness import RankFailure, run_ranks, single_process
from models import Tower, by_block, data, seeded, square, units
from scripts import run_script

LINE = r"torch\.distributed\.init_process_group\(\)"


def test_launched_without_a_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every entry that would make, plan or write a world of one per rank names the missing line."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with single_process():
        model = seeded(lambda: Tower(1))
        before = [type(p) for p in model.parameters()]
        for attempt in (
            lambda: fc.fully_shard(model),
            lambda: by_block(model, strategy=fc.ShardingStrategy.NO_SHARD),
            lambda: fc.fully_shard(model.blocks[0]),
            lambda: fc.fully_shard(nn.ReLU()),
            lambda: fc.plan(model),
            lambda: fc.save_checkpoint(tmp_path / "a", model),
            lambda: fc.save_full(tmp_path / "b", model),
        ):
            with pytest.raises(RuntimeError, match=rf"rank 1 of 2.*WORLD_SIZE=2.*{LINE}"):
                attempt()
        assert [type(p) for p in model.parameters()] == before
        assert not list(tmp_path.iterdir())
        assert fc.plan(model, world_size=8).ranks == 8
        alone = by_block(seeded(lambda: Tower(1)), mesh="self")
        for module in (alone, model):
            square(module, data(0, 0)).backward()
        for ours, theirs in zip(alone.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        fc.save_full(tmp_path / "c", alone)
        for value in ("1", "", "many"):
            monkeypatch.setenv("WORLD_SIZE", value)
            by_block(seeded(lambda: Tower(1)))


def test_a_group_that_came_too_late() -> None:
    """A model sharded before it, as a world of one, says so in forward; ``"self"`` goes on."""

    def ranks(rank: int, port: int) -> None:
        model, alone = by_block(seeded(lambda: Tower(1))), by_block(Tower(1), mesh="self")
        square(model, data(0, rank)).backward()
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
        for late in (model, model.blocks[0], copy.deepcopy(model)):
            with pytest.raises(RuntimeError, match=r"group of 2 ranks.*before fully_shard"):
                late(data(0, rank))
        square(alone, data(0, rank).float()).backward()
        whole = by_block(seeded(lambda: Tower(1)), mesh="self")
        together = by_block(seeded(lambda: Tower(1)))
        square(whole, data(0, rank)).backward()
        square(together, data(0, rank)).backward()
        sizes = [[u.buckets[0].mesh.size for u in units(m)] for m in (whole, together)]
        assert sizes == [[1, 1], [2, 2]]
        dist.destroy_process_group()

    run_ranks(ranks, 2, free_port(), init=False)


def test_a_launched_script_raises_the_error(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, fsdp_compose as fc\n"
        "fc.fully_shard(torch.nn.Linear(2, 2))\nprint('trained')\n",
        "utf-8",
    )
    with pytest.raises(RankFailure, match=rf"(?s)2 of 2 ranks failed.*{LINE}"):
        run_script(script)


def test_the_port_is_none_of_outgoing_connections() -> None:
    """Another process could be given such a port before rank 0 listens on it."""
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 10 and all(port in PORTS for port in ports)
    assert PORTS[-1] < 32768  # where Linux and macOS begin
