"""Full parameters outside forward: scopes that open units, and streams of full tensors.

``unshard``/``reshard`` keep a unit gathered, in the compute dtype. ``gathered`` opens units for a
block of code: inside it every module holds full tensors in the storage dtype, of which each bucket
has one buffer of its own. Autograd keeps that buffer as it keeps any saved tensor, so a backward
may come inside the scope, after it, or never, and nothing has to be gathered again for it. All
uses in one scope meet in one node per bucket, whose backward is one gradient reduction.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsdp_compose import comm
from fsdp_compose.bucket import Bucket, Entry, alias
from fsdp_compose.engine import (
    drain,
    drop,
    install,
    install_leaves,
    keep,
    land,
    pack,
    prefetch,
    refresh_stale,
    requires_grad,
    run_gradient_hooks,
    running_task,
    start_reduce,
    wait_gathered,
)
from fsdp_compose.gather import Reduce, gather_flat
from fsdp_compose.sharded import own_slice, to_local
from fsdp_compose.state import Hold, Lane, Opened, Unit, _lanes, find_state, iter_units, owner_of
from fsdp_compose.torch_private import parameter_slots, raw, wanted_leaves

Tensors = tuple[torch.Tensor | None, ...]

DEFAULT_BUCKET_BYTES = 256 << 20


# Which units


def _own_units(module: nn.Module, caller: str) -> list[Unit]:
    """The unit of ``module``, or of what is in it when it is not a unit itself."""
    state = find_state(module)
    units = [state.unit] if state is not None else list(iter_units(module))
    if not units:
        raise ValueError(
            f"{caller}: {type(module).__name__} is not a unit and contains none; pass a module "
            "that fully_shard was called on, or one that contains such modules. To reach the "
            "parameters of a part of a unit, use fsdp_compose.gathered(module)."
        )
    return units


def _reading_units(module: nn.Module, recurse: bool) -> list[Unit]:
    """Units that ``module`` reads parameters of, whole, and those tied to them, in a fixed order."""
    by_slots = {
        id(values): unit
        for lane in _lanes.values()
        for unit in lane.units
        for values, _, _ in unit.places
    }
    found: dict[int, Unit] = {}
    pending = [module]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        unit = by_slots.get(id(parameter_slots(current)))
        if unit is not None:
            found.setdefault(id(unit), unit)
        children = list(current.children())
        if not recurse:
            children = [child for child in children if find_state(child) is None]
        pending += reversed(children)
    units = list(found.values())
    for unit in units:  # grows while it is walked
        mine = {id(bucket) for bucket in unit.gathered}
        tied = [
            other
            for other in unit.lane.units
            if id(other) not in found and any(id(bucket) in mine for bucket in other.gathered)
        ]
        for other in sorted(tied, key=lambda u: (u.name, u.entries[0].spec.fqn)):
            found[id(other)] = other
            units.append(other)
    return units


def _is_running(unit: Unit) -> bool:
    """Whether the unit's modules hold what a pass under way put there."""
    if unit.opened is not None and unit.opened.calls:
        return True
    return unit.calls > 0 or (unit.task is not None and unit.task.alive)


# Full tensors that autograd connects to the sharded leaves


@dataclass(eq=False)
class _Reach:
    """Where the gradients of full tensors go; it lives as long as a graph that uses them."""

    unit: weakref.ref[Unit]
    bucket: weakref.ref[Bucket]
    entries: list[Entry]


