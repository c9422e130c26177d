"""Where the backward of a unit that trains nothing ends: its parameters get no gradients."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from fsdp_compose.base.torch_private import made_at, untraced
from fsdp_compose.base.tree import find_tensors, map_tensors
from fsdp_compose.core.guards.weight_versions import check_unwritten, read_versions
from fsdp_compose.core.passes import close_backward, consume, retain
from fsdp_compose.core.state import Unit
from fsdp_compose.sharded import is_sharded


class Reader:
    """An object that lives as long as a graph over the backward of a frozen unit."""


def _retain_frozen(unit: Unit, grads: Sequence[torch.Tensor | None]) -> None:
    """Keep the unit gathered for backwards over the graph of ``grads`` that is being made."""
    ref, reader = weakref.ref(unit), Reader()

    @untraced
    def reached(grad: torch.Tensor) -> None:
        if (frozen := ref()) is not None:
            consume(frozen, reader)

    for grad in grads:
        if grad is not None and grad.requires_grad:
            grad.register_hook(reached)
    retain(unit, reader)
    unit.graphs.readers.discard(unit.run.live)


class Boundary(torch.autograd.Function):
    """Identity on the inputs of a unit that trains nothing: its backward ends the unit's."""

    @staticmethod
    @untraced
    def forward(ctx: Any, unit_ref: weakref.ref[Unit], *inputs: torch.Tensor) -> Any:
        unit = unit_ref()
        assert unit is not None
        ctx.unit_ref, ctx.versions = unit_ref, read_versions(unit)
        ctx.set_materialize_grads(False)
        return tuple([tensor.view_as(tensor) for tensor in inputs])

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        unit = ctx.unit_ref()
        if unit is not None:
            check_unwritten(unit, ctx.versions)
            if torch.is_grad_enabled():
                _retain_frozen(unit, grads)
            close_backward(unit)
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: torch.Tensor | None) -> Any:
        return tuple([None if t is None else t.view_as(t) for t in tangents])


_VIEWED = (torch.strided, torch.jagged)


def bound_inputs(unit: Unit, inputs: tuple[Any, Any]) -> tuple[Any, Any]:
    """Pass inputs that need gradients through one node, which ends a frozen unit's backward.

    Sparse ones have no views, nor have sharded parameters that an input holds, as an optimizer
    does: these stay as they are, and the end of the whole backward ends the unit's.
    """
    tensors, _ = find_tensors(inputs)
    needing = {
        id(t): t for t in tensors if t.requires_grad and t.layout in _VIEWED and not is_sharded(t)
    }
    unit.checks.bound_at = -1
    if not needing:
        return inputs
    outputs = Boundary.apply(weakref.ref(unit), *needing.values())
    unit.checks.bound_at = made_at(outputs[0].grad_fn)
    replaced = dict(zip(needing, outputs, strict=True))
    run = unit.run
    found: tuple[Any, Any] = map_tensors(
        lambda tensor: replaced.get(id(tensor), tensor), inputs, run.copied, len(run.modes)
    )
    return found
