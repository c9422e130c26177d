"""A differential fuzzer: random sharded models run random programs beside plain models.

    python tests/fuzz.py --seeds 0-1000                # failures are shrunk and printed
    python tests/fuzz.py --world 2 --seeds 17 18       # these seeds, on two ranks
    python tests/fuzz.py --seeds 0-100000 --workers 2 --log fuzz.jsonl    # goes on where it was

The ranks are simulated, in an order that the seed gives. After every operation the sharded model's
losses, gradients, parameters and norms equal those of one process on the batches of all ranks. What
has no gradient there must have none here. Every other program has a fault: what is late changes
nothing, and what is lost or dead is an error of this library on every rank that lives.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import IO, Any

import fuzz_autograd  # noqa: F401 - its operations
import fuzz_calls  # noqa: F401 - its operations
import fuzz_failures  # noqa: F401 - its operations
import fuzz_losses  # noqa: F401 - its operations
import fuzz_phases  # noqa: F401 - its operations
import fuzz_starts  # noqa: F401 - its operations
import fuzz_surgery  # noqa: F401 - its operations
import torch
import torch.distributed as dist
from fuzz_options import shard

import fsdp_compose as fc
from fsdp_compose.base import mesh
from fsdp_compose.base.group import Group
from fsdp_compose.buckets.bucket import Bucket
from fsdp_compose.comm import messages, transports
from fsdp_compose.comm.collectives import is_point_to_point
from fsdp_compose.core.guards import used_parameters
from fsdp_compose.simulation import (
    DelayMessage,
    DelayRank,
    LoseMessage,
    RaiseError,
    SimulationError,
    simulate,
)

from fuzz_operations import Run, make_optimizer, operations
from fuzz_programs import (
    Case,
    OnPurpose,
    build,
    draw,
    leaves,
    leaves_units_kept,
    nodes,
    smaller,
    world_of,
)
from fuzz_search import Found, run_in_workers, seeds_of
from fuzz_storage import remove_folders
from fuzz_twin import Batched
from harness import DEVICE
from models import Tolerance, assert_at_rest, units


def run_case(rank: int, case: Case) -> None:
    """Run ``case`` on this rank, beside its plain twin."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="the forward of unit")  # a skipped node
    warnings.filterwarnings("ignore", message="module forward hook")  # torch's, of a second error
    warnings.filterwarnings("ignore", message="`_get_pg_default_device`")  # torch calls it itself
    warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")  # inputs detached
    low = bool(case.compute or case.reduce) or any(
        leaf.dtype != "float64" for leaf in leaves(case.tree)
    )
    tolerance = Tolerance(1e-3, 1e-4) if low else Tolerance(1e-7, 1e-9)
    twin = Batched(
        rank,
        case.world,
        lambda: build(case.tree),
        lambda model: shard(case, model),
        lambda params: make_optimizer(case.optimizer, params),
        tolerance,
    )
    if case.reordered and rank % 2 and twin.optim is not None:
        twin.optim = make_optimizer(case.optimizer, twin.optim.param_groups[0]["params"][::-1])
    run = Run(case, rank, twin)
    for seed, (name, n) in enumerate(case.ops):
        operations[name](run, n, seed)
    twin.check_grads()
    for model in run.both:
        for node in nodes(model):
            node.skip = None
    twin.train_on(99)
    if leaves_units_kept(case.tree):
        for unit in fc.units_of(twin.model):
            fc.reshard(unit)
        twin.check()
        return
    assert_at_rest(twin.model)
    for log in {log for unit in units(twin.model) for log in unit.links.logs}:
        assert not log.events and not log.guesses, "a step ends with nothing left to compare"
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
            case = draw(seed, world)  # on a device ranks hear of each other as over NCCL
            run_case(rank, case if DEVICE == "cpu" else replace(case, backend="nccl"))
        except Exception as e:
            raise RuntimeError(f"seed {seed} of world {world}: {e}") from e
        dist.barrier()


def failure_of(case: Case, seed: int = 0) -> str | None:
    """What goes wrong in ``case`` where events come in the order of ``seed``; None if nothing."""
    late = [fault for fault in case.late if fault.rank < case.world]
    faults = late if case.fault is None else [case.fault, *late]
    try:
        with groups_named(case.backend):
            simulate(lambda: run_case(dist.get_rank(), case), case.world, seed=seed, faults=faults)
    except SimulationError as error:
        return judge(case, error)
    finally:
        remove_folders()
    return None


