"""What a plan needs to know about a module, as integers and names: sharded already or not yet.

A module is walked in the order in which its submodules were registered, each once: that is the
order in which the plan takes them to run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from fsdp_compose.base.mesh import Mesh
from fsdp_compose.base.policy import MixedPrecision, Offload, Prefetch
from fsdp_compose.base.torch_private import buffer_slots, parameter_slots, raw
from fsdp_compose.comm.messages import is_point_to_point
from fsdp_compose.construct.choose_buckets import unit_precision
from fsdp_compose.construct.names import clean_name
from fsdp_compose.construct.plans import BucketPlan, UnitPlan
from fsdp_compose.core.bucket import Bucket, Entry
from fsdp_compose.core.state import Unit, owner_of
from fsdp_compose.layout.matrix_work import whole_owners
from fsdp_compose.layout.shards import Layout
from fsdp_compose.sharded import Parallel


@dataclass(frozen=True)
class PlannedBucket:
    """A bucket of one unit. Bytes are of one rank.

    Attributes:
        unit: name of the unit that owns it.
        parameters: their names, as the plan's module knows them.
        storage, compute, reduce, grad: dtypes of the shards, of forward and backward, of gradients
            on their way, and of ``.grad``.
        numel: elements of the parameters.
        trained_numel: elements of those that need a gradient; of a bucket, all or none unless
            ``requires_grad`` was changed after sharding.
        shard_numel: elements per rank, padding included.
        ranks: that the bucket is cut over.
        replicas: that hold the same shards.
        fused: replicas of what is gathered from, where parameters are cut over these too; else 1.
        spread: ranks that share it between forward and backward, where fewer than ``ranks`` do.
        in_place: parameters in compute are the shard itself, and nothing is gathered.
        point_to_point: gradients arrive as one contribution of every rank, summed on arrival.
        on_host: shards, gradients and optimizer state are in host memory.
        device_copy: of on_host shards, a copy in the compute dtype stays on the device.
        owned: (rank, work) of each tensor that is never cut; see ``layout.matrix_work``.
    """

    unit: str
    parameters: tuple[str, ...]
    storage: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    grad: torch.dtype
    numel: int
    trained_numel: int
    shard_numel: int
    ranks: int
    replicas: int
    fused: int
    spread: int | None
    in_place: bool
    point_to_point: bool
    on_host: bool
    device_copy: bool
    owned: tuple[tuple[int, int], ...]

    DERIVED: ClassVar = ("padding_bytes", "shard_bytes", "full_bytes", "grad_shard_bytes")

    @property
    def padding(self) -> int:
        """Elements over all ranks that belong to no parameter."""
        return self.shard_numel * self.ranks - self.numel

    @property
    def padding_bytes(self) -> int:
        """Padding over all ranks, in the storage dtype."""
        return self.padding * self.storage.itemsize

    @property
    def shard_bytes(self) -> int:
        return self.shard_numel * self.storage.itemsize

    @property
    def full_bytes(self) -> int:
        """While gathered."""
        return 0 if self.in_place else self.shard_numel * self.ranks * self.compute.itemsize

    @property
    def grad_bytes(self) -> int:
        """Gradients as autograd makes them, in full."""
        return self.trained_numel * self.compute.itemsize

    @property
    def grad_shard_bytes(self) -> int:
        return self.shard_numel * self.grad.itemsize if self.trained_numel else 0

    @property
    def flat_bytes(self) -> int:
        """The flat buffer that gradients are packed into."""
        parts = 2 if self.storage.is_complex else 1
        return self.shard_numel * self.ranks * self.reduce.itemsize * parts

    @property
    def gather_ranks(self) -> int:
        """That weights are gathered from and gradients are summed over first."""
        return self.ranks // self.fused

    @property
    def received_bytes(self) -> int:
        """What a reduction under way receives into."""
        ranks = self.gather_ranks
        share = self.flat_bytes // ranks
        return share * (ranks - 1) if self.point_to_point else share * (ranks > 1)

    @property
    def converts_gradients(self) -> bool:
        """The sharded gradient is a copy of what was reduced, not the same memory."""
        grad = self.grad.to_real() if self.grad.is_complex else self.grad
        return grad != self.reduce

    @property
    def spread_bytes(self) -> int:
        """What is kept between forward and backward where the bucket is spread."""
        return 0 if self.spread is None else self.full_bytes // self.spread

    @property
    def weight_copy_bytes(self) -> int:
        """What a gather reads, where that is not the shard: in the compute dtype, for good."""
        copied = self.fused if self.fused > 1 else self.device_copy
        return self.shard_numel * self.compute.itemsize * copied


@dataclass(frozen=True)
class Loan:
    """A tied parameter that a unit reads from another unit's bucket."""

    name: str
    lender: str
    lent_as: str


