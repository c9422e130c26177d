"""Lays parameters out so that each starts at a multiple of 256 bytes of the gathered buffer.

    fsdp-compose run --nproc 2 examples/change_one_thing/own_layout.py

The seam is ``fully_shard(..., layout=)``: a function of integers that returns a ``Layout``. What it
returns is proved where it is built: in bounds, no overlap, shards aligned, no block cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compose import fully_shard, get_state
from fsdp_compose.layout.shards import Extent, Layout

START = 256  # bytes


def aligned(extents: Sequence[Extent], itemsize: int, world_size: int) -> Layout:
    """One parameter after another, each from the next multiple of ``START`` bytes on."""
    unit = START // itemsize
    offsets, end = [], 0
    for extent in extents:
        offsets.append(end)
        end += -(-extent.numel // unit) * unit
    shard = -(-end // (world_size * unit)) * unit
    return Layout(tuple(extents), tuple(offsets), shard, world_size, itemsize)


def main() -> None:
    dist.init_process_group("gloo")
    for name, options in {"default": {}, "aligned": {"layout": aligned}}.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 3))
        fully_shard(model, **options)
        optim = torch.optim.AdamW(model.parameters(), lr=0.01)
        for seed in range(3):
            x = torch.randn(8, 30, generator=torch.Generator().manual_seed(seed))
            loss = model(x).square().mean()
            loss.backward()
            optim.step()
            optim.zero_grad()
        layout = get_state(model).unit.buckets[0].layout
        starts = [offset * layout.itemsize % START for offset in layout.offsets]
        if dist.get_rank() == 0:
            print(f"{name}: starts {starts}, padding {layout.padding_bytes}, loss {loss:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
