"""Run a function on N real ranks in milliseconds, by forking a process that has imported torch.

    losses = run_ranks(train, 2, steps=3)               # [train(0, steps=3), train(1, steps=3)]
    errors = rank_errors(broken, 2)                     # ["ValueError: ...", "ValueError: ..."]
    with fake_world(1024, rank=7): plan = ...           # host side only, in this process

Starting a Python process and importing torch costs seconds per rank; a fork costs milliseconds.
The price is a rule: **the process that runs pytest never starts threads, CUDA or a process group
of its own** (`fake_world` is the exception; it starts none of them). conftest.py keeps
`torch.set_num_threads(1)`, so a backward pass in the parent is fine on a CPU-only process.

A rank is a child that closes over whatever `fn` closes over, reports one message through a pipe,
waits until every rank has reported (so that no rank meets a closed socket) and leaves through
`os._exit`: no pytest teardown, no `atexit`, no destructors.

What torch imports on first use is imported here once (torch_first.py), and a small model is trained
here once, or every rank of every test would pay for it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import os
import pickle
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import IO, Any, Literal, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_compose
from fsdp_compose.simulation import SimulationError

import torch_first  # noqa: F401

__all__ = [
    "BACKEND",
    "DEVICE",
    "TORCH",
    "RankError",
    "RankFailure",
    "RankTimeout",
    "cell",
    "fake_world",
    "rank_errors",
    "run_ranks",
    "simulate_ranks",
    "single_process",
]

DEVICE = os.environ.get("FSDP_COMPOSE_TEST_DEVICE", "cpu")
"""Where models and data of tests/models.py are, and what ranks communicate: cpu or cuda."""

BACKEND = "gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:nccl"

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
GRACE = 2.0  # seconds the other ranks get once one has failed: they often hang in a collective
STACK_DUMP = 1.0  # seconds to wait for the Python stacks of a rank that hangs


@dataclass(frozen=True)
class RankError:
    """What one rank raised. `str` is "TypeName: message"."""

    type: str
    message: str
    traceback: str = field(default="", repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


class _RankReport(Exception):
    def __init__(self, report: str, errors: dict[int, RankError]):
        super().__init__(report)
        self.errors = errors


class RankFailure(_RankReport):
    """At least one rank raised or died. The text shows each, the first in time first."""


class RankTimeout(_RankReport):
    """No rank raised and some were still running at the deadline. The text shows where."""


@dataclass
class _Rank:
    """One child as the parent sees it. `kind` is None while it runs."""

    rank: int
    pid: int
    pipe: int
    output: IO[bytes]  # its stdout and stderr
    stacks: IO[bytes]  # what faulthandler wrote: a crash, or where it hangs
    received: bytearray = field(default_factory=bytearray)
    kind: Literal["ok", "error", "skip", "hung"] | None = None
    order: int = 0  # position in time of its report
    value: Any = None
    error: RankError | None = None
    reaped: bool = False


if DEVICE == "cpu":
    # Without a GPU, torch notes the stack of every call that seeds, reading files, for later.
    for module in (torch.cuda.random, torch.xpu.random):
        setattr(module, "_lazy_call", lambda call, **_: None)  # noqa: B010


def _train() -> None:
    """Whatever a process does at its first sharded steps is done before it is forked."""
    torch.manual_seed(0)
    model = fsdp_compose.fully_shard(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


if DEVICE == "cpu":  # a backward counts the GPUs, after which no fork can use one
    _train()
    with contextlib.suppress(SimulationError):  # tests find what is broken on purpose
        fsdp_compose.simulate(_train, 2)  # what talks to other ranks, too


def run_ranks(
    fn: Callable[..., Any],
    world_size: int = 2,
    *args: Any,
    timeout: float = 60.0,
    backend: str = BACKEND,
    init: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(rank, *args, **kwargs)` on `world_size` ranks; return the results in rank order.

    Each rank has one thread, seed 0 and, with `init`, a process group over `backend` whose own
    timeout is a little below `timeout` seconds. Results travel by pickle: plain data, with plain
    tensors anywhere inside (detached, on the CPU). Warnings are what they are in the caller:
    errors. What ranks print is printed here once they are done, rank by rank.

    Raises RankFailure when a rank raised or died, RankTimeout when none did and some still run
    after `timeout` seconds. `pytest.skip` in any rank skips the test.
    """
    __tracebackhide__ = True
    ranks = _run(fn, world_size, args, kwargs, timeout=timeout, backend=backend, init=init)
    if any(r.error is not None for r in ranks):
        raise _failure(ranks, timeout)
    return [r.value for r in ranks]


