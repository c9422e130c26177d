"""Packs full gradients into a bucket's flat buffer, and cuts the reduced one into slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from operator import is_
from typing import Any

import torch

from fsdp_compose.base.attributes import get_grad, set_grad
from fsdp_compose.base.loops import exhaust
from fsdp_compose.base.parts import cut_by_rank, split_around
from fsdp_compose.base.torch_private import raw
from fsdp_compose.buckets.bucket import Bucket, Entry, GradBuffer, alias
from fsdp_compose.comm.collectives import lender_of


def open_grad_buffer(bucket: Bucket) -> GradBuffer:
    """Where the bucket's gradients are packed; where other ranks read it, if they can."""
    buffer = bucket.grads
    if buffer is not None and bucket.arriving.packed:
        return buffer
    is_own = buffer is not None and buffer.plan is not None and bucket.static is None
    lent = None if is_own else _lend_grad_buffer(bucket)
    if lent is not None:
        buffer = lent
    elif buffer is None or buffer.lease is not None:
        buffer = make_grad_buffer(bucket)
    else:
        buffer.flat.untyped_storage().resize_(buffer.nbytes)
    bucket.grads = buffer
    return buffer


def _lend_grad_buffer(bucket: Bucket) -> GradBuffer | None:
    """A buffer in memory that the transport lends, whose views are made once for each place."""
    group = bucket.mesh.gather_axis
    if bucket.static is not None:
        return bucket.static.lend(bucket)
    lend = lender_of(group) if bucket.mesh.device.type == "cpu" else None
    if lend is None or not bucket.layout.numel:
        return None
    dtype = bucket.dtypes.reduce
    numel = bucket.layout.numel * (2 if bucket.stored.is_complex() else 1)
    lease = lend(numel * dtype.itemsize, group)
    if lease is None:
        return None
    made = lease.kept.get(bucket)
    if made is None or (made.flat.dtype, made.flat.numel()) != (dtype, numel):
        with torch.inference_mode(False):
            made = make_grad_buffer(bucket, lease.memory.view(dtype))
        lease.kept[bucket] = made
    return replace(made, lease=lease)


def close_grad_buffer(bucket: Bucket) -> None:
    """Free the memory of the bucket's packed gradients, once nothing here reads it."""
    assert bucket.grads is not None
    if bucket.grads.lease is not None:
        bucket.grads = None
    else:
        bucket.grads.flat.untyped_storage().resize_(0)


def make_grad_buffer(bucket: Bucket, flat: torch.Tensor | None = None) -> GradBuffer:
    """A flat gradient buffer with its views; its storage is allocated, or that of ``flat``."""
    layout, dtype = bucket.layout, bucket.dtypes.reduce
    per_element = 2 if bucket.stored.is_complex() else 1
    with torch.inference_mode(False):
        if flat is None:
            flat = torch.empty(layout.numel * per_element, dtype=dtype, device=bucket.mesh.device)
        typed = torch.view_as_complex(flat.view(-1, 2)) if per_element == 2 else flat
        spans = [(entry.spec.offset, entry.spec.numel) for entry in bucket.entries]
        sizes, places = split_around(spans, layout.numel)
        pieces = flat.split([size * per_element for size in sizes])
        gaps = set(range(len(pieces))).difference(places)
        return GradBuffer(
            flat=flat,
            nbytes=flat.numel() * flat.element_size(),
            parts=cut_by_rank(flat, bucket.mesh.gather_axis.size) if flat.numel() else [],
            views=[alias(typed, entry.spec.offset, entry.spec) for entry in bucket.entries],
            gaps=[pieces[place] for place in sorted(gaps) if sizes[place]],
        )


