"""Saves that end early: killed, interrupted, two at once. What loads is old or new, whole."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import fsdp_compose as fc
from fsdp_compose.__main__ import main
from fsdp_compose.checkpoint import SAFETENSORS, files, full, ranks
from fsdp_compose.checkpoint.formats import export, safetensors

from harness import rank_errors, run_ranks


def net(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    for param in model.parameters():
        nn.init.constant_(param, value)
    return model


def sharded(value: float = 0.0) -> nn.Module:
    model = net(value)
    for layer in model.children():
        fc.fully_shard(layer)
    return fc.fully_shard(model)


def value_of(model: nn.Module) -> float:
    """The one value that all parameters have."""
    values = {float(v) for param in fc.state_dict(model).values() for v in param.flatten()}
    assert len(values) == 1, values
    return values.pop()


def loaded(folder: Path, load: Callable[..., Any]) -> float:
    model = sharded()
    load(folder, model)
    return value_of(model)


# Killed at every step that touches the folder


@contextlib.contextmanager
def dying_at(step: int, act: Callable[[], None]) -> Iterator[list[int]]:
    """Calls ``act`` before the step with that number, of those that change the folder."""
    count = [0]

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == step:
                act()
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "PATIENCE", 0.1)
        for name in ("replace", "unlink", "mkdir", "truncate"):
            patch.setattr(os, name, counted(getattr(os, name)))
        patch.setattr(files.shutil, "rmtree", counted(files.shutil.rmtree))
        for module in (export, files):
            patch.setattr(module, "write_durably", counted(module.write_durably))
        patch.setattr(safetensors, "write_at", counted(safetensors.write_at))
        yield count


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(act: Callable[[], Any]) -> bool:
    """Runs ``act`` in a fork; whether it came to its end."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return status == 0


def plain_value(folder: Path) -> float:
    """What readers other than ours find: Hugging Face's order of names."""
    safetensors = pytest.importorskip("safetensors.torch")
    import json

    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    names = {single.name}
    if not single.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
    tensors = {k: v for n in names for k, v in safetensors.load_file(folder / n).items()}
    assert set(tensors) == set(net(0).state_dict())
    values = {float(v) for tensor in tensors.values() for v in tensor.flatten()}
    assert len(values) == 1
    return values.pop()


@pytest.mark.parametrize("before", [1 << 30, 50])
@pytest.mark.parametrize("after", [1 << 30, 50])
def test_save_full_killed_at_each_step(tmp_path: Path, before: int, after: int) -> None:
    """From one file or several to one or several: the old values or the new, then no leftovers."""
    seen: list[float] = []
    for step in range(1, 60):
        folder = tmp_path / str(step)
        fc.save_full(folder, net(1), max_file_bytes=before)

        def save(step: int = step, folder: Path = folder) -> None:
            with dying_at(step, die):
                fc.save_full(folder, net(2), max_file_bytes=after)

        finished = in_child(save)
        seen.append(loaded(folder, fc.load_full))
        assert plain_value(folder) == seen[-1]
        if finished:
            break
        fc.save_full(folder, net(3), max_file_bytes=after)
        assert plain_value(folder) == loaded(folder, fc.load_full) == 3
        assert len(list(folder.iterdir())) == (2 if after > 50 else 5), list(folder.iterdir())
    assert finished and seen[0] == 1 and seen[-1] == 2 and seen == sorted(seen)
    assert seen.count(2) > 1  # some came after the commit


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_save_checkpoint_killed_at_each_step(tmp_path: Path, before: bool, after: bool) -> None:
    """With checksums or without: the manifest of another save says nothing of what is loaded."""
    for step in range(1, 60):
        folder = tmp_path / str(step)
        fc.save_checkpoint(folder, sharded(1), checksum=before)

        def save(step: int = step, folder: Path = folder) -> None:
            with dying_at(step, die):
                fc.save_checkpoint(folder, sharded(2), checksum=after)

        finished = in_child(save)
        assert loaded(folder, fc.load_checkpoint) in (1, 2)
        if finished:
            break
        fc.save_checkpoint(folder, sharded(3))
        assert loaded(folder, fc.load_checkpoint) == 3
        assert len(list(folder.iterdir())) == 2
    assert finished and step > 4


