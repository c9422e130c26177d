"""Models whose order of units changes, and ways to see what is gathered when."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor, nn

from fsdp_compose import fully_shard
from fsdp_compose.comm import collectives as comm
from fsdp_compose.core import gathering
from fsdp_compose.core.guards import collective_log, inner_backward
from fsdp_compose.core.schedule import Hold, Schedule
from fsdp_compose.core.state import Engine

from harness import run_ranks
from models import Block, Tower, data, square, units


@contextmanager
def events() -> Iterator[list[str]]:
    """Names of units as their gathers are issued, and of forwards (+) and backwards (-) begun."""
    log: list[str] = []
    start, opened = gathering._start_gather, inner_backward.open_backward
    closed = Schedule.leave_backward

    def gather(engine: Engine, buckets: Any) -> None:
        log.extend(bucket.entries[0].spec.unit for bucket in buckets)
        start(engine, buckets)

    def open_backward(unit: Any, task: Any) -> None:
        if unit.run.task is None:
            log.append(f"-{unit.name}")
        opened(unit, task)

    def leave_backward(schedule: Any, unit: Any, ended: bool = False) -> None:
        if Hold.BACKWARD in unit.holds:
            log.append(f"={unit.name}")
        closed(schedule, unit, ended)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "_start_gather", gather)
        patch.setattr(inner_backward, "open_backward", open_backward)
        patch.setattr(Schedule, "leave_backward", leave_backward)
        yield log


def compare_as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have what ranks compare arrive later than the host goes on; lists what it then waits for."""
    waits: list[str] = []
    compare = collective_log.Log._compare

    class Mark:
        def __init__(self, name: str) -> None:
            self.name = name

        def synchronize(self) -> None:
            waits.append(self.name)

    def later(log: collective_log.Log, code: int) -> Any:
        comparison = compare(log, code)
        comparison.mark = Mark(f"step {comparison.step}")
        return comparison

    monkeypatch.setattr(collective_log.Log, "_compare", later)
    monkeypatch.setattr(comm, "is_point_to_point", lambda group: False)
    return waits


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


class Shuffled(Tower):
    """Runs its blocks in an order that depends on ``seed``, some of them not at all."""

    seed = 0

    def forward(self, x: Tensor) -> Tensor:
        rng = random.Random(self.seed)
        x = self.first(x)
        for block in rng.sample(list(self.blocks), len(self.blocks) - self.seed % 2):
            x = block(x)
        return self.head(x)


def quiet(fn: Callable[[int], Any], world: int = 2) -> list[Any]:
    """Run on ranks, where every warning is an error."""
    return run_ranks(fn, world)


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
