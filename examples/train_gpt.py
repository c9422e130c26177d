"""Trains a byte-level GPT on Python's own documentation, sharded over every rank it is given.

    python examples/train_gpt.py                                     # one process
    fsdp-compose run --nproc 2 examples/train_gpt.py                 # two ranks of this machine
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT \\
        examples/train_gpt.py --steps 2000                           # two nodes of eight GPUs

Started again, it goes on from the checkpoint in ``--out``, on any number of ranks. At the end the
full weights are exported there as safetensors. All nodes must share that folder.

``examples/demo.py`` trains the same way and checks the result against one process.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, Block, GPTConfig
from text import Batches, documentation, split, windows
from torch import Tensor, nn

import fsdp_compose as fc

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


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
        fc.fully_shard(
            model,
            units=fc.wrap.by_class({Block}),
            mp_policy=fc.MixedPrecision(param_dtype=recipe.dtype, reduce_dtype=torch.float32),
        )
        return cls(recipe, world, model)

    def train_step(self, batches: Batches) -> None:
        share = batches.share(self.step, self.world.rank, self.world.size)
        _, loss = self.model(*(t.to(self.world.device) for t in share))
        loss.backward()
        norm = fc.clip_grad_norm_(self.model, self.recipe.max_norm)
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

    def save(self, folder: Path) -> None:
        """Saves model, optimizer and position, each rank its own part; collective."""
        fc.save_checkpoint(folder, self.model, self.optimizer, extra={"step": self.step})

    def load(self, folder: Path) -> None:
        """Goes on from what ``save`` wrote on any number of ranks; collective."""
        self.step = fc.load_checkpoint(folder, self.model, self.optimizer)["step"]


def train(args: argparse.Namespace, world: World) -> None:
    """Trains from the start, or from the checkpoint in ``--out``, and exports the weights."""
    corpus = split(documentation())
    batches = Batches(corpus.train, args.batch_size * world.size, args.block_size, args.seed)
    run = Run.sharded(choose_recipe(args, world.device), world)
    checkpoint = args.out / "checkpoint"
    if world.broadcast(checkpoint.is_dir()):
        run.load(checkpoint)
        if world.rank == 0:
            print(f"going on from step {run.step} of {checkpoint}", flush=True)
    while run.step < args.steps:
        run.train_step(batches)
        if run.step % args.save_every == 0 or run.step == args.steps:
            run.save(checkpoint)
            held_out = run.evaluate(corpus.held_out, 4 * args.batch_size)
            if world.rank == 0:
                loss = float(run.losses[run.step - 1])
                print(f"step {run.step}: loss {loss:.4f}, held out {held_out:.4f}", flush=True)
    fc.save_full(args.out / "export", run.model)


def choose_recipe(args: argparse.Namespace, device: torch.device) -> Recipe:
    """The recipe that the arguments describe; ``--dtype auto`` is bf16 on CUDA."""
    automatic = "bf16" if device.type == "cuda" else "fp32"
    return Recipe(
        config=GPTConfig(
            block_size=args.block_size, n_layer=args.layers, n_head=args.heads, n_embd=args.width
        ),
        dtype=DTYPES[automatic if args.dtype == "auto" else args.dtype],
        steps=args.steps,
        warmup=min(args.warmup, args.steps // 2),
        peak_lr=args.lr,
        weight_decay=args.weight_decay,
        max_norm=args.max_norm,
        seed=args.seed,
    )


def build_parser(description: str, out: str) -> argparse.ArgumentParser:
    """The options of training, which the demo shares."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path(out), help="written to by all nodes")
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
    add("--seed", type=int, default=1, help="of the weights and the batches")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser("Trains a small GPT on Python's documentation.", "runs/gpt")
    parser.add_argument("--save-every", type=int, default=50, help="steps between two checkpoints")
    args = parser.parse_args(argv)
    with connect(args.device) as world:
        train(args, world)
    return 0


if __name__ == "__main__":
    sys.exit(main())
