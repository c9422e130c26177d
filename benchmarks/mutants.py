"""How many small changes of the engine its tests notice, and which ones they do not.

    python benchmarks/mutants.py --sample 300 --seed 0     # that many, drawn from all files
    python benchmarks/mutants.py --file schedule.py        # all mutants of one file
    python benchmarks/mutants.py --folder optim            # not of the engine, of another folder
    python benchmarks/mutants.py --only-survivors          # further tests for those that survived
    python benchmarks/mutants.py --save                    # the table of what was run so far

Each mutant runs in a process of its own, forked from this one, which has imported torch and not the
package: a finder gives it the changed module, and no file is touched. The tests that reach the
changed statement run until one fails; those come first that noticed most other mutants, of the
same function above all, for what they cost. What reaches a statement is measured once (--map), by a
mark before every statement.

What a mutant came to is kept in outcomes.jsonl of build/mutants, so that a run goes on where it was
ended. For a changed engine rename it to history.jsonl, which only orders the tests. Survivors
are explained in mutants_explained.json: each says whether the change can be observed at all. The
score is killed / (all - those that cannot be observed).
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import add_output_options, machine, publish, table
from mutant_server import Server, check_unchanged, false_killers
from mutant_tests import (
    CRASH,
    FILES,
    HOME,
    IMPORT,
    LIMIT,
    OF_FUZZER,
    OTHERS,
    ROOT,
    History,
    Reach,
    name_in,
    parse,
    run_mutant,
    sources,
)
from mutations import Mutant, mutants_of

EXPLAINED = Path(__file__).parent / "mutants_explained.json"


@dataclass(frozen=True)
class Reason:
    """Why a mutant survives, and whether a test could observe it at all."""

    key: str
    observable: bool
    reason: str


def read_reasons(mutants: Sequence[Mutant]) -> dict[str, Reason]:
    """The explained mutants by key; raises where one of them is not generated any more."""
    keys, found = {mutant.key for mutant in mutants}, {}
    for entry in json.loads(EXPLAINED.read_text()):
        key = f"{entry['file']} | {entry['function']} | {entry['change']}"
        if any(mutant.file == entry["file"] for mutant in mutants) and key not in keys:
            raise SystemExit(f"{EXPLAINED.name}: no mutant is {key!r}")
        found[key] = Reason(key, entry["observable"], entry["reason"])
    return found


def read_outcomes(path: Path) -> dict[str, dict[str, Any]]:
    """The last outcome of each mutant that was run, by key."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {outcome["mutant"]: outcome for outcome in map(json.loads, lines)}


def drop_false_kills(path: Path, done: dict[str, dict[str, Any]], killers: set[str]) -> None:
    """Forget mutants that only tests noticed which fail in any case; they are run again."""
    for key in [key for key, outcome in done.items() if outcome["killer"] in killers]:
        print(f"run again: {done.pop(key)['killer']} fails without {key} too", flush=True)
    if killers:
        path.write_text("".join(json.dumps(outcome) + "\n" for outcome in done.values()))


def kind_of(killer: str) -> str:
    """Who killed a mutant, in a few words."""
    if killer.startswith(OF_FUZZER):
        return "a program of the fuzzer"
    if "test_schedule.py" in killer:
        return "the exploration of the schedule"
    return killer if killer in (IMPORT, LIMIT, CRASH) else "a test"


