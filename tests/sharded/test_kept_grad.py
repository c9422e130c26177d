"""``p.grad`` of a sharded parameter is what torch has as its gradient, whoever replaced it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fsdp_compose as fc
from fsdp_compose.base.attributes import get_grad
from fsdp_compose.base.torch_private import leaf_hooks, raw
from fsdp_compose.core.guards.scope_parameters import leaf_of
from fsdp_compose.sharded import KEPT, is_sharded, spec_of

from harness import fake_world, run_ranks


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    for module in (model[0], model):
        fc.fully_shard(module)
    return model


def loss_of(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.linspace(-1, 1, 8).view(2, 4)).square().sum()
    return loss


def penalty_of(model: nn.Module) -> torch.Tensor:
    """Of the slices themselves, so that autograd accumulates the gradients."""
    return torch.stack([p.to_local().pow(3).sum() for p in model.parameters()]).sum()


class Cube(torch.autograd.Function):
    """Reaches a parameter without ``__torch_function__``."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.ones(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return x.to_local().detach() * grad


def check(model: nn.Module) -> None:
    """Twice, so that what the first reading kept is read too."""
    for _ in range(2):
        for name, param in model.named_parameters():
            found = param.grad
            with raw():
                own = get_grad(leaf_of(param))
            assert found is own, name
            if found is not None:
                assert is_sharded(found) and spec_of(found) is leaf_of(param)._shard_spec


def through_plain(model: nn.Module, value: float | None) -> None:
    for plain in fc.local_parameters(model):
        plain.grad = None if value is None else torch.full_like(plain, value)
    loss_of(model).backward()


def skip_step(model: nn.Module) -> None:
    with fc.skippable_step(model):
        loss_of(model).backward()
        raise FloatingPointError


def assign(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.ones(param.shape)


def clear(model: nn.Module) -> None:
    for param in model.parameters():
        del param.grad


def in_scope(model: nn.Module) -> None:
    with fc.gathered(model, writeback=True, with_grads=True):
        for param in model.parameters():
            if param.grad is not None:
                param.grad = param.grad + 1


def read_in_scope(model: nn.Module) -> None:
    with fc.gathered(model):
        check(model)


def hook(model: nn.Module) -> None:
    next(model.parameters()).register_hook(lambda grad: 2 * grad)


def hook_after(model: nn.Module) -> None:
    model[2].weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))


def accumulate(model: nn.Module) -> None:
    with fc.no_sync(model):
        loss_of(model).backward()
    check_waiting(model)
    loss_of(model).backward()


def check_waiting(model: nn.Module) -> None:
    for param in model.parameters():
        assert type(param.grad).__name__ == "UnreducedGradient"


ACTS: dict[str, Callable[[Any], object]] = {
    "backward": lambda m: loss_of(m).backward(),
    "recorded backward": lambda m: loss_of(m).backward(create_graph=True),
    "penalty": lambda m: penalty_of(m).backward(),
    "recorded penalty": lambda m: penalty_of(m).backward(create_graph=True),
    "recorded function": lambda m: Cube.apply(m[0].weight).backward(create_graph=True),
    "clear": lambda m: m.zero_grad(),
    "zero": lambda m: m.zero_grad(set_to_none=False),
    "delete": clear,
    "assign": assign,
    "clip": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1),
    "set plain": lambda m: through_plain(m, 2.0),
    "clear plain": lambda m: through_plain(m, None),
    "skip": skip_step,
    "scope": in_scope,
    "read in a scope": read_in_scope,
    "hook": hook,
    "hook after": hook_after,
    "accumulate": accumulate,
    "double": lambda m: m.double().float(),
}


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted(ACTS)), max_size=6))
def test_grad_is_what_torch_has(acts: list[str]) -> None:
    with fake_world(2):
        model = build()
        for act in ["backward", *acts]:
            ACTS[act](model)
            check(model)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
@pytest.mark.parametrize("act", ["recorded penalty", "recorded function"])
def test_autograd_puts_another_in_its_place(act: str) -> None:
    with fake_world(2):
        model = build()
        ACTS[act](model)
        first = model[0].weight.grad
        before = first.to_local().clone()
        assert model[0].weight.grad is first
        ACTS[act](model)
        assert model[0].weight.grad is not first
        torch.testing.assert_close(model[0].weight.grad.to_local(), 2 * before)


def test_a_gradient_is_freed_when_it_is_cleared() -> None:
    with fake_world(2):
        for act in ("clear", "delete", "assign", "clear plain"):
            model = build()
            loss_of(model).backward()
            freed: list[object] = []
            watch = weakref.ref(model[2].weight.grad, freed.append)
            plain = fc.local_parameters(model) if "plain" in act else None
            ACTS[act](model)
            assert freed and watch() is None, (act, plain)


def test_a_plain_parameter_has_no_hooks_left() -> None:
    with fake_world(2):
        model = build()
        loss_of(model).backward()
        check(model)
        param = model[2].weight
        assert KEPT in param.__dict__
        fc.undo(model)
        assert KEPT not in param.__dict__ and leaf_hooks(param) == (None, None)
        loss_of(model).backward()
        assert type(param.grad) is torch.Tensor


def test_hooks_run_on_a_parameter_that_was_read() -> None:
    def body(rank: int) -> None:
        model = build()
        loss_of(model).backward()
        check(model)
        seen: list[torch.Tensor] = []
        model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
        model[2].weight.register_hook(lambda grad: grad * 0)
        model.zero_grad()
        loss_of(model).backward()
        assert len(seen) == 1 and seen[0] is model[2].weight.grad
        assert not model[2].weight.grad.to_local().any()
        penalty_of(model).backward()
        assert len(seen) == 2 and not model[2].weight.grad.to_local().any()
        check(model)

    run_ranks(body, 2)


def test_a_copy_keeps_no_gradient_of_the_original() -> None:
    with fake_world(2):
        model = build()
        loss_of(model).backward()
        check(model)
        twin = copy.deepcopy(model)
        check(twin)
        loss_of(twin).backward()
        check(twin)
        check(model)
        part = copy.copy(model[0].weight)
        assert KEPT not in part.__dict__ and part.grad is None


def test_gradients_may_be_detached_in_place() -> None:
    """As optimizers of old clear them; a parameter is detached as torch does it."""

    def ranks(rank: int) -> None:
        model = build()
        model(torch.ones(1, 4)).sum().backward()
        for p in model.parameters():
            assert p.grad is not None
            assert p.grad.detach_() is p.grad
            p.grad.zero_()
            assert not p.grad.full_tensor().any()
        p.detach_()
        assert not p.requires_grad

    run_ranks(ranks, 2)
