"""Which buffer at a fixed address each unit is gathered into, and packs its gradients into.

Units that are gathered one after the other take turns in two buffers, or as many as were asked for:

    units      embed   block 0   block 1   block 2   block 3   head
    gathered   A       B         A         B         A         B
    packed     a       b         a         b         a         b

A unit that contains units stays gathered while these run, so units at each height of the tree have
buffers of their own. A unit that stays gathered from forward to backward shares with none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

ALIGN = 512
"""Bytes at whose multiples buckets begin, as those of the CUDA allocator do."""

GRADIENT_BUFFERS = 2


@dataclass(frozen=True)
class StaticUnit:
    """A unit that is gathered at a fixed address; units are in the order in which they run.

    Attributes:
        gathered: bytes of each of its buckets while it is gathered; 0 for what is read in place.
        packed: bytes of each one's packed gradients; 0 where nothing is trained or reduced.
        inside: positions of the units that its modules contain.
        keeps: stays gathered from forward to backward; None: if no unit contains it.
        is_shared: reads a parameter of another unit, or another unit one of its own.
        buffers: how many units like it take turns in.
    """

    gathered: tuple[int, ...]
    packed: tuple[int, ...]
    inside: frozenset[int] = frozenset()
    keeps: bool | None = None
    is_shared: bool = False
    buffers: int = 2


@dataclass(frozen=True)
class Turns:
    """Which buffer each unit has, by position, and the bytes of each buffer."""

    buffer: tuple[int, ...]
    nbytes: tuple[int, ...]

    def users(self, buffer: int) -> int:
        """How many units take turns in a buffer."""
        return self.buffer.count(buffer)


def place_gathered(members: Sequence[StaticUnit]) -> Turns:
    """Which buffer each unit of one model is gathered into.

    >>> blocks = [StaticUnit((numel,), (numel,)) for numel in (1000, 600, 900)]
    >>> place_gathered([*blocks, StaticUnit((90,), (90,), inside=frozenset({0, 1, 2}))])
    Turns(buffer=(0, 1, 0, 2), nbytes=(1024, 1024, 512))
    """
    contained = frozenset[int]().union(*(member.inside for member in members))

    def group_of(position: int) -> object:
        member = members[position]
        outermost = position not in contained
        if member.is_shared or member.keeps or (member.keeps is None and outermost):
            return position, "alone"
        return _height(members, position), member.buffers

    return _take_turns([m.gathered for m in members], group_of, lambda i: members[i].buffers)


def place_packed(members: Sequence[StaticUnit]) -> Turns:
    """Which buffer each unit of one model packs its gradients into, where none is in use.

    >>> first = StaticUnit((1000,), (0,))
    >>> place_packed([first, StaticUnit((600,), (600,)), StaticUnit((900,), (900,))])
    Turns(buffer=(-1, 0, 1), nbytes=(1024, 1024))
    """
    return _take_turns([m.packed for m in members], lambda i: (), lambda i: GRADIENT_BUFFERS)


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where each bucket of a unit begins in the unit's buffer, then where the last one ends.

    >>> offsets([600, 0, 100])
    [0, 1024, 1024, 1536]
    """
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // ALIGN) * ALIGN)
    return starts


def _height(members: Sequence[StaticUnit], position: int) -> int:
    """How many levels of units there are inside a unit."""
    inside = members[position].inside
    return 1 + max(_height(members, inner) for inner in inside) if inside else 0


def _take_turns(
    sizes: Sequence[Sequence[int]],
    group_of: Callable[[int], object],
    count_of: Callable[[int], int],
) -> Turns:
    """Give units of one group buffers in turn; -1 to those that need none."""
    nbytes: list[int] = []
    chosen: list[int] = []
    groups: dict[object, tuple[list[int], list[int]]] = {}  # its buffers, and who has had one
    for position, parts in enumerate(sizes):
        needed = offsets(parts)[-1]
        if not needed:
            chosen.append(-1)
            continue
        buffers, had = groups.setdefault(group_of(position), ([], []))
        if len(buffers) < count_of(position):
            buffers.append(len(nbytes))
            nbytes.append(0)
        buffer = buffers[len(had) % count_of(position)]
        had.append(position)
        nbytes[buffer] = max(nbytes[buffer], needed)
        chosen.append(buffer)
    assert all(b < 0 or nbytes[b] >= offsets(s)[-1] for b, s in zip(chosen, sizes, strict=True))
    return Turns(tuple(chosen), tuple(nbytes))
