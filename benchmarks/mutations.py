"""Mutants of a file from its syntax tree: each is one small change that a test should notice.

What is changed: comparisons, ``and``/``or``, conditions, constants (0, 1, True, False), ``+`` and
``-``, ``|`` and ``&``, ``*`` and ``/``; statements, ``raise`` and ``with`` are removed; ``return``
gives None; loops end after their first turn or are not run; arguments are dropped or swapped.

What is not: annotations, decorators, docstrings, texts, protocols and what describes types; what
an error says; ``assert`` and ``zip(strict=True)``, which state what holds and do nothing; removing
an assignment to a local name, after which the next line raises NameError.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Lt: ast.LtE, ast.LtE: ast.Lt,
    ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
OPPOSITE = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
TYPES = {"TypeVar", "cast", "Protocol", "NewType"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Mutant:
    """One change of a file's syntax tree.

    Attributes:
        file: its name in the folder.
        function: the qualified name of the function that contains the change; "" outside any.
        change: the text before and after, the same as long as the code is.
        kind: which rule made it.
        line: where it is.
        statement: the innermost statement of a function that contains it, as ``statement_key`` has
            it; "" outside any function.
        inner: the first statements of the blocks that it leads to, where it is a loop, a
            condition or a ``with``.
        holder, slot, value: ``value`` goes into the list or field that ``holder`` has at ``slot``.
    """

    file: str
    function: str
    change: str
    kind: str
    line: int
    statement: str
    holder: Any = field(repr=False, compare=False)
    slot: Any = field(repr=False, compare=False)
    value: Any = field(repr=False, compare=False)
    inner: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.file} | {self.function} | {self.change}"

    def apply(self) -> Any:
        """Change the tree that the mutant was made from; what was there."""
        if isinstance(self.holder, list):
            before = self.holder[self.slot]
            self.holder[self.slot] = self.value
        else:
            before = getattr(self.holder, self.slot)
            setattr(self.holder, self.slot, self.value)
        return before

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Scope in which the tree is that of the mutant."""
        before = self.apply()
        try:
            yield
        finally:
            replace(self, value=before).apply()


def statement_key(file: str, function: str, statement: ast.stmt) -> str:
    """Names a statement by its text, so that changes elsewhere in the file do not rename it."""
    return f"{file} | {function} | {first_line(statement)}"


def first_line(node: ast.AST) -> str:
    return ast.unparse(node).strip().partition("\n")[0]


def is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def mutants_of(file: str, tree: ast.Module) -> list[Mutant]:
    """Every mutant of a file, in the order of its lines."""
    finder = _Finder(file)
    finder.visit_body(tree, "body")
    counts: Counter[str] = Counter()
    found = []
    for mutant in finder.found:
        counts[mutant.key] += 1
        number = counts[mutant.key]
        if number > 1:
            mutant = _numbered(mutant, number)
        found.append(mutant)
    return found


def _numbered(mutant: Mutant, number: int) -> Mutant:
    return replace(mutant, change=f"{mutant.change} (number {number})")


