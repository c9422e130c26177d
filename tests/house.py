"""The house rules as checkers: who may import whom, what may stand where, how large things may be.

Each checker takes the folder of a package and returns what is wrong, one line each.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "fsdp_compose"

# A folder imports only from folders above it. Inside a folder, a file imports only from files above
# it in the list that the docstring of the folder's `__init__` shows: "    name  what it is for".
FOLDERS = [
    "layout",
    "base",
    "comm",
    "sharded",
    "buckets",
    "core",
    "construct",
    "scopes",
    "optim",
    "report",
    "checkpoint",
    "attach",
    "simulation",
    "cli",
]
TOP = ["wrap", "__init__", "__main__"]  # the public face: may import everything
LISTED = re.compile(r"^    ([a-z_0-9/]+)  +\S", re.MULTILINE)
PRIVATE_TORCH = {"base/torch_private", "base/torch_groups", "base/torch_stack"}
COLLECTIVES = re.compile(r"comm/|checkpoint/")

MAX_LINES = 500  # of a file of the package
MAX_BODY = 50  # lines of a function without its docstring
MAX_FIELDS = 22  # of a class of state
ENGINE = "core"  # without the guards in it
ENGINE_LINES = 2600
ENGINE_FILES = 11
MAX_TEST_LINES = 600
MAX_TEST_NAME = 50

# What is still over a limit, and by how much. Entries shrink and go; none is added.
STILL_OVER = {}

COLLECTIVE = re.compile(
    r"(_?(all_gather|all_reduce|all_to_all|reduce_scatter)\w*|\w+_into_tensor|\w+_coalesced"
    r"|(monitored_)?barrier|broadcast(_object_list)?|reduce|(gather|scatter)(_object(_list)?)?"
    r"|i?send|i?recv|(send|recv)_object_list|batch_isend_irecv|P2POp)"
)
GROUP_METHOD = re.compile(r"_?(allreduce|allgather|alltoall|reduce_scatter)(_base|_\w*coalesced)?")
NEW_TENSOR = re.compile(
    r"torch\.(arange|as_tensor|asarray|empty(_strided)?|eye|full|linspace|ones|rand(int|n|perm)?"
    r"|scalar_tensor|tensor|zeros)"
)
PUBLIC_IN_PRACTICE = ("_foreach_", "_fused_")


# What the checkers share: the files, the modules they import, the torch names they mention.


def name_of(path: Path, package: Path) -> str:
    """`core/guards/used_parameters` for the file fsdp_compose/core/guards/used_parameters.py."""
    return path.relative_to(package).with_suffix("").as_posix()


def sources(package: Path) -> Iterator[tuple[Path, str, ast.Module]]:
    """(path, name, syntax tree) of every file."""
    for path in sorted(package.rglob("*.py")):
        yield path, name_of(path, package), parse(path.read_text("utf-8"))


@functools.cache
def parse(text: str) -> ast.Module:
    return ast.parse(text)


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


def check_layers(package: Path) -> list[str]:
    place = places(package)
    files = {name for _, name, _ in sources(package)}
    wrong = []
    for path, name, tree in sources(package):
        if name.count("/") == 2 and name.endswith("/__init__") and len(tree.body) == 1:
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
            wrong.add(f"{at(path, package, node)}: {name} is a collective; it belongs in comm/")
    return sorted(wrong)


def check_devices(package: Path) -> list[str]:
    wrong = []
    for path, _, tree in sources(package):
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and NEW_TENSOR.fullmatch(ast.unparse(node.func))
                and not any(keyword.arg in ("device", None) for keyword in node.keywords)
            ):
                wrong.append(f"{at(path, package, node)}: name the device; torch's default varies")
    return wrong


def check_form(package: Path) -> list[str]:
    wrong = []
    for path, _, tree in sources(package):
        if not (ast.get_docstring(tree) or "").strip():
            wrong.append(f"{at(path, package, tree)}: no docstring says what the file promises")
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id == "hasattr":
                wrong.append(f"{at(path, package, node)}: hasattr; declare the field instead")
    return wrong


PROCESS = "base/process"  # what a process has one of stands there
OUTSIDE_PROCESS = {
    "comm/under_way:NOTHING_SENT": "a constant: waiting for it changes nothing",
    "comm/under_way:BEGUN_BY_HALF": "a constant, as that one",
    "comm/counts:_counts": "keyed by process groups with weak references; a plain dict is fast",
    "base/lazy:_under_way": "packages being imported, by name; the import lock guards it",
    "scopes/compile:_numbers": "numbers units in graphs, and their calls, as torch keeps graphs",
    "sharded/tensor:HANDLERS": "functions by torch function, which the next file writes",
}


def check_process_state(package: Path) -> list[str]:
    """State of a module that calls change would be shared by all models, groups and ranks.

    What is keyed by its owner with weak references is not; what has no owner is in one file.
    """
    growing = {"set", "dict", "list", "defaultdict", "deque", "count", "Counter", "OrderedDict"}
    wrong = []
    for path, file, tree in sources(package):
        if file == PROCESS:
            continue
        classes = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
        for node in tree.body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            value = node.value
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            is_empty = isinstance(value, ast.List | ast.Dict) and not (
                value.elts if isinstance(value, ast.List) else value.keys
            )
            called = ast.unparse(value.func).split(".")[-1] if isinstance(value, ast.Call) else ""
            made = classes.get(called)
            is_frozen = made is None or "frozen=True" in "".join(
                map(ast.unparse, made.decorator_list)
            )
            grows = called in growing and not (isinstance(value, ast.Call) and value.args)
            if (is_empty or grows or not is_frozen) and f"{file}:{name}" not in OUTSIDE_PROCESS:
                wrong.append(f"{at(path, package, node)}: {name} belongs to the process: {PROCESS}")
        wrong += [
            f"{at(path, package, node)}: global {', '.join(node.names)}; keep it in {PROCESS}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Global)
        ]
    return wrong


FILLED = {
    "sharded/calls:HANDLERS": "what it does to the classes needs the classes, which need the table",
    "report/timeline:EngineWork": "timed while a trace is open, so that it costs nothing else",
}
MUTATORS = set("add append clear extend insert pop popitem remove setdefault update".split())


def check_filled_elsewhere(package: Path) -> list[str]:
    """A name that a file imports is not written there: what it is, its own file says.

    Nobody reads in a file that another one, which it does not know, adds to its lists, fills its
    tables or replaces its functions. What is needed from above is passed down by a call.
    """
    wrong = []
    for path, file, tree in sources(package):
        names = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            and (node.level or (node.module or "").split(".")[0] == package.name)
            and not (node.module or "").endswith("base.process")
            for alias in node.names
        }
        for node in ast.walk(tree):  # other names for the same: for kind in (A, B), also = A
            match node:
                case (
                    ast.For(target=ast.Name(id=name), iter=value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.Name() as value)
                    | ast.Assign(targets=[ast.Name(id=name)], value=ast.Name() as value)
                ):
                    found = value.elts if isinstance(value, ast.Tuple | ast.List) else [value]
                    if any(isinstance(n, ast.Name) and n.id in names for n in found):
                        names.add(name)
        for node in ast.walk(tree):
            written: list[ast.expr] = []
            match node:
                case ast.Assign(targets=targets):
                    written = [n for t in targets for n in flatten(t)]
                case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                    written = [target]
                case ast.Delete(targets=targets):
                    written = targets
                case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in MUTATORS:
                    written = [ast.Subscript(value, ast.Constant(0))]
                case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[value, *_]):
                    written = [ast.Subscript(value, ast.Constant(0))]
            for target in written:
                root = target
                while isinstance(root, ast.Attribute | ast.Subscript):
                    root = root.value
                if not (isinstance(root, ast.Name) and root is not target and root.id in names):
                    continue
                if f"{file}:{root.id}" not in FILLED:
                    where = at(path, package, node)
                    wrong.append(f"{where}: {root.id} is written outside the file that defines it")
    return wrong


SHARED_PRIVATE = {"_FSDPState"}  # what the state is called in the library's contract


def check_private_names(package: Path) -> list[str]:
    """A name with an underscore is read in its own file alone."""
    return [
        f"{at(path, package, node)}: {alias.name} is private to {node.module}"
        for path, _, tree in sources(package)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.level or (node.module or "").split(".")[0] == package.name)
        for alias in node.names
        if re.match("_[^_]", alias.name) and alias.name not in SHARED_PRIVATE
    ]


def flatten(target: ast.expr) -> list[ast.expr]:
    """The targets of an assignment, those of a tuple one by one."""
    if isinstance(target, ast.Tuple | ast.List):
        return [inner for element in target.elts for inner in flatten(element)]
    return [target.value if isinstance(target, ast.Starred) else target]


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


def over(package: Path, found: list[tuple[str, str, int]], limit: int, what: str) -> list[str]:
    """Complaints about each (place, name, size) over the limit, or over what it still may have."""
    still = STILL_OVER if package == PACKAGE else {}
    return [
        f"{where}: {name} has {size} {what}; at most {still.get(name, limit)}"
        for where, name, size in found
        if size > still.get(name, limit)
    ]


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body without its docstring."""
    body = function.body[ast.get_docstring(function) is not None :]
    if not body:
        return 0
    first = min(n.lineno for n in [body[0], *getattr(body[0], "decorator_list", [])])
    return (function.end_lineno or first) - first + 1


