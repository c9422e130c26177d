"""A step's forward and backward as one CUDA graph, over static buffers: run with ``-m cuda``."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from fsdp_compose import MixedPrecision, ShardingStrategy

from harness import run_ranks
from models import Tolerance, Tower, Twin, by_block, data

pytestmark = pytest.mark.cuda

CELLS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "cast": {"mp_policy": MixedPrecision(torch.float32, torch.float64)},
}


def wide(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).double().square().mean()


def warm_up(twin: Twin, stream: torch.cuda.Stream) -> None:
    """Two steps of both, on ``stream``."""
    here = torch.cuda.current_stream()
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        for seed in range(2):
            twin.backward(wide, seed)
            twin.step()
    here.wait_stream(stream)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("beside", [False, True], ids=["on its stream", "on another stream"])
@pytest.mark.parametrize("cell", CELLS)
def test_a_replayed_step_equals_one_process(cell: str, beside: bool, world: int) -> None:
    """Wherever the steps before it ran."""

    def ranks(rank: int) -> None:
        shard = partial(by_block, static_buffers=True, **CELLS[cell])
        twin = Twin(rank, world, partial(Tower, 4), shard)
        if cell == "cast":
            twin.tolerance = Tolerance(1e-4, 1e-5)
        warm_up(twin, torch.cuda.Stream() if beside else torch.cuda.current_stream())
        x, graph = data(7, rank), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            wide(twin.model, x).backward()
        for seed in range(10, 14):
            x.copy_(data(seed, rank))
            graph.replay()
            torch.stack(
                [wide(m, data(seed, r)) for r, m in enumerate(twin.plain)]
            ).mean().backward()
            twin.check_grads()
            twin.optim.step()
            twin.plain_optim.step()
            twin.plain_optim.zero_grad()
        twin.check()

    run_ranks(ranks, world)
