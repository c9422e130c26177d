"""What ranks compare of the state that each was given to load."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from fsdp_compose.base.group import Group
from fsdp_compose.buckets.entries import entry_of
from fsdp_compose.checkpoint.values import needs_gather, sample_bytes
from fsdp_compose.core.guards.divisors import held_by_fewer
from fsdp_compose.core.state import owner_of
from fsdp_compose.sharded import is_sharded


class GivenFacts(NamedTuple):
    """What must be the same on all ranks, or gathers in loading would hang, or weights be mixed.

    Each rank cuts its slices out of what it was given: two files would be stitched into one model.
    ``sampled`` is a checksum over some elements of each value that is to be cut.
    """

    keys: int
    gathers: int
    sampled: int

    def __str__(self) -> str:
        return (
            f"{self.keys} entries ({self.gathers} of them to gather), values of sharded "
            f"parameters with checksum {self.sampled:08x}"
        )


def facts_of(
    values: Mapping[str, Any], current: Mapping[str, Any]
) -> Callable[[Group], GivenFacts]:
    """What the ranks of a group compare of ``values``, which ``current`` takes.

    Parameters that fewer ranks hold, such as experts, have values of their own on other ranks, and
    are compared by the ranks that they are cut or copied over.
    """
    entries = {name: entry_of(leaf) for name, leaf in current.items() if is_sharded(leaf)}
    fewer = set(held_by_fewer(entry for entry in entries.values() if entry is not None))
    own = {
        name: {group.ranks for group in owner_of(entry).mesh.groups}
        for name, entry in entries.items()
        if entry in fewer
    }

    def over(group: Group) -> GivenFacts:
        compared = {n: v for n, v in values.items() if n not in own or group.ranks in own[n]}
        gathers = sum(needs_gather(v, spec_or_none(current[n])) for n, v in compared.items())
        return GivenFacts(len(compared), gathers, _sample(compared, current))

    return over


def spec_or_none(value: Any) -> Any:
    """Find how a value is cut; None where it is plain."""
    return value._shard_spec if is_sharded(value) else None


def _sample(values: Mapping[str, Any], current: Mapping[str, Any]) -> int:
    """A checksum over elements of the plain values that sharded parameters take."""
    found = 0
    for name in sorted(values):
        if is_sharded(current[name]) and type(values[name]) in (Tensor, nn.Parameter):
            found = zlib.crc32(sample_bytes(values[name]), found)
    return found
