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
    """Run ``script`` on simulated ranks; 0, or the exit code of the first rank that failed."""
    program = as_main(script, args, is_module)

    def run() -> None:
        try:
            program()
        except SystemExit as end:
            if end.code not in (None, 0):
                raise _Ended(end.code) from None

    try:
        run_program(run, ranks, seed, (), has_group=False)
    except SimulationError as error:
        cause = error.__cause__
        if isinstance(cause, _Ended):
            print(f"fsdp-compose: rank {error.rank} of {ranks}: {cause}", file=sys.stderr)
            return cause.code if isinstance(cause.code, int) else 1
        if cause is not None:
            traceback.print_exception(cause)
        print(f"fsdp-compose: {error}", file=sys.stderr)
        return 1
    return 0


class _Ended(RuntimeError):
    """A script called ``sys.exit`` with something that says it failed."""

    def __init__(self, code: object) -> None:
        super().__init__(f"the script ended with {code!r}")
        self.code = code
