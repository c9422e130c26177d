"""benchmarks/backward_memory.py finds again what its saved table and docs/limits.md say."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))

import backward_memory  # noqa: E402
from backward_memory import Net, compare, fsdp2  # noqa: E402


def read_saved() -> dict[str, float]:
    """By row of the newest saved table, how many per cent more this library holds."""
    text = max((BENCHMARKS / "results").glob("backward_memory-*.md")).read_text("utf-8")
    rows = [line.strip("| ").split("|") for line in text.splitlines() if line.endswith("% |")]
    return {row[0].strip(): float(row[-1].strip(" %")) for row in rows}


def test_a_backward_takes_what_the_table_says() -> None:
    """A plain one no more than FSDP2's; the second microbatch of ``no_sync`` somewhat more."""
    saved, steps = read_saved(), {"one backward": "one", "second microbatch in no_sync": "no_sync"}
    found = {name: compare(Net, fsdp2, way)[-1] for name, way in steps.items()}
    assert {name: float(more.strip(" %")) for name, more in found.items()} == {
        name: saved[name] for name in steps
    }
    assert saved["one backward"] <= 0 < saved["second microbatch in no_sync"] < 12


def test_the_limits_state_the_figures_of_the_table() -> None:
    """Every first row of a kind above FSDP2's or DDP's, as the page rounds it."""
    limits = (ROOT / "docs" / "limits.md").read_text("utf-8")
    section = limits.partition("## Memory")[2].partition("\n## ")[0]
    above = {name: more for name, more in read_saved().items() if more > 4.5}
    stated = [f"{more:.0f} %" for name, more in above.items() if not name.startswith("the same")]
    assert len(stated) >= 5 and all(f"({figure}" in section for figure in stated)
    assert backward_memory.RANKS == 8 and "on 8 ranks" in section
