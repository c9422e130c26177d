"""What both benchmarks share: interleaved timing, counters, tables and saved results."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import gc
import json
import os
import platform
import shlex
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

# A checkout runs without being installed, and the models come from the examples.
for folder in (ROOT / "examples", ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Spread:
    """A median with the smallest and the largest sample, all in the samples' unit."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        return cls(statistics.median(samples), min(samples), max(samples))

    def cells(self, digits: int = 0) -> list[str]:
        """The median and the range as two table cells."""
        return [f"{self.median:.{digits}f}", f"{self.low:.{digits}f}–{self.high:.{digits}f}"]


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """``names`` starting at another place each turn, so that no side always runs first."""
    shift = turn % len(names)
    return [*names[shift:], *names[:shift]]


def interleave(
    sides: Mapping[str, Callable[[], Sequence[float]]], rounds: int
) -> dict[str, list[list[float]]]:
    """Call every side once per round, in rotating order; returns ``[round][figure]`` medians.

    A side is called with nothing and returns its figures (any fixed number of them, such as
    forward and backward time). Slow drift of the machine then touches every side alike.
    """
    names = list(sides)
    figures: dict[str, list[list[float]]] = {name: [] for name in names}
    # What exists by now lives as long as the run; without this, every side pays for collecting
    # the others' objects.
    gc.collect()
    gc.freeze()
    try:
        for turn in range(rounds):
            for name in rotated(names, turn):
                figures[name].append(list(sides[name]()))
    finally:
        gc.unfreeze()
    return figures


def ratio_by_round(above: Sequence[Sequence[float]], below: Sequence[Sequence[float]]) -> float:
    """The median over rounds of the first figure of one side over that of another.

    A processor that changes its speed in the middle of a run changes no such ratio.
    """
    return statistics.median(a[0] / b[0] for a, b in zip(above, below, strict=True))


@contextlib.contextmanager
def without_torch_warnings() -> Iterator[None]:
    """Silence what torch says about its own deprecated parts; warnings of others still show."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.")
        yield


@dataclass
class Traffic(TorchDispatchMode):
    """Collectives and the bytes this rank sends in them, by the bandwidth-optimal formulas.

    Counts what the program asks for (a ring all-reduce of S bytes sends 2(W-1)/W·S), not what a
    backend makes of it: gloo's reduce-scatter moves as much as an all-reduce and still counts as
    a reduce-scatter. Point-to-point sends count their payload. A batch of point-to-point
    operations that makes up one gather is therefore several calls.
    """

    world_size: int
    calls: dict[str, int] = field(default_factory=dict)
    sent: float = 0.0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.__name__.split(".")[0].strip("_"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        share = (self.world_size - 1) / self.world_size
        size = max((_nbytes(arg) for arg in args), default=0)
        if name.startswith(("allreduce", "all_reduce")):
            name, moved = "all-reduce", 2 * share * size
        elif name.startswith(("allgather", "all_gather")):
            name, moved = "all-gather", share * size
        elif name.startswith("reduce_scatter"):
            name, moved = "reduce-scatter", share * size
        elif name.startswith(("alltoall", "all_to_all")):
            name, moved = "all-to-all", share * size
        elif name == "send":
            moved = size
        elif name.startswith("recv") or name in ("barrier", "wait_tensor"):
            return
        else:
            moved = share * size
        self.calls[name] = self.calls.get(name, 0) + 1
        self.sent += moved

    def summary(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in sorted(self.calls.items())) or "none"


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(_nbytes(item) for item in value)
    return 0


@dataclass(frozen=True)
class Memory:
    """Bytes still held when a call returned, and the most held while it ran, over its start."""

    kept: int
    peak: int


class _Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _allocated() -> Callable[[], int] | None:
    """A function that returns the bytes that the whole process uses; None off glibc.

    From malloc, and of the memory that it shares with other ranks of its host what it has put
    something into: what is free there stays, for whichever side is next.
    """
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return None
    mallinfo.restype = _Mallinfo
    from fsdp_compose.comm.shared_memory import all_segments  # not for mutants.py, which forks

    def allocated() -> int:
        info = mallinfo()
        shared = [s.lent_bytes() + s.lent_bytes(copies=True) for s in all_segments()]
        return int(info.uordblks + info.hblkhd) + sum(shared)

    return allocated


def measure_memory(call: Callable[[], object], device: torch.device) -> Memory | None:
    """Run ``call`` and follow what is allocated; None where nothing can tell.

    On CUDA the allocator's own peak. On CPU a thread samples glibc every 0.1 ms, because the
    profiler misses what gloo's threads free; gloo's own buffers count too.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
        return Memory(torch.cuda.memory_allocated(device) - before, peak - before)
    allocated = _allocated()
    if allocated is None:
        call()
        return None
    before = peak = allocated()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(1e-4):
            peak = max(peak, allocated())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        call()
        time.sleep(0.05)  # gloo's threads drop their tensors a moment after the collective
    finally:
        done.set()
        watcher.join()
    return Memory(allocated() - before, peak - before)


def machine(device: torch.device | None = None) -> str:
    """The machine in words: processor, cores, accelerator, versions; no names, no paths."""
    model = "unknown processor"
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    lines = [
        f"- processor: {model}, {os.cpu_count()} cores visible; "
        f"{torch.get_num_threads()} thread per process; load average {load} at the end",
        f"- torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}",
    ]
    if device is not None and device.type == "cuda":
        lines.insert(1, f"- accelerator: {torch.cuda.get_device_name(device)}")
    return "\n".join(lines)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up in a terminal too; the first column is text."""
    widths = [max(len(row[i]) for row in (headers, *rows)) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join([line(headers), f"| {' | '.join(rule)} |", *map(line, rows)])


def add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--save", action="store_true", help="write results/<name>-<date>.md")
    parser.add_argument("--json", type=Path, help="write the figures to this file")


def publish(
    name: str, options: argparse.Namespace, sections: Sequence[str], figures: Mapping[str, object]
) -> None:
    """Print the report and, where asked, save it as Markdown and its figures as JSON."""
    report = "\n\n".join([*sections, _command()])
    print(report, flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2, default=_plain) + "\n")
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        today = datetime.date.today().isoformat()
        path = RESULTS / f"{name}-{today}.md"
        path.write_text(f"# {name}, {today}\n\n{report}\n")
        print(f"\nsaved benchmarks/results/{path.name}")


def _command() -> str:
    """How to repeat the run; where its figures were written is nobody's business."""
    words = sys.argv[1:]
    if "--json" in words:
        at = words.index("--json")
        words = words[:at] + words[at + 2 :]
    words = [word for word in words if not word.startswith("--json=")]
    return f"Command: `{shlex.join(['python', f'benchmarks/{Path(sys.argv[0]).name}', *words])}`"


def _plain(value: object) -> object:
    if isinstance(value, (Spread, Memory)):
        return asdict(value)
    return str(value)
