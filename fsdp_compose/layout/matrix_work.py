"""Who works on whole matrices (Muon, Shampoo): the work is balanced over the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fsdp_compose.layout.shards import Layout


def matrix_work(shape: Sequence[int]) -> int:
    """Multiplications of a Newton-Schulz step, or a root of a Gram matrix, up to a factor.

    ``m * n * min(m, n)`` for ``m`` rows of ``n`` elements; the elements of a vector or scalar.
    """
    numel = math.prod(shape)
    return numel * min(shape[0], numel // shape[0]) if numel and shape else numel


def balance(work: Sequence[float], holders: Sequence[int | None], ranks: int) -> list[int]:
    """Who does each piece of work: its holder where it has one, else longest first on the idlest.

    The most that a rank does is at most the mean plus the largest piece, over pieces without a
    holder (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969); equal on every rank.

    Args:
        work: what each piece costs, 0 or more.
        holders: the rank that has all of it already, or None.
    """
    owners = [-1 if holder is None else holder for holder in holders]
    loads = [0.0] * ranks
    for cost, owner in zip(work, owners, strict=True):
        if owner >= 0:
            loads[owner] += cost
    for index in sorted(range(len(work)), key=lambda i: -work[i]):
        if owners[index] < 0:
            owners[index] = min(range(ranks), key=loads.__getitem__)
            loads[owners[index]] += work[index]
    return owners


def whole_owners(layout: Layout) -> Iterator[tuple[int, int]]:
    """(rank, work) of each parameter of granularity ``"tensor"``; see ``matrix_work``."""
    for index, extent in enumerate(layout.extents):
        if extent.granularity == "tensor" and extent.numel:
            yield layout.offsets[index] // layout.shard_numel, matrix_work(extent.shape)


def whole_work(layout: Layout) -> list[int]:
    """Count the work of each rank on parameters of granularity ``"tensor"``."""
    loads = [0] * layout.world_size
    for rank, work in whole_owners(layout):
        loads[rank] += work
    return loads


def spread_work(layout: Layout, before: list[int]) -> Layout:
    """``layout`` with its shards dealt to other ranks, those with most work to the idlest.

    Shards are of one size, so it costs nothing. A shard that shares a parameter with its neighbour
    stays where it is.

    Args:
        before: by rank, the work from the buckets laid out already; that of this one is added.
    """
    work = whole_work(layout)
    if not any(work):
        return layout
    shared: set[int] = set()
    for index in range(len(layout.extents)):
        owners = layout.owners(index)
        if len(owners) > 1:
            shared.update(owners)
    movable = [rank for rank in range(layout.world_size) if rank not in shared]
    busiest = sorted(movable, key=lambda rank: -work[rank])
    idlest = sorted(movable, key=lambda rank: before[rank])
    moved = dict(zip(busiest, idlest, strict=True))
    offsets = []
    for extent, offset in zip(layout.extents, layout.offsets, strict=True):
        rank = offset // layout.shard_numel if extent.numel else -1
        offsets.append(offset + (moved.get(rank, rank) - rank) * layout.shard_numel)
    spread = layout if len(set(before)) == 1 else replace(layout, offsets=tuple(offsets))
    before[:] = map(sum, zip(before, whole_work(spread), strict=True))
    return spread
