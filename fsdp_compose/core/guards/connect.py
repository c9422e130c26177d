"""Connects full tensors to the sharded parameters outside of the unit's own forward.

``Gather`` serves one forward of one unit and knows when its backward begins. The full tensors of a
scope may be used anywhere, so their memory must stay until no graph uses them. All uses meet in one
autograd node per bucket, whose backward is one gradient reduction.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_compose.base.attributes import requires_grad
from fsdp_compose.base.torch_private import raw, untraced
from fsdp_compose.buckets.bucket import Entry
from fsdp_compose.core.autograd import DELETED, receive
from fsdp_compose.core.state import Unit, owner_of
from fsdp_compose.sharded import part_of


def is_running(unit: Unit) -> bool:
    """Whether a pass is under way that put tensors into the unit's modules."""
    if unit.opened is not None and unit.opened.calls:
        return True
    return unit.run.calls > 0 or (unit.run.task is not None and unit.run.task.alive)


@dataclass(eq=False)
class Reach:
    """The parameters that gradients of full tensors go to; a graph that uses these keeps it."""

    unit: weakref.ref[Unit]
    trained: tuple[int, ...]  # indices of the unit's entries


class Connect(torch.autograd.Function):
    """Makes gathered tensors functions of the sharded parameters."""

    @staticmethod
    @untraced
    def forward(
        ctx: Any, reach: Reach, fulls: list[torch.Tensor], anchor: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.reach = reach
        ctx.set_materialize_grads(False)
        ctx.ends_pass, ctx.received_in, ctx.is_spent = False, None, False
        unit = reach.unit()
        assert unit is not None
        unit.graphs.nodes.add(ctx)
        return tuple([full.detach() for full in fulls])

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        unit = ctx.reach.unit()
        if unit is None:
            raise RuntimeError(DELETED)
        receive(unit, ctx.reach.trained, grads, ctx)
        return None, None, None


def owners(unit: Unit) -> list[Unit]:
    """List the unit and those whose parameters it borrows."""
    lent = {id(owner_of(entry)) for entry in unit.borrowed}
    known = unit.engine.units if lent else ()
    others = [u for u in known if any(id(bucket) in lent for bucket in u.buckets)]
    return [unit, *(other for other in others if other is not unit)]


def connect(
    units: Sequence[Unit], fulls: dict[Entry, torch.Tensor], reaches: list[Reach]
) -> dict[Entry, torch.Tensor]:
    """Return ``fulls`` with trained parameters connected to autograd, a node per bucket."""
    connected = dict(fulls)
    for unit in units:
        for bucket in unit.buckets:
            with raw():
                entries = [e for e in bucket.entries if e in fulls and requires_grad(e.param)]
            if not entries:
                continue
            trained = {entry: i for i, entry in enumerate(unit.entries)}
            reach = Reach(weakref.ref(unit), tuple([trained[entry] for entry in entries]))
            reaches.append(reach)
            parts = [part_of(fulls[entry]) for entry in entries]
            outputs = Connect.apply(reach, parts, unit.links.anchor)
            for entry, output in zip(entries, outputs, strict=True):
                output._is_param = True  # isinstance(p, nn.Parameter) holds, as in a plain module
                connected[entry] = entry.spec.wrap(output)
    return connected
