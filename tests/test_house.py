"""The house rules: who may import whom, and what may appear only where. Checked from the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fsdp_compose"

# Top imports nothing; each file imports only from files above it. A name with a slash is a package:
# one layer, whose files may import each other and everything above.
LAYERS = [
    "lazy.py",
    "torch_private.py",
    "layout.py",
    "tree.py",
    "policy.py",
    "mesh.py",
    "streams.py",
    "flags.py",
    "traffic.py",
    "waiting.py",
    "messages.py",
    "comm.py",
    "unwritten.py",
    "sharded/",
    "bucket.py",
    "whole.py",
    "order.py",
    "verify.py",
    "records.py",
    "state.py",
    "names.py",
    "leftovers.py",
    "adopt.py",
    "residency.py",
    "saved.py",
    "replicas.py",
    "used.py",
    "writes.py",
    "reduction.py",
    "engine.py",
    "receive.py",
    "comm_hooks.py",
    "gather.py",
    "connect.py",
    "standin.py",
    "audit.py",
    "surroundings.py",
    "inner.py",
    "callers.py",
    "hooks.py",
    "traced.py",
    "asked.py",
    "methods.py",
    "participate.py",
    "trace.py",
    "wrap.py",
    "parallel.py",
    "plans.py",
    "collect.py",
    "agree.py",
    "init.py",
    "fully_shard.py",
    "refresh.py",
    "schedule.py",
    "flat.py",
    "strays.py",
    "owner.py",
    "unshard.py",
    "surgery.py",
    "scopes.py",
    "apply.py",
    "switches.py",
    "pipeline.py",
    "grads.py",
    "scaler.py",
    "checkpoint/",
    "inspect/",
    "launch.py",
    "__main__.py",
    "__init__.py",
]
UNLAYERED = {"_version.py"}  # may exist anywhere in the order; imports nothing of the package
PRIVATE_TORCH = {"torch_private.py"}
COLLECTIVES = {"messages.py", "comm.py", "checkpoint/"}
MAX_LINES = 600

COLLECTIVE = re.compile(
    r"(_?(all_gather|all_reduce|all_to_all|reduce_scatter)\w*|\w+_into_tensor|\w+_coalesced"
    r"|(monitored_)?barrier|broadcast(_object_list)?|reduce|(gather|scatter)(_object(_list)?)?"
    r"|i?send|i?recv|(send|recv)_object_list|batch_isend_irecv|P2POp)"
)
GROUP_METHOD = re.compile(r"_?(allreduce|allgather|alltoall|reduce_scatter)(_base|_\w*coalesced)?")
PUBLIC_IN_PRACTICE = ("_foreach_", "_fused_")


# What the checkers share: the files, the modules they import, the torch names they mention.


def layer_of(path: Path, package: Path) -> str:
    first, *rest = path.relative_to(package).parts
    return f"{first}/" if rest else first


def sources(package: Path) -> Iterator[tuple[Path, str, ast.Module]]:
    """(path, layer, syntax tree) of every file."""
    for path in sorted(package.rglob("*.py")):
        yield path, layer_of(path, package), ast.parse(path.read_text("utf-8"), str(path))


def at(path: Path, package: Path, node: ast.AST) -> str:
    return f"{path.relative_to(package.parent)}:{getattr(node, 'lineno', 1)}"


def imported_layers(path: Path, package: Path, tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Layers of `package` that the file imports, wherever the import stands."""
    here = (package.name, *path.relative_to(package).parent.parts)

    def layer(dotted: list[str]) -> Iterator[str]:
        if dotted[:1] == [package.name]:
            name = dotted[1] if len(dotted) > 1 else "__init__"
            is_package = f"{name}/" in LAYERS or (package / name).is_dir()
            yield f"{name}/" if is_package else f"{name}.py"

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                for name in layer(alias.name.split(".")):
                    yield node, name
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                # `from fsdp_compose import x`: the file x, or a name that __init__ makes public.
                inner = base == [package.name] and is_layer(alias.name, package)
                for name in layer([*base, alias.name] if inner else base):
                    yield node, name
        elif isinstance(node, ast.Call) and node.args:
            match ast.unparse(node.func).split(".")[-1], node.args[0]:
                case (("import_module" | "__import__"), ast.Constant(value=str(module))):
                    dots = len(module) - len(module.lstrip("."))
                    base = list(here[: len(here) - dots + 1]) if dots else []
                    for name in layer([*base, *filter(None, module.split("."))]):
                        yield node, name


