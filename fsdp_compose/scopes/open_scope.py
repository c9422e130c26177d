"""Open units for a scope: gather the full tensors that modules and parameters hold inside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp_compose.base.attributes import get_grad, requires_grad
from fsdp_compose.base.interrupts import hold_interrupts
from fsdp_compose.base.torch_private import raw, read_version, untraced
from fsdp_compose.buckets.bucket import Bucket, Entry, full_tensor
from fsdp_compose.buckets.gather import gather_flat
from fsdp_compose.core.gathering import install, install_leaves
from fsdp_compose.core.guards.connect import connect, is_running
from fsdp_compose.core.guards.forward_writes import leaf_versions_of
from fsdp_compose.core.guards.interrupts import leave_scoped
from fsdp_compose.core.guards.moved_parameters import shard_of
from fsdp_compose.core.guards.replicas import sum_bytes
from fsdp_compose.core.guards.scope_parameters import (
    Layer,
    as_parameter,
    end_rests,
    hide,
    is_whole,
    show,
)
from fsdp_compose.core.records import Opened
from fsdp_compose.core.state import Unit, owner_of
from fsdp_compose.scopes.unshard import reconnect
from fsdp_compose.sharded import part_of, to_local


@dataclass(frozen=True)
class ScopeOptions:
    """The arguments of ``gathered``, and whether its tensors are connected to autograd."""

    writeback: bool
    with_grads: bool
    rank0_only: bool
    offload_to_cpu: bool
    connected: bool


@dataclass(eq=False)
class Scope(Opened):
    """What is remembered of a unit inside ``gathered``."""

    options: ScopeOptions = field(kw_only=True)
    is_here: bool = True  # this rank has the full tensors
    is_left: bool = False  # it ended before one inside it, with which its tensors go
    key: object = field(kw_only=True)  # of the call of ``gathered`` that opened it
    before: list[Any] = field(default_factory=list)  # what the modules held, by entry
    versions: list[tuple[int, int]] = field(default_factory=list)
    grads: list[tuple[torch.Tensor, int] | None] = field(default_factory=list)
    leaf_grads: list[tuple[Any, int]] = field(default_factory=list)  # that will be overwritten
    # Of the tensors, where the graph of a forward waits for its backward.
    sums: list[torch.Tensor] = field(default_factory=list)


@untraced
def open_units(units: list[Unit], options: ScopeOptions, scopes: dict[Unit, Scope]) -> None:
    """Gather the units, let their modules and parameters hold full tensors, and fill ``scopes``."""
    fulls: dict[Entry, torch.Tensor] = {}
    grads: dict[Entry, torch.Tensor | None] = {}
    for unit in units:
        end_rests(unit.entries)  # in a hook on gradients, which an outer scope lets see slices
        here = has_full_tensors(unit, options)
        outer = unit.opened
        reused = dict(zip(unit.entries, outer.tensors, strict=True)) if outer is not None else {}
        for bucket in unit.buckets:
            if isinstance(outer, Scope):
                fulls.update((entry, reused[entry]) for entry in bucket.entries)
            else:
                fulls.update(_full_parameters(bucket, here, options))
            if options.with_grads:
                grads.update(_full_grads(bucket, here, options))
    may_follow = any(node is not None for unit in units for node in unit.graphs.nodes)
    sums = may_follow and options.writeback and not options.rank0_only
    shown = connect_or_copy(units, fulls, grads, options)
    key = object()
    try:
        with hold_interrupts():
            show_in_scope(shown, key, options)
            _open_shown(units, scopes, key, options, sums)
    except BaseException:  # such as no memory: nothing was opened
        with hold_interrupts():
            for unit in units:
                _hide_all(unit, key)
            close_scopes(scopes)
            scopes.clear()
        raise


def _open_shown(
    units: list[Unit], scopes: dict[Unit, Scope], key: object, options: ScopeOptions, sums: bool
) -> None:
    """Let the units' modules hold what their parameters show, and fill ``scopes``."""
    for unit in units:
        before = [None] * len(unit.entries)
        for values, name, index in unit.links.places:
            before[index] = values.get(name)
        tensors: list[torch.Tensor] = [entry.held for entry in unit.entries]
        unit.opened = scopes[unit] = scope = Scope(
            tensors=tensors,
            in_forward=True,
            options=options,
            is_here=has_full_tensors(unit, options),
            key=key,
            outer=unit.opened,
            before=before,
        )
        unit.engine.opened.add(unit)
        remember_versions(unit, scope)
        if options.with_grads and scope.is_here:
            scope.grads = [None if (g := t.grad) is None else (g, g._version) for t in tensors]
        if options.with_grads and options.writeback:
            scope.leaf_grads = list(map(read_grad, unit.entries))
        if sums:
            scope.sums = [sum_bytes(tensor) for tensor in tensors]
        install(unit, tensors)


