"""What codecs cost in loss: the demo's model trained on two ranks with each, over three seeds.

Every side starts from the same weights and sees the same batches as float32 with that seed. Run
``python benchmarks/codecs.py``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from common import add_output_options, machine, publish, table
from gpt import GPT, Block, GPTConfig
from text import Batches, documentation, split, windows
from torch import nn
from torch.multiprocessing.spawn import spawn
from train_gpt import Recipe

from fsdp_compose import (
    Int8ErrorFeedback,
    MixedPrecision,
    bf16_codec,
    clip_grad_norm_,
    fp8_codec,
    fully_shard,
    int8_codec,
    int8_error_feedback_hook,
    register_comm_hook,
    wrap,
)
from fsdp_compose.report import TrafficReport, count_traffic

RANKS = 2
SEEDS = (1, 2, 3)
CODECS = {
    "bf16 gathers": bf16_codec,
    "fp8 gathers": fp8_codec,
    "int8 gathers": int8_codec,
    "int8 gathers and reductions": int8_codec,
}
HOOKS: dict[str, Callable[[nn.Module], None]] = {
    "int8 reductions": lambda m: register_comm_hook(
        m, Int8ErrorFeedback(128), int8_error_feedback_hook
    ),
    "int8 gathers and reductions": lambda m: register_comm_hook(
        m, Int8ErrorFeedback(128), int8_error_feedback_hook
    ),
}
SIDES = ("float32", *dict.fromkeys((*CODECS, *HOOKS)))


def recipe_of(steps: int, seed: int) -> Recipe:
    """The demo's, with fewer steps."""
    config = GPTConfig(block_size=64, n_layer=6, n_head=6, n_embd=192)
    return Recipe(config, torch.float32, steps, min(20, steps // 2), 2e-3, 0.1, 1.0, seed)


def train(side: str, steps: int, batch: int, seed: int) -> tuple[float, float, TrafficReport]:
    """(training loss of the last tenth of the steps, held-out loss, a step's traffic)."""
    rank, recipe = dist.get_rank(), recipe_of(steps, seed)
    corpus = split(documentation())
    batches = Batches(corpus.train, batch * RANKS, 64, seed)
    model = recipe.model(torch.device("cpu"))
    make = CODECS.get(side)
    precision = MixedPrecision(gather_codec=None if make is None else make())
    fully_shard(model, units=wrap.by_class({Block}), mp_policy=precision)
    if side in HOOKS:
        HOOKS[side](model)
    optim, losses, found = recipe.optimizer(model), [], TrafficReport()
    for step in range(steps):
        with count_traffic() as traffic:
            _, loss = model(*batches.share(step, rank, RANKS))
            loss.backward()
        found = traffic
        clip_grad_norm_(model, recipe.max_norm)
        for group in optim.param_groups:
            group["lr"] = recipe.lr(step)
        optim.step()
        optim.zero_grad()
        losses.append(loss.detach())
    last = torch.stack(losses[-max(1, steps // 10) :]).mean()
    both = torch.stack([last, evaluate(model, corpus.held_out, rank)])
    dist.all_reduce(both)
    training, held_out = (both / RANKS).tolist()
    return training, held_out, found


@torch.no_grad()
def evaluate(model: GPT, data: torch.Tensor, rank: int) -> torch.Tensor:
    inputs, targets = (w[:512] for w in windows(data, 64))
    rows = torch.arange(len(inputs) // RANKS * RANKS).view(RANKS, -1)[rank]
    total = torch.zeros(())
    for index in rows.split(64):
        total += model(inputs[index], targets[index])[1] * len(index)
    return total / len(rows)


Figures = dict[str, list[tuple[float, float, TrafficReport]]]


def worker(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS
    )
    found: Figures = {side: [] for side in SIDES}
    for seed in SEEDS:
        for side in SIDES:
            found[side].append(train(side, options.steps, options.batch, seed))
            if rank == 0:
                print(f"seed {seed}, {side}: held out {found[side][-1][1]:.4f}", flush=True)
    if rank == 0:
        report(found, options)
    dist.destroy_process_group()


def report(found: Figures, options: argparse.Namespace) -> None:
    exact = found["float32"]
    rows = []
    for side, runs in found.items():
        traffic, whole = runs[0][2], exact[0][2]
        gathers = traffic.gather_bytes / whole.gather_bytes
        reductions = traffic.reduce_bytes / whole.reduce_bytes
        differences = [run[1] - other[1] for run, other in zip(runs, exact, strict=True)]
        rows.append(
            [
                side,
                f"{gathers:.4f}",
                f"{reductions:.4f}",
                *(f"{run[1]:.4f}" for run in runs),
                f"{statistics.mean(differences):+.4f}",
                f"{min(differences):+.4f} to {max(differences):+.4f}",
                f"{statistics.mean(run[0] for run in runs):.4f}",
            ]
        )
    headers = [
        "side", "gathered ÷ fp32", "reduced ÷ fp32", *(f"seed {seed}" for seed in SEEDS),
        "mean difference", "range", "mean training loss",
    ]  # fmt: skip
    text = (
        f"The demo's model (6 layers of width 192) for {options.steps} steps of AdamW on "
        f"{RANKS} gloo ranks, {options.batch} sequences of 64 bytes each. Columns by seed are "
        "losses on 512 sequences of held-out text, in nats per byte. Values travel in exactly 1/2 "
        "(bf16) or 1/4 (fp8, int8) of the bytes; each block of 128 adds a scale of 4 bytes (1/128 "
        "of float32), and each shard is rounded up to 16 bytes. int8 reductions have error "
        "feedback. Differences are to float32 with the same seed."
    )
    figures = {side: [run[:2] for run in runs] for side, runs in found.items()}
    publish("codecs", options, [machine(), text, table(headers, rows)], figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a rank in a step")
    add_output_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(worker, args=(options, folder), nprocs=RANKS)


if __name__ == "__main__":
    main()
