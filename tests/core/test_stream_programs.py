"""The fuzzer's random programs on a played device: is all that its streams do ordered?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Literal

import played_device
import pytest
from played_device import wait_for, watched

import fsdp_compose as fc
from fsdp_compose import Offload, ShardingStrategy
from fsdp_compose.base.process import here
from fsdp_compose.comm import transports
from fsdp_compose.core import passes, reducing
from fsdp_compose.core.guards import used_parameters
from fsdp_compose.core.state import Engine
from fsdp_compose.scopes.switches import Keep

from fuzz import is_known_at_once, run_case
from fuzz_programs import draw
from harness import run_ranks
from models import Tower, by_block, data, seeded, sgd, square

Waiting = Keep | Literal["tree"] | None
OTHERWISE = ("outside loss", "second order", "interrupt")
"""Operations of programs that do something else under the mode that notes what runs."""


def is_stale_read(text: str, gather: int) -> bool:
    """Whether a gather of weights that were written since is what may read half of the new ones.

    What it gathers is gathered again, as the weights have another version then.
    """
    return "races" in text and f"stream={gather}," in text and "reads=True" in text


def find_races(rank: int, seeds: Iterable[int]) -> list[str]:
    found = []
    for seed in seeds:
        case = draw(seed, 2)
        ops = tuple(op for op in case.ops if op[0] not in OTHERWISE)
        with pytest.MonkeyPatch.context() as patch, watched(patch) as races:
            patch.setattr(transports, "segments_of", lambda group: None)
            patch.setattr(used_parameters, "is_known_at_once", is_known_at_once)
            patch.setattr(played_device.Event, "synchronize", wait_for)
            (engine,) = here.engines.values()
            run_case(rank, replace(case, ops=ops, backend="nccl"))
        gather = engine.streams.gather.key
        found += [f"{seed}: {text}" for text in races.found if not is_stale_read(text, gather)]
    return found


@pytest.mark.parametrize("first", [0, 100])
def test_random_programs_are_ordered(first: int) -> None:
    """No two streams touch the same memory at once, nor memory that went back to its pool."""
    assert run_ranks(find_races, 2, range(first, first + 15), timeout=100) == [[], []]


def find_races_of_waiting_sums(
    rank: int, strategy: ShardingStrategy, offload: Offload, keep: Waiting
) -> list[str]:
    """In steps of three microbatches, of which ``keep`` or the switch makes the first two wait."""
    tree = 6 if keep == "tree" else None
    with pytest.MonkeyPatch.context() as patch, watched(patch) as races:
        patch.setattr(played_device.Event, "synchronize", wait_for)
        patch.setattr(reducing, "copy_to_host", lambda grad, pin_memory: grad.clone())
        model = by_block(
            seeded(Tower), strategy=strategy, offload_policy=offload, deterministic=tree
        )
        optim = sgd(model.parameters())
        for step in range(3):
            waits = keep is not None and keep != "tree"
            with fc.accumulate(model, keep) if waits else contextlib.nullcontext():
                for part in range(3):
                    if keep is None:
                        fc.set_is_last_backward(model, part == 2)
                    square(model, data(10 * step + part, rank)).backward()
            optim.step()
            optim.zero_grad()
    return races.found


WAITING: list[Waiting] = [None, "no_all_reduce", "unsharded"]
OFFLOADS = [Offload(), Offload(optimizer=True, pin_memory=False)]


@pytest.mark.parametrize(("offload", "keep"), [*product(OFFLOADS, WAITING), (OFFLOADS[1], "tree")])
def test_sums_that_wait_are_ordered(offload: Offload, keep: Waiting) -> None:
    for strategy in (ShardingStrategy.NO_SHARD, ShardingStrategy.FULL_SHARD):
        found = run_ranks(find_races_of_waiting_sums, 2, strategy, offload, keep)
        assert found == [[], []], strategy


def find_races_of_a_forward_elsewhere(rank: int) -> list[str]:
    """Autograd computes on the stream of the forward, and ends on the one that called it."""
    with pytest.MonkeyPatch.context() as patch, watched(patch) as races:
        patch.setattr(played_device.Event, "synchronize", wait_for)
        device, forward, end_task = races.device, played_device.Stream(), passes.end_task
        caller = device.current_stream()

        def ended(engine: Engine, task_id: int) -> None:
            device.set_stream(caller)
            end_task(engine, task_id)
            caller.wait_stream(forward)

        patch.setattr(passes, "end_task", ended)
        model = by_block(seeded(Tower))
        optim = sgd(model.parameters())
        for step in range(3):
            forward.wait_stream(caller)
            device.set_stream(forward)
            square(model, data(step, rank)).backward()
            optim.step()
            optim.zero_grad()
    return races.found


def test_what_is_reduced_last_waits_for_its_gradients() -> None:
    assert run_ranks(find_races_of_a_forward_elsewhere, 2) == [[], []]
