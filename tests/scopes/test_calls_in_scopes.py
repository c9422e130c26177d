"""Inside a scope, and in a unit's forward, calls about parameters find what they find outside."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_compose as fc

from harness import simulate_ranks
from models import Tower, by_block, data, seeded, sgd, square, whole
from scoped_models import open_until_reshard


def trained(rank: int) -> nn.Module:
    model = by_block(seeded(Tower))
    square(model, data(0, rank)).backward()
    return model


def list_flat(model: nn.Module) -> Any:
    return list(map(id, fc.flat_parameters(model)))


def list_local(model: nn.Module) -> Any:
    return {name: id(param) for name, param in fc.named_local_parameters(model).items()}


@pytest.mark.parametrize("ask", [list_flat, list_local])
def test_plain_parameters_in_a_scope(ask: Any) -> None:
    """They are the same objects as outside, and nothing is listed besides."""

    def ranks(rank: int) -> None:
        model = trained(rank)
        kept = (fc.flat_parameters(model), fc.local_parameters(model))  # ids are of living objects
        outside = ask(model)
        with fc.gathered(model):
            assert ask(model) == outside
        assert all(kept)

    simulate_ranks(ranks, 2)


def test_a_scaler_in_a_scope_asks_all_ranks() -> None:
    """One rank's infinity has every rank skip the step."""

    def ranks(rank: int) -> Any:
        model = trained(rank)
        optim = sgd(model.parameters())
        scaler = fc.GradScaler("cpu", init_scale=4.0)
        scaler.scale(square(model, data(1, rank))).backward()
        if rank:
            model.head.bias.grad.to_local().fill_(float("inf"))
        before = whole(model.head.weight)
        with fc.gathered(model):
            scaler.unscale_(optim)
        scaler.step(optim)
        scaler.update()
        assert torch.equal(whole(model.head.weight), before)
        return scaler.get_scale()

    assert simulate_ranks(ranks, 2) == [2.0, 2.0]


@pytest.mark.parametrize("scope", [fc.gathered, nullcontext])
def test_local_optimizer_state_in_a_scope(scope: Any) -> None:
    """It says where its slices lie, so that another number of ranks is refused."""

    def ranks(rank: int) -> Any:
        model = trained(rank)
        optim = torch.optim.Adam(model.parameters())
        optim.step()
        with scope(model):
            return fc.optim_state_dict(model, optim, kind="local")

    saved = simulate_ranks(ranks, 2)[0]

    def fewer(rank: int) -> None:
        model = trained(rank)
        optim = torch.optim.Adam(model.parameters())
        with pytest.raises(RuntimeError, match="was saved over 2 ranks"):
            fc.load_optim_state_dict(model, optim, saved)

    simulate_ranks(fewer, 3)


@pytest.mark.parametrize("scope", [fc.gathered, open_until_reshard])
def test_full_tensor_in_a_scope(scope: Any) -> None:
    """It is a copy that no gradient goes through, as outside."""

    def ranks(rank: int) -> None:
        model = fc.fully_shard(seeded(lambda: nn.Linear(3, 2)))
        outside = model.weight.full_tensor()
        with scope(model):
            inside = model.weight.full_tensor()
            assert type(inside) is torch.Tensor and not inside.requires_grad
            assert torch.equal(inside, outside)
            inside.zero_()
            assert torch.equal(model.weight, outside)

    simulate_ranks(ranks, 2)


def test_backward_after_undo_or_refresh() -> None:
    """The error names what happened since the forward."""
    for change in (fc.undo, fc.refresh):
        model = trained(0)
        loss = square(model, data(1, 0))
        change(model)
        with pytest.raises(RuntimeError, match=rf"{'undone' if change is fc.undo else 'refresh'}"):
            loss.backward()


class Named(nn.Parameter):
    """A class of the user's own, which full tensors have too."""


@pytest.mark.parametrize("kind", [nn.Parameter, Named])
def test_gradient_norms_in_a_forward(kind: type) -> None:
    """The gradients of the unit that runs are among them."""

    def ranks(rank: int) -> None:
        model = seeded(Tower)
        model.blocks[1].up.weight = kind(model.blocks[1].up.weight.detach())
        by_block(model)
        square(model, data(0, rank)).backward()
        outside, found = fc.grad_norm(model), []
        up = model.blocks[1].up
        up.register_forward_pre_hook(lambda *_: found.append(fc.grad_norm(model)))
        square(model, data(1, rank))
        assert found == [outside] and dist.get_world_size() == 2

    simulate_ranks(ranks, 2)


@pytest.mark.parametrize("scope", [fc.gathered, open_until_reshard])
def test_a_slice_is_written_into_the_whole(scope: Any) -> None:
    """The error says what is whole in the scope, and does not take it for an old copy."""

    def ranks(rank: int) -> None:
        model = trained(rank)
        params = [p for p in model.parameters() if p.grad is not None]
        with scope(model), torch.no_grad():
            for write in (
                lambda: params[0].add_(params[0].grad),
                lambda: torch._foreach_add_(params, [p.grad for p in params]),
            ):
                with pytest.raises(
                    fc.ShardedWeightError, match=r"whole parameter.*leave the scope"
                ):
                    write()

    simulate_ranks(ranks)
