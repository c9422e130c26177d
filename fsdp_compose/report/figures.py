"""A plan's figures, as data and as text: units, memory, communication and notes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, ClassVar

from fsdp_compose.report.activations import Activations
from fsdp_compose.report.advice import Accumulation, Advice
from fsdp_compose.report.buckets import PlannedBucket
from fsdp_compose.report.notes import work_of
from fsdp_compose.report.schedule import Peak, PlannedMoment
from fsdp_compose.report.survey import Loan
from fsdp_compose.report.text import (
    count,
    dtype_name,
    fit_names,
    plain,
    plural,
    size,
    table,
    wrap_text,
)
from fsdp_compose.report.traffic import TrafficReport


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank: what is kept, and the most that is there besides in a step.

    Attributes:
        shards: parameter shards, with padding.
        gradients: sharded gradients, from backward to ``zero_grad``.
        optimizer: its state, at most: with the padding of flat_parameters; 0 where no optimizer was
            named.
        buffers: the module's buffers, whole on every rank.
        outside: parameters of no unit, whole on every rank, with gradients and optimizer state.
        weight_copies: kept in the compute dtype beside the shards, for gathers to read: of shards
            in host memory by ``Offload(optimizer=True)``, and by HYBRID_SHARD_OPTIMIZER.
        static_buffers: that ``static_buffers=`` keeps; what is in them is not counted as transient.
        host: how much of ``shards`` and ``optimizer`` is in host memory, as are the gradients then.
        forward, backward: what is transient when it is most.
    """

    shards: int
    gradients: int
    optimizer: int
    buffers: int
    outside: int
    weight_copies: int
    static_buffers: int
    host: int
    forward: Peak
    backward: Peak

    DERIVED: ClassVar = ("persistent", "total")

    @property
    def persistent(self) -> int:
        """What is always in device memory: all but gradients and what the passes need."""
        kept = self.shards + self.optimizer + self.buffers + self.outside + self.weight_copies
        return kept + self.static_buffers - self.host

    @property
    def total(self) -> int:
        """The most that is in device memory at once; activations not counted."""
        return self.persistent + max(self.forward.total, self.backward.total)


@dataclass(frozen=True)
class PlannedUnit:
    """A unit, what it communicates in a step, and what it borrows."""

    name: str
    classes: tuple[str, ...]
    buckets: tuple[PlannedBucket, ...]
    borrowed: tuple[Loan, ...]
    keeps: bool  # stays gathered from forward to backward
    forward: TrafficReport
    backward: TrafficReport

    DERIVED: ClassVar = ("numel", "trained_numel", "shard_bytes", "full_bytes", "padding_bytes")

    @property
    def numel(self) -> int:
        """Elements of its own parameters."""
        return sum(bucket.numel for bucket in self.buckets)

    @property
    def trained_numel(self) -> int:
        return sum(bucket.trained_numel for bucket in self.buckets)

    @property
    def shard_bytes(self) -> int:
        return sum(bucket.shard_bytes for bucket in self.buckets)

    @property
    def full_bytes(self) -> int:
        """Bytes while it is gathered, without what it borrows."""
        return sum(bucket.full_bytes for bucket in self.buckets)

    @property
    def padding_bytes(self) -> int:
        return sum(bucket.padding_bytes for bucket in self.buckets)


