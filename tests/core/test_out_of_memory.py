"""Memory runs out at one operation of a step, at each in turn, and the next step is exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_compose as fc
from fsdp_compose.comm import collectives as comm
from fsdp_compose.core import gathering
from fsdp_compose.simulation import simulate

from models import Tower, assert_at_rest, by_block, data, mesh_of_replicas, seeded, sgd, square


class OutOfMemory(TorchDispatchMode):
    """Inside, the ``at``-th allocation of this rank raises; 0: none does."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def allocate(self) -> None:
        self.count += 1
        if self.count == self.at:
            raise torch.OutOfMemoryError("played")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        if returns and all(value.alias_info is None for value in returns):
            self.allocate()
        return func(*args, **(kwargs or {}))


@contextmanager
def running_out(at: int, modes: dict[int, OutOfMemory]) -> Iterator[None]:
    rank = dist.get_rank()
    modes[rank] = OutOfMemory(at)
    try:
        with modes[rank]:
            yield
    finally:
        del modes[rank]


Attempt = Callable[[nn.Module, torch.Tensor], object]


def backward(model: nn.Module, x: torch.Tensor) -> None:
    square(model, x).backward()


def evaluate(model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        model(x)


def train(
    who: set[int], modes: dict[int, OutOfMemory], options: dict[str, Any], attempt: Attempt
) -> int:
    """Fail at one allocation after the other until nothing fails; the last that failed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    stride = max(2, world - 1) if options else 1  # at each allocation, with the default options
    if "mesh" in options:
        options = {**options, "mesh": mesh_of_replicas(*options["mesh"])}
    model, plain = by_block(seeded(Tower), **options), seeded(Tower)
    ours, theirs = sgd(model.parameters()), sgd(plain.parameters())

    def step(seed: int) -> None:
        square(model, data(seed, rank)).backward()
        for other in range(world):
            (square(plain, data(seed, other)) / world).backward()
        for optim in (ours, theirs):
            optim.step()
            optim.zero_grad()
        assert_at_rest(model)
        for found, wanted in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(found.full_tensor(), wanted)

    step(0)
    for at in count(1, stride):
        x, has_failed = data(2 * at, rank), False
        if len(who) < world:
            with fc.skippable_step(model) as scope, running_out(at * (rank in who), modes):
                attempt(model, x)
            has_failed = scope.skipped
        else:
            try:
                with running_out(at, modes):
                    attempt(model, x)
            except torch.OutOfMemoryError:
                has_failed = True
        ours.zero_grad()
        step(2 * at + 1)
        if not has_failed:
            return at - stride
    raise AssertionError


CELLS: dict[str, tuple[set[int], int, dict[str, Any], Attempt]] = {
    "every rank, deep prefetch": ({0, 1}, 2, {"prefetch": fc.Prefetch(3, 3, "post")}, backward),
    "every rank, static": ({0, 1}, 2, {"static_buffers": True}, backward),
    "every rank, evaluation": ({0, 1}, 2, {}, evaluate),
    "every rank, participate": ({0, 1}, 2, {}, lambda model, x: fc.participate(model)),
    "one rank": ({0}, 2, {}, backward),
    "one rank, kept": ({1}, 2, {"strategy": fc.ShardingStrategy.SHARD_GRAD_OP}, backward),
    "one rank, offloaded": ({0}, 2, {"offload_policy": fc.Offload(True, grads=True)}, backward),
    "one rank, hybrid": (
        {2}, 4, {"strategy": fc.ShardingStrategy.HYBRID_SHARD, "mesh": (2, 2)}, backward,
    ),
}  # fmt: skip


@pytest.mark.parametrize("cell", CELLS)
def test_a_step_without_memory_leaves_nothing_behind(
    cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks catch the error, or one fails and all skip the step: the next one is exact."""
    who, world, options, attempt = CELLS[cell]
    modes: dict[int, OutOfMemory] = {}
    resize = torch.UntypedStorage.resize_

    def played_resize(storage: Any, nbytes: int) -> Any:
        if nbytes and dist.is_initialized() and dist.get_rank() in modes:
            modes[dist.get_rank()].allocate()
        return resize(storage, nbytes)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", played_resize)
    found = simulate(train, world, who, modes, options, attempt)
    assert min(found) == max(found) > 10


def test_gathering_again_fails() -> None:
    """A unit that was kept and then written is gathered again, by the next use if that fails."""

    def ranks() -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        model = by_block(seeded(Tower), strategy=fc.ShardingStrategy.SHARD_GRAD_OP)
        plain = seeded(Tower)
        square(model, data(0, rank))  # no backward: the units stay gathered
        for param in (*model.parameters(), *plain.parameters()):
            with torch.no_grad():
                param.mul_(0.5)
        failing.add(rank)
        with pytest.raises(torch.OutOfMemoryError):
            square(model, data(1, rank))
        failing.remove(rank)
        square(model, data(2, rank)).backward()
        for other in range(world):
            (square(plain, data(2, other)) / world).backward()
        for found, wanted in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(found.grad.full_tensor(), wanted.grad)

    failing: set[int] = set()
    gather = comm.gather_parts

    def played_gather(*args: Any) -> Any:
        if dist.get_rank() in failing:
            raise torch.OutOfMemoryError("played")
        return gather(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "gather_parts", played_gather)
        simulate(ranks, 2)


def test_no_memory_for_what_a_forward_spreads() -> None:
    """The unit is released all the same: a forward after a write does not read what was before."""

    def ranks() -> None:
        rank = dist.get_rank()
        model, plain = by_block(seeded(Tower), reshard_after_forward=2), seeded(Tower)
        failing.add(rank)
        with pytest.raises(torch.OutOfMemoryError):
            square(model, data(0, rank))
        failing.remove(rank)
        assert_at_rest(model)
        with torch.no_grad():
            for param in (*model.parameters(), *plain.parameters()):
                param.mul_(0.5)
        torch.testing.assert_close(square(model, data(1, rank)), square(plain, data(1, rank)))

    failing: set[int] = set()
    keep = gathering.keep_part

    def played_keep(bucket: Any) -> None:
        if dist.get_rank() in failing:
            raise torch.OutOfMemoryError("played")
        keep(bucket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "keep_part", played_keep)
        simulate(ranks, 4)


@pytest.mark.parametrize("at", range(1, 7))
def test_an_undo_without_memory(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each unit is plain or sharded as a whole, trains as before, and is undone by another call."""
    model, plain = by_block(seeded(Tower)), seeded(Tower)
    optims = sgd(model.parameters()), sgd(plain.parameters())
    made, make = count(1), torch.empty_strided

    def play(*args: Any, **kwargs: Any) -> torch.Tensor:
        if next(made) == at:
            raise torch.OutOfMemoryError("played")
        return make(*args, **kwargs)

    for one in (model, plain):
        square(one, data(0, 0)).backward()
    monkeypatch.setattr(torch, "empty_strided", play)
    with pytest.raises(torch.OutOfMemoryError):
        fc.undo(model)
    for one, optim in zip((model, plain), optims, strict=True):
        square(one, data(1, 0)).backward()
        optim.step()
    fc.undo(model)
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert type(found) is nn.Parameter
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(found.grad, wanted.grad)
