"""What a plan needs to know about a module, as integers and names: sharded already or not yet.

A module is walked in the order in which its submodules were registered, each once: that is the
order in which the plan takes them to run. Once units have run, it takes theirs, and knows which
frozen ones backward reaches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from fsdp_compose.base.memory import nbytes_of
from fsdp_compose.base.order import Turn
from fsdp_compose.base.policy import Prefetch
from fsdp_compose.base.torch_private import parameter_slots, raw
from fsdp_compose.buckets.bucket import Entry, Slot
from fsdp_compose.construct.choose_buckets import unit_precision
from fsdp_compose.construct.names import is_wrapped, walk_named
from fsdp_compose.construct.plans import UnitPlan
from fsdp_compose.core.guards.units import modules_of
from fsdp_compose.core.guards.unread_weights import default_of
from fsdp_compose.core.state import Unit, iter_units, owner_of
from fsdp_compose.report.buckets import PlannedBucket, describe_bucket, describe_plan
from fsdp_compose.scopes.participate import passes_on
from fsdp_compose.sharded import Parallel


@dataclass(frozen=True)
class Loan:
    """A tied parameter that a unit reads from another unit's bucket."""

    name: str
    lender: str
    lent_as: str


@dataclass(frozen=True)
class Use:
    """A parameter where a module of a unit reads it."""

    param: int  # the same at every place of one parameter
    name: str
    bucket: int  # index in the survey
    grad_bytes: int  # of its full gradient; 0 where it needs none


@dataclass(frozen=True)
class Read:
    """A parameter as one unit reads it."""

    use: Use
    slots: Sequence[Slot]  # where modules of the unit read it
    names: tuple[str, ...]  # under which they do
    lender: str | None  # the unit whose bucket it lies in, where that is another one
    lent_as: str


@dataclass(eq=False)
class Record:
    """A unit as the survey found it; ``held`` and ``borrowed`` index the survey's buckets."""

    name: str
    modules: list[nn.Module]
    held: list[int]
    reads: list[Read]
    keep: bool | None
    reshard_after_backward: bool
    unshard_in_backward: bool | None
    prefetch: Prefetch
    static_buffers: int  # how many such units take turns in; 0: it has none
    passes_on: bool  # its forward returns what a unit inside it returned
    is_reached: bool | None = None  # whether backward gathers one that trains nothing; if known
    forward_list: list[Record] | None = None
    backward_list: list[Record] | None = None

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(type(module).__name__ for module in self.modules)

    @cached_property
    def borrowed(self) -> list[int]:
        used = dict.fromkeys(read.use.bucket for read in self.reads)
        return [index for index in used if index not in self.held]

    @property
    def gathered(self) -> list[int]:
        """Buckets that are gathered with the unit."""
        return self.held + self.borrowed

    @cached_property
    def places(self) -> dict[tuple[int, str], Use]:
        """What is read at each place of the unit's modules."""
        return {(id(slot.values), slot.name): r.use for r in self.reads for slot in r.slots}

    @property
    def routes(self) -> list[int]:
        """Buckets whose gradients the unit makes."""
        trained = {use.bucket for use in self.places.values() if use.grad_bytes}
        return [i for i in self.gathered if i in trained]

    @property
    def loans(self) -> tuple[Loan, ...]:
        return tuple(
            Loan(read.names[0], read.lender, read.lent_as)
            for read in self.reads
            if read.lender is not None
        )

    @property
    def ties(self) -> tuple[tuple[str, ...], ...]:
        """Names of each parameter that the unit reads under several."""
        return tuple(read.names for read in self.reads if len(read.names) > 1)

    @property
    def is_unread(self) -> bool:
        """Whether its backward reads no weight, so that it is not gathered for it."""
        return not (self.unshard_in_backward or self.keep) and self.reshard_after_backward


