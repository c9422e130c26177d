"""Ranks that clear gradients each in its own way raise, before or after they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp_compose as fc
from fsdp_compose import ShardingStrategy
from fsdp_compose.sharded import to_local

from harness import simulate_ranks
from models import Tower, Twin, by_block, data, mesh_of_replicas, seeded, sgd, square

FOUND = "gradients were cleared on some ranks only: in step 2 that of parameter"
STEPPED = "parameter 'first.weight' of unit .* was stepped with gradient="


def clear_one(model: nn.Module) -> None:
    model.get_parameter("first.weight").grad = None


def delete_one(model: nn.Module) -> None:
    del model.get_parameter("first.weight").grad


CLEARS: list[Callable[[Any], object]] = [nn.Module.zero_grad, clear_one, delete_one]


def backward(model: nn.Module, rank: int, seed: int) -> None:
    square(model, data(seed, rank)).backward()


@pytest.mark.parametrize("clear", CLEARS, ids=lambda f: f.__name__)
def test_the_next_backward_finds_it(clear: Callable[[nn.Module], object]) -> None:
    """One rank clears after its step; the others add to what they had."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        optim = sgd(model.parameters())
        backward(model, rank, 0)
        optim.step()
        if rank == 1:
            clear(model)
        with pytest.raises(RuntimeError, match=FOUND) as raised:
            backward(model, rank, 1)
        text = str(raised.value)
        assert "which added to it, and not on rank 1." in text, text
        assert (clear is nn.Module.zero_grad) or "parameter 'first.weight'" in text, text
        model.zero_grad()
        backward(model, rank, 2)
        optim.step()

    simulate_ranks(ranks, 3)


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
def test_each_strategy_finds_it(strategy: ShardingStrategy) -> None:
    def ranks(rank: int) -> None:
        mesh = mesh_of_replicas(2, 2) if "HYBRID" in strategy.name else None
        model = by_block(seeded(Tower), mesh=mesh, strategy=strategy)
        backward(model, rank, 0)
        if rank == 0:
            model.zero_grad()
        with pytest.raises(RuntimeError, match=FOUND):
            backward(model, rank, 1)

    simulate_ranks(ranks, 4)


@pytest.mark.parametrize("clear", CLEARS[1:], ids=lambda f: f.__name__)
def test_a_step_without_it_is_found_in_the_next(clear: Callable[[nn.Module], object]) -> None:
    """One rank clears a gradient before the step, which leaves its slice as it is."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        optim = sgd(model.parameters())
        backward(model, rank, 0)
        if rank == 1:
            clear(model)
        optim.step()
        optim.zero_grad()
        with pytest.raises(RuntimeError, match=STEPPED) as raised:
            backward(model, rank, 1)
        assert "gradient=None on rank 1" in str(raised.value)

    simulate_ranks(ranks, 3)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_with_a_graph_is_compared_too() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        for seed in range(2):
            loss = square(model, data(seed, rank))
            if seed and rank == 0:
                model.zero_grad()
            if not seed:
                loss.backward(create_graph=True)
                continue
            with pytest.raises(RuntimeError, match=FOUND):
                loss.backward(create_graph=True)

    simulate_ranks(ranks, 2)


def test_settings_are_compared_after_a_difference() -> None:
    """Where the one rank that holds a parameter clears it, ranks go on comparing what they step."""

    def ranks(rank: int) -> None:
        model = fc.fully_shard(nn.Linear(1, 1, bias=False))
        optim = sgd(model.parameters())
        x = torch.ones(2, 1)
        for _ in range(2):
            model(x).sum().backward()
            optim.step()
            if to_local(model.weight).numel():
                model.zero_grad()
        optim.param_groups[0]["lr"] = 0.1 + rank
        model(x).sum().backward()
        optim.step()
        with pytest.raises(RuntimeError, match="had settings that differ"):
            model(x).sum().backward()

    simulate_ranks(ranks, 2)


def test_a_unit_that_is_reduced_twice_in_a_backward() -> None:
    """The second reduction adds to what the first has set, on the rank that cleared too."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(self.inner, x, use_reentrant=True)
            return x

    def ranks(rank: int) -> None:
        model = seeded(Twice)
        fc.fully_shard(model.inner)
        fc.fully_shard(model)
        for seed in range(3):
            model.zero_grad()
            square(model, data(seed, rank).requires_grad_()).backward()
        if rank == 0:
            model.zero_grad()
        with pytest.raises(RuntimeError, match="gradients were cleared on some ranks only"):
            square(model, data(4, rank).requires_grad_()).backward()

    simulate_ranks(ranks, 2)