@dataclass(eq=False)
class Record:
    """A unit as the survey found it; ``held`` and ``borrowed`` index the survey's buckets."""

    name: str
    classes: tuple[str, ...]
    modules: list[nn.Module]
    held: list[int]
    borrowed: list[int]
    loans: tuple[Loan, ...]
    ties: tuple[tuple[str, ...], ...]
    keep: bool | None
    reshard_after_backward: bool
    prefetch: Prefetch
    places: dict[tuple[int, str], Use]
    forward_list: list[Record] | None = None
    backward_list: list[Record] | None = None

    @property
    def gathered(self) -> list[int]:
        """Buckets that are gathered with the unit."""
        return self.held + self.borrowed

    @property
    def routes(self) -> list[int]:
        """Buckets whose gradients the unit makes."""
        trained = {use.bucket for use in self.places.values() if use.grad_bytes}
        return [i for i in self.gathered if i in trained]


@dataclass(frozen=True)
class Use:
    """A parameter where a module of a unit reads it."""

    param: int  # the same for every place of one parameter
    name: str
    bucket: int  # index in the survey
    grad_bytes: int  # of its gradient in full; 0 where it needs none


@dataclass(frozen=True)
class Event:
    """Forward reaches a unit, leaves it, or reads one of its parameters."""

    record: Record
    enters: bool = False
    leaves: bool = False
    outermost: bool = False
    use: Use | None = None


@dataclass
class Survey:
    """A module: its units, their buckets, and what a forward does in order."""

    buckets: list[PlannedBucket] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    outside: dict[str, nn.Parameter] = field(default_factory=dict)  # parameters of no unit
    split: dict[str, int] = field(default_factory=dict)  # by tensor parallelism, over this many
    buffer_bytes: int = 0

    def events_of(self, record: Record) -> list[Event]:
        return [event for event in self.events if event.record is record]


def survey_units(module: nn.Module, units: Sequence[Unit]) -> Survey:
    """Of a module that is sharded."""
    survey = Survey()
    names = _NamesOf([module])
    index: dict[int, int] = {}
    records: dict[int, Record] = {}
    for unit in units:
        for bucket in unit.gathered:
            if id(bucket) not in index:
                index[id(bucket)] = len(survey.buckets)
                survey.buckets.append(_of_bucket(bucket, names))
                for entry in bucket.entries:
                    _note_split(survey, names.of(entry), entry.spec.parallel)
    for unit in units:
        modules = [m for ref in unit.modules if (m := ref()) is not None]
        own = [index[id(bucket)] for bucket in unit.buckets]
        with raw():
            needs = [entry.param.requires_grad for entry in unit.entries]
        uses = [
            Use(id(entry.param), names.of(entry), index[id(owner)], _grad_bytes(entry, owner, need))
            for entry, need in zip(unit.entries, needs, strict=True)
            for owner in (owner_of(entry),)
        ]
        records[id(unit)] = record = Record(
            name=unit.name,
            classes=tuple(type(m).__name__ for m in modules),
            modules=modules,
            held=own,
            borrowed=[i for b in unit.gathered if (i := index[id(b)]) not in own],
            loans=tuple(_loan(unit, entry, names) for entry in unit.borrowed),
            ties=tuple(
                found
                for entry in unit.entries
                if len(found := names.in_modules(entry.slots, modules)) > 1
            ),
            keep=unit.switches.keep_after_forward,
            reshard_after_backward=unit.switches.reshard_after_backward,
            prefetch=unit.prefetch,
            places={(id(slot.values), slot.name): uses[i] for slot, i in unit.slots},
        )
        survey.records.append(record)
    for unit in units:
        record = records[id(unit)]
        for attribute in ("forward_list", "backward_list"):
            listed = getattr(unit, attribute)
            if listed is not None:
                known = [records.get(id(ref())) for ref in listed]
                setattr(record, attribute, [r for r in known if r is not None])
    sharded = {id(entry.param) for unit in units for entry in unit.entries}
    _walk([module], survey, lambda param: id(param) in sharded)
    survey.buffer_bytes = sum(b.nbytes for b in {id(b): b for b in module.buffers()}.values())
    return survey


