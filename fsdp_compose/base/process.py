"""What a process has one of: all of it is here, and nothing of it is made by an import alone.

What belongs to a model, an optimizer or a process group is kept by that, or under a weak reference
to it, where it is used. What is here has no such owner. Torch's and Python's own tables (hooks on
all optimizers, what happens after a fork) are added to once, by the first ``fully_shard``, wait or
plain view that needs them; see ``once``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_compose.base.environment import wants_debugging


@dataclass
class Traffic:
    """What this process has communicated, for tests and reports.

    Counts are collectives; bytes are what this rank receives: ``(W - 1) / W`` of a buffer for a
    gather or a reduce-scatter, twice that for an all-reduce. Moves are pieces of any size between
    pairs of ranks, outside the passes.
    """

    gathers: int = 0
    gather_bytes: int = 0
    reduces: int = 0
    reduce_bytes: int = 0
    all_reduces: int = 0
    all_reduce_bytes: int = 0
    moves: int = 0
    move_bytes: int = 0
    control: int = 0

    @property
    def collectives(self) -> int:
        """Collectives of passes; ``control`` counts messages outside of them: checks, errors."""
        return self.gathers + self.reduces + self.all_reduces + self.moves

    @property
    def total_bytes(self) -> int:
        return self.gather_bytes + self.reduce_bytes + self.all_reduce_bytes + self.move_bytes

    def reset(self) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, 0)


@dataclass(frozen=True)
class Clock:
    """How a process tells the time, sleeps and starts threads; a simulated rank has its own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    thread: Callable[..., Any] = threading.Thread


@dataclass(eq=False)
class Process:
    """The state of one process, which is one rank.

    A simulation has several ranks in one process, and gives ``here`` the attributes of the rank
    that runs; so read them from ``here`` each time.

    Attributes:
        traffic: counts what the process sends, whatever it is for, as a network card would.
        engines: by device, its streams and the pass that runs on it, which all models share: memory
            and order on a device are common to them. See ``core.state.Engine``.
        watch: the thread that looks at what every thread waits for; see ``comm.waiting``. A fork
            has none of its parent's threads, so it starts with a new one.
        calls: by thread, the call over a group that it is in; see ``comm.messages.attend_call``.
        posted: messages by their work, with their memory; see ``comm.posted``.
        looks: by thread, what it looks at while it waits; see ``comm.messages.looking``.
        saves: the ends of checkpoints that threads write in the background, which the next save or
            load, of any model, waits for: both may use the same folder.
        pytrees: classes that optree was taught, whose table belongs to the process.
        is_debugging: what ``set_debug`` chose, for all models.
        retrained: how often ``requires_grad`` of a sharded parameter was set: which of them train
            is asked again only after that.
        installed: what ``once`` has called.
        clock: time, sleep and threads.
        simulated: the network of the simulation that this rank is in.
        has_set_aside: whether the caller of a simulation froze objects (``gc.freeze``) before one.
    """

    traffic: Traffic = field(default_factory=Traffic)
    engines: dict[torch.device, Any] = field(default_factory=dict)
    watch: Any = None
    calls: dict[int, Any] = field(default_factory=dict)
    posted: dict[Any, Any] = field(default_factory=dict)
    looks: dict[int, Callable[[], None]] = field(default_factory=dict)
    saves: list[Any] = field(default_factory=list)
    pytrees: set[type] = field(default_factory=set)
    is_debugging: bool = field(default_factory=wants_debugging)
    retrained: int = 0
    installed: set[Callable[[], object]] = field(default_factory=set)
    clock: Clock = Clock()
    simulated: Any = None
    has_set_aside: bool = False


here = Process()


def once(install: Callable[[], object]) -> None:
    """Call ``install`` unless this process has done so before."""
    if install not in here.installed:
        here.installed.add(install)
        install()
