"""What each rank of ``fsdp-compose trace`` runs: the script, recorded.

python -m fsdp_compose.cli.traced FOLDER SCRIPT [ARG ...]
"""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import suppress
from pathlib import Path

from fsdp_compose.report import plot_memory, plot_timeline, trace


def main(folder: str, script: str, *args: str) -> None:
    """Run the script and write what this rank did, also where the script fails."""
    sys.argv = [script, *args]
    sys.path[0] = str(Path(script).resolve().parent)
    rank = int(os.environ.get("RANK", "0"))
    with trace() as timeline:
        try:
            runpy.run_path(script, run_name="__main__")
        finally:
            if timeline.spans:
                timeline.rank = rank
                timeline.save(Path(folder) / f"rank{rank}.json")
                if rank == 0:
                    with suppress(ImportError):
                        plot_timeline(timeline, Path(folder) / "timeline.svg")
                        plot_memory(timeline, Path(folder) / "memory.svg")


if __name__ == "__main__":
    main(*sys.argv[1:])
