"""benchmarks/gpu.py counts what a trace says, and its sides train the same model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import gpu

from harness import run_ranks


def test_a_trace_is_counted_by_hand() -> None:
    """0-10 compute, 5-20 a collective, 30-35 a copy: of 35, 10 idle and 10 in collectives alone."""
    names = {"kernel": ("gemm", "ncclDevKernel"), "gpu_memcpy": ("Memcpy",)}
    spans = {"gemm": (0.0, 10.0), "ncclDevKernel": (5.0, 15.0), "Memcpy": (30.0, 5.0)}
    events = [
        {"cat": cat, "name": name, "ts": spans[name][0], "dur": spans[name][1]}
        for cat, some in names.items()
        for name in some
    ]
    found = gpu.read_trace([*events, {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 99}])
    assert (found.kernels, found.copies) == (2, 1)
    assert found.idle == 10 / 35 and found.exposed == 10 / 35
    assert gpu.read_trace([]) == gpu.Profile(0, 0, 1.0, 0.0)


def test_its_sides_train_the_same() -> None:
    """On the CPU as on a GPU; a side whose losses differ is named."""
    options = argparse.Namespace(
        device="cpu", sides=list(gpu.SIDES), batch=2, seq=16, warmup=3, steps=1, rounds=1
    )

    def ranks(rank: int) -> None:
        with gpu.common.without_torch_warnings():
            cell = gpu.run_cell("tiny", 1, init_device_mesh("cpu", (1,)), options)
        assert not cell.failures and not cell.strays()
        assert [row[0] for row in cell.rows()] == [f"tiny, 1, {name}" for name in gpu.SIDES]
        losses = cell.figures["ours"][0].losses
        assert float(losses[-1]) < float(losses[0])
        losses[-1] += torch.tensor(0.1)
        assert "losses of ours leave" in cell.strays()[0]

    run_ranks(ranks, 1)
