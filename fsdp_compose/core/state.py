"""Everything the library remembers, declared: per module, per unit and per device.

Ownership runs down the module tree: a module's ``__dict__`` owns its ``_FSDPState``, which owns a
``Unit``, which owns ``Bucket``s, which own the shards. Every edge back up is weak, so that
``del model`` frees its memory at once.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property, partial
from threading import get_ident
from typing import Any, Literal

import torch
from torch import nn

from fsdp_compose.base.group import is_alive
from fsdp_compose.base.mesh import Mesh
from fsdp_compose.base.policy import MixedPrecision, Prefetch
from fsdp_compose.base.process import here
from fsdp_compose.base.streams import Streams, make_streams
from fsdp_compose.base.torch_private import graph_task_id, untraced
from fsdp_compose.base.unwritten import UnwrittenMark
from fsdp_compose.base.weak_list import WeakList
from fsdp_compose.base.weak_set import OrderedWeakSet
from fsdp_compose.buckets.bucket import Bucket, Entry, Slot
from fsdp_compose.buckets.entries import share_attributes
from fsdp_compose.buckets.gather import channels_of
from fsdp_compose.comm.collectives import Flags, ReduceScatter
from fsdp_compose.core.guards.collective_log import Log, code_of, log_key
from fsdp_compose.core.guards.copied_units import copy_unit
from fsdp_compose.core.guards.rank_differences import REDUCE
from fsdp_compose.core.records import Live, Opened, Route, Switches, Traced, Watch
from fsdp_compose.core.schedule import Backward, Expected, Hold, Schedule, Work
from fsdp_compose.sharded import STATE_KEY


@dataclass(frozen=True, eq=False, repr=False)
class ChosenGradients:
    """Only ``entries`` receive gradients; see scopes/chosen_gradients.py."""

    entries: frozenset[Entry]
    results: dict[Entry, torch.Tensor] | None  # for the caller; None: for ``.grad``


@dataclass(eq=False, repr=False)
class Run:
    """What a unit does in the pass under way; replaced by a new one when a pass failed."""

    calls: int = 0  # forwards of its modules that are running
    modes: list[Any] = field(default_factory=list)  # of these calls, see hooks.py
    copied: list[Any] = field(default_factory=list)  # of what these calls were given
    showing: Sequence[torch.Tensor] | None = None  # what its modules read, by entry
    finished: dict[int, Backward] = field(default_factory=dict)  # modules that ran since it opened
    live: Live | None = None
    task: Task | None = None  # the backward that opened the unit
    shield: list[Any] | None = None  # the pack hook put in force, and those below it
    chosen: ChosenGradients | None = None
    stand_ins: list[tuple[Entry, Any, Any]] = field(default_factory=list)  # inner_gradients.py


@dataclass(eq=False, repr=False)
class Links:
    """What follows from a unit's buckets and modules; made again when a bucket is rebuilt."""

    aliases: list[torch.Tensor]  # by entry
    anchor: torch.Tensor  # a leaf of one element, at which autograd ends in place of the parameters
    of_class: tuple[int, ...]  # entries whose parameters have a class of their own
    attributes: list[dict[str, Any]]  # of each parameter, which its full tensors have too
    dtensors: tuple[int, ...]  # entries that tensor parallelism split
    tables: tuple[dict[str, Any], ...]  # by slot, what it is read from
    names: tuple[str, ...]  # by slot, under which name
    indices: tuple[int, ...] | None  # by slot, which entry; None: of each entry, in order
    leaves: list[nn.Parameter]  # by entry: what its modules hold between passes
    heads: frozenset[int]  # ids of its modules
    recurrent: list[tuple[weakref.ref[nn.Module], list[tuple[int, int]]]] | None = None
    """Found at first use (``find_recurrent``), since a module that is being copied is empty."""
    sharers: tuple[weakref.ref[Unit], ...] = ()
    """Units that read a parameter from the same place: a module reachable from both."""
    pointers: list[int] | None = None  # of the aliases if they never move, see forward_writes.py
    routes: dict[tuple[int, ...], list[Route]] = field(default_factory=dict)
    gather_events: tuple[tuple[Bucket, Log, int], ...] = ()
    reduce_events: dict[Bucket, tuple[Log, int]] = field(default_factory=dict)
    logs: tuple[Log, ...] = ()  # of its groups
    asked_at: int = -1  # ``here.retrained`` when the parameters were last asked whether they train
    flags: list[bool] | None = None  # by entry: what they answered
    trained: tuple[int, ...] = ()  # the entries whose flag is set
    standing: Live | None = None  # what forwards without gradients read, see standing_views.py

    @property
    def places(self) -> Iterator[tuple[dict[str, Any], str, int]]:
        """(values, name, entry) of every slot."""
        return zip(self.tables, self.names, self.indices or range(len(self.tables)), strict=True)


