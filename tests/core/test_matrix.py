"""Every strategy times mixed precision, accumulation, checkpointing and offload equals one process.

A cell trains a tower for two SGD steps of two microbatches each. In fp32 it must equal the plain
model on the concatenated batch; in bf16 it must equal FULL_SHARD's plainest cell, which differs
from another strategy in the order of fp32 sums only, and follow the plain model within bf16.
"""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_compose import MixedPrecision, Offload, ShardingStrategy, fully_shard, state_dict
from fsdp_compose.base.process import here
from fsdp_compose.scopes.switches import accumulate, no_sync

from harness import DEVICE, run_ranks
from models import Block, mesh_of_replicas

STRATEGIES: dict[str, dict[str, Any]] = {
    "full_shard": {"strategy": ShardingStrategy.FULL_SHARD},
    "shard_grad_op": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "zero1": {"strategy": ShardingStrategy.ZERO1},
    "no_shard": {"strategy": ShardingStrategy.NO_SHARD},
    "hybrid_shard": {"strategy": ShardingStrategy.HYBRID_SHARD},
    "hybrid_shard_zero2": {"strategy": ShardingStrategy.HYBRID_SHARD_ZERO2},
    "hybrid_shard_optimizer": {"strategy": ShardingStrategy.HYBRID_SHARD_OPTIMIZER},
    "spread": {"reshard_after_forward": 2},
}
PRECISIONS = {
    "fp32": MixedPrecision(),
    "bf16": MixedPrecision(torch.bfloat16, torch.float32),
}
ACCUMULATIONS = ("backward", "no_sync", "no_all_reduce")
CHECKPOINTS = ("none", "non-reentrant", "reentrant")
OFFLOADS = {
    "none": Offload(),
    "params": Offload(params=True),
    "grads": Offload(grads=True),
    "optimizer+grads": Offload(optimizer=True, grads=True),
}


class Tower(nn.Module):
    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 2)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.checkpointing == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return self.head(x)


def build(checkpointing: str = "none") -> Tower:
    torch.manual_seed(3)
    return Tower(checkpointing).to(DEVICE)


def batch(step: int, micro: int, ranks: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + micro)
    return torch.randn(3 * ranks, 6, generator=generator).to(DEVICE)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean() / 2


def train_plain(ranks: int) -> dict[str, Tensor]:
    model = build()
    optim = torch.optim.SGD(model.parameters(), lr=0.2)
    for step, micro in itertools.product(range(2), range(2)):
        loss_of(model, batch(step, micro, ranks)).backward()
        if micro:
            optim.step()
            optim.zero_grad()
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def train_cell(
    rank: int, ranks: int, options: dict[str, Any], accumulation: str, checkpointing: str
) -> dict[str, Tensor]:
    model = build(checkpointing)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optim = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(2):
        scopes = {
            "backward": lambda: accumulate(model, keep="sharded"),
            "no_sync": lambda: no_sync(model),
            "no_all_reduce": lambda: accumulate(model, keep="no_all_reduce"),
        }
        mine = slice(3 * rank, 3 * rank + 3)
        with scopes[accumulation]():
            loss_of(model, batch(step, 0, ranks)[mine]).backward()
            if accumulation != "no_sync":  # accumulate() is around all of them
                loss_of(model, batch(step, 1, ranks)[mine]).backward()
        if accumulation == "no_sync":
            loss_of(model, batch(step, 1, ranks)[mine]).backward()
        optim.step()
        optim.zero_grad()
    return {k: v.clone().to(DEVICE) for k, v in state_dict(model, kind="full").items()}


Cell: TypeAlias = tuple[str, str, str, str]
CELLS: list[Cell] = list(itertools.product(PRECISIONS, ACCUMULATIONS, CHECKPOINTS, OFFLOADS))


