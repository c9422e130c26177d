"""Runs tests on a mutant in a forked process, and measures which tests reach which statement."""

from __future__ import annotations

import ast
import builtins
import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import json
import mmap
import os
import re
import resource
import select
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from common import ROOT
from mutations import Mutant, marked

TESTS = ROOT / "tests"
sys.path.insert(0, str(TESTS))
PACKAGE = ROOT / "fsdp_compose"
FOLDER = PACKAGE / "core"
OTHERS = (  # folders whose mutants --folder makes
    "layout", "base", "comm", "sharded", "buckets", "construct", "scopes", "optim", "report",
    "checkpoint", "attach",
)  # fmt: skip
HOME = ROOT / "build" / "mutants"

# What may notice a mutant: programs of the fuzzer by the size of their world, and files of tests.
PROGRAMS = {1: range(12), 2: range(240), 3: range(12), 4: range(10)}
FUZZER = "fuzzer"
FILES = (
    FUZZER, "tests/core", "tests/scopes", "tests/test_fuzz.py", "tests/construct", "tests/optim",
    "tests/report", "tests/simulation", "tests/comm", "tests/checkpoint", "tests/sharded",
    "tests/libraries", "tests/layout", "tests/cli",
)  # fmt: skip
DEAREST = 12.0  # seconds of processor time; a test that takes more is left out
ROUNDS = (2.0, 10.0)  # seconds of tests that are tried first; then the rest, up to the limit
OVERHEAD = 0.1  # seconds that each test costs besides, so that one that costs nothing is no bargain
AGAIN = 0.99, 0.8  # how much less a further test of the same file, of the same function is worth
SELDOM = 30.0  # how much more at most a test is worth that leads where few others do
OF_FUZZER = "fuzz "
UNWANTED = ["-p", "no:cacheprovider", "-m", "not cuda and not models"]
IMPORT, LIMIT, CRASH = "an error at import", "the time limit", "a crash"


