"""Tensor parallelism first, then sharding over the other mesh dimensions: all as in one process."""

from __future__ import annotations

import copy
import dataclasses
import io
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import fsdp_compose
from fsdp_compose import ShardingStrategy, fully_shard, undo, wrap
from fsdp_compose.construct.parallel import declare_tensor_parallel
from fsdp_compose.sharded import ShardedWeightError, as_own_file, is_sharded

from harness import rank_errors, run_ranks

STEPS = 3
TOKENS = 4


class Attention(nn.Module):
    """Causal self-attention over the heads that this rank has."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for w in self.projections)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))

    @property
    def projections(self) -> tuple[nn.Module, ...]:
        return self.wq, self.wk, self.wv


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, head: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, head)
        self.norm2, self.mlp = nn.LayerNorm(width), MLP(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LM(nn.Module):
    """A small language model; its blocks may recompute their activations."""

    def __init__(self, vocabulary: int = 10, width: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, hidden, 2) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.recompute = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


def language_model() -> LM:
    torch.manual_seed(0)
    return LM().double()


def parallelize(model: LM, tp: DeviceMesh) -> LM:
    """Column, row and sequence parallel layers; the head gives logits split over the classes."""
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, tp, plan)
    for block in model.blocks:
        gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        inner = {
            "norm1": SequenceParallel(),
            "norm2": SequenceParallel(),
            "attention": PrepareModuleInput(**gathered),
            "mlp": PrepareModuleInput(**gathered),
            **{f"attention.w{k}": ColwiseParallel() for k in "qkv"},
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, tp, inner)
    return model


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def tokens_of(seed: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    both = torch.randint(0, 10, (2, 2, TOKENS), generator=generator)
    return both[0], both[1]


def cross_entropy(model: nn.Module, seed: int, rank: int) -> Tensor:
    tokens, targets = tokens_of(seed, rank)
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def mean_cross_entropy(model: nn.Module, seed: int, ranks: int) -> Tensor:
    return torch.stack([cross_entropy(model, seed, rank) for rank in range(ranks)]).mean()


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def whole(tensor: Tensor) -> Tensor:
    if is_sharded(tensor) or isinstance(tensor, DTensor):
        return tensor.full_tensor().detach()
    return tensor.detach().clone()


def assert_equal(model: nn.Module, reference: nn.Module, what: str = "", **tolerance: Any) -> None:
    theirs = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        assert param.shape == theirs[name].shape, name
        torch.testing.assert_close(
            whole(param),
            theirs[name].detach(),
            msg=lambda m, n=name: f"{what}{n}: {m}",
            **tolerance,
        )


def assert_grads_equal(model: nn.Module, reference: nn.Module) -> None:
    theirs = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        assert param.grad is not None and param.grad.shape == param.shape, name
        torch.testing.assert_close(
            whole(param.grad), theirs[name].grad, msg=lambda m, n=name: f"gradient of {n}: {m}"
        )


def sharded_lm(mesh: DeviceMesh, units: bool = True, **options: Any) -> LM:
    model = parallelize(language_model(), mesh["tp"])
    policy = wrap.by_class({Block}) if units else None
    return fully_shard(model, mesh=mesh["dp"], units=policy, **options)


def train(model: nn.Module, optim: torch.optim.Optimizer, rank: int, first: int = 0) -> None:
    for seed in range(first, first + STEPS):
        with loss_parallel():
            cross_entropy(model, seed, rank).backward()
        optim.step()
        optim.zero_grad()


def train_plain(model: nn.Module, optim: torch.optim.Optimizer, ranks: int, first: int = 0) -> None:
    for seed in range(first, first + STEPS):
        mean_cross_entropy(model, seed, ranks).backward()
        optim.step()
        optim.zero_grad()


# Training


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
        assert all(p.grad is None for p in model.parameters())
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


# Norms


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
        fsdp_compose.comm.traffic.traffic.reset()
        fsdp_compose.grad_norm(model)
        assert fsdp_compose.comm.traffic.traffic.all_reduces == 2
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


# State


@pytest.mark.parametrize("kind", ["full", "sharded", "local"])
def test_state_dicts_go_out_and_back_in(kind: Any) -> None:
    def check(rank: int) -> None:
        mesh = mesh_of(dp=2, tp=2)
        reference = language_model()
        plain = adamw(reference.parameters())
        train_plain(reference, plain, 2)
        model = sharded_lm(mesh)
        optim = adamw(model.parameters())
        train(model, optim, mesh["dp"].get_local_rank())
        state = fsdp_compose.state_dict(model, kind)
        optim_state = fsdp_compose.optim_state_dict(model, optim, kind)
        if kind == "full":
            for name, value in reference.state_dict().items():
                torch.testing.assert_close(state[name], value)
            names = [name for name, _ in reference.named_parameters()]
            for name, values in zip(names, plain.state_dict()["state"].values(), strict=True):
                torch.testing.assert_close(optim_state["state"][name], dict(values))
        state, optim_state = copy.deepcopy(state), copy.deepcopy(optim_state)
        train(model, optim, mesh["dp"].get_local_rank(), first=7)
        other = sharded_lm(mesh)
        new = adamw(other.parameters())
        for into, optimizer in ((model, optim), (other, new)):
            fsdp_compose.load_state_dict(into, state)
            fsdp_compose.load_optim_state_dict(into, optimizer, optim_state)
            assert_equal(into, reference, kind)
        train(other, new, mesh["dp"].get_local_rank(), first=3)
        train_plain(reference, plain, 2, first=3)
        assert_equal(other, reference, f"{kind}, trained on ")

    run_ranks(check, 4)


def test_the_modules_own_state_dict() -> None:
    def check(rank: int) -> None:
        mesh = mesh_of(dp=2, tp=2)
        model, reference = sharded_lm(mesh), language_model()
        state = {k: v.full_tensor() for k, v in model.state_dict().items()}
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(state[name], value)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        model.load_state_dict(reference.state_dict())
        assert_equal(model, reference)
        some = fsdp_compose.state_dict(model, "full", rank0_only=True)
        assert bool(some) == (rank == 0)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        fsdp_compose.load_state_dict(model, some, broadcast_from_rank0=True)
        assert_equal(model, reference)

    run_ranks(check, 4)


def _save(rank: int, path: Path) -> None:
    mesh = mesh_of(dp=2, tp=2)
    model = sharded_lm(mesh)
    optim = adamw(model.parameters())
    train(model, optim, mesh["dp"].get_local_rank())
    fsdp_compose.save_checkpoint(path, model, optim, extra={"step": STEPS})


def _reshard(rank: int, path: Path, to: Path, dp: int, tp: int) -> None:
    mesh = mesh_of(dp=dp, tp=tp)
    model = sharded_lm(mesh, units=False)
    optim = adamw(model.parameters())
    assert fsdp_compose.load_checkpoint(path, model, optim) == {"step": STEPS}
    fsdp_compose.save_checkpoint(to, model, optim, extra={"step": STEPS})


def test_a_checkpoint_moves_between_meshes(tmp_path: Path) -> None:
    """2 x 2 -> 4 x 1 -> 1 x 2 -> one process, bit by bit, which then trains on as it would have."""
    run_ranks(_save, 4, tmp_path / "a")
    run_ranks(_reshard, 4, tmp_path / "a", tmp_path / "b", 4, 1)
    run_ranks(_reshard, 2, tmp_path / "b", tmp_path / "c", 1, 2)
    reference = language_model()
    plain = adamw(reference.parameters())
    train_plain(reference, plain, 2)
    states = []
    for name in "ac":
        model = language_model()
        optim = adamw(model.parameters())
        fsdp_compose.load_checkpoint(tmp_path / name, model, optim)
        assert_equal(model, reference)
        states.append(model.state_dict())
        for one, other in zip(
            optim.state_dict()["state"].values(), plain.state_dict()["state"].values(), strict=True
        ):
            torch.testing.assert_close(dict(one), dict(other))
        train_plain(model, optim, 2, first=3)
        states.append(model.state_dict())
    torch.testing.assert_close(states[0], states[2], rtol=0, atol=0)
    train_plain(reference, plain, 2, first=3)
    torch.testing.assert_close(states[1], dict(reference.state_dict()))


def _mixed(mesh: DeviceMesh, units: bool) -> nn.Module:
    """Uneven parts, plain parameters in their unit and in another, and all layouts differ."""
    model = _plain_mixed()
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    parallelize_module(model[1], mesh["tp"], plan)
    policy = wrap.by_class({nn.LayerNorm}) if units else None
    return fully_shard(model, mesh=mesh["dp"], units=policy)


def _plain_mixed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), MLP(5, 3), nn.LayerNorm(5), nn.Linear(5, 9)).double()


def test_plain_parameters_beside_parts_are_saved_once(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        model = _mixed(mesh_of(dp=2, tp=2), units=True)
        held = [p.to_local().numel() for p in model[3].parameters()]
        everywhere: list[Any] = [None] * 4
        dist.all_gather_object(everywhere, held)
        assert everywhere[0] != everywhere[1]  # the ranks of one tp group cut them differently
        fsdp_compose.verify_replicas(model)  # which compares equal slices
        fsdp_compose.save_checkpoint(tmp_path, model, sgd(model.parameters()))

    def load(rank: int) -> None:
        model = _mixed(mesh_of(dp=1, tp=2), units=False)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        fsdp_compose.load_checkpoint(tmp_path, model)
        assert_equal(model, _plain_mixed())

    run_ranks(save, 4)
    run_ranks(load, 2)
    saved = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    for name, value in _plain_mixed().state_dict().items():
        chunks = saved[f"model.{name}"].chunks
        assert sum(chunk.sizes.numel() for chunk in chunks) == value.numel(), name


def test_several_mesh_dimensions_split_a_parameter() -> None:
    """Two of them split one dimension of 5, or one each; what a third repeats is counted once."""

    def check(rank: int) -> None:
        mesh = mesh_of(dp=1, a=2, b=2)
        values = torch.arange(15.0).view(5, 3)
        for placements in ((Shard(0), Shard(0)), (Shard(1), Shard(0)), (Replicate(), Shard(-1))):
            module = nn.Module()
            whole_one = distribute_tensor(values, mesh["a", "b"], placements)
            module.p = nn.Parameter(whole_one)
            fully_shard(module, mesh=mesh["dp"])
            torch.testing.assert_close(module.p.full_tensor(), values)
            torch.testing.assert_close(fsdp_compose.state_dict(module)["p"], values)
            module.p.grad = 2 * values
            torch.testing.assert_close(fsdp_compose.grad_norm(module), (2 * values).norm())
            torch.testing.assert_close(module.p.grad.norm(), (2 * values).norm())
            fsdp_compose.load_state_dict(module, {"p": values + 1})
            torch.testing.assert_close(module.p.full_tensor(), values + 1)

    run_ranks(check, 4)


def test_a_local_state_of_another_part_is_refused() -> None:
    def check(rank: int) -> None:
        mesh = mesh_of(dp=1, tp=2)
        model = parallelize_module(MLP(4, 6), mesh["tp"], _PLAN)
        state = fsdp_compose.state_dict(fully_shard(model, mesh=mesh["dp"]), "local")
        swapped: list[Any] = [None, None]
        dist.all_gather_object(swapped, copy.deepcopy(dict(state)))
        fsdp_compose.load_state_dict(model, swapped[1 - rank])

    for error in rank_errors(check, 2):
        assert error is not None and "local state of unit 'MLP': parts of bucket 0 were" in error


def test_interchange_with_torch(tmp_path: Path) -> None:
    """What torch's fully_shard and tensor parallelism saved together loads, and the other way."""

    def check(rank: int) -> None:
        mesh = mesh_of(dp=2, tp=2)
        theirs = fsdp2(parallelize(language_model(), mesh["tp"]), mesh=mesh["dp"])
        with torch.no_grad():
            for number, param in enumerate(theirs.parameters()):
                param.mul_(number + 2)
        dcp.save({"model": get_model_state_dict(theirs)}, checkpoint_id=tmp_path / "theirs")
        ours = sharded_lm(mesh)
        fsdp_compose.load_checkpoint(tmp_path / "theirs", ours)
        reference = language_model()
        with torch.no_grad():
            for number, param in enumerate(reference.parameters()):
                param.mul_(number + 2)
        assert_equal(ours, reference)
        fsdp_compose.save_checkpoint(tmp_path / "ours", ours)
        with torch.no_grad():
            for param in theirs.parameters():
                param.zero_()
        state = {"model": get_model_state_dict(theirs)}
        dcp.load(state, checkpoint_id=tmp_path / "ours")
        set_model_state_dict(theirs, state["model"])
        for (name, param), other in zip(
            theirs.named_parameters(), reference.parameters(), strict=True
        ):
            torch.testing.assert_close(param.full_tensor(), other.detach(), msg=name)

    run_ranks(check, 4)