def sizes_of_files(package: Path) -> list[tuple[str, str, int]]:
    """(place, name, lines) of every file."""
    return [
        (at(path, package, tree), name, len(path.read_text("utf-8").splitlines()))
        for path, name, tree in sources(package)
    ]


def sizes_of_functions(package: Path) -> list[tuple[str, str, int]]:
    """(place, name, lines of the body) of every function and method."""
    return [
        (at(path, package, node), f"{name}:{node.name}", body_lines(node))
        for path, name, tree in sources(package)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def sizes_of_classes(package: Path) -> list[tuple[str, str, int]]:
    """(place, name, fields) of every class."""
    return [
        (at(path, package, node), f"{name}:{node.name}", sum(map(is_field, node.body)))
        for path, name, tree in sources(package)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]


def check_sizes(package: Path) -> list[str]:
    """Lines of files and of function bodies, and the engine as a whole."""
    files = sizes_of_files(package)
    wrong = over(package, files, MAX_LINES, "lines")
    wrong += over(package, sizes_of_functions(package), MAX_BODY, "lines of body")
    engine = [n for _, name, n in files if re.fullmatch(f"{ENGINE}/[a-z_]+[0-9]*", name)]
    if sum(engine) > ENGINE_LINES or len(engine) > ENGINE_FILES:
        found = f"{sum(engine)} lines in {len(engine)} files"
        wrong.append(f"{ENGINE}: {found}; at most {ENGINE_LINES} in {ENGINE_FILES}")
    return wrong


def check_stale(package: Path) -> list[str]:
    """What is no longer over its limit leaves the list of what still is."""
    if package != PACKAGE:
        return []
    sizes = [
        *((name, n, MAX_LINES) for _, name, n in sizes_of_files(package)),
        *((name, n, MAX_BODY) for _, name, n in sizes_of_functions(package)),
        *((name, n, MAX_FIELDS) for _, name, n in sizes_of_classes(package)),
    ]
    large = {name for name, size, limit in sizes if size > limit}
    within = [name for name in STILL_OVER if name not in large]
    return [f"{name} is within its limit: take it off STILL_OVER" for name in within]


def own_fields(node: ast.ClassDef) -> set[str]:
    """Names that a class declares for its instances: annotations, slots, attributes, methods."""
    found: set[str] = set()
    for statement in node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                found.update(ast.literal_eval(value))
            case ast.Assign(targets=targets):
                found.update(t.id for t in targets if isinstance(t, ast.Name))
            case ast.FunctionDef(name=name):
                found.add(name)
                if name in ("__init__", "__new__", "__post_init__"):
                    found.update(field for field, _ in set_on_self(statement))
    return found


def set_on_self(method: ast.FunctionDef) -> Iterator[tuple[str, ast.AST]]:
    """Attributes that a method sets on its first argument."""
    decorators = {ast.unparse(d) for d in method.decorator_list}
    if not method.args.args or decorators & {"staticmethod", "classmethod"}:
        return
    for node in ast.walk(method):
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=field, ctx=ast.Store()):
                if owner == method.args.args[0].arg:
                    yield field, node


