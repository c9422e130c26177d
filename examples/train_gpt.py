"""Trains a byte-level GPT on Python's own documentation, sharded over every rank it is given.

Two ranks on a laptop, or the same file on two nodes of eight GPUs::

    fsdp-compose demo
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT \\
        examples/train_gpt.py --steps 2000

Then it checks three things: the first losses equal those of one process on the whole batch, a
run resumed from a checkpoint repeats the losses of the uninterrupted one, and the exported weights
load into a plain GPT. A report, a picture of the losses and the weights land in ``--out``, a folder
that all nodes must share.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, Block, GPTConfig
from text import Batches, Corpus, documentation, split, unigram_entropy, windows
from torch import Tensor, nn

from fsdp_compose import (
    MixedPrecision,
    clip_grad_norm_,
    fully_shard,
    load_checkpoint,
    save_checkpoint,
    save_full,
    state_dict,
    wrap,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}  # between two ways to compute
PROMPT = "The "
START = time.perf_counter()


@dataclass(frozen=True)
class World:
    """This process's place among the ranks."""

    rank: int
    size: int
    device: torch.device
    backend: str | None  # None: a world of one that was not launched and has no process group

    def mean(self, value: Tensor) -> Tensor:
        """The mean of ``value`` over the ranks, in fp32; collective."""
        value = value.detach().float().clone()
        if self.backend is not None:
            dist.all_reduce(value)
            value /= self.size
        return value

    def broadcast(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank; collective, and so a barrier too."""
        if self.backend is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]


@contextmanager
def connect(wanted: str) -> Iterator[World]:
    """Joins the process group that torchrun's variables describe: NCCL on CUDA, gloo on CPU."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if wanted == "auto":
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        wanted = "cuda" if torch.cuda.device_count() >= local_ranks else "cpu"
    cuda = wanted == "cuda"
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "WORLD_SIZE" not in os.environ:
        yield World(0, 1, device, None)
        return
    # Its functions keep the group that exists when they are defined, and building an optimizer
    # imports it. A gloo group that outlives `destroy_process_group` can crash Python's exit.
    import_module("torch.distributed.nn.functional")
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, device_id=device if cuda else None)
    yield World(dist.get_rank(), dist.get_world_size(), device, backend)
    # Not in a `finally`: after an error the other ranks may be anywhere, and to leave the group
    # together would be to wait for them.
    dist.destroy_process_group()


@dataclass(frozen=True)
class Recipe:
    """What a training step is, however many ranks take it."""

    config: GPTConfig
    dtype: torch.dtype
    steps: int
    warmup: int
    peak_lr: float
    weight_decay: float
    max_norm: float
    seed: int

    def lr(self, step: int) -> float:
        """Linear warm-up to ``peak_lr``, then half a cosine down to a tenth of it."""
        if step < self.warmup:
            return self.peak_lr * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.peak_lr * (0.55 + 0.45 * math.cos(math.pi * progress))

    def model(self, device: torch.device) -> GPT:
        torch.manual_seed(self.seed)
        return GPT(self.config).to(device)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW that decays matrices and leaves biases and norms alone."""
        decayed = [p for p in model.parameters() if p.dim() >= 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [
            {"params": decayed, "weight_decay": self.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.peak_lr, betas=(0.9, 0.95))


class Run:
    """A model in training, and its losses so far.

    What is kept of every step goes into tensors made at the start: two small tensors left behind
    by each step would pin the memory around them, and the process would grow.
    """

    def __init__(self, recipe: Recipe, world: World, model: GPT) -> None:
        self.recipe = recipe
        self.world = world
        self.model = model
        self.optimizer = recipe.optimizer(model)
        self.step = 0
        self.losses = torch.zeros(recipe.steps, device=world.device)  # mean over ranks
        self.norms = torch.zeros(recipe.steps, device=world.device)  # before clipping

    @classmethod
    def sharded(cls, recipe: Recipe, world: World) -> Run:
        model = recipe.model(world.device)
        model.activation_checkpointing = True
        fully_shard(
            model,
            units=wrap.by_class({Block}),
            mp_policy=MixedPrecision(param_dtype=recipe.dtype, reduce_dtype=torch.float32),
        )
        return cls(recipe, world, model)

    def train_step(self, batches: Batches) -> None:
        share = batches.share(self.step, self.world.rank, self.world.size)
        _, loss = self.model(*(t.to(self.world.device) for t in share))
        loss.backward()
        norm = clip_grad_norm_(self.model, self.recipe.max_norm)
        self.update(self.world.mean(loss), norm)

    def update(self, loss: Tensor, norm: Tensor) -> None:
        """Ends a step: the optimizer's part, and what is kept of it."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.lr(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses[self.step] = loss
        self.norms[self.step] = norm
        self.step += 1

    @torch.no_grad()
    def evaluate(self, data: Tensor, rows: int) -> float:
        """Mean loss on ``data``; all ranks take equally many windows: a forward gathers."""
        inputs, targets = windows(data, self.recipe.config.block_size)
        share = max(1, len(inputs) // self.world.size)
        mine = (self.world.rank * share + torch.arange(share)) % len(inputs)
        total = torch.zeros((), device=self.world.device)
        self.model.eval()
        for index in mine.split(rows):
            x, y = inputs[index].to(self.world.device), targets[index].to(self.world.device)
            total += self.model(x, y)[1] * len(index)
        self.model.train()
        return float(self.world.mean(total / share))

    def weights(self) -> dict[str, Tensor]:
        """The full weights, in the CPU memory of rank 0; collective."""
        return state_dict(self.model, kind="full", cpu_offload=True, rank0_only=True)


def single_process(recipe: Recipe, world: World, batches: Batches, steps: int) -> Run:
    """The same first steps in one process, on the concatenated batch, with nothing sharded.

    Low precision means the same here: fp32 weights, of which forward sees a copy in low precision.
    """
    model = recipe.model(world.device)
    run = Run(recipe, World(0, 1, world.device, None), model)
    while run.step < steps:
        inputs, targets = (t.to(world.device) for t in batches.full(run.step))
        cast = {name: p.to(recipe.dtype) for name, p in model.named_parameters()}
        _, loss = torch.func.functional_call(model, cast, (inputs, targets))
        loss.backward()
        run.update(loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm))
    return run