def cover_pairs(cells: list[Cell]) -> list[Cell]:
    """Few cells in which every two choices of ``cells`` meet somewhere."""

    def pairs(cell: Cell) -> set[tuple[tuple[int, str], ...]]:
        return set(itertools.combinations(enumerate(cell), 2))

    missing = set().union(*map(pairs, cells))
    chosen = []
    while missing:
        chosen.append(max(cells, key=lambda cell: len(pairs(cell) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


def run_cells(rank: int, ranks: int, name: str, cells: list[Cell]) -> list[str]:
    """Names of the cells of one strategy that are wrong, with by how much."""
    wrong: list[str] = []
    plain = train_plain(ranks)
    options = dict(STRATEGIES[name])
    if name.startswith("hybrid"):
        options["mesh"] = mesh_of_replicas(2, ranks // 2)
    base = {
        precision: train_cell(rank, ranks, {"mp_policy": policy}, "backward", "none")
        for precision, policy in PRECISIONS.items()
    }
    for precision, accumulation, checkpointing, offload in cells:
        cell = train_cell(
            rank,
            ranks,
            {
                **options,
                "mp_policy": PRECISIONS[precision],
                "offload_policy": OFFLOADS[offload],
            },
            accumulation,
            checkpointing,
        )
        against = plain if precision == "fp32" else base["bf16"]
        error = max(float((cell[k] - against[k]).abs().max()) for k in plain)
        drift = max(float((cell[k] - plain[k]).abs().max()) for k in plain)
        if error > 1e-6 or drift > 1e-2:
            wrong.append(f"{precision}/{accumulation}/{checkpointing}/{offload}: {error:.1e}")
    return wrong


ON_FOUR = ("hybrid_shard", "hybrid_shard_optimizer", "spread")
"""Strategies over two axes, which do something else on four ranks than on two."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks"),
    [*((name, 2) for name in STRATEGIES if name != "spread"), *((name, 4) for name in ON_FOUR)],
)
def test_every_cell_equals_one_process(name: str, ranks: int) -> None:
    """Every cell of the plainest strategy; elsewhere every two choices meet."""
    every = ranks == 2 and name == "full_shard"
    cells = CELLS if every else cover_pairs(CELLS)
    assert run_ranks(run_cells, ranks, ranks, name, cells, timeout=200) == [[]] * ranks


def test_covering_cells_hold_every_pair() -> None:
    chosen = cover_pairs(CELLS)
    assert len(chosen) < 20
    for cell in CELLS:
        for one, two in itertools.combinations(range(4), 2):
            assert any(c[one] == cell[one] and c[two] == cell[two] for c in chosen)


def count_step(rank: int, ranks: int, name: str, accumulation: str) -> tuple[int, int, int]:
    options = dict(STRATEGIES[name])
    if name.startswith("hybrid"):
        options["mesh"] = mesh_of_replicas(2, ranks // 2)
    model = build()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optim = torch.optim.SGD(model.parameters(), lr=0.2)
    scope = no_sync if accumulation == "no_sync" else accumulate
    keep = {} if accumulation == "no_sync" else {"keep": accumulation}
    for _ in range(2):
        here.traffic.reset()
        with scope(model, **keep):
            loss_of(model, batch(0, 0, ranks)[:3]).backward()
            if accumulation != "no_sync":
                loss_of(model, batch(0, 1, ranks)[:3]).backward()
        if accumulation == "no_sync":
            loss_of(model, batch(0, 1, ranks)[:3]).backward()
        optim.step()
        optim.zero_grad()
    return here.traffic.gathers, here.traffic.reduces, here.traffic.all_reduces


# Three units: two blocks and the root, which stays gathered from forward to backward.
COUNTS = {
    # strategy, accumulation: gathers, reduce-scatters, all-reduces in a step of two microbatches
    ("full_shard", "sharded"): (10, 6, 0),
    ("full_shard", "no_sync"): (10, 3, 0),
    ("shard_grad_op", "sharded"): (6, 6, 0),
    ("shard_grad_op", "no_sync"): (6, 3, 0),
    ("zero1", "no_sync"): (3, 3, 0),
    ("no_shard", "sharded"): (0, 0, 6),
    ("no_shard", "no_sync"): (0, 0, 3),
    ("hybrid_shard", "sharded"): (10, 6, 6),
    ("hybrid_shard", "no_all_reduce"): (10, 6, 3),
    ("hybrid_shard", "no_sync"): (10, 3, 3),
    ("hybrid_shard_zero2", "no_all_reduce"): (6, 6, 3),
    ("hybrid_shard_optimizer", "sharded"): (13, 12, 0),
    ("hybrid_shard_optimizer", "no_all_reduce"): (13, 9, 0),
    ("hybrid_shard_optimizer", "no_sync"): (13, 6, 0),
    ("spread", "sharded"): (12, 6, 0),
}


def test_collectives_of_an_accumulated_step() -> None:
    def count(rank: int) -> dict[tuple[str, str], tuple[int, int, int]]:
        return {cell: count_step(rank, 4, *cell) for cell in COUNTS}

    assert run_ranks(count, 4) == [COUNTS] * 4
