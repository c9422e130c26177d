"""Instructions that a step executes, counted by valgrind's callgrind: the same in every run.

It needs ``valgrind`` with its headers and a C compiler. Counting begins and ends by requests that a
few lines of C make, since the interpreter's start and the imports are many times what a step costs.
So one process counts all that is to be known of one side, and says with each count what it is of.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

REQUESTS = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void stop(const char *label) { CALLGRIND_DUMP_STATS_AT(label); CALLGRIND_STOP_INSTRUMENTATION; }
"""
LIBRARY = "HOST_OVERHEAD_REQUESTS"
LABEL = "desc: Trigger: Client Request: "
WARM_UPS = 4  # steps before the one that is counted


def count_all(
    script: Path, arguments: Mapping[str, Sequence[str]], failures: list[str]
) -> dict[str, dict[str, int]]:
    """By key of ``arguments``, what ``count`` returns for them; as many at once as there are cores.

    What fails is left out, and noted in ``failures``.
    """
    counts = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        runs = {
            name: pool.submit(partial(count, script, words)) for name, words in arguments.items()
        }
        for name, run in runs.items():
            try:
                counts[name] = run.result()
            except RuntimeError as error:
                failures.append(f"- instructions of {name}: {error}")
    return counts


def count(script: Path, arguments: Sequence[str]) -> dict[str, int]:
    """By label, instructions of what ``script``, run with ``arguments``, passes to ``counted``.

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
        return dict(_read(path) for path in Path(folder).glob("counts.*"))


def _read(path: Path) -> tuple[str, int]:
    """The label of a count, and the instructions."""
    label, total = "", 0
    with path.open() as lines:
        for line in lines:
            if line.startswith(LABEL):
                label = line.removeprefix(LABEL).strip()
            elif line.startswith("totals:"):
                total = int(line.split()[1])
    return label, total


def _run(command: list[str], variables: dict[str, str]) -> None:
    environment = {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr.strip()[-500:]}")


def counted(label: str, step: Callable[[], object], prepare: Callable[[], object]) -> None:
    """Count the instructions of one ``step``, after some; called in the process that is counted."""
    library = ctypes.CDLL(os.environ[LIBRARY])
    for _ in range(WARM_UPS):
        step()
        prepare()
    gc.collect()
    gc.freeze()
    gc.disable()
    library.start()
    step()
    library.stop(label.encode())
    gc.enable()
    gc.unfreeze()
