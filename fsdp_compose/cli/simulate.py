"""``fsdp-compose run --simulate``: every rank of a script in this process, for ``pdb``."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

from fsdp_compose.cli.program import as_main
from fsdp_compose.simulation.simulate import SimulationError, run_program


def run_simulated(
    script: str, args: Sequence[str], ranks: int, seed: int, is_module: bool = False
) -> int:
    """Run ``script`` on simulated ranks; 0, or 1 where a rank failed."""
    program = as_main(script, args, is_module)

    def run() -> None:
        try:
            program()
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
