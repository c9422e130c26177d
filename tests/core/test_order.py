"""When units are gathered: ahead of use as asked for, in an order that ranks share."""

from __future__ import annotations

import copy
import importlib
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import (
    Prefetch,
    ShardingStrategy,
    fully_shard,
    seed_order,
    set_backward_prefetch,
    set_debug,
    set_forward_prefetch,
    trace_execution_order,
)
from fsdp_compose.comm import collectives as comm
from fsdp_compose.core import autograd as gather_file
from fsdp_compose.core import gathering as residency
from fsdp_compose.core import passes as engine
from fsdp_compose.core import receiving as receive
from fsdp_compose.core.guards import inner, verify
from fsdp_compose.core.guards.verify import TRIAL_PASSES, explain
from fsdp_compose.core.order import MAX_PASSES, Change, Order
from fsdp_compose.core.records import Hold
from fsdp_compose.core.state import Lane

from harness import fake_world, rank_errors, run_ranks, single_process
from models import (
    WIDTH,
    Block,
    Tower,
    Twin,
    assert_at_rest,
    by_block,
    data,
    mesh_of_replicas,
    seeded,
    sgd,
    square,
    units,
    whole,
)


class V:
    """A visitor."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


A, B, C, D, E, R, S = map(V, "ABCDERS")


def run(order: Order, *visits: V, complete: bool = True) -> list[Change]:
    """One pass; the changes it reported."""
    order.begin(visits[0])
    changes = [order.visit(v) for v in visits[1:]]
    return [c for c in (*changes, order.end(complete)) if c is not None]


# The recorder, without a model


def test_a_sequence_repeats() -> None:
    order = Order()
    assert order.ahead(3) == []
    assert not run(order, R, A, B)
    order.close()
    order.begin(R)
    assert order.ahead(0) == []
    assert order.ahead(1) == [A]
    assert order.ahead(3) == [A, B]
    assert order.visit(A) is None
    assert order.ahead(3) == [B]
    assert order.visit(B) is None
    assert order.ahead(3) == []
    assert order.end() is None


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_is_predicted_once_recorded(seed: int) -> None:
    rng = random.Random(seed)
    passes = [[rng.choice([R, S]), *rng.choices([A, B, C, D, E], k=4)] for _ in range(3)]
    order = Order()
    for _ in range(2):
        for visits in passes:
            assert not run(order, *visits) or len({p[0] for p in passes}) < 3
        order.close()
    flat = [v for p in passes for v in p]
    seen = 0
    for visits in passes:
        order.begin(visits[0])
        seen += 1
        assert order.ahead(99) == flat[seen:]
        for v in visits[1:]:
            assert order.visit(v) is None
            seen += 1
            assert order.ahead(99) == flat[seen:]
        assert order.end() is None


def test_a_change_inside_a_pass_is_told_and_recorded() -> None:
    order = Order()
    run(order, R, A, B, C)
    order.close()
    assert run(order, R, B, C) == [Change(A, B)]
    assert order.ahead(9) == []
    order.close()
    assert run(order, R, B, C) == []
    order.close()
    assert run(order, R, B) == [Change(C, None)]
    order.close()
    assert run(order, R, B, A) == []  # longer than before: nothing was expected


def test_after_a_change_the_prediction_goes_on_from_there() -> None:
    order = Order()
    run(order, R, A, B, C, D)
    order.close()
    order.begin(R)
    assert order.visit(C) == Change(A, C)
    assert order.ahead(9) == [D]
    order.visit(A)
    assert order.ahead(2) == [B, C]
    order.visit(E)
    assert order.ahead(2) == []


def test_passes_come_in_any_number_and_order() -> None:
    order = Order()
    for _ in range(2):  # accumulation, two models in turn, a pipeline that warms up and drains
        for count in (1, 4, 2):
            assert not any(run(order, R, A, B) for _ in range(count))
            order.close()
            assert not any(run(order, S, C) for _ in range(count))
            assert not run(order, R, A, B)
            order.close()
            assert not run(order, S, C)
            order.close()
    order.begin(R)
    assert order.ahead(2) == [A, B]  # of a sequence before the last


def test_a_failed_pass_is_forgotten() -> None:
    order = Order()
    run(order, R, A, B)
    order.close()
    assert run(order, R, A, complete=False) == []
    assert run(order, R, A, B) == []
    order.close()
    order.begin(R)
    order.visit(A)
    order.begin(R)  # the end of the one before was never seen
    assert order.ahead(2) == [A, B]
    order.forget()
    assert order.ahead(2) == []
    assert order.recorded and not order.current


def test_visitors_that_are_gone_are_skipped() -> None:
    order, gone = Order(), V("gone")
    run(order, R, gone, B)
    order.close()
    del gone
    order.begin(R)
    assert order.ahead(3) == [B]
    assert order.visit(B) is None
    root = V("root")
    run(order, root, A)
    order.close()
    del root
    run(order, R)
    order.close()
    assert [refs[0]() for refs in order.recorded] == [R]


def test_a_sequence_without_end_is_cut() -> None:
    order = Order()
    for _ in range(5 * MAX_PASSES):
        run(order, R, A)
    assert len(order.current) <= MAX_PASSES
    assert len(order.recorded) <= MAX_PASSES


# A model, and what it gathered when


@contextmanager
def events() -> Iterator[list[str]]:
    """Names of units as their gathers are issued, and of forwards (+) and backwards (-) begun."""
    log: list[str] = []
    start, opened, closed = residency._start_gather, inner.open_backward, engine.close_backward

    def gather(lane: Lane, bucket: Any) -> None:
        log.append(bucket.entries[0].spec.unit)
        start(lane, bucket)

    def open_backward(unit: Any, task: Any) -> None:
        if unit.task is None:
            log.append(f"-{unit.name}")
        opened(unit, task)

    def close_backward(unit: Any, ended: bool = False) -> None:
        if unit.task is not None:
            log.append(f"={unit.name}")
        closed(unit, ended)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residency, "_start_gather", gather)
        patch.setattr(inner, "open_backward", open_backward)
        for home in (engine, gather_file, receive):
            patch.setattr(home, "close_backward", close_backward)
        yield log


def watch_forward(model: nn.Module, log: list[str]) -> None:
    for unit in units(model):
        module = unit.modules[0]()
        assert module is not None
        module.register_forward_pre_hook(
            lambda m, a, name=unit.name: log.append(f"+{name}"), prepend=True
        )


def short(log: list[str]) -> list[str]:
    """Roots are R, blocks are their numbers."""
    return [e.replace("blocks.", "").replace("Tower", "R") for e in log]


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


def test_no_backward_prefetch() -> None:
    _, backward = second_step(Prefetch(backward_moment=None, backward=2))
    assert backward == BACKWARD[0]


def test_first_backward_follows_the_forward() -> None:
    def ranks(rank: int) -> list[str]:
        model = by_block(seeded(lambda: Tower(4)))
        units(model)[0].lane.forward_order.close()  # a model of the parent's may await its backward
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


def test_explicit_lists_are_followed_in_the_first_iteration() -> None:
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
        with pytest.raises(ValueError, match="Linear has no sharded state"):
            set_forward_prefetch(model, [model.first])
        with pytest.raises(ValueError, match="ModuleList has no sharded state"):
            set_backward_prefetch(model.blocks, [])
        with pytest.raises(TypeError):
            set_backward_prefetch(model, model.blocks[0])


def test_a_prefetch_that_is_malformed() -> None:
    with pytest.raises(ValueError, match="forward=-1"):
        Prefetch(forward=-1)
    with pytest.raises(ValueError, match="'before'"):
        Prefetch(backward_moment="before")  # type: ignore[arg-type]


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

        def gather(lane: Lane, bucket: Any) -> None:
            ahead = [u for u in lane.units if Hold.PREFETCH in u.holds]
            most[0] = max(most[0], len(ahead))
            start(lane, bucket)

        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patch.setattr(residency, "_start_gather", gather)
            for step in range(6):
                twin.model.seed = twin.plain[0].seed = twin.plain[1].seed = step // 2
                twin.train(steps=1)
        return most[0]

    assert run_ranks(ranks) == [depth, depth]


class Shuffled(Tower):
    """Runs its blocks in an order that depends on ``seed``, some of them not at all."""

    seed = 0

    def forward(self, x: Tensor) -> Tensor:
        rng = random.Random(self.seed)
        x = self.first(x)
        for block in rng.sample(list(self.blocks), len(self.blocks) - self.seed % 2):
            x = block(x)
        return self.head(x)


# An order that changes on all ranks alike


def test_a_changed_order_is_told_once_and_followed() -> None:
    def ranks(rank: int) -> tuple[list[str], str]:
        twin = Twin(rank, 2, lambda: Shuffled(4))
        found: list[str] = []
        for step in range(6):
            twin.model.seed = twin.plain[0].seed = twin.plain[1].seed = 0 if step < 2 else 3
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                twin.train(steps=1)
            found += [f"{step}: {w.message}" for w in caught]
        with events() as log:
            watch_forward(twin.model, log)
            twin.model(data(0, rank))
        return found, " ".join(e for e in log)

    (found, log), (other, _) = run_ranks(ranks)
    assert found == other
    assert len(found) == 1
    zero, three = (random.Random(s).sample(range(4), 4 - s % 2) for s in (0, 3))
    assert zero[0] != three[0]
    assert found[0].startswith(
        f"2: the forward of unit 'Shuffled' ran unit 'blocks.{three[0]}' where unit "
        f"'blocks.{zero[0]}' was expected"
    )
    assert "set_debug" in found[0]
    a, b, c = (f"blocks.{i}" for i in three)
    assert log == f"+Shuffled Shuffled {a} +{a} {b} +{b} {c} +{c}"


def test_a_forward_that_ends_early_is_told() -> None:
    class Short(Tower):
        depth = 3

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks[: self.depth]:
                x = block(x)
            return self.head(x)

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Short)
        twin.train(steps=2)
        for model in (twin.model, *twin.plain):
            model.depth = 1
        with pytest.warns(UserWarning, match=r"ended where unit 'blocks.1' was expected"):
            twin.train(steps=1)
        assert_at_rest(twin.model)
        twin.train(steps=2)

    run_ranks(ranks)


def quiet(fn: Callable[[int], Any], world: int = 2) -> list[Any]:
    """Run on ranks, where every warning is an error."""
    return run_ranks(fn, world)


def test_evaluation_does_not_change_the_order() -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Shuffled(4))
        for step in range(4):
            twin.train(steps=1)
            for seed in (1, 2):
                twin.model.seed = seed
                with torch.no_grad():
                    twin.model(data(step, rank))
                with torch.inference_mode():
                    twin.model.blocks[seed](data(step, rank))
            twin.model.seed = 0

    quiet(ranks)


def test_accumulation_and_several_forwards() -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        for count in (1, 3, 2, 4):
            for micro in range(count):
                twin.backward(square, micro)
            twin.step()
            losses = [twin.losses(square, micro) for micro in range(count)]
            sum(a for a, _ in losses).backward()
            sum(b for _, b in losses).backward()
            twin.step()
        twin.check()

    quiet(ranks)


def test_two_models_in_turn() -> None:
    """As a generator and a discriminator are trained."""

    def ranks(rank: int) -> int:
        first, second = by_block(seeded(Tower)), fully_shard(seeded(Block))
        plain = seeded(Tower)
        for step in range(4):
            x = data(step, rank)
            with torch.no_grad():
                first(x)
            (second(x).sum() + second(2 * x).sum()).backward()
            (first(x).sum() + second(x).sum()).backward()
            first(second(x)).sum().backward()
        for p, q in zip(first.parameters(), plain.parameters()):
            assert p.shape == q.shape
        return 0

    quiet(ranks)


def test_a_pipeline_of_two_chunks() -> None:
    """Warm-up, one forward one backward, drain: any mixture of forwards and backwards."""

    def ranks(rank: int) -> None:
        chunks = [by_block(seeded(lambda: Tower(2, 2), s)) for s in range(2)]
        for _ in range(3):
            waiting = []
            for schedule in ("0011", "b0", "b1", "b0", "b", "b", "b", "b"):
                for action in schedule:
                    if action == "b":
                        waiting.pop(0).backward()
                    else:
                        chunk = chunks[int(action)]
                        waiting.append(chunk(data(0, rank, 3, 2)).square().mean())
            assert len(waiting) == 0
            for chunk in chunks:
                assert_at_rest(chunk)

    quiet(ranks)


class Loose(nn.Module):
    """Blocks that are units, in no unit."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.order = list(range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