def save_training(run: Run, folder: Path) -> None:
    """Saves model, optimizer and position, each rank its own part; collective."""
    save_checkpoint(folder, run.model, run.optimizer, extra={"step": run.step})


def load_training(run: Run, folder: Path) -> None:
    """Reads what ``save_training`` wrote, on any number of ranks, into a new run; collective."""
    run.step = load_checkpoint(folder, run.model, run.optimizer)["step"]


def load_exported(folder: Path) -> GPT:
    """A plain GPT from safetensors, read with the standard library and torch alone."""
    raw = bytearray((folder / "model.safetensors").read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")  # where the numbers begin
    weights = {}
    for name, entry in json.loads(raw[8:start]).items():
        if name != "__metadata__":
            assert entry["dtype"] == "F32", entry
            begin, end = (start + offset for offset in entry["data_offsets"])
            flat = torch.frombuffer(
                raw, dtype=torch.float32, offset=begin, count=(end - begin) // 4
            )
            weights[name] = flat.view(entry["shape"])
    model = GPT(GPTConfig(**json.loads((folder / "config.json").read_text("utf-8"))))
    model.load_state_dict(weights)
    return model


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


@dataclass
class History:
    """What the training loop measured besides the losses of its steps."""

    entropy: float
    held_out: list[tuple[int, float]] = field(default_factory=list)  # steps taken, loss
    seconds: float = 0.0  # in training steps
    seconds_below_entropy: float | None = None  # from start, until the held-out loss was below it


def train(
    run: Run, batches: Batches, corpus: Corpus, until: int, history: History, bar: Progress
) -> None:
    """Takes training steps until ``run.step`` is ``until``, and evaluates twelve times a run."""
    rows = 4 * batches.rows // run.world.size  # nothing is kept for backward, so more fit
    every = max(1, run.recipe.steps // 12)
    show_every = 1 if run.world.device.type == "cpu" else 10  # reading a loss waits for the GPU

    def evaluate() -> None:
        loss = run.evaluate(corpus.held_out, rows)
        history.held_out.append((run.step, loss))
        bar.say(f"step {run.step:>5}  held-out loss {loss:.4f}  (unigram {history.entropy:.4f})")
        if loss < history.entropy and history.seconds_below_entropy is None:
            history.seconds_below_entropy = time.perf_counter() - START

    if not history.held_out:
        evaluate()
    since, taken = time.perf_counter(), 0
    while run.step < until:
        run.train_step(batches)
        taken += 1
        evaluates = run.step % every == 0 or run.step == run.recipe.steps
        if run.step % show_every == 0 or evaluates or run.step == until:
            loss = float(run.losses[run.step - 1])
            elapsed = time.perf_counter() - since
            history.seconds += elapsed
            speed = taken * batches.rows * batches.block / elapsed
            memory = memory_in_use(run.world.device) / 2**20
            bar.update(run.step, f"loss {loss:.4f}  {speed:,.0f} tok/s  {memory:,.0f} MiB")
            if evaluates:
                evaluate()
            since, taken = time.perf_counter(), 0


@dataclass(frozen=True)
class Check:
    """One promise, whether it was kept, and the figures."""

    name: str
    kept: bool
    figures: str
    table: str = ""

    def __str__(self) -> str:
        return f"[{'ok' if self.kept else 'FAILED'}] {self.name}: {self.figures}"


def check_learning(history: History, gain: float) -> Check:
    """Holds the last held-out loss to ``gain`` nats below what byte frequencies alone give."""
    loss = history.held_out[-1][1]
    return Check(
        f"the held-out loss ends at least {gain:g} nats below the unigram entropy",
        loss <= history.entropy - gain,
        f"{loss:.4f} against {history.entropy:.4f} nats per byte",
    )


def check_parity(run: Run, batches: Batches, steps: int) -> Check:
    """Compares the first losses and gradient norms with one process's, computed on rank 0."""
    rows = []
    if run.world.rank == 0:
        one = single_process(run.recipe, run.world, batches, steps)
        columns = torch.stack((run.losses, one.losses, run.norms, one.norms), dim=1)
        rows = columns[:steps].tolist()
    rows = run.world.broadcast(rows)
    worst = max((abs(row[0] - row[1]) for row in rows), default=0.0)
    worst_norm = max((abs(row[2] / row[3] - 1.0) for row in rows), default=0.0)
    table = ["| step | sharded loss | one process | difference | gradient norm | one process |"]
    table.append("|---:|---:|---:|---:|---:|---:|")
    for step, (loss, single, norm, single_norm) in enumerate(rows):
        cells = f"{loss:.7f} | {single:.7f} | {loss - single:+.1e} | {norm:.6f} | {single_norm:.6f}"
        table.append(f"| {step} | {cells} |")
    tolerance = TOLERANCE[run.recipe.dtype]
    return Check(
        f"the first {len(rows)} losses equal one process's on the concatenated batch",
        max(worst, worst_norm) <= tolerance,
        f"max difference {worst:.1e}, of gradient norms {worst_norm:.1e} relative (allowed "
        f"{tolerance:.0e})",
        "\n".join(table),
    )


def check_resume(run: Run, batches: Batches, folder: Path) -> Check:
    """Resumes from ``folder`` in a new model and optimizer, and compares them with ``run``."""
    resumed = Run.sharded(run.recipe, run.world)
    load_training(resumed, folder)
    start = resumed.step
    while resumed.step < run.step:
        resumed.train_step(batches)
    pairs = list(zip(run.losses[start:].tolist(), resumed.losses[start:].tolist()))
    there, here = run.weights(), resumed.weights()
    equal_weights = run.world.broadcast(all(torch.equal(there[name], here[name]) for name in there))
    equal = sum(a == b for a, b in pairs)
    table = ["| step | uninterrupted loss | resumed |", "|---:|---:|---:|"]
    table += [f"| {start + i} | {a:.7f} | {b:.7f} |" for i, (a, b) in enumerate(pairs)]
    return Check(
        f"resumed at step {start}, the losses equal the uninterrupted run's",
        equal == len(pairs) and equal_weights,
        f"{equal} of {len(pairs)} bit-equal, final weights "
        f"{'bit-equal' if equal_weights else 'DIFFER'}",
        "\n".join(table),
    )


@torch.no_grad()
def check_export(run: Run, held_out: Tensor, path: Path) -> Check:
    """Exports the full weights as safetensors and compares the logits of a plain GPT."""
    save_full(path, run.model)
    inputs = windows(held_out, run.recipe.config.block_size)[0][:2].to(run.world.device)
    run.model.eval()
    logits = run.model(inputs)
    worst = 0.0
    if run.world.rank == 0:
        (path / "config.json").write_text(json.dumps(asdict(run.recipe.config)), "utf-8")
        plain = load_exported(path).to(run.world.device, run.recipe.dtype).eval()
        worst = float((plain(inputs).float() - logits.float()).abs().max())
    worst = run.world.broadcast(worst)
    return Check(
        f"the exported {path.name}/model.safetensors loads into a plain GPT",
        worst <= TOLERANCE[run.recipe.dtype],
        f"largest logit difference {worst:.1e}",
    )


def sample(path: Path, length: int, seed: int) -> str:
    """Text continued from a short prompt by the exported model."""
    model = load_exported(path).eval()
    prompt = torch.tensor([list(PROMPT.encode())])
    generator = torch.Generator().manual_seed(seed)
    tokens = model.generate(prompt, length, temperature=0.8, top_k=40, generator=generator)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def draw(run: Run, history: History, path: Path) -> bool:
    """Draws the losses; False when matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
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
        "precision": f"{args.dtype} compute, fp32 weights and reduction",
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
    """Five lines: what was shown, and where to look."""
    kept = sum(check.kept for check in checks)
    ranks = f"{run.world.size} {'rank' if run.world.size == 1 else 'ranks'}"
    return "\n".join(
        (
            f"{kept} of {len(checks)} checks passed in {time.perf_counter() - START:.0f} s:",
            f"a GPT, sharded over {ranks}, trained as one process trains it, step by step;",
            "it went on from its checkpoint bit by bit, and its weights load without this library.",
            f"{out / 'report.md'} has the figures, {out / 'loss.png'} the curve, {out / 'export'} "
            "the weights.",
            "Next: docs/getting-started.md shards a model of your own.",
        )
    )


def demo(args: argparse.Namespace, world: World) -> int:
    """Trains, checks and reports; the exit code is 1 if a check failed."""
    if args.dtype == "auto":
        args.dtype = "bf16" if world.device.type == "cuda" else "fp32"
    if world.device.type == "cuda":
        # Resuming is bit-exact only when the kernels are.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    config = GPTConfig(
        block_size=args.block_size, n_layer=args.layers, n_head=args.heads, n_embd=args.width
    )
    recipe = Recipe(
        config=config,
        dtype=DTYPES[args.dtype],
        steps=args.steps,
        warmup=min(args.warmup, args.steps // 2),
        peak_lr=args.lr,
        weight_decay=args.weight_decay,
        max_norm=args.max_norm,
        seed=args.seed,
    )
    corpus = split(documentation())
    batches = Batches(corpus.train, args.batch_size * world.size, args.block_size, args.seed)
    history = History(unigram_entropy(corpus.held_out))
    if world.rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)

    run = Run.sharded(recipe, world)
    with Progress(world, recipe.steps) as bar:
        bar.say(
            f"{world.size} ranks on {world.device.type}, {args.dtype}; {len(corpus.train):,} bytes "
            f"to learn from, {len(corpus.held_out):,} held out"
        )
        train(run, batches, corpus, recipe.steps - args.resume_steps, history, bar)
        save_training(run, args.out / "checkpoint")
        train(run, batches, corpus, recipe.steps, history, bar)

    def say(text: str) -> None:
        if world.rank == 0:
            print(text, flush=True)

    exported = args.out / "export"
    checks = []
    for check in (
        lambda: check_learning(history, args.gain),
        lambda: check_parity(run, batches, min(args.parity_steps, recipe.steps)),
        lambda: check_resume(run, batches, args.out / "checkpoint"),
        lambda: check_export(run, corpus.held_out, exported),
    ):
        checks.append(check())
        say(f"\n{checks[-1]}" + (f"\n{checks[-1].table}" if checks[-1].table else ""))
    if world.rank == 0:
        text = sample(exported, args.sample, args.seed)
        say(f"\nA sample. {context(run, history)}\n\n{text}\n")
        if not draw(run, history, args.out / "loss.png"):
            say("matplotlib is not installed: no picture of the losses")
        path = args.out / "report.md"
        path.write_text(report(args, run, history, checks, text), encoding="utf-8")
        say(closing(run, args.out, checks))
    world.broadcast(None)
    return 0 if all(check.kept for check in checks) else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains a byte-level GPT on Python's documentation, sharded over all ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/demo"), help="written to by all nodes")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: CUDA if it can be")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="of compute; auto: bf16 on CUDA")
    add("--steps", type=int, default=300, help="training steps")
    add("--batch-size", type=int, default=8, help="sequences per rank and step")
    add("--block-size", type=int, default=64, help="bytes per sequence")
    add("--layers", type=int, default=6, help="transformer blocks")
    add("--heads", type=int, default=6, help="attention heads")
    add("--width", type=int, default=192, help="embedding width")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--warmup", type=int, default=20, help="warm-up steps")
    add("--weight-decay", type=float, default=0.1, help="of matrices")
    add("--max-norm", type=float, default=1.0, help="gradients are clipped to this norm")
    add("--seed", type=int, default=1, help="of the weights, the batches and the sample")
    add("--parity-steps", type=int, default=5, help="steps to compare with one process")
    add("--resume-steps", type=int, default=8, help="steps to repeat from the checkpoint")
    add("--sample", type=int, default=400, help="bytes to sample")
    add("--gain", type=float, default=0.5, help="nats to end below the unigram entropy")
    args = parser.parse_args(argv)
    if not 0 < args.resume_steps < args.steps:
        parser.error(f"--resume-steps must be between 1 and {args.steps - 1} (--steps less one)")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    # cuBLAS reads this when it starts; without it its results may differ from run to run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        with connect(args.device) as world:
            return demo(args, world)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(130)  # without the farewells of a group whose other ranks may be anywhere


if __name__ == "__main__":
    sys.exit(main())