@dataclass(frozen=True)
class Event:
    """Forward reaches a unit, leaves it, or reads one of its parameters."""

    record: Record
    enters: bool = False
    leaves: bool = False
    outermost: bool = False
    use: Use | None = None
    in_product: bool = False  # of matrices; what comes to that gradient is added in a new tensor


@dataclass
class Survey:
    """A module: its units, their buckets, and what a forward does in order."""

    buckets: list[PlannedBucket] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    outside: dict[str, nn.Parameter] = field(default_factory=dict)  # of no unit, each once
    split: dict[str, int] = field(default_factory=dict)  # by tensor parallelism, over this many
    in_tree: set[int] = field(default_factory=set)  # buckets sharded with deterministic=
    hooked: list[str] = field(default_factory=list)  # units that a communication hook reduces
    buffer_bytes: int = 0
    visits: list[Record] = field(default_factory=list)  # as forward ran them; one may run again
    turns: list[tuple[Turn, Record | None]] = field(default_factory=list)  # what backward did

    def buckets_of(self, record: Record) -> list[PlannedBucket]:
        return [self.buckets[i] for i in record.held]

    @property
    def around(self) -> dict[int, Record | None]:
        """By a record's id, the unit inside of which its own is."""
        found: dict[int, Record | None] = {}
        active: list[Record] = []
        for event in self.events:
            if event.enters:
                found.setdefault(id(event.record), active[-1] if active else None)
                active.append(event.record)
            elif event.leaves:
                active.pop()
        return found


def survey_units(module: nn.Module, units: Sequence[Unit]) -> Survey:
    """Describe a module that is sharded."""
    survey = Survey()
    paths: dict[int, str] = {}
    for path, submodule in walk_named(module):
        paths.setdefault(id(submodule), path)

    def name_of(entry: Entry) -> str:
        return (*_name_slots(entry.slots, paths), entry.spec.fqn)[0]

    index = _add_buckets(survey, units, name_of)
    survey.hooked += [unit.name for unit in units if unit.switches.comm_hook is not None]
    records: dict[int, Record] = {}
    unheld = index.keys() - {id(bucket) for unit in units for bucket in unit.buckets}
    for unit in units:
        reads: list[Read] = []
        held = [b for b in unit.gathered if b in unit.buckets or id(b) in unheld]
        unheld -= set(map(id, held))  # of units outside of the module: the first that reads it
        read_from: list[list[Slot]] = [[] for _ in unit.entries]
        for slot, position in unit.slots.items():
            read_from[position].append(slot)
        for entry, slots in zip(unit.entries, read_from, strict=True):
            names, owner = _name_slots(slots, paths), owner_of(entry)
            with raw():
                trained = entry.spec.numel * entry.param.requires_grad
            grad_bytes = trained * owner.full.element_size()
            use = Use(id(entry.param), name_of(entry), index[id(owner)], grad_bytes)
            lender = entry.spec.unit if owner not in unit.buckets else None
            reads.append(Read(use, slots, names or (entry.spec.fqn,), lender, use.name))
        records[id(unit)] = Record(
            unit.name,
            modules_of(unit),
            [index[id(bucket)] for bucket in held],
            reads,
            keep=unit.switches.keep_after_forward,
            reshard_after_backward=unit.switches.reshard_after_backward,
            unshard_in_backward=unit.switches.unshard_in_backward,
            prefetch=unit.prefetch,
            static_buffers=unit.options.buffers_in_turn,
            passes_on=_passes_on(unit),
        )
    survey.records += records.values()
    _set_lists(units, records)
    sharded = {id(entry.param) for unit in units for entry in unit.entries}
    _walk([module], survey, sharded)
    _follow_what_ran(survey, units, records)
    survey.buffer_bytes = sum(map(nbytes_of, module.buffers()))
    return survey


