"""Gathering as a differentiable function: its backward is the gradient reduction.

``Gather`` takes a unit's sharded leaves and gives the aliases that compute reads. It is the unit's
first node, so by its sequence number autograd runs its backward after every other operation of the
unit and before those of the unit that ran before. Its backward receives all gradients at once.

An ordinary backward hands the gradients to the engine, which reduces them while backward goes on
and sets ``.grad`` itself; autograd is told None. When the caller asked for the gradients
(``autograd.grad``) or for a graph over them (``create_graph``), they are reduced on the spot by
``Reduce``, which is differentiable: its backward is ``Spread``, a gather, whose backward is again
``Reduce``. With the loss averaged over ranks, ``Reduce`` averages and ``Spread`` does not scale.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from fsdp_compose import comm
from fsdp_compose.bucket import Bucket, Entry
from fsdp_compose.engine import (
    close_backward,
    drain,
    finish_reduce,
    hold,
    pack,
    requires_grad,
    run_gradient_hooks,
    running_task,
    start_reduce,
)
from fsdp_compose.state import Hold, Live, Task, Unit
from fsdp_compose.torch_private import is_accumulated, is_captured, raw

Tensors = tuple[torch.Tensor | None, ...]


def view_parameters(unit: Unit) -> list[torch.Tensor]:
    """The unit's gathered parameters by entry, connected to autograd where they are trained."""
    if not torch.is_grad_enabled():
        return unit.aliases
    with raw():
        trained = [i for i, entry in enumerate(unit.entries) if requires_grad(entry.param)]
        if not trained:
            return unit.aliases
        leaves = [unit.entries[i].param for i in trained]
        outputs = Gather.apply(weakref.ref(unit), trained, *leaves)
    tensors = list(unit.aliases)
    for index, output in zip(trained, outputs, strict=True):
        tensors[index] = output
    unit.live = Live(tensors, unit.lane.pass_id)
    return tensors


