"""What a forward under ``no_grad`` reads trains where that forward turns gradients on inside.

A plain module's parameters need gradients in any grad mode. So do the views that such a forward
reads. They stay from one forward to the next, with one autograd node, as long as the weights and
what trains are the same: an evaluation makes them once. A backward that reaches the node makes it
an ordinary one, which lives as long as its graph, and the next forward makes others.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch

from fsdp_compose.base.loops import exhaust
from fsdp_compose.base.torch_private import next_node_number, plain_apply, untraced
from fsdp_compose.buckets.entries import put_in_classes
from fsdp_compose.core.autograd import Gather
from fsdp_compose.core.guards.called_again import Versions
from fsdp_compose.core.guards.captured import choose_anchor
from fsdp_compose.core.guards.trained_entries import trained_entries
from fsdp_compose.core.guards.weight_versions import read_versions
from fsdp_compose.core.records import Live
from fsdp_compose.core.state import Unit, as_read


def view_standing(unit: Unit) -> Sequence[torch.Tensor]:
    """The unit's gathered parameters by entry, for a forward without gradients."""
    trained = () if torch.is_inference_mode_enabled() else trained_entries(unit)
    read: Sequence[torch.Tensor] = unit.links.aliases
    if trained:
        standing, versions = unit.links.standing, read_versions(unit)
        if standing is None or standing.trained != trained or standing.versions != versions:
            standing = unit.links.standing = _connect(unit, trained, versions)
        schedule = unit.engine.schedule
        is_evaluation = schedule.eval_order is not None or len(schedule.active) == 1
        standing.pass_id = unit.engine.pass_id if is_evaluation else 0  # see kept_tensors.py
        standing.joined_at = next_node_number()
        read = standing.tensors
    if unit.links.dtensors:
        with torch.set_grad_enabled(bool(trained)):  # they are made as functions of the views
            read = as_read(unit, read)
    exhaust(map(setattr, read, repeat("__dict__"), unit.links.attributes))
    if unit.links.of_class:
        read = put_in_classes(read, unit.entries, unit.links.of_class)
    return read


def _connect(unit: Unit, trained: tuple[int, ...], versions: Versions) -> Live:
    """The unit's aliases, those of ``trained`` as views that are connected to their leaves."""
    tensors = list(unit.links.aliases)
    if unit.engine.streams.gather is not None:
        choose_anchor(unit)
    with torch.enable_grad():
        outputs = _stand(weakref.ref(unit), trained, versions, unit.links.anchor)
    for index, output in zip(trained, outputs, strict=True):
        tensors[index] = output
    return Live(tensors, 0, trained, versions)


class Stand(torch.autograd.Function):
    """As ``Gather``, but no backward waits for its node, which is not part of every graph."""

    @staticmethod
    @untraced
    def forward(
        ctx: Any,
        unit_ref: weakref.ref[Unit],
        trained: tuple[int, ...],
        versions: Versions,
        anchor: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.unit_ref, ctx.trained, ctx.versions = unit_ref, trained, versions
        ctx.materialize_grads = False
        unit = unit_ref()
        assert unit is not None
        ctx.ends_pass, ctx.received_in, ctx.is_spent = True, None, False
        ctx.follows, ctx.handed = False, None
        return tuple(map(torch.Tensor.detach, map(unit.links.aliases.__getitem__, trained)))

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        unit = ctx.unit_ref()
        if unit is not None:
            standing = unit.links.standing
            if standing is not None and standing.tensors[standing.trained[0]].grad_fn is ctx:
                unit.links.standing = None
            unit.graphs.nodes.add(ctx)
        return Gather.backward(ctx, *grads)


_stand = plain_apply(Stand)
