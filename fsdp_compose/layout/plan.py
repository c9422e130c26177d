"""Where every element of a bucket lives, decided with integers only and proved where it is built.

A bucket is one flat buffer of ``world_size`` equal shards. Parameters lie in it as contiguous runs,
so a gather needs no copy-out, and rank ``r`` owns ``[r * shard_numel, (r + 1) * shard_numel)``.
Every rank plans alone and must reach the same answer: nothing here reads a clock, a device or a
process group, and the search is bounded by counts.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple, TypeAlias

__all__ = [
    "ALIGN_BYTES",
    "Box",
    "Extent",
    "Granularity",
    "Layout",
    "Slice",
    "balance",
    "boxes",
    "lcm_layout",
    "matrix_work",
    "plan_layout",
    "spread_work",
    "whole_owners",
    "whole_work",
]

ALIGN_BYTES = 16  # NCCL gathers are up to 10x slower when a rank's share is not a multiple of this.

Granularity: TypeAlias = int | Literal["row", "tensor"]


@dataclass(frozen=True, slots=True)
class Extent:
    """One parameter to place.

    ``granularity`` says where rank boundaries may cut it: after every so many elements, after every
    ``"row"`` (``prod(shape[1:])`` elements), or never (``"tensor"``).

    Raises:
        ValueError: a dimension is negative, or the granularity is none of the above.
    """

    name: str
    shape: tuple[int, ...]
    granularity: Granularity = 1

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise ValueError(
                f"parameter {self.name!r}: shape {self.shape} has a negative dimension; "
                "every dimension must be 0 or more"
            )
        unit = self.granularity
        if unit not in ("row", "tensor") and (type(unit) is not int or unit < 1):
            raise ValueError(
                f"parameter {self.name!r}: granularity is {unit!r}; "
                "wanted a block of 1 element or more, 'row' or 'tensor'"
            )

    @property
    def numel(self) -> int:
        """Elements in the parameter: 1 for a scalar, 0 when a dimension is 0."""
        return math.prod(self.shape)

    @property
    def block(self) -> int:
        """Elements that stay together on one rank; at least 1, and 1 means cut anywhere."""
        if self.granularity == "row":
            return max(1, math.prod(self.shape[1:]))
        if self.granularity == "tensor":
            return max(1, self.numel)
        return self.granularity


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular region of a parameter's original shape, as in distributed checkpoints."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements ``[start, stop)`` of the flattened parameter, at ``shard_offset`` of a rank's shard.

    All three are 0 when the rank owns nothing of the parameter.
    """

    start: int
    stop: int
    shard_offset: int

    @property
    def numel(self) -> int:
        """Elements of the parameter that the rank owns."""
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """A bucket's layout, proved when it is constructed.

    ::

        flat     0         S         2S        3S        4S = numel     S = shard_numel
                 |---------|---------|---------|---------|
                 |aaaaaaaaa|aabbbbbbb|bb..ccccc|ddd......|
                 |  rank 0 |  rank 1 |  rank 2 |  rank 3 |              .  padding

        slice_of(a, 1) = Slice(start=9, stop=11, shard_offset=0)
        slice_of(b, 1) = Slice(start=0, stop=7,  shard_offset=2)

    ``c`` may not be cut, so it starts after a gap and stays inside rank 2. With granularity 1 there
    are no gaps and all padding is at the end. Every count is in elements unless it says bytes.

    Attributes:
        extents: the parameters, in the caller's order.
        offsets: where each parameter starts in the flat buffer, in the caller's order.
        shard_numel: elements per rank; 0 only for a bucket without elements.
        world_size: number of rank shards.
        itemsize: bytes per element: 1, 2, 4, 8 or 16.

    Raises:
        ValueError: a parameter is out of bounds, overlaps another or has a block cut in two, or a
            shard is not a multiple of ``ALIGN_BYTES``.
    """

    extents: tuple[Extent, ...]
    offsets: tuple[int, ...]
    shard_numel: int
    world_size: int
    itemsize: int

    def __post_init__(self) -> None:
        # The shards partition the buffer, so an element is owned exactly once when its parameter
        # lies in bounds and overlaps no other: the cost is that of a sort, whatever the world size.
        align, shard = _alignment(self.itemsize, self.world_size), self.shard_numel
        if shard < 0 or shard % align:
            raise ValueError(
                f"shard of {shard} elements x {self.itemsize} bytes; "
                f"wanted a multiple of {ALIGN_BYTES} bytes, 0 or more"
            )
        if len(self.offsets) != len(self.extents):
            raise ValueError(f"{len(self.offsets)} offsets for {len(self.extents)} parameters")
        end, before = 0, "the start of the buffer"
        for index in self.memory_order:
            extent, offset = self.extents[index], self.offsets[index]
            numel, block, where = extent.numel, extent.block, f"parameter {extent.name!r}"
            if offset < 0 or offset + numel > self.numel:
                raise ValueError(
                    f"{where}: lies at [{offset}, {offset + numel}), "
                    f"out of the buffer's [0, {self.numel})"
                )
            if numel == 0:
                continue
            if offset < end:
                raise ValueError(f"{where}: starts at {offset}, overlaps {before} up to {end}")
            head = shard - offset % shard
            if numel > head and (head % block or (numel - head > shard and shard % block)):
                raise ValueError(
                    f"{where}: a rank boundary cuts a block of {block} elements "
                    f"(offset {offset}, {numel} elements, shard of {shard}); "
                    "every boundary inside it must fall a multiple of the block from its start"
                )
            end, before = offset + numel, repr(extent.name)

    @property
    def numel(self) -> int:
        """Elements in the whole flat buffer, padding included."""
        return self.shard_numel * self.world_size

    @property
    def padding(self) -> int:
        """Elements of the flat buffer that belong to no parameter."""
        return self.numel - sum(extent.numel for extent in self.extents)

    @property
    def padding_bytes(self) -> int:
        """Bytes of the flat buffer that belong to no parameter."""
        return self.padding * self.itemsize

    @cached_property
    def memory_order(self) -> tuple[int, ...]:
        """Indices of the parameters, sorted by where they start."""
        return tuple(sorted(range(len(self.extents)), key=lambda index: self.offsets[index]))

    def slice_of(self, index: int, rank: int) -> Slice:
        """What ``rank`` owns of parameter ``index``.

        Raises:
            ValueError: ``rank`` is not in ``[0, world_size)``.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is out of range; wanted 0 to {self.world_size - 1}")
        offset, base = self.offsets[index], rank * self.shard_numel
        low = max(offset, base)
        high = min(offset + self.extents[index].numel, base + self.shard_numel)
        return Slice(low - offset, high - offset, low - base) if low < high else Slice(0, 0, 0)

    def slices(self, rank: int) -> tuple[Slice, ...]:
        """What ``rank`` owns of every parameter, in the caller's order."""
        return tuple(self.slice_of(index, rank) for index in range(len(self.extents)))

    def owners(self, index: int) -> range:
        """Ranks that hold at least one element of parameter ``index``."""
        offset, numel = self.offsets[index], self.extents[index].numel
        if numel == 0:
            return range(0)
        return range(offset // self.shard_numel, (offset + numel - 1) // self.shard_numel + 1)


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
    extents, align = tuple(extents), _alignment(itemsize, world_size)
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


def lcm_layout(extents: Sequence[Extent], itemsize: int, world_size: int) -> Layout:
    """The baseline: every parameter and the shard padded to the least common multiple of blocks.

    ``L`` is that multiple, over the alignment and the blocks of parameters that have elements.
    Parameter ``i`` takes ``ceil(numel_i / L) * L`` elements, in the caller's order, and a shard is
    the least multiple of ``L`` that holds them.
    It is always valid and often wasteful; ``plan_layout`` is never worse. Errors are the same.
    """
    extents, align = tuple(extents), _alignment(itemsize, world_size)
    unit = math.lcm(align, *(extent.block for extent in extents if extent.numel))
    ends = list(accumulate((_round_up(extent.numel, unit) for extent in extents), initial=0))
    shard = _round_up(-(-ends[-1] // world_size), unit)
    return Layout(extents, tuple(ends[:-1]), shard, world_size, itemsize)


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
    """By rank, the work on parameters of granularity ``"tensor"``."""
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


def boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Cut the flat (row-major) range ``[start, stop)`` of ``shape`` into boxes, in flat order.

    Each box is itself contiguous in flat order, so the range is their concatenation. There are at
    most ``2 * len(shape) - 1`` of them, 1 for a scalar, none for an empty range.

    Raises:
        ValueError: the range is reversed or leaves the shape.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(
            f"range [{start}, {stop}) of shape {tuple(shape)}; "
            f"wanted 0 <= start <= stop <= {math.prod(shape)}"
        )
    return tuple(_boxes((), tuple(shape), start, stop))


def _boxes(prefix: tuple[int, ...], shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    if start == stop:
        return
    if not shape:
        yield Box(prefix, (1,) * len(prefix))
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # the range stays inside one row and touches neither end of it
        yield from _boxes((*prefix, last), shape[1:], start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _boxes((*prefix, first - 1), shape[1:], start - (first - 1) * row, row)
    if first < last:
        ones, zeros = (1,) * len(prefix), (0,) * (len(shape) - 1)
        yield Box((*prefix, first, *zeros), (*ones, last - first, *shape[1:]))
    yield from _boxes((*prefix, last), shape[1:], 0, stop - last * row)


def _alignment(itemsize: int, world_size: int) -> int:
    """Elements in ``ALIGN_BYTES``; also where both of a plan's integers are checked."""
    if itemsize not in (1, 2, 4, 8, 16):
        raise ValueError(f"itemsize is {itemsize!r} bytes; wanted 1, 2, 4, 8 or 16")
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; wanted 1 rank or more")
    return ALIGN_BYTES // itemsize


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
    if block == 1 or numel <= head:
        return end
    if shard % block == 0:
        return end + head % block
    if numel - (head - head % block) <= shard:  # one cut, at the coming boundary
        return end + head % block
    if numel - (shard - shard % block) <= shard:  # one cut, at the boundary after it
        return end + head + shard % block
    return -1
