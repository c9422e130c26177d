"""Importing the package and its command line is cheap, and what it imports later keeps no model."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import fsdp_compose

ROOT = Path(__file__).parents[2]
HEAVY = "torch._dynamo sympy torch.distributed.checkpoint torch.distributed.tensor optree numpy"

LIGHT = f"""
import sys, fsdp_compose as fc
assert "torch" not in sys.modules and len(sys.modules) < 150, sorted(sys.modules)
assert "fully_shard" in dir(fc) and "undo" in fc.__all__
import torch
before = len(sys.modules)
import fsdp_compose, fsdp_compose.cli.launch
assert len(sys.modules) - before < 60, len(sys.modules) - before
found = [name for name in {HEAVY.split()!r} if name in sys.modules and name != "numpy"]
assert not found, found
fc.fully_shard
assert "torch._dynamo" not in sys.modules, "half a second that only sharding needs"
"""

COMMANDS = """
import sys
from fsdp_compose.__main__ import main
for arguments in (["--help"], ["checkpoint", "--help"], ["checkpoint", "convert", "--help"],
                  ["run", "--help"], ["--version"]):
    try:
        main(arguments)
    except SystemExit as end:
        assert end.code == 0
assert main(["run", "no_such_file.py"]) == 2
assert "torch" not in sys.modules
assert main(["checkpoint", "show", "no_such_folder"]) == 2
"""

FILES_FIRST = """
import sys, torch
from fsdp_compose.attach.fully_shard import fully_shard
from fsdp_compose.scopes.apply import apply
import fsdp_compose.attach.refresh, fsdp_compose.scopes.unshard, fsdp_compose.wrap
from fsdp_compose.wrap import by_class
assert by_class is fsdp_compose.construct.wrap.by_class
model = fully_shard(torch.nn.Linear(2, 2))
import fsdp_compose as fc
assert isinstance(model.state_dict()["weight"].full_tensor(), torch.Tensor)
for name in fc.__all__:
    value = getattr(fc, name)
    assert callable(value) or name == "wrap", name
assert fc.fully_shard is fully_shard and fc.apply is apply and fc.refresh(model) is model
assert fc.wrap.by_class is fsdp_compose.wrap.by_class
try:
    fc.fully_shart
except AttributeError as error:
    assert "no attribute 'fully_shart'" in str(error)
from fsdp_compose import *
assert undo is fc.undo
"""

THREADS = """
import fsdp_compose as fc
from concurrent.futures import ThreadPoolExecutor
names = ["undo", "fully_shard", "Saving", "wrap", "plan", "GradScaler"] * 4
with ThreadPoolExecutor(8) as pool:
    values = list(pool.map(lambda name: getattr(fc, name), names))
assert values == [getattr(fc, name) for name in names]
"""

# Torch's first import of the compiler may keep the frames of its callers; here it certainly does.
FREED = """
import gc, sys, weakref, importlib.abc
import torch, fsdp_compose as fc

class Keeper(importlib.abc.MetaPathFinder):
    frames = []
    def find_spec(self, name, path, target=None):
        if name == "torch._dynamo":
            frame = sys._getframe()
            while frame is not None:
                self.frames.append(frame)
                frame = frame.f_back

sys.meta_path.insert(0, Keeper())

def train():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    fc.fully_shard(model, units=fc.wrap.by_class(torch.nn.Linear))
    model(torch.ones(1, 2)).sum().backward()
    return weakref.ref(model), weakref.ref(model[0].weight)

model, weight = train()
assert Keeper.frames, "fully_shard did not import the compiler"
gc.collect()
assert model() is None and weight() is None
"""


FORKS = """
import os, sys, traceback, warnings

def fork(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # as in harness.py
        child = os.fork()
    if child == 0:
        code = 1
        try:
            exec(bodies[name], {})
            code = 0
        except BaseException:
            print(name, traceback.format_exc(), file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    failed[name] = os.waitpid(child, 0)[1]

bodies, failed = eval(sys.stdin.read()), {}
fork("COMMANDS")
fork("LIGHT")
import torch
for name in "FILES_FIRST", "THREADS", "FREED":
    fork(name)
assert not any(failed.values()), failed
"""


def test_in_a_new_process() -> None:
    """In forks of a new interpreter, since this one has imported everything."""
    bodies = {name: globals()[name] for name in "LIGHT COMMANDS FILES_FIRST THREADS FREED".split()}
    command = [sys.executable, "-W", "error", "-W", "ignore::FutureWarning", "-c", FORKS]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=200, cwd=ROOT,
        input=repr(bodies),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_package_is_pickled_by_name() -> None:
    """cloudpickle sends a function with the modules it uses; so Ray and Dask send ours."""
    assert pickle.loads(pickle.dumps(fsdp_compose)) is fsdp_compose
    assert copy.deepcopy({"package": fsdp_compose})["package"] is fsdp_compose
