"""Packs full gradients into a bucket's flat buffer, and cuts the reduced one into slices."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from fsdp_compose.base.loops import has_none
from fsdp_compose.base.torch_private import raw
from fsdp_compose.buckets.bucket import Bucket, Entry
from fsdp_compose.buckets.build import close_grad_buffer, open_grad_buffer
from fsdp_compose.sharded import tag_all


def pack(bucket: Bucket, grads: Sequence[torch.Tensor | None]) -> None:
    """Copy or add the gradients of the bucket's entries into its flat buffer; None is zero."""
    buffer = open_grad_buffer(bucket)
    views: list[torch.Tensor] = buffer.views
    given: Any = grads
    zeros, used = buffer.gaps, bucket.every
    if has_none(grads):
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
    bucket.arriving.packed = True
    if given:
        torch._foreach_copy_(views, given)
    if zeros:
        torch._foreach_zero_(zeros)


def sum_slots(bucket: Bucket, grad: torch.Tensor, scale: float) -> torch.Tensor | None:
    """``grad``; where ``deterministic=`` adds microbatches up, their sum times ``scale``.

    None before the last microbatch of a step.
    """
    mesh, sums = bucket.mesh, bucket.arriving.sums
    if mesh.slots is None:
        return grad
    total = sums.add(grad, mesh.slots // mesh.size)
    if total is None:
        return None
    with raw():
        if all(param.grad is None for param in bucket.views.params):
            sums.steps = 1
    return total.mul_(scale)


def forget_slots(bucket: Bucket) -> None:
    """Drop the microbatches of a step that is not complete."""
    if bucket.arriving.sums.arrived:
        bucket.arriving.sums.clear()
        bucket.arriving.used = bucket.arriving.trained = 0


def discard_packed(bucket: Bucket) -> None:
    """Drop gradients that were packed and not reduced."""
    bucket.arriving.packed = False
    bucket.arriving.used = bucket.arriving.trained = 0
    close_grad_buffer(bucket)


def zero_gradient(entry: Entry, bucket: Bucket) -> torch.Tensor:
    """What this rank adds to the gradient of a parameter that only others used."""
    return torch.zeros(entry.spec.shape, dtype=bucket.full.dtype, device=bucket.mesh.device)


def cut(bucket: Bucket, flat: torch.Tensor) -> list[torch.Tensor]:
    """Slices of a sharded flat tensor by entry, each as a sharded tensor of its parameter."""
    slices = flat.split_with_sizes(bucket.views.splits)
    grads = list(map(slices.__getitem__, bucket.views.pieces))
    tag_all(grads, map(_spec_of, bucket.entries))
    return grads


_spec_of = attrgetter("spec")
