"""Finds which parameters any rank used: one that no rank used keeps ``grad is None``.

A rank that did not use a parameter has to know whether another rank did. On gloo the ranks' answers
travel ahead of the gradients (``comm.Flags``). On an accelerator the host must not wait, so there a
rank assumes what the ranks found when they last compared it, in their first step. That is right as
long as each rank uses what it used then, and where all ranks use the same, which a rank that uses
something else waits to learn when its step ends. Else the ranks compare their assumptions at the
end of the next step, and raise where one was wrong.
"""

from __future__ import annotations

from fsdp_compose.base.group import Group
from fsdp_compose.base.streams import is_capturing
from fsdp_compose.buckets.bucket import Bucket
from fsdp_compose.comm import collectives as comm
from fsdp_compose.comm.collectives import Flags
from fsdp_compose.core.guards.collective_log import Log
from fsdp_compose.core.state import unit_of


def unite_early(bucket: Bucket, used: Flags) -> None:
    """Find before a reduction which entries any rank used, where its messages do not carry that."""
    log, switches = bucket.users.caller, unit_of(bucket).switches
    if not isinstance(log, Log):
        return
    mesh, hooked = bucket.mesh, switches.comm_hook is not None
    groups = [mesh.gather_axis, mesh.replicate_axis] if switches.all_reduce else [mesh.gather_axis]
    alone = [g for g in groups if g.pg is not None and (hooked or not comm.is_point_to_point(g))]
    if alone:
        _unite(log, bucket, used, alone)


def unite_used(bucket: Bucket, used: Flags) -> None:
    """Find which entries any rank used, for gradients that are reduced at once."""
    log, mesh = bucket.users.caller, bucket.mesh
    if isinstance(log, Log):
        axes = (mesh.gather_axis, mesh.replicate_axis)
        _unite(log, bucket, used, [group for group in axes if group.pg is not None])


def _unite(log: Log, bucket: Bucket, used: Flags, groups: list[Group]) -> None:
    """Ask the ranks of ``groups``, or assume what is known of them."""
    device, here = bucket.mesh.device, used.bits
    if is_known_at_once(bucket, groups):
        for group in groups:
            comm.unite(used, group, device, log)
    elif (log.is_stepwise or unit_of(bucket).switches.find_unused) and not is_capturing():
        for group in log.groups:
            comm.unite(used, group, device, log)
        bucket.history.agreed = here, used.bits
    else:
        log.guess_used(bucket, used)


def is_known_at_once(bucket: Bucket, groups: list[Group]) -> bool:
    """Whether ranks of ``groups`` can be asked without stalling an accelerator."""
    return bucket.mesh.device.type == "cpu" or all(map(comm.is_point_to_point, groups))