def is_layer(name: str, package: Path) -> bool:
    listed = {f"{name}.py", f"{name}/"} & {*LAYERS, *UNLAYERED}
    return bool(listed) or (package / f"{name}.py").exists() or (package / name).is_dir()


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
    rank = {name: i for i, name in enumerate(LAYERS)}
    wrong = []
    for path, layer, tree in sources(package):
        where = at(path, package, tree)
        if layer not in rank and layer not in UNLAYERED:
            wrong.append(
                f"{where}: {layer} is not in LAYERS; give it a place in tests/test_house.py"
            )
            continue
        for node, target in imported_layers(path, package, tree):
            where = at(path, package, node)
            if target in UNLAYERED or (target == layer and layer.endswith("/")):
                continue
            if target not in rank:
                wrong.append(f"{where}: imports {target}, which is not in LAYERS")
            elif rank[target] >= rank.get(layer, -1):
                wrong.append(f"{where}: {layer} imports {target}, which is not above it")
    return list(dict.fromkeys(wrong))  # one import statement, one line


def check_private_torch(package: Path) -> list[str]:
    wrong = set()
    for path, layer, tree in sources(package):
        if layer in PRIVATE_TORCH:
            continue
        for node, name in torch_names(tree):
            for part in name.split("."):
                dunder = part.startswith("__") and part.endswith("__")
                if part.startswith("_") and not dunder and not part.startswith(PUBLIC_IN_PRACTICE):
                    wrong.add(f"{at(path, package, node)}: {name} is private; use torch_private.py")
    return sorted(wrong)


def check_collectives(package: Path) -> list[str]:
    wrong = set()
    for path, layer, tree in sources(package):
        if layer in COLLECTIVES:
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
    "layout.py": "import torch\ntorch._foreach_add_([], 1)\nx = torch.__version__",
    "torch_private.py": "import torch\nfrom torch._utils import f\ntorch._C.g()",
    "comm.py": "import torch.distributed as dist\nfrom . import layout\ndist.all_reduce(layout.x)",
    "engine.py": "from fsdp_compose.comm import f\nfrom fsdp_compose import comm, layout\n"
    "def g(p, q):\n    comm.all_gather(p); comm.reduce_scatter(q); return p._parameters",
    "checkpoint/__init__.py": "from .model import f",
    "checkpoint/model.py": "from . import dcp\nfrom ..engine import g\nfrom .dcp import h",
    "checkpoint/dcp.py": "from torch import distributed\ndistributed.all_gather_object([], 1)",
    "_version.py": "version = '1'",
    "__init__.py": "from __future__ import annotations\nfrom .engine import g as gather\n"
    "from ._version import version as __version__\n__all__ = ['__version__', 'gather']\n_x = 1",
}


def build(tmp_path: Path, files: dict[str, str], docstring: bool = True) -> Path:
    package = tmp_path / "fsdp_compose"
    for name, body in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(('"""A promise."""\n' if docstring else "") + body + "\n", "utf-8")
    return package


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_checkers_accept_a_clean_package(
    check: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    assert check(build(tmp_path, CLEAN)) == []


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("layout.py", "from .engine import unshard"),
        ("layout.py", "from . import engine"),
        ("layout.py", "import fsdp_compose.engine"),
        ("layout.py", "from fsdp_compose import engine as e"),
        ("layout.py", "def f():\n    from fsdp_compose.engine import unshard"),
        (
            "layout.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import mesh",
        ),
        ("layout.py", "from importlib import import_module\nimport_module('fsdp_compose.mesh')"),
        ("layout.py", "import importlib\nimportlib.import_module('.mesh', __package__)"),
        ("engine.py", "from fsdp_compose import fully_shard_everything"),
        ("engine.py", "from .checkpoint.dcp import h"),
        ("checkpoint/dcp.py", "from ..inspect import plan"),
        ("checkpoint/dcp.py", "from .. import inspect"),
        ("_version.py", "from . import layout"),
        ("engine.py", "from .unheard_of import f"),
        ("unheard_of.py", "x = 1"),
        ("unheard_of/__init__.py", "x = 1"),
    ],
)
def test_an_upward_arrow_or_an_unlisted_file_is_found(name: str, body: str, tmp_path: Path) -> None:
    (wrong,) = check_layers(build(tmp_path, {name: body}))
    assert f"fsdp_compose/{name}" in wrong


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
    assert check_private_torch(build(tmp_path / "a", {"engine.py": body}))
    assert not check_private_torch(build(tmp_path / "b", {"torch_private.py": body}))


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
    assert check_collectives(build(tmp_path / "a", {"engine.py": body}))
    for allowed in ("comm.py", "checkpoint/dcp.py"):
        assert not check_collectives(build(tmp_path / "b", {allowed: body}))


def test_form_is_checked(tmp_path: Path) -> None:
    (wrong,) = check_form(build(tmp_path / "a", {"layout.py": "x = 1"}, docstring=False))
    assert "docstring" in wrong
    (wrong,) = check_form(build(tmp_path / "b", {"layout.py": "hasattr(1, 'x')"}))
    assert "hasattr" in wrong
    (wrong,) = check_form(build(tmp_path / "c", {"inspect/plan.py": "x = 1\n" * 599}))
    assert "601 lines" in wrong
    assert not check_form(build(tmp_path / "d", {"inspect/plan.py": "x = 1\n" * 598}))


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
