"""Trains a GPT with tensor parallelism inside and sharded data parallelism outside.

    python examples/tensor_parallel.py               # 2 x 2 ranks on this machine
    torchrun --nproc-per-node 8 examples/tensor_parallel.py --tp 4

Rank 0 also trains the plain model on the whole batch, to show that the losses are equal. The
checkpoint at the end is that of a plain model: it loads in one process, or on any other mesh.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from gpt import GPT, Block, GPTConfig
from text import Batches, documentation, split
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp_compose as fc
from fsdp_compose.cli.launch import launch

CONFIG = GPTConfig(block_size=64, n_layer=2, n_head=4, n_embd=64)
PLAN = {
    # The rows of qkv are all of q, then k, then v. Cut evenly they are not heads, so the output is
    # put together again; what attention itself computes is repeated on the ranks of "tp".
    "attn.qkv": ColwiseParallel(output_layouts=Replicate()),
    "attn.proj": RowwiseParallel(input_layouts=Replicate()),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(),
}


def build(device: torch.device) -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG).to(device)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(options: argparse.Namespace) -> None:
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    degrees = (dist.get_world_size() // options.tp, options.tp)
    mesh = init_device_mesh(device.type, degrees, mesh_dim_names=("dp", "tp"))
    dp = mesh["dp"]

    model = build(device)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], PLAN)
    fc.fully_shard(model, mesh=dp, units=fc.wrap.by_class({Block}))
    optim = adamw(model)
    plain = build(device)
    plain_optim = adamw(plain)

    batches = Batches(split(documentation()).train, 4 * degrees[0], CONFIG.block_size, seed=0)
    for step in range(options.steps):
        # The ranks of "tp" work on the same rows.
        rows = batches.share(step, dp.get_local_rank(), degrees[0])
        loss = model(*(t.to(device) for t in rows))[1]
        loss.backward()
        norm = fc.clip_grad_norm_(model, 1.0)
        optim.step()
        optim.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=dp.get_group())
        mean /= degrees[0]

        if rank == 0:
            whole = plain(*(t.to(device) for t in batches.full(step)))[1]
            whole.backward()
            plain_norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            plain_optim.step()
            plain_optim.zero_grad()
            torch.testing.assert_close(mean, whole.detach(), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(norm, plain_norm, rtol=1e-2, atol=1e-4)
            print(f"step {step:4d}  loss {mean:.5f} norm {norm:.4f}  ", end="")
            print(f"one process: {whole:.5f} {plain_norm:.4f}", flush=True)

    with tempfile.TemporaryDirectory() as own:
        name = [options.save or own]
        dist.broadcast_object_list(name, device=device)
        fc.save_checkpoint(name[0], model, optim)
        with torch.no_grad():
            x = batches.full(options.steps)[0].to(device)
            logits = model(x)
        dist.destroy_process_group()
        if rank == 0:  # a process of its own from here
            alone = GPT(CONFIG).to(device)
            fc.load_checkpoint(name[0], alone, adamw(alone))
            found = alone(x).detach()
            torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)
            print(f"loaded into a plain model: logits differ by {(found - logits).abs().max():.1e}")


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tp", type=int, default=2, help="ranks that share each layer")
    parser.add_argument("--save", help="folder for the checkpoint (default: a temporary one)")
    parser.add_argument("--nproc", type=int, default=4, help="ranks, unless torchrun started this")
    options = parser.parse_args(args)
    if "RANK" not in os.environ:
        return launch(__file__, args, nproc=options.nproc)
    train(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
