"""Gathers and releases units, and sets what their modules read as their parameters.

A unit stays gathered while it has a reason to (``Hold``), a bucket while some unit holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from logging import DEBUG
from operator import setitem

import torch
import torch.distributed as dist

from fsdp_compose.base.launched import refuse_late_group
from fsdp_compose.base.loops import exhaust
from fsdp_compose.base.torch_private import graph_task_id
from fsdp_compose.buckets.bucket import GATHERED, GATHERING, SHARDED, Bucket, Fill, logger
from fsdp_compose.buckets.gather import (
    is_outdated,
    keep_part,
    stamp_of,
    start_fills,
    start_fills_on,
    versions_of,
)
from fsdp_compose.buckets.issue import is_unseen
from fsdp_compose.core.guards.collective_log import Log
from fsdp_compose.core.guards.inner_gradients import carry_gradients
from fsdp_compose.core.guards.left_memory import leave_full
from fsdp_compose.core.guards.moved_parameters import (
    copy_moved_parameters,
    moved_before_backward,
    require_written,
)
from fsdp_compose.core.guards.recurrent_weights import show_recurrent
from fsdp_compose.core.guards.scope_parameters import renew
from fsdp_compose.core.guards.weight_versions import check_lent, is_outrun
from fsdp_compose.core.schedule import Hold
from fsdp_compose.core.state import Engine, Unit, unit_of, units_with


def announce(unit: Unit, reason: Hold) -> None:
    """Tell the other ranks what is about to be gathered; raises before anything is changed."""
    for bucket, events, code in unit.links.gather_events:
        if bucket.phase is SHARDED:
            _note(events, bucket, code, unit.name, reason._value_)


def gather(unit: Unit) -> None:
    """Start gathering the unit's buckets that are released."""
    released: list[Bucket] = []
    for bucket in unit.gathered:
        if bucket.residence.moved or bucket.fill.is_superseded:
            renew_bucket(bucket)
        if bucket.phase is SHARDED:
            released.append(bucket)
    if released:
        _start_gather(unit.engine, released)


def release(unit: Unit) -> None:
    """Free the unit's buckets that no other unit holds.

    Raises:
        RuntimeError: one was still being gathered, and ranks differ; all are free nevertheless.
    """
    failure: BaseException | None = None
    for bucket in unit.gathered:
        if bucket.users.is_lent and any(user.holds for user in units_with(bucket)):
            continue
        try:
            _release(unit.engine, bucket)
        except BaseException as error:  # such as Ctrl-C in a wait, which is over then
            failure = error
            _release(unit.engine, bucket)
    if failure is not None:
        raise failure


def _note(events: Log, bucket: Bucket, code: int, unit: str, purpose: str) -> None:
    """Have ranks compare a gather that is about to start."""
    is_wide = bucket.inner is not None and is_outdated(bucket)
    over = ", over the replicas too" if is_wide else ""
    events.note((code ^ is_wide, "gather", unit, purpose + over))


def take_over_changes(unit: Unit) -> None:
    """Before forward: copy moved parameters back into the buckets' flat shards."""
    if unit.checks.groupless and dist.is_initialized():
        refuse_late_group(unit.name)
    waiting: Sequence[object] = unit.checks.unready_buffers
    for bucket in unit.gathered:
        if bucket.residence.moved or bucket.fill.is_superseded:
            renew_bucket(bucket)
        waiting = waiting or bucket.history.unready
    if waiting:
        require_written(unit)


def renew_bucket(bucket: Bucket) -> None:
    """Copy moved parameters into the bucket's flat shard; gather again what was gathered."""
    if graph_task_id() != -1:
        if bucket.residence.moved and unit_of(bucket).holds != {Hold.PREFETCH}:  # ahead: unread
            raise RuntimeError(moved_before_backward(bucket))
        return
    was_gathered = bucket.phase is not SHARDED
    _release(unit_of(bucket).engine, bucket)
    if bucket.residence.moved:
        copy_moved_parameters(bucket)
    if was_gathered:
        _gather_again(unit_of(bucket), [bucket], "again, since it was moved")


def _gather_again(unit: Unit, buckets: list[Bucket], why: str) -> None:
    """Gather held buckets again; one that was kept for a later pass stays kept."""
    for bucket, events, code in unit.links.gather_events if buckets else ():
        if bucket in buckets:
            _note(events, bucket, code, unit.name, why)
    if buckets:
        wait_gathered(unit)
        kept = [bucket for bucket in buckets if bucket.fill.stamp is not None]
        _start_gather(unit.engine, buckets)
        for bucket in kept:
            bucket.fill.stamp = stamp_of(bucket)
        renew(unit.entries)


def wait_gathered(unit: Unit) -> None:
    """Make the unit's full parameters readable on the current stream."""
    passed = None
    for bucket in unit.gathered:
        if bucket.phase is GATHERING:
            fill = bucket.fill
            fill.exchange.wait()
            bucket.move_to(GATHERED)
            if fill.mark is not None:
                if fill.mark is not passed:  # behind it the compute stream may read
                    unit.engine.streams.wait(fill.mark)
                passed, fill.mark = fill.mark, None