def test_full_files_and_scopes(tmp_path: Path) -> None:
    """gathered shows DTensors that are whole over dp; iter_full and files hold whole tensors."""

    def check(rank: int) -> None:
        mesh = mesh_of(dp=2, tp=2)
        model, reference = sharded_lm(mesh), language_model()
        for bucket_bytes in (0, 1 << 20):
            found = dict(fsdp_compose.iter_full(model, bucket_bytes=bucket_bytes))
            for name, value in reference.named_parameters():
                torch.testing.assert_close(found[name], value.detach())
        fsdp_compose.save_full(tmp_path / "model", model)
        with torch.no_grad(), fsdp_compose.gathered(model, writeback=True):
            for param in model.parameters():
                assert isinstance(param, DTensor) and isinstance(param, nn.Parameter)
                param.mul_(2)
        for (name, param), other in zip(
            model.named_parameters(), reference.named_parameters(), strict=True
        ):
            torch.testing.assert_close(whole(param), 2 * other[1].detach(), msg=name)
        fsdp_compose.load_full(tmp_path / "model", model)
        assert_equal(model, reference)
        head, other = model.head.weight, reference.head.weight
        with fsdp_compose.gathered(model):
            (model.head.weight.full_tensor().square().sum()).backward()
        other.square().sum().backward()
        torch.testing.assert_close(whole(head.grad), other.grad)
        with pytest.raises(RuntimeError, match=r"'head\.weight'.*edited inside a scope without"):
            with torch.no_grad(), fsdp_compose.gathered(model):
                model.head.weight.add_(1)
        fsdp_compose.unshard(model)
        assert isinstance(model.head.weight, DTensor) and not is_sharded(model.head.weight)
        fsdp_compose.reshard(model)
        assert model.head.weight is head

    run_ranks(check, 4)