_ENTRIES = {
    "all_gather_single": "all_gather_single",
    "all_gather_several": "all_gather_single_coalesced",
    "reduce_scatter_single": "reduce_scatter_single",
    "reduce_scatter_several": "reduce_scatter_single_coalesced",
}
"""By name here, the method of a simulated group; torch's would not call a Python group."""


@contextlib.contextmanager
def groups_named(backend: str) -> Iterator[None]:
    """Scope in which the library takes groups for ones of ``backend``, whose paths it then goes."""
    replaced: list[tuple[Any, str, Any]] = [(mesh, "_backend", lambda pg, device: backend)]
    replaced.append((used_parameters, "is_known_at_once", is_known_at_once))
    for home in (transports, messages):
        for name in _ENTRIES.keys() & vars(home).keys():
            replaced.append((home, name, _call_of(_ENTRIES[name])))
    before = [getattr(home, name) for home, name, _ in replaced]
    try:
        for home, name, value in replaced:
            setattr(home, name, value)
        yield
    finally:
        for (home, name, _), value in zip(replaced, before):
            setattr(home, name, value)


def is_known_at_once(bucket: Bucket, groups: list[Group]) -> bool:
    """As on an accelerator, whose host does not ask other ranks what they used."""
    return all(map(is_point_to_point, groups))


def _call_of(name: str) -> Callable[..., Any]:
    return lambda group, *args: getattr(group, name)(*args)


def judge(case: Case, error: SimulationError) -> str | None:
    """What is wrong with how a simulation ended; None where its fault explains it."""
    text = str(error)
    if case.static and "take turns in" in text:
        return None  # more units are gathered at once than there are buffers, which it says
    if "no rank used it any more" in text and any("hook" in name for name, _ in case.ops):
        return None  # a hook was told of zeros, which are not taken back then
    if case.fault is None or isinstance(case.fault, DelayMessage | DelayRank):
        return text
    for rank, found in error.errors.items():
        own = isinstance(found, OnPurpose) and isinstance(case.fault, RaiseError)
        # An operation that swallows errors goes on behind the fault, with ranks at odds.
        swallowed = isinstance(case.fault, LoseMessage | RaiseError)
        differs = "ranks run different units" in str(found)
        # It compares what the fault left half done on this rank,
        differs |= rank == case.fault.rank and isinstance(found, AssertionError)
        # or where ranks that compared notes lost one, whose units are freed by the next forward
        at_odds = swallowed and (differs or "is still held: {<Hold.RETAINED" in str(found))
        if not (own and rank == case.fault.rank) and not at_odds and not is_ours(found):
            return f"rank {rank} raises {type(found).__name__}: {found}\nin: {text}"
    lived = set(range(case.world)) - set(error.errors) - set(error.results)
    if lived - {case.fault.rank}:
        return f"ranks {lived} ended without a word: {text}"
    return None


def is_ours(error: BaseException) -> bool:
    """Whether an error, or an assertion about one, tells that another rank left this one alone."""
    return isinstance(error, RuntimeError | AssertionError) and (
        "does not answer" in str(error)
        or "or one did not answer" in str(error)
        or "found on rank" in str(error)
        or " left " in str(error)
        or "failed inside a scope" in str(error)
        or "which did not call it" in str(error)
        or "was not saved; what it held before is untouched" in str(error)
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


def try_seed(seed: int, world: int = 0) -> Found:
    """Run the program of a seed; what it was, and how it fails, shrunk."""
    case = case_of(seed, world or world_of(seed))
    text = ""
    if failure_of(case, seed) is not None:
        smallest, failure = shrink(case, seed)
        text = f"seed {seed} of world {case.world}: {failure or 'not alone'}\n  {smallest}"
    fault = "none" if case.fault is None else type(case.fault).__name__
    return Found(seed, case.world, fault, case.backend, [name for name, _ in case.ops], text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=0, help="ranks; 0: 1 to 16 in turn")
    parser.add_argument("--seeds", nargs="*", default=["0-200"], help="numbers and ranges a-b")
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin nothing new after these")
    parser.add_argument("--log", help="a file that keeps what was run, and is read to go on")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    deadline = time.monotonic() + 60 * options.minutes
    return run_in_workers(
        lambda seed: try_seed(seed, options.world),
        seeds_of(options.seeds),
        options.workers,
        options.log,
        deadline,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
