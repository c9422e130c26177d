"""Fills a bucket's gathered buffer from the ranks' shards, and tells when these were written."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter

import torch

from fsdp_compose.base.codec import GatherCodec
from fsdp_compose.base.group import Group
from fsdp_compose.base.parts import cut_by_rank
from fsdp_compose.base.streams import Streams, copy_shard, may_compare
from fsdp_compose.base.torch_private import call_raw, read_version
from fsdp_compose.base.torch_stack import count_modes, refuse_fakes
from fsdp_compose.buckets.bucket import Bucket, DeviceCopy, Entry, Inner, SentCopy
from fsdp_compose.buckets.issue import issue
from fsdp_compose.comm import collectives as comm
from fsdp_compose.comm import waiting
from fsdp_compose.comm.codecs import encode_parts
from fsdp_compose.comm.heads import meet_alone


def versions_of(bucket: Bucket) -> tuple[int, ...]:
    """How often the shard, then each of its parameters, was written in a way autograd can see."""
    version = bucket.history.earlier + bucket.stored._version
    return (version, *call_raw(tuple, (), (map(read_version, bucket.views.params),)))


def count_writes(buckets: Sequence[Bucket]) -> int:
    """How often their shards and parameters were written, together, as ``versions_of`` has it."""
    params = chain.from_iterable(map(attrgetter("views.params"), buckets))
    tensors = chain(map(attrgetter("stored"), buckets), params)
    earlier = sum(map(attrgetter("history.earlier"), buckets))
    return earlier + call_raw(sum, (), (map(read_version, tensors),))


def stamp_of(bucket: Bucket) -> object:
    """Changes whenever a parameter of the bucket is written, in whatever way autograd can see.

    A parameter whose ``.data`` was handed out can be written unseen, so its stamp never repeats.
    """
    if bucket.in_place:
        return None
    if bucket.residence.written:
        return object()
    return versions_of(bucket)


def channels_of(bucket: Bucket) -> list[Group]:
    """The groups that the bucket is gathered and reduced over, smaller ones inside others first."""
    mesh, inner = bucket.mesh, bucket.inner
    groups = [None if inner is None else inner.group, mesh.gather_axis, mesh.replicate_axis]
    groups.append(None if inner is None else inner.source)
    return [group for group in groups if group is not None and group.pg is not None]


def gather_purpose(bucket: Bucket) -> str:
    """What gathering the bucket is for, as errors say it."""
    return f"gather unit {bucket.entries[0].spec.unit!r}"


def start_fills(buckets: Sequence[Bucket]) -> None:
    """Allocate each ``full`` and start filling it from every rank's shard.

    Gathers that no messages between pairs of ranks go ahead of are started together.
    """
    if count_modes():
        refuse_fakes(gather_purpose(buckets[0]))
    plans: list[comm.GatherPlan] | None = [] if len(buckets) > 1 else None
    for bucket in buckets:
        storage, views = bucket.full.untyped_storage(), bucket.views
        if storage.nbytes() == 0:
            storage.resize_(views.nbytes)
        plan = views.plan
        if plan is None:
            plan = _begin_fill(bucket)
            if plan is None:
                continue
        elif plan.own is not views.shard_bytes:
            copy_shard(views.own, _resident_shard(bucket))
        if plans is None:
            bucket.fill.exchange = plan.start()
        else:
            bucket.fill.exchange = plan.exchange
            plans.append(plan)
    if plans:
        comm.start_gathers(plans)


def start_fills_on(streams: Streams, buckets: Sequence[Bucket]) -> None:
    """As ``start_fills``, on the gather stream, with one mark in it behind all of them."""
    first = buckets[0]

    def work() -> None:
        for bucket in buckets[1:]:  # issue names the first
            bucket.log("gather", bucket.views.nbytes)
        start_fills(buckets)
        mark = streams.record(streams.gather)
        for bucket in buckets:
            bucket.fill.mark = mark

    issue(streams, streams.gather, "gather", first, first.views.nbytes, work)
    for bucket in buckets if first.fill.mark is not None else ():
        waiting.watch_mark(gather_purpose(bucket), bucket.mesh.shard.ranks, bucket.fill.mark)


def _begin_fill(bucket: Bucket) -> comm.GatherPlan | None:
    """Start filling ``full`` between pairs of ranks, or return a gather that is to be started."""
    views, inner, group = bucket.views, bucket.inner, bucket.mesh.shard
    purpose, caller, codec = gather_purpose(bucket), bucket.users.caller, bucket.mp.gather_codec
    whole, parts, own, decode = views.whole_bytes, views.part_bytes, views.shard_bytes, None
    sent = _find_sent_copy(bucket)
    if inner is not None and _is_stored(bucket, inner):
        assert inner.store is not None
        group, parts, own = inner.group, inner.parts, None
        inner.own.copy_(inner.store)
    elif codec is not None and group.pg and views.nbytes:
        shard = _resident_shard(bucket).to(bucket.full.device, non_blocking=True)
        into = cut_by_rank(bucket.full, group.size)
        whole, parts, decode = encode_parts(shard, into, codec, group)
        own = None
    elif sent is not None:
        own = sent.lease.memory
        if not (_is_repeated(bucket) or views.params[0].requires_grad):
            views.sent = None  # no reduction will tell that it was sent for the last time
    elif own is None or not comm.transport_of(group).copies_own or not group.pg:
        own = None
        copy_shard(views.own, _resident_shard(bucket))
    if own is None:
        own = parts[group.rank] if parts else whole
    if sent is None and inner is None and codec is None and _is_repeated(bucket):
        own = _keep_sent_copy(bucket, own, group)
    if comm.is_point_to_point(group):
        bucket.fill.exchange = comm.BEGUN_BY_HALF  # if the next line raises
        gather = comm.gather_parts(whole, parts, own, group, purpose, caller, decode)
        bucket.fill.exchange = gather
        return None
    plan = comm.plan_gather(whole, parts, own, group, purpose, decode)
    if inner is None and decode is None and views.sent is None:  # what is sent is of now alone
        views.plan = plan
    return plan


def _find_sent_copy(bucket: Bucket) -> SentCopy | None:
    """What an earlier gather of the same weights sent, if it is still where other ranks read it."""
    sent = bucket.views.sent
    if sent is not None and (_is_written_unseen(bucket) or sent.versions != bucket.fill.versions):
        sent = bucket.views.sent = None
    return sent


def _keep_sent_copy(bucket: Bucket, own: torch.Tensor, group: Group) -> torch.Tensor:
    """What a gather sends in place of ``own``: a copy that later gathers can send again."""
    copy = comm.transport_of(group).copy
    if copy is None or not own.numel() or _is_written_unseen(bucket):
        return own
    lease = copy(own, group)
    if lease is None:
        return own
    bucket.views.sent = SentCopy(lease, bucket.fill.versions)
    memory: torch.Tensor = lease.memory
    return memory


def _is_repeated(bucket: Bucket) -> bool:
    """Whether the microbatches that follow gather the same weights again."""
    unit = None if bucket.users.unit is None else bucket.users.unit()
    if unit is None or unit.switches.sync:
        return False
    stays = unit.switches.keep_over_microbatches or not unit.switches.reshard_after_backward
    return not stays


def _is_written_unseen(bucket: Bucket) -> bool:
    """Whether the shard may be written in a way that its versions do not show."""
    return bucket.residence.written > 0 or bucket.residence.is_shared


def _is_stored(bucket: Bucket, inner: Inner) -> bool:
    """Whether a gather reads ``inner.store``; fills it over the replicas where it is outdated."""
    if inner.store is None:
        return False
    if inner.source is None:
        return inner.stamp == stamp_of(bucket)
    if is_outdated(bucket):
        stamp = stamp_of(bucket)
        parts = cut_by_rank(inner.store.view(torch.uint8), inner.source.size)
        own = cut_by_rank(inner.store, inner.source.size)[inner.source.rank]
        own.copy_(bucket.stored, non_blocking=True)
        purpose = f"{gather_purpose(bucket)} over the replicas"
        part = parts[inner.source.rank]
        whole = inner.store.view(torch.uint8)
        comm.gather_parts(whole, parts, part, inner.source, purpose, bucket.users.caller).wait()
        inner.stamp = stamp
        return True
    entry = _find_unseen(bucket, cut_by_rank(inner.store, inner.source.size)[inner.source.rank])
    if entry is not None:
        raise RuntimeError(
            f"parameter {entry.spec.fqn!r} of unit {entry.spec.unit!r} was written through memory "
            "that p.to_local(), local_parameters or flat_parameters gave out, in a way that "
            "autograd does not count (.data, NumPy), so replicas keep copies of its old value. "
            "Write under torch.no_grad() without .data."
        )
    return True


def _find_unseen(bucket: Bucket, copy: torch.Tensor) -> Entry | None:
    """Find an entry that was written since the shard was copied, as its versions may not show.

    On an accelerator this waits for the device, so it is done only in debug mode.
    """
    if not bucket.residence.is_shared or not may_compare(copy.device):
        return None
    return find_other(bucket, copy, bucket.stored)


def find_other(bucket: Bucket, copy: torch.Tensor, shard: torch.Tensor) -> Entry | None:
    """Find an entry whose values in a copy of the bucket's shard are others than in ``shard``."""
    wanted = shard.to(copy.device, copy.dtype)
    if not copy.numel() or _are_same(copy, wanted):
        return None
    mine, theirs = copy.split(bucket.views.splits), wanted.split(bucket.views.splits)
    for entry, piece in zip(bucket.entries, bucket.views.pieces, strict=True):
        if not _are_same(mine[piece], theirs[piece]):
            return entry
    return None


