"""What units with ``static_buffers=`` keep at fixed addresses, as the engine will place them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fsdp_compose.layout.static_buffers import StaticUnit, place_gathered, place_packed
from fsdp_compose.report.survey import Record, Survey


@dataclass
class StaticBuffers:
    """The static buffers of a module.

    Attributes:
        place: by the id of a record, a number that units have in common which share a buffer.
        gathered, packed: buckets that are gathered, and whose gradients are packed, there.
        gather_nbytes, grad_nbytes: bytes of each buffer.
        alone: names of units with a buffer of their own.
    """

    place: dict[int, tuple[int, int]] = field(default_factory=dict)
    gathered: set[int] = field(default_factory=set)
    packed: set[int] = field(default_factory=set)
    gather_nbytes: list[int] = field(default_factory=list)
    grad_nbytes: list[int] = field(default_factory=list)
    alone: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(self.gather_nbytes) + sum(self.grad_nbytes)


def find_static_buffers(survey: Survey) -> StaticBuffers:
    """Place the units of a survey as the engine does, each outermost one with those inside it."""
    found = StaticBuffers()
    first = {id(event.record): i for i, event in reversed(list(enumerate(survey.events)))}
    records = [r for r in survey.records if r.static_buffers and id(r) in first]
    records.sort(key=lambda record: first[id(record)])
    inside = {id(r): _records_inside(r, records) for r in records}
    contained = {id(inner) for inners in inside.values() for inner in inners}
    for number, root in enumerate(r for r in records if id(r) not in contained):
        members = [*inside[id(root)], root]
        _place(survey, members, [inside[id(m)] for m in members], number, found)
    return found


def _place(
    survey: Survey,
    records: Sequence[Record],
    inside: Sequence[Sequence[Record]],
    number: int,
    found: StaticBuffers,
) -> None:
    """Add the buffers of one model, ``records``, each with the units inside it."""
    position = {id(record): i for i, record in enumerate(records)}
    buckets, lent = survey.buckets, {i for record in survey.records for i in record.borrowed}
    members = [
        StaticUnit(
            gathered=tuple(buckets[i].full_bytes for i in record.held),
            packed=tuple(_packed_nbytes(survey, i) for i in record.held),
            inside=frozenset(position[id(inner)] for inner in inners),
            keeps=record.keep if record.reshard_after_backward else True,
            is_shared=bool(record.borrowed) or not lent.isdisjoint(record.held),
            buffers=record.static_buffers,
        )
        for record, inners in zip(records, inside, strict=True)
    ]
    gathered, packed = place_gathered(members), place_packed(members)
    for record, buffer in zip(records, gathered.buffer, strict=True):
        if buffer >= 0:
            found.place[id(record)] = number, buffer
            found.gathered.update(i for i in record.held if buckets[i].full_bytes)
            found.packed.update(i for i in record.held if _packed_nbytes(survey, i))
            if gathered.users(buffer) == 1:
                found.alone.append(record.name)
    found.gather_nbytes += gathered.nbytes
    found.grad_nbytes += packed.nbytes


def _packed_nbytes(survey: Survey, index: int) -> int:
    bucket = survey.buckets[index]
    return bucket.flat_bytes if bucket.trained_numel and bucket.gather_ranks > 1 else 0


def _records_inside(record: Record, others: Sequence[Record]) -> list[Record]:
    """List the records of ``others`` whose modules lie inside the modules of ``record``."""
    within = {id(m) for module in record.modules for m in module.modules()}
    return [
        other
        for other in others
        if other is not record and any(id(module) in within for module in other.modules)
    ]
