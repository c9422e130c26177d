"""An optimizer's step that some ranks leave out is found when the next step ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_compose as fc
from fsdp_compose import ShardingStrategy
from fsdp_compose.base.process import here
from fsdp_compose.core.guards.rank_differences import STEPPED, explain_difference, explain_stepped
from fsdp_compose.sharded import to_local

from harness import run_ranks, simulate_ranks
from models import Tower, by_block, data, seeded, sgd, square, whole
from watching import compare_as_on_a_device

FOUND = r"optimizer.step\(\) was left out on rank 1 before step 3: parameter 'first.weight' of unit"
ONE, TWO = (5, "gather", "a", "forward"), (6, "reduce", "b", "backward")
DONE = (7, STEPPED, "a", "w")


def train(model: nn.Module, optims: list[Any], rank: int, seed: int, steps: bool = True) -> None:
    for optim in optims:
        optim.zero_grad()
    square(model, data(seed, rank)).backward()
    for optim in optims if steps else ():
        optim.step()


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize(
    "take",
    [nn.Module.parameters, fc.flat_parameters, fc.local_parameters],
    ids=lambda f: f.__name__,
)
def test_a_step_left_out_raises_on_every_rank(
    strategy: ShardingStrategy, take: Callable[[nn.Module], Any]
) -> None:
    """With the parameter, and the ranks; weights loaded on all then train as before."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower), strategy=strategy)
        optims = [sgd(take(model))]
        first = {name: p.detach().clone() for name, p in model.named_parameters()}
        train(model, optims, rank, 0)
        train(model, optims, rank, 1, steps=rank != 1)
        with pytest.raises(RuntimeError, match=FOUND):
            train(model, optims, rank, 2)
        model.load_state_dict(first)
        for seed in range(3):
            train(model, optims, rank, seed)

    simulate_ranks(ranks, 3 if strategy is ShardingStrategy.FULL_SHARD else 2)


def test_a_step_left_out_is_found_over_processes() -> None:
    """Also in inference, whose weights would be those of two steps."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        optims = [sgd(model.parameters())]
        train(model, optims, rank, 0)
        train(model, optims, rank, 1, steps=rank != 1)
        with torch.no_grad(), pytest.raises(RuntimeError, match=FOUND):
            model(data(2, rank))

    run_ranks(ranks)


def test_on_a_device_it_is_found_a_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host does not wait for the comparison of the step that it has just issued."""
    compare_as_on_a_device(monkeypatch)

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        optims = [sgd(model.parameters())]
        for seed in range(2):
            train(model, optims, rank, seed, steps=rank == 0 or seed == 0)
        train(model, optims, rank, 2)
        with pytest.raises(RuntimeError, match=FOUND):
            train(model, optims, rank, 3)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_ranks(ranks)


def test_ranks_may_step_what_they_hold_a_part_of() -> None:
    """By other optimizers, as many as a rank likes, or by one that only some ranks need."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower), granularity="tensor")
        mine = [p for p in model.parameters() if to_local(p).numel()]
        optims = [sgd(mine)] if rank else [sgd([param]) for param in mine]
        for seed in range(3):
            train(model, optims, rank, seed)
        assert len(mine) < len(list(model.parameters()))

    simulate_ranks(ranks)


def test_weights_that_all_ranks_load_are_whole() -> None:
    """Whatever ranks had stepped before: there is no error, and training goes on as on one rank."""

    def ranks(rank: int) -> torch.Tensor:
        model = by_block(seeded(Tower))
        optims, state = [sgd(model.parameters())], fc.state_dict(model)
        train(model, optims, rank, 0, steps=rank != 1)
        for load in (
            lambda: model.load_state_dict(state),
            lambda: fc.load_state_dict(model, state),
        ):
            assert any(
                log.steps.parameter for log in here.engines[torch.device("cpu")].logs.values()
            ) == (rank == 0)
            load()
            train(model, [sgd(model.parameters())], rank, 1, steps=rank != 1)
        fc.load_state_dict(model, state)
        train(model, [sgd(model.parameters())], rank, 1)
        train(model, [], rank, 2)
        return whole(model.first.weight)

    def right(rank: int) -> torch.Tensor:
        model = by_block(seeded(Tower))
        train(model, [sgd(model.parameters())], rank, 1)
        return whole(model.first.weight)

    assert torch.equal(simulate_ranks(ranks)[0], simulate_ranks(right)[0])


def own(model: nn.Module) -> torch.optim.Optimizer:
    return fc.owner_step(model.parameters(), sgd)


def flat(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(fc.flat_parameters(model), lr=0.1, fused=True)


def raise_once(rank: int, failing: int) -> Callable[..., None]:
    """A hook that raises when it is called the second time, on one rank alone."""
    calls: list[int] = []

    def hook(*_: Any) -> None:
        calls.append(rank)
        if len(calls) == 2 and rank == failing:
            raise ValueError("a hook of the user")

    return hook


@pytest.mark.parametrize("make", [own, flat, lambda model: sgd(model.parameters())])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
def test_a_hook_that_raises_after_the_step(
    make: Callable[[nn.Module], torch.optim.Optimizer], strategy: ShardingStrategy
) -> None:
    """The step has ended on every rank: who catches the error goes on as if nothing was raised."""

    def ranks(rank: int, failing: int) -> torch.Tensor:
        model = by_block(seeded(Tower), strategy=strategy)
        optim = make(model)
        optim.register_step_post_hook(raise_once(rank, failing))
        for seed in range(4):
            with suppress(ValueError):
                train(model, [optim], rank, seed)
            with torch.no_grad():
                model(data(seed, rank))  # which gathers weights that the next forward may find
        return whole(model.first.weight)

    found = [simulate_ranks(ranks, 2, failing)[0] for failing in (-1, 1)]
    assert torch.equal(*found)


def split(take: Callable[[nn.Module], Any], model: nn.Module) -> list[torch.optim.Optimizer]:
    """Two optimizers over one model's parameters."""
    params = list(take(model))
    return [sgd(params[1:]), sgd(params[:1])]


