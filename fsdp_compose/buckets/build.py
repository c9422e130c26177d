"""A bucket's buffers, built around its shard, with every view of them that a step needs."""

from __future__ import annotations

import weakref

import torch

from fsdp_compose.base.attributes import get_grad
from fsdp_compose.base.group import Group
from fsdp_compose.base.mesh import Mesh
from fsdp_compose.base.parts import cut_by_rank, split_around
from fsdp_compose.base.policy import MixedPrecision, Offload
from fsdp_compose.base.torch_private import raw, read_version
from fsdp_compose.buckets.bucket import Bucket, Entry, Inner, Views, alias
from fsdp_compose.buckets.entries import mark_entry, refusal_of
from fsdp_compose.layout.shards import Layout
from fsdp_compose.sharded import refuse_arrivals, replace_grad, set_local, tag, to_local


def make_bucket(
    entries: list[Entry],
    layout: Layout,
    mesh: Mesh,
    shard: torch.Tensor,
    mp: MixedPrecision,
    offload: Offload,
    spread: Group | None,
) -> Bucket:
    """Build the buffers of a bucket around ``shard`` and turn its parameters into slices of it."""
    device = mesh.device
    # In a tree all ranks round alike, however many of them are replicas.
    replicas = 1 if mesh.microbatches is not None else mesh.replicate_axis.size
    dtypes = mp.dtypes_for(shard.dtype, replicas)
    in_place = layout.world_size == 1 and dtypes.compute == shard.dtype and device == shard.device
    with torch.inference_mode(False), torch.no_grad():
        full = shard if in_place else torch.empty(layout.numel, dtype=dtypes.compute, device=device)
        aliases = [alias(full, entry.spec.offset, entry.spec) for entry in entries]
        bucket = Bucket(
            entries=entries,
            layout=layout,
            mesh=mesh,
            residence=entries[0].spec.residence,
            mp=mp,
            dtypes=dtypes,
            stored=shard,
            full=full,
            views=_make_views(entries, full, shard, layout, mesh.shard.rank),
            aliases=aliases,
            counts=list(map(read_version, aliases)),
            in_place=in_place,
            offload=offload,
            inner=_make_inner(full, mesh, spread),
        )
        place_parameters(bucket)
        if not in_place:
            full.untyped_storage().resize_(0)
    for index, entry in enumerate(entries):
        bind(bucket, entry, index)
    return bucket


def view_full(bucket: Bucket) -> None:
    """Make the views of ``full`` again, which lies elsewhere now."""
    full, mesh, inner = bucket.full, bucket.mesh, bucket.inner
    bucket.views = _make_views(bucket.entries, full, bucket.stored, bucket.layout, mesh.shard.rank)
    if inner is not None:
        inner.parts = cut_by_rank(full.view(torch.uint8), inner.group.size)
        inner.own = cut_by_rank(full, inner.group.size)[inner.group.rank]


def bind(bucket: Bucket, entry: Entry, index: int) -> None:
    """Put ``entry`` at ``index`` of the bucket."""
    entry.owner, entry.index = weakref.ref(bucket), index
    entry.pin = weakref.ref(entry.param)
    mark_entry(entry.param, entry)
    if bucket.mesh.microbatches is not None:
        refuse_arrivals(entry.param, entry.spec.hooks, refusal_of(entry, bucket.mesh.microbatches))


def _make_inner(full: torch.Tensor, mesh: Mesh, spread: Group | None) -> Inner | None:
    group, source = (spread, None) if mesh.axes is None else mesh.axes
    if group is None or not full.numel():
        return None
    parts = cut_by_rank(full.view(torch.uint8), group.size)
    own = cut_by_rank(full, group.size)[group.rank]
    return Inner(group, parts, own, source, None if source is None else torch.empty_like(own))


def place_parameters(bucket: Bucket) -> None:
    """Make every parameter of the bucket a slice of its shard; the objects stay the same."""
    slices = bucket.stored.split(bucket.views.splits) if bucket.views.splits else ()
    with raw():
        for entry, piece in zip(bucket.entries, bucket.views.pieces, strict=True):
            set_local(entry.param, slices[piece])
            if bucket.dtypes.grad != bucket.stored.dtype:
                _set_grad_dtype(entry, bucket.dtypes.grad)
            tag(entry.param, entry.spec)


def _set_grad_dtype(entry: Entry, dtype: torch.dtype) -> None:
    """Let the parameter have gradients in ``dtype``; one that was converted with it is cast."""
    grad = get_grad(entry.param)
    is_other = grad is not None and grad.dtype != dtype
    if is_other:
        replace_grad(entry.param, None)  # torch refuses another dtype while it is there
    entry.param.grad_dtype = dtype
    if is_other:
        replace_grad(entry.param, tag(to_local(grad).to(dtype), entry.spec))


def _make_views(
    entries: list[Entry], full: torch.Tensor, shard: torch.Tensor, layout: Layout, rank: int
) -> Views:
    whole_bytes = full.view(torch.uint8) if full.numel() else full.new_empty(0).byte()
    is_ready = shard.dtype == full.dtype and shard.device == full.device
    slices = [layout.slice_of(index, rank) for index in range(len(entries))]
    spans = [(piece.shard_offset, piece.numel) for piece in slices]
    splits, pieces = map(tuple, split_around(spans, layout.shard_numel))
    return Views(
        params=[entry.param for entry in entries],
        nbytes=full.numel() * full.element_size(),
        storage=full.untyped_storage()._cdata,
        own=full[rank * layout.shard_numel : (rank + 1) * layout.shard_numel],
        whole_bytes=whole_bytes,
        part_bytes=cut_by_rank(whole_bytes, layout.world_size) if whole_bytes.numel() else [],
        shard_bytes=shard.view(torch.uint8) if is_ready else None,
        splits=splits,
        pieces=pieces,
        in_order=pieces == tuple(range(len(pieces))),
        every=(1 << len(entries)) - 1,
    )
