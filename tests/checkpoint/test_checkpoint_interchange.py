"""What torch's FSDP1, FSDP2 and plain modules save loads here, and what we save loads there."""

from __future__ import annotations

import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OlderProperties
from torch.distributed.checkpoint import state_dict as dsd

import fsdp_compose as fc
from fsdp_compose.checkpoint import (
    load_checkpoint,
    load_optim_state_dict,
    load_state_dict,
    optim_state_dict,
    save_checkpoint,
    state_dict,
)

from harness import run_ranks
from saved import equal, train


class Net(nn.Module):
    """What both of torch's accept: no scalar, no strided parameter."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a = nn.Linear(3, 5)
        self.b = nn.Linear(5, 3)
        self.register_buffer("kept", torch.randn(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def ours(seed: int = 0) -> Net:
    model = Net(seed)
    fc.fully_shard(model.a)
    return fc.fully_shard(model)


def theirs2(seed: int = 0) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Net(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.a, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def theirs1(seed: int = 0) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    # Not use_orig_params=True: where one rank holds none of a parameter, torch 2.13 then gathers
    # that parameter's exp_avg_sq as its exp_avg.
    policy = ModuleWrapPolicy({nn.Linear})
    return FSDP1(Net(seed), device_id=torch.device("cpu"), auto_wrap_policy=policy)


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    """torch's own warnings about its own functions."""
    with warnings.catch_warnings():
        for kind in (UserWarning, FutureWarning, DeprecationWarning):
            warnings.simplefilter("ignore", kind)
        yield


def trained_ours() -> tuple[Net, Any]:
    model = ours()
    optim = adamw(model)
    train(model, optim, 3)
    return model, optim


def reference() -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    """Weights and state after three steps, and the losses of the next three."""
    model, optim = trained_ours()
    return dict(state_dict(model)), optim_state_dict(model, optim), train(model, optim, 3, first=3)


def test_fsdp2_saves_and_we_load(tmp_path: Path) -> None:
    def run(rank: int, nested: bool) -> None:
        weights, state, ahead = reference()
        model = theirs2()
        optim = adamw(model)
        train(model, optim, 3)
        saved = {"model": dsd.get_model_state_dict(model)}
        if nested:
            saved["optim"] = dsd.get_optimizer_state_dict(model, optim)
        else:
            saved = saved["model"]
        dcp.save(saved, checkpoint_id=tmp_path / str(nested))
        dist.barrier()
        mine = ours(5)
        my_optim = adamw(mine)
        load_checkpoint(tmp_path / str(nested), mine, my_optim if nested else None)
        equal(dict(state_dict(mine)), weights)
        if nested:
            equal(by_key(optim_state_dict(mine, my_optim)["state"]), by_key(state["state"]))
            assert train(mine, my_optim, 3, first=3) == ahead
        load_state_dict(mine, ours(4).state_dict())
        mine.load_state_dict(dsd.get_model_state_dict(model))
        load_optim_state_dict(mine, my_optim, dsd.get_optimizer_state_dict(model, optim))
        assert train(mine, my_optim, 3, first=3) == ahead

    run_ranks(run, 2, True)
    run_ranks(run, 2, False)


def by_key(state: dict[str, Any]) -> dict[str, Any]:
    return {n: dict(sorted(v.items())) for n, v in sorted(state.items())}


def test_we_save_and_fsdp2_loads(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        model, optim = trained_ours()
        save_checkpoint(tmp_path, model, optim, extra={"step": 3})
        ahead = train(model, optim, 3, first=3)
        other = theirs2(5)
        other_optim = adamw(other)
        train(other, other_optim, 1)  # DCP loads in place: the state must be there
        loaded = {
            "model": dsd.get_model_state_dict(other),
            "optim": dsd.get_optimizer_state_dict(other, other_optim),
        }
        dcp.load(loaded, checkpoint_id=tmp_path)
        dsd.set_model_state_dict(other, loaded["model"])
        dsd.set_optimizer_state_dict(other, other_optim, loaded["optim"])
        assert train(other, other_optim, 3, first=3) == ahead

    run_ranks(run, 2)


def test_torchs_checkpoint_reshards_our_state_dicts(tmp_path: Path) -> None:
    """``dcp.save({"model": model.state_dict(), ...})``, as people write it."""

    def put(rank: int) -> Any:
        model, optim = trained_ours()
        dcp.save({"model": model.state_dict(), "optim": optim.state_dict()}, checkpoint_id=tmp_path)
        return reference()

    def get(rank: int, want: Any) -> None:
        model = fc.fully_shard(Net(5))
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path)
        model.load_state_dict(state["model"])
        equal(dict(state_dict(model)), want[0])
        optim = adamw(model)
        load_checkpoint(tmp_path, model, optim)  # its optimizer is by number
        assert train(model, optim, 3, first=3) == want[2]

    want = run_ranks(put, 2)[0]
    run_ranks(get, 1, want)
    run_ranks(get, 2, want)


