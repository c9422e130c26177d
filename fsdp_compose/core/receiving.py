"""The one way for gradients to arrive: from autograd, whatever connected the parameters, to leaves.

An ordinary backward hands the gradients to the engine, which reduces them while backward goes on
and sets ``.grad`` itself; autograd is told None. When the caller asked for the gradients
(``autograd.grad``) or for a graph over them (``create_graph``), they are reduced on the spot by
``Reduce``, which is differentiable: its backward is ``Spread``, a gather, whose backward is again
``Reduce``. With the loss averaged over ranks, ``Reduce`` averages and ``Spread`` does not scale.

A parameter's gradient may arrive in parts: from units that share it, or from several forwards.
Where somebody looks at gradients as they come (a hook), or units share the bucket, the parts of one
backward are added up and reduced once.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from fsdp_compose.base.torch_private import graph_task_id, node_will_run, untraced, wanted_leaves
from fsdp_compose.comm import collectives as comm
from fsdp_compose.core.bucket import Bucket, Entry, Phase
from fsdp_compose.core.gathering import (
    announce,
    forget_inner,
    gather,
    gathered_nbytes,
    note_kept,
    refresh_handed_out,
    refresh_stale,
    release,
    spread_inner,
    wait_gathered,
)
from fsdp_compose.core.guards.used_parameters import unite
from fsdp_compose.core.passes import (
    close_backward,
    consume,
    retain,
    running_task,
    show_leaves_after_backward,
)
from fsdp_compose.core.records import Route
from fsdp_compose.core.reducing import Arrival, drain, pack, reduce_apart, start_reduce
from fsdp_compose.core.state import Lane, Task, Unit, routes_of, unit_of

Tensors = tuple[torch.Tensor | None, ...]


def receive(unit: Unit, trained: tuple[int, ...], grads: Tensors, node: Any) -> Tensors:
    """Take gradients of the unit's entries ``trained`` from autograd, at ``node``.

    Returns:
        what the leaves receive: None where the engine sets the gradient.
    """
    task = running_task(unit)
    wanted = wanted_leaves([leaf for leaf, _ in node.next_functions])
    node.received_in = task.id
    if wanted is None or torch.is_grad_enabled():
        return _reduce_now(unit, task, trained, grads, node)
    if not all(wanted):
        pairs = zip(grads, wanted, strict=True)
        grads = tuple([grad if is_wanted else None for grad, is_wanted in pairs])
    take(unit, task, trained, grads, node)
    return (None,) * len(grads)


def take(unit: Unit, task: Task, trained: tuple[int, ...], grads: Tensors, node: Any) -> None:
    """Add gradients to what is reduced in this backward, and reduce what is complete.

    Args:
        node: where they arrived; None: in a compiled graph.
    """
    schedule = unit.lane.schedule
    routes = routes_of(unit, trained)
    parts = [Arrival(r.bucket, r.pick(grads), r.trained, node) for r in routes]
    if unit.run.task is not None and unit.run.task is not task and unit.run.task.alive:
        # A checkpointed part of the unit runs its own backward inside the unit's: what it sends
        # is added up, and reduced once with the rest.
        schedule.work.finish_reductions()
        for part in parts:
            schedule.work.pack(part)
        unit.run.task.packed += [part.bucket for part in parts]
        return
    ends_backward = node is not None and node.ends_pass
    if ends_backward:
        consume(unit, node)
        show_leaves_after_backward(unit)
    schedule.receive(unit, parts, ends_backward)


class EngineWork:
    """Carries out what the schedule of a device decides; see ``schedule.Work``."""

    announce = staticmethod(announce)
    gather = staticmethod(gather)
    wait = staticmethod(wait_gathered)
    release = staticmethod(release)
    note_kept = staticmethod(note_kept)
    spread = staticmethod(spread_inner)
    forget_spread = staticmethod(forget_inner)

    def __init__(self, lane: Lane) -> None:
        self.lane = lane

    def gathered_nbytes(self, unit: Unit) -> int:
        return sum(map(gathered_nbytes, unit.gathered))

    def held_nbytes(self) -> int:
        buckets = {b for unit in self.lane.units if unit.holds for b in unit.gathered}
        return sum(gathered_nbytes(b) for b in buckets if b.phase is not Phase.SHARDED)

    def reread(self, unit: Unit, in_backward: bool) -> None:
        (refresh_handed_out if in_backward else refresh_stale)(unit)

    def pack(self, part: Arrival) -> None:
        pack(part.bucket, part.grads)
        part.bucket.arriving.trained |= part.trained

    def is_complete(self, part: Arrival) -> bool:
        return unit_of(part.bucket).switches.sync and not _is_awaited(part.bucket, part.node)

    def postpone(self, part: Arrival) -> None:
        if unit_of(part.bucket).switches.sync:
            next(iter(self.lane.tasks.values())).packed.append(part.bucket)

    def reduce(self, part: Arrival) -> None:
        self.lane.reductions.append(start_reduce(part.bucket))

    def finish_reductions(self) -> None:
        drain(self.lane)


def _end_pass(unit: Unit, node: Any) -> None:
    consume(unit, node)
    close_backward(unit)


def _is_awaited(bucket: Bucket, node: Any) -> bool:
    """Whether more gradients of the bucket arrive in this backward, that these have to wait for."""
    unit = unit_of(bucket)
    is_seen = bucket.residence.is_hooked or bool(unit.post_reduce_hooks)
    if node is not None and not node.ends_pass:
        is_seen = True  # few, and what a forward brings may follow
    if not (is_seen or bucket.users.borrowers):
        return False
    if node is None or len(unit.lane.tasks) > 1:
        return True  # a compiled graph, or a backward inside another: no telling what may follow
    users = unit, *bucket.users.borrowers
    return any(_is_expected(node) for user in users for node in tuple(user.graphs.nodes))


def _is_expected(node: Any) -> bool:
    return node.received_in != graph_task_id() and node_will_run(node)


def _reduce_now(
    unit: Unit, task: Task, trained: tuple[int, ...], grads: Tensors, node: Any
) -> Tensors:
    """Reduce at once and return the sharded gradients, with a graph over them if asked for."""
    results = reduce_at_once(unit, task, trained, grads)
    if node.ends_pass and torch.is_grad_enabled():
        retain(unit, node)
        close_backward(unit)
    elif node.ends_pass:
        _end_pass(unit, node)
    return tuple(results.get(unit.entries[i]) for i in trained)


def reduce_at_once(
    unit: Unit, task: Task, trained: tuple[int, ...], grads: Tensors
) -> dict[Entry, torch.Tensor]:
    """The sharded gradients of those entries that any rank used, reduced by themselves."""
    drain(unit.lane)
    results: dict[Entry, torch.Tensor] = {}
    for route in routes_of(unit, trained):
        mirror = route.bucket.history.mirror
        if mirror is not None:
            mirror.reconcile()
            task.mirrors.append(mirror)
        results.update(_reduce_route(route, grads))
    return results


def _reduce_route(route: Route, grads: Tensors) -> dict[Entry, torch.Tensor]:
    """The sharded gradients of those entries of a bucket that any rank used."""
    bucket, given = route.bucket, route.pick(grads)
    used = comm.Flags(sum(1 << i for i, g in enumerate(given) if g is not None), len(given))
    unite(bucket, used)
    entries = [e for e in bucket.entries if used.bits & route.trained & 1 << e.index]
    full = [zero_gradient(e, bucket) if (g := given[e.index]) is None else g for e in entries]
    reduced = Reduce.apply(bucket, entries, route.trained, *full)
    return dict(zip(entries, reduced, strict=True))


def zero_gradient(entry: Entry, bucket: Bucket) -> torch.Tensor:
    """What this rank adds to the gradient of a parameter that only others used."""
    return torch.zeros(entry.spec.shape, dtype=bucket.full.dtype, device=bucket.mesh.device)


class Reduce(torch.autograd.Function):
    """Full gradients of some entries of a bucket to this rank's slices of their average."""

    @staticmethod
    @untraced
    def forward(
        ctx: Any, bucket: Bucket, given: list[Entry], trained: int, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.bucket, ctx.given, ctx.trained = weakref.ref(bucket), given, trained
        ctx.dtype = grads[0].dtype if grads else bucket.full.dtype
        by_entry = dict(zip(given, grads, strict=True))
        flat = reduce_apart(bucket, [by_entry.get(entry) for entry in bucket.entries], trained)
        pieces = flat.split(bucket.views.splits)
        return tuple([pieces[bucket.views.pieces[entry.index]].clone() for entry in given])

    @staticmethod
    @untraced
    def backward(ctx: Any, *slices: torch.Tensor) -> Any:
        spread = Spread.apply(ctx.bucket(), ctx.given, ctx.dtype, *slices)
        return (None, None, None, *spread)


class Spread(torch.autograd.Function):
    """Slices of some entries of a bucket to the full tensors, gathered over the shard group."""

    @staticmethod
    @untraced
    def forward(
        ctx: Any, bucket: Bucket, given: list[Entry], dtype: torch.dtype, *slices: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.bucket, ctx.given = weakref.ref(bucket), given
        shard = torch.zeros_like(bucket.stored, dtype=dtype, device=bucket.mesh.device)
        pieces = shard.split(bucket.views.splits)
        for entry, piece in zip(given, slices, strict=True):
            pieces[bucket.views.pieces[entry.index]].copy_(piece)
        full = gather_flat(bucket, shard, dtype)
        return tuple(
            [full.as_strided(e.spec.shape, e.spec.stride, e.spec.offset).clone() for e in given]
        )

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        trained = sum(1 << entry.index for entry in ctx.given)
        return (None, None, None, *Reduce.apply(ctx.bucket(), ctx.given, trained, *grads))


def gather_flat(bucket: Bucket, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A buffer of its own with every rank's ``shard``, in ``dtype``."""
    group = bucket.mesh.shard
    full = shard.new_empty(bucket.layout.numel, dtype=dtype)
    if full.numel():
        whole = full.view(torch.uint8)
        full.view(group.size, -1)[group.rank].copy_(shard)
        parts = list(whole.chunk(group.size))
        purpose = f"gather unit {bucket.entries[0].spec.unit!r}"
        comm.gather_parts(whole, parts, parts[group.rank], group, purpose).wait()
    return full