@dataclass(frozen=True)
class Plan:
    """What ``plan`` found; ``print`` it, or take it as data with ``to_dict``.

    Attributes:
        module: class of the module.
        is_sharded: it was read from the sharded module, not from the arguments.
        ranks, replicas: ranks that parameters are cut over, and groups of them with copies; the
            most of any unit.
        optimizer: as it was named.
        units: outermost last, as they are built.
        memory: of one rank; ranks differ by less than one unit's padding.
        notes: what is worth knowing: ties, dtypes, frozen parameters, what was left out, sizes.
        activations: as they were measured; None without a sample.
        device_memory: what a device has; None where it was not said.
        accumulation: what a microbatch costs, by ``keep=`` of ``accumulate``.
        advice: changes that were planned too, those that save most memory first.
        moments: memory over the step, for ``plot_memory``; not in ``to_dict``.

    Example:
        >>> found = plan(nn.Linear(1024, 1024), world_size=8)
        >>> [unit.name for unit in found.units], found.numel
        (['Linear'], 1049600)
        >>> print(found)  # a table of units, memory, communication and notes
        plan for Linear: 1 unit, 1.05M parameter elements (1.05M trained) over 8 ranks
        ...
    """

    module: str
    is_sharded: bool
    ranks: int
    replicas: int
    optimizer: str | None
    units: tuple[PlannedUnit, ...]
    memory: Memory
    notes: tuple[str, ...]
    activations: Activations | None = None
    device_memory: int | None = None
    accumulation: tuple[Accumulation, ...] = ()
    advice: tuple[Advice, ...] = ()
    moments: tuple[PlannedMoment, ...] = ()

    DERIVED: ClassVar = (
        "forward", "backward", "step", "numel", "trained_numel", "owner_work", "owner_imbalance",
        "needed", "fits",
    )  # fmt: skip

    @property
    def needed(self) -> int:
        """Device memory at the peak, with activations where they were measured."""
        if self.activations is None:
            return self.memory.total
        forward = self.memory.forward.total + self.activations.forward
        backward = self.memory.backward.total + self.activations.backward
        return self.memory.persistent + max(forward, backward)

    @property
    def fits(self) -> bool | None:
        """Whether ``needed`` is within ``device_memory``; None where that was not said."""
        return None if self.device_memory is None else self.needed <= self.device_memory

    @property
    def buckets(self) -> tuple[PlannedBucket, ...]:
        return tuple(bucket for unit in self.units for bucket in unit.buckets)

    @property
    def forward(self) -> TrafficReport:
        """What one rank communicates in a forward."""
        return sum((unit.forward for unit in self.units), TrafficReport())

    @property
    def backward(self) -> TrafficReport:
        return sum((unit.backward for unit in self.units), TrafficReport())

    @property
    def step(self) -> TrafficReport:
        return self.forward + self.backward

    @property
    def numel(self) -> int:
        """Elements of all sharded parameters."""
        return sum(unit.numel for unit in self.units)

    @property
    def trained_numel(self) -> int:
        return sum(unit.trained_numel for unit in self.units)

    @property
    def owner_work(self) -> tuple[int, ...]:
        """By rank, the work of an optimizer on the tensors that are never cut.

        Those are of granularity ``"tensor"``; work is counted as by ``layout.matrix_work``. Empty
        where there are none.
        """
        return work_of(self.buckets)

    @property
    def owner_imbalance(self) -> float:
        """The most of ``owner_work`` over its mean; 1 is even, 0 where there is none."""
        work = self.owner_work
        return max(work) * len(work) / sum(work) if work else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Numbers, strings, lists and dictionaries only."""
        return plain(replace(self, moments=()))

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return _text(self)


_GLOSSARY = (
    "A unit is gathered as a whole. A rank keeps its shard, and the rest while it is gathered. "
    "Padding belongs to no parameter."
)


def _text(plan: Plan) -> str:
    ranks = plural(plan.ranks, "rank")
    if plan.replicas > 1:
        ranks = f"{plan.replicas} replicas of {ranks}"
    title = (
        f"{'sharded' if plan.is_sharded else 'plan for'} {plan.module}: "
        f"{plural(len(plan.units), 'unit')}, {count(plan.numel)} parameter elements "
        f"({count(plan.trained_numel)} trained) over {ranks}"
    )
    parts = [
        f"{wrap_text(title, indent='')}\n{wrap_text(_GLOSSARY)}",
        _units(plan.units),
        _memory(plan),
        _traffic(plan),
        _accumulation(plan.accumulation),
    ]
    if plan.notes:
        parts.append("\n".join(["notes", *(wrap_text(note, bullet="- ") for note in plan.notes)]))
    if plan.advice:
        lines = [wrap_text(str(advice), bullet="- ") for advice in plan.advice]
        parts.append("\n".join(["advice; each line was planned too", *lines]))
    return "\n\n".join(part for part in parts if part)


def _units(units: Sequence[PlannedUnit]) -> str:
    """A row for each run of units that are alike; columns that say something."""
    rows: list[tuple[str, ...]] = []
    for _, run in groupby(units, key=_row):
        alike = list(run)
        name = alike[0].name
        if len(alike) > 1:
            name = f"{name} .. {_last_part(name, alike[-1].name)} ({len(alike)} alike)"
        rows.append((name, *_row(alike[0])))
    header = (
        "unit", "buckets", "stored", "computed", "reduced", "parameters", "frozen", "shard",
        "gathered", "padding",
    )  # fmt: skip
    quiet = {1: "1", 6: "0", 9: "0 B"}  # what need not be said, where it is so of every unit
    shown = [i for i in range(10) if any(row[i] != quiet.get(i) for row in rows)]
    return table(fit_names([[row[i] for i in shown] for row in (header, *rows)]))


def _last_part(first: str, last: str) -> str:
    """``'31'`` for ``'layers.0'`` and ``'layers.31'``; else ``last``."""
    same = first.rpartition(".")[0] == last.rpartition(".")[0]
    return last.rpartition(".")[2] if same else last


def _row(unit: PlannedUnit) -> tuple[str, ...]:
    def kinds(attribute: str) -> str:
        names = [dtype_name(getattr(bucket, attribute)) for bucket in unit.buckets]
        return "+".join(dict.fromkeys(names)) or "-"

    return (
        str(len(unit.buckets)),
        *(kinds(name) for name in ("storage", "compute", "reduce")),
        count(unit.numel),
        count(unit.numel - unit.trained_numel),
        size(unit.shard_bytes),
        size(unit.full_bytes),
        size(unit.padding_bytes),
    )


def _memory(plan: Plan) -> str:
    memory, measured = plan.memory, plan.activations
    rows = [
        ("parameter shards", size(memory.shards), ""),
        ("gradient shards", size(memory.gradients), "after backward, until they are cleared"),
        ("optimizer state", size(memory.optimizer), plan.optimizer or "no optimizer was named"),
        ("buffers", size(memory.buffers), ""),
    ]
    for name, comment in (
        ("outside", "parameters of no unit, with gradients and state"),
        ("weight_copies", "in the compute dtype, for gathers to read"),
        ("static_buffers", "for gathers and packed gradients, not counted below"),
        ("host", "of these in host memory"),
    ):
        if getattr(memory, name):
            rows.append((name.replace("_", " "), size(getattr(memory, name)), comment))
    for title, peak in (("peak in forward", memory.forward), ("peak in backward", memory.backward)):
        rows.append((title, size(peak.total), "on top of shards, state and buffers:"))
        rows += [(f"  {_PARTS[n]}", size(v), "") for n in _PARTS if (v := getattr(peak, n))]
    if measured is not None:
        rows.append(("activations in forward", size(measured.forward), "measured"))
        rows.append(("activations in backward", size(measured.backward), "measured"))
    else:
        rows.append(("activations", "-", "not counted: pass sample="))
    rows.append(("total", size(plan.needed), "with the larger of both peaks"))
    if plan.device_memory is not None:
        rows.append(("device memory", size(plan.device_memory), _verdict(plan)))
    return "memory per rank\n" + table(rows, left=(0, 2))


_PARTS = {
    "gathered": "gathered weights",
    "encoded": "gathers on their way",
    "spread": "parts of weights kept",
    "gradients": "gradients as made",
    "packed": "gradients packed",
    "received": "reductions under way",
    "reduced": "gradient shards",
}


def _verdict(plan: Plan) -> str:
    assert plan.device_memory is not None
    left = plan.device_memory - plan.needed
    room = "for kernels and the allocator" if plan.activations else "for activations and the rest"
    if plan.fits:
        return f"it fits: {size(left)} are left {room}"
    return f"it does NOT fit: {size(-left)} too much"


def _accumulation(found: Sequence[Accumulation]) -> str:
    if not any(way.moved for way in found):
        return ""
    rows = [("gradient accumulation, per microbatch", "held besides", "reduced")]
    rows += [(f"keep={way.keep!r}", size(way.held), size(way.moved)) for way in found]
    return table(rows, indent="")


def _traffic(plan: Plan) -> str:
    rows = [("", "gathers", "", "reduces", "", "all-reduces", "", "collectives", "received")]
    rows += [(n, *_counts(getattr(plan, n))) for n in ("forward", "backward", "step")]
    quiet = () if plan.step.all_reduces else (5, 6)
    shown = [[cell for i, cell in enumerate(row) if i not in quiet] for row in rows]
    return "communication per rank and step\n" + table(shown)


def _counts(found: TrafficReport) -> tuple[str, str, str, str, str, str, str, str]:
    return (
        str(found.gathers),
        size(found.gather_bytes),
        str(found.reduces),
        size(found.reduce_bytes),
        str(found.all_reduces),
        size(found.all_reduce_bytes),
        str(found.collectives),
        size(found.total_bytes),
    )
