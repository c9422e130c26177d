"""Steps on the slices themselves are, bit for bit, the steps that ask each sharded tensor."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_compose
from fsdp_compose.base.group import Group
from fsdp_compose.optim.slice_step import _plans
from fsdp_compose.sharded import ShardedWeightError, is_sharded, to_local
from fsdp_compose.sharded.tensor import HANDLERS

from checked_steps import checked, give, guard, same, tensors
from harness import run_ranks, simulate_ranks
from optimizers import EXACT, O
from sharded_values import on_ranks, shard


def random_adam(seed: int) -> Any:
    """Adam or AdamW with options drawn at random."""
    draw = random.Random(seed)
    kind = draw.choice([O.Adam, O.AdamW])
    way = draw.choice([{"foreach": True}, {"foreach": False}, {"fused": True}, {}])
    options: dict[str, Any] = {"amsgrad": draw.random() < 0.5, "maximize": draw.random() < 0.5}
    options["weight_decay"] = draw.choice([0.0, 0.1])
    lr = draw.choice([0.1, torch.tensor(0.1)] if "foreach" not in way else [0.1])
    return lambda params: kind(
        [{"params": params[:2], "lr": lr}, {"params": params[2:], "eps": 1e-3}],
        lr=0.05,
        **options,
        **way,
    )


@contextmanager
def asked() -> Iterator[list[str]]:
    """The functions that sharded tensors are asked about, by name."""
    found: list[str] = []
    before = dict(HANDLERS)

    def counting(handler: Any) -> Any:
        def handle(func: Any, args: Any, kwargs: Any) -> Any:
            found.append(getattr(func, "__name__", repr(func)))
            return handler(func, args, kwargs)

        return handle

    HANDLERS.update({func: counting(handler) for func, handler in before.items()})
    try:
        yield found
    finally:
        HANDLERS.update(before)


MAKE = {**EXACT, **{f"random {seed}": random_adam(seed) for seed in range(16)}}


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_equal_checked_steps(ranks: int) -> None:
    """Parameters, state, tags and write counts, with gradients missing at times."""

    def body(group: Group) -> None:
        guard()
        for name, make in MAKE.items():
            sides = [shard(tensors(0), group) for _ in range(2)]
            pair = make(sides[0]), checked(make(sides[1]))
            for number in range(4):
                versions = [p._version for p in sides[0]]
                for params in sides:
                    give(params, tensors(number + 1), missing=2 if number == 1 else None)
                with asked() as questions:
                    pair[0].step()
                assert not questions, (name, questions)
                pair[1].step()
                for i, (p, q) in enumerate(zip(*sides)):
                    assert same(p, q) and type(p) is type(q), (name, number, i)
                    assert type(p.grad) is type(q.grad)
                    assert p._version > versions[i] or (number == 1 and i == 2), (name, number)
                    mine, theirs = pair[0].state[p], pair[1].state[q]
                    assert list(mine) == list(theirs)
                    assert all(same(mine[k], theirs[k]) for k in mine), (name, number, i)
            assert pair[0] in _plans, name
            saved = pair[0].state_dict()
            pair[0].load_state_dict(saved)
            pair[1].load_state_dict(pair[1].state_dict())
            for params in sides:
                give(params, tensors(9), None)
            with asked() as questions:
                pair[0].step()
            pair[1].step()
            assert not questions and all(same(p, q) for p, q in zip(*sides)), name

    on_ranks(body, ranks)


def test_scaled_steps_equal_checked_steps() -> None:
    """A fused step is given the scale, and whether to skip, as attributes of the optimizer."""

    def body(rank: int) -> None:
        from sharded_values import world

        guard()
        sides = [shard(tensors(0), world()) for _ in range(2)]
        makes = [O.AdamW(sides[0], 0.1, fused=True), checked(O.AdamW(sides[1], 0.1, fused=True))]
        scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in sides]
        for number in range(3):
            grads = tensors(number)
            if number == 1:
                grads[-1].view(-1)[-1] = float("inf")
            for params, optimizer, scaler in zip(sides, makes, scalers):
                scaler.scale(torch.ones(1))
                give(params, grads, None)
                scaler.step(optimizer)
                scaler.update()
            assert scalers[0].get_scale() == scalers[1].get_scale()
            assert all(same(p, q) for p, q in zip(*sides)), number

    run_ranks(body, 2)


def test_hooks_and_closures_have_their_turn() -> None:
    """Hooks may change settings, gradients and state before a step, and see tagged state after."""
    guard()
    from fsdp_compose.base.group import SELF

    outcomes = []
    for wrap in (lambda o: o, checked):
        params = shard(tensors(0), SELF)
        optimizer = wrap(O.SGD(params, 0.1, momentum=0.9, foreach=True))
        events: list[Any] = []

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            events.append("before")
            optimizer.param_groups[0]["lr"] *= 0.5
            for p in optimizer.param_groups[0]["params"]:
                if p.grad is not None:
                    p.grad.mul_(2.0)

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            buffers = [optimizer.state[p]["momentum_buffer"] for p in params]
            events.append(all(is_sharded(b) for b in buffers) and all(map(is_sharded, params)))

        def closure() -> torch.Tensor:
            events.append(("closure", torch.is_grad_enabled(), params[0].shape))
            give(params, tensors(5), None)
            return torch.tensor(3.0)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
        for number in range(3):
            give(params, tensors(number), None)
            assert optimizer.step() is None
            scheduler.step()
        with torch.no_grad():  # which torch's steps turn on for a closure
            assert float(optimizer.step(closure)) == float(optimizer.step(closure=closure)) == 3.0
        outcomes.append(([to_local(p) for p in params], events))
        assert len(optimizer._optimizer_step_pre_hooks) == 1
    (mine, events), (theirs, others) = outcomes
    assert events == others and events.count(("closure", True, torch.Size([4, 3]))) == 2
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs))


def test_a_step_that_raises_leaves_all_as_it_was() -> None:
    guard()
    from fsdp_compose.base.group import SELF

    params = shard(tensors(0), SELF)
    groups = [{"params": params[:3]}, {"params": params[3:]}]
    optimizer = O.AdamW(groups, 0.1, foreach=True)
    optimizer.param_groups[1]["lr"] = torch.tensor(0.1)
    give(params, tensors(1), None)
    with pytest.raises(RuntimeError, match="lr as a Tensor is not supported"):
        optimizer.step()
    assert all(is_sharded(p) and is_sharded(p.grad) for p in params)
    assert params[0].shape == (4, 3) and type(params[0]).__name__ == "ShardedParameter"
    state = [v for values in optimizer.state.values() for v in values.values()]
    assert state and all(is_sharded(value) or not value.ndim for value in state)
    with pytest.raises(ShardedWeightError):
        params[0] @ params[0]
    optimizer.param_groups[1]["lr"] = 0.1
    optimizer.step()
    assert len(optimizer._optimizer_step_pre_hooks) == 0
    refused = O.AdamW(params, 0.1, capturable=True)
    with pytest.raises(AssertionError, match="capturable=True"):
        refused.step()
    assert all(map(is_sharded, params))


def test_other_steps_are_asked_as_before() -> None:
    """A step that may look at whole tensors, or be differentiated, asks every tensor."""
    guard()
    from fsdp_compose.base.group import SELF

    class Normed(O.AdamW):
        def _init_group(self, group: Any, *lists: Any) -> Any:
            for p in group["params"]:
                p.grad.div_(p.grad.norm())
            return O.AdamW._init_group(self, group, *lists)

    class Stepped(O.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return super().step(closure)

    def changed(params: list[Any]) -> Any:
        optimizer: Any = O.AdamW(params, 0.1)
        optimizer._init_group = partial(Normed._init_group, optimizer)
        return optimizer

    makes = [
        changed,
        lambda p: Normed(p, 0.1),
        lambda p: Stepped(p, 0.1),
        lambda p: O.SGD(p, 0.1, differentiable=True),
        lambda p: O.Adafactor(p, 0.1),
    ]
    for make in makes:
        params = [p for p in shard(tensors(0), SELF) if p.ndim == 1]
        give(params, [g for g in tensors(1) if g.ndim == 1], None)
        for p in params:
            p.requires_grad_(False)  # or a differentiable step may not write it
        with asked() as questions:
            make(params).step()
        assert questions


def test_state_of_another_cut_is_refused() -> None:
    """Slices of the same length that hold other elements are never taken for the right ones."""

    def body(rank: int) -> None:
        from sharded_values import world

        guard()
        params = shard([torch.ones(4), torch.ones(4)], world())
        others = shard([torch.ones(2, 2), torch.ones(2, 2)], world())
        optimizer = O.AdamW(params, 0.1)
        give(params, [torch.ones(4)] * 2, None)
        optimizer.step()
        with torch.no_grad():
            optimizer.state[params[rank]]["exp_avg"] = torch.zeros_like(others[rank])
        with pytest.raises(ShardedWeightError, match="is cut differently"):
            optimizer.step()

    run_ranks(body, 2)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("make", [O.AdamW, O.SGD])
def test_no_warning_and_no_write_is_lost(make: Any) -> None:
    """A unit that stays gathered sees a fused step, as its parameters' counts say so."""

    def ranks(rank: int) -> None:
        torch.manual_seed(0)
        plain, x = nn.Linear(3, 3), torch.randn(2, 3)
        model = fsdp_compose.fully_shard(copy.deepcopy(plain))
        fsdp_compose.set_reshard_after_backward(model, False)
        pair = [make(m.parameters(), 0.1, fused=True) for m in (plain, model)]
        for _ in range(3):
            losses = []
            for m, optimizer in zip((plain, model), pair):
                loss = m(x).square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss)
            assert torch.equal(*losses)

    simulate_ranks(ranks)
