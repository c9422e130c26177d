"""The recipes of docs/recipes.md, on two ranks, where their libraries are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist

from docs_pages import ROOT, Block, Page
from harness import run_ranks

PAGE = Page(ROOT / "docs" / "recipes.md")
BLOCKS = PAGE.of("python")
RUN = [block for block in BLOCKS if all(find_spec(name) for name in block.libraries)]
KNOWN = {
    "accelerate", "bitsandbytes", "diffusers", "ema_pytorch", "lightning", "peft", "ray",
    "torchao", "transformers",
}  # fmt: skip


def run_alone(block: Block, folder: Path) -> None:
    """A script that starts its ranks itself."""
    script = folder / block.title
    script.write_text(block.text)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run([sys.executable, script], check=True, cwd=folder, env=env, timeout=250)


def run(block: Block) -> None:
    assert dist.is_initialized()
    exec(compile("\n" * block.line + block.text, str(PAGE.path), "exec"), {"__name__": "__main__"})


@pytest.mark.models
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", RUN, ids=[f"line {block.line}" for block in RUN])
def test_a_recipe_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in {"accelerate", "peft", "transformers"} & set(block.libraries):
        import_module(name)  # once, here: a rank that did it would take seconds
    if block.is_script:
        run_alone(block, tmp_path)
    else:
        run_ranks(lambda rank: run(block), 2, timeout=120)


def test_every_recipe_says_what_it_needs() -> None:
    """A recipe that imports a library names it, so that it is run where that is installed."""
    assert {name for block in BLOCKS for name in block.libraries} == KNOWN
    for block in BLOCKS:
        for name in KNOWN:
            is_used = f"import {name}" in block.text or f"from {name}" in block.text
            assert not is_used or name in block.libraries, (block.line, name)
