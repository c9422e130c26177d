"""What belongs to every axis of the mesh: whole matrices, replicas, seeds and degenerate shapes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp_compose as fc
from fsdp_compose import ShardingStrategy
from fsdp_compose.construct.tensor_parallel import declare_tensor_parallel
from fsdp_compose.sharded import part_of

from harness import TORCH, run_ranks
from models import Tower, Twin, by_block, data, square
from structured import MAKE, wholes
from tp_models import MLP, mesh_of, whole

# Optimizers of whole matrices


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def two_layers(mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    """Column, then row parallel with a norm beside them; plain without a mesh."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), MLP(8, 12)).double()
    if mesh is not None:
        parallelize_module(
            model[1], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        fc.fully_shard(model, mesh=mesh["dp"], **options)
    return model


def backward(model: nn.Module, rank: int, seed: int) -> None:
    model.zero_grad()
    model(data(seed, rank, 3, 8)).square().mean().backward()


@pytest.mark.parametrize("shape", [(2, 2), (1, 2)], ids=str)
def test_owners_step_the_whole_of_split_matrices(shape: tuple[int, int], tmp_path: Path) -> None:
    """Bit-equal to one process, in updates and in state, also after saving and loading."""

    def ranks(rank: int) -> None:
        mesh = mesh_of(dp=shape[0], tp=shape[1])
        here = mesh["dp"].get_local_rank()
        for name, granularity in (("muon", wholes), ("muon", 1), ("soap", wholes), ("sgd", 1)):
            model, plain = two_layers(mesh, granularity=granularity), two_layers()
            optim, wanted = fc.owner_step(matrices(model), MAKE[name]), MAKE[name](matrices(plain))
            for seed in range(2):
                backward(model, here, seed)
                for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                    theirs.grad = whole(ours.grad)
                optim.step(), wanted.step()
            stepped = [p for group in optim.optimizer.param_groups for p in group["params"]]
            assert {p.untyped_storage().nbytes() for p in stepped} == {8}  # no weights are held
            for (key, ours), theirs in zip(model.named_parameters(), plain.parameters()):
                assert torch.equal(whole(ours), theirs), key
            state = fc.optim_state_dict(model, optim)["state"]
            for key, theirs in plain.named_parameters():
                for what, value in wanted.state.get(theirs, {}).items():
                    found = state[key][what]
                    assert torch.equal(torch.as_tensor(found), torch.as_tensor(value)), key
            if name == "sgd":
                continue
            fc.save_checkpoint(tmp_path / name, model, optim)
            other = two_layers(mesh, granularity=1)
            resumed = fc.owner_step(matrices(other), MAKE[name])
            fc.load_checkpoint(tmp_path / name, other, resumed)
            for each, one in ((model, optim), (other, resumed)):
                backward(each, here, 7)
                one.step()
            for ours, theirs in zip(model.parameters(), other.parameters()):
                assert torch.equal(whole(ours), whole(theirs))

    run_ranks(ranks, shape[0] * shape[1])


def test_owners_of_parts_that_were_split_by_hand() -> None:
    """Parts of unequal sizes lie whole on other ranks of each shard group."""

    def ranks(rank: int) -> None:
        mesh = mesh_of(dp=2, tp=2)
        sizes = ((5, 2), (1, 6))
        low = fc.MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
        for granularity, mp in (("tensor", None), (1, None), (1, low)):
            kind = torch.float64 if mp is None else torch.bfloat16
            torch.manual_seed(0)
            full = [torch.randn(7, 4, dtype=torch.float64) for _ in sizes]
            plain = nn.ParameterList(tensor.clone() for tensor in full)
            tp = mesh["tp"].get_local_rank()
            parts = [t.split(size)[tp].clone() for t, size in zip(full, sizes, strict=True)]
            model = nn.Sequential(*(nn.Linear(4, len(part), bias=False) for part in parts))
            for layer, part in zip(model, parts, strict=True):
                layer.weight = nn.Parameter(part)
            declare_tensor_parallel(model.parameters(), mesh["tp"], 0)
            mp = mp or fc.MixedPrecision()
            choose = lambda *_, g=granularity: g  # noqa: E731
            fc.fully_shard(model, mesh=mesh["dp"], granularity=choose, mp_policy=mp)
            optim = fc.owner_step(model.parameters(), MAKE["muon"])
            for param in plain:
                param.grad_dtype = kind
            wanted = MAKE["muon"](plain.parameters())
            for seed in range(2):
                for ours, theirs, size in zip(model.parameters(), plain, sizes, strict=True):
                    theirs.grad = data(seed, 0, 7, 4).to(kind)
                    ours.grad = theirs.grad.split(size)[tp].clone()
                optim.step(), wanted.step()
            found: dict[str, Tensor] = fc.state_dict(model)
            for key, theirs in plain.named_parameters():
                assert torch.equal(found[f"{key}.weight"], theirs), key

    run_ranks(ranks, 4)


# What tensor parallelism left whole


def spoil(model: nn.Module, place: str, rank: int) -> None:
    """Rank 1 of tensor parallelism has another value there."""
    if rank % 2:
        with torch.no_grad():
            part_of(model.get_parameter(place)).add_(1.0)


def three_layers() -> nn.Sequential:
    torch.manual_seed(0)
    block = nn.Sequential(nn.LayerNorm(8), MLP(8, 12))
    return nn.Sequential(block, nn.LayerNorm(8), nn.Sequential(nn.LayerNorm(8))).double()


def three_units(mesh: DeviceMesh, spoiled: str = "", **options: Any) -> nn.Module:
    """A norm beside parts in a unit, another in a unit without any; the outermost has a third."""
    model = three_layers()
    parallelize_module(
        model[0][1], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    if spoiled:
        spoil(model, spoiled, mesh["tp"].get_local_rank())
    policy = fc.wrap.by_class({nn.Sequential})
    return fc.fully_shard(model, mesh=mesh["dp"], units=policy, **options)


PLACES = ("0.0.weight", "0.1.down.bias", "1.bias", "2.0.weight")


@pytest.mark.parametrize("shape", [(2, 2), (1, 2)], ids=str)
def test_replicas_beside_parts_start_alike(shape: tuple[int, int]) -> None:
    """Verified and broadcast over every axis of the mesh; also what a refresh or meta adds."""

    def ranks(rank: int) -> list[str]:
        mesh = mesh_of(dp=shape[0], tp=shape[1])
        errors = []
        for place in PLACES:
            try:
                three_units(mesh, place)
            except ValueError as error:
                errors.append(str(error))
            model = three_units(mesh, place, init="broadcast")
            wanted = three_units(mesh)
            for ours, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
                assert torch.equal(whole(ours), whole(theirs))
        model[2].add_module("late", nn.LayerNorm(8).double())
        spoil(model, "2.late.bias", rank)
        try:
            fc.refresh(model, init="verify")
        except ValueError as error:
            errors.append(str(error))
        fc.refresh(model, init="broadcast")
        assert not whole(model[2].late.bias).any()
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(8, 8), MLP(8, 12))
        parallelize_module(model[1], mesh["tp"], {"up": ColwiseParallel()})
        torch.manual_seed(rank % shape[1])
        try:
            fc.fully_shard(model, mesh=mesh["dp"])
        except ValueError as error:
            errors.append(str(error))
        return errors

    for errors in run_ranks(ranks, shape[0] * shape[1]):
        names = [*PLACES, "late.bias", "0.weight"]
        assert len(errors) == len(names), errors
        for error, name in zip(errors, names, strict=True):
            assert "differs between rank" in error and f"{name.split('.', 1)[1]}'" in error, error


def test_saving_says_which_copies_differ(tmp_path: Path) -> None:
    """Of what tensor parallelism left whole one rank's numbers are saved: a warning names it."""

    def ranks(rank: int) -> None:
        model = three_units(mesh_of(dp=1, tp=2))
        fc.save_checkpoint(tmp_path / "checkpoint", model)
        before = whole(model[1].weight)
        with torch.no_grad():
            model[1].weight.to_local().add_(rank)
        for save, path in ((fc.save_checkpoint, "checkpoint"), (fc.save_full, "full")):
            with pytest.warns(UserWarning, match=r"'1.weight' is copied on ranks \[0, 1\]"):
                save(tmp_path / path, model)
        fc.load_full(tmp_path / "full", model)
        assert torch.equal(whole(model[1].weight), before)
        fc.verify_replicas(model)

    run_ranks(ranks, 2)


# Initialisation


@pytest.mark.parametrize("shape", [(2, 2), (1, 2), (2, 1)], ids=str)
def test_initialised_as_the_plain_model_at_every_mesh(shape: tuple[int, int]) -> None:
    """From the meta device and in place: each rank has its part of the plain model's numbers."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(7, 8), nn.LayerNorm(8), MLP(8, 12)).double()

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        plan = {"0": RowwiseParallel(), "2.up": ColwiseParallel(), "2.down": RowwiseParallel()}
        return parallelize_module(model, mesh["tp"], plan)

    def normal(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            nn.init.normal_(param)

    def ranks(rank: int) -> None:
        mesh = mesh_of(dp=shape[0], tp=shape[1])
        plain = build()
        for init in (None, "seeded", normal):
            with torch.device("meta"):
                model = parallelize(build(), mesh)
            fn = fc.seeded_init(model, 3) if init == "seeded" else init
            torch.manual_seed(5)
            fc.fully_shard(model, mesh=mesh["dp"], param_init_fn=fn)
            torch.manual_seed(5)
            if init is None:
                for layer in (plain[0], plain[1], plain[2].up, plain[2].down):
                    layer.reset_parameters()
            else:
                plain.apply(fc.seeded_init(plain, 3) if init == "seeded" else normal)
            for (name, ours), theirs in zip(model.named_parameters(), plain.parameters()):
                assert torch.equal(whole(ours), theirs), name
        model = parallelize(build(), mesh)
        model.apply(fc.seeded_init(model, 3))
        plain.apply(fc.seeded_init(plain, 3))
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters()):
            assert torch.equal(whole(ours), theirs), name

    run_ranks(ranks, shape[0] * shape[1])


# Norms


@pytest.mark.parametrize("shape", [(2, 2), (1, 2)], ids=str)
def test_one_norm_on_every_rank_though_replicas_differ(shape: tuple[int, int]) -> None:
    """Gradients of what tensor parallelism left whole are averaged over its ranks in the norm."""

    def ranks(rank: int) -> list[Tensor]:
        mesh = mesh_of(dp=shape[0], tp=shape[1])
        model, plain = three_units(mesh), three_layers()
        here = mesh["dp"].get_local_rank()
        model(data(0, here, 3, 8)).square().mean().backward()
        found = []
        for order in (2.0, 1.0, 0.0, float("inf"), 3.0):
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                theirs.grad = whole(ours.grad)
            wanted = nn.utils.get_total_norm([p.grad for p in plain.parameters()], order)
            torch.testing.assert_close(fc.grad_norm(model, order), wanted)
            wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, order)
            torch.testing.assert_close(fc.clip_grad_norm_(model, 0.01, order), wanted)
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(whole(ours.grad), theirs.grad)
        with torch.no_grad():
            model[1].weight.grad.mul_(1 + mesh["tp"].get_local_rank())
        for order in (2.0, 0.0, float("inf")):
            found.append(fc.clip_grad_norm_(model, 0.01, order))
        return found

    first, *others = run_ranks(ranks, shape[0] * shape[1])
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def add_partial_sum(layer: nn.Module) -> None:
    """Weight norm as torch before 2.14 has it over the split dimension of a row-parallel layer."""
    sums = DTensor.from_local(torch.ones(8, 1), layer.weight.device_mesh, [Partial()])
    layer.weight_g = nn.Parameter(sums)


def test_surgery_that_cannot_be_sharded_is_undone() -> None:
    """A parameter that is a partial sum is refused; the scope's end gives all back."""

    def ranks(rank: int) -> None:
        mesh = mesh_of(dp=1, tp=2)
        norms = (nn.utils.parametrizations.weight_norm, nn.utils.weight_norm)
        for norm in (add_partial_sum, *(norms if TORCH < (2, 14) else ())):
            model = two_layers(mesh)
            names = [name for name, _ in model.named_parameters()]
            before = [whole(param) for param in model.parameters()]
            keys = set(model[1].down.__dict__)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                with pytest.raises(ValueError, match=r"1.down.*placements .*as they were before"):
                    with torch.no_grad(), fc.gathered(model, writeback=True):
                        norm(model[1].down)
            assert type(model[1].down) is nn.Linear and set(model[1].down.__dict__) == keys
            assert [name for name, _ in model.named_parameters()] == names
            for ours, theirs in zip(model.parameters(), before, strict=True):
                assert torch.equal(whole(ours), theirs)
            backward(model, 0, 0)
            plain = two_layers()
            backward(plain, 0, 0)
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(whole(ours.grad), theirs.grad)

    run_ranks(ranks, 2)


# Meshes with a 1 in their shape

FLAT = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.ZERO1,
    ShardingStrategy.NO_SHARD,
)
HYBRID = (
    ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy.HYBRID_SHARD_ZERO2,
    ShardingStrategy.HYBRID_SHARD_OPTIMIZER,
)


