"""Units are released after a failure, also where Ctrl-C came between two lines of a release."""

from __future__ import annotations

from collections import Counter

from fsdp_compose.buckets.bucket import Bucket, Phase
from fsdp_compose.core.gathering import release
from fsdp_compose.core.state import Engine, Unit


def release_all(engine: Engine) -> list[Unit]:
    """Release every unit that the user does not hold, whatever was counted; return all units.

    A unit that nobody holds and that stayed gathered would be so for ever, on this rank alone.
    """
    units = list(engine.units)
    engine.schedule.fail(units)
    held: Counter[Bucket] = Counter(b for unit in units if unit.holds for b in unit.gathered)
    for unit in units:
        is_left = any(b.users.holders != held[b] for b in unit.gathered)
        is_left |= any(not held[b] and b.phase is not Phase.SHARDED for b in unit.gathered)
        if is_left:
            for bucket in unit.gathered:
                bucket.users.holders = held[bucket] + 1
            release(unit)
    return units
