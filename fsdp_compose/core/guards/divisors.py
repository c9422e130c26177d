"""Units on different numbers of ranks raise until the user says what to divide gradients by."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_compose.base.attributes import requires_grad
from fsdp_compose.base.torch_private import raw
from fsdp_compose.buckets.bucket import Entry
from fsdp_compose.core.state import Task, Unit, owner_of, units_with


def check_divisors(task: Task) -> None:
    """Raise when a backward averaged over different numbers of ranks and no factor was set.

    Note which buckets lie on fewer ranks than others, whose norms torch cannot add up.
    """
    found: dict[int, Unit] = {}
    held = [(unit, bucket) for unit in task.units for bucket in unit.buckets]
    with raw():
        for unit, bucket in held:
            if unit.switches.divide_factor is None and any(
                requires_grad(entry.param) for entry in bucket.entries
            ):
                found.setdefault(bucket.mesh.size, unit)
    ranks = max([bucket.mesh.size for _, bucket in held], default=0)
    for unit, bucket in held:  # as for ``held_by_fewer``
        size = bucket.mesh.size
        if size < ranks:
            bucket.residence.is_of_fewer = unit.switches.divide_factor != size
    if len(found) > 1:
        (most, wide), (few, narrow) = max(found.items()), min(found.items())
        raise RuntimeError(
            f"a backward averaged gradients over different numbers of ranks: those of unit "
            f"{wide.name!r} over {most}, of unit {narrow.name!r} over {few}. Say after fully_shard "
            f"what the gradients of unit {narrow.name!r} are divided by. If it holds experts, "
            f"whose gradients come from the tokens of all {most} ranks, call fsdp_compose."
            f"set_gradient_divide_factor(experts, {most}); if the other ranks hold the same "
            f"parameters and see the same data, set_gradient_divide_factor(module, {few}). Discard "
            "the gradients of this backward."
        )


def held_by_fewer(entries: Iterable[Entry]) -> list[Entry]:
    """List the entries that lie on fewer ranks than others, such as experts.

    Other ranks may hold other parameters in their place. Parameters that tensor parallelism split
    are left out, as their spec says where the other parts are. So are units whose gradients the
    user divides by the number of their own ranks: other ranks hold the same parameters.
    """
    sizes = {entry: owner_of(entry).mesh.size for entry in entries}
    most = max(sizes.values(), default=0)
    return [
        entry
        for entry, size in sizes.items()
        if size < most
        and entry.spec.parallel is None
        and all(unit.switches.divide_factor != size for unit in units_with(owner_of(entry)))
    ]
