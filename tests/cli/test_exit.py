"""Ranks that have done their work end with code 0: threads of C++ that need Python are let go."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_compose import fully_shard
from fsdp_compose.base import mesh
from fsdp_compose.base.process import here
from fsdp_compose.comm import waiting

from harness import run_ranks, simulate_ranks

ROOT = Path(__file__).resolve().parents[2]

START = """
import time
import torch
import torch.distributed as dist
from fsdp_compose import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = fully_shard(torch.nn.Linear(4, 4))
"""

MESSAGES = """
import sys

class Late:
    def __del__(self):
        time.sleep(0.2)  # while Python shuts down, as where a group ends then

late = Late()
sys.setswitchinterval(10)
sent = torch.zeros(1)
dist.broadcast(sent, 0, async_op=True)
ends = time.monotonic() + 0.5
while time.monotonic() < ends:
    pass
"""
"""A thread of gloo lets go of what was sent only when the interpreter is next free: at the end."""

WATCHED = """
from fsdp_compose.comm import waiting
from fsdp_compose.base.torch_private import default_store

def look(now):
    ends = time.monotonic() + 0.5
    while time.monotonic() < ends:
        default_store().set("key", "value")

with waiting.waiting("test", [0]):
    waiting.the_watch().look = look
    time.sleep(waiting._POLL + 0.2)
"""
"""The thread that looks at waits is inside the store when the rank ends."""


@pytest.mark.parametrize("work", [MESSAGES, WATCHED], ids=["messages", "watched"])
def test_ranks_that_are_done_end_well(work: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(START + work)
    command = [sys.executable, "-m", "fsdp_compose", "run", "--nproc", "2", script]
    done = subprocess.run(
        command, check=False, cwd=ROOT, text=True, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_a_rank_gives_gloo_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, when it ends; simulated ranks have no threads of gloo's."""
    calls: list[Any] = []
    monkeypatch.setattr(mesh, "atexit", SimpleNamespace(register=lambda *call: calls.append(call)))

    def ranks(rank: int) -> list[Any]:
        here.installed.discard(mesh._let_gloo_end)  # as in a process that forked from none
        for _ in range(2):
            fully_shard(torch.nn.Linear(4, 4))
        assert all(function is time.sleep for function, _ in calls)
        return [seconds for _, seconds in calls]

    assert run_ranks(ranks) == [[mesh._GLOO_ENDS]] * 2 and mesh._GLOO_ENDS > 0
    assert simulate_ranks(ranks) == [[], []]


def test_the_thread_that_watches_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Python shuts down, also where it is inside the store then."""
    calls: list[Any] = []
    fake = SimpleNamespace(register=lambda function: calls.append(function))
    monkeypatch.setattr(waiting, "atexit", fake)
    monkeypatch.setattr(waiting, "_POLL", 0.01)
    monkeypatch.setattr(waiting._Watch, "look", lambda watch, now: time.sleep(0.2))

    def ranks(rank: int) -> None:
        here.installed.discard(waiting._stop_at_exit)
        with waiting.waiting("test", [0]):
            time.sleep(0.05)
        thread = waiting.the_watch().thread
        assert thread is not None and thread.is_alive()
        (at_exit,) = calls
        at_exit()
        assert not thread.is_alive()

    run_ranks(ranks, 1)