@dataclass
class Report:
    """Counts what came of the mutants that were run."""

    mutants: Sequence[Mutant]
    outcomes: dict[str, dict[str, Any]]
    reasons: dict[str, Reason]

    def ran(self) -> list[Mutant]:
        return [mutant for mutant in self.mutants if mutant.key in self.outcomes]

    def survivors(self) -> list[Mutant]:
        return [mutant for mutant in self.ran() if not self.outcomes[mutant.key]["killer"]]

    def score(self, mutants: Sequence[Mutant]) -> tuple[int, int, int]:
        """How many ran, were killed, and survive because nothing can observe them."""
        ran = [m for m in mutants if m.key in self.outcomes]
        killed = sum(bool(self.outcomes[m.key]["killer"]) for m in ran)
        hidden = [m for m in ran if m.key in self.reasons and not self.reasons[m.key].observable]
        return len(ran), killed, sum(not self.outcomes[m.key]["killer"] for m in hidden)

    def row(self, name: str, mutants: Sequence[Mutant]) -> list[str]:
        ran, killed, hidden = self.score(mutants)
        score = f"{100 * killed / (ran - hidden):.1f} %" if ran > hidden else ""
        left = ran - killed - hidden
        return [name, *map(str, (len(mutants), ran, killed, hidden, left)), score]

    def counts(self, title: str, attribute: str) -> str:
        groups: dict[str, list[Mutant]] = defaultdict(list)
        for mutant in self.mutants:
            groups[getattr(mutant, attribute)].append(mutant)
        rows = [self.row(name, members) for name, members in sorted(groups.items())]
        headers = [title, "mutants", "run", "killed", "equivalent", "survive", "score"]
        return table(headers, [*rows, self.row("all", self.mutants)])

    def killers(self) -> str:
        found = Counter(kind_of(self.outcomes[m.key]["killer"]) for m in self.ran()
                        if self.outcomes[m.key]["killer"])  # fmt: skip
        return table(["killed by", "mutants"], [[k, str(n)] for k, n in found.most_common()])

    def explained(self, observable: bool) -> str:
        lines = []
        for mutant in self.survivors():
            passed = len(self.outcomes[mutant.key]["passed"])
            unknown = f"Not explained: {passed} tests passed on it, others were not tried."
            reason = self.reasons.get(mutant.key, Reason(mutant.key, True, unknown))
            if reason.observable == observable:
                change = mutant.change.replace("|", "\\|")
                where = f"{mutant.file}, {mutant.function or 'module'}"
                lines.append(f"- {where}: `{change}`. {reason.reason}")
        return "\n".join(lines) or "None."

    def stale(self) -> list[str]:
        """Explained mutants that a test kills."""
        return [
            m.key for m in self.ran() if m.key in self.reasons and self.outcomes[m.key]["killer"]
        ]


def interval(killed: int, of: int) -> tuple[float, float]:
    """Wilson's interval, in which the share of a large sample lies with a chance of 95 %."""
    z, share, of = 1.96, killed / max(1, of), max(1, of)
    middle, half = (
        share + z * z / (2 * of),
        z * math.sqrt(share * (1 - share) / of + (z / of) ** 2 / 4),
    )
    return (middle - half) / (1 + z * z / of), (middle + half) / (1 + z * z / of)


def report_text(report: Report) -> list[str]:
    ran, killed, hidden = report.score(report.mutants)
    low, high = interval(killed, ran - hidden)
    return [
        f"{killed} of {ran} mutants were killed: {100 * killed / max(1, ran):.1f} %. "
        f"{hidden} of those that survive are equivalent: nothing can observe the change. "
        f"Without them the score is {100 * killed / max(1, ran - hidden):.1f} %; of a sample that "
        f"no test was written for, that of all mutants lies between {100 * low:.1f} and "
        f"{100 * high:.1f} % with a chance of 95 %.",
        "A survivor that is not explained passed the tests that were tried on it, cheap ones "
        "first, and not all that reach it: the score is at least this.",
        report.counts("file", "file"),
        report.counts("change", "kind"),
        report.killers(),
        "## Survivors that a test could notice\n\n" + report.explained(observable=True),
        "## Equivalent\n\n" + report.explained(observable=False),
        machine(),
    ]


def choose(mutants: list[Mutant], options: argparse.Namespace, done: Any) -> list[Mutant]:
    """The mutants that the options ask for."""
    chosen = [m for m in mutants if not options.file or m.file in options.file]
    chosen = [m for m in chosen if options.only in m.key]
    if options.sample is not None and options.sample < len(chosen):
        drawn = set(random.Random(options.seed).sample(range(len(chosen)), options.sample))
        chosen = [mutant for i, mutant in enumerate(chosen) if i in drawn]
    if options.only_survivors:
        chosen = [m for m in chosen if m.key in done and not done[m.key]["killer"]]
    return chosen


