"""A differential fuzzer: random sharded models run random programs beside plain models.

    python tests/fuzz.py --minutes 60                  # until the time is over; failures are shrunk
    python tests/fuzz.py --world 2 --seeds 17 18       # these seeds, or a range: --seeds 0:1000

After every operation the sharded model's losses, gradients, parameters and norms equal those of
one process on the batches of all ranks. What has no gradient there must have none here.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import IO

import torch
import torch.distributed as dist

from fuzz_operations import Run, loss_of, make_optimizer, operations, shard
from fuzz_programs import (
    Case,
    build,
    draw,
    leaves,
    nodes,
    smaller,
)
from harness import RankFailure, RankTimeout, run_ranks
from models import (
    Tolerance,
    Twin,
)

BATCH_OF_SEEDS = 40  # programs that one set of ranks runs


def run_case(rank: int, case: Case) -> None:
    """Run ``case`` on this rank, beside its plain twin."""
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
    """Run the cases of ``seeds``, one after the other, on the same ranks.

    Args:
        progress: a file that says how many are done, for a run that hangs.
    """
    warnings.filterwarnings("ignore", message="the forward of unit")  # a skipped node
    for done, seed in enumerate(seeds):
        if rank == 0:
            os.pwrite(progress.fileno(), done.to_bytes(4, "little"), 0)
        try:
            run_case(rank, draw(seed, world))
        except Exception as e:
            raise RuntimeError(f"seed {seed} of world {world}: {e}") from e
        dist.barrier()


def run_one(rank: int, case: Case) -> None:
    warnings.filterwarnings("ignore", message="the forward of unit")
    run_case(rank, case)


def failure_of(case: Case, timeout: float = 20.0) -> str | None:
    """What goes wrong in ``case``, one line; None if nothing does."""
    try:
        run_ranks(run_one, case.world, case, timeout=timeout)
    except (RankFailure, RankTimeout) as e:
        first = min(e.errors) if e.errors else 0
        return f"{type(e).__name__}: {e.errors[first]}" if e.errors else type(e).__name__
    return None


def shrink(case: Case, budget: float = 120.0) -> tuple[Case, str | None]:
    """A smaller case that fails too, and how; ``case`` itself if it does not fail alone."""
    found = failure_of(case)
    deadline = time.monotonic() + budget
    while found is not None and time.monotonic() < deadline:
        for simpler in smaller(case):
            if time.monotonic() > deadline:
                break
            if (failure := failure_of(simpler)) is not None:
                case, found = simpler, failure
                break
        else:
            break
    return case, found


def run_batch(world: int, seeds: Sequence[int]) -> int | None:
    """The first of ``seeds`` that fails or hangs; None if none does."""
    with tempfile.TemporaryFile() as progress:
        try:
            run_ranks(run_seeds, world, world, seeds, progress, timeout=30.0 + 6.0 * len(seeds))
        except RankTimeout:
            return seeds[int.from_bytes(os.pread(progress.fileno(), 4, 0), "little")]
        except RankFailure as e:
            text = str(e)
            return next(seed for seed in seeds if f"seed {seed} of world" in text)
    return None


def search(world: int, seeds: Sequence[int], report: Callable[[str], None] = print) -> list[int]:
    """Run ``seeds`` in batches; report each that fails, shrunk; return those."""
    failed: list[int] = []
    for start in range(0, len(seeds), BATCH_OF_SEEDS):
        batch = list(seeds[start : start + BATCH_OF_SEEDS])
        while batch and (seed := run_batch(world, batch)) is not None:
            failed.append(seed)
            case, failure = shrink(draw(seed, world))
            report(f"seed {seed} of world {world}: {failure or 'not alone'}\n  {case}")
            batch = batch[batch.index(seed) + 1 :]
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=0, help="ranks; 0: 1 to 4 in turn")
    parser.add_argument("--seeds", nargs="*", default=["0:200"], help="numbers and ranges a:b")
    parser.add_argument("--minutes", type=float, help="go on with further seeds for so long")
    options = parser.parse_args(arguments)
    seeds: list[int] = []
    for text in options.seeds:
        first, _, last = text.partition(":")
        seeds += range(int(first), int(last)) if last else [int(first)]
    worlds = [options.world] if options.world else [2, 1, 3, 4]
    started, ran, failed = time.monotonic(), 0, 0
    size = len(seeds)
    while True:
        for world in worlds:
            try:
                failed += len(search(world, seeds))
            except Exception:
                traceback.print_exc()
                failed += 1
            ran += len(seeds)
            minutes = (time.monotonic() - started) / 60
            print(f"{ran} programs, {failed} failed, {minutes:.1f} minutes", flush=True)
            if options.minutes is not None and minutes >= options.minutes:
                return bool(failed)
        if options.minutes is None:
            return bool(failed)
        seeds = list(range(seeds[-1] + 1, seeds[-1] + 1 + size))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