def rank_errors(
    fn: Callable[..., Any],
    world_size: int = 2,
    *args: Any,
    timeout: float = 60.0,
    backend: str = BACKEND,
    init: bool = True,
    **kwargs: Any,
) -> list[str | None]:
    """As `run_ranks`, but return what each rank raised, "TypeName: message", or None.

    For tests that want the same clear error on every rank. A rank still running two seconds
    after another has raised is reported as "Hung: ..." with its stack.
    """
    __tracebackhide__ = True
    ranks = _run(fn, world_size, args, kwargs, timeout=timeout, backend=backend, init=init)
    kinds = {r.kind for r in ranks}
    if "hung" in kinds and "error" not in kinds:
        raise _failure(ranks, timeout)
    return [None if r.error is None else str(r.error) for r in ranks]


def simulate_ranks(
    fn: Callable[..., Any], world_size: int = 2, *args: Any, **kwargs: Any
) -> list[Any]:
    """As `run_ranks`, on ranks simulated in this process, which costs half or less.

    For the many cells of one test, of which others run on real ranks. What a rank sets in a module
    of torch's is set for all of them.
    """
    if DEVICE != "cpu":  # which simulated ranks cannot share
        return run_ranks(fn, world_size, *args, **kwargs)
    from fsdp_compose import simulate

    return simulate(lambda: fn(dist.get_rank(), *args, **kwargs), world_size)