@dataclass
class Run:
    """Runs tests on mutants, one after another."""

    trees: dict[str, ast.Module]
    reach: Reach
    options: argparse.Namespace
    server: Server

    def each(self, waiting: Sequence[Mutant], done: dict[str, Any], path: Path) -> None:
        """Add what comes of each mutant to the file at ``path``, until the time is over."""
        started = time.monotonic()
        history = History([*read_outcomes(HOME / "history.jsonl").values(), *done.values()])
        for i, mutant in enumerate(waiting):
            if self.options.minutes and time.monotonic() - started > 60 * self.options.minutes:
                break
            outcome = self.one(mutant, history, done.get(mutant.key, {}).get("passed", ()))
            history.add(outcome)
            with path.open("a") as file:
                file.write(json.dumps(outcome) + "\n")
            if not outcome["killer"]:
                print(f"{i + 1}/{len(waiting)} survives {len(outcome['passed'])} tests: "
                      f"{mutant.key} (line {mutant.line})", flush=True)  # fmt: skip

    def one(self, mutant: Mutant, history: History, passed: Sequence[str]) -> dict[str, Any]:
        """Run tests on a mutant, besides those that it passed before, until one fails."""
        started = time.monotonic()
        tests = self.reach.of(mutant, self.options.budget, set(passed), history)
        if self.options.tests:
            tests = [t for t in self.reach.costs if t.startswith(tuple(self.options.tests))]
        killer = self.server.first_to_fail(mutant, tests)
        if killer is None:
            killer, now = run_mutant(mutant, self.trees[mutant.file], tests, self.reach)
        else:
            now = tests[: tests.index(killer)] if killer in tests else tests if not killer else []
        seconds = round(time.monotonic() - started, 1)
        kept = [*passed, *now]
        return {"mutant": mutant.key, "killer": killer, "passed": kept, "seconds": seconds}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, help="this many, drawn from all; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--file", action="append", help="a file of the folder; default: all")
    parser.add_argument("--only", default="", help="mutants whose text contains this")
    parser.add_argument("--tests", nargs="+", default=(), help="run tests whose names begin so")
    parser.add_argument("--guards", action="store_true", help="the files of guards/ too")
    parser.add_argument("--folder", action="append", choices=OTHERS, help="instead of the engine")
    parser.add_argument("--only-survivors", action="store_true", help="go on with further tests")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tests for a mutant")
    parser.add_argument("--minutes", type=float, help="end after so long; 0: the table alone")
    parser.add_argument("--map", nargs="*", metavar="FOLDER", help="measure tests; then end")
    add_output_options(parser)
    options = parser.parse_args(arguments)
    paths = sources(options.guards)
    if options.folder:
        paths = [path for path in sources(others=options.folder) if path not in paths]
    files = [name_in(path) for path in paths]
    for name in options.file or ():
        if name not in files:
            parser.error(f"--file {name}: none of {', '.join(files)}")
    for folder in options.map or ():
        if folder not in FILES and not (ROOT / folder).exists():
            parser.error(f"--map {folder}: not there; give folders such as tests/core")
    import torch_first  # noqa: F401  # for all forks; not the package, which each has changed

    HOME.mkdir(parents=True, exist_ok=True)
    reach = Reach(HOME / "reach.json", sources(guards=True, others=OTHERS))
    if options.map is not None or not reach.costs:
        reach.measure(options.map or FILES)
    if options.map is not None:
        return 0
    trees = {name_in(path): parse(path) for path in paths}
    mutants = [mutant for name, tree in trees.items() for mutant in mutants_of(name, tree)]
    reasons, path = read_reasons(mutants), HOME / "outcomes.jsonl"
    done = read_outcomes(path)
    chosen = choose(mutants, options, done)
    waiting = [m for m in chosen if options.only_survivors or options.tests or m.key not in done]
    random.Random(0).shuffle(waiting)  # an interrupted run is a sample of all files
    if options.minutes == 0.0:
        waiting = []
    if waiting:
        newer = reach.count_unknown(mutants)
        print(f"{len(waiting)} mutants, {len(reach.costs)} tests; of {newer} statements newer than "
              "the last --map the tests of their functions run", flush=True)  # fmt: skip
        run = Run(trees, reach, options, Server(reach, mutants, trees))
        check_unchanged(run.server)
        run.each(waiting, done, path)
        done = read_outcomes(path)
        killers = [done[mutant.key]["killer"] for mutant in waiting if mutant.key in done]
        drop_false_kills(path, done, false_killers(run.server, killers))
        run.server.end()
    report = Report(chosen, done, reasons)
    publish(
        "mutants",
        options,
        report_text(report),
        {m.key: report.outcomes[m.key] for m in report.ran()},
    )
    for key in report.stale():
        print(f"{EXPLAINED.name}: {key!r} is killed by {report.outcomes[key]['killer']}")
    return bool(report.stale())


if __name__ == "__main__":
    sys.exit(main())
