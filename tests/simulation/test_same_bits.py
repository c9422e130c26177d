"""What only changes when memory is used changes no bit of what is trained, in any order of events.

A run of four ranks reduces in the ranks' order. So prefetch, checkpointing, offload, granularity,
units and strategy can be switched: after three steps of AdamW the parameters are the same bits.
Strategies over two axes add up over one axis first, and so agree among themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_compose as fc
from fsdp_compose import Offload, Prefetch, ShardingStrategy, simulate

from models import Checkpointed, Tower, by_block, data, mesh_of_replicas, nested, one_unit, seeded

Shard = Callable[[nn.Module], Any]
Build = Callable[[], nn.Module]


def train(build: Build, shard: Shard) -> str:
    """A hash of all parameters after three steps."""
    model = seeded(build).float()
    shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    for step in range(3):
        x = data(step, dist.get_rank()).float()
        model(x).square().mean().backward()
        fc.clip_grad_norm_(model, 1.0)
        optim.step()
        optim.zero_grad()
    digest = hashlib.sha256()
    for name, value in sorted(fc.state_dict(model, cpu_offload=True).items()):
        digest.update(name.encode() + bytes(value.flatten().view(torch.uint8).tolist()))
    return digest.hexdigest()


def with_options(shard: Shard = by_block, **options: Any) -> Shard:
    return lambda model: shard(model, **options)


def over_replicas(strategy: str) -> Shard:
    chosen = ShardingStrategy[strategy]
    return lambda model: by_block(model, mesh=mesh_of_replicas(2, 2), strategy=chosen)


PREFETCH = [with_options(prefetch=Prefetch(*depths)) for depths in ((0, 0), (2, 3), (1, 1, "post"))]
STRATEGY = [
    with_options(strategy=ShardingStrategy[name]) for name in ("SHARD_GRAD_OP", "NO_SHARD", "ZERO1")
]
VARIANTS: dict[str, list[tuple[Build, Shard]]] = {
    "prefetch": [(Tower, shard) for shard in PREFETCH],
    "units": [(Tower, one_unit), (Tower, nested)],
    "granularity": [(Tower, with_options(granularity=g)) for g in ("row", "tensor", 8)],
    "offload": [(Tower, with_options(offload_policy=Offload(params=True, grads=True)))],
    "strategy": [(Tower, shard) for shard in STRATEGY],
    "checkpointing": [
        (lambda where=where, reentrant=reentrant: Checkpointed(where, reentrant), by_block)
        for where in ("outside", "inside", "pairs")
        for reentrant in (False, True)
    ],
}
PLAIN: dict[str, Build] = {"checkpointing": lambda: Checkpointed("nowhere", False)}


def hashes(build: Build, shard: Shard, seed: int) -> set[str]:
    return set(simulate(train, 4, build, shard, seed=seed))


@pytest.mark.parametrize("switched", VARIANTS)
def test_what_is_switched_changes_no_bit(switched: str) -> None:
    """Each run has another order of events."""
    plain: Build = (
        (lambda: Checkpointed("nowhere", False)) if switched == "checkpointing" else Tower
    )
    wanted = hashes(plain, by_block, 0)
    assert len(wanted) == 1
    for seed, (build, shard) in enumerate(VARIANTS[switched], start=1):
        assert hashes(build, shard, seed) == wanted, f"variant {seed}"


class Looped(nn.Module):
    """Calls two layers in turn, three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.second(self.first(x).tanh()).tanh()
        return x


def test_units_that_are_called_again_keep_the_bits() -> None:
    """Their gradients are added up over the calls first, whenever they are gathered."""
    layers = fc.wrap.by_class({nn.Linear})
    kept = {"strategy": ShardingStrategy.SHARD_GRAD_OP}
    found = [
        hashes(Looped, lambda model, chosen=chosen: fc.fully_shard(model, **chosen), seed)  # type: ignore[misc]
        for seed, chosen in enumerate([{}, {"units": layers}, {"units": layers, **kept}])
    ]
    assert found[0] == found[1] == found[2] and len(found[0]) == 1


def test_strategies_over_two_axes_agree() -> None:
    names = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "HYBRID_SHARD_OPTIMIZER")
    found = [hashes(Tower, over_replicas(name), seed) for seed, name in enumerate(names)]
    assert found[0] == found[1] == found[2] and len(found[0]) == 1


def test_the_order_of_events_changes_no_bit() -> None:
    found = set().union(*(hashes(Tower, by_block, seed) for seed in range(10)))
    assert len(found) == 1


def test_a_changed_bit_is_seen() -> None:
    def shard(model: nn.Module) -> None:
        with torch.no_grad():
            model.first.weight[0, 0].mul_(1 + 1e-6)
        by_block(model)

    assert hashes(Tower, by_block, 0) != hashes(Tower, shard, 0)
