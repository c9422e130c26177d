"""Units that are gathered at fixed addresses take turns: one never overwrites another's weights.

Which buffer a unit has is decided when the first unit of its model is gathered, once all are known,
and again where ``refresh`` changed what units gather. A unit whose buffer another one is in is not
gathered ahead; where it must be gathered, a unit that was gathered ahead makes room for it, and any
other is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_compose.base.torch_private import graph_task_id
from fsdp_compose.base.weak_list import WeakList
from fsdp_compose.buckets.bucket import Bucket, Phase
from fsdp_compose.buckets.static import Place, PlaceLender, place_full
from fsdp_compose.core.autograd import EngineWork
from fsdp_compose.core.gathering import renew_bucket
from fsdp_compose.core.guards.units import list_nested
from fsdp_compose.core.schedule import Hold
from fsdp_compose.core.state import Engine, Unit
from fsdp_compose.layout.static_buffers import StaticUnit, offsets, place_gathered, place_packed


@dataclass(frozen=True)
class _Choice:
    """A unit's buffer, those that it packs gradients into, and what was known of its model."""

    place: Place | None
    lenders: list[Place]
    members: list[StaticUnit]


class StaticWork(EngineWork):
    """As ``EngineWork``, of a device on which some units have static buffers."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.choices: weakref.WeakKeyDictionary[Unit, _Choice] = weakref.WeakKeyDictionary()
        self.homes: weakref.WeakKeyDictionary[Unit, Place] = weakref.WeakKeyDictionary()

    def announce(self, unit: Unit, reason: Hold) -> None:
        """As ``EngineWork.announce``, after the unit's buffer was made free for it."""
        if is_static(unit):
            place = self._place_of(unit)
            if place is not None:
                self._make_room(unit, place, reason)
        for lender in _lenders(unit):
            self._place_of(lender)  # before a graph reads what it lends
        EngineWork.announce(unit, reason)

    def gather(self, unit: Unit) -> None:
        """As ``EngineWork.gather``; backward may read the unit's weights again."""
        EngineWork.gather(unit)
        for bucket in unit.gathered:
            if bucket.static is not None:
                bucket.static.allow_reads(bucket)

    def release(self, unit: Unit) -> None:
        """As ``EngineWork.release``; backward must not read what others overwrite."""
        try:
            EngineWork.release(unit)
        finally:
            for bucket in unit.gathered:
                if bucket.static is not None and bucket.phase is Phase.SHARDED:
                    bucket.static.refuse_reads(bucket)
                    if bucket.fill.exchange.is_open:  # messages may come where others have turns
                        for other in static_units_around(unit):
                            self.choices.pop(other, None)

    def has_room(self, unit: Unit) -> bool:
        """Whether nobody else is in the unit's buffer."""
        if not is_static(unit):
            return True
        place = self._place_of(unit)
        return place is None or _user_of(place, unit) is None

    def choose_again(self, unit: Unit) -> None:
        """Choose other buffers for the unit's model if its units gather other things by now."""
        choice, units = self.choices.get(unit), static_units_around(unit)
        if choice is not None and choice.members != describe_units(units):
            for other in units:
                self.choices.pop(other, None)

    def _make_room(self, unit: Unit, place: Place, reason: Hold) -> None:
        """Release a unit that was gathered ahead in ``place``; raise where another one is used."""
        other = _user_of(place, unit)
        if other is not None:
            if other.holds != {Hold.PREFETCH}:
                raise RuntimeError(_explain(unit, other, reason))
            self.engine.schedule.drop(other, Hold.PREFETCH)
        place.user = weakref.ref(unit)

    def _place_of(self, unit: Unit) -> Place | None:
        """The unit's buffer, into which its buckets are put; None where nothing is gathered.

        It is the former one as long as a graph reads the buckets there.
        """
        if unit not in self.choices:
            self._decide(unit)
        choice = self.choices[unit]
        for bucket in unit.buckets:
            if bucket.residence.moved or bucket.fill.is_superseded:
                renew_bucket(bucket)  # which may build it again, without a place
        is_new = self.homes.get(unit) is not choice.place
        if is_new or any(bucket.static is None for bucket in _list_gathering(unit)):
            self._put(unit, choice)
        return self.homes.get(unit, choice.place)

    def _decide(self, unit: Unit) -> None:
        """Choose buffers for all units of the model that ``unit`` is in."""
        units = static_units_around(unit)
        members = describe_units(units)
        gathered, packed = place_gathered(members), place_packed(members)
        places = [Place(nbytes) for nbytes in gathered.nbytes]
        lenders = [Place(nbytes) for nbytes in packed.nbytes]
        for member, own, first in zip(units, gathered.buffer, packed.buffer, strict=True):
            turn = max(first, 0)
            turns = lenders[turn:] + lenders[:turn]
            place = places[own] if own >= 0 else None
            choice = _Choice(place, turns, members)
            self.choices.setdefault(member, choice)  # some may have been used before

    def _put(self, unit: Unit, choice: _Choice) -> None:
        """Put the unit's buckets into its buffers; also those that were built again since."""
        readers = {unit, *(user for b in unit.buckets for user in b.users.borrowers)}
        if graph_task_id() != -1 or any(any(user.graphs.nodes) for user in readers):
            return  # a graph reads them where they are
        place = choice.place
        if place is None or any(b.phase is not Phase.SHARDED for b in unit.buckets):
            return
        starts = offsets([bucket.gathered_nbytes for bucket in unit.buckets])
        packs = offsets([_packed_nbytes(bucket) for bucket in unit.buckets])
        if starts[-1] > place.nbytes:  # it was converted to a wider dtype
            place.nbytes, place.memory = starts[-1], None
        streams = self.engine.streams
        for bucket, start, pack in zip(unit.buckets, starts, packs, strict=False):
            if bucket.gathered_nbytes:
                with streams.on(streams.gather):  # which alone writes there
                    place_full(bucket, place, start)
                bucket.static = PlaceLender(choice.lenders, pack)
        for user in readers:
            user.links.standing = None  # a graph over them sees that they were written
        self.homes[unit] = place