def survey_plans(modules: Sequence[nn.Module], plans: Sequence[UnitPlan]) -> Survey:
    """Of a module that is to be sharded."""
    survey = Survey()
    index: dict[int, int] = {}  # by parameter
    lenders: dict[int, tuple[UnitPlan, str]] = {}
    sharded: set[int] = set()
    for plan in plans:
        own: list[int] = []
        for bucket in plan.buckets:
            own.append(len(survey.buckets))
            survey.buckets.append(_of_plan(plan, bucket))
            for item in bucket.found:
                index[id(item.param)] = own[-1]
                _note_split(survey, plan.full_name(item.names[0]), item.parallel)
                lenders[id(item.param)] = plan, plan.full_name(item.names[0])
        places: dict[tuple[int, str], Use] = {}
        loans: list[Loan] = []
        for item in plan.found:
            sharded.add(id(item.param))
            name = plan.full_name(item.names[0])
            itemsize = survey.buckets[index[id(item.param)]].compute.itemsize
            bytes_ = item.part.numel() * itemsize * item.param.requires_grad
            use = Use(id(item.param), name, index[id(item.param)], bytes_)
            places.update({(id(slot.values), slot.name): use for slot in item.slots})
            lender, lent_as = lenders[id(item.param)]
            if lender is not plan:
                loans.append(Loan(name, lender.name, lent_as))
        survey.records.append(
            Record(
                name=plan.name,
                classes=tuple(type(m).__name__ for m in plan.modules),
                modules=plan.modules,
                held=own,
                borrowed=list(
                    dict.fromkeys(
                        i for item in plan.found if (i := index[id(item.param)]) not in own
                    )
                ),
                loans=tuple(loans),
                ties=tuple(
                    tuple(plan.full_name(name) for name in item.names)
                    for item in plan.found
                    if len(item.names) > 1
                ),
                keep=plan.options.placement.keep_after_forward,
                reshard_after_backward=True,
                prefetch=plan.options.prefetch,
                places=places,
            )
        )
    _walk(modules, survey, lambda param: id(param) in sharded)
    survey.buffer_bytes = _planned_buffers(modules, plans)
    return survey


def _note_split(survey: Survey, name: str, parallel: Parallel | None) -> None:
    if parallel is not None and parallel.splits:
        survey.split[name] = math.prod(axis.group.size for axis in parallel.splits)


def _walk(
    modules: Sequence[nn.Module], survey: Survey, is_sharded: Callable[[nn.Parameter], bool]
) -> None:
    """Fill in the events and what no unit has."""
    walker = _Walker(survey, is_sharded)
    for position, module in enumerate(modules):
        if id(module) not in walker.seen:
            walker.visit(f"{position}." if len(modules) > 1 else "", module)


class _Walker:
    """Goes through modules as a forward does, opening and closing units as the engine would."""

    def __init__(self, survey: Survey, is_sharded: Callable[[nn.Parameter], bool]) -> None:
        self.survey, self.is_sharded = survey, is_sharded
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
                self.survey.events.append(Event(place[0], use=place[1]))
            elif isinstance(param, nn.Parameter) and not self.is_sharded(param):
                self.survey.outside.setdefault(clean_name(f"{name}{key}"), param)
        for child_name, child in module.named_children():
            if id(child) not in self.seen:
                self.visit(f"{name}{child_name}.", child)
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


