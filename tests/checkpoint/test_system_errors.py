"""What the file system and the system refuse, before, in and after the commit of a save."""

from __future__ import annotations

import io
import logging
import os
import resource
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_compose as fc
from fsdp_compose.checkpoint import dcp, files, metadata
from fsdp_compose.checkpoint.formats.safetensors import write_at
from fsdp_compose.checkpoint.ranks import find_shortage
from fsdp_compose.checkpoint.source import CheckpointSource

from harness import run_ranks


def model_of(value: float) -> nn.Module:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    return fc.fully_shard(model)


def refuse(call: str, name: str, patch: pytest.MonkeyPatch) -> None:
    """``call`` of ``os`` or ``Path`` raises for files of this name."""
    owner: Any = os if hasattr(os, call) and call == "replace" else Path
    real = getattr(owner, call)

    def act(*args: Any, **kwargs: Any) -> Any:
        if name in str(args[-1] if call == "replace" else args[0]):
            raise PermissionError(13, "Permission denied", str(args[0]))
        return real(*args, **kwargs)

    patch.setattr(owner, call, act)


def loaded(path: Path, load: Callable[..., Any]) -> float:
    model = model_of(0)
    load(path, model)
    return float(model.weight.full_tensor()[0, 0])


def test_save_checkpoint_succeeds_where_old_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder held a checkpoint of torch's, a file of which cannot be removed."""
    (tmp_path / "__0_0.distcp").write_bytes(b"of torch")
    refuse("unlink", "__0_0.distcp", monkeypatch)
    with caplog.at_level(logging.WARNING, "fsdp_compose"):
        fc.save_checkpoint(tmp_path, model_of(2))
    assert "the save is complete" in caplog.text and "__0_0.distcp" in caplog.text
    assert loaded(tmp_path, fc.load_checkpoint) == 2


def test_what_fails_after_the_commit_keeps_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder that the metadata names by then is not removed with the failed save."""
    real = files.sync_folder

    def interrupt(path: Path) -> None:
        real(path)
        if path == tmp_path:
            raise KeyboardInterrupt

    monkeypatch.setattr(files, "sync_folder", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fc.save_checkpoint(tmp_path, model_of(2))
    assert loaded(tmp_path, fc.load_checkpoint) == 2


class Slow(io.BytesIO):
    """A file that takes three bytes at a time; the system's take no 2 GiB at once."""

    def write(self, data: Any) -> int:
        return super().write(bytes(data[:3]))


def test_all_of_a_tensor_is_written() -> None:
    file = Slow(b"....")
    write_at(file, 2, memoryview(b"abcdefgh"))
    assert file.getvalue() == b"..abcdefgh"


@pytest.mark.parametrize(
    ("call", "name", "size"),
    [("unlink", "model-00001-of", 30), ("iterdir", "", 30), ("iterdir", "", 10**9)],
)
def test_save_full_succeeds_where_old_files_stay(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
    name: str,
    size: int,
) -> None:
    fc.save_full(tmp_path, model_of(1), max_file_bytes=30)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "fsdp_compose"):
        refuse(call, name or str(tmp_path), patch)
        fc.save_full(tmp_path, model_of(2), max_file_bytes=size)
    assert "the save is complete" in caplog.text
    assert loaded(tmp_path, fc.load_full) == 2
    fc.save_full(tmp_path, model_of(3), max_file_bytes=size)
    assert loaded(tmp_path, fc.load_full) == 3
    names = {path.name for path in tmp_path.iterdir()}
    assert len(names) == (3 if size == 30 else 2), names