def loose(model: nn.Module, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, **options)


def test_units_without_a_root_prefetch_each_other_and_may_change() -> None:
    def ranks(rank: int) -> list[str]:
        twin = Twin(rank, 2, Loose, loose)
        twin.train(steps=2)
        with events() as log:
            watch_forward(twin.model, log)
            twin.backward(square, 5)
            forward = " ".join(short(log))
        twin.step()
        for model in (twin.model, *twin.plain):
            model.order = [3, 1, 2, 0]
        twin.train(steps=2)
        return [forward]

    (forward, *_), _ = quiet(ranks)
    first, *_ = forward.split(" -Block")
    assert first == "+Block Block Block +Block Block +Block Block +Block"


def test_what_was_gathered_ahead_is_gathered_again_once_changed() -> None:
    """Between two units without a root the next one's weights may be written."""

    def ranks(rank: int) -> None:
        model = seeded(Loose)
        plain = seeded(Loose)
        loose(model, prefetch=Prefetch(forward=2))
        x = data(0, rank)
        for step in range(3):
            y, z = x, x
            for ours, theirs in zip(model.blocks, plain.blocks):
                y, z = ours(y), theirs(z)
                torch.testing.assert_close(y, z)
                if step:
                    with torch.no_grad():
                        for m in (model, plain):
                            for p in m.blocks[3].parameters():
                                p.mul_(1.1)
            y.sum().backward()

    run_ranks(ranks)


