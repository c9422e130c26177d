"""Optimizer steps beside steps of the same optimizer that ask every sharded tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fsdp_compose
from fsdp_compose.base.group import SELF
from fsdp_compose.optim.step_plan import Recorder
from fsdp_compose.sharded import is_sharded, spec_of, to_local

from optimizers import O
from sharded_values import shard

SHAPES = [(4, 3), (3, 5), (7,), (1,), (2, 3, 2)]


def tensors(seed: int) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=gen) for shape in SHAPES]


def checked(optimizer: Any) -> Any:
    """The same optimizer with a step of its own, which torch runs tensor by tensor."""
    kind = type(optimizer)

    def step(self: Any, closure: Any = None) -> Any:
        return super(own, self).step(closure)

    own = type(kind.__name__, (kind,), {"step": step})
    optimizer.__class__ = own
    return optimizer


def guard() -> None:
    """Optimizer steps are looked at from the first unit on."""
    fsdp_compose.fully_shard(nn.Linear(1, 1))


def same(a: Any, b: Any) -> bool:
    if is_sharded(a) and is_sharded(b):
        return spec_of(a).key == spec_of(b).key and torch.equal(to_local(a), to_local(b))
    return type(a) is type(b) and bool(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)


def give(params: list[Any], grads: list[torch.Tensor], missing: int | None = None) -> None:
    for i, (param, grad) in enumerate(zip(params, grads)):
        param.grad = None if i == missing else grad.clone()


def assert_steps_agree(change: Callable[[Any, list[Any]], None], **options: Any) -> list[bool]:
    """Five steps, with ``change`` before the fourth; returns for which of them torch was asked."""
    guard()
    sides = [shard(tensors(0), SELF) for _ in range(2)]
    make = lambda p: O.AdamW([{"params": p[:2]}, {"params": p[2:]}], 0.1, **options)  # noqa: E731
    pair = make(sides[0]), checked(make(sides[1]))
    asked: list[bool] = []
    ask = Recorder.init_group

    def asking(self: Recorder, group: Any, *lists: Any) -> Any:
        asked[-1] = True
        return ask(self, group, *lists)

    Recorder.init_group = asking  # type: ignore[method-assign]
    try:
        for number in range(5):
            for optimizer, params in zip(pair, sides):
                give(params, tensors(number + 1)[: len(params)])
                if number == 3:
                    change(optimizer, params)
            asked.append(False)
            for optimizer in pair:
                optimizer.step()
            for p, q in zip(*sides):
                assert same(p, q) and type(p) is type(q), number
                mine, theirs = pair[0].state[p], pair[1].state[q]
                assert list(mine) == list(theirs)
                assert all(same(mine[key], theirs[key]) for key in mine), number
    finally:
        Recorder.init_group = ask  # type: ignore[method-assign]
    return asked
