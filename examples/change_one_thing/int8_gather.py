"""Gathers weights as int8, in blocks with a scale each: a quarter of the bytes of fp32.

    fsdp-compose run --nproc 2 examples/change_one_thing/int8_gather.py

The seam is ``MixedPrecision(gather_codec=)``: one function that encodes this rank's shard as bytes,
and one that decodes those of each rank. Shards, gradients and checkpoints stay exact. Quantised
gathers: Wang et al., "ZeRO++", 2023.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compose import GatherCodec, MixedPrecision, count_traffic, fully_shard

BLOCK = 128  # elements that share a scale


def encode(shard: Tensor) -> Tensor:
    """The shard's int8 values, then the fp32 scales of their blocks."""
    blocks = nn.functional.pad(shard.float(), (0, -shard.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1).clamp_min(1e-12) / 127
    values = (blocks / scales[:, None]).round().to(torch.int8)
    return torch.cat([values.view(-1).view(torch.uint8), scales.view(torch.uint8)])


def decode(encoded: Tensor, into: Tensor) -> None:
    """Fill one rank's part of the gathered weights."""
    blocks = -(-into.numel() // BLOCK)
    values, scales = encoded.split([blocks * BLOCK, 4 * blocks])
    exact = values.view(torch.int8).view(-1, BLOCK) * scales.view(torch.float32)[:, None]
    into.copy_(exact.view(-1)[: into.numel()])


def main() -> None:
    dist.init_process_group("gloo")
    for name, codec in {"fp32": None, "int8": GatherCodec(encode, decode)}.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
        fully_shard(model, mp_policy=MixedPrecision(gather_codec=codec))
        optim = torch.optim.AdamW(model.parameters(), lr=0.01)
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1 + dist.get_rank()))
        for _ in range(20):
            with count_traffic() as traffic:
                loss = (model(x) - x.sin()).square().mean()
                loss.backward()
            optim.step()
            optim.zero_grad()
        if dist.get_rank() == 0:
            print(f"{name}: {traffic.gather_bytes} bytes gathered in a step, loss {loss:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