def test_a_half_written_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A save was killed while it wrote that: what it was to replace loads."""
    fc.save_checkpoint(tmp_path, sharded(1), extra=7)
    for name, text in (("data-000000000000", ""), ("data-ffffffffffff", '{"format": 1,')):
        (tmp_path / name).mkdir()
        (tmp_path / name / files.MANIFEST).write_text(text)
    model = sharded()
    assert fc.load_checkpoint(tmp_path, model) == 7 and value_of(model) == 1
    assert main(["checkpoint", "show", "--verify", str(tmp_path)]) == 0
    assert "saved by 1 rank, every file as it was saved" in capsys.readouterr().out


@pytest.mark.parametrize("to_full", [True, False])
def test_convert_killed_at_each_step(tmp_path: Path, to_full: bool) -> None:
    """What a killed conversion leaves is no checkpoint, and the next one cleans it."""
    source = tmp_path / "source"
    if to_full:
        fc.save_checkpoint(source, sharded(1))
    else:
        fc.save_full(source, net(1))
    load = fc.load_full if to_full else fc.load_checkpoint
    for step in range(1, 60):
        target = tmp_path / str(step)
        command = ["checkpoint", "convert", str(source), str(target)]

        def convert(step: int = step, command: list[str] = command) -> None:
            with dying_at(step, die):
                assert main([*command, "--max-file-bytes", "50"]) == 0

        finished = in_child(convert)
        if finished:
            break
        committed = (target / (SAFETENSORS.index if to_full else ".metadata")).exists()
        assert main([*command, "--max-file-bytes", "50"]) == 2 * int(committed)
        assert loaded(target, load) == 1
        assert committed or not list(target.glob(".saving-*"))
        assert committed or len(list(target.glob("data-*"))) == int(not to_full)
    assert finished and step > 4


# Two jobs at once


@pytest.mark.parametrize("kind", ["full", "several", "checkpoint"])
def test_two_jobs_save_to_one_folder(tmp_path: Path, kind: str) -> None:
    """Each ends well or with an error that says so, and what loads is one of theirs, whole."""

    def save(value: float, folder: Path) -> None:
        if kind == "checkpoint":
            fc.save_checkpoint(folder, sharded(value))
        else:
            fc.save_full(folder, net(value), max_file_bytes=50 if kind == "several" else 1 << 30)

    load = fc.load_checkpoint if kind == "checkpoint" else fc.load_full
    for step in range(1, 60):
        folder = tmp_path / str(step)
        problems: list[str] = []
        ends: list[bool] = []
        with dying_at(step, lambda: ends.append(in_child(lambda: save(2, folder)))) as count:
            try:
                save(1, folder)
            except RuntimeError as error:
                problems.append(str(error))
        assert not problems or ends == [True], (step, problems)
        assert loaded(folder, load) in ((2,) if problems else (1, 2))
        assert all(str(folder) in problem for problem in problems)
        if count[0] < step:
            break
    assert step > 4


def test_jobs_that_race_leave_one_result(tmp_path: Path) -> None:
    """For real, without a schedule: eight processes, three saves each."""

    def save(rank: int) -> None:
        for turn in range(3):
            with contextlib.suppress(RuntimeError):
                fc.save_full(tmp_path / "full", net(rank), max_file_bytes=50)
            with contextlib.suppress(RuntimeError):
                fc.save_checkpoint(tmp_path / "dcp", sharded(rank + turn))

    run_ranks(save, 4, init=False)
    assert loaded(tmp_path / "full", fc.load_full) in range(4)
    assert loaded(tmp_path / "dcp", fc.load_checkpoint) in range(6)


# Ranks that are killed, interrupted, stopped

CALLS: dict[str, Callable[[Path, nn.Module], Any]] = {
    "save_checkpoint": lambda path, model: fc.save_checkpoint(path, model),
    "asynchronous": lambda path, model: fc.save_checkpoint(path, model, asynchronous=True).wait(),
    "save_full": lambda path, model: fc.save_full(path, model),
}


def at_a_point(call: str, rank: int, act: Callable[[], None]) -> None:
    """Has ``act`` called in the middle of a save on this rank."""

    def before(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def acted(*args: Any, **kwargs: Any) -> Any:
            act()
            return function(*args, **kwargs)

        setattr(owner, name, acted)

    if call == "save_full":
        before(full, "visit_values")
    else:
        before(files.CommittingWriter, "write_data")


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_killed_in_a_save_is_named(tmp_path: Path, call: str, victim: int) -> None:
    load = fc.load_full if call == "save_full" else fc.load_checkpoint
    fc.save_full(tmp_path, net(1)) if call == "save_full" else fc.save_checkpoint(
        tmp_path, sharded(1)
    )

    def run(rank: int) -> None:
        if rank == victim:
            at_a_point(call, rank, die)
        CALLS[call](tmp_path, sharded(2))

    errors = rank_errors(run, 3, timeout=40)
    for rank, error in enumerate(errors):
        if rank != victim:
            assert f"rank {victim}" in str(error), errors
            assert "RuntimeError" in str(error) and "Hung" not in str(error), errors
    assert loaded(tmp_path, load) == 1


def test_ctrl_c_in_a_save_stays_what_it_is(tmp_path: Path) -> None:
    """The others end with an error that says so; a save after that works, in the same processes."""

    def run(rank: int) -> list[str]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        found = []
        for call, act in CALLS.items():
            if call == "asynchronous":
                continue
            with pytest.MonkeyPatch.context() as patch:
                point = (full, "visit_values") if call == "save_full" else WRITE_DATA
                if rank == 1:
                    interrupt = lambda *args: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
                    patch.setattr(*point, interrupt)
                try:
                    act(tmp_path / call, sharded(2))
                except BaseException as error:
                    found.append(f"{type(error).__name__}: {error}")
            act(tmp_path / call, sharded(3))
            load = fc.load_full if call == "save_full" else fc.load_checkpoint
            assert loaded(tmp_path / call, load) == 3
            dist.barrier()
            assert not list((tmp_path / call).glob(".saving-*"))
            assert len(list((tmp_path / call).glob("data-*"))) == int(call == "save_checkpoint")
        return found

    other, interrupted = run_ranks(run, 2, timeout=40)
    assert [text.split(":")[0] for text in interrupted] == ["KeyboardInterrupt"] * 2
    for call, text in zip(("save_checkpoint", "save_full"), other, strict=True):
        assert text.startswith("RuntimeError"), text
        assert "rank 1" in text and (call in text or "KeyboardInterrupt" in text), text


WRITE_DATA = (files.CommittingWriter, "write_data")


def test_ctrl_c_while_waiting_is_heard(tmp_path: Path) -> None:
    """A rank that waits for the others of a save, or for one to come, is not deaf."""

    def run(rank: int) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        model = sharded()
        for late in ("at the door", "inside"):
            if rank == 0:
                signal.setitimer(signal.ITIMER_REAL, 1.2)
                signal.signal(signal.SIGALRM, lambda *args: signal.raise_signal(signal.SIGINT))
                with pytest.raises(KeyboardInterrupt):
                    fc.save_checkpoint(tmp_path, model)
                dist.barrier()
            else:
                if late == "inside":
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr(*WRITE_DATA, lambda *args: time.sleep(3.0))
                        with pytest.raises(RuntimeError, match="rank 0 left save_checkpoint: Key"):
                            fc.save_checkpoint(tmp_path, model)
                dist.barrier()
        fc.save_checkpoint(tmp_path, model)

    run_ranks(run, 2, timeout=40)


def join(folder: Path, rank: int, size: int, turn: int = 0, timeout: float = 30) -> None:
    """Starts a process group of its own."""
    store = dist.FileStore(str(folder / f"store{turn}"), size)
    patience = timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)


def test_a_stuck_rank_is_named_at_the_timeout(tmp_path: Path) -> None:
    """Messages of a save wait for as long as the process group does, not for half an hour."""

    def run(rank: int) -> str:
        join(tmp_path, rank, 3, timeout=3)
        if rank == 1:
            at_a_point("save_checkpoint", rank, lambda: time.sleep(5.5))
        start = time.monotonic()
        try:
            fc.save_checkpoint(tmp_path / "dcp", sharded(2))
        except RuntimeError as error:
            if rank != 1:
                assert 1 < time.monotonic() - start < 5
            return str(error)
        return ""

    errors = run_ranks(run, 3, init=False)
    assert all("rank 1 does not answer" in errors[rank] for rank in (0, 2)), errors


def test_a_second_process_group_saves(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        for turn in range(3):
            join(tmp_path, rank, 2, turn)
            fc.save_checkpoint(tmp_path / "dcp", sharded(turn))
            fc.save_full(tmp_path / "full", sharded(turn))
            assert loaded(tmp_path / "full", fc.load_full) == turn
            dist.destroy_process_group()

    run_ranks(run, 2, init=False)
    assert loaded(tmp_path / "dcp", fc.load_checkpoint) == 2


def test_no_rank_leaves_before_all_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that raises at once would close the connection that another is still making."""
    connect, times = ranks.gloo_group, []

    def connect_slowly(key: str, rank: int, *others: Any) -> Any:
        group = connect(key, rank, *others)
        time.sleep(0.3 * (rank == 0))
        times.append(time.monotonic())
        return group

    def meet(rank: int) -> list[float]:
        assert ranks.meet_ranks("save_full", sharded(), None, None).size == 2
        return [*times, time.monotonic()]

    monkeypatch.setattr(ranks, "gloo_group", connect_slowly)
    found = run_ranks(meet, 2)
    assert min(left for _, left in found) >= max(connected for connected, _ in found)