def is_static(unit: Unit) -> bool:
    """Whether the unit was sharded with ``static_buffers=``."""
    return bool(unit.options.static_buffers)


def use_static_buffers(engine: Engine) -> None:
    """Have the engine look after units with static buffers, too."""
    if not isinstance(engine.schedule.work, StaticWork):
        engine.schedule.work = StaticWork(engine)


def choose_buffers_again(units: Sequence[Unit]) -> None:
    """After ``refresh``: have units that read parameters of others share no buffer with them."""
    for unit in units:
        unit.graphs.nodes = WeakList()  # a backward over them is refused
    for unit in units:
        work = unit.engine.schedule.work
        if isinstance(work, StaticWork) and is_static(unit):
            work.choose_again(unit)


def static_units_around(unit: Unit) -> list[Unit]:
    """The units with static buffers of the model that ``unit`` is in, in order of registration."""
    inside = {u: _units_inside(u) for u in unit.engine.units if is_static(u)}
    found = [u for u, inner in inside.items() if unit in inner]
    root = max(found, key=lambda u: (len(inside[u]), u.name), default=unit)
    return [*inside[root], root]


def describe_units(units: Sequence[Unit]) -> list[StaticUnit]:
    """What decides which buffers the units have."""
    position = {unit: i for i, unit in enumerate(units)}
    return [
        StaticUnit(
            gathered=tuple([bucket.gathered_nbytes for bucket in unit.buckets]),
            packed=tuple(map(_packed_nbytes, unit.buckets)),
            inside=frozenset(position[u] for u in _units_inside(unit) if u in position),
            keeps=_stays(unit),
            is_shared=bool(unit.borrowed) or any(b.users.is_lent for b in unit.buckets),
            buffers=unit.options.buffers_in_turn,
        )
        for unit in units
    ]


def _stays(unit: Unit) -> bool | None:
    """Whether the unit stays gathered after backward, or as ``keep_after_forward`` says."""
    switches = unit.switches
    return switches.keep_after_forward if switches.reshard_after_backward else True


def _units_inside(unit: Unit) -> list[Unit]:
    """The units with static buffers inside the modules of ``unit``, in order of registration."""
    return [inner for inner in list_nested(unit) if inner is not unit and is_static(inner)]


def _lenders(unit: Unit) -> list[Unit]:
    """The other units with static buffers whose buckets the unit gathers."""
    owners = (bucket.users.unit for bucket in unit.gathered[len(unit.buckets) :])
    found = dict.fromkeys(owner for ref in owners if ref is not None and (owner := ref()))
    return [owner for owner in found if owner is not unit and is_static(owner)]


def _list_gathering(unit: Unit) -> list[Bucket]:
    """The unit's buckets that take memory while they are gathered."""
    return [bucket for bucket in unit.buckets if bucket.gathered_nbytes]


def _packed_nbytes(bucket: Bucket) -> int:
    """Bytes of the bucket's packed gradients, where ranks reduce them."""
    parts = 2 if bucket.stored.is_complex() else 1
    trained = any(entry.param.requires_grad for entry in bucket.entries)
    nbytes = bucket.layout.numel * parts * bucket.dtypes.reduce.itemsize
    return nbytes * (trained and bucket.mesh.gather_axis.size > 1)


def _user_of(place: Place, unit: Unit) -> Unit | None:
    """The unit that is gathered in ``place``, if it is not ``unit``."""
    user: Unit | None = None if place.user is None else place.user()
    return user if user is not None and user is not unit and user.holds else None


def _explain(unit: Unit, other: Unit, reason: Hold) -> str:
    """The error for two units that are needed at once and have one buffer."""
    held = ", ".join(sorted(hold.value for hold in other.holds))
    return (
        f"unit {unit.name!r} is to be gathered ({reason.value}) into a static buffer that unit "
        f"{other.name!r} is in ({held}). Units with static_buffers= take turns in "
        f"{unit.options.buffers_in_turn} buffers; pass more, as static_buffers=4, or "
        "static_buffers=False for what is gathered at the same time: several units in one "
        "checkpointed region, called by each other, or kept by a switch. For all weights at once "
        "use fsdp_compose.gathered(module), not unshard."
    )
