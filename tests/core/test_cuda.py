"""What only a device can show, on one GPU and a world of one: run with ``-m cuda``.

Compute is in bfloat16 and storage in float32, so that gathers, casts, streams and the copies of
offloaded shards are those of many ranks, without the collectives.

Written where no GPU was at hand, and not run on one yet.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_compose import MixedPrecision, Offload, Prefetch, ShardingStrategy, accumulate

from harness import run_ranks
from models import Tower, by_block, data, seeded, square

pytestmark = pytest.mark.cuda

BACKEND = "cpu:gloo,cuda:nccl"  # tells offloaded parameters where they compute
LOW = MixedPrecision(torch.bfloat16, torch.float32)
CELLS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "no prefetch": {"prefetch": Prefetch(0, 0, None)},
    "params offloaded": {"offload_policy": Offload(params=True)},
    "optimizer offloaded": {"offload_policy": Offload(optimizer=True)},
    "optimizer and grads offloaded": {"offload_policy": Offload(optimizer=True, grads=True)},
    "grads offloaded": {"offload_policy": Offload(grads=True)},
}


def build(device: str, **options: Any) -> torch.nn.Module:
    model = seeded(Tower).float()
    if not options.get("offload_policy", Offload()).shards:
        model.to(device)
    return by_block(model, mp_policy=LOW, **options)


def train(device: str, steps: int, **options: Any) -> dict[str, torch.Tensor]:
    model = build(device, **options)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        with accumulate(model):
            for micro in range(2):
                square(model, data(10 * step + micro, 0).float().to(device)).backward()
        optim.step()
        optim.zero_grad()
    return {name: p.full_tensor().cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize("cell", CELLS)
def test_training_is_that_of_the_cpu(cell: str) -> None:
    def ranks(rank: int) -> None:
        found, wanted = train("cuda", 3, **CELLS[cell]), train("cpu", 3)
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=2e-2, atol=2e-2)

    run_ranks(ranks, 1, backend=BACKEND)


@pytest.mark.parametrize("cell", ["default", "kept", "no prefetch"])
def test_a_step_never_waits_and_memory_stays(cell: str) -> None:
    """A step never waits and uses the same memory each time."""

    def ranks(rank: int) -> None:
        model = build("cuda", **CELLS[cell])
        optim = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        x = data(0, 0).float().to("cuda")
        peaks = []
        for step in range(6):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
            square(model, x).backward()
            optim.step()
            optim.zero_grad()
            torch.cuda.set_sync_debug_mode("default")
            peaks.append(torch.cuda.max_memory_allocated())
        assert len(set(peaks[2:])) == 1, peaks

    run_ranks(ranks, 1, backend=BACKEND)
