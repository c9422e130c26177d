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
from collections.abc import Sequence
from typing import Any

import torch

from fsdp_compose import comm
from fsdp_compose.bucket import Bucket, Entry, Phase, dress
from fsdp_compose.engine import close_backward, running_task
from fsdp_compose.reduction import (
    drain,
    pack,
    reduce_apart,
    requires_grad,
    run_gradient_hooks,
    start_reduce,
)
from fsdp_compose.residency import check_unwritten, keep, read_versions
from fsdp_compose.state import Hold, Live, Task, Unit, as_read, routes_of
from fsdp_compose.torch_private import raw, untraced, wanted_leaves

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
Tensors = tuple[torch.Tensor | None, ...]


def trained_entries(unit: Unit) -> tuple[int, ...]:
    """Entries whose parameter needs a gradient now; none where grad mode is off."""
    if not torch.is_grad_enabled():
        return ()
    with raw():
        return tuple([i for i, entry in enumerate(unit.entries) if requires_grad(entry.param)])


def view_parameters(unit: Unit, trained: tuple[int, ...]) -> Sequence[torch.Tensor]:
    """The unit's gathered parameters by entry, those of ``trained`` connected to autograd."""
    if not trained:
        read = as_read(unit, unit.aliases)
        dress_all(unit, read)
        if torch.is_grad_enabled():  # a checkpointed part of it may be recomputed in backward
            unit.live = Live(read, unit.lane.pass_id, ())
        return read
    outputs = Gather.apply(weakref.ref(unit), trained, *[unit.entries[i].param for i in trained])
    if len(trained) == len(unit.aliases):
        tensors = list(outputs)
    else:
        tensors = list(unit.aliases)
        for index, output in zip(trained, outputs, strict=True):
            tensors[index] = output
    read = as_read(unit, tensors)
    dress_all(unit, read)
    unit.live = Live(read, unit.lane.pass_id, trained)
    return read


def dress_all(unit: Unit, tensors: Sequence[torch.Tensor]) -> None:
    """Let full tensors, by entry, have the classes and attributes that modules look for on them."""
    for index in unit.dressed:
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
        aliases = unit.aliases
        return tuple([aliases[i].detach() for i in trained])

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        unit = ctx.unit_ref()
        if unit is None:
            raise RuntimeError(DELETED)
        check_unwritten(unit, ctx.versions)
        return (None, None, *receive(unit, ctx.trained, grads))


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
            close_backward(unit)
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: torch.Tensor | None) -> Any:
        return tuple([None if t is None else t.view_as(t) for t in tangents])


def receive(unit: Unit, trained: tuple[int, ...], grads: Tensors) -> Tensors:
    """Take the unit's gradients from autograd; what is returned is what the leaves receive."""
    lane = unit.lane
    for bucket in unit.gathered:
        if bucket.phase is not Phase.GATHERED and not bucket.in_place:
            raise RuntimeError(UNSEEN.format(name=unit.name))
    task = running_task(unit)
    leaves = wanted_leaves([unit.entries[i].accumulator or _accumulator(unit, i) for i in trained])
    if leaves is None or torch.is_grad_enabled():
        return _reduce_now(unit, task, trained, grads)
    drain(lane)
    routes = routes_of(unit, trained)
    for route in routes:
        pack(route.bucket, route.pick(grads))
        if not unit.switches.is_last:
            route.bucket.owed.update(unit.entries[i] for i in trained)
    nested = unit.task is not None and unit.task is not task and unit.task.alive
    if nested:
        # A checkpointed part of the unit runs its own backward inside the unit's: what it sends
        # is added up, and reduced once with the rest.
        assert unit.task is not None
        unit.task.packed += [(unit, route.bucket) for route in routes]
        return (None,) * len(grads)
    task.packed += [(unit, route.bucket) for route in routes if not route.is_own]
    if Hold.RETAINED in unit.holds:
        task.consumed.append(unit)
    close_backward(unit)
    if unit.switches.sync:
        wanted = None
        if not all(leaves):
            wanted = frozenset(unit.entries[i] for i, w in zip(trained, leaves, strict=True) if w)
        for route in routes:
            if route.is_own:
                lane.reductions.append(start_reduce(unit, route.bucket, wanted))
    return (None,) * len(grads)


def _accumulator(unit: Unit, index: int) -> Any:
    """The node that autograd accumulates the leaf's gradient with; it lives as long as the leaf."""
    entry = unit.entries[index]
    with raw(), torch.enable_grad():
        entry.accumulator = torch.autograd.graph.get_gradient_edge(entry.param).node
    return entry.accumulator


def _reduce_now(unit: Unit, task: Task, trained: tuple[int, ...], grads: Tensors) -> Tensors:
    """Reduce at once and return the sharded gradients, with a graph over them if asked for."""
    drain(unit.lane)
    entries = [unit.entries[i] for i in trained]
    results: dict[Entry, torch.Tensor] = {}
    for route in routes_of(unit, trained):
        if route.bucket.mirror is not None:
            route.bucket.mirror.reconcile()
            task.mirrors.append(route.bucket.mirror)
        picked = zip(route.bucket.entries, route.pick(grads), strict=True)
        given = {entry: grad for entry, grad in picked if grad is not None}
        reduced = Reduce.apply(unit, route.bucket, list(given), *given.values())
        results.update(zip(given, reduced, strict=True))
    for entry, grad in results.items():
        if entry.spec.hooks.gradient:
            results[entry] = run_gradient_hooks(entry, grad)
    if torch.is_grad_enabled():
        keep(unit, Hold.RETAINED)
    elif Hold.RETAINED in unit.holds:
        task.consumed.append(unit)
    close_backward(unit)
    return tuple(results.get(entry) for entry in entries)


class Reduce(torch.autograd.Function):
    """Full gradients of some entries of a bucket to this rank's slices of their average."""

    @staticmethod
    @untraced
    def forward(
        ctx: Any, unit: Unit, bucket: Bucket, given: list[Entry], *grads: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.unit, ctx.bucket, ctx.given = weakref.ref(unit), weakref.ref(bucket), given
        ctx.dtype = grads[0].dtype if grads else bucket.full.dtype
        by_entry = dict(zip(given, grads, strict=True))
        flat = reduce_apart(unit, bucket, [by_entry.get(entry) for entry in bucket.entries])
        pieces = flat.split(bucket.splits)
        return tuple([pieces[bucket.pieces[entry.index]].clone() for entry in given])

    @staticmethod
    @untraced
    def backward(ctx: Any, *slices: torch.Tensor) -> Any:
        unit, bucket = ctx.unit(), ctx.bucket()
        return (None, None, None, *Spread.apply(unit, bucket, ctx.given, ctx.dtype, *slices))


class Spread(torch.autograd.Function):
    """Slices of some entries of a bucket to the full tensors, gathered over the shard group."""

    @staticmethod
    @untraced
    def forward(
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
    @untraced
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
        parts = list(whole.chunk(group.size))
        comm.gather_parts(whole, parts, parts[group.rank], group).wait()
    return full
