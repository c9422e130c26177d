"""Ranks that run different units get an error that names both, and what the check costs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compose as fc
from fsdp_compose import (
    Prefetch,
    ShardingStrategy,
    fully_shard,
    set_debug,
    set_gradient_divide_factor,
)
from fsdp_compose.base.process import Process, here
from fsdp_compose.comm import collectives as comm
from fsdp_compose.core.guards.collective_log import TRIAL_PASSES
from fsdp_compose.core.guards.rank_differences import explain_difference

from harness import fake_world, rank_errors, run_ranks, simulate_ranks, single_process
from models import (
    WIDTH,
    Block,
    Tower,
    Twin,
    by_block,
    data,
    mesh_of_replicas,
    seeded,
    sgd,
    square,
    units,
)
from watching import Branching, compare_as_on_a_device, step

NO_PREFETCH = Prefetch(forward=0, backward=0)


def message(errors: list[str | None]) -> str:
    """The one error that every rank raised."""
    assert errors[0] is not None
    assert all(e == errors[0] for e in errors), errors
    assert errors[0].startswith("RuntimeError: ranks run different units"), errors[0]
    return errors[0]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("way", "found"),
    [
        ((1, 0, 2), "gathers unit 'blocks.1' (forward)"),
        ((1, 2), "gathers unit 'blocks.1' (forward)"),
        ((0, 1), "gathers unit 'blocks.1' (ahead of its use)"),
        ((), "gathers"),
    ],
)
def test_first_iteration_names_both_units(way: tuple[int, ...], found: str, world: int) -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(Branching))
        if rank == 1:
            model.way = way
        step(model, rank)

    text = message(rank_errors(ranks, world, timeout=10))
    others = "rank 0" if world == 2 else "ranks 0 and 2"
    assert "in step 1: as collective " in text
    assert others in text and "rank 1" in text
    assert "participate" in text
    if way == (1, 0, 2):
        gathers = "gathers" if world == 2 else "gather"
        assert f"{others} {gathers} unit 'blocks.0' (forward) where rank 1 {found}" in text


@pytest.mark.parametrize("steps", [0, 3], ids=["the first step", "a later step"])
def test_a_rank_that_stops_after_its_forward(steps: int) -> None:
    """It evaluates where the others train: its end of a step meets their first reduction."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Branching), strategy=ShardingStrategy.SHARD_GRAD_OP)
        for seed in range(steps):
            step(model, rank, seed)
        with torch.set_grad_enabled(rank == 0):
            loss = square(model, data(steps, rank))
        if rank == 0:
            loss.backward()

    text = message(rank_errors(ranks, 2, timeout=10))
    assert "rank 0 reduces unit 'blocks.2' (backward) where rank 1 ends the step" in text


def test_the_right_step_after_the_error() -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Branching)
        for _ in range(2):
            twin.model.way = ((0, 1, 2), (2, 1, 0))[rank]
            with pytest.raises(RuntimeError, match="ranks run different units"):
                step(twin.model, rank)
            twin.model.way = (0, 1, 2)
            twin.zero_grad()
        twin.train()

    run_ranks(ranks)


class Uneven(Branching):
    """Its last block is larger, so that what is sent for it fits nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = Block(WIDTH, 5 * WIDTH)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("way", [(1, 0, 2), (2, 1, 0), (1, 2), (0, 1), (), (0, 1, 2, 0)])
@pytest.mark.parametrize("build", [Branching, Uneven])
def test_a_later_step_is_found_before_anything_is_read(
    build: type[Branching], way: tuple[int, ...], world: int
) -> None:
    """Other units, of the same size or not, fewer or more: not blended, not waited for."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(build), prefetch=NO_PREFETCH)
        for seed in range(3):
            step(model, rank, seed)
        if rank == 1:
            model.way = way
        step(model, rank, 3)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = message(rank_errors(ranks, world, timeout=10))
    assert "in step 4: as collective " in text and "rank 1" in text
    assert "found at the end" not in text


