"""Streams the weights of a sharded model, while it trains, into a server with a plain one.

    python examples/stream_weights.py                # two ranks on this machine, and the server
    torchrun --nproc-per-node 8 examples/stream_weights.py

Rank 0 starts the server, a process without ranks, and sends it one tensor at a time as raw bytes
through a pipe; no rank holds more than a bucket in full. The server has no other weights: its
held-out loss equals the trainer's only if all of them arrived.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from gpt import GPT, Block, GPTConfig
from text import Batches, documentation, split, windows
from torch import nn

import fsdp_compose as fc
from fsdp_compose.cli.launch import launch

CONFIG = GPTConfig(block_size=64, n_layer=3, n_head=4, n_embd=64)


@torch.no_grad()
def held_out_loss(model: nn.Module, device: torch.device) -> float:
    tokens, targets = windows(split(documentation()).held_out[:4097], CONFIG.block_size)
    return model(tokens.to(device), targets.to(device))[1].item()


def send(pipe: Connection | None, model: nn.Module) -> None:
    """Every rank gathers; rank 0, which has the pipe, sends."""
    for name, tensor in fc.iter_full(model, bucket_bytes=256 << 10, device="cpu"):
        if pipe is not None:
            data = bytearray(tensor.nbytes)
            torch.frombuffer(data, dtype=tensor.dtype).copy_(tensor.flatten())
            pipe.send_bytes(name.encode())
            pipe.send_bytes(data)
    if pipe is not None:
        pipe.send_bytes(b"")  # that was all


@torch.no_grad()
def receive(pipe: Connection, model: nn.Module) -> None:
    params = dict(model.named_parameters())
    for param in params.values():
        param.fill_(math.nan)  # nothing but what is received may count
    while name := pipe.recv_bytes().decode():
        param = params[name]
        data = torch.frombuffer(bytearray(pipe.recv_bytes()), dtype=param.dtype)
        param.copy_(data.view(param.shape))


def serve(pipe: Connection) -> None:
    """The server: it ends when the trainer's end of the pipe does, whatever happened there."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal
    model, prompt = GPT(CONFIG), torch.tensor([list(b"The ")])
    with suppress(EOFError, BrokenPipeError):
        while True:
            receive(pipe, model)
            loss = held_out_loss(model, torch.device("cpu"))
            text = bytes(model.generate(prompt, 40)[0].tolist())
            print(f"server {os.getpid()}: held-out loss {loss:.5f}, writes {text!r}", flush=True)
            pipe.send_bytes(str(loss).encode())


def train(options: argparse.Namespace) -> None:
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    pipe = None
    if rank == 0:
        spawn = multiprocessing.get_context("spawn")
        pipe, theirs = spawn.Pipe()
        spawn.Process(target=serve, args=(theirs,), daemon=True).start()
        theirs.close()  # so that the pipe breaks when the server ends
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)

    torch.manual_seed(0)
    model = fc.fully_shard(GPT(CONFIG).to(device), units=fc.wrap.by_class({Block}))
    optim = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ranks = dist.get_world_size()
    batches = Batches(split(documentation()).train, 4 * ranks, CONFIG.block_size, seed=0)
    for step in range(1, options.steps + 1):
        model(*(t.to(device) for t in batches.share(step, rank, ranks)))[1].backward()
        optim.step()
        optim.zero_grad()
        if step % options.every == 0:
            send(pipe, model)
            loss = held_out_loss(model, device)
            if pipe is not None:
                served = float(pipe.recv_bytes())
                print(f"step {step}: held-out loss {loss:.5f}", flush=True)
                assert math.isclose(loss, served, rel_tol=1e-4), (loss, served)
    dist.destroy_process_group()


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20, help="steps between two streams")
    parser.add_argument("--nproc", type=int, default=2, help="ranks, unless torchrun started this")
    options = parser.parse_args(args)
    if "RANK" not in os.environ:
        return launch(__file__, args, nproc=options.nproc)
    train(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
