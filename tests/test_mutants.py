"""The tool that counts which mutants of the engine its tests kill."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import mutants as tool
from mutant_server import compiled, false_killers, functions_of
from mutant_tests import LIMIT, OTHERS, judge, module_of, name_in, parse, path_of, sources
from mutations import mutants_of

SMALL = '''
def largest(numbers, least=0):
    """The largest number, and at least ``least``."""
    found, waiting = least, list(numbers)
    while waiting:
        number = waiting.pop()
        if number > found:
            found = number
        del number
    assert found is not None
    return found
'''
OUTCOMES = {
    "0 -> 1": "of none",
    "while waiting: -> break at its end": "of three",
    "while waiting: -> not run": "of three",
    "waiting -> not waiting": "pop from empty list",
    "number > found -> number >= found": "",  # an equal number is the same number
    "number > found -> not number > found": "of three",
    "remove: del number": "",
    "return found -> return None": "of none",
}


def test_forks_have_torch_and_not_the_package() -> None:
    """In the process of the tool, whose forks import a changed package each."""
    here = Path(__file__).parent
    script = "; ".join(
        [
            "import sys",
            f"sys.path[:0] = [{str(here.parent / 'benchmarks')!r}, {str(here)!r}]",
            "import mutants, torch_first",
            'parts = [name for name in sys.modules if name.startswith("fsdp_compose.")]',
            "print('torch._dynamo' in sys.modules, parts)",
        ]
    )
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    assert ran.stdout == "True []\n"


def check() -> str:
    """Which try of the small function goes wrong."""
    from small import largest

    try:
        if largest([]) != 0:
            return "of none"
    except IndexError as error:
        return str(error)
    return "" if largest([2, 3, 1]) == 3 else "of three"


def wait() -> None:
    while True:
        pass


def test_known_mutants_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a process of its own, so that the next one starts from the file as it is."""
    monkeypatch.setattr("mutant_tests.HOME", tmp_path)
    tree, path = ast.parse(SMALL), tmp_path / "small.py"
    mutants = mutants_of("small.py", tree)
    found = {m.change: judge(m, tree, "small", path, check, 20.0) for m in mutants}
    assert found == OUTCOMES
    assert judge(mutants[0], tree, "small", path, wait, 0.2) == LIMIT
    assert (
        "small" not in sys.modules
        and ast.unparse(tree).split() == ast.unparse(ast.parse(SMALL)).split()
    )


def test_functions_are_changed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but what runs at import, here a default, for which the module is imported anew."""
    tree, path, small = ast.parse(SMALL), Path("small.py"), ModuleType("small")
    before = compiled(tree, path)
    exec(before, vars(small))
    monkeypatch.setitem(sys.modules, "small", small)
    for mutant in mutants_of("small.py", tree):
        with mutant.applied():
            changed = functions_of(before, compiled(ast.fix_missing_locations(tree), path))
        if mutant.change == "0 -> 1":
            assert changed is None
            continue
        assert changed is not None
        ((old, new),) = changed
        assert old == small.largest.__code__
        monkeypatch.setattr(small.largest, "__code__", new)
        assert check() == OUTCOMES[mutant.change]
        monkeypatch.setattr(small.largest, "__code__", old)


def test_explained_mutants_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What explains a mutant that is not generated any more is refused."""
    paths = sources(guards=True, others=OTHERS)
    assert [path_of(name_in(path)) for path in paths] == paths
    assert {"fsdp_compose.core.state", "fsdp_compose.optim.clip"} < {*map(module_of, paths)}
    mutants = [m for path in paths for m in mutants_of(name_in(path), parse(path))]
    assert len({m.key for m in mutants}) == len(mutants) > 1000
    assert all(reason.reason for reason in tool.read_reasons(mutants).values())
    stale = [
        {"file": "schedule.py", "function": "", "change": "", "observable": True, "reason": ""}
    ]
    monkeypatch.setattr(tool, "EXPLAINED", tmp_path / "explained.json")
    tool.EXPLAINED.write_text(json.dumps(stale))
    with pytest.raises(SystemExit, match="no mutant is"):
        tool.read_reasons(mutants)


def test_equivalent_mutants_do_not_count() -> None:
    """Neither for the score nor against it, unless a test kills one: then its reason is wrong."""
    mutants = mutants_of("small.py", ast.parse(SMALL))
    outcomes = {m.key: {"killer": OUTCOMES[m.change], "passed": []} for m in mutants}
    (hidden,) = (m.key for m in mutants if ">=" in m.change)
    reasons = {hidden: tool.Reason(hidden, False, "An equal number is the same number.")}
    report = tool.Report(mutants, outcomes, reasons)
    assert report.score(mutants) == (8, 6, 1) and not report.stale()
    outcomes[hidden]["killer"] = "of three"
    assert report.stale() == [hidden]
    low, high = tool.interval(90, 100)
    assert 0.8255 < low < 0.8257 and 0.9447 < high < 0.9449


def test_what_fails_anyway_kills_nothing(tmp_path: Path) -> None:
    done = {name: {"mutant": name, "killer": name, "passed": []} for name in ("sound", "flaky")}
    tool.drop_false_kills(tmp_path / "outcomes", done, {"flaky"})
    assert tool.read_outcomes(tmp_path / "outcomes") == done == {"sound": done["sound"]}
    server: Any = SimpleNamespace(reach=SimpleNamespace(costs={"sound": 1.0, "flaky": 1.0}))
    server.first_to_fail = lambda mutant, tests: "flaky" if "flaky" in tests else ""
    killers = ["", LIMIT, "test_small.py at collection", "sound", "flaky"]
    assert false_killers(server, killers) == {"flaky"}
