"""W ranks in this process, without a launcher: one runs at a time, and a seed repeats the run.

Files, each importing only from those above it:

    faults     what goes wrong in a run, as data
    own        what each rank has of its own: random numbers, groups, environment
    scheduler  who runs next, and what time it is for the ranks
    reduce     the arithmetic of reductions, and copies that nothing else sees
    network    messages between ranks: who has come, what has arrived
    store      the key-value store that ranks share
    work       communication under way, as torch hands it out
    group      torch's process group, over the network
    simulate   the public function, and the error that says where each rank stood
"""

from fsdp_compose.simulation.faults import (
    DelayMessage,
    DelayRank,
    Fault,
    KillRank,
    LoseMessage,
    RaiseError,
    RunOtherUnit,
)
from fsdp_compose.simulation.simulate import SimulationError, simulate

__all__ = [
    "DelayMessage",
    "DelayRank",
    "Fault",
    "KillRank",
    "LoseMessage",
    "RaiseError",
    "RunOtherUnit",
    "SimulationError",
    "simulate",
]