# By hand


class HandMLP(nn.Module):
    """Column then row parallel, written in terms of this rank's parts."""

    def __init__(self, whole: MLP, tp: DeviceMesh, sizes: list[int]) -> None:
        super().__init__()
        self.group = tp.get_group()
        rank = tp.get_local_rank()
        mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        self.up = nn.Parameter(whole.up.weight.detach()[mine].clone())
        self.up_bias = nn.Parameter(whole.up.bias.detach()[mine].clone())
        self.down = nn.Parameter(whole.down.weight.detach()[:, mine].clone())
        self.bias = nn.Parameter(whole.down.bias.detach().clone())
        declare_tensor_parallel([self.up, self.up_bias], tp, 0)
        declare_tensor_parallel(self.down, tp, -1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(F.linear(x, self.up, self.up_bias))
        out = F.linear(hidden, self.down)
        return _Sum.apply(out, self.group) + self.bias


class _Sum(torch.autograd.Function):
    """Sum over the ranks; each rank's gradient is the whole one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class PlainMLP(nn.Module):
    """The same, in one process."""

    def __init__(self, whole: MLP) -> None:
        super().__init__()
        self.up, self.up_bias = whole.up.weight, whole.up.bias
        self.down, self.bias = whole.down.weight, whole.down.bias

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(F.linear(x, self.up, self.up_bias))
        return F.linear(hidden, self.down, self.bias)


def _by_hand(rank: int, path: Path) -> None:
    mesh = mesh_of(dp=2, tp=2)
    torch.manual_seed(0)
    whole_mlp = MLP(4, 7).double()
    model = HandMLP(whole_mlp, mesh["tp"], [5, 2])
    shapes = [p.shape for p in model.parameters()]
    fully_shard(model, mesh=mesh["dp"])
    reference = PlainMLP(whole_mlp)
    assert shapes == [p.shape for p in model.parameters()]
    optim, plain = adamw(model.parameters()), adamw(reference.parameters())
    for seed in range(STEPS):
        torch.manual_seed(seed)
        xs = torch.randn(2, 3, 4, dtype=torch.float64)
        model(xs[mesh["dp"].get_local_rank()]).square().mean().backward()
        reference(xs).square().mean().backward()
        for order in (2.0, float("inf")):
            wanted = nn.utils.get_total_norm([p.grad for p in reference.parameters()], order)
            torch.testing.assert_close(fsdp_compose.grad_norm(model, order), wanted)
        found = fsdp_compose.clip_grad_norm_(model, 0.1)
        torch.testing.assert_close(found, nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
        optim.step(), plain.step()
        optim.zero_grad(), plain.zero_grad()
    state = fsdp_compose.state_dict(model)
    torch.testing.assert_close(dict(state), dict(reference.state_dict()))
    optim_state = fsdp_compose.optim_state_dict(model, optim)
    exp_avg = plain.state_dict()["state"][0]["exp_avg"]
    torch.testing.assert_close(optim_state["state"]["up"]["exp_avg"], exp_avg)
    fsdp_compose.save_checkpoint(path, model, optim)
    fsdp_compose.save_full(path / "full", model)
    torch.save(dict(reference.state_dict()), path / f"reference{rank}.pt")
    sharded = copy.deepcopy(fsdp_compose.state_dict(model, "sharded"))
    assert sharded["up"].shape == (7, 4)
    for load in (
        lambda: fsdp_compose.load_checkpoint(path, model, optim),
        lambda: fsdp_compose.load_full(path / "full", model),
        lambda: fsdp_compose.load_state_dict(model, state),
        lambda: fsdp_compose.load_state_dict(model, sharded),
        lambda: model.load_state_dict(sharded),
        lambda: fsdp_compose.load_optim_state_dict(model, optim, optim_state),
    ):
        if load.__code__.co_names[-1] != "load_optim_state_dict":
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
        load()
        torch.testing.assert_close(dict(fsdp_compose.state_dict(model)), dict(state))
    again = fsdp_compose.optim_state_dict(model, optim)
    torch.testing.assert_close(again["state"]["down"], optim_state["state"]["down"])


def test_layers_that_were_split_by_hand(tmp_path: Path) -> None:
    """Parts of 5 and 2 rows: clipping, state and checkpoints see one parameter of 7."""
    run_ranks(_by_hand, 4, tmp_path)
    torch.manual_seed(0)
    one = PlainMLP(MLP(4, 7).double())
    fsdp_compose.load_checkpoint(tmp_path, one, adamw(one.parameters()))
    torch.testing.assert_close(dict(one.state_dict()), torch.load(tmp_path / "reference0.pt"))


def test_a_part_never_passes_for_the_whole() -> None:
    def check(rank: int) -> None:
        mesh = mesh_of(dp=1, tp=2)
        model = HandMLP(MLP(4, 6), mesh["tp"], [3, 3])
        fully_shard(model, mesh=mesh["dp"], ignored=[model.up])
        fsdp_compose.state_dict(model)

    for error in rank_errors(check, 2):
        assert error is not None and "'up' was declared to be a part of shape (3, 4)" in error
        assert "of shape (6, 4), but no unit has it" in error and "without ignored=" in error


def test_a_declaration_that_cannot_be() -> None:
    def check(rank: int, case: str) -> None:
        mesh = mesh_of(dp=1, tp=2)
        param = nn.Parameter(torch.zeros(3, 4 + (rank if case == "differ" else 0)))
        if case == "dtensor":
            param = nn.Parameter(distribute_tensor(param.detach(), mesh["tp"], [Shard(0)]))
        dim = 2 if case == "dimension" else 0
        declare_tensor_parallel(torch.zeros(2) if case == "type" else param, mesh["tp"], dim)

    for case, text in (
        ("differ", r"rank \d has parts of \['\[\d\] torch.float32'\].*the same parameters in the"),
        ("dtensor", "is a DTensor, which says how it is split; wanted a plain parameter"),
        ("dimension", "has no dimension 2 that could be split"),
        ("type", "item 0 is a Tensor; wanted a parameter"),
    ):
        for error in rank_errors(check, 2, case):
            assert error is not None and re.search(text, error), error


# Wrong order, wrong meshes (D9)


def _errors(world: int, build: Callable[[DeviceMesh], Any]) -> list[str]:
    def check(rank: int) -> None:
        build(mesh_of(dp=2, tp=world // 2))

    found = rank_errors(check, world)
    assert all(found), found
    return [str(error) for error in found]


_PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def test_tensor_parallelism_comes_first() -> None:
    """Refused at once where a sharded parameter is to be split, else at the next forward."""

    def split(mesh: DeviceMesh) -> None:
        parallelize_module(fully_shard(MLP(4, 6), mesh=mesh["dp"]), mesh["tp"], _PLAN)

    def repeat(mesh: DeviceMesh) -> None:
        model = fully_shard(nn.Sequential(nn.LayerNorm(4)), mesh=mesh["dp"])
        parallelize_module(model, mesh["tp"], {"0": SequenceParallel()})

    def replace(mesh: DeviceMesh) -> None:
        model = fully_shard(MLP(4, 6), mesh=mesh["dp"])
        weight = distribute_tensor(model.up.weight.full_tensor(), mesh["tp"], [Shard(0)])
        model.up.weight = nn.Parameter(weight)
        model(torch.ones(2, 4))

    after = "build the model again, parallelize_module(model, mesh['tp'], plan), then fully_shard("
    for build, name in ((split, "'up.weight' of unit 'MLP'"), (repeat, "'0.weight' of unit 'Seq")):
        for error in _errors(4, build):
            assert f"ShardedWeightError: parameter {name}" in error, error
            assert "is to become a DTensor now" in error and after in error, error
    for error in _errors(4, replace):
        assert error.startswith("RuntimeError: parameter 'up.weight' of unit 'MLP' was replaced by")
        assert "a DTensor after fully_shard" in error and after in error, error


def test_meshes_that_overlap() -> None:
    """All ranks by default, the tensor-parallel dimension itself, FSDP2, another root mesh."""

    def split(mesh: DeviceMesh) -> MLP:
        return parallelize_module(MLP(4, 6), mesh["tp"], _PLAN)

    def default(mesh: DeviceMesh) -> None:
        fully_shard(split(mesh))

    def same(mesh: DeviceMesh) -> None:
        fully_shard(split(mesh), mesh=mesh["tp"])

    def group(mesh: DeviceMesh) -> None:
        fully_shard(split(mesh), mesh=mesh["tp"].get_group())

    def twice(mesh: DeviceMesh) -> None:
        fully_shard(fsdp2(MLP(4, 6), mesh=mesh["dp"]), mesh=mesh["dp"])

    def both(mesh: DeviceMesh) -> None:
        fully_shard(fsdp2(split(mesh), mesh=mesh["dp"]), mesh=mesh["dp"])

    def other_root(mesh: DeviceMesh) -> None:
        mine = [[0, 2], [1, 3]][dist.get_rank() % 2]
        everyone = [DeviceMesh("cpu", ranks) for ranks in ([0, 2], [1, 3])]
        fully_shard(split(mesh), mesh=everyone[mine[0]])

    def crossed(mesh: DeviceMesh) -> None:
        twisted = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("dp", "x"))
        fully_shard(split(mesh), mesh=twisted["dp"])

    def by_hand(mesh: DeviceMesh) -> None:
        mlp = MLP(4, 6)
        declare_tensor_parallel(mlp.up.weight, mesh["tp"], 0)
        fully_shard(mlp, mesh=mesh["tp"])

    overlap = (default, same, group, twice, by_hand)
    for build in (*overlap, both, other_root):
        for error in _errors(4, build):
            unit = "FSDPMLP" if build in (twice, both) else "MLP"
            start = f"ValueError: fully_shard: parameter 'up.weight' of unit {unit!r}"
            assert error.startswith(start), error
            assert "mesh['dp']" in error, error
            if build in overlap:
                assert "would be sharded over ranks [" in error and "of them too" in error, error
            if build is default:
                assert "over ranks [0, 1, 2, 3]" in error and "default mesh is all ranks" in error
            if build is twice:
                assert "torch's own fully_shard has sharded cannot be sharded again" in error
            if build is both:
                assert "StridedShard" in error or "of them too" in error, error
            if build is other_root:
                assert "are not in the mesh that" in error and "init_device_mesh" in error
    for error in _errors(4, crossed):
        assert "of rank 1 of 2 of tensor parallelism" in error, error
        assert "What is sharded together must be the same part: slice both meshes" in error


def test_an_equal_mesh_is_the_same_mesh() -> None:
    """DTensor may answer with a mesh of equal ranks that was sliced from an older one."""

    def check(rank: int) -> None:
        for names in (("dp", "tp"), ("data", "tp")):
            mesh = mesh_of(**{names[0]: 2, names[1]: 2})
            fully_shard(parallelize(language_model(), mesh["tp"]), mesh=mesh[names[0]])
        both = mesh_of(replicate=2, shard=1, tp=2)
        flat = both["replicate", "shard"]._flatten("dp")
        fully_shard(parallelize(language_model(), both["tp"]), mesh=flat)
        model = parallelize(language_model(), both["tp"])
        fully_shard(model, mesh=flat.get_group())
        assert_equal(model, language_model())

    run_ranks(check, 4)


def test_a_partial_sum_is_no_parameter() -> None:
    def build(mesh: DeviceMesh) -> None:
        from torch.distributed.tensor import Partial

        module = nn.Module()
        module.p = nn.Parameter(DTensor.from_local(torch.ones(3), mesh["tp"], [Partial()]))
        fully_shard(module, mesh=mesh["dp"])

    for error in _errors(4, build):
        assert "'p' of unit 'Module' is a DTensor with placements (Partial(sum),)" in error
        assert "wanted Shard and Replicate only" in error


@pytest.mark.parametrize("fused", [None, True], ids=["foreach", "fused"])
def test_optimizers_and_state_that_are_built_afterwards(fused: bool | None) -> None:
    """Fused and foreach kernels, plain local parameters, a loss scaler, frozen later."""

    def check(rank: int) -> None:
        mesh = mesh_of(dp=2, tp=2)
        torch.manual_seed(0)
        reference = MLP(4, 6)
        models = [copy.deepcopy(reference) for _ in range(2)]
        for model in models:
            parallelize_module(
                model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
            fully_shard(model, mesh=mesh["dp"])
        leaves = [
            [{"params": [p for p in m.parameters() if (p.dim() >= 2) == d]} for d in (True, False)]
            for m in (models[0], reference)
        ]
        options: Any = {"lr": 0.1, "fused": fused, "foreach": None if fused else True}
        optim, plain = (torch.optim.AdamW(groups, **options) for groups in leaves)
        local = torch.optim.AdamW(fsdp_compose.local_parameters(models[1]), **options)
        scaler = fsdp_compose.GradScaler("cpu", init_scale=4.0)
        for seed in range(STEPS):
            torch.manual_seed(seed)
            xs = torch.randn(2, 3, 4)
            for one, model in ((optim, models[0]), (local, models[1])):
                loss = model(xs[mesh["dp"].get_local_rank()]).square().mean()
                if one is optim and not fused:
                    scaler.scale(loss).backward()
                    scaler.step(one)
                    scaler.update()
                else:
                    loss.backward()
                    one.step()
                one.zero_grad()
            reference(xs).square().mean().backward()
            plain.step(), plain.zero_grad()
        for model in models:
            assert_equal(model, reference, rtol=1e-4, atol=1e-5)
        if fused:
            return
        loss = models[0](torch.ones(3, 4)).sum()
        scaler.scale(loss).backward()
        if rank == 3:  # an infinity in one rank's slice alone
            grads = [p.grad.to_local() for p in models[0].parameters()]
            next(g for g in grads if g.numel()).fill_(float("inf"))
        before = [p.full_tensor() for p in models[0].parameters()]
        for step_of in (scaler.step, torch.amp.GradScaler("cpu", init_scale=4.0).step):
            if step_of is not scaler.step:
                step_of.__self__.scale(torch.ones(()))
            step_of(optim)
        for old, param in zip(before, models[0].parameters(), strict=True):
            torch.testing.assert_close(param.full_tensor(), old, rtol=0, atol=0)

    run_ranks(check, 4)


def test_from_the_meta_device_and_from_rank_zero(tmp_path: Path) -> None:
    """What is split before it has memory is left for loading; rank 0 can give its values."""

    def check(rank: int) -> None:
        mesh = mesh_of(dp=2, tp=2)
        reference = language_model()
        with torch.device("meta"):
            model = LM().double()
        model = parallelize(model, mesh["tp"])
        before = list(model.parameters())
        fully_shard(model, mesh=mesh["dp"], param_init_fn=lambda module: None)
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        with pytest.raises(RuntimeError, match="came from the meta device, or was emptied"):
            model(tokens_of(0, 0)[0])
        fsdp_compose.load_state_dict(model, reference.state_dict())
        assert_equal(model, reference)
        with torch.no_grad():
            torch.testing.assert_close(
                model(tokens_of(0, 0)[0]).full_tensor(), reference(tokens_of(0, 0)[0])
            )
        other = parallelize(language_model(), mesh["tp"])
        if mesh["dp"].get_local_rank() == 1:
            with torch.no_grad():
                for param in other.parameters():
                    param.add_(1)
        error = "the same model|differs between rank"
        with pytest.raises(ValueError, match=error):
            fully_shard(other, mesh=mesh["dp"])
        fully_shard(other, mesh=mesh["dp"], init="broadcast")
        assert_equal(other, reference)

    run_ranks(check, 4)


def test_an_error_on_one_rank_reaches_those_that_hold_other_parts() -> None:
    def check(rank: int) -> None:
        mesh = mesh_of(dp=2, tp=2)
        model = parallelize_module(MLP(4, 6), mesh["tp"], _PLAN)
        fully_shard(model, mesh=mesh["dp"], init="verfy" if rank == 2 else "verify")

    for error in rank_errors(check, 4):
        assert error is not None and error.startswith("ValueError: fully_shard: init is 'verfy'")


def test_an_ignored_layer_is_saved_and_loaded(tmp_path: Path) -> None:
    """A DTensor that is only tensor parallel travels with the sharded ones."""

    def check(rank: int) -> None:
        mesh = mesh_of(dp=2, tp=2)
        torch.manual_seed(0)
        model = MLP(4, 6)
        reference = copy.deepcopy(model)
        parallelize_module(model, mesh["tp"], _PLAN)
        fully_shard(model, mesh=mesh["dp"], ignored=[model.up])
        fsdp_compose.save_checkpoint(tmp_path / "a", model)
        fsdp_compose.save_full(tmp_path / "b", model)
        full = fsdp_compose.state_dict(model)
        torch.testing.assert_close(dict(full), dict(reference.state_dict()))
        for load in (
            lambda: fsdp_compose.load_checkpoint(tmp_path / "a", model),
            lambda: fsdp_compose.load_full(tmp_path / "b", model),
            lambda: fsdp_compose.load_state_dict(model, full),
        ):
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            load()
            assert_equal(model, reference)

    run_ranks(check, 4)


def test_reports_tell_the_parts() -> None:
    def check(rank: int) -> None:
        mesh = mesh_of(dp=2, tp=2)
        model = parallelize(language_model(), mesh["tp"])
        planned = fsdp_compose.plan(model, mesh=mesh["dp"], units=wrap.by_class({Block}))
        fully_shard(model, mesh=mesh["dp"], units=wrap.by_class({Block}))
        found = fsdp_compose.plan(model)
        for report in (planned, found, fsdp_compose.explain(model)):
            (note,) = [n for n in report.notes if n.startswith("tensor parallelism splits 16 ")]
            assert "over 2 ranks" in note and "this rank's part" in note
        local = sum(p.to_local().numel() for p in undo(model).parameters())
        assert sum(b.numel for b in planned.buckets) == local
        assert sum(b.numel for b in found.buckets) == local

    run_ranks(check, 4)
