"""What goes wrong in a simulated run, as data.

An ``event`` counts the communications that a rank has begun, from 0: collectives, and messages
between two ranks. On gloo the engine sends a message to each other rank for what is one gather.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True)
class KillRank:
    """The rank dies at its ``event``: it runs nothing more and says nothing to the others."""

    rank: int
    event: int


@dataclass(frozen=True)
class RaiseError:
    """At its ``event`` the rank's communication raises ``error`` instead."""

    rank: int
    event: int
    error: Exception = field(default_factory=lambda: RuntimeError("raised by the simulation"))


@dataclass(frozen=True)
class DelayRank:
    """At its ``event`` the rank stands still for so many seconds of the simulation's time."""

    rank: int
    event: int
    seconds: float


@dataclass(frozen=True)
class LoseMessage:
    """What the rank sends at its ``event`` arrives nowhere."""

    rank: int
    event: int


@dataclass(frozen=True)
class DelayMessage:
    """What the rank sends at its ``event`` arrives so many seconds of simulated time later."""

    rank: int
    event: int
    seconds: float


@dataclass(frozen=True)
class RunOtherUnit:
    """The rank's ``call``-th forward of ``unit`` runs ``instead`` first, which other ranks do not.

    Attributes:
        unit, instead: full names of units of one model, as errors print them; that of the
            outermost is its class, such as "Sequential".
        call: counted from 0.
    """

    rank: int
    unit: str
    instead: str
    call: int = 0


Fault: TypeAlias = KillRank | RaiseError | DelayRank | LoseMessage | DelayMessage | RunOtherUnit
