"""Runs every row for every library and writes the table."""

from __future__ import annotations

import argparse
import collections
import json
import re
from dataclasses import asdict
from pathlib import Path

import common

from .libraries import LIBRARIES
from .outcomes import CLEAR, EXACT, HANG, OUTCOMES, ROWS, SILENT, UNCLEAR, Row, Seen, run_row

NAMES = {"fsdp1": "FSDP1", "fsdp2": "FSDP2", "ddp": "DDP", "ours": "fsdp_compose"}
BAD = (UNCLEAR, HANG, SILENT)
Found = dict[str, Seen]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a pattern in the file, function, key or title")
    parser.add_argument("--libraries", nargs="+", default=list(LIBRARIES), choices=LIBRARIES)
    parser.add_argument(
        "--save", action="store_true", help="write results/conformance.md and .json"
    )
    options = parser.parse_args()
    from . import rows as _  # noqa: F401  fills ROWS

    chosen = [
        r
        for r in ROWS
        if re.search(options.only, f"{r.run.__module__} {r.run.__name__} {r.key} {r.title}", re.I)
    ]
    before = common.RESULTS / "conformance.json"
    found = _read(before) if options.save and len(chosen) < len(ROWS) else {}
    for case in chosen:
        seen = found.setdefault(case.name, {})
        seen.update({name: _run(case, name) for name in options.libraries})
        print(f"{case.key:8s} {case.title}", flush=True)
        for name in options.libraries:
            one = seen[name]
            print(f"    {name:6s} {one.outcome:14s} {_short(one.text, 400)}", flush=True)
    report = render([case for case in ROWS if case.name in found], found)
    print(report.split("\n\n## ")[0])
    if options.save:
        (common.RESULTS / "conformance.md").write_text(report)
        data = {
            case.name: {lib: asdict(found[case.name][lib]) for lib in found[case.name]}
            for case in ROWS
            if case.name in found
        }
        text = re.sub(r'/[^\s"\\]*?/site-packages/', "", json.dumps(data, indent=1))
        (common.RESULTS / "conformance.json").write_text(
            text + "\n"
        )  # without this machine's paths
    ours = [(case, found[case.name]["ours"]) for case in chosen if "ours" in found[case.name]]
    return int(any(seen.outcome in BAD and not case.limit for case, seen in ours))


def _read(path: Path) -> dict[str, Found]:
    """What the last run found, which rows that are not run again keep."""
    known = {case.name for case in ROWS}
    return {
        name: {lib: Seen(**one) for lib, one in seen.items()}
        for name, seen in json.loads(path.read_text()).items()
        if name in known
    }


def _run(case: Row, name: str) -> Seen:
    """What waits for too long is run again with more patience: the machine may be busy."""
    seen = run_row(case, name)
    return run_row(case, name, slower=2.5) if seen.outcome == HANG else seen


def _short(text: str, width: int) -> str:
    text = re.sub(r"/\S*/", "", " ".join(text.split()))
    return text if len(text) <= width else f"{text[:width]} ..."


def render(rows: list[Row], found: dict[str, Found]) -> str:
    """The table as Markdown: counts, outcomes, then what each error said."""
    libraries = [name for name in LIBRARIES if any(name in seen for seen in found.values())]
    counts = {
        lib: collections.Counter(seen[lib].outcome for seen in found.values()) for lib in libraries
    }
    summary = common.table(
        ["outcome", *(NAMES[lib] for lib in libraries)],
        [[outcome, *(str(counts[lib][outcome]) for lib in libraries)] for outcome in OUTCOMES],
    )
    lines = [
        [case.key, case.title, *(_cell(case, lib, found[case.name][lib]) for lib in libraries)]
        for case in rows
    ]
    table = common.table(["from", "behaviour", *(NAMES[lib] for lib in libraries)], lines)
    texts = []
    for case in rows:
        said = [
            f"- {NAMES[lib]}, {seen.outcome}: {_short(seen.text, 300)}"
            for lib, seen in found[case.name].items()
            if seen.outcome != EXACT
        ]
        if said:
            texts.append("\n".join([f"**{case.title}** (`{case.name}`)", "", *said]))
    return (
        "\n\n".join(
            [
                "# What the libraries do with the same program",
                f"{len(rows)} behaviours. `benchmarks/conformance/outcomes.py` states the rules by "
                "which a row is judged, and `benchmarks/conformance/rows/` has each row's program.",
                summary,
                common.machine(),
                "Command: `make conformance`",
                "## Each behaviour\n\nU: a row of what users ask for; D: a mistake that is to be "
                "diagnosed; T: a trap for whoever writes such a library; basic: anybody's. "
                "late: the error comes when the process group's timeout is over; limit: among the "
                "limits in the README.",
                table,
                "## What was said\n\nErrors are cut at 300 characters.",
                *texts,
            ]
        )
        + "\n"
    )


def _cell(case: Row, name: str, seen: Seen) -> str:
    if case.limit and name == "ours" and seen.outcome in BAD:
        return f"{seen.outcome} (limit)"
    return f"{seen.outcome} (late)" if seen.outcome == CLEAR and seen.late else seen.outcome
