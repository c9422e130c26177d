"""Gradients that an optimizer over plain parameters has cleared are gone for every other call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from fsdp_compose import fully_shard, gathered, pipeline_stage, refresh, skippable_step, undo

from flat_ways import WAYS, twin, ways
from harness import simulate_ranks
from models import Twin, data, square


def _undo(made: Twin) -> None:
    undo(made.model)


def _refresh(made: Twin) -> None:
    made.model.blocks[0].scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
    refresh(made.model)


@ways
@pytest.mark.parametrize("call", [_undo, _refresh], ids=["undo", "refresh"])
def test_cleared_gradients_are_not_carried_over(call: Callable[[Twin], None], way: str) -> None:
    """The next backward would add to what the optimizer has stepped already."""

    def ranks(rank: int) -> None:
        made = twin(rank, 2, way, "sgd")
        made.backward(square, 0)
        made.step()
        call(made)
        assert all(param.grad is None for param in made.model.parameters())

    simulate_ranks(ranks)


@ways
def test_scopes_show_no_cleared_gradient(way: str) -> None:
    def ranks(rank: int) -> None:
        made = twin(rank, 2, way, "sgd")
        made.backward(square, 0)
        made.step()
        with gathered(made.model, with_grads=True):
            assert all(param.grad is None for param in made.model.parameters())

    simulate_ranks(ranks)


@ways
def test_skipped_steps_bring_no_gradient_back(way: str) -> None:
    """Gradients before a discarded step are those that the optimizer has left."""

    def ranks(rank: int) -> None:
        made = twin(rank, 2, way, "sgd")
        made.backward(square, 0)
        made.step()
        with skippable_step(made.model) as step:
            square(made.model, data(1, rank)).backward()
            step.discard("bad batch")
        made.zero_grad()
        made.backward(square, 2)
        made.step()
        made.check()

    simulate_ranks(ranks)


@ways
def test_pipelines_begin_with_cleared_gradients(way: str) -> None:
    """Steps of a schedule divide gradients, and so refuse those of an earlier step."""

    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
        made = twin(rank, 2, way, "sgd")
        device, group = torch.device("cpu"), mesh.get_group("pp")
        stage = pipeline_stage(PipelineStage(made.model, 0, 1, device, group=group))
        schedule = ScheduleGPipe(stage, 2, nn.functional.mse_loss)
        for seed in range(3):
            xs, target = made.inputs(seed, 4, 6), torch.zeros(4, 2, dtype=torch.float64)
            schedule.step(xs[rank], target=target)
            losses = [square(plain, x) for plain, x in zip(made.plain, xs, strict=True)]
            torch.stack(losses).mean().backward()
            made.step()
        made.check()

    simulate_ranks(ranks)


def _replace(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad = param.grad * 2


def _clear(param: nn.Parameter) -> None:
    param.grad = None


def _accumulate(param: nn.Parameter) -> None:
    """Autograd itself sets a gradient, of a penalty on the slice."""
    param.grad = None
    (param * param).sum().backward()


@ways
@pytest.mark.parametrize("change", [_replace, _clear, _accumulate])
def test_kept_gradients_hide_no_change(change: Callable[[nn.Parameter], None], way: str) -> None:
    """A step sees a sharded gradient that is another one, though its caller has the former still.

    Then nothing is deleted that would tell, and the next time neither.
    """

    def ranks(rank: int) -> None:
        model = nn.Linear(4, 4).double()
        torch.nn.init.constant_(model.weight, 0.5)
        fully_shard(model)
        optim = torch.optim.SGD(WAYS[way](model), lr=1.0)
        kept = []
        for _ in range(3):
            square(model, data(0, rank, 2, 4)).backward()
            kept.append(model.weight.grad)
            before = model.weight.full_tensor()
            change(model.weight)
            grad = model.weight.grad
            wanted = before - (0 if grad is None else grad.full_tensor())
            optim.step()
            assert torch.equal(model.weight.full_tensor(), wanted)
            optim.zero_grad()

    simulate_ranks(ranks)