@dataclass(eq=False, repr=False)
class Checks:
    """What the guards remember about a unit."""

    warned: set[str] = field(default_factory=set)
    unready_buffers: list[tuple[str, Slot, UnwrittenMark]] = field(default_factory=list)  # to load
    left_alone: dict[int, weakref.ref[Any]] = field(default_factory=dict)  # ignored, by id
    groupless: bool = False  # mesh=None meant this rank alone: there was no process group
    copies: int = 0  # deep copies made of it
    epoch: int = 0  # counts conversions to another dtype or device
    trigger: Callable[[torch.Tensor], None] | None = None  # the tensor hook on its outputs
    watch: Watch | None = None  # None: look through the modules at the next forward
    is_forked: bool = False  # this process is a child of the one that sharded it
    looked_around: bool = False  # the module around it was looked for
    surroundings: weakref.ref[nn.Module] | None = None  # to look through at the next backward
    entrance: Literal["unknown", "outputs", "inside"] = "unknown"  # where its backwards begin
    keepers: Sequence[tuple[dict[str, Any], str]] = ()  # see inner_backward.py
    bound_at: int = -1  # when ``Boundary`` was made, for a unit that trains nothing
    keeps_views: bool = False  # its modules hold views of gathered weights
    found_in: int = -1  # the last pass in which what was kept of them was found elsewhere
    around: int = 0  # the id of the outermost unit inside whose forward it was seen last
    inspected: set[tuple[int, ...]] = field(default_factory=set)
    """Kinds of forwards, and counts of the users of its memory, that were looked into."""


@dataclass(eq=False, repr=False)
class Graphs:
    """Autograd graphs that a unit is part of."""

    nodes: WeakList = field(default_factory=WeakList)  # where its parameters' gradients arrive
    unread: Sequence[weakref.ref[Any]] = ()  # ``nodes`` that saved no weight
    captured: dict[int, tuple[torch.Tensor, Any]] = field(default_factory=dict)  # captured.py
    readers = cached_property(lambda _: weakref.WeakSet[Any]())
    """Objects that live as long as graphs over its backward, which read its weights."""


