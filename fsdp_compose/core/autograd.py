"""Gathers and reduces as differentiable functions, and receives gradients from autograd.

``Gather`` returns the aliases that a unit's modules read. It is the unit's first node in the graph.
Autograd runs later nodes first: ``Gather.backward`` runs after all other operations of the unit,
before those of earlier units, and gets all gradients at once. Behind it autograd sees one empty
leaf, the unit's anchor, in place of the parameters, and tells it None: the engine sets ``.grad``.
Where the caller asks for the gradients of parameters (``autograd.grad``, ``backward(inputs=)``),
scopes/chosen_gradients.py asks autograd for anchors instead.

An ordinary backward hands the gradients to the engine, which reduces them while backward goes on.
When the caller asked for the gradients or for a graph over them (``create_graph``), ``Reduce``
reduces them at once. Its backward is ``Spread``, a gather, whose backward is ``Reduce`` again. As
the loss is averaged over ranks, ``Reduce`` averages and ``Spread`` does not scale.

A parameter's gradient may arrive in parts: from units that share it, or from several forwards.
Where a hook looks at the gradient, or units share the bucket, the parts of one backward are added
up and reduced once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from itertools import repeat
from operator import is_, is_not
from typing import Any

import torch

from fsdp_compose.base.loops import exhaust
from fsdp_compose.base.torch_private import graph_task_id, plain_apply, untraced
from fsdp_compose.buckets.bucket import Bucket, Entry, Phase
from fsdp_compose.buckets.entries import put_in_classes
from fsdp_compose.buckets.gather import gather_flat
from fsdp_compose.buckets.gradients import pack, zero_gradient
from fsdp_compose.comm import collectives as comm
from fsdp_compose.core.gathering import (
    announce,
    forget_inner,
    gather,
    note_kept,
    release,
    reread,
    spread_inner,
    wait_gathered,
)
from fsdp_compose.core.guards.called_again import find_sources, hand_on, is_reached
from fsdp_compose.core.guards.gathered_memory import any_lies_in
from fsdp_compose.core.guards.inner_parts import join_kept
from fsdp_compose.core.guards.microbatches import refuse_early_gradients
from fsdp_compose.core.guards.parted_gradients import brings_more, is_awaited
from fsdp_compose.core.guards.passed_units import keep_parts
from fsdp_compose.core.guards.trained_entries import leave_out_frozen, trained_entries
from fsdp_compose.core.guards.unread_weights import reads_weights
from fsdp_compose.core.guards.used_parameters import unite_used
from fsdp_compose.core.guards.weight_versions import check_computed, read_versions
from fsdp_compose.core.passes import (
    close_backward,
    consume,
    retain,
    running_task,
    show_leaves_after_backward,
)
from fsdp_compose.core.records import Live, Route
from fsdp_compose.core.reducing import Arrival, drain, reduce_apart, start_reduce, start_together
from fsdp_compose.core.schedule import RETAINED
from fsdp_compose.core.state import Engine, Task, Unit, as_read, routes_of, unit_of

Tensors = tuple[torch.Tensor | None, ...]


def receive(unit: Unit, trained: tuple[int, ...], grads: Tensors, node: Any) -> None:
    """Receive gradients of the unit's entries ``trained`` from autograd.

    Args:
        node: the autograd node at which they arrived; None in a compiled graph.
    """
    if trained_entries(unit) != trained:
        trained, grads = leave_out_frozen(unit, trained, grads)
    task, chosen = unit.run.task, unit.run.chosen
    if task is None or task.id != graph_task_id():
        task = running_task(unit)
    if node is not None:
        node.received_in, node.is_spent = task.id, not task.keeps_graph
    if chosen is not None:
        pairs = zip(trained, grads, strict=True)
        grads = tuple([g if unit.entries[i] in chosen.entries else None for i, g in pairs])
    if chosen is not None and chosen.results is not None:
        _reduce_now(unit, task, trained, grads, node, chosen.results)
    elif torch.is_grad_enabled():
        _reduce_now(unit, task, trained, grads, node, task.results)
    else:
        _take(unit, task, trained, grads, node)


def _take(unit: Unit, task: Task, trained: tuple[int, ...], grads: Tensors, node: Any) -> None:
    """Pack gradients into their buckets, and reduce the buckets that are complete."""
    schedule = unit.engine.schedule
    has_all = not any(map(is_, grads, repeat(None)))
    parts: list[Arrival] = []  # without a comprehension, which would call a function
    for route in unit.links.routes.get(trained) or routes_of(unit, trained):
        given = grads if route.takes_all else route.pick(grads)
        parts.append(Arrival(route.bucket, given, has_all and route.is_whole, route.trained, node))
    if (outer := unit.run.task) is not None and outer is not task and outer.alive:
        # Gradients of a checkpointed part's own backward wait for the others, and are reduced once.
        schedule.work.finish_reductions()
        keep_parts(outer, unit, parts)
        return
    if task.kept:
        parts = [join_kept(task, part) for part in parts]
    ends_backward = node is not None and node.ends_pass
    if ends_backward:
        if RETAINED in unit.holds:
            consume(unit, node)
        show_leaves_after_backward(unit)
    schedule.receive(unit, parts, ends_backward)


class EngineWork:
    """Carries out what the schedule of a device decides; see ``schedule.Work``."""

    announce = staticmethod(announce)
    gather = staticmethod(gather)
    wait = staticmethod(wait_gathered)
    reread = staticmethod(reread)
    release = staticmethod(release)
    note_kept = staticmethod(note_kept)
    spread = staticmethod(spread_inner)
    forget_spread = staticmethod(forget_inner)

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def gathered_nbytes(self, unit: Unit) -> int:
        return sum(bucket.gathered_nbytes for bucket in unit.gathered)

    def held_nbytes(self) -> int:
        buckets = {b for unit in self.engine.units if unit.holds for b in unit.gathered}
        return sum(b.gathered_nbytes for b in buckets if b.phase is not Phase.SHARDED)

    def has_room(self, unit: Unit) -> bool:
        return True

    def reads_gathered(self, unit: Unit, parts: Sequence[Arrival]) -> bool:
        for part in parts:
            given = part.grads if part.is_whole else filter(partial(is_not, None), part.grads)
            if any_lies_in(unit.gathered, given):  # type: ignore[arg-type]
                return True
        return False

    def pack(self, part: Arrival) -> None:
        pack(part.bucket, part.grads, part.is_whole)
        part.bucket.arriving.trained |= part.trained

    def is_complete(self, part: Arrival) -> bool:
        bucket, node, first = part.bucket, part.node, self.engine.schedule.forward_order.first
        unit = unit_of(bucket)
        hooks = bucket.residence.is_hooked or unit.post_reduce_hooks or unit.switches.comm_hook
        is_part = node is not None and not node.ends_pass  # more may follow
        waits = hooks or is_part or bucket.mesh.microbatches or bucket.users.is_lent
        if not unit.switches.sync or (waits and is_awaited(unit, bucket, node)):
            return False
        # The first of the forward is the last here, and waits until autograd frees its gradients.
        is_last = node is not None and first is not None and first() is unit
        return not is_last or brings_more(unit, bucket)

    def postpone(self, part: Arrival) -> None:
        self.engine.awaiting.add(part.bucket)
        if unit_of(part.bucket).switches.sync:
            next(iter(self.engine.tasks.values())).packed.append(part.bucket)
            self.engine.streams.on(self.engine.streams.reduce)  # which reads what was packed here
        else:
            part.bucket.arriving.postponed = part.bucket.residence.awaits = True

    def reduce(self, parts: Sequence[Arrival]) -> None:
        together = start_together([p.bucket for p in parts]) if len(parts) > 1 else ()
        self.engine.reductions += together
        for part in () if together else parts:  # each is known before the next, which may fail
            self.engine.reductions.append(start_reduce(part.bucket))

    def finish_reductions(self) -> None:
        drain(self.engine)


def _reduce_now(
    unit: Unit,
    task: Task,
    trained: tuple[int, ...],
    grads: Tensors,
    node: Any,
    results: dict[Entry, torch.Tensor],
) -> None:
    """Reduce now, and add the sharded gradients, with a graph over them if wanted, to ``results``.

    Only entries that some rank used are reduced. Gradients that wait for more are left alone.
    """
    drain(unit.engine)
    refuse_early_gradients(unit)
    for route in routes_of(unit, trained):
        if (mirror := route.bucket.history.mirror) is not None:
            mirror.share_gradients()
        for entry, grad in _reduce_route(route, grads).items():
            results[entry] = results[entry] + grad if entry in results else grad
    if node is not None and node.ends_pass:
        (retain if torch.is_grad_enabled() else consume)(unit, node)
        close_backward(unit)


def _reduce_route(route: Route, grads: Tensors) -> dict[Entry, torch.Tensor]:
    """The sharded gradients of those entries of a bucket that any rank used."""
    bucket, given = route.bucket, route.pick(grads)
    bits = sum(1 << i for i, g in enumerate(given) if g is not None)
    used = comm.Flags(bits, len(given), route.trained)
    unite_used(bucket, used)
    entries = [e for e in bucket.entries if used.bits & 1 << e.index]
    full = [zero_gradient(e, bucket) if (g := given[e.index]) is None else g for e in entries]
    return dict(zip(entries, Reduce.apply(bucket, entries, route.trained, *full), strict=True))


class Reduce(torch.autograd.Function):
    """Averages full gradients of some entries over the ranks; returns slices where shards lie."""

    @staticmethod
    @untraced
    def forward(
        ctx: Any, bucket: Bucket, given: list[Entry], trained: int, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.bucket, ctx.given = weakref.ref(bucket), given
        ctx.dtype = grads[0].dtype if grads else bucket.full.dtype
        by_entry = dict(zip(given, grads, strict=True))
        flat = reduce_apart(bucket, [by_entry.get(entry) for entry in bucket.entries], trained)
        pieces, places = flat.split(bucket.views.splits), bucket.views.pieces
        return tuple([pieces[places[e.index]].to(bucket.stored.device, copy=True) for e in given])

    @staticmethod
    @untraced
    def backward(ctx: Any, *slices: torch.Tensor) -> Any:
        return (None, None, None, *Spread.apply(ctx.bucket(), ctx.given, ctx.dtype, *slices))


class Spread(torch.autograd.Function):
    """Gathers slices of some entries over the shard group; returns the full tensors."""

    @staticmethod
    @untraced
    def forward(
        ctx: Any, bucket: Bucket, given: list[Entry], dtype: torch.dtype, *slices: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.bucket, ctx.given = weakref.ref(bucket), given
        shard = bucket.full.new_zeros(bucket.stored.shape, dtype=dtype)
        pieces = shard.split(bucket.views.splits)
        for entry, piece in zip(given, slices, strict=True):
            pieces[bucket.views.pieces[entry.index]].copy_(piece)
        specs = [entry.spec for entry in given]
        full = gather_flat(bucket, shard, dtype, "gradients of gradients")
        return tuple([full.as_strided(s.shape, s.stride, s.offset).clone() for s in specs])

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        trained = sum(1 << entry.index for entry in ctx.given)
        return (None, None, None, *Reduce.apply(ctx.bucket(), ctx.given, trained, *grads))


DELETED = (
    "backward reached a sharded module that was undone or deleted after its forward. Keep a "
    "reference to the model, and undo nothing, until backward has run."
)


def view_parameters(unit: Unit, trained: tuple[int, ...]) -> Sequence[torch.Tensor]:
    """The unit's gathered parameters by entry, those of ``trained`` connected to autograd."""
    versions = read_versions(unit)
    outputs, live = unit.links.aliases, unit.run.live
    if trained:
        sources: Sequence[torch.Tensor] = (unit.links.anchor,)
        if unit.engine.streams.gather or (live and live.pass_id == unit.engine.pass_id):
            sources = find_sources(unit, trained, versions)
        outputs = _gather(weakref.ref(unit), trained, versions, *sources)
    tensors = outputs
    if trained and len(trained) != len(unit.links.aliases):
        tensors = list(unit.links.aliases)
        for index, output in zip(trained, outputs, strict=True):
            tensors[index] = output
    read = as_read(unit, tensors) if unit.links.dtensors else tensors
    exhaust(map(setattr, read, repeat("__dict__"), unit.links.attributes))
    if unit.links.of_class:
        read = put_in_classes(read, unit.entries, unit.links.of_class)
    unit.run.live = Live(read, unit.engine.pass_id, trained, versions, outputs)
    return read


