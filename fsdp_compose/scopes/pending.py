"""The gradients that wait to be reduced, as copies to look at; nothing is sent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fsdp_compose.buckets.bucket import Entry
from fsdp_compose.buckets.gradients import cut
from fsdp_compose.core.gathering import renew_bucket
from fsdp_compose.core.guards.failed_steps import clear_failed_steps
from fsdp_compose.core.guards.units import require_units
from fsdp_compose.core.state import owner_of
from fsdp_compose.scopes.unreduced import cut_partial, waits


@dataclass(frozen=True, eq=False)
class PendingGradient:
    """Copies of what waits for one parameter; ``reduce_grads`` adds all of it to ``.grad``.

    Attributes:
        unreduced: this rank's sum over its backwards, in the parameter's shape, the reduce dtype
            and, with tensor parallelism, a DTensor; not divided by the number of ranks.
        partial: 1-D, the elements that this rank holds of the mean over ranks, of which the other
            replicas' part is missing. With ``deterministic=``, of which other microbatches are
            missing, and not divided.
        reduced: 1-D, the elements that this rank holds of the mean over all ranks, which have not
            been copied to host memory.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> with no_sync(model):
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> pending_gradients(model)[model.bias].unreduced
        tensor([1., 1.])
    """

    unreduced: torch.Tensor | None = None
    partial: torch.Tensor | None = None
    reduced: torch.Tensor | None = None


def pending_gradients(module: nn.Module) -> dict[nn.Parameter, PendingGradient]:
    """The gradients in ``module``'s units that are not in ``.grad`` yet, by parameter.

    They wait after ``no_sync``, ``set_requires_gradient_sync(False)``,
    ``set_requires_all_reduce(False)`` and ``set_is_last_backward(False)``. One rank may ask alone.

    Raises:
        ValueError: ``module`` contains no unit.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> with no_sync(model):
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> [name for name, p in model.named_parameters() if p in pending_gradients(model)]
        ['weight', 'bias']
        >>> reduce_grads(model)
        >>> pending_gradients(model)
        {}
    """
    units = require_units(module, "pending_gradients")
    clear_failed_steps(units)
    buckets = [bucket for unit in units for bucket in unit.buckets]
    for bucket in buckets:
        if bucket.residence.moved:
            renew_bucket(bucket)  # and convert what waits
    with torch.inference_mode(False), torch.no_grad():
        entries = [entry for bucket in buckets for entry in bucket.entries]
        return {entry.held: _copy(entry) for entry in entries if waits(entry)}


def _copy(entry: Entry) -> PendingGradient:
    bucket = owner_of(entry)
    arriving = bucket.arriving
    unreduced = partial = reduced = None
    if arriving.packed and bucket.grads is not None:
        unreduced = entry.spec.wrap(bucket.grads.views[entry.index].clone())
    if arriving.partial is not None:
        partial = cut_partial(entry, arriving.partial).clone()
    elif arriving.sums.arrived:
        nodes = [cut(bucket, node)[entry.index] for node in arriving.sums.nodes]
        partial = torch.stack(nodes).sum(0)
    if arriving.waiting is not None:
        reduced = cut(bucket, arriving.waiting)[entry.index].clone()
    return PendingGradient(unreduced, partial, reduced)