def _follow_what_ran(survey: Survey, units: Sequence[Unit], records: Mapping[int, Record]) -> None:
    """Note in which order units ran last, and what backward reached and ran again."""
    schedules = dict.fromkeys(unit.engine.schedule for unit in units)
    seen: set[int] = set()
    for order in (schedule.forward_order for schedule in schedules):
        for refs in (*(order.current or order.last), *order.routes):
            found = [records[id(unit)] for ref in refs if id(unit := ref()) in records]
            if not seen.issuperset(map(id, found)):
                survey.visits += [record for record in found if id(record) not in seen]
                seen.update(map(id, found))
    lives = [(unit.run.live, records[id(unit)]) for unit in units]
    if any(bool(live and live.trained) != bool(record.routes) for live, record in lives):
        return  # it has not run, or what it trains was changed since
    for order in (schedule.backward_order for schedule in schedules):
        turns = [(turn, records.get(id(visitor))) for turn, visitor in order.list_turns()]
        survey.turns += [pair for pair in turns if pair[1] is not None or pair[0] == "ended"]
    reached = {id(record) for turn, record in survey.turns if turn == "reached"}
    for record in records.values() if reached else ():
        if not record.routes:
            record.is_reached = id(record) in reached


def _passes_on(unit: Unit) -> bool:
    """Whether a forward of the unit returns what a unit inside it returned, as far as is known."""
    around = [(module, set(iter_units(module)) - {unit}) for module in modules_of(unit)]
    return any(inner and passes_on(unit, module, inner) for module, inner in around)


def _ends_in(heads: Set[int], module: nn.Module) -> bool:
    """Whether ``module`` is known to return what one of ``heads``, by id, returned."""
    return type(module) is nn.Sequential and len(module) > 0 and id(module[-1]) in heads


def _add_buckets(
    survey: Survey, units: Sequence[Unit], name_of: Callable[[Entry], str]
) -> dict[int, int]:
    """Describe the buckets that units gather, each once; their positions by the bucket's id."""
    index: dict[int, int] = {}
    for bucket in {id(b): b for unit in units for b in unit.gathered}.values():
        index[id(bucket)] = len(survey.buckets)
        if bucket.mesh.microbatches is not None:
            survey.in_tree.add(len(survey.buckets))
        survey.buckets.append(describe_bucket(bucket, tuple(map(name_of, bucket.entries))))
        for entry in bucket.entries:
            _note_split(survey, name_of(entry), entry.spec.parallel)
    return index


def _set_lists(units: Sequence[Unit], records: Mapping[int, Record]) -> None:
    """Note which units the user listed to be gathered ahead; ``records`` by the unit's id."""
    for unit in units:
        for attribute in ("forward_list", "backward_list"):
            listed = getattr(unit.expected, attribute)
            if listed is not None:
                known = [records.get(id(ref())) for ref in listed]
                setattr(records[id(unit)], attribute, [r for r in known if r is not None])


def survey_plans(modules: Sequence[nn.Module], plans: Sequence[UnitPlan]) -> Survey:
    """Describe a module that is to be sharded."""
    survey, heads = Survey(), {id(module) for plan in plans for module in plan.modules}
    owned: dict[int, tuple[int, UnitPlan, str]] = {}  # by parameter: bucket, unit, name there
    for plan in plans:
        first = len(survey.buckets)
        for bucket in plan.buckets:
            for item in bucket.found:
                name = plan.full_name(item.names[0])
                owned[id(item.param)] = len(survey.buckets), plan, name
                _note_split(survey, name, item.parallel)
            survey.buckets.append(describe_plan(plan, bucket))
        reads: list[Read] = []
        for item in plan.found:
            index, owner, lent_as = owned[id(item.param)]
            names = tuple(map(plan.full_name, item.names))
            trained = item.part.numel() * item.param.requires_grad
            grad_bytes = trained * survey.buckets[index].compute.itemsize
            use = Use(id(item.param), names[0], index, grad_bytes)
            lender = owner.name if owner is not plan else None
            reads.append(Read(use, item.slots, names, lender, lent_as))
        survey.records.append(
            Record(
                plan.name,
                plan.modules,
                list(range(first, len(survey.buckets))),
                reads,
                keep=plan.options.placement.keep_after_forward,
                reshard_after_backward=True,
                unshard_in_backward=default_of(plan.modules),
                prefetch=plan.options.prefetch,
                static_buffers=plan.options.buffers_in_turn,
                passes_on=any(_ends_in(heads, module) for module in plan.modules),
            )
        )
    _walk(modules, survey, set(owned))
    survey.buffer_bytes = _count_planned_buffers(modules, plans)
    return survey


