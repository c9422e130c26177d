"""What a backward inside another brings a unit waits until the outer one is past the unit.

A reentrant checkpoint inside the forward of a unit runs such a backward. Its gradients are kept as
autograd made them: the weights, which other parts of the unit still read, are released before the
flat buffer is made. Parts of one parameter are added up there, in the dtype that is reduced.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat
from operator import is_not

from fsdp_compose.core.reducing import Arrival
from fsdp_compose.core.state import Task, Unit, unit_of


def keep_part(task: Task, part: Arrival) -> bool:
    """Keep gradients for a bucket; False where the caller must pack them, after what was kept.

    They are packed where hooks, later microbatches or other users of the bucket wait for the whole,
    and where a parameter has a gradient in each of two parts.
    """
    bucket, before = part.bucket, task.kept.pop(part.bucket, None)
    work = unit_of(bucket).engine.schedule.work
    if work.is_complete(Arrival(bucket)):
        joined = part if before is None else _join(before, part)
        if joined is not None:
            task.kept[bucket] = joined
            return True
    if before is not None:
        work.pack(before)
    return False


def _join(before: Arrival, part: Arrival) -> Arrival | None:
    """Both in one, where no parameter has a gradient in each."""
    pairs = list(zip(before.grads, part.grads, strict=True))
    if any(a is not None and b is not None for a, b in pairs):
        return None
    grads = tuple([b if a is None else a for a, b in pairs])
    is_whole = all(map(is_not, grads, repeat(None)))
    return replace(part, grads=grads, is_whole=is_whole, trained=before.trained | part.trained)


def join_kept(task: Task, part: Arrival) -> Arrival:
    """The part that a unit's backward has brought, with what was kept for it."""
    kept = task.kept.pop(part.bucket, None)
    if kept is None:
        return part
    joined = _join(kept, part)
    if joined is None:
        unit_of(part.bucket).engine.schedule.work.pack(kept)
    return joined or part


def take_kept(task: Task, unit: Unit) -> list[Arrival]:
    """What was kept for the unit, which ``task`` is past."""
    return [task.kept.pop(bucket) for bucket in list(task.kept) if unit_of(bucket) is unit]


def pack_kept(task: Task) -> None:
    """Pack what was kept for units that were not closed before ``task`` ended."""
    for bucket, part in task.kept.items():
        unit_of(bucket).engine.schedule.work.pack(part)
        task.packed.append(bucket)


def list_packed(task: Task, unit: Unit) -> list[Arrival]:
    """The unit's packed buckets to which ``task`` brings no more gradients."""
    found = [b for b in dict.fromkeys(task.packed) if b.arriving.packed and unit_of(b) is unit]
    return list(filter(unit.engine.schedule.work.is_complete, map(Arrival, found)))
