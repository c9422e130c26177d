"""Runs the test suite in parts side by side: tests that wait for their ranks leave cores idle.

    python tests/in_parts.py 2 -m "not cuda"    # two pytest processes share the files of tests

Each takes the next file when it is done with one, so that all end together. What a part prints is
shown when it ends; the last line counts the tests of all parts.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS = 5  # pytest's exit status where none is selected
FILES = 4000  # numbers that are handed out: more than there are files of tests
PATIENCE = 60.0  # seconds between two lines that say that tests still run


def start(queue: int, arguments: list[str], output: IO[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest", f"--queue={queue}", *arguments]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}  # what a killed part printed is there
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=output, stderr=output, text=True, pass_fds=(queue,)
    )


def hand_out_numbers() -> int:
    """A pipe that holds 0, 1, 2 ... in two bytes each, from which every part reads the next."""
    queue, end = os.pipe()
    os.write(end, b"".join(number.to_bytes(2, "big") for number in range(FILES)))
    os.close(end)
    return queue


def tally(output: str) -> Counter[str]:
    """How many tests passed, failed and so on, by pytest's closing line."""
    lines = [line for line in output.splitlines() if re.search(r"\d+ \w+.* in [\d.]+s", line)]
    counts: Counter[str] = Counter()
    for number, what in re.findall(r"(\d+) (\w+)", lines[-1].partition(" in ")[0] if lines else ""):
        counts["failed" if what.startswith("error") else what] += int(number)
    return counts


def main(parts: int, arguments: list[str]) -> int:
    """Run ``parts`` parts; 0 if every test passed."""
    total: Counter[str] = Counter()
    status = 0
    began = said = time.monotonic()
    running: dict[subprocess.Popen[str], tuple[int, IO[str]]] = {}
    with contextlib.ExitStack() as files:
        queue = hand_out_numbers()
        files.callback(os.close, queue)
        for part in range(1, parts + 1):
            output = files.enter_context(tempfile.TemporaryFile("w+"))
            running[start(queue, arguments, output)] = part, output
        files.callback(lambda: [process.kill() for process in running])
        while running:
            for process in [p for p in running if p.poll() is not None]:
                part, output = running.pop(process)
                output.seek(0)
                text = output.read()
                print(f"==== part {part} of {parts} ====\n{text}", flush=True)
                total += tally(text)
                if process.returncode not in (0, NO_TESTS):
                    status = process.returncode
            if time.monotonic() - said > PATIENCE:
                said = time.monotonic()
                print(f"{said - began:.0f} s, {len(running)} parts are running", flush=True)
            time.sleep(0.2)
    passed, failed, skipped = (total[key] for key in ("passed", "failed", "skipped"))
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # parts end with it
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
    sys.exit(130)
