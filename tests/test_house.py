"""The house rules hold, and their checkers find what breaks them in packages made up for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import house
from house import (
    PACKAGE,
    check_collectives,
    check_devices,
    check_fields,
    check_filled_elsewhere,
    check_form,
    check_layers,
    check_private_names,
    check_private_torch,
    check_process_state,
    check_public_names,
    check_sizes,
    check_stale,
    check_tests,
)

CHECKS = [
    check_layers,
    check_private_torch,
    check_collectives,
    check_devices,
    check_form,
    check_process_state,
    check_filled_elsewhere,
    check_private_names,
    check_public_names,
    check_sizes,
    check_fields,
    check_stale,
    check_tests,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_house(check: Callable[[Path], list[str]]) -> None:
    wrong = check(PACKAGE)
    assert not wrong, "\n" + "\n".join(wrong)


# The checkers themselves, on packages made up for the purpose.

CLEAN = {
    "layout/__init__.py": "",
    "layout/shards.py": "import torch\ntorch._foreach_add_([], 1)\nx = torch.__version__",
    "base/__init__.py": "",
    "base/torch_private.py": "import torch\nfrom torch._utils import f\ntorch._C.g()",
    "comm/__init__.py": "",
    "comm/collectives.py": "import torch.distributed as dist\nfrom ..layout import shards\n"
    "dist.all_reduce(shards.x)",
    "core/__init__.py": "",
    "core/guards/__init__.py": "",
    "core/guards/used_parameters.py": "from fsdp_compose.comm import collectives",
    "core/passes.py": "from fsdp_compose.comm.collectives import f\n"
    "from fsdp_compose.core.guards import used_parameters\n"
    "def g(p, q):\n    comm.all_gather(p); comm.reduce_scatter(q); return p._parameters",
    "checkpoint/__init__.py": "from .model import f",
    "checkpoint/dcp.py": "from torch import distributed\ndistributed.all_gather_object([], 1)",
    "checkpoint/model.py": "from . import dcp\nfrom ..core.passes import g\nfrom .dcp import h",
    "__init__.py": "from __future__ import annotations\nfrom .core.passes import g as gather\n"
    "__all__ = ['gather']\n_x = 1",
}
LISTS = {"core": ["guards/used_parameters", "passes"], "checkpoint": ["dcp", "model"]}


def build(tmp_path: Path, files: dict[str, str], docstring: bool = True) -> Path:
    """Write a package; the docstring of a folder lists the files that it has, or ``LISTS``."""
    package = tmp_path / "fsdp_compose"
    for name, body in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = name.split("/")[0]
        inside = [n.split("/", 1)[1][:-3] for n in files if n.startswith(f"{folder}/")]
        names = LISTS.get(folder) or [n for n in inside if n != "__init__"]
        rows = "".join(f"\n    {n}  what it is for" for n in names)
        promise = f'"""A promise.\n{rows}\n"""\n' if name.endswith("__init__.py") else '"""Is."""\n'
        path.write_text((promise if docstring else "") + body + "\n", "utf-8")
    return package


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_checkers_accept_a_clean_package(
    check: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    assert check(build(tmp_path, CLEAN)) == []


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("layout/shards.py", "from ..core.passes import unshard"),
        ("layout/shards.py", "from ..core import passes"),
        ("layout/shards.py", "import fsdp_compose.core.passes"),
        ("layout/shards.py", "from fsdp_compose.core import passes as e"),
        ("layout/shards.py", "def f():\n    from fsdp_compose.core.passes import unshard"),
        (
            "layout/shards.py",
            "from typing import TYPE_CHECKING as T\nif T:\n    from ..comm import collectives",
        ),
        (
            "layout/shards.py",
            "from importlib import import_module\nimport_module('fsdp_compose.comm.collectives')",
        ),
        ("layout/shards.py", "import importlib\nimportlib.import_module('..comm', __package__)"),
        ("core/passes.py", "from fsdp_compose import gather"),
        ("core/passes.py", "from ..checkpoint.dcp import h"),
        ("core/passes.py", "from . import passes"),
        ("core/passes.py", "from ..core import unshard"),
        ("core/guards/used_parameters.py", "from ..passes import g"),
        ("checkpoint/dcp.py", "from .model import f"),
        ("core/passes.py", "from .unheard_of import f"),
        ("core/unheard_of.py", "x = 1"),
        ("unheard_of.py", "x = 1"),
        ("unheard_of/__init__.py", "x = 1"),
    ],
)
def test_an_upward_arrow_or_an_unlisted_file_is_found(name: str, body: str, tmp_path: Path) -> None:
    wrong = check_layers(build(tmp_path, CLEAN | {name: body}))
    assert wrong and all(f"fsdp_compose/{name}" in line for line in wrong)


def test_a_listed_file_that_is_missing_is_found(tmp_path: Path) -> None:
    files = {name: body for name, body in CLEAN.items() if name != "core/passes.py"}
    assert any("does not exist" in line for line in check_layers(build(tmp_path, files)))


@pytest.mark.parametrize(
    "body",
    [
        "import torch\ntorch._C.f()",
        "import torch\ndef f(x):\n    return torch._foo(x)",
        "import torch._dynamo",
        "import torch.distributed as dist\ndist._verify(1)",
        "import torch\ntorch.distributed._coalescing_manager()",
        "from torch import distributed as d\nd._coalescing_manager()",
        "from torch.distributed._tensor import DTensor",
        "from torch.distributed import _functional_collectives",
        "from torch import Tensor\nTensor._make_subclass",
        "import torch.nn as nn\ngetattr(nn.Module, '_call_impl')",
    ],
)
def test_a_private_torch_name_is_found(body: str, tmp_path: Path) -> None:
    assert check_private_torch(build(tmp_path / "a", {"core/passes.py": body}))
    assert not check_private_torch(build(tmp_path / "b", {"base/torch_private.py": body}))


@pytest.mark.parametrize(
    "body",
    [
        "import torch.distributed as dist\ndist.all_reduce(1)",
        "import torch\ntorch.distributed.all_gather_into_tensor(1, 2)",
        "import torch\ntorch.distributed.reduce_scatter_single(1, 2)",
        "from torch.distributed import broadcast as b\nb(1, 0)",
        "import torch.distributed as dist\nf = dist.isend",
        "import torch.distributed.nn.functional as F\nF.all_to_all_single(1)",
        "import torch.distributed as dist\ndist.barrier()",
        "def f(group, x):\n    group.allreduce(x)",
        "def f(group, x):\n    group._allgather_base(x, x)",
    ],
)
def test_a_collective_elsewhere_is_found(body: str, tmp_path: Path) -> None:
    assert check_collectives(build(tmp_path / "a", {"core/passes.py": body}))
    for allowed in ("comm/collectives.py", "checkpoint/dcp.py"):
        assert not check_collectives(build(tmp_path / "b", {allowed: body}))


def test_a_tensor_without_a_device_is_found(tmp_path: Path) -> None:
    cases = (
        ("import torch\ntorch.empty(2, dtype=torch.int64)", 1),
        ("import torch\ntorch.tensor([1])", 1),
        ("import torch\ntorch.empty(2, device='cpu')\ntorch.empty_like(x)\nx.new_zeros(1)", 0),
        ("import torch\ntorch.zeros(2, **like)", 0),
    )
    for index, (body, count) in enumerate(cases):
        package = build(tmp_path / str(index), {"core/passes.py": body})
        assert len(check_devices(package)) == count


def test_form_is_checked(tmp_path: Path) -> None:
    (wrong,) = check_form(build(tmp_path / "a", {"layout/shards.py": "x = 1"}, docstring=False))
    assert "docstring" in wrong
    (wrong,) = check_form(build(tmp_path / "b", {"layout/shards.py": "hasattr(1, 'x')"}))
    assert "hasattr" in wrong


@pytest.mark.parametrize(
    "body",
    [
        "x = {}",
        "x: list[int] = []",
        "x = set()",
        "x = collections.deque()",
        "class A:\n    pass\nx = A()",
        "x = 1\ndef f():\n    global x\n    x = 2",
    ],
)
def test_state_of_a_module_is_found(body: str, tmp_path: Path) -> None:
    assert check_process_state(build(tmp_path / "a", {"core/passes.py": body}))
    assert not check_process_state(build(tmp_path / "b", {"base/process.py": body}))


def test_what_is_keyed_by_its_owner_may_stand(tmp_path: Path) -> None:
    keyed = "import weakref\nx = weakref.WeakKeyDictionary()\ny = {1: 2}\nz = frozenset()"
    assert not check_process_state(build(tmp_path, {"core/passes.py": keyed}))


@pytest.mark.parametrize(
    "body",
    [
        "from fsdp_compose.comm.collectives import x\nx.append(1)",
        "from fsdp_compose.comm.collectives import x\nx[1], y = 2, 3",
        "from fsdp_compose.comm.collectives import x\nx[:] = [f]",
        "from fsdp_compose.comm import collectives\ncollectives.x = 1",
        "from ..comm import collectives as c\nc.tables['a'].update({})",
        "from ..comm.collectives import x\ndef f(key):\n    del x[key]",
        "from ..comm.collectives import A\nsetattr(A, 'f', 1)",
        "from ..comm.collectives import A, B\nfor C in (A, B):\n    D: Any = C\n    D.f = 1",
        "from ..comm.collectives import x\nfor f in 1, 2:\n    x.setdefault(f, f)",
    ],
)
def test_what_is_filled_from_another_file_is_found(body: str, tmp_path: Path) -> None:
    assert check_filled_elsewhere(build(tmp_path, CLEAN | {"core/passes.py": body}))


@pytest.mark.parametrize(
    "body", ["from ..comm.collectives import _f", "from .records import _x as x"]
)
def test_another_files_private_name_is_found(body: str, tmp_path: Path) -> None:
    assert check_private_names(build(tmp_path, CLEAN | {"core/passes.py": body}))


def test_own_tables_and_objects_may_be_written(tmp_path: Path) -> None:
    body = (
        "from fsdp_compose.base.process import here\nfrom ..comm.collectives import make\n"
        "x = {1: 2}\nx[1] = 2\nhere.traffic.gathers += 1\ny = make(); y.z = 1"
    )
    assert not check_filled_elsewhere(build(tmp_path, CLEAN | {"core/passes.py": body}))


def function(lines: int) -> str:
    """A function whose body has that many lines, under a docstring."""
    return 'def f():\n    """Does.\n\n    A lot.\n    """\n' + "    g()\n" * lines


def indented(body: str) -> str:
    return body.replace("\n", "\n    ")


@pytest.mark.parametrize(
    ("name", "fits", "breaks", "text"),
    [
        (
            "report/plan.py",
            "x = 1\n" * 498,
            "x = 1\n" * 499,
            "report/plan has 501 lines",
        ),
        ("report/plan.py", function(50), function(51), "report/plan:f has 51 lines of body"),
        (
            "core/passes.py",
            indented("class A:\n" + function(50)),
            indented("class A:\n" + function(51)),
            "core/passes:f has 51 lines of body",
        ),
    ],
)
def test_what_is_too_long_is_found(
    name: str, fits: str, breaks: str, text: str, tmp_path: Path
) -> None:
    assert not check_sizes(build(tmp_path / "a", {name: fits}))
    (wrong,) = check_sizes(build(tmp_path / "b", {name: breaks}))
    assert text in wrong


def test_the_size_of_the_engine_is_checked(tmp_path: Path) -> None:
    """Its guards do not count."""
    files = {f"core/file{i}.py": "x = 1" for i in range(house.ENGINE_FILES)}
    guards = {"core/guards/one.py": "x = 1", "report/plan.py": "x = 1"}
    assert not check_sizes(build(tmp_path / "a", files | guards))
    (wrong,) = check_sizes(build(tmp_path / "b", files | {"core/one_more.py": "x = 1"}))
    assert f"{house.ENGINE_FILES + 1} files" in wrong
    long = {f"core/file{i}.py": "x = 1\n" * 490 for i in range(house.ENGINE_LINES // 490 + 1)}
    (wrong,) = check_sizes(build(tmp_path / "c", long))
    assert f"at most {house.ENGINE_LINES}" in wrong


def test_what_is_still_over_may_only_shrink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = build(tmp_path, {"report/plan.py": function(60)})
    monkeypatch.setattr(house, "PACKAGE", package)
    monkeypatch.setattr(house, "STILL_OVER", {"report/plan:f": 60})
    assert not check_sizes(package)
    monkeypatch.setattr(house, "STILL_OVER", {"report/plan:f": 59})
    (wrong,) = check_sizes(package)
    assert "60 lines of body; at most 59" in wrong
    monkeypatch.setattr(house, "STILL_OVER", {"report/plan:f": 61, "report/plan:g": 55})
    (wrong,) = check_stale(package)
    assert "report/plan:g is within its limit" in wrong


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            "class A:\n" + "".join(f"    x{i}: int\n" for i in range(23)),
            "A has 23 fields",
        ),
        ("class A:\n    x: int\n    def f(self):\n        self.y = 1", "A.y is set"),
        ("class A:\n    x: int\n    def f(self, b):\n        b.z, self.y = 1, 2", "A.y is set"),
        ("class A:\n    __slots__ = ('x',)\n    def f(me):\n        me.y: int = 1", "A.y is set"),
        ("class B:\n    x: int\nclass A(B):\n    def f(self):\n        self.y += 1", "A.y is set"),
    ],
)
def test_too_many_and_undeclared_fields_are_found(body: str, text: str, tmp_path: Path) -> None:
    (wrong,) = check_fields(build(tmp_path, {"core/passes.py": body}))
    assert text in wrong


@pytest.mark.parametrize(
    "body",
    [
        "class A:\n" + "".join(f"    x{i}: int\n" for i in range(22)) + "    y: ClassVar[int] = 1",
        "class A:\n    def __init__(self):\n        self.x = 1\n    def f(me):\n        me.x = 2",
        "class A:\n    __slots__ = ('x',)\n    def f(self):\n        self.x = 2",
        "class B:\n    x: int\nclass A(B):\n    def f(self):\n        self.x = 1",
        "class A:\n    @property\n    def x(self): ...\n    def f(self):\n        self.x = 1",
        "class A:\n    @staticmethod\n    def forward(ctx):\n        ctx.x = 1",
    ],
)
def test_declared_fields_are_accepted(body: str, tmp_path: Path) -> None:
    assert not check_fields(build(tmp_path, {"core/passes.py": body}))


def test_files_and_names_of_tests_are_checked(tmp_path: Path) -> None:
    package = build(tmp_path, CLEAN)
    tests = tmp_path / "tests" / "core"
    tests.mkdir(parents=True)
    name = "test_" + "a" * 45
    (tests / "test_one.py").write_text(f"def {name}(): ...\n" + "x = 1\n" * 598, "utf-8")
    assert not check_tests(package)
    (tests / "test_two.py").write_text(f"def {name}a(): ...\n" + "x = 1\n" * 599, "utf-8")
    inner = "def test_it():\n    def ranks(rank):\n        assert rank\n"
    (tests / "test_three.py").write_text(f"{inner}\n    run(ranks)\n", "utf-8")
    assert len(check_tests(package)) == 2
    (tests / "test_three.py").write_text(inner, "utf-8")
    assert check_tests(package)[0] == "tests/core/test_three.py: ranks is never called"


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("from .engine import f\n__all__ = []", "f is public"),
        ("import torch\n__all__ = []", "torch is public"),
        ("def f(): ...\n__all__ = ['f', 'g']", "g, not defined"),
        (
            "try:\n    from .x import f\nexcept ImportError:\n    f = None\n__all__ = []",
            "f is public",
        ),
        ("f = 1\n__all__ = ['f', 'f']", "f twice"),
        ("f = 1", "no __all__"),
        ("from .engine import *\n__all__ = []", "* is public"),
    ],
)
def test_public_names_are_checked(body: str, name: str, tmp_path: Path) -> None:
    (wrong,) = check_public_names(build(tmp_path, {"__init__.py": body}))
    assert name in wrong