def leave_calls(units: Iterable[Unit]) -> str | None:
    """Let modules hold the scope's tensors after forwards that Ctrl-C ended.

    Returns the error text where a copy that was made for such a forward alone was written.
    """
    return next(filter(None, list(map(leave_scoped, units))), None)


def close_scopes(scopes: Mapping[Unit, Scope]) -> dict[int, torch.Tensor]:
    """Let parameters and modules hold what they held before.

    Returns the scopes' tensors, by the id of the parameter that held each.
    """
    leave_calls(scopes)
    fulls: dict[int, torch.Tensor] = {}
    for unit, scope in scopes.items():
        unit.opened = scope.outer
        fulls.update(_hide_all(unit, scope.key))
    for unit, scope in scopes.items():
        if is_running(unit):
            install(unit, scope.before)
        else:
            install_leaves(unit)
    return fulls


def _hide_all(unit: Unit, key: object) -> dict[int, torch.Tensor]:
    hidden = [(entry, hide(entry, key)) for entry in unit.entries]
    return {id(entry.held): full for entry, full in hidden if full is not None}


def remember_versions(unit: Unit, scope: Scope) -> None:
    """Record the versions of all tensors and shards, so that edits can be found."""
    if scope.is_here:
        scope.versions = [version_of(tensor) for tensor in scope.tensors]
    scope.leaf_versions = leaf_versions_of(unit)


def version_of(tensor: torch.Tensor) -> tuple[int, int]:
    """A value that changes when autograd sees a write, and when ``.data`` is assigned."""
    return tensor._version, part_of(tensor).data_ptr()


def read_grad(entry: Entry) -> tuple[Any, int]:
    """The gradient of the shard, and how often it was written."""
    with raw():
        grad = get_grad(entry.param)
        return grad, -1 if grad is None else read_version(grad)


def has_grad(entry: Entry, grad: Any, version: int) -> bool:
    """Whether the shard still has this gradient, as it was."""
    now, count = read_grad(entry)
    return now is grad and count == version


def has_full_tensors(unit: Unit, options: ScopeOptions) -> bool:
    if not options.rank0_only:
        return True
    return all(b.mesh.shard.rank == 0 and b.mesh.replicate.rank == 0 for b in unit.gathered)


@torch.no_grad()
def gather_stored(bucket: Bucket, call: str) -> torch.Tensor:
    """A buffer of its own with the whole bucket, in the dtype in which it is stored.

    Args:
        call: what every rank calls.
    """
    shard = shard_of(bucket).to(bucket.mesh.device)
    return gather_flat(bucket, shard, shard.dtype, call)


def _full_parameters(
    bucket: Bucket, here: bool, options: ScopeOptions
) -> dict[Entry, torch.Tensor]:
    flat = gather_stored(bucket, "gathered")
    if not here:
        return {entry: entry.held for entry in bucket.entries}
    if options.offload_to_cpu:
        flat = flat.cpu()
    return {entry: full_tensor(flat, entry) for entry in bucket.entries}