def pack(bucket: Bucket, grads: Sequence[torch.Tensor | None], is_whole: bool = False) -> None:
    """Copy or add the gradients of the bucket's entries into its flat buffer; None is zero.

    Args:
        is_whole: there is no None among them.
    """
    buffer = open_grad_buffer(bucket)
    views: list[torch.Tensor] = buffer.views
    given: Any = grads
    zeros, used = buffer.gaps, bucket.views.every
    if not is_whole:
        used = sum(1 << i for i, grad in enumerate(grads) if grad is not None)
        pairs = list(zip(buffer.views, grads, strict=True))
        views = [view for view, grad in pairs if grad is not None]
        given = [grad for _, grad in pairs if grad is not None]
        zeros = [view for view, grad in pairs if grad is None] + buffer.gaps
    bucket.arriving.used |= used
    if bucket.arriving.packed:
        if given:
            torch._foreach_add_(views, given)
        return
    bucket.arriving.packed, bucket.arriving.postponed = True, False
    if given:
        torch._foreach_copy_(views, given)
    if zeros:
        torch._foreach_zero_(zeros)


def sum_in_tree(bucket: Bucket, grad: torch.Tensor, scale: float) -> torch.Tensor | None:
    """The sum of all microbatches of a step times ``scale``, where ``deterministic=`` adds them up.

    None before the last microbatch of a step.
    """
    mesh, sums = bucket.mesh, bucket.arriving.sums
    assert mesh.microbatches is not None
    total = sums.add(grad, mesh.microbatches // mesh.size)
    if total is None:
        return None
    with raw():
        if all(param.grad is None for param in bucket.views.params):
            sums.steps = 1
    return total.mul_(scale)


def discard_packed(bucket: Bucket) -> None:
    """Drop gradients that were packed and not reduced."""
    bucket.arriving.packed = False
    bucket.arriving.used = bucket.arriving.trained = 0
    bucket.arriving.joined = False
    close_grad_buffer(bucket)


def list_waiting(bucket: Bucket) -> list[torch.Tensor]:
    """Gradients of earlier backwards that are not in ``.grad`` yet, in the forms they wait in."""
    arriving = bucket.arriving
    packed = bucket.grads.flat if arriving.packed and bucket.grads is not None else None
    held = (packed, arriving.partial, arriving.waiting, *arriving.sums.nodes)
    return [tensor for tensor in held if tensor is not None]


def any_waits(bucket: Bucket) -> bool:
    """Whether gradients of earlier backwards are not in ``.grad`` yet."""
    arriving = bucket.arriving
    waits = (arriving.packed and arriving.postponed) or arriving.sums.arrived > 0
    return waits or arriving.partial is not None or arriving.waiting is not None


def discard_waiting(bucket: Bucket) -> bool:
    """Drop gradients that are not in ``.grad`` yet; whether any waited for a later backward."""
    arriving, waited = bucket.arriving, any_waits(bucket)
    if arriving.packed:
        discard_packed(bucket)
    arriving.partial = arriving.waiting = None
    arriving.used = arriving.trained = 0
    arriving.joined = False
    arriving.sums.clear()
    return waited


def zero_gradient(entry: Entry, bucket: Bucket) -> torch.Tensor:
    """What this rank adds to the gradient of a parameter that only others used."""
    return torch.zeros(entry.spec.shape, dtype=bucket.full.dtype, device=bucket.mesh.device)


def add_gradients(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
) -> list[bool] | None:
    """Set ``.grad`` where there is none, and add to it where there is; use it under ``raw``.

    Returns:
        Where there was one; None where there was none at all.
    """
    previous = list(map(get_grad, params))
    if all(map(is_, previous, repeat(None))):
        exhaust(map(set_grad, params, grads))
        return None
    held: list[torch.Tensor] = []
    added: list[torch.Tensor] = []
    for param, before, grad in zip(params, previous, grads, strict=True):
        if before is None:
            set_grad(param, grad)
        else:
            held.append(before)
            added.append(grad)
    with torch.no_grad():
        torch._foreach_add_(held, added)
    return [grad is not None for grad in previous]


def cut(bucket: Bucket, flat: torch.Tensor) -> Sequence[torch.Tensor]:
    """Slices of a sharded flat tensor by entry, as plain tensors."""
    views = bucket.views
    slices: tuple[torch.Tensor, ...] = flat.split_with_sizes(views.splits)
    pieces = views.pieces
    return slices[: len(pieces)] if views.in_order else list(map(slices.__getitem__, pieces))