class _Connect(torch.autograd.Function):
    """Full tensors that are at hand, as functions of the sharded leaves."""

    @staticmethod
    def forward(
        ctx: Any, reach: _Reach, fulls: list[torch.Tensor], *leaves: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.reach = reach
        ctx.set_materialize_grads(False)
        return tuple([full.detach() for full in fulls])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return (None, None, *_receive(ctx.reach, grads))


def _receive(reach: _Reach, grads: Tensors) -> Tensors:
    """Hand gradients of full tensors to the engine; what is returned is what the leaves receive."""
    unit, bucket, entries = reach.unit(), reach.bucket(), reach.entries
    if unit is None or bucket is None:
        raise RuntimeError(
            "backward reached a sharded module that was deleted after its parameters were used; "
            "keep a reference to the model until backward has run."
        )
    lane = unit.lane
    task = running_task(lane)
    drain(lane)
    wanted = wanted_leaves([_accumulator(entry) for entry in entries])
    if wanted is None or not all(wanted) or torch.is_grad_enabled():
        return _reduce_now(unit, bucket, entries, grads)
    by_entry = dict(zip(entries, grads, strict=True))
    pack(bucket, [by_entry.get(entry) for entry in bucket.entries])
    if unit.switches.sync:
        if unit.live is not None and unit.live.pass_id:
            task.packed.append((unit, bucket))  # goes with what its forward's backward brings
        else:
            lane.reductions.append(start_reduce(unit, bucket))
    return (None,) * len(grads)


def _reduce_now(unit: Unit, bucket: Bucket, entries: list[Entry], grads: Tensors) -> Tensors:
    """Reduce on the spot, differentiably, for ``autograd.grad`` and ``create_graph``."""
    if bucket.packed:
        raise RuntimeError(
            f"unit {unit.name!r} has gradients that were accumulated without synchronisation, so "
            "its gradients cannot be returned by autograd.grad now; call "
            "fsdp_compose.reduce_grads(module) first."
        )
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


def _accumulator(entry: Entry) -> Any:
    if entry.accumulator is None:
        with raw(), torch.enable_grad():
            entry.accumulator = torch.autograd.graph.get_gradient_edge(entry.param).node
    return entry.accumulator


def _connect(
    units: Sequence[Unit], fulls: dict[Entry, torch.Tensor], reaches: list[_Reach]
) -> dict[Entry, torch.Tensor]:
    """``fulls`` with those of trained parameters connected to their leaves, a node per bucket."""
    connected = dict(fulls)
    for unit in units:
        for bucket in unit.buckets:
            with raw():
                entries = [e for e in bucket.entries if e in fulls and requires_grad(e.param)]
            if not entries:
                continue
            reach = _Reach(weakref.ref(unit), weakref.ref(bucket), entries)
            reaches.append(reach)
            outputs = _Connect.apply(
                reach, [fulls[e] for e in entries], *[e.param for e in entries]
            )
            for entry, output in zip(entries, outputs, strict=True):
                output._is_param = True  # isinstance(p, nn.Parameter) holds, as in a plain module
                connected[entry] = output
    return connected


# unshard, reshard, prefetch


@dataclass(eq=False)
class _Unsharded(Opened):
    """A unit between ``unshard`` and ``reshard``."""

    versions: list[int] = field(default_factory=list)


_graphs: weakref.WeakKeyDictionary[Unit, weakref.WeakSet[_Reach]] = weakref.WeakKeyDictionary()
"""Graphs over the gathered parameters of a unit, which must not be released before they are."""


class UnshardHandle:
    """An ``unshard`` under way."""

    def __init__(self, units: list[Unit]) -> None:
        self._units = units

    def wait(self) -> None:
        """Make the parameters readable on the current stream, and let the modules hold them."""
        units, self._units = self._units, []
        for unit in units:
            if Hold.USER in unit.holds:
                wait_gathered(unit)
                _show(unit)


def unshard(module: nn.Module, async_op: bool = False) -> UnshardHandle | None:
    """Gather a unit, in its compute dtype, and keep it gathered until ``reshard(module)``.

    Its forwards then gather nothing, and its modules hold full tensors between them, through which
    gradients flow to the sharded parameters. To write, use ``gathered(module, writeback=True)``.
    After an optimizer step the next forward gathers the new values, and so does ``unshard``.

    Args:
        module: a unit, or a module that contains units: all of them are gathered.
        async_op: return at once, with a handle whose ``wait()`` is called before parameters are
            read; a forward waits by itself.

    Raises:
        ValueError: ``module`` is not a unit and contains none.
    """
    units = _own_units(module, "unshard")
    for unit in units:
        if unit.holds & {Hold.KEPT, Hold.RETAINED, Hold.USER} and not _is_running(unit):
            refresh_stale(unit)
        keep(unit, Hold.USER)
    handle = UnshardHandle(units)
    if async_op:
        return handle
    handle.wait()
    return None


def _show(unit: Unit) -> None:
    if unit.opened is not None:
        return
    reaches: list[_Reach] = []
    fulls = dict(zip(unit.entries, unit.aliases, strict=True))
    with torch.enable_grad():
        shown = _connect(_owners(unit), fulls, reaches)
    graphs = _graphs.setdefault(unit, weakref.WeakSet())
    for reach in reaches:
        graphs.add(reach)
        weakref.finalize(reach, _graph_is_gone, weakref.ref(unit)).atexit = False
    unit.opened = _Unsharded(
        tensors=[shown[entry] for entry in unit.entries],
        in_forward=False,
        versions=[full._version for full in unit.aliases],
    )
    if not _is_running(unit):
        install_leaves(unit)


def _owners(unit: Unit) -> list[Unit]:
    """The unit and those whose parameters it borrows."""
    lent = {id(owner_of(entry)) for entry in unit.borrowed}
    others = [u for u in unit.lane.units if any(id(bucket) in lent for bucket in u.buckets)]
    return [unit, *(other for other in others if other is not unit)]


def _graph_is_gone(ref: weakref.ref[Unit]) -> None:
    unit = ref()
    if unit is not None and not isinstance(unit.opened, _Unsharded) and not _graphs.get(unit):
        drop(unit, Hold.USER)


def reshard(module: nn.Module) -> None:
    """Withdraw ``unshard`` and release what is gathered, as soon as nothing needs it any more.

    What a running forward or backward reads stays until it is done, and so does what a graph over
    parameters that were read directly still needs.

    Raises:
        ValueError: ``module`` is not a unit and contains none.
        RuntimeError: a parameter was written since ``unshard``, which would be lost.
    """
    edited: Entry | None = None
    units = _own_units(module, "reshard")
    for unit in units:
        opened = unit.opened
        if isinstance(opened, _Unsharded):
            for entry, full, version in zip(
                unit.entries, unit.aliases, opened.versions, strict=True
            ):
                if full._version != version:
                    edited = edited or entry
            unit.opened = None
            if not _is_running(unit):
                install_leaves(unit)
            opened.tensors = []
            del opened
        reasons = [Hold.PREFETCH]
        if not _graphs.get(unit):
            reasons.append(Hold.USER)
        if "hidden" not in unit.warned:
            reasons.append(Hold.KEPT)
        for reason in reasons:
            drop(unit, reason)
    if edited is not None:
        raise RuntimeError(
            f"reshard: parameter {edited.spec.fqn!r} of unit {edited.spec.unit!r} was written "
            "between unshard and reshard, and the edit would be lost; edit parameters inside "
            "`with fsdp_compose.gathered(module, writeback=True):`."
        )


def prefetch_units(module: nn.Module, modules: nn.Module | Iterable[nn.Module]) -> None:
    """Start gathering the units of ``modules`` now, ahead of their use in the pass of ``module``.

    What the pass does not use is released at its end, and by an optimizer step.

    Raises:
        ValueError: one of them is not a unit and contains none.
    """
    _own_units(module, "prefetch_units")
    wanted = [modules] if isinstance(modules, nn.Module) else list(modules)
    for target in wanted:
        for unit in _own_units(target, "prefetch_units"):
            prefetch(unit.lane, [unit])


def reduce_grads(module: nn.Module) -> None:
    """Reduce the gradients that ``module``'s units accumulated without synchronisation.

    Afterwards they are in ``.grad``, averaged over all ranks. Every rank must call it, outside
    backward; where nothing waits it does nothing.

    Raises:
        ValueError: ``module`` contains no unit.
    """
    units = list(iter_units(module)) or _own_units(module, "reduce_grads")
    lanes: dict[int, Lane] = {}
    for unit in units:
        lanes[id(unit.lane)] = unit.lane
        drain(unit.lane)
        deferred, unit.switches.all_reduce = not unit.switches.all_reduce, True
        try:
            for bucket in unit.buckets:
                if bucket.packed or bucket.partial is not None:
                    if not bucket.packed:
                        pack(bucket, [None] * len(bucket.entries))
                    unit.lane.reductions.append(start_reduce(unit, bucket))
                    drain(unit.lane)
        finally:
            unit.switches.all_reduce = not deferred
    for lane in lanes.values():
        land(lane)


# gathered


@dataclass(frozen=True)
class _Options:
    writeback: bool
    with_grads: bool
    rank0_only: bool
    offload_to_cpu: bool
    connected: bool


@dataclass(eq=False)
class _Scope(Opened):
    """A unit inside ``gathered``."""

    options: _Options = field(default=None)  # type: ignore[assignment]
    is_here: bool = True  # this rank has the full tensors
    outer: Opened | None = None
    before: list[Any] = field(default_factory=list)  # what the modules held, by entry
    versions: list[int] = field(default_factory=list)
    leaf_versions: list[int] = field(default_factory=list)
    grads: list[tuple[torch.Tensor, int] | None] = field(default_factory=list)


@contextmanager
def gathered(
    module: nn.Module,
    writeback: bool = False,
    with_grads: bool = False,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    recurse: bool = True,
) -> Iterator[nn.Module]:
    """Inside the scope, every parameter under ``module`` is full, in the dtype it is stored in.

    Units that ``module`` reads from are opened whole. Their forwards inside the scope read the
    scope's tensors, cast to the compute dtype, and communicate nothing. One gather per bucket, on
    entry; all ranks must enter.

    With grad mode on, gradients of whatever is computed from the tensors reach the sharded
    parameters, reduced once per scope and bucket, in a backward inside the scope or after it. Every
    trained parameter of such a bucket then has a gradient, zero where it was not used. In a scope
    entered under ``no_grad``, or with ``with_grads``, ``rank0_only`` or ``offload_to_cpu``, the
    tensors are leaves; a gradient that would get lost there raises.

    Args:
        module: any module; it need not be a unit.
        writeback: on leaving, write tensors that were edited or replaced back to the shards. Each
            rank writes the slice it owns from its own tensors: make the same edit on every rank,
            or use ``rank0_only``. Not on an exception: the parameters are then as before.
        with_grads: ``.grad`` holds full gradients; with ``writeback`` they are written back too.
        rank0_only: only rank 0 of each mesh gets full tensors; with ``writeback`` its edits reach
            all ranks.
        offload_to_cpu: the full tensors are in host memory.
        recurse: also open units nested in ``module``.

    Raises:
        RuntimeError: a parameter was edited without ``writeback``, replaced by something of another
            shape, or stepped by an optimizer inside a scope with ``writeback``; or the scope has
            ``writeback`` inside the unit's own forward or backward.
    """
    leaf_mode = with_grads or rank0_only or offload_to_cpu
    connected = torch.is_grad_enabled() and not leaf_mode
    options = _Options(writeback, with_grads, rank0_only, offload_to_cpu, connected)
    units = _reading_units(module, recurse)
    _check_entry(units, options)
    with torch.inference_mode(False):
        _open(units, options)
    try:
        yield module
    except BaseException:
        _put_back(units)
        _settle_rank0(units, options, failed=True)
        raise
    replaced = {unit: _replacements(unit) for unit in units}
    scopes = {unit: unit.opened for unit in units}
    _put_back(units)
    with torch.no_grad():
        _leave(units, scopes, replaced, options)  # type: ignore[arg-type]


summon_full_params = gathered


def _check_entry(units: list[Unit], options: _Options) -> None:
    for unit in units:
        if options.writeback and _is_running(unit):
            raise RuntimeError(
                f"gathered: writeback inside a forward or backward of unit {unit.name!r}, whose "
                "graph uses the parameters as they are; write before or after the pass."
            )
        if options.with_grads:
            check_reduced(unit, "gathered(with_grads=True)")
        outer = unit.opened
        if isinstance(outer, _Scope) and (
            outer.options.rank0_only != options.rank0_only
            or outer.options.offload_to_cpu != options.offload_to_cpu
        ):
            raise RuntimeError(
                f"gathered: unit {unit.name!r} is already open in a scope with other rank0_only "
                "or offload_to_cpu; leave that scope first."
            )


def check_reduced(unit: Unit, caller: str) -> None:
    """Raise when gradients of the unit wait to be reduced (D12)."""
    for bucket in unit.buckets:
        if is_open(bucket):
            raise RuntimeError(
                f"{caller}: the gradient of {bucket.entries[0].spec.fqn!r} (unit {unit.name!r}) "
                "was accumulated without synchronisation and is not in .grad yet; run the last "
                "backward outside no_sync(), or call fsdp_compose.reduce_grads(module) first."
            )


def is_open(bucket: Bucket) -> bool:
    """Whether the bucket holds gradients that are not in ``.grad``."""
    return bucket.packed or bucket.partial is not None or bucket.waiting_grad is not None


def _open(units: list[Unit], options: _Options) -> None:
    fulls: dict[Entry, torch.Tensor] = {}
    grads: dict[Entry, torch.Tensor | None] = {}
    for unit in units:
        here = _is_here(unit, options)
        outer = unit.opened
        reused = dict(zip(unit.entries, outer.tensors, strict=True)) if outer is not None else {}
        for bucket in unit.buckets:
            if isinstance(outer, _Scope):
                fulls.update((entry, reused[entry]) for entry in bucket.entries)
            else:
                fulls.update(_full_parameters(bucket, here, options))
            if options.with_grads:
                grads.update(_full_grads(bucket, here, options))
    shown = _dress(units, fulls, grads, options)
    for unit in units:
        before = [None] * len(unit.entries)
        for values, name, index in unit.places:
            before[index] = values.get(name)
        tensors = [shown[entry] for entry in unit.entries]
        unit.opened = scope = _Scope(
            tensors=tensors,
            in_forward=True,
            options=options,
            is_here=_is_here(unit, options),
            outer=unit.opened,
            before=before,
        )
        _mark(unit, scope)
        if options.with_grads and scope.is_here:
            found = [tensor.grad for tensor in tensors]
            scope.grads = [None if g is None else (g, g._version) for g in found]
        install(unit, tensors)


def _mark(unit: Unit, scope: _Scope) -> None:
    """Remember the versions of everything, to find edits by."""
    if scope.is_here:
        scope.versions = [tensor._version for tensor in scope.tensors]
    with raw():
        scope.leaf_versions = [entry.param._version for entry in unit.entries]


def _is_here(unit: Unit, options: _Options) -> bool:
    if not options.rank0_only:
        return True
    return all(b.mesh.shard.rank == 0 and b.mesh.replicate.rank == 0 for b in unit.gathered)


def current_shard(bucket: Bucket) -> torch.Tensor:
    """The bucket's shard with what its parameters hold now, on the device that communicates."""
    shard = bucket.shard
    if bucket.residence.moved:
        shard = shard.detach().clone()
        pieces = shard.split(bucket.splits)
        for entry in bucket.entries:
            pieces[bucket.pieces[entry.index]].copy_(to_local(entry.param))
    return shard.to(bucket.mesh.device)


def _full_parameters(
    bucket: Bucket, here: bool, options: _Options
) -> dict[Entry, torch.Tensor]:
    with torch.no_grad():
        shard = current_shard(bucket)
        flat = gather_flat(bucket, shard, shard.dtype)
        if not here:
            return {entry: entry.param for entry in bucket.entries}
        if options.offload_to_cpu:
            flat = flat.cpu()
        return {entry: alias(flat, entry.spec.offset, entry.spec) for entry in bucket.entries}


def _full_grads(
    bucket: Bucket, here: bool, options: _Options
) -> dict[Entry, torch.Tensor | None]:
    """Full gradients by entry; one gather per dtype of gradient in the bucket."""
    local = {e: None if e.param.grad is None else to_local(e.param.grad) for e in bucket.entries}
    found: dict[Entry, torch.Tensor | None] = dict.fromkeys(bucket.entries)
    with torch.no_grad():
        for dtype in dict.fromkeys(g.dtype for g in local.values() if g is not None):
            shard = torch.zeros_like(bucket.shard, dtype=dtype, device=bucket.mesh.device)
            pieces = shard.split(bucket.splits)
            given = [e for e, g in local.items() if g is not None and g.dtype == dtype]
            for entry in given:
                pieces[bucket.pieces[entry.index]].copy_(local[entry])  # type: ignore[arg-type]
            flat = gather_flat(bucket, shard, dtype)
            if here:
                flat = flat.cpu() if options.offload_to_cpu else flat
                found.update((e, alias(flat, e.spec.offset, e.spec)) for e in given)
    return found


def _dress(
    units: list[Unit],
    fulls: dict[Entry, torch.Tensor],
    grads: dict[Entry, torch.Tensor | None],
    options: _Options,
) -> dict[Entry, torch.Tensor]:
    """The tensors that modules hold in the scope: connected to autograd, or leaves."""
    if options.connected:
        plain = {e: t for e, t in fulls.items() if t.grad_fn is None}
        return {**fulls, **_connect(units, {e: t.detach() for e, t in plain.items()}, [])}
    shown: dict[Entry, torch.Tensor] = {}
    for entry, full in fulls.items():
        if full is entry.param or (isinstance(full, nn.Parameter) and not options.with_grads):
            shown[entry] = full  # sharded on this rank, or open in an outer scope
            continue
        with raw():
            trained = requires_grad(entry.param)
        shown[entry] = leaf = nn.Parameter(full.detach(), trained)
        if options.with_grads:
            leaf.grad = grads[entry]
        if trained and not (options.with_grads and options.writeback):
            leaf.register_hook(_LostGradient(entry.spec.fqn))
    return shown


@dataclass(frozen=True)
class _LostGradient:
    """The hook on a leaf of a scope, whose gradient nobody would see."""

    fqn: str

    def __call__(self, grad: torch.Tensor) -> None:
        raise RuntimeError(
            f"a gradient reached {self.fqn!r} through a full tensor that gathered() made for "
            "reading only, and would get lost; enter gathered(module) with grad mode on and "
            "without with_grads, rank0_only and offload_to_cpu, or detach the tensor."
        )


def _replacements(unit: Unit) -> dict[Entry, Any]:
    """What the body put in the place of full tensors."""
    scope = unit.opened
    assert isinstance(scope, _Scope)
    found: dict[Entry, Any] = {}
    for values, name, index in unit.places:
        value, entry = values.get(name), unit.entries[index]
        known = [scope.tensors[index], entry.param, unit.aliases[index], scope.before[index]]
        if unit.live is not None:
            known.append(unit.live.tensors[index])
        if all(value is not item for item in known):
            found[entry] = value
    return found


def _put_back(units: list[Unit]) -> None:
    """Let the modules hold what they held before the scope."""
    for unit in units:
        scope = unit.opened
        if not isinstance(scope, _Scope):
            continue  # undone inside the scope
        unit.opened = scope.outer
        if _is_running(unit):
            install(unit, scope.before)
        else:
            install_leaves(unit)


def _leave(
    units: list[Unit],
    scopes: dict[Unit, _Scope],
    replaced: dict[Unit, dict[Entry, Any]],
    options: _Options,
) -> None:
    changes = {entry: value for found in replaced.values() for entry, value in found.items()}
    problem: str | None = None
    for unit in units:
        scope = scopes[unit]
        if scope.is_here:
            problem = problem or _problem(unit, scope, changes, options)
    _settle_rank0(units, options, failed=problem is not None)
    if problem is not None:
        raise RuntimeError(problem)
    if not options.writeback:
        return
    for unit in units:
        _write_back(unit, scopes[unit], changes, options)
    for unit in units:
        outer = scopes[unit].outer
        while isinstance(outer, _Scope):
            _mark(unit, outer)
            outer = outer.outer
        if Hold.USER in unit.holds:
            refresh_stale(unit)
            wait_gathered(unit)


def _problem(
    unit: Unit, scope: _Scope, changes: dict[Entry, Any], options: _Options
) -> str | None:
    """Why the scope cannot be left in peace, or None."""
    for index, entry in enumerate(unit.entries):
        name = f"parameter {entry.spec.fqn!r} of unit {unit.name!r}"
        tensor = scope.tensors[index]
        if options.writeback:
            value = changes.get(entry, tensor)
            if not isinstance(value, torch.Tensor) or value.shape != entry.spec.shape:
                found = tuple(value.shape) if isinstance(value, torch.Tensor) else value
                return (
                    f"gathered: {name} was replaced by {found}; wanted a tensor of shape "
                    f"{tuple(entry.spec.shape)}. Nothing was written back; to change shapes, call "
                    "fsdp_compose.undo(module) first."
                )
            with raw():
                stepped = entry.param._version != scope.leaf_versions[index]
            if stepped:
                return (
                    f"gathered: the shard of {name} was written inside a scope with writeback, "
                    "which would overwrite it; step the optimizer outside the scope."
                )
        elif not _is_kept(scope) and (
            entry in changes or _is_edited(entry, tensor, index, scope)
        ):
            return (
                f"gathered: {name} was edited inside a scope without writeback, and the edit "
                "would be lost; use `with fsdp_compose.gathered(module, writeback=True):`."
            )
        held = scope.grads[index] if scope.grads else None
        if options.with_grads and not options.writeback:
            grad = tensor.grad
            same = grad is None if held is None else grad is held[0] and grad._version == held[1]
            if not same:
                return (
                    f"gathered: the gradient of {name} was edited inside a scope without "
                    "writeback, and the edit would be lost; use gathered(module, with_grads=True, "
                    "writeback=True)."
                )
    return None


def _is_kept(scope: _Scope) -> bool:
    """Whether an edit lives on in a scope around this one."""
    return isinstance(scope.outer, _Scope)


def _is_edited(entry: Entry, tensor: torch.Tensor, index: int, scope: _Scope) -> bool:
    if tensor._version != scope.versions[index]:
        return True
    if tensor.device.type != "cpu" or tensor.shape != entry.spec.shape:
        return tensor.shape != entry.spec.shape
    # Writes through .data and numpy leave no version behind; a look at the own slice finds them.
    with raw():
        if entry.param._version != scope.leaf_versions[index]:
            return False  # stepped inside the scope, so the two differ for that reason
    mine, shown = to_local(entry.param).cpu(), own_slice(tensor.detach(), entry.spec)
    return not torch.equal(mine.view(torch.uint8), shown.contiguous().view(torch.uint8))


def _settle_rank0(units: list[Unit], options: _Options, failed: bool) -> None:
    """Where rank 0 alone writes, tell the others whether it will."""
    if not (options.rank0_only and options.writeback):
        return
    for mesh in dict.fromkeys(b.mesh for unit in units for b in unit.buckets):
        flag = torch.tensor([int(failed)], dtype=torch.uint8, device=mesh.device)
        for group in (mesh.shard, mesh.replicate):
            comm.broadcast(flag, group)
        if not failed and bool(flag.item()):
            raise RuntimeError(
                "gathered: the scope failed on rank 0, which alone writes parameters back with "
                "rank0_only; nothing was written."
            )


def _write_back(
    unit: Unit, scope: _Scope, changes: dict[Entry, Any], options: _Options
) -> None:
    position = {entry: index for index, entry in enumerate(unit.entries)}
    for bucket in unit.buckets:
        for entry in bucket.entries:
            tensor = scope.tensors[position[entry]]
            if scope.is_here and entry in changes:
                tensor.detach().copy_(changes[entry])
            if options.rank0_only:
                tensor = _from_rank0(bucket, entry, tensor if scope.is_here else None)
            to_local(entry.param).copy_(own_slice(tensor.detach(), entry.spec))
            if options.with_grads:
                grad = tensor.grad if not options.rank0_only else None
                entry.param.grad = grad


def _from_rank0(bucket: Bucket, entry: Entry, tensor: torch.Tensor | None) -> torch.Tensor:
    spec, mesh = entry.spec, bucket.mesh
    full = torch.empty(spec.numel, dtype=bucket.shard.dtype, device=mesh.device)
    shaped = full.as_strided(spec.shape, spec.stride)
    if tensor is not None:
        shaped.copy_(tensor)
    for group in (mesh.shard, mesh.replicate):
        comm.broadcast(full.view(torch.uint8), group)
    return shaped


# Streaming


def iter_full(
    module: nn.Module,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, full tensor)`` for every parameter, in the order of ``named_parameters()``.

    A tied parameter comes under each of its names, as in ``state_dict()``; buffers do not come,
    since they are not sharded. The tensors are the caller's own, detached. At any time this holds
    ``bucket_bytes`` or one parameter, whichever is more, besides the tensor yielded. Every rank
    must run the iteration, and as far as every other.

    Args:
        module: any module.
        bucket_bytes: buckets up to this size are gathered whole; of larger ones the parameters come
            one by one from the ranks that own them.
        dtype: of floating-point tensors yielded; None leaves them as they are stored.
        device: of the tensors yielded; None leaves them where they are gathered.
    """
    entries = {
        (id(values), name): (unit, unit.entries[index])
        for lane in _lanes.values()
        for unit in lane.units
        for values, name, index in unit.places
    }
    slots = [
        (f"{prefix}.{name}" if prefix else name, parameter_slots(owner), name)
        for prefix, owner in module.named_modules(remove_duplicate=False)
        for name, value in parameter_slots(owner).items()
        if value is not None
    ]
    flat: torch.Tensor | None = None
    last: Bucket | None = None
    for full_name, values, name in slots:
        unit, entry = entries.get((id(values), name), (None, None))
        if unit is None or entry is None or isinstance(unit.opened, _Scope):
            tensor = values[name].detach()
        else:
            bucket = owner_of(entry)
            spec = entry.spec
            if bucket.layout.numel * bucket.shard.element_size() > bucket_bytes:
                tensor = _one_parameter(bucket, entry)
            else:
                if bucket is not last or flat is None:
                    flat = last = None
                    with torch.no_grad():
                        shard = current_shard(bucket)
                        flat, last = gather_flat(bucket, shard, shard.dtype), bucket
                tensor = flat.as_strided(spec.shape, spec.stride, spec.offset)
        kind = dtype if tensor.is_floating_point() else None
        yield full_name, tensor.to(device=device, dtype=kind, copy=True)


def _one_parameter(bucket: Bucket, entry: Entry) -> torch.Tensor:
    """The full parameter from the ranks that own it, each sending its slice once."""
    spec, group = entry.spec, bucket.mesh.shard
    full = torch.empty(spec.numel, dtype=bucket.shard.dtype, device=bucket.mesh.device)
    full[spec.start : spec.stop].copy_(to_local(entry.param))
    start = 0
    for rank, length in enumerate(spec.lengths):
        if length:
            comm.broadcast(full[start : start + length].view(torch.uint8), group, rank)
        start += length
    return full.as_strided(spec.shape, spec.stride)
