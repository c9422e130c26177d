"""Fine-tunes a GPT with LoRA: the base is frozen and sharded, and only adapters are reduced.

    python examples/lora.py --save adapters.pt       # two ranks on this machine
    torchrun --nproc-per-node 8 examples/lora.py

A base model learns Python's documentation, then adapters on its upper blocks learn Python source.
At the end they are merged into the base, which is then a plain GPT and can be exported as one.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, Block, GPTConfig
from text import Batches, documentation, split, windows
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose.cli.launch import launch

CONFIG = GPTConfig(block_size=64, n_layer=4, n_head=4, n_embd=64)


class LoRA(nn.Module):
    """A frozen linear layer plus a trained update of low rank, scale B A (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear, rank: int = 8, scale: float = 2.0) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.A = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * F.linear(F.linear(x, self.A), self.B)


def projections(blocks: nn.ModuleList) -> list[tuple[nn.Module, str]]:
    return [(m, n) for b in blocks for m in (b.attn, b.mlp) for n, _ in m.named_children()]


def fit(model: nn.Module, batches: Batches, steps: int, lr: float) -> str:
    """Trains what requires grad; returns what the last step communicated."""
    device = next(model.parameters()).device
    optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    for step in range(steps):
        x, y = batches.share(step, dist.get_rank(), dist.get_world_size())
        with fc.count_traffic() as traffic:
            model(x.to(device), y.to(device))[1].backward()
        optim.step()
        optim.zero_grad()
    return f"{traffic.reduces} reduce-scatters, {traffic.reduce_bytes} bytes"


def merge(model: GPT) -> None:
    """Adds the adapters to the weights and takes them off, alike on every rank."""
    with fc.gathered(model, writeback=True):
        for part, name in projections(model.blocks):
            if isinstance(lora := getattr(part, name), LoRA):
                lora.base.weight += lora.scale * lora.B @ lora.A
                setattr(part, name, lora.base)
    fc.refresh(model)


def train(options: argparse.Namespace) -> None:
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    say, rows = print if rank == 0 else lambda text: None, 4 * dist.get_world_size()
    torch.manual_seed(0)
    model = fc.fully_shard(GPT(CONFIG).to(device), units=fc.wrap.by_class({Block}))
    prose = Batches(split(documentation()).train, rows, CONFIG.block_size, seed=0)
    say(f"base: a step takes {fit(model, prose, options.base_steps, 3e-3)}")
    model.requires_grad_(False)
    for part, name in projections(model.blocks[CONFIG.n_layer // 2 :]):
        setattr(part, name, LoRA(getattr(part, name)).to(device))
    fc.refresh(model)  # shards what is new
    source = split(Path(argparse.__file__).read_text())
    code = Batches(source.train, rows, CONFIG.block_size, seed=1)
    x, y = (t.to(device) for t in windows(source.held_out, CONFIG.block_size))
    with torch.no_grad():
        say(f"held-out loss before {model(x, y)[1]:.4f}")
    say(f"LoRA: a step takes {fit(model, code, options.steps, 1e-2)}")
    adapters = {n: p.full_tensor() for n, p in model.named_parameters() if p.requires_grad}
    if rank == 0 and options.save:
        torch.save(adapters, options.save)
    with torch.no_grad():
        before, loss = model(x, y)
        merge(model)
        after = model(x)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    say(f"held-out loss after {loss:.4f}, with {len(adapters)} adapter tensors")
    say(f"merged: logits differ by at most {(after - before).abs().max():.1e}")
    if options.export:
        fc.save_full(options.export, model)
    dist.destroy_process_group()


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="of the adapters")
    parser.add_argument("--base-steps", type=int, default=100)
    parser.add_argument("--save", help="file for the adapters")
    parser.add_argument("--export", help="folder for the merged model, as safetensors")
    parser.add_argument("--nproc", type=int, default=2, help="ranks, unless torchrun started this")
    options = parser.parse_args(args)
    if "RANK" not in os.environ:
        return launch(__file__, args, nproc=options.nproc)
    train(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
