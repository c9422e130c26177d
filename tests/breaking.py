"""Breaks the package on purpose, in a process that ends with it, and runs a test on the rest."""

from __future__ import annotations

import functools
import re
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from harness import RankFailure, run_ranks

TESTS = Path(__file__).parent

NOTICED = re.compile(r"AssertionError|DID NOT RAISE|RuntimeError|ShardedWeightError|SIGSEGV")
OWN_FAULT = re.compile(r"\b(Attribute|Import|Key|Name|Type|UnboundLocal)Error\b")
"""Of a break that fits the package no more."""

run_once = functools.cache(run_ranks)
"""A check of the whole package: once, also where several breaks must fail it."""

Break = Callable[[], object]


def replace(name: str, make: Callable[[Any], Any], home: str = "") -> None:
    """Put ``make(original)`` wherever the package has bound the function of this name.

    ``home`` is the file that defines it, where several define one of that name, or where nothing
    may have imported it yet.
    """
    if home:
        import_module(f"fsdp_compose.{home}")
    loaded = [vars(m) for key, m in sys.modules.items() if key.startswith("fsdp_compose.")]
    found = {n[name] for n in loaded if n["__name__"] == getattr(n.get(name), "__module__", None)}
    (original,) = (f for f in found if not home or f.__module__ == f"fsdp_compose.{home}")
    mutant = make(original)
    for names in loaded:
        if names.get(name) is original:
            names[name] = mutant


def put(home: Any, name: str, value: Any) -> Break:
    """Let ``home`` have another ``name``, which others have not imported from it."""
    return lambda: setattr(home, name, value)


def answer(value: Any, name: str, home: str) -> Break:
    """Let a function of the package return ``value`` whatever it is asked."""
    return lambda: replace(name, lambda original: lambda *args, **kwargs: value, home)


def wrap(name: str, home: str, make: Callable[..., Any]) -> Break:
    """Let a function of the package be ``make(original, *args)``."""
    return lambda: replace(
        name, lambda original: lambda *args, **kwargs: make(original, *args, **kwargs), home
    )


def load(file: str) -> Any:
    """A file of tests below tests/, as pytest imports it."""
    path = TESTS / file
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    return import_module(path.stem)


def failure_of(
    break_it: Callable[[], object], file: str, test: str, *given: Any, **fixtures: Any
) -> str | None:
    """How a test fails once ``break_it`` was called; None if it passes.

    Args:
        given: its parameters.
        fixtures: those of pytest that it may ask for, by name.
    """
    function = getattr(load(file), test)
    wanted = {k: v for k, v in fixtures.items() if k in signature(function).parameters}

    def run(rank: int) -> None:
        warnings.simplefilter("ignore")  # the test itself must notice
        break_it()
        function(*given, **wanted)

    try:
        run_ranks(run, 1, init=False)
    except RankFailure as failure:
        return str(failure)
    return None


def assert_noticed(found: tuple[Any, ...], **fixtures: Any) -> None:
    """Check that the test named by ``(break, file, test, *parameters)`` fails, as a test should."""
    failure = failure_of(*found, **fixtures)
    assert failure is not None, "the test passes"
    assert NOTICED.search(failure) and not OWN_FAULT.search(failure), failure
