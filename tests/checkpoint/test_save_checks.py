"""What a save refuses, on every rank, before it touches what the folder holds."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_compose as fc
from fsdp_compose.__main__ import main
from fsdp_compose.base import process
from fsdp_compose.checkpoint import dcp, full
from fsdp_compose.checkpoint.files import CommittingWriter

from harness import run_ranks, simulate_ranks
from saved import equal

Options = Callable[[int, nn.Module], dict[str, Any]]


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


DIFFER: dict[str, Options] = {
    "optim": lambda rank, model: {"optim": sgd(model) if rank else None},
    "asynchronous": lambda rank, model: {"asynchronous": bool(rank)},
    "checksum": lambda rank, model: {"checksum": bool(rank)},
}


@pytest.mark.parametrize("option", DIFFER)
def test_ranks_save_with_the_same_options(tmp_path: Path, option: str) -> None:
    """Options of save_checkpoint that differ by rank raise at once; the old checkpoint stays."""

    def run(rank: int) -> None:
        model = fc.fully_shard(net())
        fc.save_checkpoint(tmp_path, model)
        changed = fc.fully_shard(net(1))
        told = rf"different things: rank 0 has .*{option}=False.*{option}=True"
        with pytest.raises(RuntimeError, match=told):
            fc.save_checkpoint(tmp_path, changed, **DIFFER[option](rank, changed))
        fc.load_checkpoint(tmp_path, changed)
        equal(fc.state_dict(changed), fc.state_dict(net()))

    simulate_ranks(run, 2)


def test_extra_that_does_not_pickle_is_named(tmp_path: Path) -> None:
    """On every rank, where one has it; the old checkpoint stays."""

    def run(rank: int) -> None:
        model = fc.fully_shard(net())
        fc.save_checkpoint(tmp_path, model, extra=3)
        rows = (row for row in [1])
        with pytest.raises(Exception, match="extra is a dict that does not pickle"):
            fc.save_checkpoint(tmp_path, model, extra={"rows": rows} if rank else None)
        schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 1)
        with pytest.raises(Exception, match=r"extra is a StepLR .* in place of the scheduler"):
            fc.save_checkpoint(tmp_path, model, extra=schedule)
        assert fc.load_checkpoint(tmp_path, model) == 3

    simulate_ranks(run, 2)


@pytest.mark.parametrize("option", ["path", "dtype", "max_file_bytes"])
def test_ranks_export_with_the_same_options(tmp_path: Path, option: str) -> None:
    """Options of save_full that differ by rank raise; the old files stay."""
    differ: dict[str, Sequence[Any]] = {
        "path": (tmp_path, tmp_path / "other"),
        "dtype": (torch.bfloat16, None),
        "max_file_bytes": (5 << 30, 100),
    }

    def run(rank: int) -> None:
        fc.save_full(tmp_path, fc.fully_shard(net()))
        given = {"path": tmp_path, option: differ[option][rank]}
        with pytest.raises(RuntimeError, match=rf"different things: rank 0 has .*{option}"):
            fc.save_full(module=fc.fully_shard(net(1)), **given)
        loaded = net(1)
        fc.load_full(tmp_path, loaded)
        equal(fc.state_dict(loaded), fc.state_dict(net()))

    simulate_ranks(run, 2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, "bfloat16"])
def test_exports_are_in_floating_point(tmp_path: Path, dtype: Any) -> None:
    """A dtype that weights would lose their numbers in raises; nothing is written."""

    def run(rank: int) -> None:
        with pytest.raises(ValueError, match=r"save_full: dtype is .*; wanted a floating-point"):
            fc.save_full(tmp_path / "whole", fc.fully_shard(net()), dtype=dtype)

    simulate_ranks(run, 2)
    assert not (tmp_path / "whole").exists()


def test_a_save_stays_in_the_folder_of_the_call(tmp_path: Path) -> None:
    """A relative path is that of the call, whatever the thread that writes finds."""

    def run(rank: int) -> None:
        os.chdir(tmp_path)
        (tmp_path / "elsewhere").mkdir()
        saving = fc.save_checkpoint("latest", net(0), asynchronous=True)
        os.chdir("elsewhere")
        saving.wait()
        loaded = net(1)
        fc.load_checkpoint(tmp_path / "latest", loaded)
        equal(fc.state_dict(loaded), fc.state_dict(net(0)))

    run_ranks(run, 1)


def full_from_hooks(model: nn.Module, folder: Path) -> None:
    with fc.state_dict_type(model, "full"):
        model.state_dict()


SAVES: dict[str, Callable[[nn.Module, Path], Any]] = {
    **{kind: partial(lambda kind, model, folder: fc.state_dict(model, kind), kind)
       for kind in ("full", "sharded", "local")},
    "hooks": full_from_hooks,
    "save_checkpoint": lambda model, folder: fc.save_checkpoint(folder / "new", model),
    "save_full": lambda model, folder: fc.save_full(folder / "new.safetensors", model),
}  # fmt: skip


@pytest.mark.parametrize("name", SAVES)
def test_a_save_inside_a_scope_that_writes_raises(tmp_path: Path, name: str) -> None:
    """Of edits of rank 0 alone, too; a scope that only reads is nothing to a save."""

    def run(rank: int) -> None:
        model = net()
        fc.fully_shard(model[0])
        fc.fully_shard(model)
        for rank0_only in (False, True):
            with torch.no_grad(), fc.gathered(model, writeback=True, rank0_only=rank0_only):
                if not rank0_only or rank == 0:
                    model[2].weight.mul_(2)
                with (
                    fc.gathered(model, rank0_only=rank0_only),
                    pytest.raises(RuntimeError, match="was asked for inside gathered"),
                ):
                    SAVES[name](model, tmp_path)
        with fc.gathered(model):
            SAVES[name](model, tmp_path)
        assert torch.equal(fc.state_dict(model)["2.weight"], 4 * net()[2].weight)

    simulate_ranks(run, 2)


class Failing(CommittingWriter):
    """A disk that is full once ``begins`` is set."""

    begins = threading.Event()

    def write_data(self, *args: Any) -> Any:
        assert self.begins.wait(30)
        raise OSError("disk full")


@pytest.mark.parametrize("when", ["dropped", "held", "waited", "ended well"])
def test_a_failure_nobody_waits_for_is_logged(when: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Once, when the handle is gone; whoever waits gets the error instead."""

    def run(rank: int) -> list[str]:
        found: list[str] = []
        logger = logging.getLogger("fsdp_compose")
        logger.addFilter(lambda record: found.append(record.getMessage()) or False)
        if when != "ended well":
            monkeypatch.setattr(dcp, "CommittingWriter", Failing)
        Failing.begins.clear()
        saving = fc.save_checkpoint(tmp_path, net(), asynchronous=True)
        if when == "dropped":
            del saving
        Failing.begins.set()
        if when == "waited":
            with pytest.raises(RuntimeError, match="disk full"):
                saving.wait()
        for end in process.here.saves:
            end.wait()
        if when == "held":
            assert saving.done() and not found
        saving = None
        gc.collect()  # the error's traceback holds the handle of whoever waited
        return found

    for found in run_ranks(run, 2):
        assert len(found) == (when in ("dropped", "held"))
        assert all("to " + str(tmp_path) in text and "disk full" in text for text in found)


