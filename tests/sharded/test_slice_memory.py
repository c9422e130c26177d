"""Memory of a slice is never handed out as the whole: savers and converters get an error."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp_compose as fc
from fsdp_compose.sharded import ShardedParameter, ShardedWeightError, is_sharded

from harness import TORCH, run_ranks
from models import WIDTH, Tower, by_block, data, seeded, square


def save_torch(tensor: Any) -> None:
    torch.save({"w": tensor}, io.BytesIO())


def save_numpy(tensor: Any) -> None:
    import numpy as np

    np.savez(io.BytesIO(), w=tensor)


def save_safetensors(tensor: Any) -> None:
    import safetensors.torch as st

    st.save({"w": tensor})


READERS: list[Callable[[Any], Any]] = [
    lambda t: t.data_ptr(),
    lambda t: t.untyped_storage(),
    lambda t: t.storage(),
    lambda t: t._typed_storage(),
    lambda t: t.storage_offset(),
    lambda t: t.is_set_to(t),
    lambda t: t.numpy(),
    lambda t: t.numpy(force=True),
    lambda t: t.__array__(),
    lambda t: t.__dlpack__(),
    lambda t: t.__dlpack_device__(),
    lambda t: torch.from_dlpack(t),
    lambda t: t.__cuda_array_interface__,
    lambda t: t.as_subclass(torch.Tensor),
    lambda t: t.cpu().data_ptr(),
    lambda t: t.contiguous().untyped_storage(),
    lambda t: t.new_zeros(t.shape).data_ptr(),
    save_torch,
    pickle.dumps,
]
if TORCH >= (2, 13):
    READERS.append(lambda t: t.const_data_ptr())


def trained(model: nn.Module, rank: int, width: int = WIDTH) -> torch.optim.Optimizer:
    optim = torch.optim.AdamW(model.parameters(), 1e-2)
    square(model, data(0, rank)).backward()
    optim.step()
    return optim


def slices(model: nn.Module, optim: torch.optim.Optimizer) -> list[Any]:
    """Every kind of slice a user has in hand."""
    param = next(p for p in model.parameters() if p.ndim == 2)
    name = next(n for n, p in model.named_parameters() if p is param)
    found = [param, param.data, param.detach(), param.grad, optim.state[param]["exp_avg"]]
    found += [model.state_dict()[name], optim.state_dict()["state"][0]["exp_avg_sq"]]
    found += [fc.state_dict(model, "sharded")[name], param.detach() * 2]
    assert all(is_sharded(t) for t in found)
    return found


def refused(tensors: list[Any], *more: Callable[[Any], Any]) -> None:
    for tensor in tensors:
        for index, read in enumerate((*READERS, *more)):
            with pytest.raises(ShardedWeightError) as caught:
                read(tensor)
            text = str(caught.value)
            assert "save_full" in text and "kind='full'" in text, (index, text)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_memory_of_a_slice_is_an_error(strategy: str) -> None:
    """Of parameters, gradients, state-dict values, optimizer state; to_local() gives it."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower), strategy=fc.ShardingStrategy[strategy])
        optim = trained(model, rank)
        refused(slices(model, optim))
        assert all(p.data_ptr() or not p.numel() for p in fc.local_parameters(model))
        full = fc.state_dict(model, "full")
        torch.save(full, io.BytesIO())
        torch.save(fc.optim_state_dict(model, optim, "full"), io.BytesIO())

    run_ranks(ranks, 2)


def test_memory_of_a_tensor_parallel_slice_is_an_error() -> None:
    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        model = fc.fully_shard(parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp"])
        optim = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 8)).sum().backward()
        optim.step()
        refused(slices(model, optim))

    run_ranks(ranks, 4)


