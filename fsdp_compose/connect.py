"""Full tensors that are at hand, connected to the sharded leaves: outside a unit's own forward.

``Gather`` serves one forward of one unit and knows when its backward begins. Here the tensors may
be used anywhere, so what they are stored in must stay until the graph that used them is gone; all
uses meet in one node per bucket, whose backward is one gradient reduction.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_compose.bucket import Bucket, Entry
from fsdp_compose.engine import running_task
from fsdp_compose.gather import Reduce
from fsdp_compose.reduction import drain, pack, requires_grad, run_gradient_hooks, start_reduce
from fsdp_compose.sharded import part_of
from fsdp_compose.state import Unit, owner_of
from fsdp_compose.torch_private import raw, untraced, wanted_leaves

Tensors = tuple[torch.Tensor | None, ...]


def is_running(unit: Unit) -> bool:
    """Whether the unit's modules hold what a pass under way put there."""
    if unit.opened is not None and unit.opened.calls:
        return True
    return unit.calls > 0 or (unit.task is not None and unit.task.alive)


@dataclass(eq=False)
class Reach:
    """Where the gradients of full tensors go; it lives as long as a graph that uses them."""

    unit: weakref.ref[Unit]
    bucket: weakref.ref[Bucket]
    entries: list[Entry]


class Connect(torch.autograd.Function):
    """Full tensors that are at hand, as functions of the sharded leaves."""

    @staticmethod
    @untraced
    def forward(
        ctx: Any, reach: Reach, fulls: list[torch.Tensor], *leaves: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.reach = reach
        ctx.set_materialize_grads(False)
        return tuple([full.detach() for full in fulls])

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        leaves = [node for node, _ in ctx.next_functions]  # also of parameters frozen since
        return (None, None, *_receive(ctx.reach, leaves, grads))


def _receive(reach: Reach, leaves: list[Any], grads: Tensors) -> Tensors:
    """Hand gradients of full tensors to the engine; what is returned is what the leaves receive."""
    unit, bucket, entries = reach.unit(), reach.bucket(), reach.entries
    if unit is None or bucket is None:
        raise RuntimeError(
            "backward reached a sharded module that was deleted after its parameters were used; "
            "keep a reference to the model until backward has run."
        )
    lane = unit.lane
    task = running_task(unit)
    drain(lane)
    wanted = wanted_leaves(leaves)
    if wanted is None or not all(wanted) or torch.is_grad_enabled():
        return _reduce_now(unit, bucket, entries, grads)
    by_entry = dict(zip(entries, grads, strict=True))
    pack(bucket, [by_entry.get(entry) for entry in bucket.entries])
    if not unit.switches.is_last:
        bucket.owed.update(entries)
    if unit.switches.sync:
        if unit.live is not None and unit.live.pass_id:
            task.packed.append((unit, bucket))  # goes with what its forward's backward brings
        else:
            lane.reductions.append(start_reduce(unit, bucket))
    return (None,) * len(grads)


def _reduce_now(unit: Unit, bucket: Bucket, entries: list[Entry], grads: Tensors) -> Tensors:
    """Reduce on the spot, differentiably, for ``autograd.grad`` and ``create_graph``."""
    full = [
        grad
        if grad is not None
        else torch.zeros(entry.spec.shape, dtype=bucket.shard.dtype, device=bucket.mesh.device)
        for entry, grad in zip(entries, grads, strict=True)
    ]
    reduced = Reduce.apply(unit, bucket, entries, *full)
    return tuple(
        [
            run_gradient_hooks(entry, grad) if entry.spec.hooks.gradient else grad
            for entry, grad in zip(entries, reduced, strict=True)
        ]
    )


def owners(unit: Unit) -> list[Unit]:
    """The unit and those whose parameters it borrows."""
    lent = {id(owner_of(entry)) for entry in unit.borrowed}
    others = [u for u in unit.lane.units if any(id(bucket) in lent for bucket in u.buckets)]
    return [unit, *(other for other in others if other is not unit)]


def connect(
    units: Sequence[Unit], fulls: dict[Entry, torch.Tensor], reaches: list[Reach]
) -> dict[Entry, torch.Tensor]:
    """``fulls`` with those of trained parameters connected to their leaves, a node per bucket."""
    connected = dict(fulls)
    for unit in units:
        for bucket in unit.buckets:
            with raw():
                entries = [e for e in bucket.entries if e in fulls and requires_grad(e.param)]
            if not entries:
                continue
            reach = Reach(weakref.ref(unit), weakref.ref(bucket), entries)
            reaches.append(reach)
            parts = [part_of(fulls[entry]) for entry in entries]
            outputs = Connect.apply(reach, parts, *[e.param for e in entries])
            for entry, output in zip(entries, outputs, strict=True):
                output._is_param = True  # isinstance(p, nn.Parameter) holds, as in a plain module
                parallel = entry.spec.parallel
                connected[entry] = output if parallel is None else parallel.wrap(output)
    return connected
