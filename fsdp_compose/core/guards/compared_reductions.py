"""Ranks that reduce gradients in different ways raise: how it is done is part of what they compare.

Sums that each rank divides by a number of its own are wrong without a word, and a communication
hook may send what no other rank waits for.
"""

from __future__ import annotations

from fsdp_compose.buckets.bucket import Bucket
from fsdp_compose.core.guards.collective_log import code_of
from fsdp_compose.core.guards.rank_differences import REDUCE
from fsdp_compose.core.state import Unit


def note_reduction(unit: Unit, bucket: Bucket) -> None:
    """Record that the packed gradients of ``bucket`` are reduced next.

    Ranks that froze different parameters, divide by different numbers or have different hooks send
    different numbers, which raises.
    """
    log, number = unit.links.reduce_events[bucket]
    switches, how = unit.switches, "backward"
    if not switches.all_reduce:
        how += ", not over replicas"
    if switches.divide_factor not in (None, bucket.mesh.divisor):
        how += f", divided by {switches.divide_factor}"
    if switches.comm_hook is not None:
        how += f", by the hook {switches.hook_name}"
    trained = bucket.arriving.trained
    if how != "backward" or trained != bucket.views.every:
        number = code_of(number, how, trained)
    log.note((number, REDUCE, unit.name, how))
