"""Trains as train_gpt.py does, on two ranks of a laptop or on many GPUs, and checks the result.

    fsdp-compose demo
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT \\
        examples/demo.py --steps 2000

It checks that the first losses equal those of one process on the whole batch, that a run resumed
from a checkpoint repeats the losses of the uninterrupted one, and that the exported weights load
into a plain GPT. A report, a picture of the losses and the weights land in ``--out``, a folder that
all nodes must share.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from demo_report import (
    DTYPE_NAMES,
    START,
    Check,
    History,
    Progress,
    closing,
    context,
    draw,
    memory_in_use,
    report,
)
from gpt import GPT, GPTConfig
from text import Batches, Corpus, documentation, split, unigram_entropy, windows
from torch import Tensor, nn
from train_gpt import Recipe, Run, World, build_parser, choose_recipe, connect

import fsdp_compose as fc

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}  # between two ways to compute
PROMPT = "The "


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


def full_weights(run: Run) -> dict[str, Tensor]:
    """The full weights, in the CPU memory of rank 0; collective."""
    return fc.state_dict(run.model, kind="full", cpu_offload=True, rank0_only=True)


def check_resume(run: Run, batches: Batches, folder: Path) -> Check:
    """Resumes from ``folder`` in a new model and optimizer, and compares them with ``run``."""
    resumed = Run.sharded(run.recipe, run.world)
    resumed.load(folder)
    start = resumed.step
    while resumed.step < run.step:
        resumed.train_step(batches)
    pairs = list(zip(run.losses[start:].tolist(), resumed.losses[start:].tolist()))
    there, here = full_weights(run), full_weights(resumed)
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
    fc.save_full(path, run.model)
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


def demo(args: argparse.Namespace, world: World) -> int:
    """Trains, checks and reports; the exit code is 1 if a check failed."""
    if world.device.type == "cuda":
        # Resuming is bit-exact only when the kernels are.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    recipe = choose_recipe(args, world.device)
    corpus = split(documentation())
    batches = Batches(corpus.train, args.batch_size * world.size, args.block_size, args.seed)
    history = History(unigram_entropy(corpus.held_out))
    if world.rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)

    run = Run.sharded(recipe, world)
    with Progress(world, recipe.steps) as bar:
        bar.say(
            f"{world.size} ranks on {world.device.type}, {DTYPE_NAMES[recipe.dtype]}; "
            f"{len(corpus.train):,} bytes to learn from, {len(corpus.held_out):,} held out"
        )
        train(run, batches, corpus, recipe.steps - args.resume_steps, history, bar)
        run.save(args.out / "checkpoint")
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
    parser = build_parser(
        "Trains a byte-level GPT on Python's documentation, sharded over all ranks, and checks it.",
        "runs/demo",
    )
    add = parser.add_argument
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
