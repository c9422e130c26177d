"""The harness tells the truth: results, failures, hangs, output; and leaves nothing behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from hypothesis import given, settings

from harness import (
    GRACE,
    RankFailure,
    RankTimeout,
    cell,
    fake_world,
    rank_errors,
    run_ranks,
    single_process,
)


class Pair(NamedTuple):
    left: Any
    right: Any


def backward() -> float:
    """Enough work for every pool torch might have to start, reentrant backward included."""
    x = torch.randn(300, 300, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(lambda t: (t @ t).relu(), x, use_reentrant=True)
    y.sum().backward()
    assert x.grad is not None
    return float(x.grad.norm())


def test_results_come_in_rank_order() -> None:
    """Results come in rank order and collectives work."""

    def fn(rank: int, scale: float, *, shift: float) -> dict[str, Any]:
        x = torch.full((3,), float(rank))
        dist.all_reduce(x)
        assert torch.get_num_threads() == 1
        return {"rank": rank, "sum": x * scale + shift, "backend": dist.get_backend()}

    for world_size in (1, 2, 3):
        results = run_ranks(fn, world_size, 2.0, shift=1.0)
        assert [r["rank"] for r in results] == list(range(world_size))
        total = world_size * (world_size - 1) / 2
        assert all(torch.equal(r["sum"], torch.full((3,), 2 * total + 1)) for r in results)
        assert {r["backend"] for r in results} == {"gloo"}


def test_two_ranks_take_well_under_a_second() -> None:
    def fn(rank: int) -> None:
        dist.all_reduce(torch.ones(1))

    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        run_ranks(fn, 2)
        best = min(best, time.perf_counter() - start)
    assert best < 0.5


def test_tensors_come_back_plain_at_any_depth() -> None:
    def fn(rank: int) -> Any:
        weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
        big = torch.zeros(1_000_000)
        return [
            Pair(weight, weight * 2),
            {"t": weight.t(), "slice": big[:4], "bf16": torch.ones((), dtype=torch.bfloat16)},
            (torch.empty(0, 5), torch.tensor([True]), torch.tensor([1 + 2j])),
            b"x" * 3_000_000,  # more than a pipe holds
        ]

    for pair, named, mixed, blob in run_ranks(fn, 2, init=False):
        assert type(pair.left) is torch.Tensor and not pair.left.requires_grad
        assert torch.equal(pair.right, 2 * torch.arange(6.0).view(2, 3)) and pair.right.is_leaf
        assert torch.equal(named["t"], pair.left.t()) and named["bf16"].dtype == torch.bfloat16
        assert named["slice"].untyped_storage().nbytes() == 16
        assert mixed[0].shape == (0, 5) and mixed[2].dtype == torch.complex64
        assert len(blob) == 3_000_000


def test_a_result_that_is_not_plain_is_refused() -> None:
    class Special(torch.Tensor):
        pass

    with pytest.raises(RankFailure, match="a rank returned a Special; return a plain tensor"):
        run_ranks(lambda rank: torch.ones(2).as_subclass(Special), 1, init=False)
    with pytest.raises(RankFailure, match="lambda"):
        run_ranks(lambda rank: lambda: 1, 1, init=False)


def test_without_init_there_is_no_process_group() -> None:
    assert run_ranks(lambda rank: dist.is_initialized(), 2, init=False) == [False, False]


def test_every_rank_starts_from_seed_zero() -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    a, b = run_ranks(lambda rank: torch.rand(3), 2, init=False)
    torch.manual_seed(0)
    expected = torch.rand(3)
    assert torch.equal(a, b) and torch.equal(a, expected)
    torch.set_rng_state(before)


def test_the_first_failure_is_reported_first() -> None:
    """The first failure is reported first and the stuck rank shows where."""

    def stuck_here(rank: int) -> None:
        dist.all_reduce(torch.ones(1))

    def fn(rank: int) -> None:
        if rank == 2:
            raise ValueError("the wrong shard")
        if rank == 0:
            time.sleep(0.3)
            raise KeyError("later")
        stuck_here(rank)

    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(fn, 3)
    assert time.monotonic() - start < GRACE + 3
    text, errors = str(caught.value), caught.value.errors
    assert text.startswith("2 of 3 ranks failed; rank 2 first")
    assert text.index("rank 2 failed: ValueError: the wrong shard") < text.index("rank 0 failed")
    assert "in fn\n" in text and "in stuck_here" in text and "rank 1 hung" in text
    assert "pytest_pyfunc_call" not in text
    assert list(errors) == [2, 0, 1]
    assert (errors[2].type, errors[2].message) == ("ValueError", "the wrong shard")
    assert (errors[0].type, errors[1].type) == ("KeyError", "Hung")


def test_a_hang_is_named_with_its_stack_and_killed() -> None:
    def sleeps_here() -> None:
        threading.Event().wait()

    def fn(rank: int) -> int:
        if rank == 1:
            sleeps_here()
        return os.getpid()

    start = time.monotonic()
    with pytest.raises(RankTimeout, match=r"rank 1 of 3 still running after 0.5 s") as caught:
        run_ranks(fn, 3, timeout=0.5)
    assert time.monotonic() - start < 3
    assert "in sleeps_here" in str(caught.value) and list(caught.value.errors) == [1]


def test_a_rank_that_dies_is_reported() -> None:
    def fn(rank: int) -> None:
        if rank == 0:
            os._exit(3)
        os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(RankFailure) as caught:
        run_ranks(fn, 2, init=False)
    errors = caught.value.errors
    assert errors[0].message == "exit status 3 without a result"
    assert "SIGSEGV" in errors[1].message and "in fn" in errors[1].traceback


def test_sys_exit_and_assertions_are_failures() -> None:
    def fn(rank: int) -> None:
        if rank == 0:
            sys.exit(0)
        assert rank + 1 == 1, "told"

    errors = rank_errors(fn, 2)
    assert errors[0] == "SystemExit: 0"
    assert errors[1] is not None and errors[1].startswith("AssertionError: told")


def test_rank_errors_gives_one_entry_per_rank() -> None:
    def fn(rank: int) -> None:
        if rank != 1:
            raise ValueError(f"unit blocks.0, rank {rank}")

    expected = ["ValueError: unit blocks.0, rank 0", None, "ValueError: unit blocks.0, rank 2"]
    assert rank_errors(fn, 3) == expected
    assert rank_errors(lambda rank: None, 2) == [None, None]

    def half(rank: int) -> None:
        if rank == 0:
            raise ValueError("only here")
        dist.all_reduce(torch.ones(1))

    first, second = rank_errors(half, 2)
    assert first == "ValueError: only here"
    assert second is not None and second.startswith("Hung: still running") and "in half" in second
    with pytest.raises(RankTimeout):
        rank_errors(lambda rank: time.sleep(60), 1, timeout=0.3)


def test_skip_in_a_rank_skips_the_test() -> None:
    def fn(rank: int) -> None:
        if rank == 1:
            pytest.skip("not here")

    with pytest.raises(pytest.skip.Exception, match="rank 1: not here"):
        run_ranks(fn, 2)


def test_warnings_are_errors_in_ranks_too() -> None:
    def fn(rank: int) -> None:
        warnings.warn("old name", FutureWarning, stacklevel=1)

    assert rank_errors(fn, 2) == ["FutureWarning: old name"] * 2

    class Careless:
        def __del__(self) -> None:
            raise OSError("in a destructor")

    def drop(rank: int) -> None:
        Careless()

    with pytest.raises(RankFailure, match="OSError: in a destructor"):
        run_ranks(drop, 1)


def test_output_is_kept_whatever_writes_it(capsys: pytest.CaptureFixture[str]) -> None:
    def fn(rank: int, fail: bool) -> None:
        print("from print", rank)
        os.write(2, b"from a library\n")
        logging.getLogger("harness").warning("from logging")
        if fail and rank == 1:
            raise ValueError

    for fail in (False, True):
        rank_errors(fn, 2, fail)
        text = capsys.readouterr().out
        assert "[rank 0] from print 0" in text and "[rank 1] from print 1" in text
        assert "[rank 1] from a library" in text
        assert text.count("from print") == 2


def test_fork_after_a_backward_pass_in_the_parent() -> None:
    expected = backward()
    assert expected > 0
    for _ in range(3):
        assert min(run_ranks(lambda rank: backward(), 2, timeout=20)) > 0
        backward()


def test_nothing_is_left_behind() -> None:
    def fn(rank: int, how: int) -> int:
        if how == 1 and rank == 0:
            raise ValueError
        if how == 2:
            time.sleep(60)
        return rank

    def footprint() -> tuple[int, int, int]:
        return (
            len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
            threading.active_count(),
            len(os.listdir(tempfile.gettempdir())),
        )

    run_ranks(fn, 2, 0)
    fds, threads, files = footprint()
    for _ in range(5):
        run_ranks(fn, 2, 0)
        rank_errors(fn, 2, 1)
    with pytest.raises(RankTimeout):
        run_ranks(fn, 2, 2, timeout=0.2)
    after = footprint()
    assert after[:2] == (fds, threads)
    assert after[2] <= files + 3  # other processes use the folder as well
    with pytest.raises(ChildProcessError):  # no zombie, no orphan
        os.waitpid(-1, os.WNOHANG)


@settings(max_examples=10)
@given(st.lists(st.integers(-9, 9), min_size=1, max_size=5))
def test_under_hypothesis(numbers: list[int]) -> None:
    def fn(rank: int) -> list[int]:
        x = torch.tensor(numbers)
        dist.all_reduce(x)
        return x.tolist()

    assert run_ranks(fn, 2) == [[2 * n for n in numbers]] * 2


def test_an_interrupt_in_the_parent_kills_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness._collect", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_ranks(lambda rank: time.sleep(60), 2, init=False)
    assert time.monotonic() - start < 5
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_fake_world_lives_in_this_process() -> None:
    """``fake_world`` lives in this process and goes away."""
    for rank in (0, 7):
        with fake_world(1024, rank=rank):
            assert (dist.get_world_size(), dist.get_rank()) == (1024, rank)
            x = torch.ones(4)
            dist.all_reduce(x)
            with pytest.raises(RuntimeError, match="this process has a process group"):
                run_ranks(lambda rank: None, 2)
    with single_process():
        assert not dist.is_initialized()


def test_subgroups_and_a_device_mesh_work() -> None:
    def fn(rank: int) -> float:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = torch.tensor(float(rank))
        dist.all_reduce(x, group=mesh.get_group("tp"))
        return x.item()

    assert run_ranks(fn, 4) == [1.0, 1.0, 5.0, 5.0]


def test_a_cell_is_named_by_what_fails_in_it() -> None:
    with pytest.raises(AssertionError, match=r"^in blocks, 3: ValueError: no$"), cell("blocks", 3):
        raise ValueError("no")


def test_a_test_that_never_ends_is_killed(tmp_path: Path) -> None:
    """A test that never ends is killed with its stack."""
    conftest = Path(__file__).with_name("conftest.py").read_text("utf-8")
    assert "HARD_TIMEOUT = 300.0" in conftest
    conftest = conftest.replace("HARD_TIMEOUT = 300.0", "HARD_TIMEOUT = 0.5")
    (tmp_path / "conftest.py").write_text(conftest, "utf-8")
    (tmp_path / "test_it.py").write_text(
        "import time\n\ndef test_quick():\n    pass\n\ndef test_hang():\n    time.sleep(60)\n",
        "utf-8",
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == -signal.SIGALRM
    assert "in test_hang" in done.stderr and "in test_quick" not in done.stderr