def test_the_index_of_one_file_may_stay_the_one_of_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is written before the file is replaced and after; what fails then fails no save."""
    fc.save_full(tmp_path, model_of(1))
    real, seen = os.replace, []

    def replace(source: Any, target: Any) -> None:
        seen.append(Path(target).name)
        if seen.count("model.safetensors.index.json") == 2:
            raise OSError(28, "No space left on device")
        real(source, target)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "fsdp_compose"):
        patch.setattr(os, "replace", replace)
        fc.save_full(tmp_path, model_of(2))
    assert "No space left on device" in caplog.text
    assert loaded(tmp_path, fc.load_full) == 2
    fc.save_full(tmp_path, model_of(3))
    assert loaded(tmp_path, fc.load_full) == 3


def test_refusals_are_runtime_errors_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    places = [tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("n" * 300)]

    def ranks(rank: int) -> list[str]:
        texts = []
        model = model_of(1)
        for place in places:
            with pytest.raises(RuntimeError, match="was not saved") as raised:
                fc.save_full(place, model)
            texts.append(str(raised.value))
        is_file = Path.is_file
        with pytest.MonkeyPatch.context() as patch:  # each rank sees a folder of its own there
            other = ("__1_0", "model-00002") if rank == 0 else ()
            patch.setattr(Path, "is_file", lambda f: not f.name.startswith(other) and is_file(f))
            for save in (fc.save_checkpoint, partial(fc.save_full, max_file_bytes=8)):
                with pytest.raises(RuntimeError, match="a file system that all ranks see"):
                    save(tmp_path / "own", model)
        if rank == 1:
            gone = tmp_path / "gone"
            gone.mkdir()
            os.chdir(gone)
            gone.rmdir()
        with pytest.raises(RuntimeError, match=r"was not saved|given different things") as raised:
            fc.save_full("here", model)
        return [*texts, str(raised.value)]

    for texts in run_ranks(ranks, 2):
        for place, text in zip(places, texts, strict=False):
            assert text.startswith(f"save_full: {place} was not saved: "), text
        assert "broadcast_from_rank0" not in texts[-1]


def test_nobody_waits_for_a_thread_that_never_ran(tmp_path: Path) -> None:
    def ranks(rank: int) -> float:
        model, start = model_of(4), threading.Thread.start

        def refuse_threads(thread: threading.Thread) -> None:
            if thread.name.startswith("save ") and rank == 1:
                raise RuntimeError("can't start new thread")
            start(thread)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse_threads)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                fc.save_checkpoint(tmp_path, model, asynchronous=True).wait()
        fc.save_checkpoint(tmp_path, model, asynchronous=True, timeout=10).wait()
        return loaded(tmp_path, fc.load_checkpoint)

    assert run_ranks(ranks, 2) == [4, 4]


def test_state_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    """Neither optimizer, of which the first had loaded, nor the model."""

    def ranks(rank: int) -> None:
        model = fc.fully_shard(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)))
        parts = [torch.optim.AdamW(part.parameters(), lr=0.1) for part in model]
        model(torch.ones(1, 3)).sum().backward()
        for part in parts:
            part.step()
        saved = fc.optim_state_dict(model, parts)
        with pytest.raises(TypeError, match="wanted a dictionary with"):
            fc.load_optim_state_dict(model, parts, {"state": None, "param_groups": None})
        saved["state"]["1.weight"]["step"] = None
        for group in saved["param_groups"]:
            group["lr"] = 0.7
        before = [(part.state, part.param_groups) for part in parts]
        with pytest.raises(RuntimeError, match=r"AdamW cannot read the state that.*float"):
            fc.load_optim_state_dict(model, parts, saved)
        for part, (state, groups) in zip(parts, before, strict=True):
            assert part.state is state and part.param_groups is groups
            assert groups[0]["lr"] == 0.1
            assert all(values["step"] == 1 for values in state.values())
        model(torch.ones(1, 3)).sum().backward()
        for part in parts:
            part.step()
        fc.load_optim_state_dict(model, parts, fc.optim_state_dict(model, parts))
        fc.save_checkpoint(tmp_path, model, parts)
        before = model[0].weight.full_tensor() + 1
        with torch.no_grad():
            model[0].weight.add_(1)
        states, setstate = [part.state for part in parts], torch.optim.AdamW.__setstate__

        def refuse_second(optim: Any, state: Any) -> None:
            setstate(optim, state) if optim is parts[0] else float("no number")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.optim.AdamW, "__setstate__", refuse_second)
            with pytest.raises(RuntimeError, match="AdamW cannot read the state that"):
                fc.load_checkpoint(tmp_path, model, parts)
        assert all(part.state is state for part, state in zip(parts, states, strict=True))
        assert torch.equal(model[0].weight.full_tensor(), before)

    run_ranks(ranks, 2)


def test_iter_full_ends_where_units_are_undone_or_made() -> None:
    def ranks(rank: int) -> None:
        for bucket_bytes in (1, 1 << 20):
            model = model_of(1)
            found = fc.iter_full(model, bucket_bytes)
            assert next(found)[0] == "weight"
            fc.undo(model)
            with pytest.raises(RuntimeError, match="'bias' was sharded or undone"):
                next(found)
            found = fc.iter_full(model, bucket_bytes)
            next(found)
            fc.fully_shard(model)
            with pytest.raises(RuntimeError, match="'bias' was sharded or undone"):
                next(found)
            found = fc.iter_full(model, bucket_bytes)
            next(found)
            with fc.gathered(model):
                assert next(found)[1].shape == (2,)

    run_ranks(ranks, 2)


@pytest.mark.parametrize("at", ["manifests", "verify", "read"])
def test_a_save_while_another_job_loads(
    tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says so, and the model is as it was; the next load is of the new one."""
    homes: dict[str, Any] = {"manifests": metadata, "verify": dcp, "read": CheckpointSource}
    for value in (2.0, 3.0):
        fc.save_checkpoint(tmp_path, model_of(value))
        model, real = model_of(0), getattr(homes[at], at)

        def act(*args: Any, real: Any = real, value: float = value, **kwargs: Any) -> Any:
            monkeypatch.setattr(homes[at], at, real)
            fc.save_checkpoint(tmp_path, model_of(value + 1))
            return real(*args, **kwargs)

        monkeypatch.setattr(homes[at], at, act)
        with pytest.raises(RuntimeError, match="another save replaced it while it was read"):
            fc.load_checkpoint(tmp_path, model)
        assert not model.weight.full_tensor().any()
        assert loaded(tmp_path, fc.load_checkpoint) == value + 1


