"""Ranks of an owner_step are given the same things, hear of each other's errors, and are copied."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose.buckets.entries import find_entry
from fsdp_compose.core.state import owner_of

from harness import rank_errors, run_ranks, simulate_ranks
from models import Tower, by_block, data, mesh_of_replicas, seeded, whole
from structured import matrices

SGD, ADAM = torch.optim.SGD, torch.optim.Adam


def sgd(groups: Any) -> torch.optim.Optimizer:
    return SGD(groups, lr=0.1)


def in_two_groups(params: list[nn.Parameter], rank: int) -> list[dict[str, Any]]:
    groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.3}]
    return groups[::-1] if rank else groups


def refuse(groups: Any) -> torch.optim.Optimizer:
    raise KeyError("no such optimizer")


Make = Callable[[list[nn.Parameter], int], Any]
UNLIKE: dict[str, tuple[Make, str]] = {
    "order": (
        lambda ps, rank: fc.owner_step(ps[::-1] if rank else ps, sgd),
        r"parameter 0 is 'first.weight' .* on rank 0 and 'head.weight' .* on rank 1.*same order",
    ),
    "one less": (
        lambda ps, rank: fc.owner_step(ps[: len(ps) - rank], sgd),
        r"'head.weight' \(unit 'Tower'\) on rank 0 and missing on rank 1",
    ),
    "order of groups": (
        lambda ps, rank: fc.owner_step(in_two_groups(ps, rank), sgd),
        "parameter 0 is 'first.weight'.* on rank 0 and 'blocks",
    ),
    "cut of groups": (
        lambda ps, rank: fc.owner_step(
            [{"params": ps[: 2 + rank]}, {"params": ps[2 + rank :]}], sgd
        ),
        r"'blocks.0.down.weight' .*is in group 1 on rank 0 and in group 0 on rank 1",
    ),
    "class": (
        lambda ps, rank: fc.owner_step(ps, lambda groups: (SGD, ADAM)[rank](groups, lr=0.1)),
        "the optimizer is SGD on rank 0 and Adam on rank 1",
    ),
    "settings": (
        lambda ps, rank: fc.owner_step(ps, lambda groups: SGD(groups, lr=0.1 + rank)),
        "'lr' of group 0 is 0.1 on rank 0 and 1.1 on rank 1",
    ),
    "work": (
        lambda ps, rank: fc.owner_step(ps, sgd, work=lambda shape: float(rank)),
        "work= gives 0.0 for 'first.weight' .* on rank 0 and 1.0",
    ),
    "an error": (
        lambda ps, rank: fc.owner_step(ps, refuse if rank else sgd),
        "KeyError: 'no such optimizer'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNLIKE)
def test_ranks_given_other_things_raise(name: str) -> None:
    """On every rank, when the optimizer is made, naming what differs."""
    make, message = UNLIKE[name]

    def body(rank: int) -> str:
        model = by_block(seeded(Tower))
        try:
            make(matrices(model), rank)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    for error in simulate_ranks(body, 2):
        assert re.search(message, error), error


def test_replicas_given_another_class_raise() -> None:
    """They exchange no matrices, but would differ after a step."""

    def body(rank: int) -> None:
        options = {"strategy": fc.ShardingStrategy.HYBRID_SHARD, "mesh": mesh_of_replicas(2, 2)}
        model = by_block(seeded(Tower), **options)
        with pytest.raises(ValueError, match=r"the optimizer is SGD on rank .* and Adam on rank"):
            fc.owner_step(matrices(model), lambda g: (SGD, ADAM)[rank // 2](g, lr=0.1))

    simulate_ranks(body, 4)


@pytest.mark.parametrize("granularity", ["tensor", 1])
def test_a_gradient_missing_on_one_rank_raises(granularity: Any) -> None:
    """It would be left out or taken for zero, as the owner's rank has it or not."""

    def body(rank: int) -> None:
        model = by_block(seeded(Tower), granularity=granularity)
        optim = fc.owner_step(matrices(model), sgd)
        model(data(0, rank, 4, 6)).square().mean().backward()
        kept, model.first.weight.grad = model.first.weight.grad, None
        if rank == 0:
            model.first.weight.grad = kept
        with pytest.raises(
            RuntimeError, match=r"'first.weight'.* is set on rank 0, None on rank 1"
        ):
            optim.step()
        model.first.weight.grad = kept
        optim.step()
        assert not torch.equal(whole(model.first.weight), seeded(Tower).first.weight)

    simulate_ranks(body, 2)


def test_other_settings_after_a_step_name_both_causes() -> None:
    """A scheduler of one rank is not taken for an optimizer that sums."""

    def body(rank: int) -> None:
        model = by_block(seeded(Tower))
        optim = fc.owner_step(matrices(model), sgd)
        model(data(0, rank, 4, 6)).square().mean().backward()
        optim.step()
        optim.param_groups[0]["lr"] = 0.1 + rank
        with pytest.raises(RuntimeError, match=r"'lr' of group 0 is .* If the program set it"):
            optim.step()

    simulate_ranks(body, 2)


class Fails(SGD):
    """Fails in its next step, if told to."""

    fails = False

    def step(self, closure: Any = None) -> None:
        if self.fails:
            self.fails = False
            raise ArithmeticError("eigh did not converge")
        super().step()


def is_cut(param: nn.Parameter) -> bool:
    entry = find_entry(param)
    return len(owner_of(entry).layout.owners(entry.index)) > 1