@pytest.mark.parametrize("options", [{}, {"strategy": "HYBRID_SHARD_OPTIMIZER"}])
def test_a_later_step_on_two_axes(options: dict[str, Any]) -> None:
    """The ranks of one shard group take another way, alike; the other axis tells."""

    def ranks(rank: int) -> None:
        mesh = mesh_of_replicas(2, 2)
        named = {k: ShardingStrategy[v] for k, v in options.items()}
        model = by_block(seeded(Branching), mesh=mesh, prefetch=NO_PREFETCH, **named)
        optim = sgd(model.parameters())
        for seed in range(3):
            step(model, rank, seed)
            optim.step()
        if mesh.get_coordinate()[0]:
            model.way = (1, 0, 2)
        step(model, rank, 3)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for error in rank_errors(ranks, 4, timeout=20):
            assert error is not None and "ranks run different units in step 4" in error
            assert "found at the end" not in error


@pytest.mark.parametrize("axis", [0, 1])
def test_the_right_step_after_one_on_two_axes(axis: int) -> None:
    """Where replicas were ahead with different units, none of them counts as up to date."""

    def ranks(rank: int) -> None:
        mesh = mesh_of_replicas(2, 2)
        strategy = ShardingStrategy.HYBRID_SHARD_OPTIMIZER
        twin = Twin(
            rank,
            4,
            Branching,
            lambda m: by_block(m, mesh=mesh, prefetch=NO_PREFETCH, strategy=strategy),
        )
        twin.train(steps=1)
        if mesh.get_coordinate()[axis]:
            twin.model.way = (1, 0, 2)
        with pytest.raises(RuntimeError, match="over the replicas too"):
            step(twin.model, rank)
        twin.model.way = (0, 1, 2)
        twin.zero_grad()
        twin.train(steps=1)

    simulate_ranks(ranks, 4)


@pytest.mark.filterwarnings("ignore:the forward of unit")
def test_units_over_a_part_of_the_ranks_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a step over each group; the ranks of the other half hear of it."""
    monkeypatch.setattr(comm, "is_point_to_point", lambda group: False)

    def ranks(rank: int) -> None:
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        model = seeded(Branching)
        for block in model.blocks:
            fully_shard(block, mesh=halves[rank // 2], prefetch=NO_PREFETCH)
            set_gradient_divide_factor(block, 4)
        fully_shard(model, prefetch=NO_PREFETCH)
        for seed in range(3):
            step(model, rank, seed)
        model.way = ((0, 1, 2), (1, 0, 2))[rank == 3]
        step(model, rank, 3)

    with pytest.raises(RuntimeError, match=r"rank 2 gathers unit .* where rank 3"):
        simulate_ranks(ranks, 4)


def test_steps_after_an_error_in_a_later_step() -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Uneven)
        twin.train()
        for way in ((2, 1, 0), (0,)):
            twin.model.way = ((0, 1, 2), way)[rank]
            with pytest.raises(RuntimeError, match="ranks run different units"):
                step(twin.model, rank)
            twin.model.way = (0, 1, 2)
            twin.zero_grad()
            twin.train()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_ranks(ranks)


def test_without_point_to_point_a_step_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of one size blend silently; the step ends with an error before anyone uses it."""
    monkeypatch.setattr(comm, "is_point_to_point", lambda group: False)

    def ranks(rank: int) -> None:
        model = by_block(seeded(Branching), prefetch=NO_PREFETCH)
        for seed in range(3):
            step(model, rank, seed)
        model.way = ((0, 1, 2), (1, 0, 2))[rank]
        step(model, rank, 3)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = message(rank_errors(ranks, 2, timeout=10))
    assert (
        "in step 4: as collective 2 of it, rank 0 gathers unit 'blocks.0' (forward) where rank 1 "
        "gathers unit 'blocks.1' (forward)" in text
    )
    assert "found at the end of the step" in text and "set_debug(True)" in text


