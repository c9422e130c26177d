"""Trains a small GPT with Muon on the matrices of its blocks and AdamW on everything else.

    python examples/muon.py                          # two ranks on this machine
    torchrun --nproc-per-node 8 examples/muon.py

Each matrix is orthogonalised on one rank only: ``owner_step`` gives whole matrices to torch's own
Muon, balances the work over the ranks and sends the updates back. With ``--whole`` the matrices are
not cut, so that the optimizer communicates nothing, at the cost of more padding.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, Block, GPTConfig
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose.cli.launch import launch

TEXT = Path(__file__).read_bytes()


def granularity(fqn: str, param: nn.Parameter) -> str | int:
    return "tensor" if param.ndim == 2 and not fqn.startswith(("wte", "wpe", "lm_head")) else 1


def batch(step: int, rank: int, size: int, length: int) -> tuple[Tensor, Tensor]:
    """Bytes of this file and those that follow; others on every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(len(TEXT) - length - 1, (size,), generator=generator).tolist()
    rows = torch.stack([torch.tensor(list(TEXT[i : i + length + 1])) for i in starts])
    return rows[:, :-1], rows[:, 1:]


def train(options: argparse.Namespace) -> None:
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    torch.manual_seed(0)
    config = GPTConfig(block_size=64, n_layer=4, n_head=4, n_embd=64)
    model = GPT(config).to(device)
    how = granularity if options.whole else 1
    fc.fully_shard(model, units=fc.wrap.by_class({Block}), granularity=how)

    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    chosen = set(matrices)
    others = [p for p in model.parameters() if p not in chosen]
    muon = fc.owner_step(matrices, partial(torch.optim.Muon, lr=0.02, weight_decay=0.01))
    optims = [muon, torch.optim.AdamW(others, lr=3e-3, weight_decay=0.01)]
    schedules = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, options.steps) for o in optims]
    done = 0
    if options.resume:
        done = fc.load_checkpoint(options.resume, model, optims)["step"]

    mine = muon.owners.count(dist.get_rank())
    print(f"rank {rank}: Muon has {mine} of {len(matrices)} matrices here", flush=True)
    for step in range(done, done + options.steps):
        tokens, targets = (t.to(device) for t in batch(step, rank, 8, config.block_size))
        loss = model(tokens, targets)[1]
        loss.backward()
        fc.clip_grad_norm_(model, 1.0)
        for optim, schedule in zip(optims, schedules, strict=True):
            optim.step()
            optim.zero_grad()
            schedule.step()
        if rank == 0 and (step % 10 == 0 or step == done + options.steps - 1):
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
    if options.save:
        fc.save_checkpoint(options.save, model, optims, extra={"step": done + options.steps})
    dist.destroy_process_group()


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--whole", action="store_true", help="never cut a matrix")
    parser.add_argument("--save", help="folder for a checkpoint at the end")
    parser.add_argument("--resume", help="checkpoint to go on from, of any number of ranks")
    parser.add_argument("--nproc", type=int, default=2, help="ranks, unless torchrun started this")
    options = parser.parse_args(args)
    if "RANK" not in os.environ:
        return launch(__file__, args, nproc=options.nproc)
    train(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
