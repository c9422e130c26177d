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
from torch.utils.checkpoint import checkpoint

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


class Cell(nn.Module):
    """Reads its weights ``uses`` times in a call."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        self.layer, self.uses = nn.Linear(6, 6), uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.uses):
            x = self.layer(x).tanh()
        return x


class Pattern(nn.Module):
    """Calls its cells in the order of ``names``, each in a checkpoint if wanted."""

    def __init__(self, names: str, uses: int = 1, recomputes: bool = False) -> None:
        super().__init__()
        self.names, self.recomputes = names, recomputes
        self.cells = nn.ModuleDict({name: Cell(uses) for name in "abc"})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            cell = self.cells[name]
            x = checkpoint(cell, x, use_reentrant=False) if self.recomputes else cell(x)
        return x


CELLS = fc.wrap.by_class({Cell})
KEPT = {"units": CELLS, "strategy": ShardingStrategy.SHARD_GRAD_OP}


def differ(build: Build, **options: Any) -> bool:
    """Whether one unit, released ones and kept ones train other bits."""
    each = ({}, {"units": CELLS}, KEPT)
    shards = [with_options(fc.fully_shard, **{**options, **one}) for one in each]
    found = [hashes(build, shard, seed) for seed, shard in enumerate(shards)]
    return len(set().union(*found)) > 1


@pytest.mark.parametrize("names", ["abab", "aaba", "aabaa", "abcaab", "abbcba"])
def test_units_that_are_called_again_keep_the_bits(names: str) -> None:
    """Their gradients are added up use by use, whenever they are gathered."""
    assert not differ(lambda: Pattern(names))
    assert not differ(lambda: Pattern(names, recomputes=True))


def test_units_read_twice_in_a_call_keep_the_bits() -> None:
    """Uses in one call are not added up before those of the call after it."""
    assert not differ(lambda: Pattern("aba", uses=2))


def test_calls_are_added_up_in_their_own_dtype() -> None:
    """That of compute, as autograd adds up uses, not that of reductions."""
    policy = fc.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert not differ(lambda: Pattern("abab"), mp_policy=policy)


@pytest.mark.parametrize("names", ["aba", "aabaa"])
def test_called_again_has_the_bits_of_one_process(names: str) -> None:
    """Without other ranks there is nothing to round that torch does not."""
    plain, ours = (seeded(lambda: Pattern(names, uses=2)).float() for _ in range(2))
    fc.fully_shard(ours, units=CELLS, reshard_after_forward=True)
    for model in (plain, ours):
        model(data(0, 0).float()).square().mean().backward()
    for ours_of, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (ours_of.grad is None) == (theirs.grad is None)
        assert theirs.grad is None or torch.equal(ours_of.grad.full_tensor(), theirs.grad)


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
