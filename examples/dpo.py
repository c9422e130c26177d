"""Trains a sharded policy against a sharded, frozen reference with DPO (Rafailov et al. 2023).

    python examples/dpo.py                           # two ranks on this machine
    torchrun --nproc-per-node 8 examples/dpo.py

The policy first learns Python's documentation; its copy is the reference. In each pair the chosen
continuation is what the text says, the rejected one has some of its bytes replaced.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, Block, GPTConfig
from text import Batches, documentation, split
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose.cli.launch import launch

CONFIG = GPTConfig(block_size=64, n_layer=3, n_head=4, n_embd=64)
PROMPT, BETA = 32, 0.1  # bytes that both continuations follow; the strength of the reference


def pairs(batches: Batches, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """This rank's inputs and targets, (2 rows, time) each: the chosen rows, then the rejected."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens, targets = batches.share(step, rank, ranks)
    chosen = torch.cat([tokens, targets[:, -1:]], 1)
    generator = torch.Generator().manual_seed(step * ranks + rank)
    others = batches.data[torch.randint(len(batches.data), chosen.shape, generator=generator)]
    replaced = torch.rand(chosen.shape, generator=generator) < 0.3
    replaced[:, :PROMPT] = False
    both = torch.cat([chosen, torch.where(replaced, others.long(), chosen)]).to(device)
    return both[:, :-1], both[:, 1:]


def log_prob(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Of each row's continuation, given its prompt."""
    words = model(tokens).float().log_softmax(-1).gather(2, targets[..., None])
    return words[:, PROMPT - 1 :].sum((1, 2))


def margins(policy: nn.Module, reference: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """By how much the policy prefers each chosen row more than the reference does, in nats."""
    with torch.no_grad():
        base = log_prob(reference, tokens, targets)
    chosen, rejected = (log_prob(policy, tokens, targets) - base).chunk(2)
    return chosen - rejected


@torch.no_grad()
def accuracy(margin: Tensor) -> float:
    """The share of all ranks' pairs with a positive margin; ties are half right."""
    mean = (margin.sign().mean() + 1) / 2 / dist.get_world_size()
    dist.all_reduce(mean)
    return float(mean)


def train(options: argparse.Namespace) -> None:
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    ranks, corpus = dist.get_world_size(), split(documentation())
    train_on = Batches(corpus.train, 8 * ranks, CONFIG.block_size, seed=0)
    unseen = pairs(Batches(corpus.held_out, 128 * ranks, CONFIG.block_size, seed=1), 0, device)

    torch.manual_seed(0)
    policy = fc.fully_shard(GPT(CONFIG).to(device), units=fc.wrap.by_class({Block}))
    optim = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for step in range(options.base_steps):
        policy(*(t.to(device) for t in train_on.share(step, rank, ranks)))[1].backward()
        optim.step()
        optim.zero_grad()
    reference = copy.deepcopy(policy).requires_grad_(False).eval()  # its own shards
    optim = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    before = accuracy(margins(policy, reference, *unseen))
    for step in range(options.steps):
        losses = []
        # One reduction for each unit of the policy, however many microbatches; no other.
        with fc.count_traffic() as traffic, fc.accumulate(policy, keep="unsharded"):
            for micro in range(options.micro):
                batch = pairs(train_on, step * options.micro + micro, device)
                loss = -F.logsigmoid(BETA * margins(policy, reference, *batch)).mean()
                (loss / options.micro).backward()
                losses.append(loss.detach())
        fc.clip_grad_norm_(policy, 1.0)
        optim.step()
        optim.zero_grad()
        if rank == 0 and step % 5 == 0:
            print(f"step {step:4d}  loss {torch.stack(losses).mean():.4f}", flush=True)
    after = accuracy(margins(policy, reference, *unseen))
    if rank == 0:
        print(f"reduce-scatters a step: {traffic.reduces}, units: {len(fc.units_of(policy))}")
        print(f"accuracy on unseen pairs: {before:.3f}, then {after:.3f}")
    dist.destroy_process_group()


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--base-steps", type=int, default=60, help="of language modelling before")
    parser.add_argument("--micro", type=int, default=2, help="microbatches a step")
    parser.add_argument("--nproc", type=int, default=2, help="ranks, unless torchrun started this")
    options = parser.parse_args(args)
    if "RANK" not in os.environ:
        return launch(__file__, args, nproc=options.nproc)
    train(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
