"""Ranks that communicate, and how flat tensors travel between them.

A ``Transport`` is the seam for communication of your own: four plain functions. Pass one to
``fully_shard(..., transport=)``; examples/change_one_thing/own_collective.py has a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from fsdp_compose.base.arguments import check_function, describe_value
from fsdp_compose.base.codec import name_function

Op: TypeAlias = Literal["sum", "max", "min", "product"]
Tensors: TypeAlias = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Group:
    """Ranks that communicate; ``pg`` is None for a group of one rank, which never communicates.

    A group over which one call exchanges messages has the name of that call as ``purpose``, and in
    ``note`` the key of the store below which a rank says that it left the call. ``reductions`` is a
    communicator of the same ranks for reductions alone; None: they share ``pg`` with gathers.
    """

    pg: dist.ProcessGroup | None = field(repr=False)
    rank: int
    size: int
    backend: str
    ranks: tuple[int, ...] = field(hash=False)  # of the members, in the default process group
    purpose: str = field(default="", compare=False)
    note: str = field(default="", compare=False)
    transport: Transport | None = field(default=None, compare=False)  # None: the backend's own
    reductions: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)


def get_global_rank() -> int:
    """This process's rank in the default process group; 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


SELF = Group(pg=None, rank=0, size=1, backend="none", ranks=(0,))


class Call(NamedTuple):
    """What a function of a ``Transport`` is told besides its tensors.

    Attributes:
        group: the ranks. ``group.pg`` is torch's process group, ``group.rank`` this rank in it.
        tag: for messages between two ranks; ranks that do different things have different tags.
        purpose: what the call is for, as error texts say it.
        offered: what ``Transport.offer`` returned here.
        offers: gives what it returned on every rank, by rank, once the works are waited for; None
            outside of a unit's passes, where nothing is offered.
        factor: what a reduction still has to multiply each rank's tensor by. Only the library's own
            transport is asked to, on NCCL, which does it on the way.
        room: what ``Transport.room`` returned here.
    """

    group: Group
    tag: int
    purpose: str
    offered: Sequence[int] = ()
    offers: Callable[[], Sequence[Any]] | None = None
    factor: float = 1.0
    room: Sequence[torch.Tensor] = ()


class Started(NamedTuple):
    """What a function of a ``Transport`` has begun.

    Attributes:
        works: objects with ``wait()``; the data is there once all have returned.
        peers: the global rank that each work is with, for errors; empty: with all ranks at once.
        parts: of a reduction: this rank's part of the sum, in memory of its own (``whole`` is
            released); or, in rank order, what each rank adds to it, which is then summed here in
            the gradients' dtype. It is read when the works have returned.
        release: where the parts lie in memory of other ranks: called once they have been read.
            They are not written then.
    """

    works: Sequence[Any] = ()
    peers: Sequence[int] = ()
    parts: Sequence[torch.Tensor] = ()
    release: Callable[[], None] | None = None


def check_started(
    name: str, found: object, whole: Any = None, own: Any = None, group: Any = None
) -> None:
    """Raise unless the function ``name`` of a transport returned a ``Started``.

    Args:
        whole: of a reduction: the tensor; ``own``: this rank's part of it; ``group``: over which.

    Raises:
        TypeError: it is none, or has no parts where ``whole`` is given.
        ValueError: they have other sizes than ``own``, or what is kept lies in ``whole``.
    """
    wanted = "a fsdp_compose.base.group.Started"
    if whole is not None:
        wanted += (
            f" with one part of {own.numel()} elements, this rank's of the sum, or {group.size}, "
            "what each rank adds to it, in memory of their own: parts[rank].clone()"
        )
    said = f"transport: its function for {name} returned"
    if not isinstance(found, Started) or not (whole is None or found.parts):
        raise TypeError(f"{said} {describe_value(found)}; wanted {wanted}.")
    if whole is None:
        return
    sizes, memory = [part.numel() for part in found.parts], whole.untyped_storage().data_ptr()
    if len(sizes) not in (1, group.size) or {*sizes} != {own.numel()}:
        raise ValueError(f"{said} parts of {sizes} elements; wanted {wanted}.")
    for rank, part in enumerate(found.parts):
        is_added = len(sizes) > 1 and rank == group.rank  # which is read before whole is released
        if not is_added and part.untyped_storage().data_ptr() == memory:
            raise ValueError(
                f"{said} a part that lies in whole, which is released; wanted {wanted}."
            )


