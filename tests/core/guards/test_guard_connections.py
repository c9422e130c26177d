"""Full tensors of a scope lead gradients to the parameters of their unit, as plain ones would."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from fsdp_compose import (
    fully_shard,
    gathered,
    register_post_reduce_hook,
    reshard,
    set_gradient_divide_factor,
    unshard,
)
from fsdp_compose.sharded import tensor

from harness import fake_world, simulate_ranks
from models import WIDTH, assert_at_rest, data, seeded, square, whole


def layer() -> nn.Module:
    return seeded(lambda: nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("scope", ["unshard", "gathered"])
def test_what_a_scope_does_not_use_has_no_gradient(scope: str) -> None:
    """None, as of a plain parameter, and not zeros, with which an optimizer would decay it."""

    def ranks(rank: int) -> None:
        model = fully_shard(layer())
        if scope == "unshard":
            unshard(model)
            model.weight.square().sum().backward()
            reshard(model)
        else:
            with gathered(model):
                model.weight.square().sum().backward()
        assert model.bias.grad is None
        assert_close(whole(model.weight.grad), 2 * whole(model.weight))
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_a_unit_that_is_gone_before_its_backward() -> None:
    """What was made of its full tensors says that the model is to be kept."""

    def ranks(rank: int) -> None:
        model = fully_shard(layer())
        unshard(model)
        loss = model.weight.square().sum()
        del model
        gc.collect()
        with pytest.raises(RuntimeError, match=r"deleted after its forward.*Keep a reference"):
            loss.backward()

    simulate_ranks(ranks)


def test_gradients_of_a_scope_and_a_forward_together() -> None:
    """They are reduced once, and a hook behind the reduction sees their sum."""

    def ranks(rank: int) -> None:
        plain = layer()
        model, seen = fully_shard(copy.deepcopy(plain)), list[list[Tensor]]()

        def note(module: nn.Module, params: list[nn.Parameter]) -> None:
            seen.append([whole(param.grad) for param in params if param.grad is not None])

        register_post_reduce_hook(model, note)
        unshard(model)
        penalty = model.weight.square().sum()
        reshard(model)
        (square(model, data(0, rank)) + penalty).backward()
        losses = [square(plain, data(0, r)) + plain.weight.square().sum() for r in range(2)]
        torch.stack(losses).mean().backward()
        assert_close(seen, [[param.grad for param in plain.parameters()]])
        del penalty  # a graph of it would keep the unit gathered
        gc.collect()
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_parameters_are_not_asked_through_their_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """``__torch_function__`` takes microseconds: neither a step nor a scope calls it for each."""
    asked: list[Any] = []
    answer = vars(tensor._Sharded)["__torch_function__"].__func__

    def count(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked.append(func)
        return answer(cls, func, types, args, kwargs)

    monkeypatch.setattr(tensor._Sharded, "__torch_function__", classmethod(count))
    with fake_world(2):
        model = nn.Sequential(fully_shard(layer(), mesh="self"), fully_shard(layer()))
        set_gradient_divide_factor(model[0], 2)
        asked.clear()
        for step in range(2):
            square(model, data(step, 0)).backward()
            unshard(model)
            reshard(model)
        assert not asked
        model[1].weight.norm()
        assert asked == [Tensor.norm]
