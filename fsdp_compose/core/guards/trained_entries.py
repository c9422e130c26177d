"""Which of a unit's parameters train now: they may be frozen and unfrozen at any time.

A parameter that was frozen between a forward and its backward gets no gradient, and what it has is
left alone, as autograd leaves a leaf alone that no longer requires a gradient.
"""

from __future__ import annotations

from itertools import compress, count
from operator import attrgetter

import torch

from fsdp_compose.base.attributes import requires_grad
from fsdp_compose.base.process import here
from fsdp_compose.base.torch_private import raw
from fsdp_compose.core.state import Unit

Grads = tuple[torch.Tensor | None, ...]


def trained_entries(unit: Unit) -> tuple[int, ...]:
    """Entries whose parameters need gradients now, where grad mode is on."""
    links = unit.links
    return links.trained if links.asked_at == here.retrained else _ask(unit)


def _ask(unit: Unit) -> tuple[int, ...]:
    """Ask each parameter, since ``requires_grad`` of some parameter was set."""
    links = unit.links
    links.asked_at = here.retrained
    flags: list[bool] = []
    with raw():
        for bucket in unit.buckets:
            flags += map(requires_grad, bucket.views.params)
        if unit.borrowed:
            flags += map(requires_grad, map(_param_of, unit.borrowed))
    if flags != links.flags:
        links.flags, links.trained = flags, tuple(compress(count(), flags))
    return links.trained


_param_of = attrgetter("param")


def leave_out_frozen(
    unit: Unit, trained: tuple[int, ...], grads: Grads
) -> tuple[tuple[int, ...], Grads]:
    """Drop the gradients of entries that were frozen since the forward, in which they trained."""
    now = set(trained_entries(unit))
    pairs = [(i, grad) for i, grad in zip(trained, grads, strict=True) if i in now]
    return tuple([i for i, _ in pairs]), tuple([grad for _, grad in pairs])
