"""Sums a bucket's packed gradients over the ranks, so that each gets its own part."""

from __future__ import annotations

import math

import torch

from fsdp_compose.base.parts import cut_by_rank
from fsdp_compose.buckets.bucket import Bucket
from fsdp_compose.comm import collectives as comm


def reduce_purpose(bucket: Bucket) -> str:
    """What reducing the bucket is for, as errors say it."""
    return f"reduce gradients of unit {bucket.entries[0].spec.unit!r}"


def plan_scatter(bucket: Bucket) -> comm.ReducePlan | None:
    """The reduce-scatter of the bucket's gradients, where each is as the one before."""
    buffer = bucket.grads
    assert buffer is not None
    if (
        buffer.plan is None
        and buffer.flat.dtype != torch.float16
        and bucket.mesh.microbatches is None
    ):
        group = bucket.mesh.gather_axis
        buffer.plan = comm.plan_reduce(buffer.flat, buffer.parts, group, reduce_purpose(bucket))
    return buffer.plan


def start_scatter(
    bucket: Bucket, scale: float, used: comm.Flags
) -> tuple[comm.ReduceScatter, float]:
    """Start the reduce-scatter of the bucket's gradients; also what is left of ``scale``."""
    plan, buffer = plan_scatter(bucket), bucket.grads
    assert buffer is not None
    if plan is not None:
        return plan.start(), scale
    flat, in_tree, before = buffer.flat, bucket.mesh.microbatches is not None, 1.0
    if flat.dtype == torch.float16:
        # Half precision overflows at 65504: divide before the sum, by at least half of the factor.
        before = 2.0 ** math.floor(math.log2(scale) / 2)
    scatter = comm.reduce_scatter_parts(
        flat,
        buffer.parts,
        bucket.mesh.gather_axis,
        reduce_purpose(bucket),
        bucket.users.caller,
        used,
        before,
        in_tree,
    )
    return scatter, scale / before


def sum_over_replicas(bucket: Bucket, grad: torch.Tensor, used: comm.Flags) -> torch.Tensor:
    """This rank's part of the sum over the replicas, each of which summed over its own ranks."""
    mesh, caller, in_tree = bucket.mesh, bucket.users.caller, bucket.mesh.microbatches is not None
    axis, purpose = mesh.replicate_axis, f"{reduce_purpose(bucket)} over the replicas"
    if mesh.axes is None:
        return comm.sum_replicas(grad, axis, purpose, caller, used, in_tree)
    parts = cut_by_rank(grad, axis.size)
    scatter = comm.reduce_scatter_parts(grad, parts, axis, purpose, caller, used, 1.0, in_tree)
    return scatter.result(grad.dtype, 1.0)


def restore_dtype(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What was summed in the dtype of ``.grad``: gradients travel as real numbers."""
    return torch.view_as_complex(grad.view(-1, 2)) if dtype.is_complex else grad.to(dtype)