def is_field(statement: ast.stmt) -> bool:
    """Whether a statement in a class's body declares a field of its instances."""
    return (
        isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and "ClassVar" not in ast.unparse(statement.annotation)
    )


def check_fields(package: Path) -> list[str]:
    """Classes have few fields, and set none that they, or a base of the package, do not declare.

    A class with a base from elsewhere may set what that base declares, so it is passed over.
    """
    classes = [
        (path, f"{name}:{node.name}", node)
        for path, name, tree in sources(package)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    inherited: dict[str, set[str]] = {}
    for _, _, node in classes:
        inherited.setdefault(node.name, set()).update(own_fields(node))
    still = STILL_OVER if package == PACKAGE else {}
    wrong = over(package, sizes_of_classes(package), MAX_FIELDS, "fields")
    for path, name, node in classes:
        bases = [ast.unparse(base).split("[")[0] for base in node.bases]
        if name in still or any(base not in inherited for base in bases):
            continue
        declared = own_fields(node).union(*(inherited[base] for base in bases))
        wrong += [
            f"{at(path, package, where)}: {node.name}.{field} is set and nowhere declared"
            for method in node.body
            if isinstance(method, ast.FunctionDef)
            for field, where in set_on_self(method)
            if field not in declared
        ]
    return wrong


def check_tests(package: Path) -> list[str]:
    """Files and names of tests are short, and what is defined in a test is called there."""
    wrong = []
    for path in sorted((package.parent / "tests").rglob("*.py")):
        where = path.relative_to(package.parent).as_posix()
        text = path.read_text("utf-8")
        lines = len(text.splitlines())
        if lines >= MAX_TEST_LINES:
            wrong.append(f"{where}: {lines} lines; fewer than {MAX_TEST_LINES}")
        names = re.findall(r"^ *def (test_\w+)", text, re.MULTILINE)
        wrong += [
            f"{where}: {name} has more than {MAX_TEST_NAME} letters"
            for name in names
            if len(name) > MAX_TEST_NAME
        ]
        wrong += [
            f"{where}: {name} is never called"
            for block in re.split(r"^(?=def |class |@)", text, flags=re.MULTILINE)
            for name in re.findall(r"^    def (\w+)", block, re.MULTILINE)
            if block.startswith("def ") and len(re.findall(rf"\b{name}\b", block)) == 1
        ]
    return wrong
