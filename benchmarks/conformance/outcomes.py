"""Runs a row in real gloo ranks, forked from this process, and says what came of it.

The outcomes, by rules that are the same for every library:

- exact: the program ran, and what it computed is what one process computes on the whole batch;
- clear error: an error on some rank whose text names what is at fault (the row says by which words
  a library may name it: a parameter, a module, a rank, an argument) and says what to do, which
  means that it has one of the words in ``ADVICE``;
- unclear error: any other error, a crash included;
- hang: a rank was still waiting when the process group's timeout ended it (here 4 s, by default
  30 minutes), or when it was killed (9 s). An error that comes at that timeout and is clear by the
  rule above counts as a clear error, and the table says that it came late;
- silently wrong: the program ran to its end with another result, and no rank raised;
- n/a: the library has no such feature, with the reason.

Where some ranks raise and others wait for them, the error counts: a launcher ends the others.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .libraries import LIBRARIES, Library, Wrong
from harness import RankError, RankFailure, RankTimeout, run_ranks

__all__ = ["EXACT", "OUTCOMES", "ROWS", "Row", "Seen", "row", "run_row"]

EXACT, CLEAR, UNCLEAR, HANG, SILENT, NONE = OUTCOMES = (
    "exact",
    "clear error",
    "unclear error",
    "hang",
    "silently wrong",
    "n/a",
)
ADVICE = re.compile(
    r"\b(call|calls|use|pass|set|build|wrap|load|keep|choose|make sure|ensure|should|must|please"
    r"|shard|freeze|instead|write|look at|consider|enable|need to|needs to|try|wanted)\b",
    re.IGNORECASE,
)
WAITED = re.compile(r"timed out|timeout|connection closed", re.IGNORECASE)
GROUP_TIMEOUT, KILL_AFTER = 4.0, 9.0


@dataclass(frozen=True)
class Row:
    """One behaviour.

    Attributes:
        key: where it comes from: U6 is row 6 of the users' list, D4 a diagnostic, T7 a trap.
        title: what the program does.
        run: the program, called on every rank; raises Wrong or NotApplicable, or what it meets.
        names: a pattern of the words that name what is at fault, for errors.
        ranks: how many.
        group: whether the ranks have a process group at the start.
        limit: where this library is known to be wrong: what it says of it.
    """

    key: str
    title: str
    run: Callable[[Library], None]
    names: str = "$^"
    ranks: int = 2
    group: bool = True
    limit: str = ""

    @property
    def name(self) -> str:
        """Where its code is: ``saving.dies`` is ``dies`` in rows/saving.py."""
        return f"{self.run.__module__.rpartition('.')[2]}.{self.run.__name__}"


@dataclass(frozen=True)
class Seen:
    """What came of a row, and the text of the error or the reason."""

    outcome: str
    text: str = ""
    late: bool = False  # at the process group's timeout


ROWS: list[Row] = []


def row(key: str, title: str, **options: Any) -> Callable[[Callable[[Library], None]], Any]:
    """Add a function to the table."""

    def add(run: Callable[[Library], None]) -> Callable[[Library], None]:
        ROWS.append(Row(key, title, run, **options))
        return run

    return add


def _on_rank(rank: int, case: Row, name: str, folder: str, patience: float) -> str | None:
    """Run the program; what was wrong with its result goes to the caller as a value.

    So a rank that found something wrong does not end the ranks that still wait.
    """
    warnings.simplefilter("ignore")
    if case.group:
        store = dist.FileStore(f"{folder}/store", case.ranks)
        timeout = timedelta(seconds=patience)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=case.ranks, timeout=timeout
        )
    torch.manual_seed(0)
    try:
        case.run(LIBRARIES[name])
    except Wrong as wrong:
        return str(wrong)
    return None


def run_row(case: Row, name: str, slower: float = 1.0) -> Seen:
    """Run one row with one library.

    Args:
        slower: by how much longer than usual to wait, on a busy machine.
    """
    errors: dict[int, RankError] = {}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        try:
            patience = GROUP_TIMEOUT * slower
            args = (case, name, folder, patience)
            late = KILL_AFTER * slower
            wrong = run_ranks(_on_rank, case.ranks, *args, init=False, timeout=late)
            found = [text for text in wrong if text is not None]
            return Seen(SILENT, found[0]) if found else Seen(EXACT)
        except (RankFailure, RankTimeout) as failure:
            errors = failure.errors
    return _judge(case, errors, time.monotonic() - start >= patience)


def _judge(case: Row, errors: dict[int, RankError], late: bool) -> Seen:
    for error in errors.values():
        if error.type == "NotApplicable":
            return Seen(NONE, error.message)
    raised = [error for error in errors.values() if error.type != "Hung"]
    raised.sort(key=lambda error: error.type == "Died")
    for error in raised:
        names_it = re.search(case.names, error.message, re.IGNORECASE)
        if names_it and ADVICE.search(error.message):
            return Seen(CLEAR, str(error), late and bool(WAITED.search(error.message)))
    if raised and not (late and any(WAITED.search(error.message) for error in raised)):
        return Seen(UNCLEAR, str(raised[0]))
    text = f" ({raised[0]})" if raised else ""
    return Seen(HANG, f"a rank waited until it was ended{text}")


def shared_folder() -> Path:
    """A folder that all ranks of the row see."""
    found: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, 0)
    return Path(found[0])
