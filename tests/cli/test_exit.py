"""Ranks that have done their work end with code 0: threads of C++ that need Python are let go."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
