"""Starts the ranks of a script on this machine and leaves none of them behind.

``launch`` is what ``torchrun --standalone`` does in its simplest case, and sets the same
environment variables, so a script cannot tell the difference. Every rank leads a process group of
its own: a signal reaches a rank once, through the launcher, together with its children. POSIX only.
"""

from __future__ import annotations

import io
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import FrameType
from typing import IO, TextIO

__all__ = ["AGENT_STORE", "free_port", "launch", "usable_cores"]

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MOMENT = 1.0
"""Seconds in which a rank ends whose connections are closed already."""
_GRACE = 5.0
"""Seconds in which a rank ends that was told to stop."""


@dataclass(frozen=True)
class _Exited:
    rank: int
    code: int


@dataclass(frozen=True)
class _Signalled:
    signum: signal.Signals


_Event = _Exited | _Signalled


@dataclass
class _Ranks:
    """The running ranks, and one queue in which everything that happens to them arrives."""

    events: SimpleQueue[_Event] = field(default_factory=SimpleQueue)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    running: set[int] = field(default_factory=set)
    readers: list[threading.Thread] = field(default_factory=list)


def launch(
    script: str | os.PathLike[str],
    args: Sequence[str],
    *,
    nproc: int,
    env: Mapping[str, str] | None = None,
    is_module: bool = False,
) -> int:
    """Run ``nproc`` ranks of a Python script on this machine and return one exit code.

    Rank 0 inherits stdin, and the terminal for stdout and stderr, so a progress bar stays one. What
    it writes elsewhere is forwarded by line as it is, and what the others write behind
    ``[rank k]``, so that no line breaks another. When a rank fails it is named on stderr with its
    exit code or signal, the others are terminated, and its code is returned (128 + n for signal n).
    Ctrl-C interrupts every rank and returns 130; a rank that has not ended 5 seconds later,
    or at a second Ctrl-C, is killed. Call it from the main thread.

    ``env`` replaces the environment the ranks start from (default: this process's). OMP_NUM_THREADS
    is the number of usable cores over ``nproc``, unless it is set already. With ``is_module``,
    ``script`` is the name of a module, as for ``python -m``.
    """
    if nproc < 1:
        raise ValueError(f"nproc must be at least 1, found {nproc}")
    base = dict(os.environ if env is None else env)
    base.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // nproc)))
    base.pop(AGENT_STORE, None)
    base |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
    }
    command = [sys.executable, *(["-m"] if is_module else []), os.fspath(script), *args]
    ranks = _Ranks()
    code = 1
    with _signals_to(lambda signum: ranks.events.put(_Signalled(signum))):
        try:
            for rank in range(nproc):
                _start(ranks, rank, command, base | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            code = _supervise(ranks)
        finally:
            if code != 0:
                _sweep(ranks)
            for reader in ranks.readers:
                reader.join(timeout=1.0)
    return code


AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Tells ranks of torchrun that it keeps their store, for which other ranks would look in vain."""

PORTS = range(15000, 32000)
"""Below those that systems give to outgoing connections, one of which could take a port that was
found free before rank 0 listens on it."""


def free_port() -> int:
    """Find a TCP port on the loopback interface that was free a moment ago."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"no free TCP port among 100 tried of {PORTS[0]} to {PORTS[-1]}.")


def usable_cores() -> int:
    """How many cores this process may run on."""
    if "sched_getaffinity" in dir(os):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def _signals_to(handle: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Pass stop signals to ``handle`` instead of raising.

    An exception raised between fork and the assignment of its result would lose a rank.
    """

    def handler(signum: int, frame: FrameType | None) -> None:
        handle(signal.Signals(signum))

    before = {
        signum: signal.signal(signum, handler)
        for signum in _STOP_SIGNALS
        # Under nohup a closed terminal must stay unheard.
        if not (signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN)
    }
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, signal.SIG_DFL if old is None else old)


def _start(ranks: _Ranks, rank: int, command: list[str], env: dict[str, str]) -> None:
    out, err = (
        None if rank == 0 and sink.isatty() else subprocess.PIPE
        for sink in (sys.stdout, sys.stderr)
    )
    process = subprocess.Popen(
        command,
        env=env if out is None else {"PYTHONUNBUFFERED": "1"} | env,  # a terminal shows each line
        stdin=None if rank == 0 else subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,
    )
    ranks.processes.append(process)
    ranks.running.add(rank)

    def wait() -> None:
        ranks.events.put(_Exited(rank, process.wait()))

    threading.Thread(target=wait, daemon=True).start()
    for source, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
        if source is not None:
            reader = threading.Thread(target=_forward, args=(rank, source, sink), daemon=True)
            reader.start()
            ranks.readers.append(reader)


def _forward(rank: int, source: IO[bytes], sink: TextIO) -> None:
    encoding = sink.encoding or "utf-8"  # in which not all that a rank writes can be said
    as_it_is = getattr(sink, "buffer", None) if rank == 0 else None  # a notebook's has none
    with io.TextIOWrapper(source, errors="surrogateescape", newline="") as lines:
        for line in lines:
            with suppress(BrokenPipeError):  # as `head` leaves it; ranks still write
                if as_it_is is not None:
                    as_it_is.write(line.encode(lines.encoding, "surrogateescape"))
                else:
                    text = line if rank == 0 else f"[rank {rank}] {line.rstrip()}\n"
                    sink.write(text.encode(encoding, "backslashreplace").decode(encoding))
                sink.flush()


def _supervise(ranks: _Ranks) -> int:
    """Wait until every rank has ended well, one has failed, or the launcher is told to stop."""
    while ranks.running:
        event = ranks.events.get()
        if isinstance(event, _Signalled):
            _say(f"{event.signum.name}: stopping {_names(ranks.running)}")
            _stop(ranks, event.signum)
            return 128 + event.signum
        done = set(range(len(ranks.processes))) - ranks.running
        ranks.running.discard(event.rank)
        if event.code != 0:
            event = _find_cause(ranks, event)
            after = f", after {_names(done)} had ended with code 0" if done else ""
            rest = f"; terminating {_names(ranks.running)}" if ranks.running else ""
            _say(f"rank {event.rank} {_how_it_ended(event.code)}{after}{rest}")
            _stop(ranks, signal.SIGTERM)
            return event.code if event.code > 0 else 128 - event.code
    return 0


def _find_cause(ranks: _Ranks, first: _Exited) -> _Exited:
    """The rank that failed, where another ended before it because it was going.

    An exception ends a process with code 1, also one about a rank that closed its connections and
    has not ended yet. So a rank that ends with another code in the next moment is the cause.
    """
    deadline = time.monotonic() + _MOMENT
    found = first
    while found.code == 1 and ranks.running:
        try:
            event = ranks.events.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            break
        if isinstance(event, _Signalled):
            ranks.events.put(event)
            break
        ranks.running.discard(event.rank)
        found = event if event.code not in (0, 1) else found
    return found


def _stop(ranks: _Ranks, signum: signal.Signals) -> None:
    """Send ``signum`` to the ranks that run, wait ``_GRACE`` seconds, then kill what is left."""
    if not ranks.running:
        return
    _send(ranks, signum, ranks.running)
    deadline = time.monotonic() + _GRACE
    while ranks.running:
        try:
            event = ranks.events.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            event = None
        if isinstance(event, _Exited):
            ranks.running.discard(event.rank)
        else:
            _send(ranks, signal.SIGKILL, ranks.running)
            deadline = time.monotonic() + _GRACE


def _sweep(ranks: _Ranks) -> None:
    """Kill every rank that is left, and what ended ranks left running (data loader workers)."""
    _stop(ranks, signal.SIGKILL)
    _send(ranks, signal.SIGKILL, range(len(ranks.processes)))


def _send(ranks: _Ranks, signum: signal.Signals, to: Iterable[int]) -> None:
    for rank in to:
        # A group that is gone ended by itself; its exit is, or was, in the queue.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(ranks.processes[rank].pid, signum)


def _names(ranks: set[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _say(message: str) -> None:
    print(f"fsdp-compose: {message}", file=sys.stderr, flush=True)
