"""Messages through pipes come in order and whole, and a rank that is gone or silent is noticed."""

from __future__ import annotations

import contextlib
import linecache
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_compose.base.group import Group
from fsdp_compose.comm import mail as module
from fsdp_compose.comm.mail import ROW, Mail
from fsdp_compose.comm.shared_memory import all_segments

from harness import RankFailure, rank_errors, run_ranks
from models import Tower, by_block, data, seeded, square


def row(number: int) -> list[int]:
    return [number, *range(1, ROW - 1), -(1 << 63)]


def mail_of_world() -> Mail:
    """This rank's mail with all others, which a sharded model opens."""
    by_block(seeded(Tower))
    (segments,) = all_segments()
    return segments.mail


def check_order(rank: int) -> None:
    mail = mail_of_world()
    sent = [(tag, mail.post(tag, row(100 * rank + i), "test")) for i, tag in enumerate((5, 7, 5))]
    dist.barrier()
    for i, (_, letters) in reversed([*enumerate(sent)]):
        assert [letter.rank for letter in letters] == [r for r in range(3) if r != rank]
        for letter in letters:
            letter.wait()
            assert letter.row == row(100 * letter.rank + i)
    assert not mail.rows


def test_messages_come_in_order_whatever_is_read_first() -> None:
    """Of each tag in its own order, from each rank its own."""
    run_ranks(check_order, 3)


def check_many(rank: int) -> None:
    mail = mail_of_world()
    if rank:
        time.sleep(0.5)  # so that the pipe fills
    letters = [mail.post(1, row(i), "test")[0] for i in range(1500)] if not rank else []
    for i in range(1500 if rank else 0):
        assert mail.find(0, 1, i) == row(i)
    dist.barrier()
    assert len(letters) == 1500 * (not rank)


def test_more_messages_than_a_pipe_holds() -> None:
    """The sender waits until they are read, and none is lost or cut."""
    run_ranks(check_many, 2)


def lose(self: Mail, end: int, data: bytes) -> None:
    with contextlib.suppress(BlockingIOError):
        os.write(end, data)


