"""A rank alone in what all must call says within seconds who is missing, and for what."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_compose as fc
from fsdp_compose.base.process import here
from fsdp_compose.comm import waiting

from harness import run_ranks
from laws import Heard, be_quick


def sharded() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    for layer in model.children():
        fc.fully_shard(layer)
    return fc.fully_shard(model)


CALLS: dict[str, tuple[Callable[[nn.Module, Path], Any], str]] = {
    "forward": (lambda model, path: model(torch.ones(2, 4)).sum().backward(), "gather unit"),
    "norm": (lambda model, path: model[0].weight.norm(), "take the norm of order 2 of '0.weight'"),
    "full_tensor": (lambda model, path: model[0].weight.full_tensor(), "gather '"),
    "state_dict": (lambda model, path: fc.state_dict(model), "call state_dict"),
    "save": (lambda model, path: fc.save_checkpoint(path, model), "save_checkpoint"),
    "save_full": (lambda model, path: fc.save_full(path, model), "save_full"),
    "fully_shard": (lambda model, path: sharded(), "call fully_shard"),
    "refresh": (lambda model, path: fc.refresh(model), "call refresh"),
}


@pytest.mark.parametrize("lone", [0, 1])
def test_a_lone_rank_says_who_is_missing(tmp_path: Path, lone: int) -> None:
    """In a forward, a norm, full_tensor, a state dict, a save; rank 0 keeps the store."""

    def run(rank: int) -> dict[str, list[str]]:
        heard = be_quick()
        model = sharded()
        CALLS["forward"][0](model, tmp_path)
        found = {}
        for name in names:
            act = CALLS[name][0]
            dist.barrier()
            if rank != lone:
                time.sleep(0.7)
            act(model, tmp_path / name)
            found[name], heard.lines = heard.lines, []
        return found

    names = list(CALLS) if lone == 0 else ["forward", "save"]
    results = run_ranks(run, 2)
    for name in names:
        text = CALLS[name][1]
        line = "\n".join(results[lone][name])
        assert f"rank {lone} has waited" in line and text in line, (name, line)
        assert f"rank {1 - lone} did not come to it" in line, (name, line)


def test_who_waits_elsewhere_is_told_and_then_an_error(tmp_path: Path) -> None:
    """At the group's timeout every rank raises, and names what it waited for and whom."""

    def run(rank: int) -> tuple[list[str], str]:
        heard = be_quick()
        store = dist.FileStore(str(tmp_path / "store"), 3)
        patience = timedelta(seconds=1.5)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=patience)
        model = sharded()
        try:
            if rank == 0:
                model[0].weight.norm()
            elif rank == 1:
                model[1].weight.full_tensor()
            else:
                time.sleep(3)
        except RuntimeError as error:
            return heard.lines, str(error)
        return heard.lines, ""

    (norm, lost), (gather, unanswered), _ = run_ranks(run, 3, init=False)
    assert "rank 2 did not come to it; rank 1 waits to gather '1.weight'" in norm[0], norm
    assert "rank 0 waits to take the norm" in gather[0]
    assert "rank 0 waits to take the norm" in lost and "does not answer" in lost
    assert "rank 1 waits to gather" in unanswered and "does not answer" in unanswered


def test_steps_in_time_touch_no_store() -> None:
    def run(rank: int) -> None:
        model = sharded()
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        heard = Heard()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(waiting, "default_store", lambda: pytest.fail("used the store"))
            for _ in range(20):
                CALLS["forward"][0](model, Path())
                optim.step()
            watch = waiting.the_watch()
            watch.look(time.monotonic())
            assert watch.thread is not None and not heard.lines
            assert not watch.waits and not watch.begun

    run_ranks(run, 2)


def test_who_is_absent_is_of_the_present_wait() -> None:
    """What was told of a wait that is over is not said of the thread's next one."""
    with pytest.MonkeyPatch.context() as patch:
        watch = waiting._Watch()
        patch.setattr(here, "watch", watch)
        patch.setattr(watch, "start", lambda: None)
        waiting.enter("take a norm", (0, 1))
        assert waiting.find_absent() == ""
        watch.look(time.monotonic())
        (wait,) = watch.waits.values()
        wait.absent = "rank 1 did not come to it"
        watch.look(time.monotonic())
        assert waiting.find_absent() == "rank 1 did not come to it"
        waiting.end_wait()
        assert waiting.find_absent() == ""
        waiting.enter("take a norm", (0, 1))
        assert waiting.find_absent() == ""
        watch.look(time.monotonic())
        assert waiting.find_absent() == "" and list(watch.waits.values()) != [wait]
        waiting.end_wait()
        watch.look(time.monotonic())
        assert not watch.waits


def test_few_of_many_ranks_that_wait_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of them; a thousand would all log the same."""
    wait = waiting.Wait("take a norm", range(12), 0.0)
    there = SimpleNamespace(check=lambda keys: True, get=lambda key: b"take a norm")
    monkeypatch.setattr(waiting, "default_store", lambda: there)
    spoken, heard = [], Heard()
    for rank in range(12):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        waiting.log_missing(wait, 20.0)
        spoken.append(len(heard.lines))
    assert spoken == [*range(1, 9), 8, 8, 8, 8]


class Mark:
    """As an event on a stream of a device that is not the first of its host."""

    device = torch.device("cuda", 5)

    def __init__(self) -> None:
        self.has_passed = False

    def query(self) -> bool:
        return self.has_passed


class Refuses(Mark):
    """As an event while another thread captures a graph, which a question would end."""

    def query(self) -> bool:
        raise AssertionError("the device is asked")


def note_turns(patch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that threads were to make their current ones, as they come."""
    turned: list[torch.device] = []
    patch.setattr(torch.accelerator, "set_device_index", turned.append)
    return turned


