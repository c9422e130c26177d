"""Ranks that wait for each other in different groups, given different meshes, raise and say so.

Where a rank waits for more than a moment, it puts into the store of the process group in which
group it waits, and reads there where the ranks wait that it needs. Two ranks that each need the
other, in different groups, would wait until the timeout. Exchanges in time touch no store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch.distributed as dist

from fsdp_compose.base.group import Group
from fsdp_compose.base.process import here
from fsdp_compose.base.torch_private import default_store
from fsdp_compose.comm.heads import meet_to_call
from fsdp_compose.comm.messages import gather_objects, is_point_to_point, looking

LOOK_AFTER = 1.0
"""Seconds of waiting after which a rank says where it waits, and looks where the others do."""

_turns: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, int]] = weakref.WeakKeyDictionary()
"""How many exchanges over each group were completed, by its name; by the default group."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Place:
    """Where a rank waits, as the other ranks read it."""

    name: str  # of the group
    ranks: tuple[int, ...]
    turns: Mapping[str, int]  # exchanges that this rank completed

    @property
    def turn(self) -> int:
        return self.turns.get(self.name, 0)

    def needs(self, rank: int, other: _Place) -> bool:
        """Whether it waits for ``rank``, which waits in ``other`` and has not been here."""
        return rank in self.ranks and other.turns.get(self.name, 0) <= self.turn

    def __str__(self) -> str:
        return f"ranks {self.ranks} (group {self.name!r})"


def gather_objects_or_differ(value: Any, group: Group, what: str) -> list[Any]:
    """As ``gather_objects``, but ranks that wait for each other in two groups raise.

    Args:
        what: the function that every rank of ``group`` calls.

    Raises:
        ValueError: on every rank of both groups that waits, naming the groups.
    """
    if not is_point_to_point(group):
        return gather_objects(value, group, what)
    place = _place_of(group)
    with _watch_meetings(place, what):
        found = gather_objects(value, group, what)
    _turns_in(group)[place.name] = place.turn + 1
    return found


def meet_or_differ(what: str, groups: Iterable[Group]) -> None:
    """As ``meet_to_call``, but ranks that wait for each other in two groups raise.

    Raises:
        ValueError: on every rank of both groups that waits, naming the groups.
        RuntimeError: on every rank of a group in which some do something else.
    """
    for group in groups:
        if is_point_to_point(group):
            with _watch_meetings(_place_of(group), what):
                meet_to_call(what, (group,))


def _place_of(group: Group) -> _Place:
    assert group.pg is not None
    return _Place(group.pg.group_name, group.ranks, _turns_in(group))


def _turns_in(group: Group) -> dict[str, int]:
    pg = dist.group.WORLD or group.pg
    assert pg is not None
    return _turns.setdefault(pg, {})


@contextlib.contextmanager
def _watch_meetings(place: _Place, what: str) -> Iterator[None]:
    me, started, was_posted = dist.get_rank(), here.clock.now(), False

    def look() -> None:
        nonlocal was_posted
        if here.clock.now() - started < LOOK_AFTER:
            return
        store = default_store()
        if not was_posted:
            store.set(_key(me), json.dumps([place.name, place.ranks, place.turns]))
            was_posted = True
        if store.check([_note(place)]):
            raise ValueError(store.get(_note(place)).decode(errors="replace"))
        for rank in place.ranks:
            other = _read(store, rank) if rank != me else None
            if other is None or other.name == place.name:
                continue
            if place.needs(rank, other) and other.needs(me, place):
                problem = _problem(what, {me: place, rank: other})
                store.set(_note(place), problem)
                store.set(_note(other), problem)
                raise ValueError(problem)

    try:
        with looking(look):
            yield
    finally:
        if was_posted:
            with contextlib.suppress(RuntimeError, ValueError):  # the store may be gone
                default_store().set(_key(me), "")


def _problem(what: str, places: Mapping[int, _Place]) -> str:
    first, second = sorted(places)
    return (
        f"{what}: rank {first} was given a mesh or a group over {places[first]}, rank {second} one "
        f"over {places[second]}, and each waits for the other. Pass the same mesh on every rank, "
        "or slices of one DeviceMesh by the same name: mesh['dp'] on each."
    )


def _read(store: Any, rank: int) -> _Place | None:
    text = store.get(_key(rank)) if store.check([_key(rank)]) else b""
    if not text:
        return None
    name, ranks, turns = json.loads(text)
    return _Place(name, tuple(ranks), turns)


def _key(rank: int) -> str:
    return f"fsdp_compose/meets/{rank}"


def _note(place: _Place) -> str:
    """What a rank that raises leaves for the others that wait there."""
    return f"fsdp_compose/differ/{place.name}/{place.turn}"
