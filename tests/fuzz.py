"""A differential fuzzer: random sharded models run random programs beside plain models.

    python tests/fuzz.py --minutes 60                  # until the time is over; failures are shrunk
    python tests/fuzz.py --world 2 --seeds 17 18       # these seeds, or a range: --seeds 0:1000

The ranks are simulated, in an order that the seed gives. After every operation the sharded model's
losses, gradients, parameters and norms equal those of one process on the batches of all ranks. What
has no gradient there must have none here. Every other program has a fault: what is late changes
nothing, and what is lost or dead is an error of this library on every rank that lives.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import IO

import torch
import torch.distributed as dist

from fsdp_compose.simulation import DelayMessage, DelayRank, RaiseError, SimulationError, simulate

from fuzz_operations import Run, loss_of, make_optimizer, operations, shard
from fuzz_programs import (
    Case,
    OnPurpose,
    build,
    draw,
    leaves,
    nodes,
    smaller,
)
from models import (
    Tolerance,
    Twin,
)

WORLDS = (2, 3, 2, 4, 2, 1, 2, 5, 2, 4, 2, 6, 2, 3, 2, 8, 2, 4, 2, 3, 2, 4, 2, 12, 2, 3, 2, 16)
"""Sizes of worlds, in turn: most of what goes wrong needs two ranks, and those are cheap."""


def run_case(rank: int, case: Case) -> None:
    """Run ``case`` on this rank, beside its plain twin."""
    warnings.filterwarnings("ignore", message="the forward of unit")  # a skipped node
    low = any(leaf.dtype != "float64" for leaf in leaves(case.tree))
    tolerance = Tolerance(2e-4, 2e-5) if low else Tolerance(1e-7, 1e-9)
    twin = Twin(
        rank,
        case.world,
        lambda: build(case.tree),
        lambda model: shard(case, model),
        lambda params: make_optimizer(case.optimizer, params),
        tolerance,
    )
    run = Run(case, rank, twin)
    for seed, (name, n) in enumerate(case.ops):
        operations[name](run, n, seed)
    twin.check_grads()
    for model in run.all_models:
        for node in nodes(model):
            node.skip = None
    twin.backward(loss_of, 99)
    twin.check()


def run_seeds(rank: int, world: int, seeds: Sequence[int], progress: IO[bytes]) -> None:
    """Run the cases of ``seeds``, one after the other, on the same ranks of a launcher.

    Args:
        progress: a file that says how many are done, for a run that hangs.
    """
    for done, seed in enumerate(seeds):
        if rank == 0:
            os.pwrite(progress.fileno(), done.to_bytes(4, "little"), 0)
        try:
            run_case(rank, draw(seed, world))
        except Exception as e:
            raise RuntimeError(f"seed {seed} of world {world}: {e}") from e
        dist.barrier()


def failure_of(case: Case, seed: int = 0) -> str | None:
    """What goes wrong in ``case`` where events come in the order of ``seed``; None if nothing."""
    faults = [] if case.fault is None else [case.fault]
    try:
        simulate(lambda: run_case(dist.get_rank(), case), case.world, seed=seed, faults=faults)
    except SimulationError as error:
        return judge(case, error)
    return None


def judge(case: Case, error: SimulationError) -> str | None:
    """What is wrong with how a simulation ended; None where its fault explains it."""
    text = str(error)
    if case.fault is None or isinstance(case.fault, DelayMessage | DelayRank):
        return text
    for rank, found in error.errors.items():
        own = isinstance(found, OnPurpose) and isinstance(case.fault, RaiseError)
        if not (own and rank == case.fault.rank) and not is_ours(found):
            return f"rank {rank} raises {type(found).__name__}: {found}\nin: {text}"
    lived = set(range(case.world)) - set(error.errors) - set(error.results)
    if lived - {case.fault.rank}:
        return f"ranks {lived} ended without a word: {text}"
    return None


def is_ours(error: BaseException) -> bool:
    """Whether an error is one that this library words, of a rank that another one left alone."""
    return isinstance(error, RuntimeError) and (
        "does not answer" in str(error) or "found on rank" in str(error) or " left " in str(error)
    )


def shrink(case: Case, seed: int = 0, budget: float = 120.0) -> tuple[Case, str | None]:
    """A smaller case that fails too, and how; ``case`` itself if it does not fail alone."""
    found = failure_of(case, seed)
    deadline = time.monotonic() + budget
    while found is not None and time.monotonic() < deadline:
        for simpler in smaller(case):
            if time.monotonic() > deadline:
                break
            if (failure := failure_of(simpler, seed)) is not None:
                case, found = simpler, failure
                break
        else:
            break
    return case, found


def case_of(seed: int, world: int) -> Case:
    """The program of a seed: every other one has a fault."""
    return draw(seed, world, with_fault=world > 1 and seed % 2 == 1)


def search(world: int, seeds: Sequence[int], report: Callable[[str], None] = print) -> list[int]:
    """Run ``seeds``; report each that fails, shrunk; return those."""
    failed: list[int] = []
    for seed in seeds:
        case = case_of(seed, world)
        if failure_of(case, seed) is not None:
            failed.append(seed)
            case, failure = shrink(case, seed)
            report(f"seed {seed} of world {world}: {failure or 'not alone'}\n  {case}")
    return failed


def _stop(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("a program takes longer than ten minutes")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=0, help="ranks; 0: 1 to 16 in turn")
    parser.add_argument("--seeds", nargs="*", default=["0:200"], help="numbers and ranges a:b")
    parser.add_argument("--minutes", type=float, help="go on with further seeds for so long")
    options = parser.parse_args(arguments)
    seeds: list[int] = []
    for text in options.seeds:
        first, _, last = text.partition(":")
        seeds += range(int(first), int(last)) if last else [int(first)]
    started, ran, failed = time.monotonic(), 0, 0
    signal.signal(signal.SIGALRM, _stop)
    while True:
        for seed in seeds:
            signal.alarm(600)
            failed += len(search(options.world or WORLDS[seed % len(WORLDS)], [seed]))
            ran += 1
            minutes = (time.monotonic() - started) / 60
            if ran % 100 == 0 or seed == seeds[-1]:
                print(f"{ran} programs, {failed} failed, {minutes:.1f} minutes", flush=True)
            if options.minutes is not None and minutes >= options.minutes:
                return bool(failed)
        if options.minutes is None:
            return bool(failed)
        seeds = list(range(seeds[-1] + 1, seeds[-1] + 1 + len(seeds)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