class Changed(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Finds and loads one module, whose code is that of a syntax tree."""

    def __init__(self, name: str, path: Path, tree: ast.Module) -> None:
        super().__init__(name, str(path))
        self.tree = tree

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.name:
            return None
        return importlib.machinery.ModuleSpec(name, self, origin=self.path)

    def get_code(self, name: str) -> Any:
        return compile(ast.fix_missing_locations(self.tree), self.path, "exec")

    def exec_module(self, module: Any) -> None:
        module.__file__ = self.path
        super().exec_module(module)


def install(name: str, path: Path, tree: ast.Module) -> None:
    """Have this process import the module from ``tree``; it must not be imported yet."""
    assert name not in sys.modules, f"{name} is imported already"
    sys.meta_path.insert(0, Changed(name, path, tree))


def run_apart(work: Callable[[], Any], limit: float) -> Any:
    """What ``work`` returns in a forked process; ``LIMIT`` after so many seconds.

    That process and all that it started, which are one group, have ended on return.
    """
    HOME.mkdir(parents=True, exist_ok=True)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        with open(HOME / "output.txt", "wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        try:
            result = work()
        except BaseException as error:
            result = {"wrong": f"{type(error).__name__}: {error}"}
        os.write(writing, json.dumps(result).encode() + b"\n")
        os._exit(0)
    os.close(writing)
    try:
        result = _read(reading, limit)
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if isinstance(result, dict) and "wrong" in result:
        raise RuntimeError(f"{result['wrong']}; see {HOME / 'output.txt'}")
    return result


def _read(pipe: int, limit: float) -> Any:
    """The line of a pipe. Ranks that still run hold it open, so its end says nothing."""
    deadline, received = time.monotonic() + limit, b""
    while not received.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            return LIMIT
        part = os.read(pipe, 1 << 20)
        if not part:
            return CRASH
        received += part
    return json.loads(received)


# The tests


class Watch:
    """A plugin of pytest that runs chosen tests in a given order, and notes how each went."""

    def __init__(self, wanted: Sequence[str] = (), seen: Any = None) -> None:
        self.place = {test: i for i, test in enumerate(wanted)}
        self.seen = seen
        self.failed: str | None = None
        self.costs: dict[str, tuple[float, list[int]]] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.place:
            chosen = [item for item in items if self._place(item) is not None]
            items[:] = sorted(chosen, key=self._place)

    def _place(self, item: Any) -> int | None:
        """Where a test was asked for, by its name, without its parameters, or by its file."""
        names = item.nodeid, item.nodeid.split("[")[0], item.nodeid.split("::")[0]
        return next((self.place[name] for name in names if name in self.place), None)

    def pytest_runtest_setup(self, item: Any) -> None:
        if self.seen is not None:
            self.seen[:] = bytes(len(self.seen))
            self.started = processor_time()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid
        if self.seen is not None and report.when == "call" and report.passed:
            spent = processor_time() - self.started
            self.costs[report.nodeid] = spent, marks(self.seen)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and self.failed is None:
            self.failed = f"{report.nodeid} at collection"


def processor_time() -> float:
    """Seconds that this process and those that it started and awaited have computed."""
    own, others = (resource.getrusage(who) for who in (0, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


def marks(seen: Any) -> list[int]:
    return [i for i, byte in enumerate(seen[:]) if byte]


def pytest_run(files: Iterable[str], watch: Watch, *options: str) -> None:
    import pytest

    code = pytest.main(["-q", *UNWANTED, *options, *files], plugins=[watch])
    expected = pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED  # where all need a GPU
    if code not in expected and watch.failed is None:
        raise RuntimeError(f"pytest ended with {code!r}")


def program(name: str) -> str | None:
    """Run a program of the fuzzer; what goes wrong in it."""
    from fuzz import case_of, failure_of

    world, seed = map(int, name.removeprefix(OF_FUZZER).split(":"))
    try:
        return failure_of(case_of(seed, world), seed)
    except Exception as error:
        return repr(error)


def first_to_fail(tests: Sequence[str]) -> str | None:
    """Run programs of the fuzzer and tests, in this order; the first that fails."""
    for test in tests:
        if test.startswith(OF_FUZZER) and program(test) is not None:
            return test
    ids = [test for test in tests if not test.startswith(OF_FUZZER)]
    if not ids:
        return None
    watch = Watch(ids)
    pytest_run(dict.fromkeys(test.split("::")[0] for test in ids), watch, "-x")
    return watch.failed


# What reaches a statement


class Reach:
    """What each test costs and which statements it runs, kept in a file.

    Attributes:
        statements: their keys; a test's are noted by their numbers here.
        files: by file of tests, or programs of one size: a hash of its text, and by test the
            seconds of processor time that it takes and the numbers of the statements it runs.
            Statements are known by their text, so that what a test runs is mostly right after the
            engine changed, too; remove the file to measure all of them again.
    """

    def __init__(self, path: Path, sources: Sequence[Path]) -> None:
        self.path, self.sources = path, sources
        known = json.loads(path.read_text()) if path.exists() else {}
        self.statements: list[str] = known.get("statements", [])
        self.files: dict[str, Any] = known.get("files", {})
        self._index()

    def _index(self) -> None:
        self.numbers = {key: number for number, key in enumerate(self.statements)}
        self.costs: dict[str, float] = {}
        self.tests: dict[str, set[str]] = defaultdict(set)
        self.inside: dict[str, list[str]] = defaultdict(list)  # statements, by the function's name
        for key in self.statements:
            self.inside[key.split(" | ")[1].rpartition(".")[2]].append(key)
        for measured in self.files.values():
            for test, (cost, numbers) in measured["tests"].items():
                if cost <= DEAREST:
                    self.costs[test] = cost
                    for number in numbers:
                        self.tests[self.statements[number]].add(test)

    def count_unknown(self, mutants: Iterable[Mutant]) -> int:
        """How many statements of ``mutants`` were not there when tests were measured."""
        return len({m.statement for m in mutants if m.statement} - self.numbers.keys())

    def measure(self, folders: Sequence[str]) -> None:
        """Measure the tests of files that are new or changed since they were measured."""
        trees = {p: marked(name_in(p), parse(p), self._number) for p in self.sources}
        if FUZZER in folders:
            fuzzer = "".join(path.read_text() for path in sorted(TESTS.glob("fuzz*.py")))
            self._measure_each(FUZZER, repr(PROGRAMS) + fuzzer, trees, run_programs)
        paths = [files_in(ROOT / folder) for folder in folders if folder != FUZZER]
        for path in chain.from_iterable(paths):
            name = str(path.relative_to(ROOT))
            run = lambda watch, name=name: pytest_run([name], watch)  # noqa: E731
            self._measure_each(name, path.read_text(), trees, run)

    def _number(self, key: str) -> int:
        if key not in self.numbers:
            self.numbers[key] = len(self.statements)
            self.statements.append(key)
        return self.numbers[key]

    def _measure_each(
        self, name: str, text: str, trees: dict[Path, ast.Module], run: Callable[[Watch], None]
    ) -> None:
        digest = hashlib.sha256(text.encode()).hexdigest()
        if self.files.get(name, {}).get("digest") == digest:
            return
        seen = mmap.mmap(-1, len(self.statements))  # shared with what is forked from a test

        def work() -> dict[str, Any]:
            builtins._marked = seen  # type: ignore[attr-defined]
            for path, tree in trees.items():
                install(module_of(path), path, tree)
            watch = Watch(seen=seen)
            run(watch)
            return watch.costs

        costs = run_apart(work, 900.0)
        if not isinstance(costs, dict):
            print(f"{name}: not measured, {costs}", flush=True)
            return
        total = sum(cost for cost, _ in costs.values())
        print(f"{name}: {len(costs)} tests, {total:.0f} s", flush=True)
        self.files[name] = {"digest": digest, "tests": costs}
        known = {"statements": self.statements, "files": self.files}
        self.path.write_text(json.dumps(known))
        self._index()

    def of(self, mutant: Mutant, limit: float, passed: set[str], history: History) -> list[str]:
        """Tests that run the changed statement and have not ``passed``.

        Those come first that are likely to notice a mutant for what they cost; all of them
        together cost at most ``limit`` seconds. For a statement that was not there when tests were
        measured, those of its function; for what is outside any function, all.
        """
        if mutant.statement in self.numbers:
            found = self.tests[mutant.statement]
        else:
            around = f"{mutant.file} | {mutant.function} | " if mutant.statement else ""
            found = {
                t for key, tests in self.tests.items() if key.startswith(around) for t in tests
            }
        chosen: list[str] = []
        chance = partial(_raised, history.chances(mutant), self._factors(mutant, found))
        for test in self._in_order(found - passed, chance):
            if self.costs[test] <= limit:
                limit -= self.costs[test]
                chosen.append(test)
        return chosen

    def _factors(self, mutant: Mutant, found: set[str]) -> dict[str, float]:
        """Tests that lead where few others do tell most about a change of what leads there.

        That is into a block, or into parts of the functions that the changed statement names.
        """
        factors: dict[str, float] = {}
        words = set(re.findall(r"\w+", mutant.statement.rpartition(" | ")[2]))
        around = {mutant.function.rpartition(".")[2]}
        for key in chain(mutant.inner, *(self.inside[name] for name in words | around)):
            inner = self.tests[key] & found
            for test in inner:
                seldom = min(SELDOM, len(found) / len(inner))
                factors[test] = max(factors.get(test, 1.0), seldom)
        return factors

    def _in_order(self, tests: set[str], chance: Callable[[str], float]) -> list[str]:
        """By chance per second, where further tests of a file or a function count less."""
        worth = {test: chance(test) / (OVERHEAD + self.costs[test]) for test in tests}
        taken: Counter[str] = Counter()
        for test in sorted(tests, key=lambda test: (-worth[test], test)):
            for group, less in zip((file_of(test), test.split("[")[0]), AGAIN):
                worth[test] *= less ** taken[group]
                taken[group] += 1
        return sorted(tests, key=lambda test: (-worth[test], test))


def _raised(chance: Callable[[str], float], factors: dict[str, float], test: str) -> float:
    return chance(test) * factors.get(test, 1.0)


class History:
    """How often each test, and each file, noticed a mutant: of one function, and of all."""

    def __init__(self, outcomes: Iterable[dict[str, Any]] = ()) -> None:
        self.kills: Counter[tuple[str, str]] = Counter()
        self.tries: Counter[tuple[str, str]] = Counter()
        for outcome in outcomes:
            self.add(outcome)

    def add(self, outcome: dict[str, Any]) -> None:
        around = outcome["mutant"].rpartition(" | ")[0]
        killer = outcome["killer"]
        for place in ("", around):
            self.kills.update([(place, name) for name in (killer, file_of(killer)) if killer])
            for test in {*outcome["passed"], killer}:
                self.tries.update([(place, test), (place, file_of(test))])

    def chances(self, mutant: Mutant) -> Callable[[str], float]:
        """How likely a test is to notice ``mutant``, as far as others tell."""
        around = mutant.key.removesuffix(f" | {mutant.change}")

        def rate(place: str, name: str, guess: float, weight: float) -> float:
            kills, tries = self.kills[place, name], self.tries[place, name]
            return (kills + weight * guess) / (tries + weight)

        def chance(test: str) -> float:
            of_file = rate("", file_of(test), 0.1, 10.0)
            of_file = rate(around, file_of(test), of_file, 10.0)
            return rate(around, test, rate("", test, of_file, 10.0), 2.0)

        return chance


def file_of(test: str) -> str:
    return test.split(":")[0]


def run_programs(watch: Watch) -> None:
    """Run every program of ``PROGRAMS``, as tests of which each costs what it costs alone."""
    import fuzz  # noqa: F401  its own cost is nobody's

    for world, seeds in PROGRAMS.items():
        for seed in seeds:
            watch.pytest_runtest_setup(None)
            name = f"{OF_FUZZER}{world}:{seed}"
            if program(name) is None:
                watch.costs[name] = processor_time() - watch.started, marks(watch.seen)


# Mutants


def sources(guards: bool = False, others: Iterable[str] = ()) -> list[Path]:
    """The engine's files, with those of its guards, and those of other folders of the package."""
    paths = [*(FOLDER.rglob("*.py") if guards else FOLDER.glob("*.py"))]
    paths += [path for name in others for path in (PACKAGE / name).rglob("*.py")]
    return sorted(path for path in paths if path.name != "__init__.py")


def files_in(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("test_*.py"))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_in(path: Path) -> str:
    """What a file is called: in the engine's folder, or in the package if it is in another."""
    return path.relative_to(FOLDER if FOLDER in path.parents else PACKAGE).as_posix()


def path_of(name: str) -> Path:
    return PACKAGE / name if name.split("/")[0] in OTHERS else FOLDER / name


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def judge(
    mutant: Mutant, tree: ast.Module, name: str, path: Path, check: Callable[[], Any], limit: float
) -> str:
    """What ``check`` returns in a process that imports the mutant as module ``name``.

    Args:
        check: imports and tries the module; returns what failed, None or "" if nothing did.
        limit: seconds after which the answer is ``LIMIT``.
    """

    def work() -> Any:
        mutant.apply()  # to the copy of the tree that this process has
        install(name, path, tree)
        return check()

    return run_apart(work, limit) or ""


def check_engine(name: str, tests: Sequence[str]) -> str | None:
    try:
        importlib.import_module(name)
    except Exception:
        return IMPORT
    return first_to_fail(tests)


def in_rounds(tests: Sequence[str], costs: dict[str, float]) -> Iterator[list[str]]:
    """The tests in a few parts: most mutants fail in the first, which costs seconds."""
    total, rounds = 0.0, list(ROUNDS)
    part: list[str] = []
    for test in tests:
        part.append(test)
        total += costs[test]
        if rounds and total >= rounds[0]:
            rounds.pop(0)
            yield part
            part = []
    if part or not tests:  # the module is imported in any case
        yield part


def run_mutant(
    mutant: Mutant, tree: ast.Module, tests: Sequence[str], reach: Reach
) -> tuple[str, list[str]]:
    """Run tests until one fails in processes that import a mutant; which did, and what passed."""
    name, passed = module_of(path_of(mutant.file)), []
    for part in in_rounds(tests, reach.costs):
        limit = 40.0 + 8.0 * sum(reach.costs[test] for test in part)
        check = partial(check_engine, name, part)
        killer = judge(mutant, tree, name, path_of(mutant.file), check, limit)
        if killer:
            passed += part[: part.index(killer)] if killer in part else []
            return killer, passed
        passed += part
    return "", passed