class _Finder:
    """Walks a tree and notes what can be changed."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.found: list[Mutant] = []
        self.names: list[str] = []
        self.is_inside = False  # a function
        self.statement = ""
        self.inner: tuple[str, ...] = ()

    def add(self, kind: str, change: str, node: ast.AST, holder: Any, slot: Any, new: Any) -> None:
        for made in new if isinstance(new, list) else [new]:
            if isinstance(made, ast.AST) and not hasattr(made, "lineno"):
                ast.copy_location(made, node)
        line: int = getattr(node, "lineno", 0)
        self.found.append(
            Mutant(
                self.file, ".".join(self.names), change, kind, line, self.statement,
                holder, slot, new, self.inner,
            )
        )  # fmt: skip

    # Statements

    def visit_body(self, node: Any, name: str) -> None:
        body = getattr(node, name)
        for index, statement in enumerate(body):
            if is_docstring(statement) or isinstance(statement, ast.Assert):
                continue
            if self.is_inside:
                self.statement = statement_key(self.file, ".".join(self.names), statement)
            self.visit_statement(body, index, statement)

    def visit_statement(self, body: list[ast.stmt], index: int, node: Any) -> None:
        if isinstance(node, ast.ClassDef):
            if not any("Protocol" in ast.unparse(base) for base in node.bases):
                self.names.append(node.name)
                self.visit_body(node, "body")
                self.names.pop()
        elif isinstance(node, FUNCTIONS):
            self.visit_function(node)
        else:
            here = self.statement
            where = self.file, ".".join(self.names)
            self.inner = tuple(statement_key(*where, first) for first in _first_inside(node))
            self.change_statement(body, index, node)
            self.inner = ()
            for name in ("body", "orelse", "finalbody"):
                if not isinstance(node, ast.IfExp) and getattr(node, name, None):
                    self.visit_body(node, name)
            for handler in getattr(node, "handlers", ()):
                self.visit_body(handler, "body")
            self.statement = here

    def visit_function(self, node: Any) -> None:
        was_inside, was_at = self.is_inside, self.statement
        self.names.append(node.name)
        self.is_inside = True
        first = next((s for s in node.body if not is_docstring(s)), None)
        if first is not None:
            self.statement = statement_key(self.file, ".".join(self.names), first)
        for defaults in (node.args.defaults, node.args.kw_defaults):
            for i, default in enumerate(defaults):
                self.visit_expression(defaults, i, default)
        self.visit_body(node, "body")
        self.names.pop()
        self.is_inside, self.statement = was_inside, was_at

    def change_statement(self, body: list[ast.stmt], index: int, node: Any) -> None:
        """The changes of a statement itself, then those of its own expressions."""
        text = first_line(node)
        if self._is_removable(node):
            self.add("statement removed", f"remove: {text}", node, body, index, ast.Pass())
        match node:
            case ast.Return(value=ast.expr()) if ast.unparse(node.value) != "None":
                new = ast.Return(ast.Constant(None))
                ast.copy_location(new.value, node)
                self.add("returns None", f"{text} -> return None", node, body, index, new)
            case ast.With():
                new = ast.If(ast.copy_location(ast.Constant(True), node), node.body, [])
                self.add("statement removed", f"remove: {text}", node, body, index, new)
            case ast.For() | ast.While():
                ends = [*node.body, ast.copy_location(ast.Break(), node)]
                if not isinstance(node.body[-1], (ast.Break, ast.Return, ast.Raise)):
                    self.add("loop cut", f"{text} -> break at its end", node, node, "body", ends)
                skips = [ast.copy_location(ast.Break(), node)]
                self.add("loop cut", f"{text} -> not run", node, node, "body", skips)
            case ast.Break():
                self.add("loop cut", "break -> continue", node, body, index, ast.Continue())
            case ast.Continue():
                self.add("loop cut", "continue -> break", node, body, index, ast.Break())
            case ast.AugAssign() if type(node.op) in COMPUTED:
                op = COMPUTED[type(node.op)]()
                new = ast.copy_location(ast.AugAssign(node.target, op, node.value), node)
                change = f"{text} -> {ast.unparse(new)}"
                self.add("operator swapped", change, node, node, "op", op)
        if isinstance(node, (ast.Raise, ast.Global, ast.Import, ast.ImportFrom)):
            return  # what an error says is a text
        for name, value in ast.iter_fields(node):
            if name in ("body", "orelse", "finalbody", "handlers", "annotation", "target"):
                continue
            if name == "test":
                self.negate(node, name, value)
            self.visit_field(node, name, value)

    def _is_removable(self, node: Any) -> bool:
        match node:
            case ast.Expr(value=ast.Call()) | ast.Delete() | ast.Raise() | ast.AugAssign():
                return True
            case ast.Return(value=None):
                return True
            case ast.Assign() | ast.AnnAssign() if self.is_inside:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                parts = [part for target in targets for part in ast.walk(target)]
                return any(isinstance(part, (ast.Attribute, ast.Subscript)) for part in parts)
        return False

    # Expressions

    def visit_field(self, node: Any, name: str, value: Any) -> None:
        if isinstance(value, list):
            for i, item in enumerate(value):
                self.visit_expression(value, i, item)
        elif isinstance(value, ast.AST):
            self.visit_expression(node, name, value)

    def visit_expression(self, holder: Any, slot: Any, node: Any) -> None:
        if isinstance(node, ast.withitem):
            self.visit_expression(node, "context_expr", node.context_expr)
            return
        if isinstance(node, ast.comprehension):
            self.visit_expression(node, "iter", node.iter)
            for i, condition in enumerate(node.ifs):
                self.negate(node.ifs, i, condition)
                self.visit_expression(node.ifs, i, condition)
            return
        if isinstance(node, ast.keyword):
            self.visit_expression(node, "value", node.value)
            return
        if not isinstance(node, ast.expr) or isinstance(node, ast.JoinedStr):
            return
        if isinstance(node, ast.Call) and ast.unparse(node.func) in TYPES:
            return
        self.change_expression(holder, slot, node)
        for name, value in ast.iter_fields(node):
            if isinstance(node, ast.IfExp) and name == "test":
                self.negate(node, name, value)
            if isinstance(node, ast.Call) and name == "keywords":
                value = [word for word in value if not _is_strict(word)]
            self.visit_field(node, name, value)

    def change_expression(self, holder: Any, slot: Any, node: Any) -> None:
        text = " ".join(ast.unparse(node).split())

        def swap(kind: str, new: ast.expr) -> None:
            ast.copy_location(new, node)
            self.add(kind, f"{text} -> {ast.unparse(new)}", node, holder, slot, new)

        match node:
            case ast.Compare():
                for i, op in enumerate(node.ops):
                    if type(op) in COMPARED:
                        ops = [*node.ops[:i], COMPARED[type(op)](), *node.ops[i + 1 :]]
                        swap("comparison swapped", ast.Compare(node.left, ops, node.comparators))
            case ast.BoolOp():
                op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
                swap("and/or swapped", ast.BoolOp(op, node.values))
            case ast.UnaryOp(op=ast.Not()):
                swap("condition negated", node.operand)
            case ast.BinOp() if type(node.op) in COMPUTED:
                op = COMPUTED[type(node.op)]()
                swap("operator swapped", ast.BinOp(node.left, op, node.right))
            case ast.Constant(value=bool() as value):
                swap("constant changed", ast.Constant(not value))
            case ast.Constant(value=int() | float() as value):
                other = 1 - value if value in (0, 1) else value + 1
                swap("constant changed", ast.Constant(type(value)(other)))
            case ast.Call():
                self.change_arguments(holder, slot, node)

    def change_arguments(self, holder: Any, slot: Any, node: ast.Call) -> None:
        """Drop the last of several arguments, or a keyword; swap the first two."""
        args, words = node.args, node.keywords
        name = _short(node.func)

        def call(kind: str, change: str, args: list[ast.expr], words: list[ast.keyword]) -> None:
            new = ast.copy_location(ast.Call(node.func, args, words), node)
            self.add(kind, f"{name}(...): {change}", node, holder, slot, new)

        if args and len(args) + len(words) > 1:
            call("argument dropped", f"drop {_short(args[-1])}", args[:-1], words)
        first = args[:2]
        is_starred = any(isinstance(arg, ast.Starred) for arg in first)
        if len(set(map(ast.unparse, first))) == 2 and not is_starred and name not in ("max", "min"):
            change = f"swap {_short(first[0])} and {_short(first[1])}"
            call("arguments swapped", change, [*reversed(first), *args[2:]], words)
        for i, word in enumerate(words):
            if not _is_strict(word):
                kept = [*words[:i], *words[i + 1 :]]
                call("argument dropped", f"drop {word.arg or '**'}=", args, kept)

    def negate(self, holder: Any, slot: Any, test: ast.expr) -> None:
        """Negate a condition, where no other rule does."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in OPPOSITE:
            return
        new = ast.copy_location(ast.UnaryOp(ast.Not(), test), test)
        change = f"{ast.unparse(test)} -> {ast.unparse(new)}"
        self.add("condition negated", change, test, holder, slot, new)


