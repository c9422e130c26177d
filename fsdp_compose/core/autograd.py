"""Gathering as a differentiable function: its backward is the gradient reduction.

``Gather`` takes a unit's sharded leaves and gives the aliases that compute reads. It is the unit's
first node, so by its sequence number autograd runs its backward after every other operation of the
unit and before those of the unit that ran before. Its backward receives all gradients at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from fsdp_compose.base.torch_private import made_at, raw, untraced
from fsdp_compose.base.tree import find_tensors, map_tensors
from fsdp_compose.core.bucket import Phase, dress
from fsdp_compose.core.gathering import check_unwritten, read_versions
from fsdp_compose.core.passes import close_backward, consume, retain
from fsdp_compose.core.receiving import receive
from fsdp_compose.core.records import Live
from fsdp_compose.core.reducing import requires_grad
from fsdp_compose.core.state import Unit, as_read

DELETED = (
    "backward reached a sharded module that was deleted after its forward; keep a reference to the "
    "model until backward has run."
)
UNSEEN = (
    "backward computed with weights of unit {name!r} that were released: it reached a tensor that "
    "the unit's forward handed on without returning it, such as a key-value cache it was given, "
    "and nothing of what that forward returned is part of the loss. Run forward inside "
    "`with fsdp_compose.gathered(model):`, after which backward needs no gather, or let the loss "
    "depend on what forward returned (loss + 0 * output.sum()), or return the tensor."
)


def trained_entries(unit: Unit) -> tuple[int, ...]:
    """Entries whose parameter needs a gradient now; none where grad mode is off."""
    if not torch.is_grad_enabled():
        return ()
    with raw():
        return tuple([i for i, entry in enumerate(unit.entries) if requires_grad(entry.param)])


def view_parameters(unit: Unit, trained: tuple[int, ...]) -> Sequence[torch.Tensor]:
    """The unit's gathered parameters by entry, those of ``trained`` connected to autograd."""
    if not trained:
        read = as_read(unit, unit.links.aliases)
        dress_all(unit, read)
        if torch.is_grad_enabled():  # a checkpointed part of it may be recomputed in backward
            unit.run.live = Live(read, unit.lane.pass_id, ())
        return read
    outputs = Gather.apply(weakref.ref(unit), trained, *[unit.entries[i].param for i in trained])
    if len(trained) == len(unit.links.aliases):
        tensors = list(outputs)
    else:
        tensors = list(unit.links.aliases)
        for index, output in zip(trained, outputs, strict=True):
            tensors[index] = output
    read = as_read(unit, tensors)
    dress_all(unit, read)
    unit.run.live = Live(read, unit.lane.pass_id, trained, read_versions(unit))
    return read


def is_current(unit: Unit, live: Live) -> bool:
    """Whether no weight was written since, so that one backward may serve both forwards."""
    return live.versions == read_versions(unit)


def dress_all(unit: Unit, tensors: Sequence[torch.Tensor]) -> None:
    """Let full tensors, by entry, have the classes and attributes that modules look for on them."""
    for index in unit.links.with_attributes:
        dress(tensors[index], unit.entries[index])


class Gather(torch.autograd.Function):
    """Sharded leaves to the unit's aliases; gradients of the aliases to the reduction."""

    @staticmethod
    @untraced
    def forward(
        ctx: Any, unit_ref: weakref.ref[Unit], trained: tuple[int, ...], *leaves: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.unit_ref, ctx.trained = unit_ref, trained
        ctx.set_materialize_grads(False)
        unit = unit_ref()
        assert unit is not None
        ctx.versions = read_versions(unit)
        ctx.ends_pass, ctx.received_in = True, -1
        unit.graphs.nodes.add(ctx)
        aliases = unit.links.aliases
        return tuple([aliases[i].detach() for i in trained])

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        unit = ctx.unit_ref()
        if unit is None:
            raise RuntimeError(DELETED)
        check_unwritten(unit, ctx.versions)
        for bucket in unit.gathered:
            if bucket.phase is not Phase.GATHERED and not bucket.in_place:
                raise RuntimeError(UNSEEN.format(name=unit.name))
        return (None, None, *receive(unit, ctx.trained, grads, ctx))


class Reader:
    """Lives as long as a graph over the backward of a unit that trains nothing."""


def _retain_frozen(unit: Unit, grads: Sequence[torch.Tensor | None]) -> None:
    """Keep the unit for backwards over the graph that is being made of ``grads``."""
    ref, reader = weakref.ref(unit), Reader()

    @untraced
    def reached(grad: torch.Tensor) -> None:
        if (frozen := ref()) is not None:
            consume(frozen, reader)

    for grad in grads:
        if grad is not None and grad.requires_grad:
            grad.register_hook(reached)
    retain(unit, reader)


class Boundary(torch.autograd.Function):
    """Identity on the inputs of a unit that trains nothing: its backward ends the unit's."""

    @staticmethod
    @untraced
    def forward(ctx: Any, unit_ref: weakref.ref[Unit], *inputs: torch.Tensor) -> Any:
        ctx.unit_ref = unit_ref
        ctx.set_materialize_grads(False)
        return tuple([tensor.view_as(tensor) for tensor in inputs])

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        unit = ctx.unit_ref()
        if unit is not None:
            if torch.is_grad_enabled():
                _retain_frozen(unit, grads)
            close_backward(unit)
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: torch.Tensor | None) -> Any:
        return tuple([None if t is None else t.view_as(t) for t in tangents])


def bound_inputs(unit: Unit, inputs: Any) -> Any:
    """Pass the inputs that need gradients through one node, so that a frozen unit knows its end."""
    tensors, _ = find_tensors(inputs)
    needing = {id(t): t for t in tensors if t.requires_grad}
    unit.checks.bound_at = -1
    if not needing:
        return inputs
    outputs = Boundary.apply(weakref.ref(unit), *needing.values())
    unit.checks.bound_at = made_at(outputs[0].grad_fn)
    replaced = dict(zip(needing, outputs, strict=True))
    return map_tensors(lambda tensor: replaced.get(id(tensor), tensor), inputs)