BREAKS: dict[str, tuple[Any, str, Any, Callable[[int], None], int]] = {
    "the newest for the oldest": (Mail, "find", lambda self, rank, tag, number, find=Mail.find: (
        find(self, rank, tag, 1 - number if tag == 5 else number)), check_order, 3),
    "of another rank": (Mail, "find", lambda self, rank, tag, number, find=Mail.find: (
        find(self, next(r for r in self.readers if r != rank), tag, number)), check_order, 3),
    "cut in the middle": (module, "_AT_ONCE", 1000, check_many, 2),
    "lost where the pipe is full": (Mail, "_write", lose, check_many, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_broken_mail_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *change, check, world = BREAKS[name]
    monkeypatch.setattr(*change)
    monkeypatch.setattr(module, "timeout_of", lambda pg: 2.0)
    with pytest.raises(RankFailure):
        run_ranks(check, world)


def test_a_rank_that_sends_nothing(tmp_path: Path) -> None:
    """Its silence is an error when the group's timeout is over."""

    def ranks(rank: int) -> None:
        store = dist.FileStore(str(tmp_path / "store"), 2)
        patience = timedelta(seconds=3)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=patience)
        mail = mail_of_world()
        assert mail.timeout == 3.0
        if rank == 0:
            (letter,) = mail.post(1, row(0), "test")
            with pytest.raises(RuntimeError, match="sent nothing for 3 s, the timeout"):
                letter.wait()
        store.set(f"{rank}", "")
        store.wait([str(1 - rank)], timedelta(seconds=30))

    run_ranks(ranks, init=False)


def test_a_rank_that_ends_is_known_by_its_pipe() -> None:
    """What it sent before is still read; then reading and writing say that it is gone."""

    def ranks(rank: int) -> None:
        mail = mail_of_world()
        letters = [mail.post(1, row(rank), "test")[0] for _ in range(2)]
        if rank == 1:
            letters[1].wait()  # the other one needs this one no more
            os.kill(os.getpid(), signal.SIGKILL)
        letters[0].wait()
        assert letters[0].row == row(1)
        letters[1].wait()
        with pytest.raises(RuntimeError, match="its process has ended"):
            mail.find(1, 1, 2)
        with pytest.raises(RuntimeError, match="waits to test, and rank 1 does not answer"):
            mail.post(1, row(0), "test")

    first, second = rank_errors(ranks)
    assert first is None and second is not None and "SIGKILL" in second


def test_an_interrupt_ends_a_wait() -> None:
    """Ctrl-C is heard at once, and what was waited for can be waited for again."""

    def ranks(rank: int) -> None:
        mail = mail_of_world()
        if rank == 0:
            (letter,) = mail.post(1, row(0), "test")
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                letter.wait()
            dist.barrier()
            letter.wait()
            assert letter.row == row(1)
        else:
            dist.barrier()
            mail.post(1, row(1), "test")

    run_ranks(ranks)


def test_an_interrupt_loses_no_message() -> None:
    """Wherever in a read it comes: each message is there when it is waited for again, once."""
    group = Group(pg=FakeGroup(), rank=1, size=3, backend="gloo", ranks=(0, 1, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "timeout_of", lambda pg: 1.0)
        mail = Mail(group)
    mail.open_to(2, os.getpid(), mail.entrances[2])  # what it writes to rank 2 it reads itself
    at = came = 0

    def stop(frame: Any, event: str, value: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != module.__file__:
            return None
        is_lock = "with" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        left -= event == "line" and not is_lock  # Python itself sees to the end of a lock
        if left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return stop

    while came == at:
        sent = [mail.post(tag, row(i), "test")[1] for i, tag in enumerate((5, 7, 5))]
        for letter in (sent[2], sent[0], sent[1]):
            left = at
            sys.settrace(stop)
            try:
                letter.wait()
            except KeyboardInterrupt:
                came = at + 1
            finally:
                sys.settrace(None)
            letter.wait() if not letter.row else None
        assert [letter.row for letter in sent] == [row(i) for i in range(3)]
        at += 1
    assert at > 10


def test_two_threads_read_one_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets its message, whichever of them reads it."""

    def ranks(rank: int) -> None:
        mail = mail_of_world()
        found: dict[int, Sequence[int]] = {}
        threads: list[threading.Thread] = []
        for tag in (1, 2) if rank == 0 else ():
            (letter,) = mail.post(tag, row(0), "test")

            def read(letter: Any = letter) -> None:
                letter.wait()
                found[letter.tag] = letter.row

            threads.append(threading.Thread(target=read))
            threads[-1].start()
        dist.barrier()
        for tag in (2, 1) if rank else ():
            mail.post(tag, row(tag), "test")
        for thread in threads:
            thread.join()
        assert found == ({1: row(1), 2: row(2)} if rank == 0 else {})

    run_ranks(ranks)


def test_a_step_sends_no_message_through_gloo() -> None:
    """Ranks of one host say what they do through pipes."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        sent: list[int] = []
        send = dist.ProcessGroup.send
        for step in range(2):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    dist.ProcessGroup, "send", lambda *a: (sent.append(step), send(*a))[1]
                )
                square(model, data(step, rank)).backward()
        assert not sent

    run_ranks(ranks)


def test_a_rank_without_file_descriptors() -> None:
    """Then nothing is shared with it, and the step is the same."""

    def refuse(flags: int) -> tuple[int, int]:
        raise OSError("too many open files")

    def ranks(rank: int) -> list[Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(os, "pipe2", refuse)
            model = by_block(seeded(Tower))
        assert not list(all_segments())
        square(model, data(0, rank)).backward()
        return [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]

    def shared(rank: int) -> list[Tensor]:
        model = by_block(seeded(Tower))
        assert list(all_segments())
        square(model, data(0, rank)).backward()
        return [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]

    for found, wanted in zip(run_ranks(ranks)[0], run_ranks(shared)[0], strict=True):
        assert torch.equal(found, wanted)


def test_pipes_are_closed_with_their_group() -> None:
    """Those to other hosts at once, the rest when nothing uses the group any more."""
    group = Group(pg=FakeGroup(), rank=1, size=4, backend="gloo", ranks=(0, 1, 2, 3))
    before = set(os.listdir("/proc/self/fd"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "timeout_of", lambda pg: 1.0)
        mail = Mail(group)
    mail.open_to(2, os.getpid(), mail.entrances[2])
    assert len(set(os.listdir("/proc/self/fd")) - before) == 7
    mail.keep([2])
    assert not mail.entrances and [*mail.readers] == [*mail.writers] == [2]
    assert len(set(os.listdir("/proc/self/fd")) - before) == 2
    del mail
    assert set(os.listdir("/proc/self/fd")) == before


class FakeGroup:
    """Stands for a process group."""
