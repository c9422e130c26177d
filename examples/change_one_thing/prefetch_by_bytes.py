"""Gathers units ahead by bytes instead of by number: narrow ones several at once, wide ones alone.

    fsdp-compose run --nproc 2 examples/change_one_thing/prefetch_by_bytes.py

The seam is ``Prefetch.rule``, a function of the units that run next and of the bytes that are held.
The engine asks it before each gather ahead, and ``plan`` asks it too, so that the plan's peak is
that of the real step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compose import Prefetch, fully_shard, plan, wrap

LIMIT = 2 << 20  # bytes of gathered parameters


def within_limit(upcoming: Sequence[tuple[str, int]], held: int) -> int:
    """As many of the next units as fit beside what is gathered already."""
    for count, (_, nbytes) in enumerate(upcoming):
        held += nbytes
        if held > LIMIT:
            return count
    return len(upcoming)


def model() -> nn.Sequential:
    """Narrow layers of 0.25 MiB and, among them, wide ones of 1 MiB."""
    torch.manual_seed(0)
    widths = [256, 256, 256, 1024, 256, 256, 256, 1024, 256]
    return nn.Sequential(*[nn.Linear(a, b) for a, b in pairwise(widths)])


def main() -> None:
    dist.init_process_group("gloo")
    layers = wrap.by_class({nn.Linear})
    for name, prefetch in {
        "four ahead": Prefetch(forward=4, backward=4),
        "four ahead within the limit": Prefetch(forward=4, backward=4, rule=within_limit),
    }.items():
        sharded = fully_shard(model(), units=layers, prefetch=prefetch)
        for seed in range(3):
            batch = torch.randn(8, 256, generator=torch.Generator().manual_seed(seed))
            sharded(batch).square().mean().backward()
        peak = plan(sharded).memory.forward.gathered
        norm = sum(float(p.grad.full_tensor().norm()) for p in sharded.parameters())
        if dist.get_rank() == 0:
            print(f"{name}: {peak} bytes gathered at most, gradients {norm:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
