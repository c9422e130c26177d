"""Full parameters for a block of code, and streams of full parameters.

``gathered`` opens units: inside it every module holds full tensors in the storage dtype, of which
each bucket has one buffer of its own. Autograd keeps that buffer as it keeps any saved tensor, so
a backward may come inside the scope, after it, or never, and gathers nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compose.base.torch_private import is_opaque, parameter_slots, raw, untraced
from fsdp_compose.comm import collectives as comm
from fsdp_compose.core.bucket import Bucket, Entry, full_tensor
from fsdp_compose.core.gathering import install, install_leaves, refresh_stale, wait_gathered
from fsdp_compose.core.guards.connect import connect, is_running
from fsdp_compose.core.guards.forward_writes import leaf_versions_of
from fsdp_compose.core.guards.scope_parameters import as_parameter, hide, is_whole, new_layer, show
from fsdp_compose.core.receiving import gather_flat
from fsdp_compose.core.records import Opened
from fsdp_compose.core.reducing import requires_grad
from fsdp_compose.core.schedule import Hold
from fsdp_compose.core.state import Unit, _lanes, find_state, owner_of
from fsdp_compose.scopes.surgery import check_surgery, remember_modules
from fsdp_compose.scopes.unshard import check_reduced, reconnect
from fsdp_compose.sharded import part_of, part_slice, to_local

DEFAULT_BUCKET_BYTES = 256 << 20


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

    options: _Options = field(kw_only=True)
    is_here: bool = True  # this rank has the full tensors
    key: object = field(kw_only=True)  # of the call of ``gathered`` that opened it
    before: list[Any] = field(default_factory=list)  # what the modules held, by entry
    versions: list[tuple[int, int]] = field(default_factory=list)
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
    parameters, reduced once per scope and bucket, in a backward inside the scope or after it.
    ``torch.autograd.grad`` of a parameter gives the gradient of the whole, averaged over ranks; of
    a tensor made from one (``p.clone()``, or by ``torch.func``), it gives this rank's own.

    In a scope entered under ``no_grad``, or with ``with_grads``, ``rank0_only`` or
    ``offload_to_cpu``, the tensors are leaves; a gradient that would get lost there raises.

    Args:
        module: any module; it need not be a unit.
        writeback: on leaving, write tensors that were edited or replaced back to the shards. Each
            rank writes the slice it owns from its own tensors: make the same edit on every rank,
            or use ``rank0_only``. Not on an exception: the parameters are then as before. Modules
            may be taken apart too, under ``no_grad``, as ``torch.nn.utils.parametrize`` and
            ``prune`` do: parameters may be deleted, put in other places, and new ones added.
            Then call ``refresh``; the next forward says so if it was forgotten.
        with_grads: ``.grad`` holds full gradients; with ``writeback`` they are written back too.
        rank0_only: only rank 0 of each mesh gets full tensors; with ``writeback`` its edits reach
            all ranks.
        offload_to_cpu: the full tensors are in host memory.
        recurse: also open units nested in ``module``.

    Raises:
        RuntimeError: a parameter was edited without ``writeback``, replaced by something of another
            shape, or stepped by an optimizer inside a scope with ``writeback``, or before a forward
            in the scope; or ``writeback`` inside the unit's own forward or backward.
    """
    if writeback and with_grads and rank0_only:
        raise ValueError(
            "gathered: with_grads and rank0_only do not go with writeback; write gradients "
            "back without rank0_only."
        )
    leaf_mode = with_grads or rank0_only or offload_to_cpu
    connected = torch.is_grad_enabled() and not leaf_mode
    options = _Options(writeback, with_grads, rank0_only, offload_to_cpu, connected)
    units = _reading_units(module, recurse)
    _check_entry(units, options)
    with torch.inference_mode(False):
        scopes = _open(units, options)
    before = remember_modules(module, units) if writeback else []
    try:
        yield module
        check_surgery(module, before)
    except BaseException:
        _put_back(scopes)
        _settle_rank0(units, options, failed=True)
        raise
    changes = _replacements(scopes)
    if writeback and not rank0_only:
        _take_over_surgery(scopes, changes)
    fulls = _put_back(scopes)
    # Two parameters may have changed places, so what was put there may be another parameter.
    changes = {entry: fulls.get(id(value), value) for entry, value in changes.items()}
    with torch.no_grad():
        _leave(scopes, changes, options)


