"""A plan counts what a step with a weight tied between units communicates, no more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import count_traffic, fully_shard, plan, simulate, wrap
from fsdp_compose.comm.transports import PAIRS
from fsdp_compose.core.guards.moved_parameters import shard_of

from harness import run_ranks
from models import Ledger, units


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tied, self.own = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.tied(x))


class Outer(nn.Module):
    """Its head is the inner unit's weight, which the inner unit owns as it is sharded first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.inner.tied.weight
        self.last = nn.Linear(4, 4, bias=False)

    first = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.head(x)) if self.first else self.head(self.inner(x))
        return self.last(x)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("released", [True, False])
def test_a_tie_that_the_inner_unit_owns(released: bool, first: bool) -> None:
    """One reduction for each of two buckets, as counted in a step after the first."""

    def ranks(rank: int) -> None:
        torch.manual_seed(0)
        model = Outer()
        model.first = first
        for module in (model.inner, model):
            fully_shard(module, reshard_after_forward=released)
        for _ in range(2):
            with count_traffic() as traffic:
                model(torch.ones(2, 4)).sum().backward()
        assert traffic.reduces == 2
        assert plan(model).step.reduces == traffic.reduces

    run_ranks(ranks, 2)


class Language(nn.Module):
    """The embedding is the head of the outermost unit, or is looked up once more at the end."""

    def __init__(self, reads_last: bool) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(2000, 32), nn.Linear(32, 32)
        self.head = nn.Embedding(2000, 32) if reads_last else nn.Linear(32, 2000, bias=False)
        self.head.weight, self.reads_last = self.embed.weight, reads_last

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body(self.embed(tokens))
        return x * self.head(tokens) if self.reads_last else self.head(x)


@pytest.mark.parametrize("reads_last", [False, True])
def test_memory_of_an_embedding_that_is_the_head(reads_last: bool) -> None:
    """Autograd adds a second gradient to a product's in a third tensor, to others in place.

    A dispatch mode, as the ledger is one, holds gradients, so that none is added to in place; the
    profiler, which is none, tells which are.
    """

    def ranks(rank: int) -> None:
        torch.manual_seed(0)
        model = Language(reads_last)
        fully_shard(model, units=wrap.by_name("body"), transport=PAIRS)
        planned, tokens = plan(model).memory.backward.total, torch.tensor([[1, 2]])
        for _ in range(3):
            known = [shard_of(bucket) for unit in units(model) for bucket in unit.buckets]
            with Ledger(tokens, *known) as ledger:
                model(tokens).square().mean().backward()
            model.zero_grad()
        weight = 4 * model.embed.weight.numel()
        assert planned == pytest.approx(ledger.peak - weight * reads_last, rel=0.02)
        loss = model(tokens).square().mean()
        with torch.profiler.profile(record_shapes=True) as profile:
            loss.backward()
        shapes = [2000, 32]
        added = [e for e in profile.events() if e.name == "aten::add_" and shapes in e.input_shapes]
        assert bool(added) == reads_last

    run_ranks(ranks, 2)


class Both(nn.Module):
    """Its second part reads a weight of the first, which is a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Inner(), Inner()
        self.other.tied.weight = self.one.tied.weight


def test_a_part_that_reads_a_unit_outside_of_it() -> None:
    """What it gathers and reduces of that counts, and memory is that of its units."""

    def ranks() -> None:
        torch.manual_seed(0)
        model = fully_shard(Both(), units=wrap.by_class(Inner))
        for _ in range(2):
            with count_traffic() as traffic:
                model.other(torch.ones(2, 4)).sum().backward()
            model.zero_grad()
        found = plan(model.other)
        assert (found.step.gathers, found.step.reduces) == (traffic.gathers, traffic.reduces)
        assert found.step.total_bytes == traffic.total_bytes
        assert found.memory.shards == sum(unit.shard_bytes for unit in found.units)

    simulate(ranks, 2)
