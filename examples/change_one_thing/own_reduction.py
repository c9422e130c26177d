"""A communication hook that reduces signs, a byte an element, with what that loses fed back.

    fsdp-compose run --nproc 2 examples/change_one_thing/own_reduction.py

Error feedback: Karimireddy et al., "Error Feedback Fixes SignSGD", 2019.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compose import GradBucket, fully_shard, register_comm_hook


@dataclass
class Errors:
    """What each bucket's gradients lost so far, of this rank."""

    by_bucket: dict[str, Tensor] = field(default_factory=dict)


def reduce_signs(state: Errors, grads: GradBucket) -> Tensor:
    """The average of all ranks' signs, each times the mean magnitude of that rank's gradients."""
    wanted = grads.flat + state.by_bucket.get(grads.key, torch.zeros(()))
    scale = wanted.abs().mean()
    signs = wanted.sign().to(torch.int8)
    state.by_bucket[grads.key] = wanted - signs * scale
    received = torch.empty_like(signs)  # every rank's signs of the part that is this rank's
    dist.all_to_all_single(received, signs, group=grads.shard.pg)
    scales = [torch.empty_like(scale) for _ in grads.parts]
    dist.all_gather(scales, scale, group=grads.shard.pg)
    part = torch.stack(scales) @ received.view(grads.shard.size, -1).float() * grads.scale
    if grads.replicate.size > 1:  # a hybrid strategy: other ranks hold copies of this part
        dist.all_reduce(part, group=grads.replicate.pg)
    return part


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)))
    register_comm_hook(model, Errors(), reduce_signs)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1 + dist.get_rank()))
    for step in range(60):
        loss = (model(x) - x[:, :1].sin()).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        if step in (0, 59) and dist.get_rank() == 0:
            print(f"loss {loss.detach():.3f} after {step} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
