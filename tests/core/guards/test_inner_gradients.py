"""A forward with a backward inside it may clear, set and measure its parameters' gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose import Offload, ShardingStrategy
from fsdp_compose.sharded import is_sharded

from harness import rank_errors, simulate_ranks
from models import WIDTH, Twin, assert_at_rest, data, one_unit, seeded, square


def set_to_none(module: nn.Module) -> None:
    for p in module.parameters():
        p.grad = None


def assign(module: nn.Module) -> None:
    for k, p in enumerate(module.parameters()):
        p.grad = torch.arange(p.numel(), dtype=p.dtype).view_as(p) / (k + 10)


def clip(module: nn.Module) -> None:
    if fc.is_fully_sharded(module):
        fc.clip_grad_norm_(module, 0.01)
    else:
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.01)


EDITS: dict[str, Callable[[nn.Module], Any]] = {
    "zero_grad": nn.Module.zero_grad,
    "zeros": lambda module: module.zero_grad(set_to_none=False),
    "None": set_to_none,
    "a part": lambda module: module.first.zero_grad(),
    "assigned": assign,
    "clipped": clip,
    "kept": lambda module: None,
    "detached": lambda module: [
        p.grad.detach_().requires_grad_(False) for p in module.parameters()
    ],
}


class Adversarial(nn.Module):
    """Moves its inputs along their gradients first, and edits what that left in ``.grad``."""

    def __init__(self, edit: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.edit, self.rounds = EDITS[edit], 1

    def net(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            moved = x.detach().requires_grad_()
            self.net(moved).square().mean().backward()
            self.edit(self)
            x = x + 0.1 * moved.grad.sign()
        return self.net(x)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"strategy": ShardingStrategy.NO_SHARD},
    {"offload_policy": Offload(params=True, pin_memory=False)},
]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_edited_in_a_forward(options: dict[str, Any], edit: str) -> None:
    """They are afterwards what a plain module has, also where each was edited more than once."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Adversarial(edit), lambda m: one_unit(m, **options))
        for seed in range(3):
            for model in (twin.model, *twin.plain):
                model.rounds = 1 + seed % 2
            x = data(seed, 0)  # alike on all ranks: an inner backward averages over them
            for model in (twin.model, twin.reference):
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    square(model, x).backward()
            twin.check_grads()
            if seed:
                twin.step()
        assert_at_rest(twin.model)

    simulate_ranks(ranks)


@pytest.mark.parametrize(
    "read", [lambda p: p.grad.sum(), lambda p: p.grad * 2, lambda p: p.grad[0]]
)
def test_gradients_read_in_a_forward_raise(read: Callable[[nn.Parameter], Any]) -> None:
    """The parameter is gathered there and its gradient is not, which the error says."""

    def ranks(rank: int) -> None:
        model = one_unit(seeded(lambda: Adversarial("kept")))
        model.edit = lambda module: read(module.first.weight)
        square(model, data(0, rank)).backward()

    for text in rank_errors(ranks, 2):
        assert text is not None and "gradient of parameter 'first.weight' was read inside" in text


def test_a_stand_in_tells_its_shape() -> None:
    """What asks whether there is a gradient, and of which kind, is answered."""
    model = one_unit(seeded(lambda: Adversarial("kept")))
    found: list[Any] = []

    def look(module: nn.Module) -> None:
        for p in module.parameters():
            grad = p.grad
            assert grad.size(dim=0) == len(p)
            found.append(
                (grad.shape == p.shape, grad.dtype, grad.device == p.device, grad.requires_grad)
            )
            assert "StandIn" in repr(grad)

    model.edit = look
    square(model, data(0, 0)).backward()
    assert found == [(True, torch.float64, True, False)] * 4


class Hooked(nn.Module):
    """Its second layer has a backward hook, which is called with a parameter."""

    does: Callable[[nn.Parameter], Any] | None = None

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        getattr(self.last, f"register_full_backward_{kind}")(self.hook)

    def hook(self, module: nn.Module, *grads: Any) -> None:
        if self.does is not None:
            self.does(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


HOOKS = ["pre_hook", "hook"]


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("is_first", [True, False], ids=["no gradient yet", "accumulated"])
def test_gradients_read_in_backward_hooks_raise(kind: str, is_first: bool) -> None:
    """A plain parameter has its gradient there or soon; the next step is right again."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Hooked(kind), one_unit)
        if not is_first:
            twin.backward(square, 0)
        twin.model.does = lambda p: None if p.grad is None else float(p.grad.sum())
        with pytest.raises(RuntimeError, match=r"hook read the gradient of parameter 'last\.wei"):
            square(twin.model, data(1, rank)).backward()
        twin.model.does = None
        twin.zero_grad()
        twin.train()
        assert_at_rest(twin.model)

    simulate_ranks(ranks)


EDITED: dict[str, Callable[[nn.Parameter], Any]] = {
    "cleared": lambda p: setattr(p, "grad", None),
    "zeroed": lambda p: p.grad.zero_(),
    "set": lambda p: setattr(p, "grad", torch.ones_like(p)),
}


@pytest.mark.parametrize("edit", EDITED)
def test_gradients_edited_in_backward_hooks_raise(edit: str) -> None:
    """It would be lost, as the gradient of this backward is still to come."""

    def ranks(rank: int) -> None:
        model = one_unit(seeded(lambda: Hooked("hook")))
        model.does = EDITED[edit]
        square(model, data(0, rank)).backward()

    for text in rank_errors(ranks, 2):
        assert text is not None and "cleared or set the gradient of parameter 'last.wei" in text


def test_a_failed_backward_shows_shards_all_the_same() -> None:
    """Where a hook has cleared a gradient and then raises, its error is the one to see."""

    def fail(param: nn.Parameter) -> None:
        param.grad = None
        raise ValueError("of the hook")

    def ranks(rank: int) -> None:
        model = one_unit(seeded(lambda: Hooked("hook")))
        model.does = fail
        with pytest.raises(ValueError, match=r"of the hook"):
            square(model, data(0, rank)).backward()
        assert all(map(is_sharded, model.parameters()))

    simulate_ranks(ranks)


def test_backward_hooks_may_leave_gradients_alone() -> None:
    """Reading the weight, its gradient's shape and the gradients of inputs is right."""
    seen: list[Any] = []

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Hooked("hook"), one_unit)
        twin.model.does = lambda p: seen.append((p.shape, p.grad.shape, p.detach().sum()))
        twin.train()

    simulate_ranks(ranks)
    assert seen and all(shape == graded == (2, WIDTH) for shape, graded, _ in seen)