class _NamesOf:
    """Names of entries as a module knows them."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.paths: dict[int, str] = {}
        for module in modules:
            for path, submodule in module.named_modules():
                self.paths.setdefault(id(submodule), clean_name(path))

    def of(self, entry: Entry) -> str:
        found = self.in_modules(entry.slots, None)
        return found[0] if found else entry.spec.fqn

    def in_modules(
        self, slots: Sequence[object], modules: Sequence[nn.Module] | None
    ) -> tuple[str, ...]:
        """Names of the slots, of those only that lie in ``modules`` where it is given."""
        inside = None if modules is None else {id(m) for top in modules for m in top.modules()}
        names: list[str] = []
        for slot in slots:
            module = slot.module()  # type: ignore[attr-defined]
            if module is None or id(module) not in self.paths:
                continue
            if inside is None or id(module) in inside:
                path = self.paths[id(module)]
                names.append(f"{path}.{slot.name}" if path else slot.name)  # type: ignore[attr-defined]
        return tuple(names)


def _loan(unit: Unit, entry: Entry, names: _NamesOf) -> Loan:
    modules = [m for ref in unit.modules if (m := ref()) is not None]
    mine = [slot for slot, i in unit.slots if unit.entries[i] is entry]
    found = names.in_modules(mine, modules)
    return Loan(found[0] if found else entry.spec.fqn, entry.spec.unit, names.of(entry))


def _grad_bytes(entry: Entry, bucket: Bucket, needs_grad: bool) -> int:
    return entry.spec.numel * bucket.full.element_size() * needs_grad


def _of_bucket(bucket: Bucket, names: _NamesOf) -> PlannedBucket:
    with raw():
        trained = sum(e.spec.numel for e in bucket.entries if e.param.requires_grad)
    return _bucket(
        unit=bucket.entries[0].spec.unit,
        parameters=tuple(names.of(entry) for entry in bucket.entries),
        storage=bucket.shard.dtype,
        mp=bucket.mp,
        mesh=bucket.mesh,
        offload=bucket.offload,
        numel=sum(entry.spec.numel for entry in bucket.entries),
        trained=trained,
        layout=bucket.layout,
        spread=None if bucket.spread is None else bucket.spread.size,
        is_fused=bucket.mesh.axes is not None,
        in_place=bucket.in_place,
    )


def _of_plan(plan: UnitPlan, bucket: BucketPlan) -> PlannedBucket:
    numel = sum(extent.numel for extent in bucket.layout.extents)
    needs_grad = bucket.found[0].param.requires_grad
    param, offload = bucket.found[0].param, plan.options.offload
    device = plan.options.device if param.is_meta else param.device
    stays = not offload.shards or device == bucket.mesh.device
    same = bucket.mp.dtypes_for(bucket.storage_dtype).compute == bucket.storage_dtype
    return _bucket(
        unit=plan.name,
        parameters=tuple(plan.full_name(item.names[0]) for item in bucket.found),
        storage=bucket.storage_dtype,
        mp=bucket.mp,
        mesh=bucket.mesh,
        offload=offload,
        numel=numel,
        trained=numel if needs_grad else 0,
        layout=bucket.layout,
        spread=plan.options.placement.spread,
        is_fused=plan.options.placement.fused,
        in_place=bucket.layout.world_size == 1 and same and stays,
    )


def _bucket(
    unit: str,
    parameters: tuple[str, ...],
    storage: torch.dtype,
    mp: MixedPrecision,
    mesh: Mesh,
    offload: Offload,
    numel: int,
    trained: int,
    layout: Layout,
    spread: int | None,
    is_fused: bool,
    in_place: bool,
) -> PlannedBucket:
    dtypes = mp.dtypes_for(storage)
    fused = mesh.replicate_axis.size if is_fused else 1
    return PlannedBucket(
        unit=unit,
        parameters=parameters,
        storage=storage,
        compute=dtypes.compute,
        reduce=dtypes.reduce,
        grad=dtypes.grad,
        numel=numel,
        trained_numel=trained,
        shard_numel=layout.shard_numel,
        ranks=mesh.shard.size if mesh.axes else mesh.shard.size * fused,
        replicas=mesh.replicate.size // fused,
        fused=fused,
        spread=spread,
        in_place=in_place,
        point_to_point=is_point_to_point(mesh.shard),
        on_host=offload.shards and mesh.device.type != "cpu",
        device_copy=offload.optimizer and not offload.params,
        owned=tuple(whole_owners(layout)),
    )


def _planned_buffers(modules: Sequence[nn.Module], plans: Sequence[UnitPlan]) -> int:
    casts: dict[int, torch.dtype] = {}
    for plan in plans:
        dtype = unit_precision(plan).buffer_dtype
        for module in plan.modules:
            for _, submodule in plan.managed(module):
                for buffer in buffer_slots(submodule).values():
                    if buffer is not None and buffer.is_floating_point() and dtype is not None:
                        casts[id(buffer)] = dtype
    found = {id(b): b for module in modules for b in module.buffers()}
    return sum(b.numel() * casts.get(key, b.dtype).itemsize for key, b in found.items())