def test_other_savers_write_nothing(tmp_path: Path) -> None:
    """safetensors would write heap bytes, and take slices of one bucket for tied weights."""
    pytest.importorskip("safetensors")
    pytest.importorskip("numpy")

    def ranks(rank: int) -> None:
        import safetensors.torch as st

        model = by_block(seeded(Tower))
        optim = trained(model, rank)
        refused(slices(model, optim), save_numpy, save_safetensors)
        for save in (
            lambda f: st.save_model(model, f),
            lambda f: st.save_file(model.state_dict(), f),
            lambda f: st.save_file({n: p.data for n, p in model.named_parameters()}, f),
        ):
            with pytest.raises(ShardedWeightError, match="save_full"):
                save(str(tmp_path / f"bad{rank}.safetensors"))
        assert not list(tmp_path.iterdir())
        torch.distributed.barrier()
        st.save_file(fc.state_dict(model, "full"), str(tmp_path / f"good{rank}.safetensors"))
        found = st.load_file(str(tmp_path / f"good{rank}.safetensors"))
        for name, param in model.named_parameters():
            assert torch.equal(found[name], param.full_tensor())

    run_ranks(ranks, 2)


class Copies(AsyncStager):
    """What the error says a stager has to do."""

    should_synchronize_after_execute = False

    def stage(self, state_dict: Any) -> Any:
        return {name: value.detach().clone() for name, value in state_dict.items()}

    def synchronize_staging(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is held."""


def test_async_save_never_writes_the_heap(tmp_path: Path) -> None:
    """Its stager copied whole tensors from a slice's address: other memory, of the right shape."""

    def ranks(rank: int) -> None:
        model, loaded = by_block(seeded(Tower)), by_block(Tower())
        group = torch.distributed.new_group(backend="gloo")
        options: Any = {"checkpoint_id": tmp_path / "c", "process_group": group}
        writers = (FileSystemWriter(tmp_path, cache_staged_state_dict=c) for c in (True, False))
        for storage in ({}, *({"storage_writer": writer} for writer in writers)):
            with pytest.raises(Exception, match=r"async_stager=.*value\.detach\(\)\.clone\(\)"):
                dcp.async_save(model.state_dict(), **options, **storage).result()
        assert not hasattr(model.first.weight, "_local_tensor")
        wanted = {n: p.full_tensor() for n, p in model.named_parameters()}
        saving = dcp.async_save(model.state_dict(), async_stager=Copies(), **options)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        saving.result()
        dcp.load(loaded.state_dict(), **options)
        for name, param in loaded.named_parameters():
            assert torch.equal(param.full_tensor(), wanted[name])

    run_ranks(ranks, 2)


def test_flatten_parameters_leaves_slices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA ``to`` and deepcopy of an LSTM ask for addresses; here it only believes so."""

    def ranks(rank: int) -> None:
        model = fc.fully_shard(nn.LSTM(4, 4))
        monkeypatch.setattr(ShardedParameter, "is_cuda", True)
        monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: True)
        before = [p.to_local().data_ptr() for p in model.parameters()]
        model.flatten_parameters()
        twin = copy.deepcopy(model).to(torch.float32)
        monkeypatch.undo()
        assert torch.equal(twin(torch.ones(1, 1, 4))[0], model(torch.ones(1, 1, 4))[0])
        assert before == [p.to_local().data_ptr() for p in model.parameters()]

    run_ranks(ranks, 2)


def test_accelerate_save_model_is_refused(tmp_path: Path) -> None:
    """It would write 3 of 16 tensors, one of them wrong."""
    pytest.importorskip("accelerate")

    def ranks(rank: int) -> None:
        from accelerate import Accelerator

        model = by_block(seeded(Tower))
        with pytest.raises(ShardedWeightError, match="save_full"):
            Accelerator(cpu=True).save_model(model, str(tmp_path))
        assert not list(tmp_path.iterdir())

    run_ranks(ranks, 2)


def test_torch_save_takes_what_a_rank_asked_for() -> None:
    """``kind="local"`` is for one file per rank; copies and moves of it are, too."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        optim = trained(model, rank)
        for saved in (
            fc.state_dict(model, "local"),
            fc.optim_state_dict(model, optim, "local"),
            {k: v.cpu().clone() for k, v in fc.state_dict(model, "local").items() if is_sharded(v)},
        ):
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            torch.save(torch.load(file, weights_only=True), io.BytesIO())
        with pytest.raises(
            ShardedWeightError, match=r"optim_state_dict\(model, optim, kind='full'"
        ):
            torch.save(optim.state_dict(), io.BytesIO())
        with pytest.raises(ShardedWeightError, match="broadcast_object_list"):
            torch.distributed.broadcast_object_list([next(iter(model.parameters()))], src=rank)

    run_ranks(ranks, 2)
