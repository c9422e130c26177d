"""What the package shows of itself: names by question, folders in order, types."""

from __future__ import annotations

import re

import fsdp_compose as fc

import typed_use
from house import FOLDERS, PACKAGE

DOC = fc.__doc__ or ""
NAMES, FILES = DOC.split("The folders;")


def test_names_are_listed_by_question() -> None:
    """The docstring lists the names of ``__all__``, in the same groups and the same order."""
    source = (PACKAGE / "__init__.py").read_text("utf-8").split("__all__ = [")[1].split("]")[0]
    groups = re.findall(r"# (.+\?)\n((?:    \".+\n)+)", source)
    wanted = {question.capitalize(): re.findall(r"\w+", names) for question, names in groups}
    shown = re.findall(r"^(\w.+\?)\n((?:    .+\n)+)", NAMES, re.MULTILINE)
    assert {question.capitalize(): re.findall(r"\w+", names) for question, names in shown} == wanted
    assert [name for names in wanted.values() for name in names] == fc.__all__


def test_folders_are_listed_in_order() -> None:
    """The docstring lists the folders as the house rules know them."""
    assert re.findall(r"^    (\w+)  +\S", FILES, re.MULTILINE) == FOLDERS


def test_typed_uses_run() -> None:
    typed_use.arguments_keep_their_type()
    typed_use.hooks_and_policies_have_types()