def test_on_an_accelerator_it_is_read_a_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for a comparison of the step before, never for that of this one."""
    waits = compare_as_on_a_device(monkeypatch)

    def ranks(rank: int) -> None:
        model = by_block(seeded(Branching), prefetch=NO_PREFETCH)
        step(model, rank)
        assert set(waits) == {"step 1"}
        for seed in range(2, 5):
            waits.clear()
            if seed == 4:
                model.way = ((0, 1, 2), (1, 0, 2))[rank]
            step(model, rank, seed)
            assert waits == ([] if seed == 2 else [f"step {seed - 1}"])
        model.way = (0, 1, 2)
        step(model, rank, 5)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = message(rank_errors(ranks, 2, timeout=10))
    assert "in step 4: as collective 2 of it, rank 0 gathers unit 'blocks.0' (forward)" in text
    assert "found at the end of the step" in text


@pytest.mark.parametrize("heads", [True, False])
def test_blended_weights_in_inference_are_found(
    heads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not heads:
        monkeypatch.setattr(comm, "is_point_to_point", lambda group: False)

    def ranks(rank: int) -> None:
        model = by_block(seeded(Branching), prefetch=NO_PREFETCH)
        step(model, rank)
        model.way = ((0, 1, 2), (1, 0, 2))[rank]
        with torch.no_grad():
            model(data(0, rank))

    text = message(rank_errors(ranks, 2, timeout=10))
    assert ("found at the end" in text) is not heads


@pytest.mark.parametrize("way", [(1, 0, 2), (1, 2), (0, 1, 2, 0)])
@pytest.mark.parametrize("asked", ["everywhere", "on one rank"])
def test_debug_finds_it_in_any_step_before_it_happens(way: tuple[int, ...], asked: str) -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(Branching))
        if asked == "everywhere" or rank == 1:
            set_debug(True)
        for seed in range(3):
            step(model, rank, seed)
        if rank == 1:
            model.way = way
        step(model, rank, 3)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = message(rank_errors(ranks, 2, timeout=10))
    assert "in step 4" in text
    assert "found at the end" not in text


def test_two_models_of_one_shape_are_told_apart() -> None:
    def ranks(rank: int) -> None:
        models = [fully_shard(seeded(Block)) for _ in range(2)]
        models[rank](data(0, rank)).sum().backward()

    text = message(rank_errors(ranks, 2, timeout=10))
    assert "of one model" in text and "of another" in text


def test_a_copy_is_told_from_its_original() -> None:
    def ranks(rank: int) -> None:
        model = fully_shard(seeded(Block))
        twin = copy.deepcopy(model)
        for m in (model, twin):
            m(data(0, rank)).sum().backward()
        (model, twin)[rank](data(0, rank)).sum().backward()

    assert "of another" in message(rank_errors(ranks, 2, timeout=10))


def test_replicas_that_differ_are_found_over_both_axes() -> None:
    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = by_block(seeded(Branching), mesh=mesh)
        if rank >= 2:
            model.way = (1, 0, 2)
        step(model, rank)

    text = message(rank_errors(ranks, 4, timeout=20))
    assert "ranks 0 and 1 gather unit 'blocks.0'" in text
    assert "where ranks 2 and 3 gather unit 'blocks.1'" in text


def test_one_comparison_a_step() -> None:
    def ranks(rank: int) -> list[int]:
        model = by_block(seeded(Tower))
        counts = []
        for seed in range(4):
            here.traffic.reset()
            step(model, rank, seed)
            counts.append(here.traffic.control)
        set_debug(True)
        for seed in range(2):
            here.traffic.reset()
            step(model, rank, seed)
            counts.append(here.traffic.control)
        collectives = here.traffic.gathers + here.traffic.reduces
        assert here.traffic.all_reduces == 0
        set_debug(False)
        step(model, rank)
        here.traffic.reset()
        step(model, rank)
        return [*counts, collectives, here.traffic.control]

    (first, *later, debug_from, debug, collectives, last), _ = run_ranks(ranks)
    assert later == [1, 1, 1]
    assert first == debug == collectives + 1
    assert (debug_from, last) == (1, 1)


def test_inference_is_compared_singly_only_at_first() -> None:
    def ranks(rank: int) -> list[int]:
        model = by_block(seeded(Tower))
        counts = []
        with torch.no_grad():
            for _ in range(TRIAL_PASSES + 2):
                here.traffic.reset()
                model(data(0, rank))
                counts.append(here.traffic.control)
        return counts

    counts, _ = run_ranks(ranks)
    assert counts == [5] * TRIAL_PASSES + [1, 1]


def test_a_first_step_after_inference_is_compared() -> None:
    """The first training step after inference is compared one by one."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Branching))
        with torch.no_grad():
            for _ in range(3):
                model(data(0, rank))
        if rank:
            model.way = (1, 0, 2)
        step(model, rank)

    assert "found at the end" not in message(rank_errors(ranks, 2, timeout=10))


