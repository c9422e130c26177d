"""Runs a function on simulated ranks, and says who failed and where everyone stood."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fsdp_compose.base.arguments import check_kind, describe_value
from fsdp_compose.base.process import here
from fsdp_compose.base.torch_groups import groups_of_class, set_device_guard
from fsdp_compose.core.guards.units import list_all_units
from fsdp_compose.core.state import find_state
from fsdp_compose.simulation import own
from fsdp_compose.simulation.faults import Fault, RunOtherUnit
from fsdp_compose.simulation.group import SimulatedGroup
from fsdp_compose.simulation.network import Network
from fsdp_compose.simulation.scheduler import Ended, RankThread, Scheduler, describe_positions
from fsdp_compose.simulation.store import SimulatedStore

P = ParamSpec("P")
Result = TypeVar("Result")


class SimulationError(RuntimeError):
    """A rank of a simulation failed. The first error is the cause (``__cause__``).

    Attributes:
        rank: whose error came first.
        errors: what each rank raised, by rank; those that a fault killed are not in it.
        positions: where each other rank stood then: file, line, function, what it waited for.
        results: what the ranks that did not fail returned, by rank.
        seed: repeats the run.
    """

    def __init__(
        self,
        text: str,
        rank: int,
        errors: dict[int, BaseException],
        positions: dict[int, str],
        results: dict[int, Any],
        seed: int,
    ) -> None:
        super().__init__(text)
        self.rank, self.errors, self.positions = rank, errors, positions
        self.results, self.seed = results, seed


def simulate(
    fn: Callable[..., Result],
    world_size: int,
    *args: Any,
    seed: int = 0,
    faults: Sequence[Fault] = (),
    **kwargs: Any,
) -> list[Result]:
    """What ``fn(*args, **kwargs)`` returns on each of ``world_size`` ranks, run in this process.

    ``torch.distributed`` works in ``fn`` as it does under a launcher, on gloo: ``get_rank``, every
    collective, ``new_group``, ``DeviceMesh``; so does all that is built on it. One rank runs at a
    time, in a thread of its own, and where ranks communicate a generator seeded with ``seed``
    chooses who goes on and when data arrives. So ``pdb`` works in any rank, and the same seed
    repeats the same run to the last bit. A wait that can never end is found at once: the ranks'
    time, by which timeouts are measured, jumps when nobody can run.

    Each rank has its own random number generators, seeded with ``seed`` on all of them alike, and
    its own ``RANK`` and ``LOCAL_RANK`` in the environment. Build models and optimizers inside
    ``fn``; what is passed in is the same object on every rank. Torch computes with one thread.

    Args:
        fn: the program of one rank. It may call ``init_process_group`` and
            ``destroy_process_group``, and need not.
        world_size: how many ranks; 1 to 64 are tried.
        seed: chooses the order of events.
        faults: what goes wrong, see ``fsdp_compose.simulation.faults``.

    Returns:
        What ``fn`` returned, by rank.

    Raises:
        SimulationError: a rank raised or was killed. The text says which, and where the others
            stood; ``errors`` has what every rank raised.
        ValueError: ``world_size``, ``seed`` or ``faults`` make no sense.
        TypeError: an argument is of the wrong type.

    Example:
        >>> import torch.distributed as dist
        >>> def add_ranks():
        ...     total = torch.tensor(dist.get_rank())
        ...     dist.all_reduce(total)
        ...     return total.item()
        >>> simulate(add_ranks, 4)
        [6, 6, 6, 6]
    """
    if not callable(fn):
        raise TypeError(f"simulate: fn is {describe_value(fn)}; wanted the program of one rank.")
    return run_program(lambda: fn(*args, **kwargs), world_size, seed, faults, has_group=True)


def run_program(
    program: Callable[[], Result],
    size: int,
    seed: int,
    faults: Sequence[Fault],
    has_group: bool,
) -> list[Result]:
    """As ``simulate``; without ``has_group`` the ranks begin as a launcher starts them."""
    _check(size, seed, faults)
    run = _Run(program, size, seed, faults, has_group)
    with _prepare_torch(run):
        run.go()
    if run.first_rank is None:
        return [run.results[rank] for rank in range(size)]
    raise run.failure() from run.errors.get(run.first_rank)


class _Run:
    """One simulation: its ranks, and how each ended."""

    def __init__(
        self,
        program: Callable[[], Any],
        size: int,
        seed: int,
        faults: Sequence[Fault],
        has_group: bool,
    ) -> None:
        self.program, self.size, self.seed, self.has_group = program, size, seed, has_group
        self.scheduler = Scheduler(seed)
        self.scheduler.on_end = self.end
        self.network = Network(self.scheduler, size, faults)
        self.store = SimulatedStore(self.scheduler)
        self.results: dict[int, Any] = {}
        self.errors: dict[int, BaseException] = {}
        self.first_rank: int | None = None
        self.positions: dict[int, str] = {}
        self.deadlock = ""
        self.unclaimed: set[int] = set()  # ranks whose group the program did not ask for
        self.torch_init = dist.init_process_group
        self.identities = [object() for _ in range(size)]
        self.strays: list[tuple[RunOtherUnit, list[None]]] = [
            (fault, []) for fault in faults if isinstance(fault, RunOtherUnit)
        ]

    def go(self) -> None:
        """Run every rank to its end."""
        clock = self.scheduler.clock
        for rank in range(self.size):
            state = own.new_rank(rank, self.seed, clock, self.network)
            task = RankThread(rank, state, f"rank {rank}")
            self.scheduler.start(task, self.run_rank)
        try:
            self.scheduler.run()
        except BaseException:
            self.stop()
            raise

    def identity(self) -> object:
        """Stands for the rank that runs, and for no rank of another simulation."""
        return self.identities[self.network.rank]

    def run_rank(self) -> None:
        rank = self.network.rank
        with torch.autograd.set_multithreading_enabled(False):
            try:
                if self.has_group:
                    self.unclaimed.add(rank)
                    self.torch_init("gloo")
                self.results[rank] = self.program()
            finally:
                if dist.is_initialized() and rank not in self.scheduler.killed:
                    dist.destroy_process_group()

    def end(self, task: RankThread) -> None:
        """Note how a thread ended, and where the others stand if it is the first to fail."""
        failed = task.error is not None or task.rank in self.scheduler.killed
        if task.error is not None and not isinstance(task.error, Ended):
            self.errors.setdefault(task.rank, task.error)
        if failed and self.first_rank is None:
            self.first_rank, self.positions = task.rank, self.scheduler.positions()
            self.deadlock = self.scheduler.stuck
        self.network.end(task)

    def stop(self) -> None:
        """End every rank, when the caller was interrupted."""
        for rank in range(self.size):
            self.scheduler.kill(rank)
        running = self.scheduler.running
        if running is not None and running.thread is not None:
            thread_id = ctypes.c_ulong(running.thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, ctypes.py_object(Ended))
        self.scheduler.finished.wait(5.0)

    def failure(self) -> SimulationError:
        rank = self.first_rank
        assert rank is not None
        error = self.errors.get(rank)
        how = f"raised {type(error).__name__}: {error}" if error is not None else "was killed"
        lines = [f"rank {rank} of {self.size} {how}"]
        if self.deadlock:
            lines.append(f"Deadlock: none could go on. Where each rank stood:\n{self.deadlock}")
        elif self.positions:
            lines.append(f"Where the others stood then:\n{describe_positions(self.positions)}")
        then: dict[str, list[str]] = {}
        for other, found in sorted(self.errors.items()):
            if other != rank:
                then.setdefault(f"{type(found).__name__}: {found}", []).append(str(other))
        lines += [f"Then rank {', '.join(ranks)} raised {text}" for text, ranks in then.items()]
        lines.append(f"seed={self.seed} repeats this run.")
        return SimulationError(
            "\n".join(lines), rank, dict(sorted(self.errors.items())), self.positions, self.results,
            self.seed,
        )  # fmt: skip

    def rendezvous(self, *_: Any, **__: Any) -> Iterator[tuple[Any, int, int]]:
        """Stands in for torch's: every rank knows the others already."""
        yield self.store, self.network.rank, self.size

    def init_process_group(self, *args: Any, **kwargs: Any) -> None:
        """Stands in for torch's: a program may make the group that it has already, once."""
        if self.network.rank in self.unclaimed:
            self.unclaimed.remove(self.network.rank)
            if dist.is_initialized():  # the program may have ended it
                dist.destroy_process_group()
        for name in ("store", "rank", "world_size", "init_method"):
            kwargs.pop(name, None)
        self.torch_init(*args, **kwargs)

    def run_other_unit(self, module: nn.Module, inputs: Any) -> None:
        """Run another unit first, where a fault says so."""
        state = find_state(module)
        if state is None:
            return
        for fault, calls in self.strays:
            if (fault.rank, fault.unit) != (self.network.rank, state.unit.name):
                continue
            calls.append(None)
            if len(calls) == fault.call + 1:
                units = [unit for unit in list_all_units() if unit.name == fault.instead]
                others = [unit.modules[0]() for unit in units]
                for other in filter(None, others[:1]):
                    other(*inputs)


