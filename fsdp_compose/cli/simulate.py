"""``fsdp-compose run --simulate``: every rank of a script in this process, for ``pdb``."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from fsdp_compose.simulation.simulate import SimulationError, run_program


def run_simulated(script: Path, args: Sequence[str], ranks: int, seed: int) -> int:
    """Run ``script`` on simulated ranks; 0, or 1 where a rank failed."""
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.resolve().parent))

    def run() -> None:
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise RuntimeError(f"the script ended with {end.code!r}") from end

    try:
        run_program(run, ranks, seed, (), has_group=False)
    except SimulationError as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print(f"fsdp-compose: {error}", file=sys.stderr)
        return 1
    return 0