def _first_inside(node: ast.AST) -> Iterator[ast.stmt]:
    """The first statement of each block in ``node``, at any depth."""
    for name in ("body", "orelse"):
        block = getattr(node, name, None)
        if isinstance(block, list) and block:
            yield block[0]
            for statement in block:
                yield from _first_inside(statement)


def _short(node: ast.expr) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_strict(word: ast.keyword) -> bool:
    return word.arg == "strict"


def marked(file: str, tree: ast.Module, number_of: Any) -> ast.Module:
    """``tree`` with ``_marked[n] = 1`` before each statement; ``number_of`` maps its key to n."""
    _mark(file, [], tree, False, number_of)
    return ast.fix_missing_locations(tree)


def _mark(file: str, names: list[str], node: Any, is_inside: bool, number_of: Any) -> None:
    for name in ("body", "orelse", "finalbody"):
        body = getattr(node, name, None)
        if not isinstance(body, list):
            continue
        made: list[ast.stmt] = []
        for statement in body:
            inner = [*names, statement.name] if hasattr(statement, "name") else names
            if is_inside and not is_docstring(statement):
                number = number_of(statement_key(file, ".".join(names), statement))
                mark = ast.parse(f"_marked[{number}] = 1").body[0]
                made.append(ast.copy_location(mark, statement))
            is_function = isinstance(statement, FUNCTIONS)
            _mark(file, inner, statement, is_inside or is_function, number_of)
            made.append(statement)
        setattr(node, name, made)
    for handler in getattr(node, "handlers", ()):
        _mark(file, names, handler, is_inside, number_of)