def test_ctrl_c_leaves_a_save_under_way(tmp_path: Path, monkeypatch: Any) -> None:
    """Who waits for one is interrupted, and then saves again: the two do not mix."""

    def run(rank: int) -> None:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        monkeypatch.setattr(dcp, "CommittingWriter", Failing)
        saving = fc.save_checkpoint(tmp_path, net(), asynchronous=True)
        for wait in (saving.wait, lambda: fc.save_checkpoint(tmp_path, net())):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                wait()
            assert not saving.done()
        child = os.fork()
        if not child:  # where the thread is not, nobody waits for it
            os._exit(not saving.done())
        assert os.waitpid(child, 0)[1] == 0
        monkeypatch.undo()
        Failing.begins.set()
        fc.save_checkpoint(tmp_path, net())
        assert saving.done()
        with pytest.raises(RuntimeError, match="disk full"):
            saving.wait()

    run_ranks(run, 1)


def test_what_a_save_did_not_make_is_left_alone(tmp_path: Path) -> None:
    """A folder of the user's whose name begins as those of saves do, beside a checkpoint."""
    mine = tmp_path / "data-train"
    mine.mkdir()
    (mine / "manifest.json").write_text("[1]")
    model = fc.fully_shard(net())
    with pytest.raises(RuntimeError, match=r"no checkpoint .* load_full loads safetensors"):
        fc.load_checkpoint(tmp_path, model)
    for _ in range(2):
        fc.save_checkpoint(tmp_path, model)
        fc.load_checkpoint(tmp_path, model)
    assert (mine / "manifest.json").read_text() == "[1]"
    assert len(list(tmp_path.glob("data-*"))) == 2
    target = tmp_path / "target"
    (target / "data-train").mkdir(parents=True)
    assert main(["checkpoint", "convert", str(tmp_path), str(target)]) == 2
    assert (target / "data-train").is_dir()


