"""Torch's clipping of parameters, sharded, shown in full or plain, is what it is on plain ones."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fsdp_compose as fc

from harness import simulate_ranks

NORMS = [0.0, 0.5, 1.0, 2.0, 3.0, math.inf, -math.inf]
SIZES = [(3, 4), (1,), (5,), (2, 2), (3, 1), (7,)]  # on two ranks some slices are empty
UNITS = [0, 0, 1, 1, 1, None]  # None: in no unit
FILLS = ["left", "none", "assigned", "zero"]


class Holder(nn.Module):
    def __init__(self, sizes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.params = nn.ParameterList([nn.Parameter(torch.ones(size)) for size in sizes])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [(p * (i + 1)).sum() for i, p in enumerate(self.params)]
        return x.sum() + torch.stack(parts).sin().sum() + sum(p.pow(2).sum() for p in self.params)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(
            Holder([size for size, unit in zip(SIZES, UNITS) if unit == number])
            for number in (0, 1)
        )
        self.alone = nn.Parameter(torch.ones(SIZES[-1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = sum(unit(x) for unit in self.units) + self.alone.pow(3).sum()
        return total


def fill(params: list[Any], fills: list[str]) -> None:
    """Give gradients in different ways; those of a backward are there already."""
    for number, (param, how) in enumerate(zip(params, fills)):
        if how == "none":
            param.grad = None
        elif how == "assigned":
            param.grad = torch.linspace(-1, 2, param.numel()).reshape(param.shape) * (number + 1)
        elif how == "zero":
            param.grad.zero_()


def open_scope(model: Model, scope: str) -> Any:
    if scope == "unshard":
        fc.unshard(model.units[0])
    if scope not in ("gathered", "with grads"):
        return contextlib.nullcontext()
    shown = scope == "with grads"
    return fc.gathered(model.units[1], with_grads=shown, writeback=shown)


def clip(
    order: list[int], fills: list[str], norm: float, limit: float, foreach: Any, scope: str = ""
) -> list[Any]:
    """The norm, and every gradient as a whole, of the sharded model and of the plain one.

    ``scope`` is in force for one of the two units.
    """
    found: list[Any] = []
    for shards in (True, False):
        torch.manual_seed(0)
        model = Model()
        if shards:
            for unit in model.units:
                fc.fully_shard(unit, ignored=[model.alone])
        model(torch.ones(2)).backward()
        params = list(model.parameters())
        fill(params, fills)
        with open_scope(model, scope if shards else ""):
            shown = list(model.parameters())
            listed = [shown[i] for i in order]
            total = nn.utils.clip_grad_norm_(listed, limit, norm, foreach=foreach)
        whole = [
            None if p.grad is None else getattr(p.grad, "full_tensor", p.grad.clone)()
            for p in params
        ]
        found.append((total, whole))
    return found


def check(*args: Any) -> None:
    (total, mine), (wanted, theirs) = clip(*args)
    assert type(total) is torch.Tensor and total.dtype == wanted.dtype
    torch.testing.assert_close(total, wanted, equal_nan=True)
    for found, other in zip(mine, theirs):
        assert (found is None) == (other is None)
        if found is not None:
            torch.testing.assert_close(found, other, equal_nan=True)


programs = st.tuples(
    st.lists(st.integers(0, len(SIZES) - 1), max_size=8),
    st.lists(st.sampled_from(FILLS), min_size=len(SIZES), max_size=len(SIZES)),
    st.sampled_from(NORMS),
    st.sampled_from([1e-3, 1.0, 1e3]),
    st.sampled_from([None, False]),
    st.sampled_from(["", "unshard", "gathered", "with grads"]),
)


@settings(max_examples=40, deadline=None)
@given(programs)
def test_lists_in_one_process(program: Any) -> None:
    check(*program)


@settings(max_examples=25, deadline=None)
@given(programs)
def test_lists_over_two_ranks(program: Any) -> None:
    simulate_ranks(lambda rank: check(*program), 2)
