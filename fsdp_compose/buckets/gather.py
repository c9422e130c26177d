"""Fills a bucket's gathered buffer from the ranks' shards, and tells when these were written."""

from __future__ import annotations

import torch

from fsdp_compose.base.group import Group
from fsdp_compose.base.parts import cut_by_rank
from fsdp_compose.base.streams import copy_shard
from fsdp_compose.base.torch_private import raw, read_version
from fsdp_compose.buckets.bucket import Bucket, DeviceCopy, Inner
from fsdp_compose.comm import collectives as comm


def versions_of(bucket: Bucket) -> tuple[int, ...]:
    """How often the shard, then each of its parameters, was written in a way autograd can see."""
    with raw():
        version = bucket.history.earlier + bucket.stored._version
        return (version, *map(read_version, bucket.views.params))


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


def purpose_of(bucket: Bucket) -> str:
    """What gathering the bucket is for, as errors say it."""
    return f"gather unit {bucket.entries[0].spec.unit!r}"


def start_fill(bucket: Bucket) -> comm.Exchange:
    """Allocate ``full`` and start filling it from every rank's shard."""
    storage, views = bucket.full.untyped_storage(), bucket.views
    if storage.nbytes() == 0:
        storage.resize_(views.nbytes)
    if views.plan is not None:
        if views.plan.own is not views.shard_bytes:
            copy_shard(views.own, _resident_shard(bucket))
        return views.plan.start()
    group, parts, inner = bucket.mesh.shard, views.part_bytes, bucket.inner
    purpose, caller, codec = purpose_of(bucket), bucket.users.caller, bucket.mp.gather_codec
    whole, own = views.whole_bytes, views.shard_bytes
    if inner is not None and _is_stored(bucket, inner):
        assert inner.store is not None
        group, parts, own = inner.group, inner.parts, None
        inner.own.copy_(inner.store)
    elif codec is not None and group.pg and storage.nbytes():
        shard = _resident_shard(bucket).to(bucket.full.device, non_blocking=True)
        into = cut_by_rank(bucket.full, group.size)
        return comm.gather_encoded(shard, into, codec, group, purpose, caller)
    elif own is None or not comm.transport_of(group).copies_own or not group.pg:
        own = None
        copy_shard(views.own, _resident_shard(bucket))
    if own is None:
        own = parts[group.rank] if parts else whole
    if inner is None and not comm.is_point_to_point(group):
        views.plan = comm.plan_gather(whole, parts, own, group, purpose)
        return views.plan.start()
    return comm.gather_parts(whole, parts, own, group, purpose, caller)


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
        purpose = f"{purpose_of(bucket)} over the replicas"
        part = parts[inner.source.rank]
        whole = inner.store.view(torch.uint8)
        comm.gather_parts(whole, parts, part, inner.source, purpose, bucket.users.caller).wait()
        inner.stamp = stamp
    return True


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
    if copy.stamp != stamp:
        copy_shard(copy.tensor, bucket.stored)
        copy.stamp = stamp
    return copy.tensor


def keep_part(bucket: Bucket) -> None:
    """Keep a part of what was gathered, so that backward gathers over fewer ranks."""
    assert bucket.inner is not None
    bucket.inner.store = bucket.inner.own.clone()
    bucket.inner.stamp = stamp_of(bucket)


def gather_flat(bucket: Bucket, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A new buffer with the ``shard`` of every rank, in ``dtype``."""
    group = bucket.mesh.shard
    full = shard.new_empty(bucket.layout.numel, dtype=dtype)
    if full.numel():
        whole = full.view(torch.uint8)
        full.view(group.size, -1)[group.rank].copy_(shard)
        parts = cut_by_rank(whole, group.size)
        comm.gather_parts(whole, parts, parts[group.rank], group, purpose_of(bucket)).wait()
    return full