@contextlib.contextmanager
def cell(*names: object) -> Iterator[None]:
    """Names the turn of a loop in what fails in it: several cells of a test in one fork."""
    try:
        yield
    except Exception as error:
        where = ", ".join(map(str, names))
        raise AssertionError(f"in {where}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """This process as `rank` of a world in which collectives move nothing and return at once."""
    assert not dist.is_initialized(), "a process group exists already"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def single_process() -> Iterator[None]:
    """This process without a process group: says so, and checks that none was left behind."""
    assert not dist.is_initialized(), "a process group exists already"
    yield
    assert not dist.is_initialized(), "a process group was left behind"


def _run(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    timeout: float,
    backend: str,
    init: bool,
) -> list[_Rank]:
    if dist.is_initialized():
        raise RuntimeError(
            "run_ranks: this process has a process group, which its forks would inherit; "
            "leave fake_world() or call dist.destroy_process_group() first"
        )
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "run_ranks: this process has initialised CUDA, which cannot be forked; "
            "do the work on the GPU inside run_ranks(fn, 1, backend=...)"
        )
    sys.stdout.flush()
    sys.stderr.flush()
    ranks: list[_Rank] = []
    release, hold = os.pipe()  # ranks leave when the parent closes `hold`, or dies
    try:
        with contextlib.ExitStack() as files:
            listener = files.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            listener.listen(world_size)
            for rank in range(world_size):
                output = files.enter_context(tempfile.TemporaryFile())
                stacks = files.enter_context(tempfile.TemporaryFile())
                pipe, report = os.pipe()
                with warnings.catch_warnings():
                    # Python 3.12 warns of forking with threads; torch's are idle pools.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    pid = os.fork()
                if pid == 0:
                    os.close(hold)
                    world = _World(rank, world_size, backend, listener, timeout) if init else None
                    call = lambda rank=rank: fn(rank, *args, **kwargs)  # noqa: E731
                    _child(call, world, report, release, output, stacks, timeout)
                os.close(report)
                ranks.append(_Rank(rank, pid, pipe, output, stacks))
            listener.close()
            try:
                _collect(ranks, timeout)
                _kill_hung([r for r in ranks if r.kind is None])
            finally:
                os.close(hold)
                hold = -1
                for r in ranks:
                    _reap(r)
                for r in ranks:
                    _replay(r)
    finally:
        for fd in (release, hold, *(r.pipe for r in ranks)):
            if fd >= 0:
                os.close(fd)
    skipped = [r for r in ranks if r.kind == "skip"]
    if skipped and all(r.kind != "error" for r in ranks):
        pytest.skip(f"rank {skipped[0].rank}: {skipped[0].value}")
    return ranks


def _collect(ranks: list[_Rank], timeout: float) -> None:
    """Read every rank's message, until the deadline or GRACE after the first failure."""
    deadline = time.monotonic() + timeout
    order = 0
    with selectors.DefaultSelector() as ready:
        for r in ranks:
            ready.register(r.pipe, selectors.EVENT_READ, r)
        while ready.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return
            for key, _ in ready.select(left):
                r = key.data
                data = os.read(r.pipe, 1 << 20)
                r.received += data
                size = int.from_bytes(r.received[:8], "little")
                if data and not (len(r.received) >= 8 and len(r.received) >= 8 + size):
                    continue
                ready.unregister(r.pipe)
                r.order = order = order + 1
                _decode(r, complete=bool(data))
                if r.kind != "ok":
                    deadline = min(deadline, time.monotonic() + GRACE)


def _decode(r: _Rank, complete: bool) -> None:
    """Fill in the outcome of a rank that reported or, not `complete`, went away without."""
    if complete:
        r.kind, r.value = pickle.loads(memoryview(r.received)[8:])
        if r.kind == "error":
            r.error, r.value = r.value, None
    else:
        _, status = os.waitpid(r.pid, 0)
        r.reaped = True
        code = os.waitstatus_to_exitcode(status)
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        r.kind, r.error = "error", RankError("Died", f"{how} without a result", _stacks(r))
    r.received = bytearray()


def _kill_hung(ranks: list[_Rank]) -> None:
    """Ask the ranks that still run for their Python stacks, then kill them."""
    for r in ranks:
        os.kill(r.pid, signal.SIGUSR1)
    patience = time.monotonic() + STACK_DUMP
    for r in ranks:
        size = -1
        while time.monotonic() < patience:
            time.sleep(0.02)
            before, size = size, os.fstat(r.stacks.fileno()).st_size
            if size == before > 0:
                break
        os.kill(r.pid, signal.SIGKILL)
        trace = _stacks(r) or "(no stack: the process did not answer)"
        r.kind, r.error = "hung", RankError("Hung", f"still running\n{trace}", trace)


def _reap(r: _Rank) -> None:
    if not r.reaped:
        if r.kind is None:  # an exception in the parent, such as Ctrl-C
            os.kill(r.pid, signal.SIGKILL)
        os.waitpid(r.pid, 0)
        r.reaped = True


def _replay(r: _Rank) -> None:
    for line in _text(r.output).splitlines():
        print(f"[rank {r.rank}] {line}")


def _text(file: IO[bytes]) -> str:
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")


def _stacks(r: _Rank) -> str:
    """What faulthandler wrote, without the frames that led pytest to the fork."""
    lines, ours = [], True
    for line in _text(r.stacks).splitlines():
        ours = (ours or not line.startswith("  ")) and f'"{__file__}"' not in line
        if ours:
            lines.append(line)
    return "\n".join(lines).strip()


def _failure(ranks: list[_Rank], timeout: float) -> _RankReport:
    """The exception that tells what happened, first things first."""
    raised = sorted((r for r in ranks if r.kind == "error"), key=lambda r: r.order)
    hung = [r for r in ranks if r.kind == "hung"]
    errors = {r.rank: r.error for r in (*raised, *hung) if r.error is not None}
    parts = []
    if raised:
        first = raised[0]
        parts.append(f"{len(raised)} of {len(ranks)} ranks failed; rank {first.rank} first")
    else:
        names = ", ".join(str(r.rank) for r in hung)
        parts.append(f"rank {names} of {len(ranks)} still running after {timeout:g} s")
    for rank, error in errors.items():
        verb = "hung" if error.type == "Hung" else f"failed: {error}"
        parts.append(f"---- rank {rank} {verb} ----\n{error.traceback.rstrip()}")
    report = "\n\n".join(parts)
    return RankFailure(report, errors) if raised else RankTimeout(report, errors)


@dataclass(frozen=True)
class _World:
    """How a rank finds the others: rank 0 serves the store on the socket the parent opened."""

    rank: int
    size: int
    backend: str
    listener: socket.socket
    timeout: float

    def join(self) -> None:
        host, port = self.listener.getsockname()
        if "nccl" in self.backend:
            _take_device(self.rank, self.size)
        patience = timedelta(seconds=max(1.0, 0.9 * self.timeout))
        server = self.rank == 0
        fd = self.listener.detach() if server else None
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, self.size, server, patience, wait_for_workers=False, master_listen_fd=fd
        )
        dist.init_process_group(
            self.backend, store=store, rank=self.rank, world_size=self.size, timeout=patience
        )