def _are_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit: NaN counts as equal to itself."""
    return not a.numel() or torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def is_outdated(bucket: Bucket) -> bool:
    """Whether a gather over the replicas comes first, since the optimizer wrote their shards."""
    inner = bucket.inner
    return inner is not None and inner.source is not None and inner.stamp != stamp_of(bucket)


def _resident_shard(bucket: Bucket) -> torch.Tensor:
    """What a gather reads: the shard, or the copy on the device of an offloaded one."""
    if not bucket.offload.optimizer or bucket.offload.params:
        return bucket.stored
    stamp = stamp_of(bucket)
    if bucket.device_copy is None:
        with torch.inference_mode(False):  # it outlives the inference that needs it first
            bucket.device_copy = DeviceCopy(torch.empty_like(bucket.views.own))
    copy = bucket.device_copy
    if copy.stamp != stamp or _find_unseen(bucket, copy.tensor) is not None:
        copy_shard(copy.tensor, bucket.stored)
        copy.stamp = stamp
    return copy.tensor


def keep_part(bucket: Bucket) -> None:
    """Keep a part of what was gathered, so that backward gathers over fewer ranks."""
    assert bucket.inner is not None
    bucket.inner.store = bucket.inner.own.clone()
    # Not what the shard is now: the forward may have written it since it gathered.
    bucket.inner.stamp = object() if bucket.residence.written else bucket.fill.versions


def gather_flat(
    bucket: Bucket,
    shard: torch.Tensor,
    dtype: torch.dtype,
    call: str,
    codec: GatherCodec | None = None,
) -> torch.Tensor:
    """A new buffer with the ``shard`` of every rank, in ``dtype``.

    Args:
        call: what every rank calls that needs it; "" in a step, where the unit was noted.
        codec: what encodes the shards on their way.

    Raises:
        RuntimeError: on every rank, where one does something else; on gloo.
    """
    group = bucket.mesh.shard
    full = shard.new_empty(bucket.layout.numel, dtype=dtype)
    if full.numel():
        whole, decode = full.view(torch.uint8), None
        full.view(group.size, -1)[group.rank].copy_(shard)
        parts = cut_by_rank(whole, group.size)
        if codec is not None and group.pg:
            into = cut_by_rank(full, group.size)
            whole, parts, decode = encode_parts(shard, into, codec, group)
        part, purpose, caller = parts[group.rank], gather_purpose(bucket), bucket.users.caller
        if call:
            purpose, caller = f"{purpose} for {call}", None
            meet_alone(group, purpose)
        comm.gather_parts(whole, parts, part, group, purpose, caller, decode).wait()
    return full
