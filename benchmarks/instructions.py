"""Instructions that a step executes, counted by valgrind's callgrind: the same in every run.

It needs ``valgrind`` with its headers and a C compiler. Counting begins and ends by requests that a
few lines of C make, since the interpreter's start and the imports are many times what a step costs.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

REQUESTS = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void stop(void) { CALLGRIND_DUMP_STATS_AT("step"); CALLGRIND_STOP_INSTRUMENTATION; }
"""
LIBRARY = "HOST_OVERHEAD_REQUESTS"


def count(script: Path, arguments: Sequence[str]) -> int:
    """Instructions of what ``script`` passes to ``counted`` when it is run with ``arguments``.

    Raises:
        RuntimeError: it failed, or valgrind or a compiler is missing.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "requests.c"), Path(folder, "requests.so")
        source.write_text(REQUESTS)
        output = Path(folder, "counts")
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
        valgrind.append(f"--callgrind-out-file={output}")
        variables = {LIBRARY: str(library), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        try:
            _run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], {})
            _run([*valgrind, sys.executable, str(script), *arguments], variables)
        except FileNotFoundError as error:
            raise RuntimeError(f"{error.filename} is missing") from error
        text = Path(f"{output}.1").read_text()
    totals = [line for line in text.splitlines() if line.startswith("totals:")]
    return int(totals[0].split()[1])


def _run(command: list[str], variables: dict[str, str]) -> None:
    environment = {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr.strip()[-500:]}")


def counted(step: Callable[[], object], prepare: Callable[[], object], warm_ups: int = 6) -> None:
    """Count the instructions of one ``step``, after some; called in the process that is counted."""
    library = ctypes.CDLL(os.environ[LIBRARY])
    for _ in range(warm_ups):
        step()
        prepare()
    gc.collect()
    gc.freeze()
    gc.disable()
    library.start()
    step()
    library.stop()