def clear_by_optimizer(model: nn.Module, optim: Any, rank: int) -> None:
    optim.zero_grad()


def clear_each_way(model: nn.Module, optim: Any, rank: int) -> None:
    optim.zero_grad() if rank else model.zero_grad()


def clear_in_any_order(model: nn.Module, optim: Any, rank: int) -> None:
    for param in list(model.parameters())[:: 1 if rank else -1]:
        param.grad = None


def clear_twice(model: nn.Module, optim: Any, rank: int) -> None:
    for _ in range(1 + rank):
        model.zero_grad()


def clear_some(model: nn.Module, optim: Any, rank: int) -> None:
    model.blocks[1].zero_grad()


def clear_what_it_holds(model: nn.Module, optim: Any, rank: int) -> None:
    """What is empty on a rank may be left there, or be cleared."""
    for param in model.parameters():
        if not fc.is_fully_sharded(model) or to_local(param).numel():
            param.grad = None


def leave_all(model: nn.Module, optim: Any, rank: int) -> None:
    """Gradients add up over steps."""


@pytest.mark.parametrize(
    "clear",
    [
        clear_by_optimizer,
        clear_each_way,
        clear_in_any_order,
        clear_twice,
        clear_some,
        clear_what_it_holds,
        leave_all,
    ],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_all_ranks_clear_is_no_error(when: str, clear: Callable[..., None]) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        both = ((twin.model, twin.optim), (twin.reference, twin.plain_optim))
        for seed in range(3):
            twin.backward(square, seed)
            for model, optim in both:
                if when == "before":
                    clear(model, optim, rank)
                if any(p.grad is not None for p in model.parameters()):
                    optim.step()
                if when == "after":
                    clear(model, optim, rank)
        twin.check()

    simulate_ranks(ranks, 2)


def test_parameters_that_no_rank_used_are_no_error() -> None:
    """What a rank alone did not use has a gradient there too; what none used has one nowhere."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            return self.a(x) + self.b(x) if both else self.a(x)

    def ranks(rank: int) -> None:
        model = fc.fully_shard(seeded(Branches))
        optim = sgd(model.parameters())
        for seed in range(3):
            for _ in range(2):
                model(data(seed, rank), rank == 0).square().mean().backward()
            optim.step()
            optim.zero_grad()
        assert model.c.weight.grad is None

    simulate_ranks(ranks, 2)


@pytest.mark.parametrize("copies", [1, 2])
def test_experts_of_one_name_without_tokens(copies: int) -> None:
    """Ranks that hold other experts step some without a gradient; those that share one raise."""

    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (copies, 2), mesh_dim_names=("edp", "ep"))
        model = nn.ModuleDict({"dense": seeded(Tower), "expert": seeded(Tower, rank % 2)})
        by_block(model["expert"], mesh=mesh["edp"])
        fc.set_gradient_divide_factor(model["expert"], 2.0 * copies)
        fc.fully_shard(model["dense"])
        optim = sgd(model.parameters())
        for seed in range(3):
            parts = [model["dense"], *([model["expert"]] if rank % 2 or seed != 1 else [])]
            sum(square(part, data(seed, rank)) for part in parts).backward()
            optim.step()
            optim.zero_grad()
        if copies == 2:
            backward(model["expert"], rank, 3)
            if rank < 2:
                clear_one(model["expert"])
            optim.step()
            optim.zero_grad()
            with pytest.raises(RuntimeError, match=STEPPED):
                backward(model["expert"], rank, 4)

    simulate_ranks(ranks, 2 * copies)