@contextlib.contextmanager
def _prepare_torch(run: _Run) -> Iterator[None]:
    """Scope in which torch's groups are the simulation's, and after which all is as before."""
    before, threads = own.caller(), torch.get_num_threads()
    # What there is already is set aside, so that no rank looks through it; not where the caller did
    # so first, since that would be undone. Once there is some, Python would count it in each call.
    here.has_set_aside = here.has_set_aside or gc.get_freeze_count() > 0
    freezes = not here.has_set_aside
    hook = register_module_forward_pre_hook(run.run_other_unit) if run.strays else None
    try:
        torch.set_num_threads(1)
        set_device_guard()
        own.share_environment(run.size)
        if freezes:
            gc.freeze()
        with groups_of_class(SimulatedGroup, run.rendezvous, run.init_process_group, run.identity):
            yield
    finally:
        if freezes:
            gc.unfreeze()
        torch.set_num_threads(threads)
        before.enter()
        if hook is not None:
            hook.remove()


def _check(size: int, seed: int, faults: Sequence[Fault]) -> None:
    check_kind("simulate", "world_size", size, int, "the number of ranks, an int, 1 or more")
    check_kind("simulate", "seed", seed, int, "an int")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"simulate: seed is {seed}; wanted an int from -2**63 to 2**64 - 1.")
    check_kind("simulate", "faults", faults, (list, tuple), "a list of faults")
    if here.simulated is not None:
        raise ValueError("simulate: this rank is in a simulation already; call it outside of fn.")
    if size < 1:
        raise ValueError(f"simulate: world_size is {size}; wanted the number of ranks, 1 or more.")
    for fault in faults:
        check_kind(
            "simulate", "an item of faults", fault, get_args(Fault), "a fault of simulation.faults"
        )
        for name, given in vars(fault).items():
            kind, wanted = _FIELDS[name]
            check_kind("simulate", f"{name} of {fault}", given, kind, wanted)
            if name in ("event", "call", "seconds") and not given >= 0:
                raise ValueError(f"simulate: {name} of {fault} is {given}; wanted {wanted}.")
        if not 0 <= fault.rank < size:
            raise ValueError(
                f"simulate: {fault} is for rank {fault.rank}, and there are {size} ranks, numbered "
                "from 0."
            )


_FIELDS: dict[str, tuple[Any, str]] = {
    "rank": (int, "the number of a rank, an int"),
    "event": (int, "how many communications the rank begins before, an int, 0 or more"),
    "call": (int, "how many forwards of the unit are before, an int, 0 or more"),
    "seconds": ((int, float), "seconds, a number, 0 or more"),
    "error": (Exception, "an exception, such as RuntimeError('lost')"),
    "unit": (str, "the name of a unit"),
    "instead": (str, "the name of a unit"),
}
"""What the fields of faults are."""
