"""Torch's own getters and setters of state dicts are right on sharded models, or name ours."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as fsdp2
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as api
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fsdp_compose as fc

from harness import run_ranks
from models import Tower, by_block, seeded, whole

FULL = {"full_state_dict": True}
OFFLOAD = {"full_state_dict": True, "cpu_offload": True}
BROADCAST = {"full_state_dict": True, "broadcast_from_rank0": True}


def step(model: nn.Module, optim: Any, *seeds: int) -> None:
    """The same whole gradients wherever the model runs."""
    for seed in seeds:
        for index, p in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * seed + index)
            grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            is_fsdp2 = type(p.data) is DTensor
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if is_fsdp2 else grad
        optim.step()
        optim.zero_grad()


def adamw(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def plain_run() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(Tower)
    optim = adamw(model)
    step(model, optim, 0, 1)
    return model, optim


def sharded_run(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = by_block(seeded(Tower), **options)
    optim = adamw(model)
    step(model, optim, 0, 1)
    return model, optim


def assert_equal(found: Any, wanted: Any, where: str = "") -> None:
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key in wanted:
            assert_equal(found[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, Tensor):
        assert type(found) is Tensor and torch.equal(found, wanted), where
    else:
        assert found == wanted, where


def test_getters_equal_those_of_the_plain_model() -> None:
    """Full with and without offload, as flat keys, and sharded values that know the whole."""

    def body(rank: int) -> None:
        plain = plain_run()
        model, optim = sharded_run()
        for options in (FULL, OFFLOAD, {**FULL, "flatten_optimizer_state_dict": True}):
            chosen = api.StateDictOptions(**options)
            wanted = api.get_state_dict(*plain, options=chosen)
            found = api.get_state_dict(model, optim, options=chosen)
            assert_equal(api.get_model_state_dict(model, options=chosen), dict(found[0]))
            if rank and chosen.cpu_offload:
                assert found == ({}, {})
            else:
                assert_equal(dict(found[0]), dict(wanted[0]), "model")
                assert_equal(found[1], wanted[1], "optim")
        for options in ({}, {"cpu_offload": True}):
            chosen = api.StateDictOptions(**options)
            weights, state = api.get_state_dict(model, optim, options=chosen)
            for name, value in plain[0].state_dict().items():
                assert torch.equal(weights[name].full_tensor(), value)
            moment = state["state"]["first.weight"]["exp_avg"]
            assert torch.equal(moment.full_tensor(), plain[1].state_dict()["state"][0]["exp_avg"])

    run_ranks(body, 2)


@pytest.mark.parametrize("source", ["plain", "sharded"])
def test_setters_resume(source: str) -> None:
    """From full state on all ranks, on rank 0 alone, and from live slices."""

    def body(rank: int) -> None:
        plain, reference = plain_run()
        live, its_optim = sharded_run()
        for options in (FULL, BROADCAST, {}) if source == "sharded" else (FULL, BROADCAST):
            chosen = api.StateDictOptions(**options)
            got = api.StateDictOptions(full_state_dict=chosen.full_state_dict)
            given = api.get_state_dict(
                *((plain, reference) if source == "plain" else (live, its_optim)), options=got
            )
            given = copy.deepcopy(given) if not (rank and chosen.broadcast_from_rank0) else ({}, {})
            for stepped in (False, True):  # whether the optimizer has state of its own
                model = by_block(seeded(Tower, seed=5))
                optim = adamw(model, lr=0.5)
                if stepped:
                    step(model, optim, 7)
                given_now = copy.deepcopy(given)
                # Not set_state_dict, which passes the model over where a rank has no state.
                api.set_model_state_dict(model, given_now[0], options=chosen)
                api.set_optimizer_state_dict(model, optim, given_now[1], options=chosen)
                ahead, its = copy.deepcopy((plain, reference))
                step(model, optim, 2, 3)
                step(ahead, its, 2, 3)
                for mine, theirs in zip(model.parameters(), ahead.parameters(), strict=True):
                    assert torch.equal(whole(mine), theirs), (options, stepped)

    run_ranks(body, 2)


def test_tensor_parallel_models_get_and_set() -> None:
    def parallel(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = seeded(Tower, seed)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], plan)
        return by_block(model, mesh=mesh["dp"]), adamw(model, lr=0.5)

    def body(rank: int) -> None:
        plain, full = plain_run(), api.StateDictOptions(**FULL)
        wanted = api.get_state_dict(*plain, options=full)
        for options in (FULL, BROADCAST):
            model, optim = parallel(seed=5)
            chosen = api.StateDictOptions(**options)
            given = copy.deepcopy(wanted) if options is FULL or rank == 0 else ({}, {})
            api.set_model_state_dict(model, given[0], options=chosen)
            api.set_optimizer_state_dict(model, optim, given[1], options=chosen)
            assert_equal(dict(api.get_model_state_dict(model, options=full)), dict(wanted[0]))
            found = api.get_optimizer_state_dict(model, optim, options=full)
            assert_equal(found["state"], wanted[1]["state"])

    run_ranks(body, 4)


def test_what_the_getters_would_miss_is_refused() -> None:
    """An owner's state, plain parameters over slices, and ranks with other orders."""

    def body(rank: int) -> None:
        chosen = api.StateDictOptions(**FULL)
        for make in (
            lambda m: fc.owner_step([p for p in m.parameters() if p.ndim == 2], torch.optim.SGD),
            lambda m: torch.optim.Adam(fc.local_parameters(m)),
            lambda m: torch.optim.Adam(fc.flat_parameters(m)),
        ):
            model = by_block(seeded(Tower))
            optim = make(model)
            with pytest.raises(RuntimeError, match=r"fsdp_compose.optim_state_dict\(module"):
                api.get_optimizer_state_dict(model, optim, options=chosen)
        params = list(model.parameters())[:: 1 if rank else -1]
        optim = torch.optim.Adam(params)
        step(model, optim, 0)
        with pytest.raises(RuntimeError, match="list the parameters in different orders"):
            api.get_optimizer_state_dict(model, optim, options=chosen)

    run_ranks(body, 2)


