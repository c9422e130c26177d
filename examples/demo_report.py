"""What the demo shows while it trains and when it is done: progress, memory, picture, report."""

from __future__ import annotations

import argparse
import math
import platform
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpt import GPT
from train_gpt import DTYPES, Run, World

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
START = time.perf_counter()


@dataclass
class History:
    """What the training loop measured besides the losses of its steps."""

    entropy: float
    held_out: list[tuple[int, float]] = field(default_factory=list)  # steps taken, loss
    seconds: float = 0.0  # in training steps
    seconds_below_entropy: float | None = None  # from start, until the held-out loss was below it


@dataclass(frozen=True)
class Check:
    """One promise, whether it was kept, and the figures."""

    name: str
    kept: bool
    figures: str
    table: str = ""

    def __str__(self) -> str:
        return f"[{'ok' if self.kept else 'FAILED'}] {self.name}: {self.figures}"


class Progress:
    """A bar on a terminal when rich is there, a line now and then elsewhere; silent off rank 0."""

    def __init__(self, world: World, total: int) -> None:
        self.silent = world.rank != 0
        self.total = total
        self.bar: Any = None
        if self.silent or not sys.stdout.isatty():
            return
        try:
            from rich import progress as rich
        except ImportError:
            return
        text = rich.TextColumn("{task.description}")
        self.bar = rich.Progress(
            rich.BarColumn(24), rich.MofNCompleteColumn(), text, rich.TimeRemainingColumn()
        )
        self.task = self.bar.add_task("", total=total)

    def __enter__(self) -> Progress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, step: int, text: str) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=step, description=text)
        elif not self.silent and (step % max(1, self.total // 20) == 0 or step == self.total):
            print(f"step {step:>5}/{self.total}  {text}", flush=True)

    def say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        elif not self.silent:
            print(text, flush=True)


def memory_in_use(device: torch.device) -> int:
    """Bytes: this process's resident memory, or the most that CUDA tensors have taken."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak_memory(device)
    return resident * resource.getpagesize()


def peak_memory(device: torch.device) -> int:
    """Bytes: the most this process has had resident, or CUDA tensors have taken, so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def draw(run: Run, history: History, path: Path) -> bool:
    """Draws the losses; False when matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        path.unlink(missing_ok=True)  # of an earlier run
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    steps = range(1, run.step + 1)
    axes.plot(steps, run.losses.tolist(), color="tab:blue", linewidth=0.9, label="training")
    axes.plot(*zip(*history.held_out), "o-", color="tab:orange", label="held out")
    axes.axhline(history.entropy, color="gray", linestyle="--", label="unigram entropy")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title(f"GPT sharded over {run.world.size} ranks")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True


def report(
    args: argparse.Namespace, run: Run, history: History, checks: Sequence[Check], text: str
) -> str:
    """Markdown: what was run, its figures, every check, the picture and the sample."""
    recipe, world = run.recipe, run.world
    shape = ", ".join(f"{name} {value}" for name, value in asdict(recipe.config).items())
    count = sum(p.numel() for p in GPT(recipe.config).parameters())
    batch = args.batch_size * world.size
    tokens = run.step * batch * recipe.config.block_size
    below = history.seconds_below_entropy
    figures = {
        "ranks": f"{world.size} ({world.backend or 'no process group'}, {world.device.type})",
        "model": f"GPT, {count:,} parameters ({shape})",
        "batch": f"{batch} sequences of {recipe.config.block_size} bytes over all ranks",
        "steps": f"{recipe.steps}, {recipe.warmup} of warm-up to {recipe.peak_lr:g}, then cosine",
        "precision": f"{DTYPE_NAMES[recipe.dtype]} compute, fp32 weights and reduction",
        "software": f"torch {torch.__version__}, Python {platform.python_version()}",
        "final training loss": f"{float(run.losses[-1]):.4f} nats per byte",
        "final held-out loss": f"{history.held_out[-1][1]:.4f} nats per byte",
        "unigram entropy of the held-out text": f"{history.entropy:.4f} nats per byte",
        "held-out loss below it after": "never" if below is None else f"{below:.0f} s",
        "training": f"{history.seconds:.0f} s, {tokens / history.seconds:,.0f} tokens/s",
        "peak memory of rank 0": f"{peak_memory(world.device) / 2**20:,.0f} MiB",
        "whole demo": f"{time.perf_counter() - START:.0f} s",
    }
    lines = ["# fsdp_compose demo", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in figures.items()]
    if (args.out / "loss.png").is_file():
        lines += ["", "![losses](loss.png)"]
    lines += ["", "## Checks", ""]
    lines += [f"- {check}" for check in checks]
    for check in checks:
        if check.table:
            lines += ["", f"### {check.name[0].upper()}{check.name[1:]}", "", check.table]
    quoted = "\n".join(f"    {line}" for line in text.splitlines())
    about = context(run, history)
    return "\n".join([*lines, "", "## Sample", "", about, "", quoted, ""])


def context(run: Run, history: History) -> str:
    """What a sample of so small a model can be expected to look like."""
    bits = history.held_out[-1][1] / math.log(2)
    return (
        f"After {run.step} steps from random bytes the model needs {bits:.2f} bits for a byte of "
        f"unseen text ({history.entropy / math.log(2):.2f} by counting bytes alone). It has "
        "learned letters, short words and markup, and no meaning."
    )


def closing(run: Run, out: Path, checks: Sequence[Check]) -> str:
    """Five lines: what was shown, or which checks failed, and where to look."""
    broken = [check.name for check in checks if not check.kept]
    kept = len(checks) - len(broken)
    ranks = f"{run.world.size} {'rank' if run.world.size == 1 else 'ranks'}"
    shown = (
        f"a GPT, sharded over {ranks}, trained as one process trains it, step by step;",
        "it went on from its checkpoint bit by bit, and its weights load without this library.",
    )
    curve = f"{out / 'loss.png'} the curve, " if (out / "loss.png").is_file() else ""
    return "\n".join(
        (
            f"{kept} of {len(checks)} checks passed in {time.perf_counter() - START:.0f} s:",
            *([f"not kept: {name}" for name in broken] or shown),
            f"{out / 'report.md'} has the figures, {curve}{out / 'export'} the weights.",
            "Next: docs/getting-started.md shards a model of your own.",
        )
    )