class Failure:
    """A step that fails on the last rank, in one place, once."""

    def __init__(self, where: str, rank: int, ranks: int, **options: Any) -> None:
        self.model = by_block(seeded(Tower), **options)
        self.chosen = matrices(self.model)
        if "granularity" not in options:
            self.chosen = [p for p in self.chosen if is_cut(p)]
        self.optim = fc.owner_step(self.chosen, lambda groups: Fails(groups, lr=0.1))
        self.rank, self.has_closure = rank, where == "closure"
        self.fails = rank == ranks - 1
        self.failing: Iterator[bool] = iter([self.fails and self.has_closure])
        hooked = {"hook": self.optim, "inner hook": self.optim.optimizer}.get(where)
        if self.fails and where == "optimizer":
            self.optim.optimizer.fails = True
        if self.fails and hooked is not None:
            self.handle = hooked.register_step_pre_hook(self.fail)

    def fail(self, *args: Any) -> None:
        self.handle.remove()
        raise ArithmeticError("eigh did not converge")

    def loss(self) -> Tensor:
        if next(self.failing, False):
            raise ArithmeticError("eigh did not converge")
        self.optim.zero_grad()
        loss = self.model(data(0, self.rank, 4, 6)).square().mean()
        loss.backward()
        return loss

    def step(self) -> None:
        if self.has_closure:
            self.optim.step(self.loss)
        else:
            self.loss()
            self.optim.step()

    def weights(self) -> list[Tensor]:
        return [whole(p) for p in self.chosen]


PLACES = ["optimizer", "inner hook", "hook", "closure"]


def check_failure(where: str, rank: int, ranks: int, **options: Any) -> None:
    run = Failure(where, rank, ranks, **options)
    before = run.weights()
    kind = ArithmeticError if run.fails else RuntimeError
    message = rf"^owner_step: rank {ranks - 1} raised ArithmeticError: eigh did not converge\. So"
    with pytest.raises(kind, match="eigh did not" if run.fails else message):
        run.step()
    assert all(torch.equal(a, b) for a, b in zip(before, run.weights()))
    run.step()
    other = Failure("nowhere", rank, ranks, **options)
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(other.weights(), run.weights()))
    assert not torch.equal(before[0], other.weights()[0])


@pytest.mark.parametrize("where", PLACES)
def test_an_error_on_one_rank_is_raised_on_all(where: str) -> None:
    """Its own on that rank; what is cut has not moved, and the next step is as a first one."""
    simulate_ranks(lambda rank: check_failure(where, rank, 3), 3)


@pytest.mark.parametrize("where", PLACES)
def test_replicas_hear_of_an_error_too(where: str) -> None:
    """Ranks that hold other slices of other replicas as well."""

    def body(rank: int) -> None:
        mesh = mesh_of_replicas(2, 2)
        check_failure(where, rank, 4, strategy=fc.ShardingStrategy.HYBRID_SHARD, mesh=mesh)

    simulate_ranks(body, 4)


def test_an_error_is_told_between_processes() -> None:
    """Within a second, not by a timeout; with whole matrices too, for which nobody waits."""

    def body(rank: int) -> None:
        check_failure("optimizer", rank, 2)
        run = Failure("optimizer", rank, 2, granularity="tensor")
        with suppress(ArithmeticError):
            run.step()

    first, second = rank_errors(body, 2, timeout=20)
    assert first is not None and "rank 1 raised ArithmeticError" in first and second is None


def test_a_rank_that_skips_the_step_is_found() -> None:
    """It meets the others in its next forward, and all raise."""

    def body(rank: int) -> None:
        run = Failure("nowhere", rank, 2)
        run.loss()
        with pytest.raises(RuntimeError, match=r"rank 0 .*gather.* rank 1 steps unit 'owner_step'"):
            run.optim.step() if rank else run.loss()

    simulate_ranks(body, 2)


def test_a_copy_with_its_model_is_trained() -> None:
    """Like a plain pair: the copy goes on with its own state, and the original is as it was."""

    def body(rank: int, granularity: Any, optimizer_first: bool) -> None:
        model = by_block(seeded(Tower), granularity=granularity)
        optim = fc.owner_step(matrices(model), lambda groups: ADAM(groups, lr=0.1))

        def train(model: nn.Module, optim: Any) -> list[Tensor]:
            model(data(0, rank, 4, 6)).square().mean().backward()
            optim.step()
            optim.zero_grad()
            return [whole(p) for p in matrices(model)]

        before = train(model, optim)
        if optimizer_first:
            twin_optim, twin = copy.deepcopy((optim, model))
        else:
            twin, twin_optim = copy.deepcopy((model, optim))
        after = train(twin, twin_optim)
        assert all(torch.equal(a, whole(p)) for a, p in zip(before, matrices(model)))
        assert all(torch.equal(a, b) for a, b in zip(after, train(model, optim)))
        assert not torch.equal(before[0], after[0])
        states = twin_optim.state, twin_optim.optimizer.state
        assert len(states[0]) == len(states[1]) == len(optim.state)

    for granularity in ("tensor", 1):
        for optimizer_first in (False, True):
            simulate_ranks(body, 2, granularity, optimizer_first)


def test_a_copy_without_its_model_raises() -> None:
    """It has slices of no unit, and says so."""

    def body(rank: int) -> None:
        run = Failure("nowhere", rank, 2)
        twin = copy.deepcopy(run.optim)
        for param in twin.param_groups[0]["params"]:
            param.grad = torch.zeros_like(param)
        with pytest.raises(ValueError, match=r"belongs to no unit.*Copy the whole unit"):
            twin.step()

    run_ranks(body, 2)
