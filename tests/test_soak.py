"""Memory, descriptors and objects stay flat over state dicts, builds and steps."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_compose as fc

from harness import run_ranks

pytestmark = pytest.mark.slow

PAGE = os.sysconf("SC_PAGE_SIZE")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def shard(plain: nn.Module) -> nn.Module:
    fc.fully_shard(plain[1])
    return fc.fully_shard(plain)


def objects() -> Counter[str]:
    gc.collect()
    return Counter(type(o).__name__ for o in gc.get_objects())


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def stays_flat(what: str, action: Callable[[], Any], times: int) -> None:
    """Over the second half of ``times`` calls nothing grows; the first half warms caches."""
    for _ in range(times // 2):
        action()
    before, memory, files = objects(), resident(), descriptors()
    for _ in range(times - times // 2):
        action()
    after = objects()
    grown = {k: after[k] - before[k] for k in after if after[k] - before[k] >= times // 10}
    assert not grown, f"{what}: {times - times // 2} calls left {grown}"
    assert descriptors() <= files + 1, f"{what}: descriptors {files} -> {descriptors()}"
    assert resident() <= memory + 4 * 2**20, f"{what}: memory grew by {resident() - memory} bytes"


def test_steps_and_state_dicts_leave_nothing(tmp_path: Path) -> None:
    """400 steps and 400 state dicts of all sorts; two ranks, a tiny model."""

    def body(rank: int) -> None:
        trained = shard(model())
        optim = torch.optim.AdamW(trained.parameters(), lr=0.01)
        x = torch.randn(2, 3)

        def step() -> None:
            trained(x).square().mean().backward()
            optim.step()
            optim.zero_grad()

        def save() -> None:
            fc.save_checkpoint(tmp_path / "saved", trained, optim, checksum=False)

        step()
        stays_flat("steps", step, 400)
        stays_flat("module.state_dict", trained.state_dict, 150)
        stays_flat("state_dict", lambda: fc.state_dict(trained), 90)
        stays_flat("iter_full", lambda: dict(fc.iter_full(trained)), 60)
        stays_flat("optim_state_dict", lambda: fc.optim_state_dict(trained, optim), 60)
        stays_flat("save_checkpoint", save, 40)

    run_ranks(body, 2, timeout=300)


def test_builds_leave_nothing() -> None:
    """500 models sharded, trained and dropped, every other one after ``undo``."""

    def body(rank: int) -> None:
        x, undone = torch.randn(2, 3), iter(range(500))

        def build() -> None:
            built = shard(model())
            built(x).sum().backward()
            torch.optim.SGD(built.parameters(), lr=0.1).step()
            if next(undone) % 2:
                fc.undo(built)

        stays_flat("builds", build, 500)

    run_ranks(body, 1, timeout=120)