@dataclass(eq=False, repr=False)
class Unit:
    """Modules whose parameters are gathered, released and reduced together."""

    name: str
    modules: tuple[weakref.ref[nn.Module], ...]
    buckets: list[Bucket]
    borrowed: list[Entry]  # tied parameters that another unit owns
    engine: Engine
    mp: MixedPrecision
    prefetch: Prefetch
    switches: Switches
    slots: dict[Slot, int]  # every place a parameter is read from, and its entry
    options: Any  # plans.Options that it was sharded with
    number: tuple[Any, ...] = ()  # the same on every rank; () where there is nothing to compare
    holds: set[Hold] = field(default_factory=set)
    run: Run = field(default_factory=Run)
    opened: Opened | None = None
    traced: Traced | None = None  # set_traceable was called
    graphs: Graphs = field(default_factory=Graphs)
    checks: Checks = field(default_factory=Checks)
    expected: Expected = field(default_factory=Expected)  # what runs after it
    post_reduce_hooks: OrderedDict[int, Any] = field(default_factory=OrderedDict)
    entries: list[Entry] = field(init=False)  # of its own buckets, then the borrowed ones
    gathered: list[Bucket] = field(init=False)  # its own buckets, then those it borrows from
    links: Links = field(init=False)

    def __post_init__(self) -> None:
        self.link()

    def __repr__(self) -> str:
        holds = ", ".join(sorted(hold.name for hold in self.holds)) or "nothing"
        return f"Unit({self.name!r}, {self.buckets}, held by {holds})"

    def link(self) -> None:
        """Work out what follows from the buckets; called again when one of them was rebuilt."""
        self.entries = [e for bucket in self.buckets for e in bucket.entries] + self.borrowed
        self.gathered = list(dict.fromkeys([*self.buckets, *map(owner_of, self.borrowed)]))
        indices = tuple(self.slots.values())
        with torch.inference_mode(False):  # on its device, whose streams autograd waits for
            anchor = torch.zeros(1, device=self.engine.streams.device, requires_grad=True)
        self.links = Links(
            aliases=[owner_of(entry).aliases[entry.index] for entry in self.entries],
            anchor=anchor,
            of_class=tuple([i for i, e in enumerate(self.entries) if e.is_of_class]),
            attributes=[*map(share_attributes, self.entries)],
            dtensors=tuple([i for i, e in enumerate(self.entries) if e.spec.is_dtensor]),
            tables=tuple([slot.values for slot in self.slots]),
            names=tuple([slot.name for slot in self.slots]),
            indices=None if indices == tuple(range(len(self.entries))) else indices,
            leaves=[entry.held for entry in self.entries],
            heads=frozenset(id(ref()) for ref in self.modules),
        )
        self._number_events()
        self._find_sharers()
        for bucket in self.buckets:
            bucket.users.unit = weakref.ref(self)
        for bucket in self.gathered[len(self.buckets) :]:
            bucket.users.borrowers.add(self)
            self.engine.borrowers.add(self)
            bucket.users.is_lent = True
        self.engine.units.add(self)
        self.engine.mesh_sizes |= {bucket.mesh.size for bucket in self.buckets}

    def _find_sharers(self) -> None:
        others = self.engine.units if self.borrowed else self.engine.borrowers
        mine = {(id(values), name) for values, name, _ in self.links.places} if others else set()
        for other in others:
            if other is not self:
                theirs = {(id(values), name) for values, name, _ in other.links.places}
                if not mine.isdisjoint(theirs):
                    self.links.sharers += (weakref.ref(other),)
                    other.links.sharers += (weakref.ref(self),)

    def _number_events(self) -> None:
        """Number what the unit will communicate, with the same numbers on every rank."""
        links = self.links
        for index, bucket in enumerate(self.gathered):
            log = log_of(self.engine, bucket.mesh)
            bucket.users.caller = log
            bucket.residence.writes = None if log is None else log.steps.writes
            if log is None:
                continue
            log.channels |= dict.fromkeys(channels_of(bucket))
            if not self.number:
                self.number = (*(g.size for g in log.groups), log.number_unit())
            links.logs = tuple(dict.fromkeys((*links.logs, log)))
            key = (self.number, index)
            if bucket.mesh.shard.size > 1:
                links.gather_events += ((bucket, log, code_of("gather", key)),)
            links.reduce_events[bucket] = log, code_of(REDUCE, key)

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        return copy_unit(self, memo)


