"""Every public function and class has an example in its docstring, which runs as it is written.

The examples run in a world of one process, in an empty folder, with the public names, ``torch``,
``nn`` and ``os`` at hand.
"""

from __future__ import annotations

import doctest
import os
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_compose as fc

CALLED = [name for name in fc.__all__ if name != "wrap"] + [f"wrap.{n}" for n in fc.wrap.__all__]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

# What has no example yet. Names leave this list; none is added.
WITHOUT_EXAMPLE = {
    "Transport",
    "GatherCodec",
    "ShardedParameter",
    "ShardedTensor",
    "ShardedDTensor",
    "ShardedWeightError",
    "set_debug",
}


def find(name: str) -> Any:
    value: Any = fc
    for part in name.split("."):
        value = getattr(value, part)
    return value


NAMES = [name for name in CALLED if isinstance(find(name), type | FunctionType)]  # no alias


def examples_of(name: str) -> list[doctest.DocTest]:
    public = {public: getattr(fc, public) for public in fc.__all__}
    names = public | {"torch": torch, "nn": nn, "os": os}
    finder = doctest.DocTestFinder(recurse=False)
    return [test for test in finder.find(find(name), name, globs=names) if test.examples]


@pytest.mark.parametrize("name", NAMES)
def test_its_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    found = examples_of(name)
    if name in WITHOUT_EXAMPLE:
        assert not found, f"{name} has an example: take it off the list"
        return
    assert found, f"{name} has no example in its docstring"
    said: list[str] = []
    for test in found:
        doctest.DocTestRunner(verbose=False, optionflags=OPTIONS).run(test, out=said.append)
    assert not said, "".join(said)