def test_a_failed_forward_is_not_an_order() -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.train(steps=2)

        def fail(*_: Any) -> None:
            raise ValueError("on purpose")

        handle = twin.model.blocks[1].up.register_forward_pre_hook(fail)
        for _ in range(2):
            with pytest.raises(ValueError, match="on purpose"):
                twin.model(data(0, rank))
        handle.remove()
        twin.train(steps=2)

    quiet(ranks)


# Ranks that differ


class Branching(Tower):
    """Takes another way through its blocks where ``way`` says so."""

    way: tuple[int, ...] = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in self.way:
            x = self.blocks[index](x)
        return self.head(x)


def step(model: nn.Module, rank: int, seed: int = 0) -> None:
    square(model, data(seed, rank)).backward()


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


def test_a_rank_that_stops_after_its_forward() -> None:
    """It evaluates where the others train: its end of a step meets their first reduction."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Branching), strategy=ShardingStrategy.SHARD_GRAD_OP)
        with torch.set_grad_enabled(rank == 0):
            loss = square(model, data(0, rank))
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


def test_a_rank_that_stops_after_its_forward_in_a_later_step() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(Branching), strategy=ShardingStrategy.SHARD_GRAD_OP)
        for seed in range(3):
            step(model, rank, seed)
        with torch.set_grad_enabled(rank == 0):
            loss = square(model, data(3, rank))
        if rank == 0:
            loss.backward()

    text = message(rank_errors(ranks, 2, timeout=10))
    assert "rank 0 reduces unit 'blocks.2' (backward) where rank 1 ends the step" in text


def test_the_right_steps_after_an_error_in_a_later_step() -> None:
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


def test_without_point_to_point_it_is_found_at_the_end_of_the_step(
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
    waits: list[str] = []

    class Mark:
        def __init__(self, name: str) -> None:
            self.name = name

        def synchronize(self) -> None:
            waits.append(self.name)

    compare = verify.Log._compare

    def later(log: verify.Log, code: int) -> Any:
        comparison = compare(log, code)
        comparison.mark = Mark(f"step {comparison.step}")
        return comparison

    monkeypatch.setattr(verify.Log, "_compare", later)
    monkeypatch.setattr(comm, "is_point_to_point", lambda group: False)

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


# What it costs


def test_one_comparison_a_step() -> None:
    def ranks(rank: int) -> list[int]:
        model = by_block(seeded(Tower))
        counts = []
        for seed in range(4):
            comm.traffic.reset()
            step(model, rank, seed)
            counts.append(comm.traffic.control)
        set_debug(True)
        for seed in range(2):
            comm.traffic.reset()
            step(model, rank, seed)
            counts.append(comm.traffic.control)
        collectives = comm.traffic.gathers + comm.traffic.reduces
        assert comm.traffic.all_reduces == 0
        set_debug(False)
        step(model, rank)
        comm.traffic.reset()
        step(model, rank)
        return [*counts, collectives, comm.traffic.control]

    (first, *later, debug_from, debug, collectives, last), _ = run_ranks(ranks)
    assert later == [1, 1, 1]
    assert first == debug == collectives + 1
    assert (debug_from, last) == (1, 1)


def test_inference_is_compared_one_by_one_only_at_first() -> None:
    def ranks(rank: int) -> list[int]:
        model = by_block(seeded(Tower))
        counts = []
        with torch.no_grad():
            for _ in range(TRIAL_PASSES + 2):
                comm.traffic.reset()
                model(data(0, rank))
                counts.append(comm.traffic.control)
        return counts

    counts, _ = run_ranks(ranks)
    assert counts == [5] * TRIAL_PASSES + [1, 1]


def test_the_first_training_step_after_inference_is_compared_one_by_one() -> None:
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
        comm.traffic.reset()
        model = by_block(seeded(Tower))
        for seed in range(2):
            step(model, 0, seed)
        assert comm.traffic.control == 0
        assert not units(model)[0].lane.logs
    with fake_world(8):
        model = by_block(seeded(Tower), init="as_is")
        comm.traffic.reset()
        for seed in range(2):
            step(model, 0, seed)
        assert comm.traffic.control == 0


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("0", False), ("", False)])
def test_the_environment_asks_for_debug(
    value: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_COMPOSE_DEBUG", value)

    def ranks(rank: int) -> bool:
        importlib.reload(verify)  # as an import in a process of its own
        return verify._debug

    assert run_ranks(ranks, 1, init=False) == [wanted]


def test_ranks_free_a_model_at_different_times() -> None:
    """The next model on the same groups is numbered alike, and its first step is compared."""

    def ranks(rank: int) -> None:
        kept = [by_block(seeded(Tower))]
        lane = units(kept[0])[0].lane
        for seed in range(2):
            step(kept[0], rank, seed)
        assert len(lane.logs) == 1
        if rank == 0:
            kept.clear()
        model = by_block(seeded(Tower))
        assert len(lane.logs) == 1 and next(iter(lane.logs.values())).is_stepwise
        for seed in range(2):
            step(model, rank, seed)

    run_ranks(ranks)


def test_the_log_of_a_destroyed_group_goes() -> None:
    def ranks(rank: int) -> None:
        lanes = []
        for _ in range(2):
            group = dist.new_group([0, 1])
            model = by_block(seeded(Tower), mesh=group)
            lanes.append(units(model)[0].lane)
            step(model, rank)
            dist.destroy_process_group(group)
        assert lanes[0] is lanes[1] and len(lanes[0].logs) == 1

    run_ranks(ranks)


def test_explanation_of_more_than_two_ways() -> None:
    one, two = (5, "gather", "a", "forward"), (6, "reduce", "b", "backward")
    text = explain(7, [(0, [one]), (4, [one, two]), (5, [two]), (9, [])])
    assert "step 7: as collective 1 of it, ranks 0 and 4 gather unit 'a' (forward)" in text
    assert "rank 5 reduces unit 'b' (backward) where rank 9 ends the step" in text


# Seeding


def test_a_seeded_order_prefetches_in_the_first_iteration() -> None:
    def ranks(rank: int) -> tuple[str, str]:
        model = seeded(lambda: Tower(3))
        order = trace_execution_order(model, data(0, rank))
        by_block(model)
        seed_order(model, order)
        with events() as log:
            watch_forward(model, log)
            loss = square(model, data(0, rank))
            first = " ".join(short(log))
            with torch.no_grad():
                log.clear()
                model(data(0, rank))
            loss.backward()
        assert_at_rest(model)
        return first, " ".join(short(log))

    (first, second), _ = quiet(ranks)
    assert first == "+R R 0 +0 1 +1 2 +2"
    assert second.startswith("+R 0 +0 1 +1 2 +2")


def test_a_seed_without_a_root_and_one_that_is_wrong() -> None:
    def ranks(rank: int) -> str:
        twin_order = trace_execution_order(Loose(3), data(0, 0))
        twin = Twin(rank, 2, lambda: Loose(3), loose)
        seed_order(twin.model, twin_order)
        with events() as log:
            twin.model(data(0, rank))
        twin.train(steps=2)
        model = seeded(lambda: Branching(3))
        order = trace_execution_order(model, data(0, 0))
        by_block(model)
        seed_order(model, order)
        model.way = (2, 1, 0)
        with pytest.warns(UserWarning, match="ran unit 'blocks.2' where unit 'blocks.0'"):
            step(model, rank)
        step(model, rank)
        return str(len(log))

    run_ranks(ranks)
    with single_process():
        order = trace_execution_order(Tower(3), data(0, 0))
        with pytest.raises(ValueError, match="no unit of Tower"):
            seed_order(Tower(3), order)
        with pytest.raises(ValueError, match=r"submodule 'blocks\.2'"):
            seed_order(by_block(Tower(2)), order)


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
