"""Parameters answer for their slice where torch's C++ asks no ``__torch_function__``."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_compose as fc
from fsdp_compose.base.torch_stack import asks_dtensors
from fsdp_compose.sharded import ShardedParameter, ShardedWeightError, is_sharded, reads

from harness import run_ranks, simulate_ranks
from models import WIDTH, Tower, by_block, data, mesh_of_replicas, seeded, square


def read(tensor: Any) -> torch.Tensor:
    """Read it by a function that asks no ``__torch_function__``."""
    return torch.as_tensor(tensor, dtype=torch.complex128).real


def refuses(p: Any) -> bool:
    """Whether torch's C++ gets an error for the parameter, and not its slice."""
    try:
        read(p)
    except ShardedWeightError as error:
        return "would take the slice for the whole" in str(error)
    return False


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    square(model, data(0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("strategy", list(fc.ShardingStrategy))
def test_every_parameter_of_a_trained_model_refuses(strategy: fc.ShardingStrategy) -> None:
    def ranks(rank: int) -> None:
        mesh = mesh_of_replicas(2, 2) if "HYBRID" in strategy.name else None
        model = by_block(seeded(Tower), mesh=mesh, strategy=strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            step(model, optimizer)
            assert all(map(refuses, model.parameters()))
        assert all(map(refuses, copy.deepcopy(model).parameters()))
        fc.load_state_dict(model, fc.state_dict(model, kind="sharded"))
        model.to(torch.float32).to(torch.float64)
        step(model, optimizer)
        assert all(map(refuses, model.parameters()))

    simulate_ranks(ranks, 4 if "HYBRID" in strategy.name else 2)


def test_it_is_whole_in_a_scope_and_after_undo() -> None:
    def ranks(rank: int) -> None:
        plain, model = seeded(Tower), by_block(seeded(Tower))
        weight = next(model.blocks[0].parameters())
        whole = next(plain.blocks[0].parameters())
        with fc.gathered(model):
            assert torch.equal(read(weight), read(whole))
            assert torch.equal(torch.from_numpy(weight.detach().numpy()), whole)
        assert refuses(weight)
        fc.undo(model)
        assert type(weight) is nn.Parameter and torch.equal(read(weight), read(whole))
        assert torch.equal(torch.from_numpy(weight.detach().numpy()), whole)
        fc.fully_shard(model)
        assert refuses(weight)

    simulate_ranks(ranks, 2)


@pytest.mark.parametrize("asked", [True, False])
def test_what_tensor_parallelism_split_refuses(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torch asks the class, as 2.11 does not: there it is a slice that is read."""
    if asked and not asks_dtensors():
        pytest.skip("this torch does not ask classes derived from DTensor")
    monkeypatch.setattr(reads, "asks_dtensors", lambda: asked)

    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, 2))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fc.fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        assert all(refuses(p) is asked and is_sharded(p.data) for p in model.parameters())
        fc.undo(model)
        assert not any(map(refuses, model.parameters()))

    simulate_ranks(ranks, 4)


def test_a_group_of_processes_takes_no_slice() -> None:
    """``torch.distributed`` gives its C++ groups tensors, which ask nobody.

    Torch 2.11 asks no ``__torch_function__`` in ``broadcast``, and 2.13 none of lists.
    """

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        group, weight = dist.group.WORLD, model.head.weight
        with pytest.raises(ShardedWeightError, match="collectives of torch"):
            group.allreduce([weight])
        with pytest.raises(ShardedWeightError, match="broadcast needs"):
            dist.broadcast(weight.data, 0)
        with pytest.raises(ShardedWeightError, match="all_gather needs"):
            dist.all_gather([weight.data] * 2, weight.to_local())

    run_ranks(ranks, 2)


def test_gradient_hooks_and_dtype_stay_with_the_object() -> None:
    seen: list[torch.Size] = []

    def ranks(rank: int) -> None:
        model = nn.Sequential(nn.Linear(3, 3, bias=False))
        param = model[0].weight
        param.grad = torch.ones(3, 3)
        param.register_hook(lambda grad: seen.append(grad.shape))
        param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
        fc.fully_shard(model)
        assert model[0].weight is param and refuses(param)
        assert torch.equal(param.grad.full_tensor(), torch.ones(3, 3))
        model(torch.ones(1, 3)).sum().backward()
        assert torch.equal(param.grad.full_tensor(), torch.full((3, 3), 2.0))
        fc.undo(model)
        assert torch.equal(param.grad, torch.full((3, 3), 2.0))
        model(torch.ones(1, 3)).sum().backward()
        assert torch.equal(param.grad, torch.full((3, 3), 3.0))

    simulate_ranks(ranks, 2)
    assert seen == [torch.Size((3, 3))] * 8


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_a_mode_sees_what_an_optimizer_does_to_slices(options: dict[str, bool]) -> None:
    def ranks(rank: int) -> None:
        found = []
        for watched in (False, True):
            model = by_block(seeded(Tower))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
            for _ in range(3):
                square(model, data(0, rank)).backward()
                mode = Operators()
                if watched:
                    with mode:
                        optimizer.step()
                    assert any("lerp_" in name or "fused_adamw" in name for name in mode.names)
                else:
                    optimizer.step()
                optimizer.zero_grad()
            found.append(fc.state_dict(model, kind="full"))
        assert found[0].keys() == found[1].keys()
        assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])

    simulate_ranks(ranks, 2)


KEPT = fc.ShardingStrategy.SHARD_GRAD_OP
WAYS = {"foreach": {"foreach": True}, "fused": {"fused": True}, "for-loop": {"foreach": False}}


@pytest.mark.parametrize("way", [*WAYS, "by hand", "mixed"])
def test_kept_weights_follow_a_step_in_a_mode(way: str) -> None:
    """Torch does not count there what its functions over lists write."""

    def ranks(rank: int) -> None:
        losses = []
        for watched in (False, True):
            model = by_block(seeded(Tower), strategy=KEPT)
            scope = Operators() if watched else nullcontext()
            params = list(model.parameters())
            optimizer = torch.optim.AdamW(params, lr=0.1, **WAYS.get(way, {}))
            square(model, data(0, rank)).backward()
            with torch.no_grad():
                model(data(1, rank))  # which keeps the units gathered
            with scope, torch.no_grad():
                if way == "by hand":
                    torch._foreach_mul_(params, 0.5)
                elif way == "mixed":
                    torch._foreach_mul_(params, torch.tensor(0.5, dtype=torch.float64))
                else:
                    optimizer.step()
            with torch.no_grad():
                losses.append(square(model, data(1, rank)))
        assert torch.equal(*losses)

    run_ranks(ranks, 2)


def test_autograd_computes_with_slices() -> None:
    def ranks(rank: int) -> None:
        model, plain = by_block(seeded(Tower)), seeded(Tower)
        for of in (model, plain):
            sum((p * p).sum() + (p.sin() * p).sum() for p in of.parameters()).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)

    simulate_ranks(ranks, 2)


def test_a_graph_from_before_undo_cannot_be_run() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        losses = [(p * p).sum() for p in model.parameters()]
        fc.undo(model)
        for loss in losses:
            with pytest.raises(RuntimeError, match="became plain since"):
                loss.backward()
        assert all(p.grad is None for p in model.parameters())
        square(model, data(0, 0)).backward()

    simulate_ranks(ranks, 2)


def test_a_parameter_that_a_graph_holds_is_sharded() -> None:
    """The graph keeps what it has, so such a parameter cannot refuse; it trains as the others."""

    def ranks(rank: int) -> None:
        model, plain = seeded(Tower), seeded(Tower)
        held = (model.head.weight * 2).sum()
        by_block(model)
        assert isinstance(model.head.weight, ShardedParameter) and not refuses(model.head.weight)
        assert refuses(model.head.bias)
        for of in (model, plain):
            optimizer = torch.optim.SGD(of.parameters(), lr=0.1)
            for _ in range(2):
                step(of, optimizer)
        for name, value in fc.state_dict(model, kind="full").items():
            torch.testing.assert_close(value, plain.get_parameter(name).detach())
        fc.undo(model)
        assert held.grad_fn is not None
        assert torch.equal(read(model.head.weight), model.head.weight)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        simulate_ranks(ranks, 2)


def test_a_copy_of_a_parameter_in_optimizer_state() -> None:
    """Its class computes what operators do, and yet it is a slice as other state is."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer)
        for param in model.parameters():
            optimizer.state[param]["anchor"] = copy.deepcopy(param)
        saved = fc.optim_state_dict(model, optimizer, kind="full")
        anchors = [optimizer.state[param]["anchor"] for param in model.parameters()]
        wanted = [anchor.full_tensor() for anchor in anchors]
        for anchor in anchors:
            anchor.data.zero_()
        fc.load_optim_state_dict(model, optimizer, saved)
        for param, whole in zip(model.parameters(), wanted, strict=True):
            assert torch.equal(optimizer.state[param]["anchor"].full_tensor(), whole)

    simulate_ranks(ranks, 2)


def test_a_slice_kept_over_a_step_and_undo() -> None:
    """Torch makes the node of ``p.to_local()`` anew, from ``p``, once ``p`` was written."""
    model, other = fc.fully_shard(nn.Linear(4, 2)), fc.fully_shard(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = model.weight.to_local()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(ShardedWeightError, match="kept from before p was written"):
        kept * 2
    other(torch.ones(1, 4)).sum().backward()  # the first step looks through all tensors
    fc.undo(model)
    with torch.no_grad():
        model.weight.mul_(2)
    other(torch.ones(1, 4)).sum().backward()
    assert "grad_fn" in repr(kept)
