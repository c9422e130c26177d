"""The texts of errors in the source, with what varies as ``…``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from house import PACKAGE

QUIET = {"AssertionError", "AttributeError", "Ended", "ArgumentTypeError"}
"""Kinds that tell no user anything: invariants, protocols of Python, argparse's own."""


def text_of(node: ast.AST) -> str:
    """A string as it is written, with ``…`` for what is filled in."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(map(text_of, values))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left) + text_of(right)
    return "…"


def raised() -> Iterator[tuple[str, str]]:
    """(place, text) of each error that is raised with a text of its own."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            kind = ast.unparse(node.exc.func).split(".")[-1]
            text = " ".join(map(text_of, node.exc.args))
            if kind not in QUIET and len(re.findall(r"[A-Za-z]{2,}", text)) >= 3:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", text


@cache
def written() -> str:
    """Every string of the package, for texts that are put together elsewhere."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
                found.append(text_of(node))
    return "\n".join(found)