def is_current(unit: Unit, live: Live, trained: tuple[int, ...]) -> bool:
    """Whether one backward may serve both forwards: the unit was held, or ran last, unchanged."""
    ran = unit.engine.schedule.forward_order.current  # which a checkpoint adds nothing to
    is_next = graph_task_id() != -1 or len(unit.holds) > 1 or (ran and ran[-1][-1]() is unit)
    return bool(is_next) and live.trained == trained and live.versions == read_versions(unit)


class Gather(torch.autograd.Function):
    """Connects the unit's aliases to autograd, and reduces their gradients."""

    @staticmethod
    @untraced
    def forward(
        ctx: Any,
        unit_ref: weakref.ref[Unit],
        trained: tuple[int, ...],
        versions: list[tuple[int, ...]],
        *sources: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.unit_ref, ctx.trained, ctx.versions = unit_ref, trained, versions
        ctx.materialize_grads = False
        unit = unit_ref()
        assert unit is not None
        ctx.ends_pass, ctx.received_in, ctx.is_spent = True, None, False
        ctx.follows, ctx.handed = sources[0] is not unit.links.anchor, None
        unit.graphs.nodes.add(ctx)
        aliases = unit.links.aliases
        outputs = aliases if len(trained) == len(aliases) else map(aliases.__getitem__, trained)
        return tuple(map(torch.Tensor.detach, outputs))

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        unit = ctx.unit_ref()
        if unit is None:
            raise RuntimeError(DELETED)
        is_read = not unit.graphs.unread or reads_weights(unit)
        if is_read and (ctx.handed is None or is_reached(unit, ctx, grads)):
            check_computed(unit, ctx.versions)
        handed = hand_on(unit, ctx, grads) if ctx.follows else (None,)
        receive(unit, () if ctx.follows else ctx.trained, () if ctx.follows else grads, ctx)
        return None, None, None, *handed


_gather = plain_apply(Gather)  # under a transform connect.py gathers
