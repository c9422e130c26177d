"""The house rules: who may import whom, and what may appear only where. Checked from the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fsdp_compose"

# A folder imports only from folders above it. Inside a folder, a file imports only from files above
# it in the list that the docstring of the folder's `__init__` shows: "    name  what it is for".
FOLDERS = [
    "layout",
    "base",
    "comm",
    "sharded",
    "core",
    "construct",
    "scopes",
    "optim",
    "report",
    "checkpoint",
    "cli",
]
TOP = ["wrap", "__init__", "__main__"]  # the public face: may import everything
LISTED = re.compile(r"^    ([a-z_0-9/]+)  +\S", re.MULTILINE)
PRIVATE_TORCH = {"base/torch_private"}
COLLECTIVES = re.compile(r"comm/|checkpoint/")
MAX_LINES = 600

COLLECTIVE = re.compile(
    r"(_?(all_gather|all_reduce|all_to_all|reduce_scatter)\w*|\w+_into_tensor|\w+_coalesced"
    r"|(monitored_)?barrier|broadcast(_object_list)?|reduce|(gather|scatter)(_object(_list)?)?"
    r"|i?send|i?recv|(send|recv)_object_list|batch_isend_irecv|P2POp)"
)
GROUP_METHOD = re.compile(r"_?(allreduce|allgather|alltoall|reduce_scatter)(_base|_\w*coalesced)?")
PUBLIC_IN_PRACTICE = ("_foreach_", "_fused_")


# What the checkers share: the files, the modules they import, the torch names they mention.


def name_of(path: Path, package: Path) -> str:
    """`core/guards/used_parameters` for the file fsdp_compose/core/guards/used_parameters.py."""
    return path.relative_to(package).with_suffix("").as_posix()


def sources(package: Path) -> Iterator[tuple[Path, str, ast.Module]]:
    """(path, name, syntax tree) of every file."""
    for path in sorted(package.rglob("*.py")):
        yield path, name_of(path, package), ast.parse(path.read_text("utf-8"), str(path))


def listed(package: Path, folder: str) -> list[str]:
    """The files of a folder in the order that its `__init__` gives."""
    init = package / folder / "__init__.py"
    if not init.exists():
        return []
    return LISTED.findall(ast.get_docstring(ast.parse(init.read_text("utf-8")), clean=False) or "")


def places(package: Path) -> dict[str, tuple[int, int]]:
    """By name of a file, its folder's place and its own; `__init__` is the last of its folder."""
    found: dict[str, tuple[int, int]] = {}
    for i, folder in enumerate(FOLDERS):
        names = listed(package, folder)
        found |= {f"{folder}/{name}": (i, j) for j, name in enumerate(names)}
        found[f"{folder}/__init__"] = (i, len(names))
    return found | {name: (len(FOLDERS), i) for i, name in enumerate(TOP)}


def at(path: Path, package: Path, node: ast.AST) -> str:
    return f"{path.relative_to(package.parent)}:{getattr(node, 'lineno', 1)}"