@pytest.mark.parametrize(
    "take",
    [nn.Module.parameters, fc.flat_parameters, fc.local_parameters],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_step_of_one_of_two_optimizers(take: Callable[[nn.Module], Any], steps: int) -> None:
    """That one rank leaves out, or takes twice: all raise in the next step, or in a save."""
    found = FOUND if not steps else r"on rank 1 than on rank.* 'first.weight' .* 2 times and 1, so"

    def ranks(rank: int, saves: bool) -> None:
        model = by_block(seeded(Tower))
        optims = split(take, model)
        train(model, optims, rank, 0)
        train(model, optims[:1], rank, 1)
        for _ in range(steps if rank == 1 else 1):
            optims[1].step()
        with pytest.raises(RuntimeError, match=found.replace(" 3", r" \d")):
            fc.state_dict(model) if saves else train(model, optims, rank, 2)

    for saves in (False, True):
        simulate_ranks(ranks, 2, saves)


def test_a_step_of_what_one_rank_alone_holds() -> None:
    """The others have stepped it, if no element of it: on its own rank it is a step behind."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower), granularity="tensor")
        params = list(model.parameters())
        optims = [sgd(params[::2]), sgd(params[1::2])]
        train(model, optims, rank, 0)
        train(model, optims, rank, 1, steps=False)
        for optim in optims[: 2 - rank]:
            optim.step()
        with pytest.raises(RuntimeError, match="left out on rank 1 before step 3"):
            train(model, optims, rank, 2)

    simulate_ranks(ranks)


def test_optimizers_that_are_gone_say_nothing() -> None:
    """A rank does not know what one has stepped that it has deleted: it may have been all."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower), granularity="tensor")
        mine = [p for p in model.parameters() if to_local(p).numel()]
        for seed in range(3):
            optims = [sgd(mine[:2]), sgd(mine[2:])] if rank else [sgd(mine)]
            train(model, optims, rank, seed)
            del optims[rank:]

    simulate_ranks(ranks)


def test_only_steps_that_differ_are_explained() -> None:
    """Ranks that ran other units besides are told of those, and not of a collective more."""
    text = explain_stepped(3, [(0, [ONE, DONE]), (4, [ONE]), (5, [ONE, DONE])])
    assert text is not None and text.startswith(
        "optimizer.step() was left out on rank 4 before step 3: parameter 'w' of unit 'a', perhaps "
        "among others, was stepped on ranks 0 and 5 alone"
    )
    for reports in (
        [(0, [ONE, DONE]), (1, [ONE, DONE])],
        [(0, [ONE, DONE]), (1, [TWO])],
        [(0, [ONE, DONE]), (1, [])],
        [(0, [ONE]), (1, [TWO])],
    ):
        assert explain_stepped(3, reports) is None
    text = explain_difference(3, [(0, [ONE, DONE]), (1, [ONE, TWO]), (2, [ONE])])
    assert "as collective 2 of it, ranks 0 and 2 end the step where rank 1 reduces unit" in text
