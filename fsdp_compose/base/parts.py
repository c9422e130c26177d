"""A flat tensor cut by rank; of a large world, each part is a view made when it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch

MANY_RANKS = 8
"""Of more ranks no list of views is kept, which is 600 bytes each, for every bucket.

It also has Python's garbage collector look at each, again and again. What sends a message to each
rank takes longer for that than for a view; what makes one call for all reads none.
"""


class Parts(Sequence[torch.Tensor]):
    """``flat`` cut into ``size`` equal views, which are not kept."""

    __slots__ = ("flat", "size", "width")

    def __init__(self, flat: torch.Tensor, size: int) -> None:
        self.flat, self.size, self.width = flat, size, flat.numel() // size

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.size))]
        start = range(self.size)[index] * self.width
        return self.flat[start : start + self.width]


def cut_by_rank(flat: torch.Tensor, size: int) -> Sequence[torch.Tensor]:
    """``flat``, whose length ``size`` divides, cut into that many equal views."""
    return Parts(flat, size) if size > MANY_RANKS else list(flat.chunk(size))


def split_around(spans: Sequence[tuple[int, int]], total: int) -> tuple[list[int], list[int]]:
    """The sizes that cut ``total`` elements into spans and gaps, and by span its place among them.

    Args:
        spans: (first element, number of elements) of each, in any order; none lies over another.
    """
    sizes: list[int] = []
    places = [0] * len(spans)
    position = 0
    for index in sorted(range(len(spans)), key=spans.__getitem__):
        start, numel = spans[index]
        if numel and start > position:
            sizes.append(start - position)
            position = start
        places[index] = len(sizes)
        sizes.append(numel)
        position += numel
    if position < total or not sizes:
        sizes.append(total - position)
    return sizes, places


def kept_views(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The views that ``parts`` keeps."""
    return () if isinstance(parts, Parts) else parts
