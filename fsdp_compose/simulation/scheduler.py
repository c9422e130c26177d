"""Who runs next, and what time it is for the ranks.

Every rank is a thread, and so is what a rank starts through ``here.clock``. One of them holds the
baton and runs; the others wait for it. At communication a seeded generator says who goes on. Time
stands still while anyone can run, and then jumps to the next thing that is due: the end of a sleep,
a late message, or the timeout of whoever waits for what can no longer come.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch

from fsdp_compose.base.process import Clock
from fsdp_compose.base.torch_private import forward_level
from fsdp_compose.simulation.own import Own

_PACKAGES = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent))


SWITCHING = 0.5
"""How often another rank may go on when one begins to communicate; less often in large worlds."""


_FORWARD_MODE = (
    "simulate: rank {} would wait for the others inside forward-mode AD (jvp, jacfwd, hessian, "
    "dual_level), of which a process has one for all simulated ranks; run this program on "
    "processes: fsdp-compose run --nproc N."
)


class Ended(BaseException):
    """Ends the thread of a rank that was killed, or whose simulation is over."""


class Flying(Protocol):
    """A message that has been sent and received, and whose data has not been moved yet."""

    def deliver(self) -> None:
        """Move the data."""


@dataclass(eq=False)
class RankThread:
    """A thread of a rank, and what it waits for; ``ready`` is None when it can run."""

    rank: int
    own: Own
    name: str
    baton: threading.Lock = field(default_factory=threading.Lock)
    thread: threading.Thread | None = None
    ready: Callable[[], bool] | None = None
    deadline: float | None = None
    is_due: bool = False
    purpose: str = ""
    is_over: bool = False
    error: BaseException | None = None

    def can_run(self) -> bool:
        return self.ready is None or self.is_due or self.ready()


class Scheduler:
    """Hands the baton from thread to thread, as ``seed`` says."""

    def __init__(self, seed: int) -> None:
        self.generator = random.Random(seed)
        self.now = 0.0
        self.tasks: list[RankThread] = []
        self.threads: list[threading.Thread] = []  # that may still be ending
        self.running: RankThread | None = None
        self.flying: list[Flying] = []
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.killed: set[int] = set()
        self.finished = threading.Event()
        self.on_end: Callable[[RankThread], None] = lambda task: None
        self.stuck = ""  # where each rank stood when the first of them waited in vain
        self.switches = 0
        self.clock = Clock(now=lambda: self.now, sleep=self.sleep, thread=self.make_thread)

    def start(self, task: RankThread, run: Callable[[], None]) -> None:
        """Let ``run`` be scheduled as ``task``, in a thread of its own."""

        def body() -> None:
            task.baton.acquire()
            try:
                if task.rank not in self.killed:
                    run()
            except BaseException as error:
                task.error = error
            finally:
                task.is_over = True
                self.tasks.remove(task)
                self.on_end(task)
                self._hand_over(task, self._choose())

        task.baton.acquire()
        self.tasks.append(task)
        task.thread = threading.Thread(target=body, name=task.name, daemon=True)
        self.threads = [*filter(threading.Thread.is_alive, self.threads), task.thread]
        task.thread.start()

    def run(self) -> None:
        """Run all tasks to their end, and wait for what their threads still free.

        A thread that frees tensors while the process exits would abort it.
        """
        if self.tasks:
            self._hand_over(None, self._choose())
            self.finished.wait()
            for thread in self.threads:
                thread.join()

    def make_thread(
        self, target: Callable[[], None], name: str = "", daemon: bool = False
    ) -> SimulatedThread:
        """As ``threading.Thread``: one of the rank that runs."""
        assert self.running is not None
        return SimulatedThread(self, RankThread(self.running.rank, self.running.own, name), target)

    def sleep(self, seconds: float) -> None:
        self.wait(lambda: False, "", seconds)

    def switch(self) -> None:
        """Let the generator say who goes on: this rank, or another that can."""
        task = self.running
        assert task is not None
        following = self._choose()
        if following is not task:
            if following is not None and following.own is not task.own and forward_level() >= 0:
                raise RuntimeError(_FORWARD_MODE.format(task.rank))
            self._hand_over(task, following)
        if task.rank in self.killed:
            raise Ended

    def may_switch(self) -> None:
        """Switch now and then, though this rank need not wait."""
        if self.generator.random() < min(SWITCHING, 4 / len(self.tasks)) and forward_level() < 0:
            self.switch()

    def wait(self, ready: Callable[[], bool], purpose: str, seconds: float | None = None) -> bool:
        """Return True once ``ready()``, or False when ``seconds`` are over and it is not."""
        task = self.running
        assert task is not None
        if not ready():
            task.ready, task.purpose, task.is_due = ready, purpose, False
            task.deadline = None if seconds is None else self.now + seconds
            try:
                self.switch()
            finally:
                task.ready, task.deadline = None, None
        task.purpose = ""
        return ready()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call ``call`` when the ranks' time has come so far."""
        self.timers.append((self.now + seconds, call))

    def kill(self, rank: int) -> None:
        """Let every thread of ``rank`` end where it stands."""
        self.killed.add(rank)
        for task in self.tasks:
            if task.rank == rank and task is not self.running:
                task.is_due = True

    def positions(self) -> dict[int, str]:
        """Where each rank's first thread stands, in the user's code, and what it waits for."""
        frames = sys._current_frames()
        found: dict[int, str] = {}
        for task in self.tasks:
            frame = frames.get(task.thread.ident or 0) if task.thread is not None else None
            place = found.setdefault(task.rank, position_of(frame))
            if task.purpose:
                begun = task.own.process["watch"].begun  # what the engine waits for, by thread
                wait = begun.get(task.thread.ident) if task.thread is not None else None
                inner = "" if wait is None else f" to {wait[0]}:"
                found[task.rank] = f"{place}, waits{inner} to {task.purpose}"
        return dict(sorted(found.items()))

    def _choose(self) -> RankThread | None:
        """The next to run, after whatever the generator lets arrive before; None: all are over."""
        self.switches += 1
        while self.tasks:
            able = [task for task in self.tasks if task.can_run()]
            number = len(able) + len(self.flying)
            if not number:
                self._advance()
                continue
            index = self.generator.randrange(number)
            if index < len(able):
                return able[index]
            self.flying.pop(index - len(able)).deliver()
        return None

    def _advance(self) -> None:
        """Let the time jump to what is due next."""
        due = min((time for time, _ in self.timers), default=None)
        waits = [task for task in self.tasks if task.deadline is not None]
        task = min(waits, key=lambda task: task.deadline or 0.0, default=None)
        if task is not None and (due is None or (task.deadline or 0.0) < due):
            self.now = max(self.now, task.deadline or 0.0)
            task.is_due = True
            if task.purpose and not self.stuck:
                self.stuck = describe_positions(self.positions())
        elif due is not None:
            index = next(i for i, (time, _) in enumerate(self.timers) if time == due)
            self.now = max(self.now, due)
            self.timers.pop(index)[1]()
        else:  # nobody has a timeout: the first is told that what it waits for never comes
            self.stuck = self.stuck or describe_positions(self.positions())
            self.tasks[0].is_due = True

    def _hand_over(self, task: RankThread | None, following: RankThread | None) -> None:
        """Pass the baton, and come back when it is here again."""
        if following is None:
            if task is not None:
                task.own.leave()
            self.finished.set()
            return
        if task is not None and task.own is not following.own:
            task.own.leave()
        if task is None or task.own is not following.own:
            following.own.enter()
        self.running = following
        following.baton.release()
        if task is not None and not task.is_over:
            task.baton.acquire()


class SimulatedThread:
    """What ``threading.Thread`` is to a process: further work of a rank, which takes turns too."""

    def __init__(self, scheduler: Scheduler, task: RankThread, target: Callable[[], Any]) -> None:
        self.scheduler, self.task, self.target = scheduler, task, target

    def start(self) -> None:
        self.scheduler.start(self.task, self.target)

    def join(self, timeout: float | None = None) -> None:
        self.scheduler.wait(lambda: self.task.is_over, "", timeout)

    def is_alive(self) -> bool:
        return not self.task.is_over


def position_of(frame: FrameType | None) -> str:
    """``file:line in function`` of the innermost frame that is neither ours nor torch's."""
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_PACKAGES) and code.co_filename != threading.__file__:
            return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return "at its start"


def describe_positions(positions: dict[int, str]) -> str:
    """Positions as the lines of an error."""
    return "\n".join(f"    rank {rank}: {place}" for rank, place in positions.items())