summon_full_params = gathered


def _reading_units(module: nn.Module, recurse: bool) -> list[Unit]:
    """Units whose parameters ``module`` reads, and those tied to them, in the same order always."""
    by_slots = {
        id(values): unit
        for lane in _lanes.values()
        for unit in lane.units
        for values, _, _ in unit.links.places
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


def _check_entry(units: list[Unit], options: _Options) -> None:
    for unit in units:
        if options.writeback and is_running(unit):
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


@untraced
def _open(units: list[Unit], options: _Options) -> dict[Unit, _Scope]:
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
    key = object()
    _show(_dress(units, fulls, grads, options), key, options)
    scopes: dict[Unit, _Scope] = {}
    for unit in units:
        before = [None] * len(unit.entries)
        for values, name, index in unit.links.places:
            before[index] = values.get(name)
        tensors: list[torch.Tensor] = [entry.held for entry in unit.entries]
        unit.opened = scopes[unit] = scope = _Scope(
            tensors=tensors,
            in_forward=True,
            options=options,
            is_here=_is_here(unit, options),
            key=key,
            outer=unit.opened,
            before=before,
        )
        _mark(unit, scope)
        if isinstance(scope.outer, _Scope):
            scope.leaf_versions = scope.outer.leaf_versions  # it shows what that gathered
        if options.with_grads and scope.is_here:
            scope.grads = [None if (g := t.grad) is None else (g, g._version) for t in tensors]
        install(unit, tensors)
    return scopes


def _mark(unit: Unit, scope: _Scope) -> None:
    """Remember the versions of everything, to find edits by."""
    if scope.is_here:
        scope.versions = [_version(tensor) for tensor in scope.tensors]
    scope.leaf_versions = leaf_versions_of(unit)


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """Changes when autograd sees a write, and when ``.data`` is assigned."""
    return tensor._version, part_of(tensor).data_ptr()


def _is_here(unit: Unit, options: _Options) -> bool:
    if not options.rank0_only:
        return True
    return all(b.mesh.shard.rank == 0 and b.mesh.replicate.rank == 0 for b in unit.gathered)


def current_shard(bucket: Bucket) -> torch.Tensor:
    """The bucket's shard with what its parameters hold now, on the device that communicates."""
    return bucket.shard.to(bucket.mesh.device)


def _full_parameters(bucket: Bucket, here: bool, options: _Options) -> dict[Entry, torch.Tensor]:
    with torch.no_grad():
        shard = current_shard(bucket)
        flat = gather_flat(bucket, shard, shard.dtype)
        if not here:
            return {entry: entry.held for entry in bucket.entries}
        if options.offload_to_cpu:
            flat = flat.cpu()
        return {entry: full_tensor(flat, entry) for entry in bucket.entries}


def _full_grads(bucket: Bucket, here: bool, options: _Options) -> dict[Entry, torch.Tensor | None]:
    """Full gradients by entry; one gather per dtype of gradient in the bucket."""
    local = {e: None if e.param.grad is None else to_local(e.param.grad) for e in bucket.entries}
    found: dict[Entry, torch.Tensor | None] = dict.fromkeys(bucket.entries)
    with torch.no_grad():
        for dtype in dict.fromkeys(g.dtype for g in local.values() if g is not None):
            shard = torch.zeros_like(bucket.shard, dtype=dtype, device=bucket.mesh.device)
            pieces = shard.split(bucket.views.splits)
            given = [e for e, g in local.items() if g is not None and g.dtype == dtype]
            for entry in given:
                pieces[bucket.views.pieces[entry.index]].copy_(local[entry])
            flat = gather_flat(bucket, shard, dtype)
            if here:
                flat = flat.cpu() if options.offload_to_cpu else flat
                found.update((e, full_tensor(flat, e)) for e in given)
    return found


def _dress(
    units: list[Unit],
    fulls: dict[Entry, torch.Tensor],
    grads: dict[Entry, torch.Tensor | None],
    options: _Options,
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
            leaf.grad = grads[entry]
    return shown


def _make_leaf(entry: Entry, full: torch.Tensor, trained: bool, options: _Options) -> nn.Parameter:
    leaf = nn.Parameter(full.detach(), trained)
    if trained and not (options.with_grads and options.writeback):
        leaf.register_hook(_LostGradient(entry.spec.fqn))
    return leaf


def _show(shown: dict[Entry, torch.Tensor], key: object, options: _Options) -> None:
    """Let parameters hold these full tensors until the scope ends."""
    for entry, full in shown.items():
        if full is not entry.held:
            show(entry, full, new_layer(key, partial(_rebuild, options), options.with_grads))


def _rebuild(options: _Options, entry: Entry, trained: bool) -> torch.Tensor:
    """What the scope shows of a parameter that was frozen, or set free, inside it."""
    full = entry.held.detach()
    if options.connected:
        return reconnect(entry, full, trained, [])
    leaf = _make_leaf(entry, full, trained, options)
    if options.with_grads:
        leaf.grad = entry.held.grad
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


def _replacements(scopes: dict[Unit, _Scope]) -> dict[Entry, Any]:
    """What the body put in the place of full tensors."""
    found: dict[Entry, Any] = {}
    for unit, scope in scopes.items():
        for values, name, index in unit.links.places:
            value, entry = values.get(name), unit.entries[index]
            known = [entry.held, entry.param, unit.links.aliases[index], scope.before[index]]
            if unit.run.live is not None:
                known.append(unit.run.live.tensors[index])
            if all(value is not item for item in known):
                found[entry] = value
    return found


def _take_over_surgery(scopes: dict[Unit, _Scope], changes: dict[Entry, Any]) -> None:
    """Where the body deleted parameters, let it be so.

    That is how ``torch.nn.utils.parametrize`` and its kin work. The next forward finds leaves at
    places that are new to their unit, and names ``refresh``.
    """
    for unit in scopes:
        gone = {(id(v), name): index for v, name, index in unit.links.places if name not in v}
        for index in gone.values():
            entry = unit.entries[index]
            if changes.get(entry) is None:
                changes.pop(entry, None)
        if gone:
            unit.slots = [(s, i) for s, i in unit.slots if (id(s.values), s.name) not in gone]
            unit.link()
            unit.checks.watch = None


def _put_back(scopes: dict[Unit, _Scope]) -> dict[int, torch.Tensor]:
    """Let modules and parameters hold what they held before; the scope's tensors by id of the
    parameters that held them."""
    for unit, scope in scopes.items():
        if unit.opened is not scope:
            raise RuntimeError(
                f"gathered: unit {unit.name!r} was undone inside the scope, or scopes over it were "
                "not left in the reverse order of entry."
            )
    fulls: dict[int, torch.Tensor] = {}
    for unit, scope in scopes.items():
        unit.opened = scope.outer
        for entry in unit.entries:
            full = hide(entry, scope.key)
            if full is not None:
                fulls[id(entry.held)] = full
    for unit, scope in scopes.items():
        scope.tensors = [fulls.get(id(tensor), tensor) for tensor in scope.tensors]
        if is_running(unit):
            install(unit, scope.before)
        else:
            install_leaves(unit)
    return fulls


def _leave(scopes: dict[Unit, _Scope], changes: dict[Entry, Any], options: _Options) -> None:
    problem: str | None = None
    for unit, scope in scopes.items():
        if scope.is_here:
            problem = problem or _problem(unit, scope, changes, options)
    _settle_rank0(list(scopes), options, failed=problem is not None)
    if problem is not None:
        raise RuntimeError(problem)
    if not options.writeback:
        return
    shown = {id(tensor) for scope in scopes.values() for tensor in scope.tensors}
    # Two parameters may have changed places: neither is overwritten before it is read.
    changes = {e: v.clone() if id(v) in shown else v for e, v in changes.items()}
    for unit, scope in scopes.items():
        _write_back(unit, scope, changes, options)
    for unit, scope in scopes.items():
        outer = scope.outer
        while isinstance(outer, _Scope):
            _mark(unit, outer)
            outer = outer.outer
        if Hold.USER in unit.holds:
            refresh_stale(unit)
            wait_gathered(unit)


def _problem(unit: Unit, scope: _Scope, changes: dict[Entry, Any], options: _Options) -> str | None:
    """Why the scope cannot be left in peace, or None."""
    for index, entry in enumerate(unit.entries):
        name = f"parameter {entry.spec.fqn!r} of unit {unit.name!r}"
        tensor = scope.tensors[index]
        if options.writeback:
            value = changes.get(entry, tensor)
            plain = isinstance(value, torch.Tensor) and not is_opaque(value)
            if not plain or value.shape != entry.spec.seen:
                found = tuple(value.shape) if plain else f"a {type(value).__name__}"
                return (
                    f"gathered: {name} was replaced by {found}; wanted a tensor of shape "
                    f"{tuple(entry.spec.seen)}. Nothing was written back; to change shapes, "
                    "put the new one there outside the scope and call fsdp_compose.refresh(model)."
                )
            with raw():
                stepped = entry.param._version != scope.leaf_versions[index]
            if stepped:
                return (
                    f"gathered: the shard of {name} was written inside a scope with writeback, "
                    "which would overwrite it; step the optimizer outside the scope."
                )
        elif entry in changes or _is_edited(entry, tensor, index, scope):
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


def _is_edited(entry: Entry, tensor: torch.Tensor, index: int, scope: _Scope) -> bool:
    if isinstance(scope.outer, _Scope):
        return False  # it is the outer scope's tensor, which has the edit and answers for it
    if _version(tensor) != scope.versions[index] or tensor.shape != entry.spec.seen:
        return True
    if tensor.device.type != "cpu":
        return False
    # Writes through .data and numpy leave no version behind; a look at the own slice finds them.
    with raw():
        if entry.param._version != scope.leaf_versions[index]:
            return False  # stepped inside the scope, so the two differ for that reason
    mine = to_local(entry.param).cpu()
    shown = part_slice(part_of(tensor).detach(), entry.spec)
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


def _write_back(unit: Unit, scope: _Scope, changes: dict[Entry, Any], options: _Options) -> None:
    position = {entry: index for index, entry in enumerate(unit.entries)}
    for bucket in unit.buckets:
        for entry in bucket.entries:
            tensor = scope.tensors[position[entry]]
            if scope.is_here and entry in changes:
                tensor.detach().copy_(changes[entry])
            if options.rank0_only:
                part = _from_rank0(bucket, entry, part_of(tensor) if scope.is_here else None)
            else:
                part = part_of(tensor)
            to_local(entry.param).copy_(part_slice(part.detach(), entry.spec))
            if options.with_grads:
                entry.param.grad = tensor.grad


def _from_rank0(bucket: Bucket, entry: Entry, tensor: torch.Tensor | None) -> torch.Tensor:
    spec, mesh = entry.spec, bucket.mesh
    full = torch.empty(spec.numel, dtype=bucket.shard.dtype, device=mesh.device)
    shaped = full.as_strided(spec.shape, spec.stride)
    if tensor is not None:
        shaped.copy_(tensor)
    for group in (mesh.shard, mesh.replicate):
        comm.broadcast(full.view(torch.uint8), group)
    return shaped


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
        for values, name, index in unit.links.places
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
            if entry is not None and entry.spec.parallel is not None and not entry.spec.is_dtensor:
                tensor = entry.spec.parallel.assemble(tensor)
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
            if spec.parallel is not None:
                tensor = spec.parallel.assemble(tensor)
        tensor = _whole(tensor)
        kind = dtype if tensor.is_floating_point() else None
        yield full_name, tensor.to(device=device, dtype=kind, copy=True)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor that a scope shows, or that is not sharded, as the plain tensor it stands for."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


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