def _name_slots(slots: Iterable[Slot], paths: Mapping[int, str]) -> tuple[str, ...]:
    """Name the places where a parameter is read, if they lie in the surveyed module."""
    found = [(paths.get(id(slot.module())), slot.name) for slot in slots]
    return tuple(f"{path}.{name}" if path else name for path, name in found if path is not None)


def _note_split(survey: Survey, name: str, parallel: Parallel | None) -> None:
    if parallel is not None and parallel.splits:
        survey.split[name] = math.prod(axis.group.size for axis in parallel.splits)


def _walk(modules: Sequence[nn.Module], survey: Survey, sharded: Set[int]) -> None:
    """Fill in the events, and the parameters of no unit; ``sharded`` are the ids of the others."""
    walker = _Walker(survey, sharded)
    for position, module in enumerate(modules):
        if id(module) not in walker.seen:
            walker.visit(f"{position}." if len(modules) > 1 else "", module)


_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class _Walker:
    """Goes through modules as a forward does, opening and closing units as the engine would."""

    def __init__(self, survey: Survey, sharded: Set[int]) -> None:
        self.survey, self.known = survey, set(sharded)  # parameters that are counted already
        self.by_module = {id(m): record for record in survey.records for m in record.modules}
        self.places = {place: (r, use) for r in survey.records for place, use in r.places.items()}
        self.active: list[Record] = []
        self.finished: dict[int, set[int]] = {id(record): set() for record in survey.records}
        self.seen: set[int] = set()

    def visit(self, name: str, module: nn.Module) -> None:
        self.seen.add(id(module))
        record = self.by_module.get(id(module))
        if record is not None:
            self.enter(record)
        values = parameter_slots(module)
        for key, param in values.items():
            place = self.places.get((id(values), key))
            if place is not None:
                is_product = isinstance(module, _PRODUCTS)
                event = Event(place[0], use=place[1], in_product=is_product)
                self.survey.events.append(event)
            elif isinstance(param, nn.Parameter) and id(param) not in self.known:
                self.known.add(id(param))
                self.survey.outside[f"{name}{key}"] = param
        for child_name, child in module.named_children():
            if id(child) not in self.seen:
                self.visit(
                    name if is_wrapped(module, child_name) else f"{name}{child_name}.", child
                )
        if record is not None:
            self.leave(record, module)

    def enter(self, record: Record) -> None:
        if record not in self.active and not self.finished[id(record)]:
            self.survey.events.append(Event(record, enters=True, outermost=not self.active))
        self.active.append(record)

    def leave(self, record: Record, module: nn.Module) -> None:
        self.active.pop()
        finished = self.finished[id(record)]
        finished.add(id(module))
        if record in self.active or (len(finished) < len(record.modules) and self.active):
            return
        finished.clear()
        self.survey.events.append(Event(record, leaves=True, outermost=not self.active))


def _count_planned_buffers(modules: Sequence[nn.Module], plans: Sequence[UnitPlan]) -> int:
    casts = {
        id(buffer): dtype
        for plan in plans
        if (dtype := unit_precision(plan).buffer_dtype) is not None
        for module in plan.modules
        for *_, buffer in plan.managed_buffers(module)
        if buffer.is_floating_point()
    }
    found = {id(b): b for module in modules for b in module.buffers()}
    return sum(
        b.numel() * casts[key].itemsize if key in casts else nbytes_of(b)
        for key, b in found.items()
    )
