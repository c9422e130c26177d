"""Units of several buckets, groups or tied weights: a guard looks at each, not at the first."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

from fsdp_compose import (
    MixedPrecision,
    Prefetch,
    ShardingStrategy,
    fully_shard,
    gathered,
    reshard,
    unshard,
)
from fsdp_compose.comm import collectives as comm
from fsdp_compose.core.guards import added_parameters

from harness import simulate_ranks
from models import (
    WIDTH,
    assert_at_rest,
    by_block,
    data,
    mesh_of_replicas,
    one_unit,
    seeded,
    sgd,
    square,
    two_blocks,
    units,
    whole,
)
from watching import Branching, step


def layers(count: int = 2) -> nn.Module:
    return seeded(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count))))


def mixed() -> nn.Module:
    """Its layers are of two dtypes, which makes two buckets that train."""
    model = layers()
    model[1].float()
    return model


@pytest.mark.parametrize("scope", ["unshard", "gathered"])
def test_each_bucket_is_connected_in_a_scope(scope: str) -> None:
    """A loss of full parameters gives every one of them its gradient, of whatever dtype."""

    def ranks(rank: int) -> None:
        plain = mixed()
        model = one_unit(copy.deepcopy(plain))
        assert len(units(model)[0].buckets) == 2
        if scope == "unshard":
            unshard(model)
            sum(p.double().square().sum() for p in model.parameters()).backward()
            reshard(model)
        else:
            with gathered(model):
                sum(p.double().square().sum() for p in model.parameters()).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            assert_close(whole(mine.grad), 2 * theirs.detach())

    simulate_ranks(ranks)


def test_a_graph_of_weights_outlives_reshard() -> None:
    """What it reads stays gathered until it is run, and is released when it is gone."""

    def ranks(rank: int) -> None:
        plain = layers()
        model = one_unit(copy.deepcopy(plain))
        unshard(model)
        loss = model[0].weight.square().sum() + model[1].weight.pow(3).sum()
        reshard(model)
        (unit,) = units(model)
        assert unit.holds  # or the backward would read freed memory
        loss.backward()
        del loss
        gc.collect()
        assert_at_rest(model)
        assert_close(whole(model[0].weight.grad), 2 * plain[0].weight.detach())
        assert_close(whole(model[1].weight.grad), 3 * plain[1].weight.detach().square())

    simulate_ranks(ranks)


class Lender(nn.Module):
    """Two borrowers come before what they borrow from, of which a first layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.lender = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
        self.lender[0].requires_grad_(False)
        self.one.weight, self.two.weight = self.lender[1].weight, self.lender[2].weight

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.lender, self.one, self.two):
            x = torch.tanh(part(x))
        return x


def test_a_copy_of_each_borrower_borrows_from_copies() -> None:
    """Whichever bucket its weight is in: it trains as a plain copy, and leaves the original."""

    def ranks(rank: int) -> None:
        plain = seeded(Lender)
        model = copy.deepcopy(plain)
        fully_shard(model.lender), fully_shard(model.one), fully_shard(model.two)
        assert len(units(model.lender)[0].buckets) == 2
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()  # a copy that reads the original's weights computes zeros
        assert_close(twin(data(0, rank)), plain(data(0, rank)))
        square(twin, data(0, rank)).backward()
        (sum(square(plain, data(0, r)) for r in range(2)) / 2).backward()
        for mine, theirs in zip(twin.parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            if mine.grad is not None:
                assert_close(whole(mine.grad), theirs.grad)
        assert all(p.grad is None for p in model.parameters())
        assert_at_rest(twin)

    simulate_ranks(ranks)


def test_a_unit_that_trains_in_its_second_bucket() -> None:
    """Needs a divisor like any other where it is on fewer ranks, though the first is frozen."""

    def ranks(rank: int) -> None:
        model = seeded(two_blocks)
        model.blocks[1].norm.requires_grad_(False)
        fully_shard(model.blocks[1], mesh="self")
        fully_shard(model)
        first, second = units(model.blocks[1])[0].buckets
        assert not first.entries[0].param.requires_grad and second.entries[0].param.requires_grad
        with pytest.raises(RuntimeError, match=r"'Tower' over 2, of unit 'blocks\.1' over 1\. "):
            square(model, data(0, rank)).backward()

    simulate_ranks(ranks)


def test_frozen_additions_cost_no_look_at_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward looks through a unit's modules after a change alone, however many were added."""
    looks: list[str] = []
    look = added_parameters.find_missing
    monkeypatch.setattr(
        added_parameters, "find_missing", lambda unit: looks.append(unit.name) or look(unit)
    )

    def ranks(rank: int) -> None:
        model = one_unit(layers(3))
        for part in model[:2]:
            part.extra = nn.Parameter(torch.ones(2, dtype=torch.float64), False)
        model(data(0, 0))
        assert looks
        looks.clear()
        for _ in range(2):
            square(model, data(0, 0)).backward()
        assert not looks

    simulate_ranks(ranks, 1)


def test_a_unit_that_waits_for_its_backward() -> None:
    """Where a step has two backwards over two groups, each group's steps are still counted."""

    def ranks(rank: int) -> None:
        own = dist.new_group([0, 1])
        model, other = one_unit(layers()), layers()
        for part in other:
            fully_shard(part, mesh=own)

        def both(order: tuple[int, int]) -> Tensor:
            x = data(0, rank)
            for i in order:
                x = other[i](x)
            return x

        for seed in range(3):
            order = (1, 0) if seed == 2 and rank == 1 else (0, 1)
            first = square(model, data(seed, rank))
            second = both(order).square().mean()
            first.backward()
            second.backward()

    with pytest.raises(RuntimeError, match="ranks run different units in step 3: as"):
        simulate_ranks(ranks)


class Ways(Branching):
    """Its blocks have parameters of two dtypes, all of which train."""

    def double(self) -> Ways:
        super().double()
        for block in self.blocks:
            block.norm.float()
        return self


@pytest.mark.filterwarnings("ignore:the forward of unit")
def test_what_ranks_mixed_up_is_gathered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every bucket: what replicas exchanged in a step that differed is not used in the next."""
    monkeypatch.setattr(comm, "is_point_to_point", lambda group: False)
    double = MixedPrecision(torch.float64, torch.float64)

    def ranks(rank: int) -> None:
        mesh, losses = mesh_of_replicas(2, 2), []
        for differs in (False, True):
            model = by_block(
                seeded(Ways),
                mesh=mesh,
                strategy=ShardingStrategy.HYBRID_SHARD_OPTIMIZER,
                prefetch=Prefetch(forward=0, backward=0),
                mp_policy=double,
            )
            assert len(units(model.blocks[0])[0].buckets) == 2
            optim = sgd(model.parameters())
            for seed in range(2):
                step(model, rank, seed)
                optim.step()
                optim.zero_grad()
            if differs:
                model.way = ((0, 1, 2), (1, 0, 2))[mesh.get_coordinate()[0]]
                with pytest.raises(RuntimeError, match="found at the end of the step"):
                    step(model, rank)
                model.way = (0, 1, 2)
            losses.append(square(model, data(3, rank)).detach())
        assert torch.equal(*losses)

    simulate_ranks(ranks, 4)
