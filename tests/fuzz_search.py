"""Runs many seeds in worker processes, keeps what was run in a file, and makes a table of it.

python tests/fuzz_search.py fuzz.jsonl      # the table of what a log says
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CHUNK = 200  # seeds that one process runs, so that nothing of thousands of programs piles up
PATIENCE = 600  # seconds for one program, shrinking included


@dataclass(frozen=True)
class Found:
    """A program that was run; ``failure`` is empty where nothing is wrong."""

    seed: int
    world: int
    fault: str
    backend: str
    operations: Sequence[str]
    failure: str


@dataclass
class Totals:
    """What was run, in numbers; one line of a log holds those of a chunk of seeds."""

    first: int
    end: int
    commit: str
    seconds: float = 0.0
    programs: int = 0
    worlds: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    backends: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, found: Found) -> None:
        self.programs += 1
        self.worlds[str(found.world)] += 1
        self.faults[found.fault] += 1
        self.backends[found.backend] += 1
        self.operations.update(found.operations)
        if found.failure:
            self.failures.append(found.failure)

    def unite(self, other: Totals) -> None:
        self.programs += other.programs
        self.seconds += other.seconds
        for name in ("worlds", "faults", "backends", "operations"):
            getattr(self, name).update(getattr(other, name))
        self.failures += other.failures


def seeds_of(texts: Iterable[str]) -> list[range]:
    """Ranges of seeds, each no longer than a chunk, of numbers and ranges ``a-b`` (without b)."""
    chunks = []
    for text in texts:
        first, _, last = text.replace(":", "-").partition("-")
        end = int(last) if last else int(first) + 1
        for start in range(int(first), end, CHUNK):
            chunks.append(range(start, min(start + CHUNK, end)))
    return chunks


def commit() -> str:
    """The commit that is checked out, with a + where files were changed since."""
    git = ["git", "-C", str(ROOT)]
    name = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    changed = subprocess.check_output([*git, "status", "--porcelain", "fsdp_compose", "tests"])
    return name + "+" * bool(changed)


def read_log(path: str | None) -> list[Totals]:
    """The lines of a log, if there is one."""
    if path is None or not Path(path).exists():
        return []
    found = []
    for line in Path(path).read_text().splitlines():
        values: dict[str, Any] = json.loads(line)
        for name in ("worlds", "faults", "backends", "operations"):
            values[name] = Counter(values[name])
        found.append(Totals(**values))
    return found


def run_in_workers(
    try_seed: Callable[[int], Found],
    chunks: Sequence[range],
    workers: int,
    log: str | None,
    deadline: float,
) -> int:
    """Run every seed of ``chunks`` that ``log`` does not have yet; 0 if none failed."""
    done = {(line.first, line.end) for line in read_log(log)}
    left = [chunk for chunk in chunks if (chunk.start, chunk.stop) not in done]
    name, running, status = commit(), set[int](), 0
    while left or running:
        while left and len(running) < workers and time.monotonic() < deadline:
            running.add(_start_worker(try_seed, left.pop(0), name, log))
        if not running:
            break
        pid, code = os.wait()
        running.remove(pid)
        status |= code != 0
    return int(status)


def _start_worker(
    try_seed: Callable[[int], Found], seeds: range, name: str, log: str | None
) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        status = _run_chunk(try_seed, seeds, name, log)
    finally:
        os._exit(status)
    return 0


def _run_chunk(try_seed: Callable[[int], Found], seeds: range, name: str, log: str | None) -> int:
    began = time.monotonic()
    totals = Totals(seeds.start, seeds.stop, name)
    signal.signal(signal.SIGALRM, _stop)
    for seed in seeds:
        signal.alarm(PATIENCE)
        found = try_seed(seed)
        signal.alarm(0)
        totals.add(found)
        if found.failure:
            print(found.failure, flush=True)
    totals.seconds = round(time.monotonic() - began, 1)
    if log is not None:
        with open(log, "a") as file:
            file.write(json.dumps(vars(totals)) + "\n")
    rate = totals.programs / max(totals.seconds, 0.1)
    print(
        f"seeds {seeds.start}-{seeds.stop}: {len(totals.failures)} failed, {rate:.1f}/s", flush=True
    )
    return int(bool(totals.failures))


def _stop(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"a program takes longer than {PATIENCE} seconds")


def table(path: str) -> str:
    """What a log says, as a table."""
    lines = read_log(path)
    total = Totals(0, 0, "")
    for line in lines:
        total.unite(line)
    spans: list[list[int]] = []
    for line in sorted(lines, key=lambda line: line.first):
        if spans and spans[-1][1] == line.first:
            spans[-1][1] = line.end
        else:
            spans.append([line.first, line.end])

    def words(counts: Counter[str], by_number: bool = False) -> str:
        order = sorted(counts, key=int) if by_number else [name for name, _ in counts.most_common()]
        return ", ".join(f"{name}: {counts[name]}" for name in order)

    rows = {
        "seeds": ", ".join(f"{first}-{end}" for first, end in spans),
        "programs": str(total.programs),
        "by ranks": words(total.worlds, by_number=True),
        "by fault": words(total.faults),
        "by kind of group": words(total.backends),
        "operations": f"{sum(total.operations.values())}: {words(total.operations)}",
        "findings": str(len(total.failures)),
        "seconds of one process": f"{total.seconds:.0f}",
        "commits": ", ".join(sorted({line.commit for line in lines})),
    }
    return "\n".join(
        ["| what | run |", "| --- | --- |", *(f"| {k} | {v} |" for k, v in rows.items())]
    )


if __name__ == "__main__":
    print(table(sys.argv[1]))
