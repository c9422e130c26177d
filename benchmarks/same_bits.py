"""What the same bits at any number of ranks cost: a step with `deterministic=` and without.

Sides accumulate the same microbatches in a step of a small GPT, live in the same processes and take
turns, so that the machine's drift touches them alike: ratios are those of one round. ``tree`` adds
microbatches up in one order; ``sharded`` reduces each of them too, and adds it to ``.grad``;
``unsharded`` reduces once, and keeps whole gradients until then. Run
``python benchmarks/same_bits.py --ranks 2``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import common
import torch
import torch.distributed as dist
from common import Memory, Spread
from gpt import GPT, Block, GPTConfig
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import fsdp_compose
from fsdp_compose import ShardingStrategy, wrap

SIDES = ("sharded", "unsharded", "tree")


@dataclass
class Side:
    """One way to accumulate, with its model and optimizer."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[tuple[Tensor, Tensor]]  # of this rank, in a step

    @classmethod
    def build(cls, name: str, options: argparse.Namespace) -> Side:
        torch.manual_seed(0)
        config = GPTConfig(
            vocab_size=7680,
            block_size=options.seq,
            n_layer=options.layers,
            n_head=options.width // 64,
            n_embd=options.width,
        )
        model = GPT(config)
        fsdp_compose.fully_shard(
            model,
            units=wrap.by_class({Block}),
            strategy=ShardingStrategy[options.strategy],
            deterministic=options.microbatches if name == "tree" else None,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
        batches = []
        for number in range(dist.get_rank(), options.microbatches, dist.get_world_size()):
            generator = torch.Generator().manual_seed(number)
            tokens = torch.randint(7680, (1, options.seq + 1), generator=generator)
            batches.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
        return cls(name, model, optimizer, batches)

    def forward_backward(self) -> None:
        scope: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.name == "unsharded":
            scope = fsdp_compose.accumulate(self.model, "unsharded")
        divisor = 1 if self.name == "tree" else len(self.batches)
        with scope:
            for tokens, targets in self.batches:
                _, loss = self.model(tokens, targets)
                (loss / divisor).backward()

    def clip(self) -> float:
        return float(fsdp_compose.clip_grad_norm_(self.model, 1.0))

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def turn(side: Side) -> list[float]:
    """Passes, clipping and their sum in ms, the slowest rank's; then what a rank computed."""
    dist.barrier()
    began, computed = time.perf_counter(), time.process_time()
    side.forward_backward()
    passed = time.perf_counter()
    side.clip()
    clipped, computed = time.perf_counter(), time.process_time() - computed
    side.update()
    figures = torch.tensor([passed - began, clipped - passed, clipped - began]) * 1e3
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    mean = torch.tensor([computed * 1e3 / dist.get_world_size()])
    dist.all_reduce(mean)
    return [*figures.tolist(), mean.item()]


def memory_of(name: str, options: argparse.Namespace) -> Memory | None:
    """What a step before the optimizer's adds to what a side holds between steps."""
    side = Side.build(name, options)
    side.forward_backward()
    side.update()

    def step() -> None:
        side.forward_backward()
        side.clip()

    return common.measure_memory(step, torch.device("cpu"))


def run(options: argparse.Namespace) -> None:
    sides = {name: Side.build(name, options) for name in SIDES}
    norms = {}
    for name, side in sides.items():
        side.forward_backward()
        norms[name] = side.clip()
        side.update()
    assert max(norms.values()) - min(norms.values()) < 1e-4 * max(norms.values()), norms
    turns = {name: partial(turn, side) for name, side in sides.items()}
    samples = common.interleave(turns, options.rounds)
    parameters = sum(p.numel() for p in sides["tree"].model.parameters())
    sides.clear()
    memory = {name: memory_of(name, options) for name in SIDES}
    if dist.get_rank() == 0:
        report(options, samples, memory, parameters)


def report(
    options: argparse.Namespace,
    samples: dict[str, list[list[float]]],
    memory: dict[str, Memory | None],
    parameters: int,
) -> None:
    rows = [_row(name, samples, memory[name]) for name in SIDES]
    headers = ["side", "passes, ms", "clipping, ms", "both, ms", "min–max", "processor, ms"]
    headers += ["both ÷ sharded", "min–max", "processor ÷ sharded", "min–max"]
    headers += ["added in a step, MB", "peak, MB"]
    sections = [
        f"GPT of {parameters / 1e6:.1f}M parameters ({options.layers} layers, width "
        f"{options.width}), {options.microbatches} microbatches of {options.seq} tokens in a step, "
        f"{dist.get_world_size()} gloo ranks, {options.strategy}; medians over {options.rounds} "
        "interleaved rounds, with the smallest and the largest. Times are the slowest rank's, "
        "processor times the ranks' mean; ratios are formed within a round.",
        common.table(headers, rows),
        "## Machine",
        common.machine(),
    ]
    name = f"same_bits-{dist.get_world_size()}-ranks"
    common.publish(name, options, sections, {"samples": samples, "memory": memory})


def _row(name: str, samples: dict[str, list[list[float]]], memory: Memory | None) -> list[str]:
    passes, clipping, both, processor = (Spread.of(f) for f in zip(*samples[name], strict=True))
    row = [name, f"{passes.median:.0f}", f"{clipping.median:.1f}", *both.cells()]
    row.append(f"{processor.median:.0f}")
    for figure in (2, 3):
        row += Spread.of(_ratios(samples[name], samples["sharded"], figure)).cells(3)
    if memory is None:
        return [*row, "", ""]
    return [*row, f"{memory.kept / 1e6:.0f}", f"{memory.peak / 1e6:.0f}"]


def _ratios(mine: list[list[float]], others: list[list[float]], figure: int) -> Sequence[float]:
    return [a[figure] / b[figure] for a, b in zip(mine, others, strict=True)]


def worker(rank: int, options: argparse.Namespace, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=options.ranks)
    try:
        with common.without_torch_warnings():
            run(options)
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches of a step")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--strategy", default="FULL_SHARD", choices=["FULL_SHARD", "NO_SHARD"])
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds")
    common.add_output_options(parser)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{Path(folder) / 'rendezvous'}"
        spawn(worker, args=(options, rendezvous), nprocs=options.ranks)


if __name__ == "__main__":
    main()
