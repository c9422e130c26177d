"""Ranks compare to which gradients a backward adds, because an earlier one left them there.

Where one rank alone has cleared its gradients, it has those of one backward and the others have the
sums of two. A rank may clear what it holds elements of and leave the rest, which is empty there, so
an empty gradient that is added to says nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from fsdp_compose.buckets.bucket import Entry
from fsdp_compose.core.guards.compared_steps import Settings
from fsdp_compose.core.guards.rank_differences import ADDED
from fsdp_compose.core.state import owner_of


def note_added(entries: Sequence[Entry], were_there: Sequence[bool]) -> None:
    """Note which of the entries' gradients were there before a backward set or added to them.

    A unit that reentrant checkpoints call several times is reduced as often in one backward, which
    adds to what it has set itself: how often it added is what ranks have in common.
    """
    bucket = owner_of(entries[0]) if any(were_there) else None
    log: Any = None if bucket is None else bucket.users.caller
    if bucket is None or log is None:
        return
    before: Settings | None = log.steps.added.get(id(bucket))
    known = {} if before is None else before.by_parameter() or {}
    texts = dict(known)
    for entry, is_there in zip(entries, were_there, strict=True):
        spec = entry.spec
        place, is_empty = (spec.unit, spec.fqn), spec.start == spec.stop
        count = int(known.get(place, {}).get(ADDED) or 0) + is_there
        texts[place] = {ADDED: "" if is_there and is_empty else str(count)}
    added = sorted(e.spec.fqn for e, is_there in zip(entries, were_there, strict=True) if is_there)
    number = zlib.crc32(f"{bucket.entries[0].spec.unit} {added}".encode())
    number += 0 if before is None else before.number
    log.steps.added[id(bucket)] = Settings(number, lambda: texts)
