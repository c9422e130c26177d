"""Trains a WGAN-GP, whose critic is sharded and differentiated twice (Gulrajani et al. 2017).

    python examples/gradient_penalty.py              # two ranks on this machine
    torchrun --nproc-per-node 8 examples/gradient_penalty.py

The data are eight Gaussians on a circle. The first critic loss and its gradients are compared with
those of one process on the samples of all ranks.
"""

from __future__ import annotations

import argparse
import math
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose.cli.launch import launch

ROWS, NOISE, WIDTH, CRITIC_STEPS, PENALTY = 128, 8, 64, 5, 0.1


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    hidden = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU()) for _ in range(2)]
    return nn.Sequential(nn.Linear(inputs, WIDTH), *hidden, nn.Linear(WIDTH, outputs))


def draw(seed: int, rows: int, device: torch.device) -> list[Tensor]:
    """Data (rows, 2), noise (rows, NOISE) and where to take the penalty (rows, 1)."""
    generator = torch.Generator().manual_seed(seed)
    angle = torch.randint(8, (rows,), generator=generator) * (math.pi / 4)
    spread, noise = torch.randn(rows, 2 + NOISE, generator=generator).split([2, NOISE], 1)
    real = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * spread
    return [t.to(device) for t in (real, noise, torch.rand(rows, 1, generator=generator))]


def critic_loss(critic: nn.Module, real: Tensor, fake: Tensor, mix: Tensor) -> Tensor:
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    return critic(fake).mean() - critic(real).mean() + PENALTY * penalty


def energy_distance(x: Tensor, y: Tensor) -> float:
    """Between the distributions of two sets of samples; 0 where they are equal."""
    return float(2 * torch.cdist(x, y).mean() - torch.cdist(x, x).mean() - torch.cdist(y, y).mean())


def compare(critic: nn.Module, loss: Tensor, whole: Tensor, grads: list[Tensor]) -> None:
    """Prints loss and gradients beside those of one process; raises if they differ."""
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    found = [p.grad.full_tensor() for p in critic.parameters()]
    torch.testing.assert_close([mean, *found], [whole.detach(), *grads], rtol=1e-4, atol=1e-6)
    worst = max(float((a - b).abs().max()) for a, b in zip(found, grads))
    if dist.get_rank() == 0:
        print(f"loss {mean:.6f}, one process: {whole:.6f}; gradients differ by {worst:.1e}")


def train(options: argparse.Namespace) -> None:
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    critic, maker = mlp(2, 1).to(device), mlp(NOISE, 2).to(device)
    real, noise, mix = draw(0, ROWS, device)  # the samples of all ranks, as one process would
    whole = critic_loss(critic, real, maker(noise).detach(), mix)
    grads = list(torch.autograd.grad(whole, list(critic.parameters())))

    for model in (critic, maker):
        fc.fully_shard(model, units=fc.wrap.by_class({nn.Sequential}))
    critic_optim, maker_optim = (
        torch.optim.Adam(m.parameters(), lr=2e-3, betas=(0.5, 0.9)) for m in (critic, maker)
    )
    unseen = draw(-1, 1000, device)
    for step in range(options.steps):
        for inner in range(CRITIC_STEPS):
            samples = draw(step * CRITIC_STEPS + inner, ROWS, device)
            real, noise, mix = (t.chunk(ranks)[rank] for t in samples)
            with torch.no_grad():
                fake = maker(noise)
            loss = critic_loss(critic, real, fake, mix)
            loss.backward()
            if step == inner == 0:
                compare(critic, loss, whole, grads)
            critic_optim.step()
            critic_optim.zero_grad()
        critic.requires_grad_(False)  # passes gradients on, and reduces none
        (-critic(maker(noise)).mean()).backward()
        critic.requires_grad_(True)
        maker_optim.step()
        maker_optim.zero_grad()
        if step % 10 == 0 or step == options.steps - 1:
            with torch.no_grad():
                distance = energy_distance(unseen[0], maker(unseen[1]))
            if rank == 0:
                print(f"step {step:4d}  energy distance {distance:.4f}", flush=True)
    dist.destroy_process_group()


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="of the generator")
    parser.add_argument("--nproc", type=int, default=2, help="ranks, unless torchrun started this")
    options = parser.parse_args(args)
    if "RANK" not in os.environ:
        return launch(__file__, args, nproc=options.nproc)
    train(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
