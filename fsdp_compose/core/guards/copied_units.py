"""A deep copy of a unit has buckets of its own, so that it does not drive the original's."""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace
from typing import Any, TypeVar

from fsdp_compose.base.unwritten import UnwrittenMark
from fsdp_compose.buckets.bucket import Entry, Slot
from fsdp_compose.buckets.copies import copy_bucket, copy_slot
from fsdp_compose.comm.grad_bucket import has_state
from fsdp_compose.core.records import Switches

AnyUnit = TypeVar("AnyUnit", bound=Any)


def copy_unit(unit: AnyUnit, memo: dict[int, Any]) -> AnyUnit:
    """An independent unit over the copies that ``memo`` has or makes of the modules."""
    modules = [copy.deepcopy(ref(), memo) for ref in unit.modules]
    if id(unit) in memo:  # one of them is copied with the unit that it is in, which is this one
        return memo[id(unit)]
    unit.checks.copies += 1
    buckets = [copy_bucket(bucket, memo) for bucket in unit.buckets]
    copied: dict[int, Entry] = memo.setdefault(id(Entry), {})
    for old, new in zip(unit.buckets, buckets, strict=True):
        copied.update(zip(map(id, old.entries), new.entries, strict=True))
    twin = type(unit)(
        name=unit.name,
        modules=tuple(weakref.ref(module) for module in modules if module is not None),
        buckets=buckets,
        borrowed=[copied.get(id(entry), entry) for entry in unit.borrowed],
        engine=unit.engine,
        mp=unit.mp,
        prefetch=unit.prefetch,
        switches=_copy_switches(unit.switches, memo),
        number=unit.number and (*unit.number, "copy", unit.checks.copies),
        slots={copy_slot(s, memo): i for s, i in unit.slots.items() if s.module() is not None},
        options=unit.options,
    )
    twin.checks.groupless = unit.checks.groupless
    for name, slot, _ in unit.checks.unready_buffers:
        place = copy_slot(slot, memo)
        twin.checks.unready_buffers.append(
            (name, place, UnwrittenMark(place.values.get(place.name)))
        )
    for ref in unit.checks.left_alone.values():
        ignored = memo.get(id(ref()))
        if ignored is not None:
            twin.checks.left_alone[id(ignored)] = weakref.ref(ignored)
    waiting: list[Any] = memo.setdefault(id(type(unit)), [])
    if twin.borrowed:
        waiting.append(twin)
    for other in waiting:  # copied before the unit that it borrows from
        if any(id(entry) in copied for entry in other.borrowed):
            other.borrowed = [copied.get(id(entry), entry) for entry in other.borrowed]
            other.link()
    _place_slices(unit, copied, memo)
    return twin


def _place_slices(unit: Any, copied: dict[int, Entry], memo: dict[int, Any]) -> None:
    """Have copied modules read the copied slices of what a scope shows the original's in full."""
    waiting: list[tuple[Slot, int]] = memo.setdefault(id(_place_slices), [])
    for slot, index in unit.slots.items():
        entry = unit.entries[index]
        is_there = slot.module() is not None and slot.values.get(slot.name) is entry.held
        if entry.layers and is_there:
            waiting.append((copy_slot(slot, memo), id(entry)))
    for slot, key in waiting:
        if key in copied:  # else of a unit that is not copied yet
            slot.values[slot.name] = copied[key].param


def _copy_switches(switches: Switches, memo: dict[int, Any]) -> Switches:
    """What the user switched; a hook's state that checkpoints keep is of the copy's gradients."""
    state = switches.comm_state
    own = copy.deepcopy(state, memo) if has_state(state) else state
    return replace(switches, comm_state=own)
