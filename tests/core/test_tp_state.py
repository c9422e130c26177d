"""Model and optimizer state of tensor-parallel models: saved once, loaded on other meshes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fsdp_compose
from fsdp_compose import fully_shard, undo, wrap
from fsdp_compose.sharded import ShardedWeightError, is_sharded

from harness import rank_errors, run_ranks
from tp_models import (
    _PLAN,
    LM,
    MLP,
    STEPS,
    Block,
    adamw,
    assert_equal,
    language_model,
    mesh_of,
    parallelize,
    sgd,
    sharded_lm,
    tokens_of,
    train,
    train_plain,
    whole,
)


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
        torch.manual_seed(0)  # the second is cut over all ranks, so that none repeats a slice of it
        pair = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        wanted = copy.deepcopy(pair)
        mesh = mesh_of(dp=2, tp=2)
        parallelize_module(pair[0], mesh["tp"], ColwiseParallel())
        everywhere = wrap.by_fn(lambda n, m: n == "1" and {"mesh": dist.group.WORLD})
        fully_shard(pair, mesh=mesh["dp"], units=everywhere)
        fsdp_compose.save_checkpoint(tmp_path / "pair", pair)
        with torch.no_grad():
            for param in pair.parameters():
                param.zero_()
        fsdp_compose.load_checkpoint(tmp_path / "pair", pair)
        assert_equal(pair, wanted)

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
            with pytest.raises(ShardedWeightError, match="needs the whole"):
                module.p.detach().view(torch.uint8)
            module.p.grad = 2 * values
            torch.testing.assert_close(fsdp_compose.grad_norm(module), (2 * values).norm())
            assert fsdp_compose.grad_norm(module, torch.inf) == 28
            torch.testing.assert_close(module.p.grad.norm(), (2 * values).norm())
            total = torch.nn.utils.get_total_norm([module.p.grad], foreach=True)
            torch.testing.assert_close(total, (2 * values).norm())
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


@pytest.mark.parametrize("fused", [None, True], ids=["foreach", "fused"])
def test_optimizers_that_are_built_afterwards(fused: bool | None) -> None:
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


def test_an_error_reaches_ranks_of_other_parts() -> None:
    """An error on one rank reaches those that hold other parts."""

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
        for report in (planned, found):
            (note,) = [n for n in report.notes if n.startswith("tensor parallelism splits 16 ")]
            assert "over 2 ranks" in note and "this rank's part" in note
        local = sum(p.to_local().numel() for p in undo(model).parameters())
        assert sum(b.numel for b in planned.buckets) == local
        assert sum(b.numel for b in found.buckets) == local

    run_ranks(check, 4)
