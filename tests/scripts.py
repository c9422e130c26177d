"""Runs scripts and commands in forks of this process, which need not import torch again."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

from fsdp_compose.cli.launch import free_port

from harness import run_ranks


def run_script(path: Path, *args: object, ranks: int = 2, timeout: float = 200.0) -> str:
    """What the ranks print, in rank order; the script finds what torchrun would give it."""
    port = free_port()

    def body(rank: int) -> str:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank))
        os.environ.update(LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        sys.argv = [str(path), *map(str, args)]
        sys.path.insert(0, str(path.parent))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                runpy.run_path(str(path), run_name="__main__")
            except SystemExit as ended:
                if ended.code:
                    raise RuntimeError(f"{path.name} exited with {ended.code}") from ended
        return printed.getvalue()

    return "".join(run_ranks(body, ranks, init=False, timeout=timeout))


def run_alone(call: Callable[[], object], folder: Path) -> tuple[object, str, str]:
    """Exit code, output and errors of ``call`` in ``folder``, as of a process nobody launched."""

    def body(rank: int) -> tuple[object, str, str]:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        os.chdir(folder)
        sys.path.insert(0, "")  # as ``python -m`` does
        printed, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            try:
                code = call()
            except SystemExit as ended:
                code = ended.code
        return code or 0, printed.getvalue(), errors.getvalue()

    return run_ranks(body, 1, init=False, timeout=200.0)[0]