def _full_grads(
    bucket: Bucket, here: bool, options: ScopeOptions
) -> dict[Entry, torch.Tensor | None]:
    """Full gradients by entry; one gather per dtype of gradient in the bucket."""
    local = {e: None if e.param.grad is None else to_local(e.param.grad) for e in bucket.entries}
    found: dict[Entry, torch.Tensor | None] = dict.fromkeys(bucket.entries)
    with torch.no_grad():
        for dtype in dict.fromkeys(g.dtype for g in local.values() if g is not None):
            shard = torch.zeros_like(shard_of(bucket), dtype=dtype, device=bucket.mesh.device)
            pieces = shard.split(bucket.views.splits)
            given = [e for e, g in local.items() if g is not None and g.dtype == dtype]
            for entry in given:
                pieces[bucket.views.pieces[entry.index]].copy_(local[entry])
            names = ", ".join([repr(entry.spec.fqn) for entry in given])  # the same on every rank
            flat = gather_flat(bucket, shard, dtype, f"gathered(with_grads=True): {names}")
            if here:
                flat = flat.cpu() if options.offload_to_cpu else flat
                found.update((e, full_tensor(flat, e)) for e in given)
    return found


def connect_or_copy(
    units: list[Unit],
    fulls: dict[Entry, torch.Tensor],
    grads: dict[Entry, torch.Tensor | None],
    options: ScopeOptions,
) -> dict[Entry, torch.Tensor]:
    """The tensors that parameters hold in the scope: connected to autograd, or leaves."""
    if options.connected:
        plain = {e: t for e, t in fulls.items() if t.grad_fn is None}
        fulls = {**fulls, **connect(units, {e: t.detach() for e, t in plain.items()}, [])}
        return {e: t if t.grad_fn else as_parameter(t) for e, t in fulls.items()}
    shown: dict[Entry, torch.Tensor] = {}
    for entry, full in fulls.items():
        if full is entry.held and not (options.with_grads and is_whole(full)):
            continue  # sharded on this rank, or open in an outer scope
        with raw():
            trained = requires_grad(entry.param)
        shown[entry] = leaf = _make_leaf(entry, full, trained, options)
        if options.with_grads:
            _give_gradient(leaf, grads[entry])
    return shown


def _give_gradient(leaf: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Give a leaf its gradient, whose dtype may be any (``grad_dtype=None``)."""
    if grad is not None and grad.dtype != leaf.grad_dtype:
        leaf.grad_dtype = grad.dtype
    leaf.grad = grad


def _make_leaf(
    entry: Entry, full: torch.Tensor, trained: bool, options: ScopeOptions
) -> nn.Parameter:
    leaf = nn.Parameter(full.detach(), trained)
    bucket = owner_of(entry)
    if bucket.dtypes.grad != bucket.stored.dtype:
        leaf.grad_dtype = bucket.dtypes.grad
    if trained and not (options.with_grads and options.writeback):
        leaf.register_hook(_LostGradient(entry.spec.fqn))
    return leaf


def show_in_scope(shown: dict[Entry, torch.Tensor], key: object, options: ScopeOptions) -> None:
    """Let parameters hold these full tensors until the scope ends."""
    rebuild, own_grad = partial(_rebuild, options), options.with_grads
    for entry, full in shown.items():
        if full is not entry.held:
            returns_grad = own_grad and options.writeback
            show(entry, full, Layer(key, rebuild, own_grad, returns_grad=returns_grad))


def _rebuild(options: ScopeOptions, entry: Entry, trained: bool) -> torch.Tensor:
    """What a scope shows after its parameter was frozen, or made trainable, inside it."""
    full = entry.held.detach()
    if options.connected:
        return reconnect(entry, full, trained, [])
    leaf = _make_leaf(entry, full, trained, options)
    if options.with_grads:
        _give_gradient(leaf, entry.held.grad)
    return leaf


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