def test_each_kind_of_file_names_what_loads_it(tmp_path: Path) -> None:
    model = fc.fully_shard(net())
    fc.save_checkpoint(tmp_path, model)
    with pytest.raises(RuntimeError, match="a sharded checkpoint, which load_checkpoint loads"):
        fc.load_full(tmp_path, model)
    torch.save(net().state_dict(), tmp_path / "model.pt")
    with pytest.raises(RuntimeError, match=r"a file of torch\.save; wanted one of safetensors"):
        fc.load_full(tmp_path / "model.pt", model)


@pytest.mark.parametrize("checksum", [True, False])
def test_ranks_that_saved_an_extra_get_their_own(tmp_path: Path, checksum: bool) -> None:
    """The others get that of the first; so do all where the number of ranks has changed."""

    def save(rank: int) -> None:
        extra = {"rank": rank} if rank else None
        fc.save_checkpoint(tmp_path, fc.fully_shard(net()), extra=extra, checksum=checksum)

    def load(rank: int) -> Any:
        return fc.load_checkpoint(tmp_path, fc.fully_shard(net()))["rank"]

    simulate_ranks(save, 3)
    assert simulate_ranks(load, 3) == ([1, 1, 2] if checksum else [1, 1, 1])
    assert simulate_ranks(load, 4) == [1] * 4


@pytest.mark.parametrize("call", ["save_checkpoint", "asynchronous", "save_full"])
def test_a_step_in_another_thread_while_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A save in a thread beside training is an error where it would hold parts of two steps."""
    owner: Any = {"save_checkpoint": CommittingWriter, "asynchronous": dcp}.get(call, full._Writer)
    name = {"save_checkpoint": "write_data", "asynchronous": "_copy_to_host"}.get(call, "commit")
    save = fc.save_full if call == "save_full" else fc.save_checkpoint
    options = {"asynchronous": True} if call == "asynchronous" else {}

    def ranks(rank: int) -> list[str]:
        model = fc.fully_shard(net())
        optim = sgd(model)
        real = getattr(owner, name)

        def act(*args: Any) -> Any:
            monkeypatch.setattr(owner, name, real)
            go.set()
            stepped.wait()
            return real(*args)

        def in_thread() -> None:
            try:
                save(tmp_path, model, **options)
            except RuntimeError as error:
                errors.append(str(error))

        def step() -> None:
            model(torch.ones(2, 4)).sum().backward()
            optim.step()
            optim.zero_grad()

        go, stepped, errors = threading.Event(), threading.Event(), list[str]()
        step()
        kept = fc.state_dict(model)
        save(tmp_path, model)
        monkeypatch.setattr(owner, name, act)
        thread = threading.Thread(target=in_thread)
        thread.start()
        go.wait()
        step()
        stepped.set()
        thread.join()
        step()
        load = fc.load_full if call == "save_full" else fc.load_checkpoint
        load(tmp_path, model)
        equal(fc.state_dict(model), kept)
        return errors

    for (error,) in run_ranks(ranks, 2):
        assert "'0.weight' (unit 'Sequential')" in error and "was written while" in error
        assert save.__name__ in error and "asynchronous=True" in error


@pytest.mark.parametrize("save", [fc.save_checkpoint, fc.save_full], ids=lambda f: f.__name__)
def test_a_path_that_leads_nowhere(tmp_path: Path, save: Callable[..., Any]) -> None:
    """Every rank raises which function was called: a link to itself, and a null character."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)

    def ranks(rank: int) -> list[str]:
        model, errors = fc.fully_shard(net()), list[str]()
        for path in (loop, loop / "sub", f"{tmp_path}/\0"):
            with pytest.raises((RuntimeError, ValueError)) as found:
                save(path, model)
            errors.append(str(found.value))
        return errors

    for errors in run_ranks(ranks, 2):
        assert all(error.startswith(f"{save.__name__}: ") for error in errors), errors
        assert str(loop) in errors[0] and "was not saved" in errors[1] and "null" in errors[2]
