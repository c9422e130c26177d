"""Reduces gradients around a ring, and counts the bytes that each link between two ranks carries.

    fsdp-compose run --nproc 2 examples/change_one_thing/own_collective.py

The seam is ``fully_shard(..., transport=)``: four functions over flat tensors. One of them is
replaced here; the others stay those that the library uses on gloo.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compose import fully_shard
from fsdp_compose.base.group import Call, Started
from fsdp_compose.comm.transports import PAIRS

sent: Counter[str] = Counter()  # bytes by link


def reduce_in_ring(whole: Tensor, parts: Sequence[Tensor], call: Call) -> Started:
    """Each part goes once around the ring, every rank adds its own, its owner comes last."""
    group = call.group
    left, right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    total = parts[left]
    for step in range(2, group.size + 1):
        received, part = torch.empty_like(total), parts[(group.rank - step) % group.size]
        sending = dist.isend(total, group=group.pg, group_dst=right, tag=call.tag)
        dist.recv(received, group=group.pg, group_src=left, tag=call.tag)
        sending.wait()
        sent[f"{group.rank} -> {right}"] += total.nbytes
        total = received.add_(part)
    return Started(parts=[total])


def main() -> None:
    dist.init_process_group("gloo")
    ring = replace(PAIRS, reduce_scatter=reduce_in_ring, may_wait=True)
    for name, transport in {"pairs": None, "ring": ring}.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
        fully_shard(model, transport=transport)
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
        model(x).square().mean().backward()
        norm = sum(float(p.grad.full_tensor().norm()) for p in model.parameters())
        if dist.get_rank() == 0:
            print(f"{name}: gradients {norm:.6f}, bytes by link {dict(sent)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