def test_loading_other_layouts_is_refused() -> None:
    """Built before and after sharding, never stepped; whole, other ranks' and other cuts."""

    def body(rank: int) -> None:
        whole_state = plain_run()[1].state_dict()
        rows = sharded_run(granularity="row")[1].state_dict()
        from_one = sharded_run(mesh=init_device_mesh("cpu", (2, 1)))[1].state_dict()
        live, its_optim = sharded_run()
        fits = its_optim.state_dict()
        before = seeded(Tower)
        optims = [adamw(before, lr=0.5)]
        optims += [torch.optim.Adam(before.parameters(), fused=True)]
        by_block(before)
        optims += [adamw(before), torch.optim.NAdam(before.parameters())]
        for optim in optims:
            for given in (whole_state, rows, from_one):
                kept = copy.deepcopy(optim.state_dict()["param_groups"])
                with pytest.raises(RuntimeError, match=r"'exp_avg' of .*load_optim_state_dict"):
                    optim.load_state_dict(copy.deepcopy(given))
                assert not optim.state and optim.state_dict()["param_groups"] == kept
        optims[0].load_state_dict(copy.deepcopy(fits))
        step(before, optims[0], 2)
        # Plain parameters over slices: in the first step, and while loading from then on.
        local = torch.optim.AdamW(fc.local_parameters(before))
        local.load_state_dict(copy.deepcopy(whole_state))
        with pytest.raises(RuntimeError, match=r"another layout. Call .*load_optim_state_dict"):
            local.step()
        with pytest.raises(RuntimeError, match=r"another layout. Call .*load_optim_state_dict"):
            local.load_state_dict(copy.deepcopy(whole_state))
        fc.load_optim_state_dict(before, local, fc.optim_state_dict(live, its_optim))
        step(before, local, 3)

    run_ranks(body, 2)


FLAT = api.StateDictOptions(flatten_optimizer_state_dict=True)


def in_groups(model: nn.Module) -> torch.optim.Optimizer:
    vectors = {"params": [p for p in model.parameters() if p.ndim < 2], "lr": 0.02}
    matrices = {"params": [p for p in model.parameters() if p.ndim > 1], "betas": (0.8, 0.9)}
    return torch.optim.AdamW([vectors, matrices], lr=0.01)


@pytest.mark.parametrize(
    ("top", "make"), [("optim", adamw), ("optimizer", in_groups), (None, in_groups)]
)
def test_flattened_optimizer_state_loads(top: str | None, make: Any, tmp_path: Any) -> None:
    """As torchtitan saves it: one key for each value, in a folder or as a dictionary."""

    def ranks(rank: int) -> None:
        plain = seeded(Tower)
        fsdp2.fully_shard(plain)
        theirs = make(plain)
        step(plain, theirs, 0, 1)
        weights, flat = api.get_state_dict(plain, theirs, options=FLAT)
        saved = {"model": weights, **({top: flat} if top else flat)}
        dcp.save(saved, checkpoint_id=tmp_path)
        for from_file in (True, False):
            model = by_block(seeded(Tower, seed=1))
            optim = make(model)
            optim.param_groups[0]["lr"] = 7.0
            if from_file:
                fc.load_checkpoint(tmp_path, model, optim)
            else:
                api.set_model_state_dict(model, weights)
                fc.load_optim_state_dict(model, optim, flat)
            assert optim.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
            reference = seeded(Tower)
            own = make(reference)
            step(reference, own, 0, 1, 2)
            step(model, optim, 2)
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(whole(p), q.detach())

    run_ranks(ranks, 2)


def test_flattened_state_without_settings_is_refused() -> None:
    def ranks(rank: int) -> None:
        model, optim = sharded_run()
        flat = api.get_optimizer_state_dict(model, optim, options=FLAT)
        only = {k: v for k, v in flat.items() if not k.startswith("param_groups.first.bias")}
        assert len(only) < len(flat)
        with pytest.raises(ValueError, match=r"'state\.first\.bias\.\w+' is of no parameter"):
            fc.load_optim_state_dict(model, optim, only)

    run_ranks(ranks, 2)


def test_flattened_state_is_rekeyed() -> None:
    def ranks(rank: int) -> None:
        model, optim = sharded_run()
        flat = api.get_optimizer_state_dict(model, optim, options=FLAT)
        by_name = fc.rekey_optim_state_dict(flat, "name", model)
        assert by_name["state"].keys() == fc.optim_state_dict(model, optim)["state"].keys()
        numbers = fc.rekey_optim_state_dict(flat, "id", model)["param_groups"][0]["params"]
        assert numbers == list(range(len(by_name["state"])))

    run_ranks(ranks, 1)


def test_a_sharded_parameter_lies_on_no_mesh() -> None:
    """The loop of FSDP2's tutorial says what to call in its place."""
    full = nn.Linear(2, 2).state_dict()
    model = fc.fully_shard(nn.Linear(2, 2))
    value = model.state_dict()["weight"]
    with pytest.raises(AttributeError, match=r"give model\.load_state_dict whole tensors"):
        distribute_tensor(full["weight"], value.device_mesh, value.placements)
    assert not hasattr(model.weight, "placements")
    model.load_state_dict(full)
    assert torch.equal(model.weight.full_tensor(), full["weight"])