@dataclass(frozen=True, repr=False)
class Transport:
    """How flat, one-dimensional tensors travel between the ranks of a group.

    On an accelerator, what a function does must be in the order of the current stream. ``Call``,
    and ``Started``, which all but ``all_reduce`` return, are in ``fsdp_compose.base.group``.

    Attributes:
        gather: ``(whole, parts, own, call)``: fill each part of ``whole``, a uint8 tensor, with the
            ``own`` of the rank it belongs to. ``parts`` is ``whole`` cut by rank.
        reduce_scatter: ``(whole, parts, call)``: sum every rank's ``whole``, a real floating-point
            tensor; this rank gets part ``group.rank`` of it in ``Started.parts``.
        all_reduce: ``(tensor, op, call)``: combine ``tensor`` over the ranks, in place, and return
            when that is done.
        exchange: ``(outgoing, incoming, call)``: send ``outgoing[r]`` to every other rank ``r`` and
            fill ``incoming[r]`` with what it sends; uint8, and an empty piece does not travel.
        keeps_parts: ``reduce_scatter`` returns what each rank adds, not their sum. Where a sum has
            an order (``deterministic=``), the others' parts are fetched with ``exchange`` instead.
        copies_own: ``gather`` puts ``own`` into its part, so that ``own`` may lie elsewhere.
        may_wait: the functions may wait for other ranks. On gloo the ranks then compare what they
            do before each call; where this is False, they compare while the data travels.
        offer: ``(data, group)``: make ``data``, the ``own`` of a gather or the ``whole`` of a
            reduction, readable for other ranks, and return integers that they get in
            ``Call.offers``. Called before ranks compare what they do, so that data that was
            compared is there to be read. None: nothing is offered.
        lend: ``(nbytes, group)``: memory in which gradients are packed, so that they are offered
            where they lie; it answers None where there is none.
        copy: ``(data, group)``: copy ``data``, the ``own`` of a gather, to where it can be offered
            again and again without another copy. What is returned is held as long as that is
            wanted, and gathers get its ``memory`` as their ``own``; None where there is no room.
        gather_all: ``(wholes, parts, owns, call)``: do what ``gather`` does for several buffers,
            those of a unit's buckets, at once; ``call`` is that of the first. None: each of them is
            a ``gather``, as on gloo, where ranks compare what they do before each.
        reduce_all: ``(wholes, parts, call)``: do what ``reduce_scatter`` does for several buffers,
            as ``gather_all``, and return a ``Started`` for each.
        room: ``(parts, group)``: memory for what other ranks add in a reduction, which gets it in
            ``Call.room``. Called before ranks compare what they do: a rank without memory has then
            promised nothing that others would wait for. None: the reduction takes none.
    """

    gather: Callable[[torch.Tensor, Sequence[torch.Tensor], torch.Tensor, Call], Started]
    reduce_scatter: Callable[[torch.Tensor, Sequence[torch.Tensor], Call], Started]
    all_reduce: Callable[[torch.Tensor, Op, Call], None]
    exchange: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Call], Started]
    keeps_parts: bool = False
    copies_own: bool = False
    may_wait: bool = True
    offer: Callable[[torch.Tensor, Group], Sequence[int]] | None = None
    lend: Callable[[int, Group], Any] | None = None
    copy: Callable[[torch.Tensor, Group], Any] | None = None
    gather_all: Callable[[Tensors, Sequence[Tensors], Tensors, Call], Started] | None = None
    reduce_all: Callable[[Tensors, Sequence[Tensors], Call], Sequence[Started]] | None = None
    room: Callable[[Sequence[torch.Tensor], Group], Sequence[torch.Tensor]] | None = None

    def __post_init__(self) -> None:
        for name, takes in _TAKEN.items():
            function = getattr(self, name)
            if function is not None or name in _NEEDED:
                check_function("Transport", name, function, takes)

    def __repr__(self) -> str:
        """Show the names of its functions, which ranks compare."""
        functions = [getattr(self, name) for name in _NEEDED]
        return f"Transport({', '.join(map(name_function, functions))})"


_NEEDED = ("gather", "reduce_scatter", "all_reduce", "exchange")
_TAKEN = {
    "gather": "(whole, parts, own, call)",
    "reduce_scatter": "(whole, parts, call)",
    "all_reduce": "(tensor, op, call)",
    "exchange": "(outgoing, incoming, call)",
    "offer": "(data, group)",
    "lend": "(nbytes, group)",
    "copy": "(data, group)",
    "gather_all": "(wholes, parts, owns, call)",
    "reduce_all": "(wholes, parts, call)",
    "room": "(parts, group)",
}
"""What the functions of a transport are called with."""


def is_alive(pg: Any) -> bool:
    """Whether the process group was not destroyed."""
    try:
        return dist.get_rank(pg) >= 0
    except ValueError:
        return False