class Gather(torch.autograd.Function):
    """Sharded leaves to the unit's aliases; gradients of the aliases to the reduction."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, unit_ref: weakref.ref[Unit], trained: list[int], *leaves: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.unit_ref, ctx.trained = unit_ref, trained
        ctx.set_materialize_grads(False)
        unit = unit_ref()
        assert unit is not None
        aliases = unit.aliases
        return tuple([aliases[i].detach() for i in trained])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        unit = ctx.unit_ref()
        if unit is None:
            raise RuntimeError(
                "backward reached a sharded module that was deleted after its forward; keep a "
                "reference to the model until backward has run."
            )
        return (None, None, *receive(unit, ctx.trained, grads))


class Boundary(torch.autograd.Function):
    """Identity on the inputs of a unit that trains nothing: its backward ends the unit's."""

    @staticmethod
    def forward(ctx: Any, unit_ref: weakref.ref[Unit], *inputs: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.unit_ref = unit_ref
        ctx.set_materialize_grads(False)
        return tuple([tensor.view_as(tensor) for tensor in inputs])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        unit = ctx.unit_ref()
        if unit is not None:
            close_backward(unit)
        return (None, *grads)


def receive(unit: Unit, trained: list[int], grads: Tensors) -> Tensors:
    """Take the unit's gradients from autograd; what is returned is what the leaves receive."""
    lane = unit.lane
    task = running_task(lane)
    entries = [unit.entries[i] for i in trained]
    if torch.is_grad_enabled() or any(is_captured(_accumulator(entry)) for entry in entries):
        return _reduce_now(unit, task, entries, grads)
    nested = unit.task is not None and unit.task is not task and unit.task.alive
    by_entry = dict(zip(entries, grads, strict=True))
    drain(lane)
    for bucket in unit.gathered:
        if any(entry in by_entry for entry in bucket.entries):
            pack(bucket, [by_entry.get(entry) for entry in bucket.entries])
    ready = [bucket for bucket in unit.buckets if bucket.packed]
    late = [bucket for bucket in unit.gathered if bucket.packed and bucket not in ready]
    if nested:
        # A checkpointed part of the unit runs its own backward inside the unit's: what it sends
        # is added up, and reduced once with the rest.
        assert unit.task is not None
        unit.task.packed += [(unit, bucket) for bucket in (*ready, *late)]
        return (None,) * len(grads)
    task.packed += [(unit, bucket) for bucket in late]
    if Hold.RETAINED in unit.holds:
        task.consumed.append(unit)
    close_backward(unit)
    if unit.switches.sync:
        unwanted = [e for e in entries if not is_accumulated(_accumulator(e))]
        wanted = frozenset(set(entries) - set(unwanted)) if unwanted else None
        for bucket in ready:
            reduction = start_reduce(unit, bucket)
            reduction.wanted = wanted
            lane.reductions.append(reduction)
    return (None,) * len(grads)


def _accumulator(entry: Entry) -> Any:
    """The node that autograd accumulates the leaf's gradient with; it lives as long as the leaf."""
    if entry.accumulator is None:
        with raw(), torch.enable_grad():
            entry.accumulator = torch.autograd.graph.get_gradient_edge(entry.param).node
    return entry.accumulator


def _reduce_now(unit: Unit, task: Task, entries: list[Entry], grads: Tensors) -> Tensors:
    """Reduce at once and return the sharded gradients, with a graph over them if asked for."""
    drain(unit.lane)
    by_entry = dict(zip(entries, grads, strict=True))
    results: dict[Entry, torch.Tensor | None] = {}
    for bucket in unit.gathered:
        given = [entry for entry in bucket.entries if by_entry.get(entry) is not None]
        if given:
            reduced = Reduce.apply(unit, bucket, given, *[by_entry[entry] for entry in given])
            results.update(zip(given, reduced, strict=True))
    for entry, grad in results.items():
        if entry.hooks.gradient and grad is not None:
            results[entry] = run_gradient_hooks(entry, grad)
    if torch.is_grad_enabled():
        hold(unit, Hold.RETAINED)
    elif Hold.RETAINED in unit.holds:
        task.consumed.append(unit)
    close_backward(unit)
    return tuple(results.get(entry) for entry in entries)


class Reduce(torch.autograd.Function):
    """Full gradients of some entries of a bucket to this rank's slices of their average."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, unit: Unit, bucket: Bucket, given: list[Entry], *grads: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.unit, ctx.bucket, ctx.given = weakref.ref(unit), weakref.ref(bucket), given
        ctx.dtype = grads[0].dtype
        by_entry = dict(zip(given, grads, strict=True))
        assert not bucket.packed, "gradients wait to be reduced in the buffer"
        pack(bucket, [by_entry.get(entry) for entry in bucket.entries])
        flat = finish_reduce(start_reduce(unit, bucket))
        pieces = flat.split(bucket.splits)
        return tuple([pieces[bucket.pieces[entry.index]].clone() for entry in given])

    @staticmethod
    def backward(ctx: Any, *slices: torch.Tensor) -> Any:
        unit, bucket = ctx.unit(), ctx.bucket()
        return (None, None, None, *Spread.apply(unit, bucket, ctx.given, ctx.dtype, *slices))


class Spread(torch.autograd.Function):
    """Slices of some entries of a bucket to the full tensors, gathered over the shard group."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        unit: Unit,
        bucket: Bucket,
        given: list[Entry],
        dtype: torch.dtype,
        *slices: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.unit, ctx.bucket, ctx.given = weakref.ref(unit), weakref.ref(bucket), given
        shard = torch.zeros_like(bucket.shard)
        pieces = shard.split(bucket.splits)
        for entry, piece in zip(given, slices, strict=True):
            pieces[bucket.pieces[entry.index]].copy_(piece)
        full = gather_flat(bucket, shard, dtype)
        return tuple(
            [full.as_strided(e.spec.shape, e.spec.stride, e.spec.offset).clone() for e in given]
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        unit, bucket = ctx.unit(), ctx.bucket()
        return (None, None, None, None, *Reduce.apply(unit, bucket, ctx.given, *grads))


def gather_flat(bucket: Bucket, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A buffer of its own with every rank's ``shard``, in ``dtype``."""
    group = bucket.mesh.shard
    full = shard.new_empty(bucket.layout.numel, dtype=dtype)
    if full.numel():
        whole = full.view(torch.uint8)
        full.view(group.size, -1)[group.rank].copy_(shard)
        comm.gather_parts(whole, list(whole.chunk(group.size)), group).wait()
    return full