def _take_device(rank: int, size: int) -> None:
    """Make a GPU this rank's. Where ranks share one, NCCL is told that each has a host of its own.

    It refuses two ranks of one host on one GPU; between hosts it sends through sockets.
    """
    count = torch.cuda.device_count()
    torch.cuda.set_device(rank % count)
    if count < size:
        os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")


def _child(
    call: Callable[[], Any],
    world: _World | None,
    report: int,
    release: int,
    output: IO[bytes],
    stacks: IO[bytes],
    timeout: float,
) -> NoReturn:
    """The whole life of a rank. Never returns and lets nothing escape."""
    try:
        _begin_rank(output, stacks, timeout)
        message = _outcome(call, world)
        sys.stdout.flush()
        sys.stderr.flush()
        _send(report, message)
        os.read(release, 1)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        os._exit(70)
    os._exit(0)


def _begin_rank(output: IO[bytes], stacks: IO[bytes], timeout: float) -> None:
    """Make the fork a process of its own: output, signals, one thread, a seed."""
    gc.freeze()  # what the parent left as garbage is not this rank's to finalise
    gc.callbacks.clear()  # in which hypothesis measures each collection
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, timeout + GRACE + 10)  # should the parent be gone
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent tells us by SIGKILL
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    for fd in (1, 2):
        os.dup2(output.fileno(), fd)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), "utf-8", write_through=True)
        for fd in (1, 2)
    )
    for name in ("lo", "lo0"):
        if name in {interface for _, interface in socket.if_nameindex()}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)  # else it resolves the host name
    torch.set_num_threads(1)
    if DEVICE == "cpu":
        torch.default_generator.manual_seed(0)  # torch.manual_seed asks all kinds of devices
    else:
        torch.manual_seed(0)


def _outcome(call: Callable[[], Any], world: _World | None) -> bytes:
    """Run the rank; what it returned or raised, ready to send."""
    unraisable: list[str] = []
    sys.unraisablehook = lambda u: unraisable.append(
        f"{u.err_msg or 'Exception ignored in'}: {u.object!r}\n"
        + "".join(traceback.format_exception(u.exc_type, u.exc_value, u.exc_traceback))
    )
    try:
        if world is not None:
            world.join()
        value = _recorded(call) if os.environ.get(TRACES) else call()
        if unraisable:
            error = RankError("Unraisable", "an exception nobody could catch", unraisable[0])
            return pickle.dumps(("error", error))
        return _pack(("ok", value))
    except pytest.skip.Exception as e:
        return pickle.dumps(("skip", str(e)))
    except BaseException as e:
        trace = e.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        text = "".join(traceback.format_exception(e.with_traceback(trace or e.__traceback__)))
        return pickle.dumps(("error", RankError(type(e).__name__, str(e), text)))


TRACES = "FSDP_COMPOSE_TRACES"
"""In the environment: a file; each rank's traces are checked, and how many there were noted."""


def _recorded(call: Callable[[], Any]) -> Any:
    """What ``call`` returns; the rules of the schedule must accept what its engines did."""
    from fsdp_compose.base.process import here

    from traces import accept, recording

    here.engines.clear()  # those of the process that was forked are not recorded
    with recording() as traces:
        value = call()
    states = set().union(*(accept(trace) for trace in traces))
    with open(os.environ[TRACES], "a") as file:
        events = sum(len(trace.events) for trace in traces)
        file.write(f"{len(traces)} traces, {events} events, {len(states)} states\n")
    return value


class _PlainPickler(pickle.Pickler):
    """Pickles tensors, at any depth, as plain tensors: detached, on the CPU, owning their data."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        if type(obj) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise TypeError(
                f"a rank returned a {type(obj).__name__}; return a plain tensor "
                "(its to_local() or full_tensor())"
            )
        with torch.no_grad():
            return obj.detach().cpu().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _pack(message: object) -> bytes:
    buffer = io.BytesIO()
    _PlainPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getvalue()


def _send(fd: int, message: bytes) -> None:
    data = memoryview(len(message).to_bytes(8, "little") + message)
    while data:
        data = data[os.write(fd, data) :]