def as_read(unit: Unit, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """What modules read for full tensors, by entry: DTensors where tensor parallelism split."""
    if not unit.links.dtensors:
        return tensors
    read = list(tensors)
    for index in unit.links.dtensors:
        parallel = unit.entries[index].spec.parallel
        assert parallel is not None
        read[index] = parallel.wrap(tensors[index])
    return read


def routes_of(unit: Unit, trained: tuple[int, ...]) -> list[Route]:
    """Which gradients go to which bucket, for the entries ``trained``; worked out once."""
    routes = unit.links.routes.get(trained)
    if routes is None:
        position = {unit.entries[i]: k for k, i in enumerate(trained)}
        sources = [(b, [position.get(e, -1) for e in b.entries]) for b in unit.gathered]
        every = list(range(len(trained)))
        routes = unit.links.routes[trained] = [
            Route(
                bucket,
                found,
                trained=sum(1 << i for i, k in enumerate(found) if k >= 0),
                takes_all=found == every,
                is_whole=min(found) >= 0,
            )
            for bucket, found in sources
            if max(found) >= 0
        ]
    return routes


def unit_of(bucket: Bucket) -> Unit:
    """The unit that a bucket belongs to."""
    unit: Unit | None = bucket.users.unit() if bucket.users.unit is not None else None
    assert unit is not None, "a bucket outside any unit"
    return unit


def units_with(bucket: Bucket) -> list[Unit]:
    """Every unit that gathers ``bucket``."""
    users = (bucket.users.unit and bucket.users.unit(), *bucket.users.borrowers)
    return [unit for unit in users if unit is not None and bucket in unit.gathered]


def owner_of(entry: Entry) -> Bucket:
    """The bucket that holds ``entry``."""
    bucket = entry.owner() if entry.owner is not None else None
    assert bucket is not None, f"parameter {entry.spec.fqn!r}: its bucket is gone"
    return bucket


@dataclass(eq=False, repr=False, slots=True)
class Reduction:
    """A gradient reduction under way."""

    unit: Unit
    bucket: Bucket
    scatter: ReduceScatter | None
    scale: float
    used: Flags  # by entry: whose ``.grad`` to set
    added: torch.Tensor | None = None  # to the sum, on its stream; kept until that is waited for
    done: Any = None  # the mark of its stream behind it
    result: torch.Tensor | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Landing:
    """A reduced gradient on its way to the host, to be set there if it is the step's last."""

    reduction: Reduction
    grad: torch.Tensor
    is_last: bool
    mark: Any  # on the stream that copies it


@dataclass(eq=False, repr=False)
class Task:
    """One run of the autograd engine that reached this library.

    ``callback`` is owned by the engine's own record of the run and dies with it, which tells a run
    that ended with an exception from one that is still going.
    """

    id: int
    keeps_graph: bool  # its graph can be run again (retain_graph)
    callback: weakref.ref[Any] | None = None
    units: list[Unit] = field(default_factory=list)  # that it opened
    open: dict[Unit, Any] = field(default_factory=dict)  # units in backward, by where it began
    asks_all: bool = False  # it has no ``inputs=``: every ``Gather`` in its graph will run
    unasked: dict[Unit, int] = field(default_factory=dict)
    """Units whose ``Gather`` it may not run, and when that was made."""
    reached: set[Unit] = field(default_factory=set)
    packed: list[Bucket] = field(default_factory=list)  # to reduce when it ends, or before
    kept: dict[Bucket, Any] = field(default_factory=dict)  # gradients of backwards inside this one
    consumed: list[Any] = field(default_factory=list)
    """Readers of graphs over earlier backwards that it was the last to run; see ``Graphs``."""
    results: dict[Entry, torch.Tensor] = field(default_factory=dict)
    """Gradients with a graph over them, for ``.grad`` at its end (create_graph)."""
    late: list[tuple[Unit, list[Entry]]] = field(default_factory=list)  # for post-reduce hooks

    @property
    def alive(self) -> bool:
        return self.callback is not None and self.callback() is not None


@dataclass(eq=False, repr=False)
class Engine:
    """What all units on one device share: streams, and what is running on it."""

    streams: Streams
    make_work: InitVar[Callable[[Engine], Work[Unit, Any]]]
    schedule: Schedule[Unit, Any] = field(init=False)
    units: OrderedWeakSet[Unit] = field(default_factory=OrderedWeakSet)
    borrowers: OrderedWeakSet[Unit] = field(default_factory=OrderedWeakSet)  # of tied parameters
    thread: int = 0  # whose forward runs
    pass_id: int = 0  # counts outermost forwards
    disagreements: int = 0  # between ranks, when orders were last cleared for one
    tasks: dict[int, Task] = field(default_factory=dict)
    reductions: list[Reduction] = field(default_factory=list)
    landing: list[Landing] = field(default_factory=list)
    held: list[Entry] = field(default_factory=list)  # with hooks, see parted_gradients.py
    host_reads: Any = None  # the mark behind the last copy of a shard from the host
    retained: OrderedWeakSet[Unit] = field(default_factory=OrderedWeakSet)  # for their readers
    opened: OrderedWeakSet[Unit] = field(default_factory=OrderedWeakSet)  # and some that were
    awaiting: OrderedWeakSet[Bucket] = field(default_factory=OrderedWeakSet)  # see may_wait
    inspected: OrderedWeakSet[Unit] = field(default_factory=OrderedWeakSet)  # for kept_views.py
    surveyed: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    mesh_sizes: set[int] = field(default_factory=set)  # how many ranks units were sharded over
    logs: dict[tuple[Any, ...], Log] = field(default_factory=dict)  # of groups that exist
    reached: set[Log] = field(default_factory=set)  # by the step under way
    partly_run: list[Unit] = field(default_factory=list)  # of whose modules not all ran so far

    def __post_init__(self, make_work: Callable[[Engine], Work[Unit, Any]]) -> None:
        self.schedule = Schedule(make_work(self))

    @property
    def has_failed(self) -> bool:
        """Whether a backward ended with an error, and what it left was not cleared."""
        is_outside = self.streams.gather is not None and graph_task_id() == -1
        if is_outside and self.thread == get_ident():
            return bool(self.tasks)  # a device's thread may keep the record of one a moment longer
        return bool(self.tasks) and not any(task.alive for task in self.tasks.values())

    def wait_for_host_reads(self) -> None:
        """Have the host wait until no copy reads its shards, which the caller may then write."""
        mark, self.host_reads = self.host_reads, None
        if mark is not None:
            mark.synchronize()


@dataclass(eq=False)
class _FSDPState:
    """What ``fully_shard`` attaches to a module."""

    unit: Unit
    buffer_dtypes: dict[str, torch.dtype]  # before the cast
    state_dict_type: Any = None  # what set_state_dict_type chose

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            f"unit {self.unit.name!r}: a sharded module cannot be pickled, since each rank holds a "
            "part of it. Save fsdp_compose.state_dict(module, kind='full') instead, or call "
            "fsdp_compose.undo(module) first."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _FSDPState:
        unit = copy.deepcopy(self.unit, memo)
        return _FSDPState(unit, dict(self.buffer_dtypes), self.state_dict_type)


def engine_of(device: torch.device, make_work: Callable[[Engine], Work[Unit, Any]]) -> Engine:
    """The engine of ``device``, made on first use; ``make_work`` gives what does its work."""
    if device not in here.engines:
        here.engines[device] = Engine(make_streams(device), make_work)
    found: Engine = here.engines[device]
    return found


def log_of(engine: Engine, mesh: Mesh) -> Log | None:
    """Where collectives over ``mesh`` are noted; None where there are no other ranks."""
    # It outlives its units: ranks that free a model at different times must number units alike.
    key = log_key(mesh)
    log = engine.logs.get(key) if key else None
    if log is None and key:
        for other in [known for known in engine.logs if not all(map(is_alive, known))]:
            del engine.logs[other]
        log = engine.logs[key] = Log(
            mesh.groups, engine.streams, partial(_list_entries, weakref.ref(engine))
        )
    return log


def _list_entries(engine_ref: weakref.ref[Engine], log: Log) -> list[Entry]:
    """The parameters of units whose collectives ``log`` notes."""
    engine = engine_ref()
    units = [] if engine is None else list(engine.units)
    return [
        entry
        for unit in units
        for bucket in unit.buckets
        if bucket.users.caller is log
        for entry in bucket.entries
    ]


@untraced
def find_state(module: nn.Module) -> _FSDPState | None:
    """The state ``fully_shard`` attached to ``module`` itself, if any."""
    state: _FSDPState | None = module.__dict__.get(STATE_KEY)
    return state


def iter_units(module: nn.Module) -> Iterator[Unit]:
    """Units of ``module`` and its submodules, parents first, each once."""
    seen: set[int] = set()
    for submodule in module.modules():
        state = find_state(submodule)
        if state is not None and id(state.unit) not in seen:
            seen.add(id(state.unit))
            yield state.unit


def tensors_at_rest(unit: Unit) -> Sequence[torch.Tensor]:
    """What the unit's modules hold between passes, by entry."""
    return unit.links.leaves if unit.opened is None else unit.opened.tensors
