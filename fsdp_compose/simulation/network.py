"""Messages between ranks: each posts its part, and when all have come the data may move.

Parts meet by number: the n-th message from one rank to another with one tag meets the n-th that is
received there, and a group's n-th collective is the same call on all of its ranks. Whether the data
of a complete exchange moves at once or later, at the latest when somebody waits for it, is the
generator's choice: who reads too early reads what was there before, as on a network.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch

from fsdp_compose.simulation.faults import (
    DelayMessage,
    DelayRank,
    Fault,
    KillRank,
    LoseMessage,
    RaiseError,
    RunOtherUnit,
)
from fsdp_compose.simulation.scheduler import Ended, RankThread, Scheduler

AT_ONCE = 0.5
"""How often data moves as soon as it can."""


@dataclass(frozen=True, eq=False)
class Contribution:
    """What one rank brings to an exchange.

    Attributes:
        what: kind, reduction, root and sizes, which all parts of a collective agree on.
        sent, received: by rank where there is one for each.
    """

    what: tuple[object, ...]
    sent: Sequence[torch.Tensor]
    received: Sequence[torch.Tensor]


Move = Callable[[dict[int, Contribution]], None]
"""Moves the data of an exchange, whose parts are given by rank in the group."""


@dataclass(eq=False)
class SimulatedExchange:
    """One message, or one collective: parts by rank in the group, until the data has moved."""

    members: tuple[int, ...]  # world ranks, by rank in the group, of those that take part
    move: Move
    parts: dict[int, Contribution] = field(default_factory=dict)
    is_complete: bool = False
    is_done: bool = False
    error: str = ""

    def deliver(self) -> None:
        """Move the data, unless that was done."""
        if not self.is_done:
            self.is_done = True
            try:
                self.move(self.parts)
            except RuntimeError as error:
                self.error = str(error)
            self.parts = {}


class Network:
    """Every exchange that is not over, and the faults that strike them."""

    def __init__(self, scheduler: Scheduler, size: int, faults: Sequence[Fault]) -> None:
        self.scheduler, self.size = scheduler, size
        self.exchanges: dict[Hashable, SimulatedExchange] = {}
        self.joined: defaultdict[str, dict[int, int]] = defaultdict(dict)  # by name of the group
        self.events: defaultdict[int, int] = defaultdict(int)  # begun, by rank
        self.faults: dict[tuple[int, int], list[Fault]] = {}
        self.gone: dict[int, str] = {}  # how each rank that is over ended
        for fault in faults:
            if not isinstance(fault, RunOtherUnit):
                self.faults.setdefault((fault.rank, fault.event), []).append(fault)

    @property
    def rank(self) -> int:
        """The rank that runs."""
        task = self.scheduler.running
        assert task is not None
        return task.rank

    def join(self, key: str, rank: int) -> dict[int, int]:
        """Join the group named ``key`` as ``rank``; ranks of the world that have, by rank in it."""
        self.joined[key][rank] = self.rank
        return self.joined[key]

    def post(
        self,
        key: Hashable,
        place: int,
        part: Contribution,
        members: tuple[int, ...],
        move: Move,
    ) -> SimulatedExchange:
        """Bring ``part`` to the exchange ``key``, as the rank in place ``place`` of ``members``."""
        if self.rank in self.scheduler.killed:
            raise Ended
        later = self._strike()
        self.scheduler.may_switch()
        found = self.exchanges.get(key)
        if found is None:
            found = self.exchanges[key] = SimulatedExchange(members, move)
            self._fail_if_gone(found)

        def arrive() -> None:
            self._arrive(key, found, place, part)

        if later is None:
            arrive()
        elif later >= 0:
            self.scheduler.after(later, arrive)
        return found

    def wait(self, exchange: SimulatedExchange, purpose: str, seconds: float) -> None:
        """Return when the data of ``exchange`` is there.

        Raises:
            RuntimeError: it cannot come any more, or did not in ``seconds`` of simulated time.
        """
        if exchange.is_complete:
            self.scheduler.may_switch()

        def is_over() -> bool:
            return exchange.is_complete or bool(exchange.error)

        in_time = self.scheduler.wait(is_over, purpose, seconds)
        if exchange.is_complete and not exchange.is_done:
            exchange.deliver()
        if exchange.error:
            raise RuntimeError(exchange.error)
        if not in_time:
            raise RuntimeError(
                f"timed out after {seconds:g} s of the simulation's time waiting to {purpose}"
            )

    def end(self, task: RankThread) -> None:
        """What ``task``'s rank has not sent yet never comes, if it was the rank's last thread."""
        if any(other.rank == task.rank for other in self.scheduler.tasks):
            return
        if task.rank in self.scheduler.killed:
            self.gone[task.rank] = "was killed"
        elif task.error is not None:
            self.gone[task.rank] = f"has raised {type(task.error).__name__}: {task.error}"
        else:
            self.gone[task.rank] = "has returned"
        for exchange in list(self.exchanges.values()):
            self._fail_if_gone(exchange)

    def _fail_if_gone(self, exchange: SimulatedExchange) -> None:
        for place, rank in enumerate(exchange.members):
            if rank in self.gone and place not in exchange.parts:
                exchange.error = f"connection closed: rank {rank} {self.gone[rank]}"

    def _arrive(
        self, key: Hashable, exchange: SimulatedExchange, place: int, part: Contribution
    ) -> None:
        first = next(iter(exchange.parts), None)
        if first is not None and exchange.parts[first].what != part.what:
            exchange.error = (
                f"rank {exchange.members[first]} calls {_words(exchange.parts[first].what)}, and "
                f"rank {exchange.members[place]} calls {_words(part.what)} at its place in the "
                "group"
            )
        exchange.parts[place] = part
        if len(exchange.parts) < len(exchange.members):
            return
        self.exchanges.pop(key, None)
        if exchange.error:
            return
        exchange.is_complete = True
        if self.scheduler.generator.random() < AT_ONCE:
            exchange.deliver()
        else:
            self.scheduler.flying.append(exchange)

    def _strike(self) -> float | None:
        """Count an event of the rank that runs, and do to it what the faults say.

        Returns:
            None where its message arrives in time, else in how many seconds; below 0: never.
        """
        rank = self.rank
        event = self.events[rank]
        self.events[rank] += 1
        later: float | None = None
        for fault in self.faults.get((rank, event), ()):
            match fault:
                case KillRank():
                    self.scheduler.kill(rank)
                    raise Ended
                case RaiseError():
                    raise fault.error
                case DelayRank():
                    self.scheduler.sleep(fault.seconds)
                case LoseMessage():
                    later = -1.0
                case DelayMessage():
                    later = fault.seconds
        return later


def _words(what: tuple[object, ...]) -> str:
    return " ".join(str(part) for part in what if part not in (None, ""))
