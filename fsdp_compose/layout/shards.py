"""A bucket cut into equal rank shards: integers only, proved where a layout is constructed.

A bucket is one flat buffer of ``world_size`` equal shards. Parameters lie in it as contiguous runs,
so a gather needs no copy-out, and rank ``r`` owns ``[r * shard_numel, (r + 1) * shard_numel)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

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
        align, shard = alignment(self.itemsize, self.world_size), self.shard_numel
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


def alignment(itemsize: int, world_size: int) -> int:
    """Elements in ``ALIGN_BYTES``; also where both of a plan's integers are checked."""
    if itemsize not in (1, 2, 4, 8, 16):
        raise ValueError(f"itemsize is {itemsize!r} bytes; wanted 1, 2, 4, 8 or 16")
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; wanted 1 rank or more")
    return ALIGN_BYTES // itemsize
