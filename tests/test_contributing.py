"""CONTRIBUTING.md and the pages of docs/ name what exists, and tell what runs."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_compose as fc

from docs_pages import PAGES
from harness import run_ranks
from house import PACKAGE

ROOT = PACKAGE.parent
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
TEXTS = {"CONTRIBUTING": CONTRIBUTING} | {page.name: page.text for page in PAGES}
MAX_FILES = {"How a unit's forward runs": 8, "How a gradient reaches `.grad`": 7}
FOREIGN = {"zero_to_fp32.py"}  # DeepSpeed's
FOLDERS = (ROOT, PACKAGE, ROOT / "tests", ROOT / "examples" / "change_one_thing")
SOURCES = ("fsdp_compose", "tests", "examples", "benchmarks")
QUOTED = re.compile(r"`([^`\n]+)`")
NAME = re.compile(r"_?[A-Za-z]\w*(\.\w+)?")


def section(title: str) -> str:
    """The text below a heading, up to the next heading."""
    return re.split(r"^#+ ", CONTRIBUTING.split(f"# {title}\n", 1)[1], flags=re.MULTILINE)[0]


def steps(title: str) -> list[tuple[str, list[str]]]:
    """(file, names of what it defines) for each numbered item below a heading."""
    items = re.split(r"^\d+\. ", section(title), flags=re.MULTILINE)[1:]
    found = []
    for item in items:
        file, *names = QUOTED.findall(item.split("\n\n")[0])
        found.append((file, [name for name in names if NAME.fullmatch(name)]))
    return found


@cache
def defined_in(file: str) -> set[str]:
    """What a file of the package defines: `function`, `Class`, `Class.method`, `method`, `NAME`."""
    found: set[str] = set()

    def add(body: list[ast.stmt], owner: str = "") -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.update((node.name, owner + node.name))
            if isinstance(node, ast.ClassDef):
                add(node.body, f"{node.name}.")
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update(ast.unparse(target) for target in targets)

    add(ast.parse((PACKAGE / file).read_text("utf-8")).body)
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_the_files_that_are_named_exist(name: str) -> None:
    """Paths are those of the repository, of the package, or of its tests or examples."""
    text = TEXTS[name]
    for path, test in re.findall(r"`([\w./-]+(?:\.py|/))(?:::(\w+))?`", text):
        if f'title="{path}"' in text or path in FOREIGN:
            continue
        places = [folder / path for folder in FOLDERS if (folder / path).exists()]
        assert places, path
        assert not test or f"def {test}(" in places[0].read_text("utf-8"), f"{path}::{test}"


def test_the_package_names_files_that_exist() -> None:
    """In its docstrings, comments and errors, by their path or by their name alone."""
    known = {f"/{p.relative_to(ROOT)}" for f in SOURCES for p in (ROOT / f).rglob("*.py")}
    for path in PACKAGE.rglob("*.py"):
        for name in re.findall(r"[\w/]+\.py\b", path.read_text("utf-8")):
            assert any(file.endswith(f"/{name}") for file in known), f"{path}: {name}"


@pytest.mark.parametrize("title", MAX_FILES)
def test_a_journey_is_short_and_names_what_exists(title: str) -> None:
    """Each file is opened once, so a reader never goes back up."""
    files = [file for file, _ in steps(title)]
    assert 0 < len(files) <= MAX_FILES[title]
    assert len(set(files)) == len(files)
    for file, names in steps(title):
        assert set(names) <= defined_in(file) | {"NORMAL"}, (file, set(names) - defined_in(file))


def test_the_six_changes_name_what_exists() -> None:
    rows = [row for row in section("Change one thing").splitlines() if "change_one_thing/" in row]
    examples = {path.name for path in (ROOT / "examples" / "change_one_thing").glob("*.py")}
    assert len(rows) == 6
    for row in rows:
        _, wanted, example, files = (QUOTED.findall(cell) for cell in row.strip("| ").split(" | "))
        assert len((ROOT / example[0]).read_text("utf-8").splitlines()) <= 60
        examples.remove(Path(example[0]).name)
        defined = set[str]().union(*map(defined_in, files))
        for name in re.findall(r"\w+", " ".join(wanted)):
            assert name in defined or name in fc.__all__ or f"{name}=)" in row, name
    assert not examples


def test_the_map_of_folders_is_that_of_the_package() -> None:
    assert fc.__doc__ is not None
    folders = re.split(r"^The folders;.*$", fc.__doc__, flags=re.MULTILINE)[1].split("\n\n")[1]
    assert f"```\n{folders}\n```" in CONTRIBUTING


def what_runs(fn: Any) -> set[tuple[str, str]]:
    """(file of the package, name of the function) of what ``fn`` calls on this thread."""
    called: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE):
            called.add((file.relative_to(PACKAGE).as_posix(), frame.f_code.co_name))

    sys.setprofile(note)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return called


def test_the_functions_of_the_journeys_run() -> None:
    """What the journeys name is called in the first step of a plain training loop on two ranks."""

    def train(rank: int) -> list[set[tuple[str, str]]]:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        fc.fully_shard(model, units=fc.wrap.by_class({nn.Linear}), init="broadcast")
        losses: list[torch.Tensor] = []
        forward = what_runs(lambda: losses.append(model(torch.randn(4, 8)).sum()))
        return [forward, what_runs(losses[0].backward)]

    for title, called in zip(MAX_FILES, run_ranks(train, 2)[0], strict=True):
        for file, names in steps(title):
            for name in names:
                function = name.split(".")[-1]
                if function.islower() and name not in ON_DEMAND:
                    assert (file, function) in called, f"{title}: {file} {name}"


ON_DEMAND = {"_reduce_now"}  # what is told beside the journey