def note_kept(unit: Unit) -> None:
    """Record what was gathered: a later pass must not read weights from before a write."""
    for bucket in unit.gathered:
        # Not what the shard is now: another unit may have kept it since before a write.
        bucket.fill.stamp = object() if bucket.residence.written else bucket.fill.versions


_AHEAD = frozenset((Hold.PREFETCH,))


def reread(unit: Unit, in_backward: bool) -> None:
    """Gather again what was written since it was gathered, as far as a pass would see it."""
    is_unread, is_kept = unit.holds <= _AHEAD, False
    for bucket in unit.gathered:
        fill, residence = bucket.fill, bucket.residence
        if in_backward:
            if residence.is_shared or fill.handed_out != residence.written:
                return refresh_handed_out(unit)
        elif fill.stamp is not None:
            is_kept = True
        elif is_unread and bucket.phase is not SHARDED and is_outrun(bucket):
            _gather_again(unit, [bucket], "again, since it was changed")
    return refresh_stale(unit) if is_kept else None


def refresh_stale(unit: Unit) -> None:
    """Gather again the buckets whose shards changed while they were kept."""
    kept = [b for b in unit.gathered if b.phase is not SHARDED and b.fill.stamp is not None]
    stale = [bucket for bucket in kept if bucket.fill.stamp != stamp_of(bucket)]
    for bucket in kept:
        if bucket.residence.is_shared and bucket not in stale:
            wait_gathered(unit)  # it may have been gathered ahead
            check_lent(unit, bucket)
    _gather_again(unit, stale, "again, since it was changed")


def refresh_handed_out(unit: Unit) -> None:
    """Gather again where ``p.data`` was read after forward: a plain backward sees its writes."""
    wait_gathered(unit)
    for bucket in unit.gathered:
        if bucket.fill.handed_out != bucket.residence.written and bucket.phase is GATHERED:
            _gather_again(unit, [bucket], "again, since p.data was handed out")
        elif bucket.residence.is_shared:
            check_lent(unit, bucket)


def _start_gather(engine: Engine, buckets: Sequence[Bucket]) -> None:
    """Start gathering buckets of a unit on the gather stream, together where that is one call."""
    filled: list[Bucket] = []
    try:
        for bucket in buckets:
            bucket.move_to(GATHERING)
            if not bucket.in_place:
                bucket.fill = Fill(versions_of(bucket), bucket.residence.written)
                filled.append(bucket)
        if filled and is_unseen(engine.streams.gather):
            start_fills(filled)
        elif filled:
            start_fills_on(engine.streams, filled)
            if any(bucket.offload.shards for bucket in filled):
                engine.host_reads = filled[0].fill.mark
    except BaseException:  # such as no memory: the next use gathers them
        for bucket in [*buckets, *buckets]:
            with suppress(BaseException):  # of a gather that was started and lost, the first time
                _release(engine, bucket)
        raise


def spread_inner(unit: Unit) -> None:
    """Keep a part of what was gathered, so that backward gathers over fewer ranks."""
    for bucket in unit.buckets:
        if bucket.inner and bucket.spread is not None and bucket.phase is GATHERED:
            keep_part(bucket)


def forget_inner(unit: Unit) -> None:
    """Free what ``spread_inner`` kept, as the unit is gathered, or no backward is to come."""
    for bucket in unit.buckets:
        if bucket.inner is not None and bucket.spread is not None:
            bucket.inner.store = None


def _release(engine: Engine, bucket: Bucket) -> None:
    if bucket.phase is SHARDED:
        return
    streams, is_unread = engine.streams, bucket.phase is GATHERING
    if is_unread:
        bucket.fill.drop()
    bucket.move_to(SHARDED)
    if bucket.in_place:
        return
    if logger.isEnabledFor(DEBUG):
        bucket.log("release", bucket.views.nbytes)
    if streams.gather is None:
        if bucket.static is None:
            storage = bucket.full.untyped_storage()
            if storage.resizable() and not bucket.fill.exchange.is_open:
                storage.resize_(0)
            else:  # others still use it
                leave_full(engine, bucket)
    else:
        # Freed on the stream that allocated it, behind what read it: only later gathers reuse it.
        with streams.beside(streams.gather) if is_unread else streams.on(streams.gather):
            if bucket.static is None:
                bucket.full.untyped_storage().resize_(0)


def install(unit: Unit, tensors: Sequence[torch.Tensor]) -> None:
    run, links = unit.run, unit.links
    run.showing = run.showing if tensors is links.leaves else tensors  # until leaves are there
    placed = tensors if links.indices is None else map(tensors.__getitem__, links.indices)
    exhaust(map(setitem, links.tables, links.names, placed))
    if links.recurrent != []:  # None: not looked for yet
        show_recurrent(unit, tensors)


def install_leaves(unit: Unit) -> None:
    if unit.run.stand_ins:
        carry_gradients(unit)
    links = unit.links
    install(unit, links.leaves if unit.opened is None else unit.opened.tensors)
    unit.run.showing = None
    for ref in links.sharers:
        other = ref()
        if other is not None and other.run.showing is not None:
            install(other, other.run.showing)  # this unit shares a module, and its pass goes on