def imported(path: Path, package: Path, tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Names of the package's files that a file imports, wherever the import stands."""
    here = [package.name, *path.relative_to(package).parent.parts]

    def file(dotted: list[str]) -> str:
        inner = dotted[1:]
        is_folder = not inner or (package.joinpath(*inner) / "__init__.py").exists()
        return "/".join([*inner, "__init__"] if is_folder else inner)

    def is_file(dotted: list[str]) -> bool:
        inner = package.joinpath(*dotted[1:])
        return inner.with_suffix(".py").exists() or (inner / "__init__.py").exists()

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == package.name:
                    yield node, file(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names if base[:1] == [package.name] else []:
                # `from package.folder import x`: the file x, or a name that `__init__` has.
                yield node, file([*base, alias.name] if is_file([*base, alias.name]) else base)
        elif isinstance(node, ast.Call) and node.args:
            match ast.unparse(node.func).split(".")[-1], node.args[0]:
                case (("import_module" | "__import__"), ast.Constant(value=str(module))):
                    dots = len(module) - len(module.lstrip("."))
                    base = list(here[: len(here) - dots + 1]) if dots else []
                    base += [*filter(None, module.split("."))]
                    if base[:1] == [package.name]:
                        yield node, file(base)


def torch_names(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Full dotted names below `torch` that the file mentions: `dist.x` is torch.distributed.x."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    yield node, alias.name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            for alias in node.names if module.split(".")[0] == "torch" else []:
                bound[alias.asname or alias.name] = f"{module}.{alias.name}"
                yield node, f"{module}.{alias.name}"

    def dotted(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return bound.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = dotted(node.value)
            return f"{owner}.{node.attr}" if owner else None
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            match node.args:
                case [owner_node, ast.Constant(value=str(attr)), *_]:
                    owner = dotted(owner_node)
                    return f"{owner}.{attr}" if owner else None
        return None

    for node in ast.walk(tree):
        name = dotted(node)
        if name is not None:
            yield node, name


# The checkers. Each takes the folder of a package and returns what is wrong, one line each.


def check_layers(package: Path) -> list[str]:
    place = places(package)
    files = {name for _, name, _ in sources(package)}
    wrong = []
    for path, name, tree in sources(package):
        if name.endswith("guards/__init__"):
            continue  # its files are listed in core
        if name not in place:
            wrong.append(f"{at(path, package, tree)}: no folder's __init__ lists {name}")
            continue
        for node, target in imported(path, package, tree):
            where = at(path, package, node)
            if target not in place:
                wrong.append(f"{where}: imports {target}, which no folder's __init__ lists")
            elif place[target] >= place[name]:
                wrong.append(f"{where}: {name} imports {target}, which is not above it")
    for name in place:
        folder = name.split("/")[0]
        if name not in files and (package / folder).is_dir():
            wrong.append(f"fsdp_compose/{folder}/__init__.py: lists {name}, which does not exist")
    return list(dict.fromkeys(wrong))  # one import statement, one line


def check_private_torch(package: Path) -> list[str]:
    wrong = set()
    for path, file, tree in sources(package):
        if file in PRIVATE_TORCH:
            continue
        for node, name in torch_names(tree):
            for part in name.split("."):
                dunder = part.startswith("__") and part.endswith("__")
                if part.startswith("_") and not dunder and not part.startswith(PUBLIC_IN_PRACTICE):
                    wrong.add(f"{at(path, package, node)}: {name} is private; use torch_private.py")
    return sorted(wrong)


def check_collectives(package: Path) -> list[str]:
    wrong = set()
    for path, file, tree in sources(package):
        if COLLECTIVES.match(file):
            continue
        found = [
            (node, name)
            for node, name in torch_names(tree)
            if name.startswith("torch.distributed.") and COLLECTIVE.fullmatch(name.split(".")[-1])
        ]
        found += [
            (node, f".{node.func.attr}()")
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and GROUP_METHOD.fullmatch(node.func.attr)
            and node.func.attr != "reduce_scatter"  # comm.reduce_scatter is ours
        ]
        for node, name in found:
            wrong.add(f"{at(path, package, node)}: {name} is a collective; it belongs in comm.py")
    return sorted(wrong)


def check_form(package: Path) -> list[str]:
    wrong = []
    for path, _, tree in sources(package):
        if not (ast.get_docstring(tree) or "").strip():
            wrong.append(f"{at(path, package, tree)}: no docstring says what the file promises")
        lines = len(path.read_text("utf-8").splitlines())
        if lines > MAX_LINES:
            wrong.append(f"{at(path, package, tree)}: {lines} lines; at most {MAX_LINES}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id == "hasattr":
                wrong.append(f"{at(path, package, node)}: hasattr; declare the field instead")
    return wrong


def check_public_names(package: Path) -> list[str]:
    path = package / "__init__.py"
    if not path.exists():
        return []
    tree = ast.parse(path.read_text("utf-8"))
    listed: list[str] | None = None
    bound: set[str] = set()
    wrong: list[str] = []

    def visit(body: list[ast.stmt]) -> None:
        nonlocal listed
        for node in body:
            match node:
                case ast.Import(names=names):
                    bound.update(a.asname or a.name.split(".")[0] for a in names)
                case ast.ImportFrom(module="__future__"):
                    pass
                case ast.ImportFrom(names=names):
                    bound.update(a.asname or a.name for a in names)
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    bound.add(node.name)
                case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    found = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
                    if "__all__" not in found:
                        bound.update(found)
                        continue
                    try:
                        listed = (listed or []) + list(ast.literal_eval(node.value or ast.List([])))
                    except ValueError:
                        wrong.append(f"{at(path, package, node)}: __all__ is not a literal list")
                case ast.If() | ast.Try():
                    for inner in ("body", "orelse", "finalbody"):
                        visit(getattr(node, inner, []))
                    for handler in getattr(node, "handlers", []):
                        visit(handler.body)

    visit(tree.body)
    where = at(path, package, tree)
    if listed is None:
        return [*wrong, f"{where}: no __all__"]
    public = {name for name in bound if not name.startswith("_")}
    names = set(listed)
    dunder = {n for n in names & bound if n.startswith("__")}
    wrong += [f"{where}: {n} is public but not in __all__" for n in sorted(public - names)]
    wrong += [f"{where}: __all__ has {n}, not defined" for n in sorted(names - public - dunder)]
    wrong += [f"{where}: __all__ has {n} twice" for n in sorted(names) if listed.count(n) > 1]
    return wrong


CHECKS = [check_layers, check_private_torch, check_collectives, check_form, check_public_names]


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


def test_form_is_checked(tmp_path: Path) -> None:
    (wrong,) = check_form(build(tmp_path / "a", {"layout/shards.py": "x = 1"}, docstring=False))
    assert "docstring" in wrong
    (wrong,) = check_form(build(tmp_path / "b", {"layout/shards.py": "hasattr(1, 'x')"}))
    assert "hasattr" in wrong
    (wrong,) = check_form(build(tmp_path / "c", {"report/plan.py": "x = 1\n" * 599}))
    assert "601 lines" in wrong
    assert not check_form(build(tmp_path / "d", {"report/plan.py": "x = 1\n" * 598}))


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
