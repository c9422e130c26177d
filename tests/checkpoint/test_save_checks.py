"""What a save refuses, on every rank, before it touches what the folder holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_compose as fc

from harness import simulate_ranks

Options = Callable[[int, nn.Module], dict[str, Any]]


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


DIFFER: dict[str, Options] = {
    "optim": lambda rank, model: {"optim": sgd(model) if rank else None},
    "asynchronous": lambda rank, model: {"asynchronous": bool(rank)},
    "checksum": lambda rank, model: {"checksum": bool(rank)},
}


@pytest.mark.parametrize("option", DIFFER)
def test_ranks_save_with_the_same_options(tmp_path: Path, option: str) -> None:
    """Options of save_checkpoint that differ by rank raise at once; the old checkpoint stays."""

    def run(rank: int) -> None:
        model = fc.fully_shard(net())
        fc.save_checkpoint(tmp_path, model)
        changed = fc.fully_shard(net(1))
        with pytest.raises(RuntimeError, match=rf"different things: rank 0 has .*{option}"):
            fc.save_checkpoint(tmp_path, changed, **DIFFER[option](rank, changed))
        fc.load_checkpoint(tmp_path, changed)
        assert torch.equal(fc.state_dict(changed)["0.weight"], net()[0].weight)

    simulate_ranks(run, 2)