def train_on(
    rank: int,
    shapes: list[tuple[int, int, int, int]],
    strategies: tuple[ShardingStrategy, ...] = (*FLAT, *HYBRID),
) -> None:
    """Each strategy on each (other, replicate, shard, tp), saved and clipped, as one process."""
    for shape in shapes:
        mesh = mesh_of(**dict(zip(("other", "replicate", "shard", "tp"), shape, strict=True)))
        for strategy in strategies:
            axes: Any = ("replicate", "shard") if strategy in HYBRID else ("shard",)
            if strategy in FLAT and shape[1] > 1:
                axes = ("replicate",)
                if shape[2] > 1:
                    continue

            def shard(model: nn.Module, axes: Any = axes, strategy: Any = strategy) -> None:
                plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
                for block in model.blocks:
                    parallelize_module(block, mesh["tp"], plan)
                by_block(model, mesh=mesh[axes], strategy=strategy)

            replicate, cut = (mesh[axis].get_local_rank() for axis in ("replicate", "shard"))
            twin = Twin(replicate * shape[2] + cut, shape[1] * shape[2], Tower, shard)
            for seed in range(2):
                twin.backward(square, seed)
                found = fc.clip_grad_norm_(twin.model, 0.1)
                wanted = nn.utils.clip_grad_norm_(twin.reference.parameters(), 0.1)
                torch.testing.assert_close(found, wanted)
                twin.step()
            twin.check()
            full = fc.state_dict(twin.model)
            for name, theirs in twin.reference.state_dict().items():
                torch.testing.assert_close(full[name], theirs)


def test_meshes_with_a_one_train_like_one_process() -> None:
    """A dimension of one rank cuts nothing, copies nothing and stops no synchronisation."""
    run_ranks(train_on, 1, [(1, 1, 1, 1)])
    run_ranks(train_on, 2, [(1, 1, 2, 1), (1, 2, 1, 1), (1, 1, 1, 2), (2, 1, 1, 1)], timeout=120)


@pytest.mark.slow
def test_meshes_with_a_dimension_of_one_train() -> None:
    """Meshes of four with a one; the strategies that differ most over two axes."""
    shapes = [(1, 1, 2, 2), (1, 2, 1, 2), (2, 1, 2, 1), (2, 2, 1, 1), (2, 1, 1, 2), (1, 1, 4, 1)]
    strategies = ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD_OPTIMIZER
    run_ranks(train_on, 4, shapes, strategies, timeout=240)