def test_nothing_is_compared_where_there_is_nobody() -> None:
    with single_process():
        here.traffic.reset()
        model = by_block(seeded(Tower))
        for seed in range(2):
            step(model, 0, seed)
        assert here.traffic.control == 0
        assert not units(model)[0].engine.logs
    with fake_world(8):
        model = by_block(seeded(Tower), init="as_is")
        here.traffic.reset()
        for seed in range(2):
            step(model, 0, seed)
        assert here.traffic.control == 0


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("0", False), ("", False)])
def test_the_environment_asks_for_debug(
    value: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_COMPOSE_DEBUG", value)

    def ranks(rank: int) -> bool:
        return Process().is_debugging

    assert run_ranks(ranks, 1, init=False) == [wanted]


def test_ranks_free_a_model_at_different_times() -> None:
    """The next model on the same groups is numbered alike, and its first step is compared."""

    def ranks(rank: int) -> None:
        kept = [by_block(seeded(Tower))]
        engine = units(kept[0])[0].engine
        for seed in range(2):
            step(kept[0], rank, seed)
        assert len(engine.logs) == 1
        if rank == 0:
            kept.clear()
        model = by_block(seeded(Tower))
        assert len(engine.logs) == 1 and next(iter(engine.logs.values())).is_stepwise
        for seed in range(2):
            step(model, rank, seed)

    run_ranks(ranks)


def test_the_log_of_a_destroyed_group_goes() -> None:
    def ranks(rank: int) -> None:
        engines = []
        for _ in range(2):
            group = dist.new_group([0, 1])
            model = by_block(seeded(Tower), mesh=group)
            engines.append(units(model)[0].engine)
            step(model, rank)
            dist.destroy_process_group(group)
        assert engines[0] is engines[1] and len(engines[0].logs) == 1

    run_ranks(ranks)


def test_explanation_of_more_than_two_ways() -> None:
    one, two = (5, "gather", "a", "forward"), (6, "reduce", "b", "backward")
    text = explain_difference(7, [(0, [one]), (4, [one, two]), (5, [two]), (9, [])])
    assert "step 7: as collective 1 of it, ranks 0 and 4 gather unit 'a' (forward)" in text
    assert "rank 5 reduces unit 'b' (backward) where rank 9 ends the step" in text


def test_explanation_of_a_step_that_one_discards() -> None:
    told, call = (3, "discard", "", "ValueError: bad"), (7, "call", "", "call state_dict")
    text = explain_difference(7, [(0, [call]), (1, [told])])
    assert "rank 0 wants to call state_dict where rank 1 discards a skippable step (Value" in text


SET_ON_ONE: dict[str, Callable[[Tower], object]] = {
    "set_reshard_after_forward": lambda m: fc.set_reshard_after_forward(m, False),
    "set_reshard_after_backward": lambda m: fc.set_reshard_after_backward(m, False),
    "set_backward_prefetch": lambda m: fc.set_backward_prefetch(m.blocks[2], []),
    "set_requires_gradient_sync": lambda m: fc.set_requires_gradient_sync(m, False),
    "prefetch_units": lambda m: fc.prefetch_units(m, m.blocks[0]),
}


@pytest.mark.parametrize("setter", SET_ON_ONE)
def test_what_one_rank_has_set_is_named(setter: str) -> None:
    """The ranks run the same modules, and one gathers or reduces their units at other moments."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        for seed in range(4):
            if rank and seed == 2:
                SET_ON_ONE[setter](model)
            square(model, data(seed, rank)).backward()

    assert setter in message(rank_errors(ranks, 2))
