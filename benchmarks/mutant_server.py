"""Runs tests on mutants in forks of one process that has imported and collected all of them.

What a mutant costs is then what its tests cost. The functions that a mutant changes get its code
where they are; a mutant of what runs at import cannot be tried so.
"""

from __future__ import annotations

import ast
import gc
import inspect
import json
import os
import select
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from mutant_tests import (
    CRASH,
    FUZZER,
    HOME,
    LIMIT,
    OF_FUZZER,
    UNWANTED,
    Reach,
    path_of,
    program,
)
from mutations import Mutant

PATIENCE = 30.0, 8.0  # seconds that a test may take, and how often what it took when measured


def functions_of(old: CodeType, new: CodeType) -> list[tuple[CodeType, CodeType]] | None:
    """The functions whose code differs, each as it was and as it is.

    None where what runs at import differs too: a default, a constant of a class, a decorator.
    """
    found: list[tuple[CodeType, CodeType]] = []
    if _outer(old) != _outer(new):
        return None
    for before, after in zip(_inner(old), _inner(new), strict=True):
        if before == after:
            continue
        if before.co_flags & inspect.CO_OPTIMIZED:
            found.append((before, after))
            continue
        inner = functions_of(before, after)  # a class
        if inner is None:
            return None
        found += inner
    return found


def _inner(code: CodeType) -> list[CodeType]:
    return [const for const in code.co_consts if isinstance(const, CodeType)]


def _outer(code: CodeType) -> Any:
    """What a code does apart from the functions and classes in it."""
    consts = [const for const in code.co_consts if not isinstance(const, CodeType)]
    return code.co_code, code.co_names, repr(consts), len(code.co_consts)


def compiled(tree: Any, path: Path) -> CodeType:
    return compile(tree, str(path), "exec", dont_inherit=True)


def place(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_name, code.co_firstlineno


def all_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in _inner(code):
        yield from all_codes(inner)


class Serving:
    """A plugin of pytest that forks a process for each request, once tests are collected."""

    def __init__(
        self, mutants: Sequence[Mutant], trees: dict[str, Any], requests: Any, answers: Any
    ) -> None:
        self.mutants, self.trees = mutants, trees
        self.requests, self.answers = requests, answers
        self.failed = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed = report.nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self.functions: dict[Any, list[FunctionType]] = {}
        for each in gc.get_objects():
            if type(each) is FunctionType:  # some answer isinstance with a warning
                self.functions.setdefault(place(each.__code__), []).append(each)
        gc.collect()
        gc.freeze()  # forks leave these objects where they are
        for line in self.requests:
            request = json.loads(line)
            answer = self.answer(**request)
            self.answers.write(json.dumps(answer) + "\n")
            self.answers.flush()
        return True

    def answer(self, mutant: int | None, tests: list[str], limits: list[float]) -> Any:
        """The test that fails on a mutant, or None where it has to be imported."""
        pairs = [] if mutant is None else self._change(self.mutants[mutant])
        if pairs is None:
            return None
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._try(pairs, tests, writing)
        os.close(writing)
        try:
            killer = _follow(reading, limits)
        finally:
            os.close(reading)
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return killer

    def _change(self, mutant: Mutant) -> list[tuple[FunctionType, CodeType]] | None:
        """The functions that a mutant changes, with their code; None if it cannot be done here."""
        path, tree = path_of(mutant.file), self.trees[mutant.file]
        with mutant.applied():
            new = compiled(ast.fix_missing_locations(tree), path)
        changed = functions_of(compiled(tree, path), new)
        if not changed:
            return None
        pairs = []
        for before, after in changed:
            inner = {place(code): code for code in all_codes(after)}
            for where in {place(code) for code in all_codes(before)} & inner.keys():
                pairs += [(f, inner[where]) for f in self.functions.get(where, ())]
        return pairs if pairs and all(_fits(*pair) for pair in pairs) else None

    def _try(self, pairs: Any, tests: list[str], writing: int) -> None:
        """In a process of its own: run the tests until one fails, and tell of each."""
        os.setsid()
        with open(HOME / "output.txt", "wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        try:
            for function, code in pairs:
                function.__code__ = code
            for test in tests:
                if self._fails(test):
                    os.write(writing, b"x")
                    os._exit(0)
                os.write(writing, b".")
        finally:
            os._exit(0)

    def _fails(self, test: str) -> bool:
        if test.startswith(OF_FUZZER):
            return program(test) is not None
        item = self.items.get(test)
        if item is None:  # measured, and gone since
            return False
        self.failed = ""
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return bool(self.failed)


def _fits(function: FunctionType, code: CodeType) -> bool:
    return len(function.__code__.co_freevars) == len(code.co_freevars)


def _follow(pipe: int, limits: list[float]) -> int | str:
    """How many tests passed before one failed; -1 if none did. Ranks may hold the pipe open."""
    for number, limit in enumerate(limits):
        if not select.select([pipe], [], [], limit)[0]:
            return LIMIT
        told = os.read(pipe, 1)
        if not told:
            return CRASH
        if told == b"x":
            return number
    return -1


class Server:
    """The process that has collected the tests, which tries mutants on request."""

    def __init__(self, reach: Reach, mutants: Sequence[Mutant], trees: dict[str, Any]) -> None:
        self.reach = reach
        self.numbers = {mutant.key: number for number, mutant in enumerate(mutants)}
        from_here, to_there = os.pipe()
        from_there, to_here = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(to_there)
            os.close(from_there)
            serving = Serving(mutants, trees, os.fdopen(from_here), os.fdopen(to_here, "w"))
            with open(HOME / "server.txt", "wb") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            try:
                import fuzz  # noqa: F401

                files = sorted(set(reach.files) - {FUZZER})
                pytest.main(["-q", "-s", *UNWANTED, *files], plugins=[serving])
            finally:
                os._exit(0)
        os.close(from_here)
        os.close(to_here)
        self.requests, self.answers = os.fdopen(to_there, "w"), os.fdopen(from_there)

    def first_to_fail(self, mutant: Mutant | None, tests: Sequence[str]) -> str | None:
        """The first test that fails on a mutant, "" if all pass; None if it must be imported."""
        at_least, times = PATIENCE
        limits = [at_least + times * self.reach.costs[test] for test in tests]
        number = None if mutant is None else self.numbers[mutant.key]
        request = {"mutant": number, "tests": list(tests), "limits": limits}
        self.requests.write(json.dumps(request) + "\n")
        self.requests.flush()
        line = self.answers.readline()
        answer = json.loads(line) if line else {"wrong": "the tests were not collected"}
        if isinstance(answer, dict):
            raise SystemExit(f"{answer['wrong']}; see {HOME / 'server.txt'}")
        if isinstance(answer, int):
            return "" if answer < 0 else tests[answer]
        return answer

    def end(self) -> None:
        self.requests.close()
        os.waitpid(self.pid, 0)


def check_unchanged(server: Server) -> None:
    """The engine as it is passes the cheap tests in the place where mutants run."""
    costs = server.reach.costs
    failed = server.first_to_fail(None, sorted(costs, key=costs.__getitem__)[:40])
    if failed:
        raise SystemExit(f"without any change, {failed} fails; see {HOME / 'output.txt'}")


def false_killers(server: Server, killers: Iterable[str]) -> set[str]:
    """Tests that fail without any change, so that what they noticed is no mutant."""
    found: set[str] = set()
    tests = sorted(server.reach.costs.keys() & set(killers))  # others are no tests
    while failed := server.first_to_fail(None, tests):
        tests = tests[tests.index(failed) + 1 :]
        found.add(failed)
    return found