def test_fsdp1_full_both_ways() -> None:
    def run(rank: int) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
        from torch.distributed.fsdp import StateDictType

        weights, state, ahead = reference()
        model = theirs1()
        optim = adamw(model)
        train(model, optim, 3)
        with FSDP1.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            full, full_optim = model.state_dict(), FSDP1.optim_state_dict(model, optim)
        mine = ours(5)
        my_optim = adamw(mine)
        load_state_dict(mine, full)
        load_optim_state_dict(mine, my_optim, full_optim)
        equal(dict(state_dict(mine)), weights)
        equal(by_key(optim_state_dict(mine, my_optim)["state"]), by_key(state["state"]))
        assert train(mine, my_optim, 3, first=3) == ahead
        other = theirs1(5)
        other_optim = adamw(other)
        with FSDP1.state_dict_type(other, StateDictType.FULL_STATE_DICT):
            other.load_state_dict(weights)
            other_optim.load_state_dict(FSDP1.optim_state_dict_to_load(other, other_optim, state))
        assert train(other, other_optim, 3, first=3) == ahead

    run_ranks(run, 2)


def test_plain_module_files_both_ways(tmp_path: Path) -> None:
    """torch.save of a plain run loads here; ``kind="full"`` saved here loads into a plain run."""
    plain = Net()
    optim = adamw(plain)
    train(plain, optim, 3)
    torch.save({"model": plain.state_dict(), "optim": optim.state_dict()}, tmp_path / "plain.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": plain.state_dict()}, checkpoint_id=tmp_path / "dcp")
    ahead = train(plain, optim, 3, first=3)

    def run(rank: int) -> None:
        saved = torch.load(tmp_path / "plain.pt", weights_only=True)
        model = ours(5)
        my_optim = adamw(model)
        model.load_state_dict(saved["model"])
        load_optim_state_dict(model, my_optim, saved["optim"])
        full, state = state_dict(model), optim_state_dict(model, my_optim)
        assert train(model, my_optim, 3, first=3) == ahead
        if rank == 0:
            numbered = fc.checkpoint.rekey_optim_state_dict(state, "id", model)
            torch.save({"model": full, "optim": numbered}, tmp_path / "ours.pt")
        model = ours(6)
        load_checkpoint(tmp_path / "dcp", model)
        equal(dict(state_dict(model)), dict(saved["model"]))

    run_ranks(run, 2)
    saved = torch.load(tmp_path / "ours.pt", weights_only=True)
    again = Net(5)
    again.load_state_dict(saved["model"])
    again_optim = adamw(again)
    again_optim.load_state_dict(saved["optim"])
    assert train(again, again_optim, 3, first=3) == ahead


def test_what_other_programs_save_beside_the_model(tmp_path: Path) -> None:
    """An ``extra`` of their own is passed by; two models that are alike are not chosen between."""

    def run(rank: int) -> None:
        first, second = fc.fully_shard(Net()), fc.fully_shard(Net(1))
        dcp.save(
            {"model": first.state_dict(), "extra": {"step": 3, "0": torch.ones(2)}},
            checkpoint_id=str(tmp_path / "extra"),
        )
        model = fc.fully_shard(Net(2))
        assert load_checkpoint(tmp_path / "extra", model) is None
        equal(state_dict(model), state_dict(first))
        both = {"student": first.state_dict(), "teacher": second.state_dict()}
        dcp.save(both, checkpoint_id=str(tmp_path / "two"))
        match = "'student' and 'teacher' both have the names of this module"
        with pytest.raises(RuntimeError, match=match):
            load_checkpoint(tmp_path / "two", model)
        dcp.load({"teacher": model.state_dict()}, checkpoint_id=str(tmp_path / "two"))
        equal(state_dict(model), state_dict(second))
        dcp.save({**both, "model": both["teacher"]}, checkpoint_id=str(tmp_path / "three"))
        load_checkpoint(tmp_path / "three", model)
        equal(state_dict(model), state_dict(second))
        save_checkpoint(tmp_path / "ours", first)
        dcp.save({"model": second.state_dict()}, checkpoint_id=str(tmp_path / "ours"))
        load_checkpoint(tmp_path / "ours", model)  # what torch saved over it
        equal(state_dict(model), state_dict(second))
        save_checkpoint(tmp_path / "ours", first)
        load_checkpoint(tmp_path / "ours", model)
        equal(state_dict(model), state_dict(first))

    run_ranks(run, 2)
    file = tmp_path / "ours" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    for entry in metadata.state_dict_metadata.values():
        entry.properties = OlderProperties(entry.properties.dtype)
    shutil.copytree(tmp_path / "ours", tmp_path / "older")
    (tmp_path / "older" / ".metadata").write_bytes(pickle.dumps(metadata))  # as torch 2.2 wrote it
    for manifest in (tmp_path / "older").glob("*/manifest.json"):
        manifest.unlink()
    model = Net(2)
    load_checkpoint(tmp_path / "older", model)
    equal(model.state_dict(), Net().state_dict())
