"""Each hole that was closed is found again by the fuzzer when it is put back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz_holes import HOLES, ROOT, all_holes, read_hole

FEW = (
    "use_of_others_unheard",
    "gathered_again_is_unwatched",
    "writes_in_forward_lost",
    "own_gradient_in_a_scope",
)
"""Those of the ordinary suite; ``python tests/fuzz_holes.py`` looks for all of them."""


def test_every_hole_applies() -> None:
    """A patch says what was wrong, and fits the sources as they are."""
    paths = all_holes()
    assert len(paths) >= 30
    for path in paths:
        hole = read_hole(path)
        assert hole.wrong.endswith(".") and (hole.seeds or hole.program) and hole.files
        for changed, source in hole.files.items():
            compile(source, changed, "exec")
            assert source != (ROOT / changed).read_text()


def test_a_patch_that_fits_nothing_is_told(tmp_path: Path) -> None:
    path = tmp_path / "old.patch"
    text = (HOLES / f"{FEW[0]}.patch").read_text()
    path.write_text(text.replace("\n- ", "\n- not there: "))
    with pytest.raises(ValueError, match=r"old\.patch: a hunk of .* is found 0 times"):
        read_hole(path)


def test_holes_that_have_no_patch_name_their_tests() -> None:
    """The list of tests/holes/README.md names files that exist."""
    named = [
        word.strip("`")
        for line in (HOLES / "README.md").read_text().splitlines()
        if line.startswith("| ")
        for word in line.split()
        if word.startswith("`tests/")
    ]
    assert len(named) > 10
    for name in named:
        path, _, test = name.partition("::")
        assert (ROOT / path).is_file(), name
        assert not test or f"def {test}(" in (ROOT / path).read_text(), name


@pytest.mark.slow
def test_the_fuzzer_finds_holes_again() -> None:
    """With the hole, the fuzzer says what is wrong, by the seeds that the patch names."""
    command = [sys.executable, str(ROOT / "tests" / "fuzz_holes.py"), "--json", *FEW]
    run = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.returncode == 0, run.stdout + run.stderr
    assert [line["hole"] for line in lines] == list(FEW)
    assert all(line["finding"] for line in lines)
