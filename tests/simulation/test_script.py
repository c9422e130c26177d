"""``fsdp-compose run --simulate``: a script as a launcher starts it, in one process, with pdb."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
import fsdp_compose as fc

if __name__ == "__main__":
    dist.init_process_group()
    model = fc.fully_shard(torch.nn.Linear(4, 4))
    if dist.get_rank() == 1:
        breakpoint()
    model(torch.ones(1, 4)).sum().backward()
    print("rank", os.environ["RANK"], "of", dist.get_world_size(), sys.argv[1:], flush=True)
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("mine")
    dist.barrier()
"""


def test_a_script_runs_in_one_process(tmp_path: Path) -> None:
    """Each rank prints, pdb stops in one of them, and an error has its rank and exit code 1."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = ["run", "--simulate", "3", "--seed", "1", str(script), "--steps", "5"]
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_compose", *command],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        input="next\np 'the gradient has', model.weight.grad.shape\ncontinue\n",
    )
    assert done.returncode == 1, done.stderr
    assert "('the gradient has', torch.Size([4, 4]))" in done.stdout
    for rank in range(3):
        assert f"rank {rank} of 3 ['--steps', '5']" in done.stdout
    assert "rank 1 of 3 raised ValueError: mine" in done.stderr
    assert 'raise ValueError("mine")' in done.stderr  # with its traceback
    assert f"    rank 0: {script}:1" in done.stderr