def test_damage_is_not_taken_for_another_save(tmp_path: Path) -> None:
    fc.save_checkpoint(tmp_path, model_of(2))
    (tmp_path / next(tmp_path.glob("data-*")) / "__0_0.distcp").unlink()
    with pytest.raises(RuntimeError, match="missing; the checkpoint's metadata names it"):
        fc.load_checkpoint(tmp_path, model_of(0))


def test_a_rank_that_cannot_open_files_waits_for_none(tmp_path: Path) -> None:
    """A first save connects the ranks: without files for that on one, none does; all train on."""

    def ranks(rank: int) -> list[str]:
        model, errors = model_of(1), list[str]()
        model(torch.ones(1, 3)).sum().backward()  # maps the other rank's memory
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        opened: list[int] = []
        if rank == 1:
            limit = max(map(int, os.listdir("/proc/self/fd"))) + 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            with pytest.raises(OSError, match="Too many"):
                opened.extend(iter(lambda: os.open(os.devnull, os.O_RDONLY), None))
        for call in (fc.save_checkpoint, fc.save_full):
            with pytest.raises(RuntimeError) as found:
                call(tmp_path, model)
            errors.append(str(found.value))
        model(torch.ones(1, 3)).sum().backward()
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        fc.save_checkpoint(tmp_path, model)
        assert loaded(tmp_path, fc.load_checkpoint) == 1
        return errors

    first, second = run_ranks(ranks, 2)
    assert first == second
    for call, error in zip(("save_checkpoint", "save_full"), first, strict=True):
        assert f"{call}: rank 1 cannot open" in error and f"call {call} on every rank" in error


def test_files_for_ranks_that_connect_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gloo connects ranks as they meet, a world larger than the limit of files may save."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
    try:
        told = find_shortage(1000)
        monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
        told_late = find_shortage(1000)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert told == "cannot open 1008 more files (Too many open files)"
    assert told_late is None


def test_save_full_ends_well_whatever_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that cannot look for what it wrote has saved; the others would go on without it."""
    refuse("exists", ".saving-", monkeypatch)
    fc.save_full(tmp_path, model_of(2))
    assert loaded(tmp_path, fc.load_full) == 2