def test_the_watch_asks_for_old_marks_alone() -> None:
    """Of those that come one after another the last is kept, and none once a graph is captured.

    It asks on their device: on the first of the host each rank would take memory for that.
    """
    with pytest.MonkeyPatch.context() as patch:
        turned = note_turns(patch)
        watch = waiting._Watch()
        patch.setattr(here, "watch", watch)
        patch.setattr(watch, "start", lambda: None)
        now = time.monotonic()
        patch.setattr(waiting, "monotonic", lambda: now)
        waiting.watch_mark("gather", (0, 1), Refuses())
        waiting.watch_mark("gather", (0, 1), Refuses())
        watch.look(now + 0.9 * waiting.POST_AFTER)
        with pytest.raises(AssertionError, match="is asked"):
            watch.look(now + 1.1 * waiting.POST_AFTER)
        assert turned == [Mark.device]
        waiting.forget_marks()
        watch.look(now + 100)
        passed, later = Mark(), Refuses()
        passed.has_passed = True
        waiting.watch_mark("gather", (0, 1), passed)
        now += 1.1 * waiting._POLL
        waiting.watch_mark("reduce", (0, 1), later)
        assert [wait.mark for wait in watch.waits.values()] == [later]


def test_a_capture_and_one_rank_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph without gradients is captured, too; and a rank alone waits for nobody."""
    watch = waiting._Watch()
    monkeypatch.setattr(here, "watch", watch)
    monkeypatch.setattr(watch, "start", lambda: None)
    waiting.watch_mark("reduce", (3,), Refuses())
    assert watch.newest is None and not watch.waits
    waiting.watch_mark("gather", (0, 1), Refuses())
    assert watch.newest is not None and watch.waits
    monkeypatch.setattr(waiting, "is_capturing", lambda: True)
    waiting.watch_mark("gather", (0, 1), Refuses())
    assert watch.newest is None and not watch.waits


def test_a_device_that_waits_is_told_without_the_host() -> None:
    """The oldest mark that has not passed is what is waited for; passed ones are forgotten."""

    def run(rank: int) -> None:
        heard = be_quick()
        note_turns(pytest.MonkeyPatch())
        waiting.the_watch().start = lambda: None  # type: ignore[method-assign]
        first, second, third = Mark(), Mark(), Mark()
        for name, mark in (("a", first), ("b", second), ("c", third)):
            waiting.watch_mark(f"gather unit {name!r}", range(2), mark)
        now = time.monotonic()
        waiting.the_watch().look(now + 0.2)
        first.has_passed = second.has_passed = True
        waiting.the_watch().look(now + 10)  # nobody is told; on to the newest
        assert not heard.lines
        dist.barrier()
        if rank == 0:
            waiting.the_watch().look(now + 11)
            waiting.the_watch().look(now + 12)
            assert len(heard.lines) == 1 and "gather unit 'c'" in heard.lines[0], heard.lines
            assert "rank 1 did not come to it" in heard.lines[0]
        dist.barrier()
        third.has_passed = True
        waiting.the_watch().look(now + 13)
        assert not waiting.the_watch().waits and not waiting.the_watch().posted

    run_ranks(run, 2)


WITHOUT_NUMPY = """
    import os, sys
    sys.modules["numpy"] = None
    import torch, torch.distributed as dist
    from torch import nn
    folder, rank = sys.argv[1], 1 if os.fork() == 0 else 0
    store = dist.FileStore(folder + "/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    import fsdp_compose as fc

    def sharded(value):
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
        for param in model.parameters():
            nn.init.constant_(param, value)
        fc.fully_shard(model[0])
        return fc.fully_shard(model)

    model, other = sharded(1.0), sharded(2.0)
    optim = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        fc.clip_grad_norm_(model, 1.0)
        optim.step()
    fc.save_checkpoint(folder + "/dcp", model, optim, {"step": list(range(100))})
    fc.save_full(folder + "/full", model)
    fc.optim_state_dict(model, optim, kind="full")
    fc.load_full(folder + "/full", other)
    optim = torch.optim.AdamW(other.parameters())
    assert fc.load_checkpoint(folder + "/dcp", other, optim) == {"step": list(range(100))}
    full, again = fc.state_dict(model), fc.state_dict(other)
    assert all(torch.equal(full[name], again[name]) for name in full)
    try:
        fc.fully_shard(nn.Linear(3 + rank, 3))
    except ValueError as error:
        assert "rank" in str(error)
    print("done", rank, flush=True)
    if rank == 0:
        os.wait()
    os._exit(0)
"""


def test_everything_works_without_numpy(tmp_path: Path) -> None:
    """Torch does not depend on it, so that it may be missing where this package is installed."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(WITHOUT_NUMPY), str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("done") == 2, done.stdout + done.stderr
