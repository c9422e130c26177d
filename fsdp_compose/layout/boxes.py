"""Cuts a flat range of a tensor into rectangular boxes, as distributed checkpoints name them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular region of a parameter's original shape, as in distributed checkpoints."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


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
    if not shape:  # a scalar, as what lies in the last dimension is a box of it
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # the range stays inside one row and touches neither end of it
        yield from _boxes((*prefix, last), shape[1:], start - last * row, stop - last * row)
        return
    yield from _boxes((*prefix, first - 1), shape[1:], start - (first - 1) * row, row)
    if first < last:
        ones, zeros = (1,) * len(prefix), (0,) * (len(shape) - 1)
        yield Box((*prefix, first, *zeros), (*ones, last - first, *shape[1:]))
    yield from _boxes((*prefix, last), shape[1:], 0, stop - last * row)
