"""Plans the layout of a bucket: searches for the order and the shard size that pad least.

Every rank plans alone and must reach the same answer: nothing here reads a clock, a device or a
process group, and the search is bounded by counts.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from fsdp_compose.layout.shards import Extent, Layout, alignment

PlanLayout: TypeAlias = Callable[[Sequence[Extent], int, int], Layout]
"""``(extents, itemsize, world_size)``: lays out a bucket, as ``plan_layout`` does."""


def plan_layout(extents: Sequence[Extent], itemsize: int, world_size: int) -> Layout:
    """Place parameters in a bucket, with the least shard size found.

    At granularity 1 the caller's order is kept and padding is below ``ALIGN_BYTES * world_size``
    bytes, the least any aligned layout can have. With coarser blocks, several orders and shard
    sizes are tried; the result is never larger than ``lcm_layout``'s.

    Args:
        extents: the parameters, in the order they should keep where it costs nothing.
        itemsize: bytes per element: 1, 2, 4, 8 or 16.
        world_size: number of ranks, 1 or more.

    Raises:
        ValueError: ``itemsize`` or ``world_size`` is not one of those.
    """
    extents, align = tuple(extents), alignment(itemsize, world_size)
    items = [_Item(i, extent.numel, extent.block) for i, extent in enumerate(extents)]
    total = sum(item.numel for item in items)
    in_order = list(accumulate((item.numel for item in items), initial=0))[:-1]
    widest = max((min(item.numel, item.block) for item in items), default=0)
    low = _round_up(max(-(-total // world_size), widest), align)

    def layout(offsets: Sequence[int], shard: int) -> Layout:
        return Layout(extents, tuple(offsets), shard, world_size, itemsize)

    if all(item.block == 1 for item in items):
        return layout(in_order, low)

    orders = _orders(items)

    def place(shard: int) -> list[int] | None:
        tries = (_place(order, shard, world_size, spread) for order, spread in orders)
        return next((offsets for offsets in tries if offsets is not None), None)

    # Two layouts that always exist bound the search: the baseline, and everything on rank 0.
    best = lcm_layout(extents, itemsize, world_size)
    if _round_up(total, align) < best.shard_numel:
        best = layout(in_order, _round_up(total, align))
    for step in _steps(items, align):
        found = _least(place, step, low, best.shard_numel)
        if found is not None:
            best = layout(*found)
    return best


def run_layout(
    layout: PlanLayout, extents: Sequence[Extent], itemsize: int, world_size: int
) -> Layout:
    """What ``layout`` makes of a bucket.

    Raises:
        TypeError: it returned no ``Layout``.
        ValueError: it returned one of other parameters, ranks or elements; or one that it built is
            not valid, see ``Layout``.
    """
    found, extents = layout(tuple(extents), itemsize, world_size), tuple(extents)
    name = getattr(layout, "__name__", repr(layout))
    if not isinstance(found, Layout):
        raise TypeError(
            f"fully_shard: layout {name} returned {type(found).__name__}; wanted "
            "Layout(extents, offsets, shard_numel, world_size, itemsize)."
        )
    wanted = (extents, world_size, itemsize)
    if (found.extents, found.world_size, found.itemsize) != wanted:
        raise ValueError(
            f"fully_shard: layout {name} returned a Layout of {len(found.extents)} parameters over "
            f"{found.world_size} ranks in elements of {found.itemsize} bytes; wanted the extents "
            f"that it was given ({len(extents)}: {', '.join(e.name for e in extents[:4])}), "
            f"{world_size} ranks and {itemsize} bytes."
        )
    return found


def lcm_layout(extents: Sequence[Extent], itemsize: int, world_size: int) -> Layout:
    """The baseline: every parameter and the shard padded to the least common multiple of blocks.

    ``L`` is that multiple, over the alignment and the blocks of parameters that have elements.
    Parameter ``i`` takes ``ceil(numel_i / L) * L`` elements, in the caller's order, and a shard is
    the least multiple of ``L`` that holds them.
    It is always valid and often wasteful; ``plan_layout`` is never worse. Errors are the same.
    """
    extents, align = tuple(extents), alignment(itemsize, world_size)
    unit = math.lcm(align, *(extent.block for extent in extents if extent.numel))
    ends = list(accumulate((_round_up(extent.numel, unit) for extent in extents), initial=0))
    shard = _round_up(-(-ends[-1] // world_size), unit)
    return Layout(extents, tuple(ends[:-1]), shard, world_size, itemsize)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class _Item(NamedTuple):
    key: int  # index in the caller's order
    numel: int
    block: int

    @property
    def whole(self) -> bool:
        """Never cut, and large enough for that to matter."""
        return 1 < self.numel <= self.block


def _orders(items: list[_Item]) -> list[tuple[list[_Item], bool]]:
    """Orders to try, preferred first, each with ``_place``'s ``spread``; ties keep caller's order.

    Spreading comes first: whoever keeps tensors whole also wants the work on them balanced.
    """
    by_block = sorted(items, key=lambda item: -item.block)
    by_numel = sorted(items, key=lambda item: -item.numel)
    by_both = sorted(by_numel, key=lambda item: -item.block)
    whole_last = sorted(by_numel, key=lambda item: 0 if item.whole else -item.block)
    spread = [(whole_last, True)] if any(item.whole for item in items) else []
    return spread + [(order, False) for order in (items, by_block, by_both, by_numel, whole_last)]


def _steps(items: list[_Item], align: int) -> list[int]:
    """Shard sizes are tried in multiples of these, coarse first.

    A parameter that covers a whole shard forces the shard to a multiple of its block, and one
    larger than two shards covers one wherever it lies. So what a shard size forces is the least
    common multiple of a prefix of the blocks, sorted by their largest parameter.
    """
    cut = sorted((item for item in items if 1 < item.block < item.numel), key=lambda i: -i.numel)
    multiples = accumulate((item.block for item in cut), math.lcm, initial=align)
    return list(dict.fromkeys(multiples))[::-1]


def _least(
    place: Callable[[int], list[int] | None], step: int, start: int, stop: int
) -> tuple[list[int], int] | None:
    """The least multiple of ``step`` in ``[start, stop)`` found to fit, with its offsets.

    Feasibility is not monotone in the shard size: a larger shard may cut a block that a smaller one
    spares. So this gallops up from the least candidate, which is always tried, before it bisects,
    and ``_steps`` supplies multiples that spare the blocks.
    """
    first = _round_up(start, step)
    miss, hit, stride, found = -1, max(0, -(-(stop - first) // step)), 1, None
    while miss + 1 < hit:
        probe = min(miss + stride, (miss + hit) // 2)
        shard = first + probe * step
        offsets = place(shard)
        if offsets is None:
            miss, stride = probe, 2 * stride
        else:
            hit, found = probe, (offsets, shard)
    return found


def _place(items: list[_Item], shard: int, world_size: int, spread: bool) -> list[int] | None:
    """Offsets by key when the items fit, one after another or in a gap left behind, else None.

    An item takes the smallest gap that holds it. With ``spread`` it takes the largest, and the
    empty ranks count as gaps once only whole items are left: longest first on the emptiest rank is
    within 4/3 of the best balance (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).
    """
    offsets = [0] * len(items)
    gaps: list[tuple[int, int]] = []  # (elements, start), sorted; each inside one rank
    end, limit = 0, shard * world_size
    for done, (key, numel, block) in enumerate(items):
        if spread and end < limit and items[done].whole:
            ranks = range(-(-end // shard), world_size)[: len(items) - done]
            gaps += [(-end % shard, end), *((shard, rank * shard) for rank in ranks)]
            gaps.sort()
            end = limit
        if gaps and 0 < numel <= gaps[-1][0]:
            size, start = gaps.pop(-1 if spread else bisect_left(gaps, (numel, 0)))
            insort(gaps, (size - numel, start + numel))
            offsets[key] = start
            continue
        start = _next_start(end, numel, block, shard)
        if start < 0 or start + numel > limit:
            return None
        boundary = min(start, end + -end % shard)
        for low, high in ((end, boundary), (boundary, start)):
            if low < high:
                insort(gaps, (high - low, low))
        offsets[key], end = start, start + numel
    return offsets


def _next_start(end: int, numel: int, block: int, shard: int) -> int:
    """The first start from ``end`` on that cuts no block, or -1 when this shard size has none."""
    head = -end % shard
    if numel <= head:
        return end
    if shard % block == 0:
        return end + head % block
    if numel - (head - head % block) <= shard:  # one cut, at the coming boundary
        return end + head % block
    if numel - (shard - shard % block) <= shard:  # one cut, at the boundary after it
        return end + head + shard % block
    return -1
