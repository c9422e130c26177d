"""Ranks compare to which gradients a backward adds, those of an earlier one that nobody cleared.

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
    """Note which of the entries' gradients were there before a backward set or added to them."""
    bucket = owner_of(entries[0]) if any(were_there) else None
    log: Any = None if bucket is None else bucket.users.caller
    if bucket is None or log is None:
        return
    texts = {
        (e.spec.unit, e.spec.fqn): "added to" * (e.spec.stop > e.spec.start) if is_there else "set"
        for e, is_there in zip(entries, were_there, strict=True)
    }
    added = sorted(name for (_, name), text in texts.items() if text != "set")
    number = zlib.crc32(f"{bucket.entries[0].spec.unit} {added}".encode())
    settings = Settings(number, lambda: {place: {ADDED: text} for place, text in texts.items()})
    log.steps.settings[id(bucket)] = settings
