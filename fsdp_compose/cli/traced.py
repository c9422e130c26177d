"""What each rank of ``fsdp-compose trace`` runs: the script, recorded; and how ranks are joined.

python -m fsdp_compose.cli.traced FOLDER [-m] SCRIPT [ARG ...]
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdp_compose.cli.program import as_main
from fsdp_compose.report import Timeline, plot_memory, plot_timeline, trace


def main(folder: str, *words: str) -> None:
    """Run the script and write what this rank did, also where the script fails."""
    is_module = words[0] == "-m"
    script, *args = words[is_module:]
    del sys.path[0]  # the folder that this module was started in
    program = as_main(script, args, is_module)
    rank = int(os.environ.get("RANK", "0"))
    with trace() as timeline:
        try:
            program()
        finally:
            if timeline.spans:
                _write(timeline, rank, Path(folder))


def _write(timeline: Timeline, rank: int, folder: Path) -> None:
    """Write a rank's recording, and on rank 0 its pictures, where there is matplotlib."""
    timeline.rank = rank
    timeline.save(folder / f"rank{rank}.json")
    if rank == 0:
        with suppress(ImportError):
            plot_timeline(timeline, folder / "timeline.svg")
            plot_memory(timeline, folder / "memory.svg")


def finish_trace(out: Path, ranks: int) -> bool:
    """Join the recordings of all ranks into one file, and say where; False if there are none."""
    events: list[Any] = []
    for rank in range(ranks):
        part = out / f"rank{rank}.json"
        if part.is_file():
            events += json.loads(part.read_text("utf-8"))["traceEvents"]
            part.unlink()
    if not events:
        return False
    (out / "trace.json").write_text(json.dumps({"traceEvents": events}), "utf-8")
    print(f"{out / 'trace.json'}: open it in Perfetto (ui.perfetto.dev) or chrome://tracing")
    for name in ("timeline.svg", "memory.svg"):
        if (out / name).is_file():
            print(out / name)
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
