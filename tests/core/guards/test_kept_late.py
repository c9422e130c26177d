"""What a forward keeps in a list, closure, global or opaque object, first in a later step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fsdp_compose as fc
from fsdp_compose import ShardingStrategy

from harness import run_ranks
from models import Tower, assert_at_rest, by_block, data, seeded, square, whole

EVERYTHING: list[Any] = []


class Opaque:
    """Nothing that is looked for in attributes."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


def keep(where: str, tensor: Tensor) -> None:
    if where == "closure":
        EVERYTHING.append(lambda: tensor)
    else:
        EVERYTHING.append(Opaque(tensor) if where == "opaque" else tensor)


def kept() -> Tensor:
    found = EVERYTHING.pop()
    EVERYTHING.clear()
    if isinstance(found, Opaque):
        return found.held
    return found if isinstance(found, Tensor) else found()


class Keeps(nn.Module):
    """Keeps what ``what`` says of its forward, in ``where``, while ``on``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.side = (nn.Linear(6, 6) for _ in range(3))
        self.what, self.where, self.on = "", "list", False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.on and self.what == "view":
            keep(self.where, self.side.weight.detach().t())
        if self.on and self.what == "branch":
            keep(self.where, self.side(torch.tanh(self.side(x))))
        if self.on and self.what == "inside":
            keep(self.where, self.side(h))
        return self.last(h)


def model_of(what: str, where: str, strategy: ShardingStrategy) -> tuple[nn.Module, nn.Module]:
    plain = seeded(lambda: nn.Sequential(Keeps(), Keeps()))
    plain[1].what, plain[1].where = what, where
    model = copy.deepcopy(plain)
    units = fc.wrap.by_class({Keeps})
    return fc.fully_shard(model, units=units, strategy=strategy), plain


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    EVERYTHING.clear()
    yield
    fc.set_debug(False)


WHERE = ["list", "closure", "opaque"]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("where", WHERE)
def test_views_kept_in_a_later_step_raise(where: str, grad: bool) -> None:
    """Read after the step they would end the process; the error names the parameter and unit."""

    def ranks(rank: int) -> None:
        model, _ = model_of("view", where, ShardingStrategy.FULL_SHARD)
        for step in range(4):
            model[1].on = step in (2, 3)
            with torch.set_grad_enabled(grad):
                loss = square(model, data(step, rank))
                if grad:
                    loss.backward()
            if model[1].on:
                view = kept()
                with pytest.raises(RuntimeError, match=r"'1\.side\.weight' of unit '1'"):
                    view + 1
        with fc.gathered(model):
            assert_close(model[1].side.weight.detach(), whole(model[1].side.weight))

    run_ranks(ranks, 2)


def gradients(plain: nn.Module, step: int, what: str) -> None:
    """Of both losses, averaged over two ranks, on the plain model."""
    plain.zero_grad()
    for r in range(2):
        loss = square(plain, data(step, r))
        tensor = kept()
        ((loss + tensor.square().mean()) / 2).backward()


@pytest.mark.parametrize("strategy", list(ShardingStrategy)[:2])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("what", ["branch", "inside"])
def test_backward_from_what_was_kept_later(
    what: str, where: str, strategy: ShardingStrategy
) -> None:
    """After an ordinary backward over the same forward, in a later step: right, and each time."""

    def ranks(rank: int) -> None:
        model, plain = model_of(what, where, strategy)
        for step in range(5):
            for m in (model, plain):
                m[1].on = step >= 2
            model.zero_grad()
            loss = square(model, data(step, rank))
            loss.backward(retain_graph=step >= 2)
            if step < 2:
                continue
            del loss
            tensor = kept()
            tensor.square().mean().backward()
            gradients(plain, step, what)
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None)
                if q.grad is not None:
                    assert_close(whole(p.grad), q.grad, rtol=1e-12, atol=1e-12)
        del tensor
        model[1].on = False
        square(model, data(9, rank)).backward()
        assert_at_rest(model)

    run_ranks(ranks, 2)


def test_backward_from_kept_first_in_debug_mode() -> None:
    """In a later step, before any backward by the outputs: right in debug mode."""

    def ranks(rank: int) -> None:
        fc.set_debug(True)
        model, plain = model_of("inside", "list", ShardingStrategy.FULL_SHARD)
        for step in range(4):
            for m in (model, plain):
                m[1].on = step >= 2
            model.zero_grad(), plain.zero_grad()
            loss = square(model, data(step, rank))
            if step < 2:
                loss.backward()
                continue
            del loss
            kept().square().mean().backward()
            for r in range(2):
                square(plain, data(step, r))
                (kept().square().mean() / 2).backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                if q.grad is not None:
                    assert_close(whole(p.grad), q.grad, rtol=1e-12, atol=1e-12)

    run_ranks(ranks, 2)


def test_nothing_is_looked_for_without_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of the process are looked through in the first steps alone."""

    def ranks(rank: int) -> None:
        from fsdp_compose.base import tracked

        looks: list[int] = []
        find = tracked.gc.get_referrers
        look = lambda *kinds: looks.append(1) or find(*kinds)  # noqa: E731
        monkeypatch.setattr(tracked.gc, "get_referrers", look)
        model = by_block(seeded(Tower))
        for step in range(3):
            square(model, data(step, rank)).backward()
            with torch.no_grad():
                model(data(step, rank))
        seen = len(looks)
        assert 1 <= seen <= 4
        for step in range(5):
            square(model, data(step, rank)).backward()
            with torch.no_grad():
                model(data(step, rank))
        assert len(looks) == seen

    run_ranks(ranks, 2)
