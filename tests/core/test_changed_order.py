"""An order that changes on all ranks alike is told once and followed."""

from __future__ import annotations

import operator
import random
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_compose import (
    Prefetch,
    fully_shard,
    gathered,
)

from harness import run_ranks, simulate_ranks
from models import (
    Block,
    Tower,
    Twin,
    assert_at_rest,
    by_block,
    data,
    seeded,
    square,
)
from watching import Loose, Shuffled, events, loose, quiet, short, watch_forward


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
        f"2: the forward of unit 'Shuffled' ran unit 'blocks.{three[0]}' where the "
        f"forward before ran unit 'blocks.{zero[0]}'"
    )
    assert "set_debug" in found[0]
    a, b, c = (f"blocks.{i}" for i in three)
    assert log == f"+Shuffled Shuffled {a} +{a} {b} +{b} {c} +{c}"


def test_a_change_that_is_an_error_opens_no_unit() -> None:
    """Where warnings are errors: modules hold their sharded parameters, and training goes on."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Shuffled(4))
        params = list(twin.model.parameters())
        twin.train(steps=2)
        twin.model.seed = 3
        with pytest.raises(UserWarning, match="in vain"):
            twin.model(data(0, rank))
        assert all(map(operator.is_, twin.model.parameters(), params))
        twin.model.seed = 0
        twin.train(steps=1)

    run_ranks(ranks)


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
        with pytest.warns(UserWarning, match=r"ended where the forward before ran unit 'blocks.1'"):
            twin.train(steps=1)
        assert_at_rest(twin.model)
        twin.train(steps=2)

    run_ranks(ranks)


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


def test_units_without_a_root_prefetch_each_other() -> None:
    """Units without a root prefetch each other and may change."""

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


def test_what_was_gathered_ahead_and_changed() -> None:
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


@pytest.mark.parametrize("part", [0, 1])
def test_units_in_a_scope_are_not_missed(part: int) -> None:
    """A forward gathers the units that are in no scope; the one after it, all again."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(4):
                with gathered(model.blocks[part]) if step % 2 else nullcontext():
                    square(model, data(step, rank)).backward()
                model.zero_grad()
        assert_at_rest(model)

    simulate_ranks(ranks)


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
