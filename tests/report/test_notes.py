"""What happens is named: in the log, at INFO and DEBUG, and as ranges in a profile."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fsdp_compose import fully_shard

from harness import run_ranks
from models import Tower


def step(rank: int) -> None:
    model = Tower(1)
    fully_shard(model.blocks[0])
    fully_shard(model)
    model(torch.ones(2, 6)).sum().backward()


def test_the_log_has_unit_phase_and_bytes() -> None:
    def check(rank: int) -> list[str]:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        log = logging.getLogger("fsdp_compose")
        log.addHandler(handler)
        log.setLevel(logging.DEBUG)
        torch.manual_seed(0)
        step(rank)
        return lines

    lines = run_ranks(check, 2)[0]
    summaries = [line for line in lines if "sharded" in line]
    assert summaries == [
        "rank 0 sharded Block: units 1, parameter elements 103, ranks 2, bytes on this rank 208",
        "rank 0 sharded Tower: units 1, parameter elements 56, ranks 2, bytes on this rank 112",
    ]
    gathers = [line for line in lines if "blocks.0" in line]
    assert [line.split()[2] for line in gathers] == [
        "gather", "release", "gather", "release", "reduce",
    ]  # fmt: skip
    assert all(line.startswith("rank 0: ") and "bytes" in line for line in gathers)


@pytest.mark.filterwarnings("ignore")
def test_a_profile_has_ranges_named_by_unit() -> None:
    def check(rank: int) -> list[str]:
        torch.manual_seed(0)
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            step(rank)
        return [event.key for event in recorded.key_averages()]

    names = run_ranks(check, 2)[0]
    assert "fsdp_compose.gather blocks.0" in names
    assert "fsdp_compose.reduce blocks.0" in names
