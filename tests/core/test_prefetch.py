"""Units are gathered ahead of use as asked for, by depth, by moment, by list or by seed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compose import (
    Prefetch,
    fully_shard,
    set_backward_prefetch,
    set_forward_prefetch,
)
from fsdp_compose.core import gathering as residency
from fsdp_compose.core.schedule import Hold
from fsdp_compose.core.state import Engine

from harness import run_ranks, simulate_ranks, single_process
from models import (
    Tower,
    Twin,
    by_block,
    data,
    seeded,
    sgd,
    square,
    step_in_backward,
    units,
    whole,
)
from watching import Loose, Shuffled, events, loose, short, step, watch_forward


def second_step(prefetch: Prefetch, shard: Callable[[Any], Any] | None = None) -> tuple[str, str]:
    """(forward, backward) events of a step that has a recorded order."""

    def ranks(rank: int) -> tuple[str, str]:
        model = seeded(lambda: Tower(4))
        by_block(model, prefetch=prefetch)
        if shard is not None:
            shard(model)
        square(model, data(0, rank)).backward()
        with events() as log:
            watch_forward(model, log)
            loss = square(model, data(1, rank))
            forward = " ".join(short(log))
            log.clear()
            loss.backward()
            return forward, " ".join(short(log))

    first, second = run_ranks(ranks)
    assert first == second
    return first


FORWARD = {
    0: "+R R +0 0 +1 1 +2 2 +3 3",
    1: "+R R 0 +0 1 +1 2 +2 3 +3",
    2: "+R R 0 1 +0 2 +1 3 +2 +3",
}


BACKWARD = {
    0: "-R -3 3 =3 -2 2 =2 -1 1 =1 -0 0 =0 =R",
    1: "-R 3 -3 2 =3 -2 1 =2 -1 0 =1 -0 =0 =R",
    2: "-R 3 2 -3 1 =3 -2 0 =2 -1 =1 -0 =0 =R",
}


POST = "-R -3 3 =3 2 -2 =2 1 -1 =1 0 -0 =0 =R"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_forward_prefetch_by_depth(depth: int) -> None:
    forward, backward = second_step(Prefetch(forward=depth))
    assert forward == FORWARD[depth]
    assert backward == BACKWARD[1]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_backward_prefetch_before_a_units_backward(depth: int) -> None:
    forward, backward = second_step(Prefetch(backward=depth))
    assert forward == FORWARD[1]
    assert backward == BACKWARD[depth]


def test_backward_prefetch_after_a_units_backward() -> None:
    _, backward = second_step(Prefetch(backward_moment="post"))
    assert backward == POST
    _, backward = second_step(Prefetch(backward_moment="post", backward=2))
    assert backward == "-R -3 3 =3 2 1 -2 =2 0 -1 =1 -0 =0 =R"
    _, backward = second_step(Prefetch(backward_moment="post", backward=0))
    assert backward == BACKWARD[0]


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_in_backward_keep_units_ahead(depth: int) -> None:
    """An optimizer that steps in hooks has no unit gathered again that it did not step."""
    assert second_step(Prefetch(backward=depth), step_in_backward) == (FORWARD[1], BACKWARD[depth])


def test_no_backward_prefetch() -> None:
    _, backward = second_step(Prefetch(backward_moment=None, backward=2))
    assert backward == BACKWARD[0]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_rule_narrows_the_depth(count: int) -> None:
    prefetch = Prefetch(forward=2, backward=2, rule=lambda upcoming, held: count)
    assert second_step(prefetch) == (FORWARD[count], BACKWARD[count])


def test_a_rule_is_told_next_units_and_bytes_held() -> None:
    """The units in the order of their use; bytes as gathering allocates them."""

    def ranks(rank: int) -> list[Any]:
        asked: list[Any] = []

        def rule(upcoming: Any, held: int) -> int:
            asked.append(([name for name, _ in upcoming], upcoming[0][1], held))
            return 1

        model = by_block(seeded(lambda: Tower(3)), prefetch=Prefetch(forward=2, rule=rule))
        with torch.no_grad():
            for _ in range(2):
                asked.clear()
                square(model, data(0, rank))
        root, block = [sum(b.views.nbytes for b in u.buckets) for u in units(model)[:2]]
        assert asked == [
            (["blocks.0", "blocks.1"], block, root),
            (["blocks.1", "blocks.2"], block, root + block),
            (["blocks.2"], block, root + block),
        ]
        return asked

    run_ranks(ranks)


def test_a_rule_is_not_asked_without_room() -> None:
    """The root gathers the last block ahead, and the blocks may have one unit ahead."""

    def ranks(rank: int) -> list[Any]:
        asked: list[Any] = []

        def rule(upcoming: Any, held: int) -> int:
            asked.append([name for name, _ in upcoming])
            return len(upcoming)

        model = seeded(lambda: Tower(4))
        for block in model.blocks:
            fully_shard(block, prefetch=Prefetch(forward=1, rule=rule))
        fully_shard(model)
        set_forward_prefetch(model, [model.blocks[2]])
        with torch.no_grad():
            for _ in range(2):
                asked.clear()
                square(model, data(0, rank))
        return asked

    assert simulate_ranks(ranks) == [[["blocks.3"]]] * 2


def test_a_rule_that_is_malformed() -> None:
    with pytest.raises(TypeError, match=r"wanted a function of \(upcoming, held\)"):
        Prefetch(rule=lambda upcoming: 1)  # type: ignore[arg-type, misc]
    with pytest.raises(TypeError, match="rule returned -1"):
        Prefetch(rule=lambda upcoming, held: -1).count_ahead([("a", 4)], 0)


def test_first_backward_follows_the_forward() -> None:
    def ranks(rank: int) -> list[str]:
        model = by_block(seeded(lambda: Tower(4)))
        units(model)[
            0
        ].engine.schedule.forward_order.close()  # a model of the parent's may await its backward
        loss = square(model, data(0, rank))
        with events() as log:
            loss.backward()
        return short(log)

    assert " ".join(run_ranks(ranks)[0]) == BACKWARD[1]


def test_explicit_lists_replace_the_order() -> None:
    def shard(model: Tower) -> None:
        blocks = model.blocks
        set_forward_prefetch(model, [blocks[1], blocks[0]])
        set_forward_prefetch(blocks[0], [])
        set_forward_prefetch(blocks[1], [blocks[3], blocks[2]])
        set_backward_prefetch(model, blocks[2:4])
        set_backward_prefetch(blocks[3], None)
        set_backward_prefetch(blocks[2], [])

    forward, backward = second_step(Prefetch(), shard)
    assert forward == "+R R 1 0 +0 +1 3 2 +2 +3"
    assert backward == "-R 2 3 -3 =3 -2 =2 -1 1 0 =1 -0 =0 =R"


def test_explicit_lists_are_followed_at_once() -> None:
    """Explicit lists are followed in the first iteration."""

    def ranks(rank: int) -> str:
        model = by_block(seeded(lambda: Tower(3)))
        set_forward_prefetch(model, list(model.blocks))
        with events() as log:
            watch_forward(model, log)
            model(data(0, rank))
        return " ".join(short(log))

    assert run_ranks(ranks)[0] == "+R R 0 1 2 +0 +1 +2"


def test_lists_want_units() -> None:
    with single_process():
        model = by_block(Tower())
        with pytest.raises(ValueError, match="Linear is not a unit"):
            set_forward_prefetch(model, [model.first])
        with pytest.raises(ValueError, match="ModuleList is not a unit"):
            set_backward_prefetch(model.blocks, [])
        with pytest.raises(TypeError):
            set_backward_prefetch(model, model.blocks[0])


@pytest.mark.parametrize("moment", ["pre", "post"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_units_ahead_never_exceed_the_depth(depth: int, moment: Any) -> None:
    """Also where the order changes, so that what was gathered ahead was in vain."""

    def ranks(rank: int) -> int:
        twin = Twin(
            rank,
            2,
            lambda: Shuffled(6),
            lambda m: by_block(m, prefetch=Prefetch(depth, depth, moment)),
        )
        most = [0]
        start = residency._start_gather

        def gather(engine: Engine, buckets: Any) -> None:
            ahead = [u for u in engine.units if Hold.PREFETCH in u.holds]
            most[0] = max(most[0], len(ahead))
            start(engine, buckets)

        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patch.setattr(residency, "_start_gather", gather)
            for step in range(6):
                twin.model.seed = twin.plain[0].seed = twin.plain[1].seed = step // 2
                twin.train(steps=1)
        return most[0]

    assert run_ranks(ranks) == [depth, depth]


def test_training_is_the_same_with_every_schedule() -> None:
    def ranks(rank: int) -> None:
        for prefetch in (
            Prefetch(0, 0),
            Prefetch(3, 3),
            Prefetch(1, 2, "post"),
            Prefetch(2, 1, None),
        ):
            shard = lambda m, p=prefetch: by_block(m, prefetch=p)  # noqa: E731
            Twin(rank, 2, lambda: Tower(4), shard).train()
            shard = lambda m, p=prefetch: loose(m, prefetch=p)  # noqa: E731
            Twin(rank, 2, Loose, shard, optimizer=sgd).train()

    run_ranks(ranks)


def test_a_copy_of_a_scheduled_model_trains() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        set_forward_prefetch(model, list(model.blocks))
        step(model, rank)
        twin = copy.deepcopy(model)
        for m in (model, twin):
            m.zero_grad()
            step(m, rank)
        for a, b in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(whole(a.grad), whole(b.grad))

    run_ranks(ranks)


@pytest.mark.parametrize("stepped", [False, True])
def test_a_write_to_what_was_gathered_ahead(stepped: bool) -> None:
    """A hook on an earlier block writes the next one's weight: its forward reads the new one."""

    def double_next(twin: Twin) -> None:
        for model in (twin.model, twin.reference):
            weight = model.blocks[1].up.weight

            @torch.no_grad()
            def double(*_: object, weight: nn.Parameter = weight) -> None:
                if not stepped:
                    weight.mul_(2)
                    return
                weight.grad = weight.clone()
                torch.optim.SGD([weight], lr=1.0, maximize=True).step()
                weight.grad = None

            model.blocks[0].register_forward_pre_hook(double)

    def ranks(rank: int) -> None:
        twin = Twin(0, 1, Tower, lambda model: by_block(model, prefetch=Prefetch(2, 2)))
        square(twin.model, data(0, 0)).backward()  # records the order
        twin.zero_grad()
        double_next(twin)
        for seed in range(2):
            twin.backward(square, seed)
            twin.step()
        twin.check()

    simulate_ranks(ranks)
