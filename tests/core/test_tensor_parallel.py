"""Tensor parallelism first, then sharding over the other mesh dimensions: all as in one process."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import fsdp_compose
from fsdp_compose import ShardingStrategy, fully_shard, undo, wrap
from fsdp_compose.base.process import here
from fsdp_compose.scopes.unreduced import UnreducedGradient
from fsdp_compose.sharded import ShardedWeightError, as_own_file

from harness import TORCH, rank_errors, run_ranks, simulate_ranks
from tp_models import (
    MLP,
    STEPS,
    Block,
    adamw,
    assert_equal,
    cross_entropy,
    language_model,
    mean_cross_entropy,
    mesh_of,
    parallelize,
    sgd,
    sharded_lm,
    train,
    train_plain,
    whole,
)


def assert_grads_equal(model: nn.Module, reference: nn.Module) -> None:
    theirs = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        assert param.grad is not None and param.grad.shape == param.shape, name
        torch.testing.assert_close(
            whole(param.grad), theirs[name].grad, msg=lambda m, n=name: f"gradient of {n}: {m}"
        )


@pytest.mark.parametrize("shape", [(2, 2), (1, 2), (2, 1)], ids=str)
def test_a_language_model_trains_as_in_one_process(shape: tuple[int, int]) -> None:
    """Column, row, sequence and loss parallel; SGD shows a wrong gradient scale, AdamW its state.

    The optimizer is built before sharding, and trains the objects it was given.
    """

    def check(rank: int) -> None:
        mesh = mesh_of(dp=shape[0], tp=shape[1])
        for optimizer, recompute in ((sgd, False), (adamw, True)):
            model = parallelize(language_model(), mesh["tp"])
            model.recompute = recompute
            before = list(model.parameters())
            optim = optimizer(model.parameters())
            fully_shard(model, mesh=mesh["dp"], units=wrap.by_class({Block}))
            assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
            reference = language_model()
            plain = optimizer(reference.parameters())
            with loss_parallel():
                cross_entropy(model, 9, mesh["dp"].get_local_rank()).backward()
            mean_cross_entropy(reference, 9, shape[0]).backward()
            assert_grads_equal(model, reference)
            optim.zero_grad()
            plain.zero_grad()
            train(model, optim, mesh["dp"].get_local_rank())
            train_plain(reference, plain, shape[0])
            assert_equal(model, reference, f"{optimizer.__name__} ")

    run_ranks(check, shape[0] * shape[1])


def test_sizes_that_nothing_divides() -> None:
    """Rows of 5 and 7 over 2 ranks, parts of 4 and 3 rows over 2 others; one unit and several."""

    def check(rank: int) -> None:
        mesh = mesh_of(dp=2, tp=2)
        plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        for units in (None, wrap.by_class({MLP})):
            torch.manual_seed(0)
            model = nn.Sequential(MLP(5, 7), MLP(5, 3), nn.Linear(5, 1)).double()
            reference = copy.deepcopy(model)
            for mlp in model[:2]:
                parallelize_module(mlp, mesh["tp"], plan)
            fully_shard(model, mesh=mesh["dp"], units=units)
            optim, plain = sgd(model.parameters()), sgd(reference.parameters())
            for seed in range(STEPS):
                torch.manual_seed(seed)
                xs = torch.randn(2, 3, 5, dtype=torch.float64)
                model(xs[mesh["dp"].get_local_rank()]).square().mean().backward()
                reference(xs).square().mean().backward()
                assert_grads_equal(model, reference)
                optim.step(), plain.step()
                optim.zero_grad(), plain.zero_grad()
            assert_equal(model, reference)
            undo(model)
            assert_equal(model, reference)

    run_ranks(check, 4)


def _three_axes(rank: int, replicate: int, shard: int, tp: int) -> None:
    mesh = mesh_of(replicate=replicate, shard=shard, tp=tp)
    model = parallelize(language_model(), mesh["tp"])
    fully_shard(
        model,
        mesh=mesh["replicate", "shard"],
        units=wrap.by_class({Block}),
        strategy=ShardingStrategy.HYBRID_SHARD,
    )
    reference = language_model()
    optim, plain = sgd(model.parameters()), sgd(reference.parameters())
    ranks = replicate * shard
    for seed in range(2):
        with loss_parallel():
            cross_entropy(model, seed, rank // tp).backward()
        mean_cross_entropy(reference, seed, ranks).backward()
        found = fsdp_compose.clip_grad_norm_(model, 0.3)
        wanted = nn.utils.clip_grad_norm_(reference.parameters(), 0.3)
        torch.testing.assert_close(found, wanted)
        optim.step(), plain.step()
        optim.zero_grad(), plain.zero_grad()
    assert_equal(model, reference)


def test_three_mesh_dimensions() -> None:
    run_ranks(_three_axes, 4, 2, 1, 2)


@pytest.mark.slow
def test_three_mesh_dimensions_on_eight_ranks() -> None:
    run_ranks(_three_axes, 8, 2, 2, 2, timeout=120)


def test_mixed_precision() -> None:
    """The layers compute in bfloat16 and reduce in fp32; gradients and shards stay as stored."""

    def check(rank: int) -> None:
        mesh = mesh_of(dp=2, tp=2)
        mp = fsdp_compose.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        torch.manual_seed(0)
        model, reference = MLP(8, 12), MLP(8, 12)
        reference.load_state_dict(model.state_dict())
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"], mp_policy=mp)
        seen: list[Any] = []
        model.up.register_forward_pre_hook(lambda m, args: seen.append(m.weight))
        torch.manual_seed(1)
        xs = torch.randn(2, 5, 8)
        model(xs[mesh["dp"].get_local_rank()]).float().square().mean().backward()
        assert isinstance(seen[0], DTensor) and seen[0].dtype == torch.bfloat16
        assert seen[0].placements == model.up.weight.placements == (Shard(0),)
        seen.clear()
        model.eval()
        unit = fsdp_compose.get_state(model).unit
        unit.mp = dataclasses.replace(mp, full_precision_in_eval=True)
        with torch.no_grad():
            torch.testing.assert_close(model(xs[0]), reference(xs[0]))
        assert isinstance(seen[0], DTensor) and seen[0].dtype == torch.float32
        half = copy.deepcopy(reference).bfloat16()
        half(xs.bfloat16()).float().square().mean().backward()
        for (name, param), other in zip(model.named_parameters(), half.parameters(), strict=True):
            assert param.dtype == param.grad.dtype == torch.float32, name
            torch.testing.assert_close(
                whole(param.grad), other.grad.float(), rtol=0.05, atol=2e-3, msg=name
            )

    run_ranks(check, 4)


def test_gradients_accumulate_without_synchronisation() -> None:
    def check(rank: int) -> None:
        mesh = mesh_of(dp=2, tp=2)
        model, reference = sharded_lm(mesh), language_model()
        here = mesh["dp"].get_local_rank()
        with loss_parallel(), fsdp_compose.no_sync(model):
            cross_entropy(model, 0, here).backward()
        assert all(type(p.grad) is UnreducedGradient for p in model.parameters())
        with loss_parallel():
            cross_entropy(model, 1, here).backward()
        (mean_cross_entropy(reference, 0, 2) + mean_cross_entropy(reference, 1, 2)).backward()
        assert_grads_equal(model, reference)

    run_ranks(check, 4)


def test_gradients_asked_for_and_frozen_parameters() -> None:
    def check(rank: int) -> None:
        mesh = mesh_of(dp=2, tp=2)
        torch.manual_seed(0)
        model = nn.Sequential(MLP(4, 6), nn.Linear(4, 2)).double()
        model[0].up.requires_grad_(False)
        reference = copy.deepcopy(model)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model[0], mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
        torch.manual_seed(1)
        xs = torch.randn(2, 3, 4, dtype=torch.float64)
        mine = xs[mesh["dp"].get_local_rank()]
        trained = [p for p in model.parameters() if p.requires_grad]
        theirs = [p for p in reference.parameters() if p.requires_grad]
        assert len(trained) == len(theirs) == 4
        found = torch.autograd.grad(model(mine).square().mean(), trained)
        wanted = torch.autograd.grad(reference(xs).square().mean(), theirs)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(whole(a), b)
        model(mine).square().mean().backward()
        assert model[0].up.weight.grad is None
        with torch.no_grad():  # a frozen pass, in which nothing is connected to autograd
            torch.testing.assert_close(model(mine), reference(mine))

    run_ranks(check, 4)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(4), MLP(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))


@pytest.mark.skipif(TORCH < (2, 13), reason="there torch's own tensor parallelism gets it wrong")
def test_a_gradient_penalty_sees_through_both_axes() -> None:
    """Also through the gradient of a norm, which is a partial sum on each rank of its mesh."""

    def check(rank: int) -> None:
        mesh = mesh_of(dp=2, tp=2)
        torch.manual_seed(0)
        model = Normed().double()
        reference = copy.deepcopy(model)
        given = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        plan = {
            "norm": SequenceParallel(use_local_output=True),
            "mlp": PrepareModuleInput(**given),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(),
        }
        fully_shard(parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp"])
        torch.manual_seed(1)
        xs = torch.randn(2, 3, 4, 4, dtype=torch.float64)
        mine = xs[mesh["dp"].get_local_rank()].chunk(2, 1)[mesh["tp"].get_local_rank()]
        for net, x in ((model, mine), (reference, xs.flatten(0, 1))):
            params = list(net.parameters())
            grads = torch.autograd.grad(net(x).square().mean(), params, create_graph=True)
            torch.stack([grad.square().sum() for grad in grads]).sum().backward()
        assert_grads_equal(model, reference)

    run_ranks(check, 4)


@pytest.mark.skipif(TORCH < (2, 13), reason="there torch's own tensor parallelism gets it wrong")
@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize(
    ("units", "scoped"),
    [(MLP, False), (MLP, True), (nn.Linear, False)],
    ids=["block", "scope", "layers"],
)
def test_a_graph_that_tensor_parallelism_cuts(
    split: bool, units: type[nn.Module], scoped: bool
) -> None:
    """A penalty on the input: right where the input is split, and refused where torch cuts it."""

    def check(rank: int) -> None:
        mesh = mesh_of(dp=2, tp=2)
        torch.manual_seed(0)
        model = nn.Sequential(MLP(4, 6)).double()
        reference = copy.deepcopy(model)
        plan: dict[str, Any] = {"0.up": ColwiseParallel(), "0.down": RowwiseParallel()}
        if split:
            given = {"input_layouts": (Shard(0),), "desired_input_layouts": (Replicate(),)}
            plan["0"] = PrepareModuleInput(**given)
            plan["0.down"] = RowwiseParallel(output_layouts=Shard(0))
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"], units=wrap.by_class(units))
        torch.manual_seed(1)
        xs = torch.randn(2, 4, 4, dtype=torch.float64)
        mine = xs[mesh["dp"].get_local_rank()]
        if split:
            mine = mine.chunk(2)[mesh["tp"].get_local_rank()]
        for net, x in ((model, mine), (reference, xs.flatten(0, 1))):
            x = x.clone().requires_grad_()
            net(x).square().sum().backward()  # without a graph over it nothing is cut
            net.zero_grad()
            is_open = scoped and net is model
            with fsdp_compose.gathered(net) if is_open else contextlib.nullcontext():
                (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
                (slope.square().sum() / (2 if net is reference else 1)).backward()
        assert_grads_equal(model, reference)

    if split:
        run_ranks(check, 4)
    else:
        errors = rank_errors(check, 4)
        assert all("would be wrong. Hand the unit its input split" in str(e) for e in errors)


@pytest.mark.skipif(TORCH < (2, 13), reason="there torch's own tensor parallelism gets it wrong")
@pytest.mark.parametrize("full", [True, False], ids=["all", "some"])
def test_functional_call_on_updated_parts(full: bool) -> None:
    """MAML with the inner step on slices of DTensors, of which the forward reads DTensors."""

    def adapt(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
        named = {n: p for n, p in net.named_parameters() if full or "bias" not in n}
        inner = net(x).square().mean()
        grads = torch.autograd.grad(inner, [*named.values()], create_graph=True)
        return {n: p - 0.1 * g for (n, p), g in zip(named.items(), grads)}

    def check(rank: int) -> None:
        mesh = mesh_of(dp=2, tp=2)
        torch.manual_seed(0)
        model = MLP(4, 6).double()
        reference = copy.deepcopy(model)
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        torch.manual_seed(1)
        xs = torch.randn(2, 3, 4, dtype=torch.float64)
        for net, x in ((model, xs[mesh["dp"].get_local_rank()]), (reference, xs.flatten(0, 1))):
            torch.func.functional_call(net, adapt(net, x), x).square().mean().backward()
        assert_grads_equal(model, reference)

    simulate_ranks(check, 4)


def test_norms_are_global_over_both_axes() -> None:
    """Split over tp, repeated over tp and plain parameters, in one call; 2 all-reduces for all."""

    def check(rank: int) -> None:
        mesh = mesh_of(dp=2, tp=2)
        model, reference = sharded_lm(mesh), language_model()
        with loss_parallel():
            cross_entropy(model, 0, mesh["dp"].get_local_rank()).backward()
        mean_cross_entropy(reference, 0, 2).backward()
        kinds = {tuple(p.placements) for p in model.parameters() if isinstance(p, DTensor)}
        assert kinds >= {(Shard(0),), (Shard(1),), (Replicate(),)}
        for order in (2.0, 1.0, float("inf"), 0.0, 3.0):
            grads = [p.grad for p in reference.parameters()]
            wanted = nn.utils.get_total_norm(grads, order)
            torch.testing.assert_close(fsdp_compose.grad_norm(model, order), wanted)
        here.traffic.reset()
        fsdp_compose.grad_norm(model)
        assert here.traffic.all_reduces == 2
        weight, other = model.blocks[0].mlp.up.weight, reference.blocks[0].mlp.up.weight
        for function in (torch.norm, torch.sum, torch.mean, torch.max, torch.var):
            torch.testing.assert_close(function(weight).detach(), function(other).detach())
            torch.testing.assert_close(function(weight.grad), function(other.grad))
        torch.testing.assert_close(model.norm.weight.sum(), reference.norm.weight.sum())
        found = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        wanted = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        torch.testing.assert_close(found, wanted)
        assert_grads_equal(model, reference)

    run_ranks(check, 4)


def test_an_unsharded_dtensor_counts_as_a_whole() -> None:
    """A parameter that is left alone by the sharding still is split over tp."""

    def check(rank: int) -> None:
        mesh = mesh_of(dp=2, tp=2)
        torch.manual_seed(0)
        model, x = MLP(4, 6).double(), torch.randn(3, 4, dtype=torch.float64)
        reference = copy.deepcopy(model)
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"], ignored=[model.up])
        model(x).sum().backward()
        reference(x).sum().backward()
        wanted = nn.utils.get_total_norm([p.grad for p in reference.parameters()])
        torch.testing.assert_close(fsdp_compose.grad_norm(model), wanted)

    run_ranks(check, 4)


def test_a_parameter_stays_itself() -> None:
    """A DTensor with its mesh, placements and global shape, on which only what is safe works."""

    def check(rank: int) -> None:
        mesh = mesh_of(dp=2, tp=2)
        torch.manual_seed(0)
        plain = MLP(4, 6)
        model = copy.deepcopy(plain)
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        held = model.up.weight.to_local().numel()
        fully_shard(model, mesh=mesh["dp"])
        weight, wanted = model.up.weight, plain.up.weight.detach()
        assert isinstance(weight, DTensor) and isinstance(weight, nn.Parameter)
        assert weight.placements == (Shard(0),) and weight.device_mesh == mesh["tp"]
        assert weight.shape == (6, 4) and weight.numel() == 24 and weight.stride() == (4, 1)
        counts = torch.tensor(weight.to_local().numel())
        dist.all_reduce(counts, group=mesh["dp"].get_group())
        assert counts == held and type(weight.to_local()) is Tensor
        torch.testing.assert_close(weight.full_tensor(), wanted)
        average = weight.detach().clone()
        average.lerp_(weight * 3, 0.5)
        torch.testing.assert_close(average.full_tensor(), 2 * wanted)
        torch.testing.assert_close((weight + wanted).full_tensor().detach(), 2 * wanted)
        other = distribute_tensor(wanted.clone(), mesh["tp"], [Replicate()])
        torch.testing.assert_close((weight.detach() + other).full_tensor(), 2 * wanted)
        weight.grad = torch.ones(6, 4)
        assert weight.grad.sum() == 24
        for function in (lambda p: p @ p.T, lambda p: p[0], lambda p: p.view(-1)):
            with pytest.raises(ShardedWeightError, match=r"'up\.weight'.*part of shape \(3, 4\)"):
                function(weight)
        with pytest.raises(ShardedWeightError, match=r"redistribute.*'up\.weight'"):
            weight.redistribute(placements=[Replicate()])
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.up.weight.zero_()
        torch.testing.assert_close(weight.full_tensor(), wanted)
        assert isinstance(twin.up.weight, DTensor) and twin.up.weight.placements == (Shard(0),)
        file = io.BytesIO()
        torch.save(as_own_file(weight), file)
        file.seek(0)
        loaded = torch.load(file)
        assert loaded.shape == (6, 4)
        torch.testing.assert_close(loaded.to_local(), weight.to_local().detach())
        with pytest.raises(RuntimeError, match="unpickled without the other ranks"):
            loaded.full_tensor()
        held_loss = model(torch.ones(2, 4)).sum()
        undo(model)
        del held_loss
        assert model.up.weight is weight and type(weight) is DTensor
        assert weight.to_local().shape == (3, 4) and weight.placements == (Shard(0),)
        assert isinstance(weight.grad, DTensor) and weight.grad.full_tensor().sum() == 24
        model(torch.ones(2, 4)).sum().backward()

    run_ranks(check, 4)
