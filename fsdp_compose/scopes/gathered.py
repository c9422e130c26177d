"""Full parameters for a block of code.

``gathered`` opens units: inside it every module holds full tensors in the storage dtype, of which
each bucket has one buffer of its own. Autograd keeps that buffer as it keeps any saved tensor, so
a backward may come inside the scope, after it, or never, and gathers nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from operator import ne
from typing import Any

import torch
from torch import nn

from fsdp_compose.base.arguments import check_flags, check_module
from fsdp_compose.base.exchange import check_exchangeable
from fsdp_compose.base.interrupts import hold_interrupts
from fsdp_compose.base.modules import walk_modules
from fsdp_compose.base.torch_private import is_opaque, parameter_slots
from fsdp_compose.buckets.bucket import Bucket, Entry
from fsdp_compose.comm import collectives as comm
from fsdp_compose.core.gathering import refresh_stale, wait_gathered
from fsdp_compose.core.guards.connect import is_running
from fsdp_compose.core.guards.failed_steps import clear_failed_steps
from fsdp_compose.core.guards.forward_writes import leaf_versions_of
from fsdp_compose.core.guards.moved_parameters import shard_of
from fsdp_compose.core.guards.plain_gradients import share_plain_gradients
from fsdp_compose.core.guards.replaced_parameters import check_at_rest
from fsdp_compose.core.guards.replicas import sum_bytes
from fsdp_compose.core.guards.scope_parameters import give_gradient
from fsdp_compose.core.guards.units import list_all_units
from fsdp_compose.core.schedule import Hold
from fsdp_compose.core.state import Unit, find_state, units_with
from fsdp_compose.scopes.compared_edits import EditComparison
from fsdp_compose.scopes.module_edits import (
    Before,
    check_edits,
    remember_modules,
    restore_edited,
)
from fsdp_compose.scopes.open_scope import (
    Scope,
    ScopeOptions,
    close_scopes,
    has_grad,
    leave_calls,
    open_units,
    remember_versions,
    version_of,
)
from fsdp_compose.scopes.unshard import check_reduced, list_outdated, shows_own_slice
from fsdp_compose.sharded import part_of, part_slice, to_local


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

    What is made from a parameter without a graph (``p.detach()``) and kept has the values of this
    scope: it does not follow the parameter, as it would in plain torch.
    After an optimizer's step inside the scope, the parameters of the units it stepped hold their
    slices, as they do outside: the scope has no full tensors of the new values.

    In a scope entered under ``no_grad``, or with ``with_grads``, ``rank0_only`` or
    ``offload_to_cpu``, the tensors are leaves; a gradient that would get lost there raises.

    Args:
        module: any module; it need not be a unit.
        writeback: on leaving, write tensors that were edited or replaced back to the shards. Each
            rank writes the slice it owns from its own tensors, which the ranks compare before that:
            make the same edit on every rank, or use ``rank0_only``. Not on an exception: the
            parameters are then as before. Between a forward and its backward, a parameter that no
            rank edited is not written, except with ``rank0_only``: that backward would raise.
            Modules may be taken apart too, under ``no_grad``, as ``torch.nn.utils.parametrize`` and
            ``prune`` do: parameters may be deleted, put in other places, and new ones added. Then
            call ``refresh``; the next forward says so if it was forgotten.
        with_grads: ``.grad`` holds full gradients; with ``writeback`` they are written back too. A
            backward inside adds each rank's own, which are not written where they differ.
        rank0_only: only rank 0 of each mesh gets full tensors; with ``writeback`` its edits reach
            all ranks.
        offload_to_cpu: the full tensors are in host memory.
        recurse: also open units nested in ``module``.

    Raises:
        RuntimeError: a parameter was edited without ``writeback``, replaced by something of another
            shape, or stepped by an optimizer inside a scope with ``writeback``, or before a forward
            in the scope; or ``writeback`` inside the unit's own forward or backward; or, on entry,
            a parameter was replaced or deleted outside scopes, and ``refresh`` not called since;
            or, on every rank, ranks would write different values, and nothing is written.
        TypeError: ``module`` is none, or a flag is no bool.
        ValueError: ``writeback`` together with ``with_grads`` and ``rank0_only``.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> with gathered(model, writeback=True), torch.no_grad():
        ...     model.weight[0, 0] = 7.0
        >>> float(model.weight.full_tensor()[0, 0])
        7.0
    """
    check_module("gathered", module)
    check_flags(
        "gathered",
        writeback=writeback,
        with_grads=with_grads,
        rank0_only=rank0_only,
        offload_to_cpu=offload_to_cpu,
        recurse=recurse,
    )
    if writeback and with_grads and rank0_only:
        raise ValueError(
            "gathered: with_grads and rank0_only do not go with writeback; write gradients "
            "back without rank0_only."
        )
    connected = torch.is_grad_enabled() and not (with_grads or rank0_only or offload_to_cpu)
    options = ScopeOptions(writeback, with_grads, rank0_only, offload_to_cpu, connected)
    units = find_units(module, recurse)
    clear_failed_steps(units)
    share_plain_gradients(units if with_grads else ())
    _check_entry(units, options)
    scopes: dict[Unit, Scope] = {}
    before, comparison = list[Before](), None
    try:
        with torch.inference_mode(False):
            open_units(units, options, scopes)
        before = remember_modules(module)
        comparison = EditComparison(units, rank0_only) if writeback else None
        yield module
        problem = leave_calls(scopes) or (find_changed_ties(scopes) if writeback else None)
        if writeback:
            check_edits(module, units, before)
        changes = find_replacements(scopes)
        if writeback and not rank0_only:
            accept_deletions(scopes, changes)
        else:
            restore_edited(before)
        fulls = restore_modules(scopes)
    except BaseException:
        restore_edited(before)
        try:
            restore_modules(scopes)
        finally:
            if comparison is not None:
                agree_with_rank0(units, options, failed=True)
                comparison.tell_failure()
        raise
    # Two parameters may have changed places, so what was put there may be another parameter.
    changes = {entry: fulls.get(id(value), value) for entry, value in changes.items()}
    with torch.no_grad():
        finish(scopes, changes, options, comparison, problem)


summon_full_params = gathered


def find_units(module: nn.Module, recurse: bool) -> list[Unit]:
    """Units whose parameters ``module`` reads, and those tied to them, in the same order always."""
    by_slots = {id(values): unit for unit in list_all_units() for values, _, _ in unit.links.places}
    found: dict[int, Unit] = {}
    for _, current in walk_modules(
        module, lambda child: not recurse and find_state(child) is not None
    ):
        unit = by_slots.get(id(parameter_slots(current)))
        if unit is not None:
            found.setdefault(id(unit), unit)
    units = list(found.values())
    for unit in units:  # grows while it is walked
        users = dict.fromkeys(other for b in unit.gathered for other in units_with(b))
        tied = [other for other in users if id(other) not in found]
        for other in sorted(tied, key=lambda u: (u.name, u.entries[0].spec.fqn)):
            found[id(other)] = other
            units.append(other)
    return units


def _check_entry(units: list[Unit], options: ScopeOptions) -> None:
    check_exchangeable("gathered", (entry.held for unit in units for entry in unit.entries))
    for unit in units:
        check_at_rest(unit)
        if options.writeback and is_running(unit):
            raise RuntimeError(
                f"gathered: writeback inside a forward or backward of unit {unit.name!r}, whose "
                "graph uses the parameters as they are; write before or after the pass."
            )
        if options.with_grads:
            check_reduced(unit.buckets, "gathered(with_grads=True)")
        outer = unit.opened
        if isinstance(outer, Scope) and (
            outer.options.rank0_only != options.rank0_only
            or outer.options.offload_to_cpu != options.offload_to_cpu
        ):
            raise RuntimeError(
                f"gathered: unit {unit.name!r} is already open in a scope with other rank0_only "
                "or offload_to_cpu; leave that scope first."
            )
        if isinstance(outer, Scope) and list_outdated(unit):
            raise RuntimeError(
                f"gathered: unit {unit.name!r} is already open in a scope around this one, in "
                "which its shard was written, for example by an optimizer's step, and which does "
                "not show that; leave that scope first."
            )


def find_replacements(scopes: dict[Unit, Scope]) -> dict[Entry, Any]:
    """Find the tensors that the body put in the place of full ones."""
    found: dict[Entry, Any] = {}
    for unit, scope in scopes.items():
        for values, name, index in unit.links.places:
            value = values.get(name)
            if not _is_own(unit, scope, index, value):
                found[unit.entries[index]] = value
    return found


def _is_own(unit: Unit, scope: Scope, index: int, value: Any) -> bool:
    """Whether ``value`` is what the scope, or the unit's pass, put in the entry's place."""
    entry = unit.entries[index]
    known = [entry.held, entry.param, unit.links.aliases[index], scope.before[index]]
    if unit.run.live is not None:
        known.append(unit.run.live.tensors[index])
    return any(value is item for item in known)


def find_changed_ties(scopes: dict[Unit, Scope]) -> str | None:
    """The error for parameters that the body tied to each other, or untied; None for none."""
    holders: dict[int, Entry] = {}  # by what lies in the places now
    held: dict[Entry, int] = {}
    places = ((u, s, *place) for u, s in scopes.items() if s.is_here for place in u.links.places)
    for unit, scope, values, name, index in places:
        value, entry = values.get(name), unit.entries[index]
        if value is None:
            continue
        key = id(entry.held if _is_own(unit, scope, index, value) else value)
        other = holders.setdefault(key, entry)
        if other is entry and held.setdefault(entry, key) == key:
            continue
        what = f"{entry.spec.fqn!r} was replaced under some of its names alone, or by several"
        if other is not entry:
            what = f"{entry.spec.fqn!r} and {other.spec.fqn!r} were made one tensor"
        return (
            f"gathered: parameter {what}, and nothing was written back, as each parameter keeps "
            "its own shard. To tie or untie parameters, put one, or one made of p.full_tensor(), "
            "in its place outside the scope, on every rank, and call fsdp_compose.refresh(model)."
        )
    return None


def accept_deletions(scopes: dict[Unit, Scope], changes: dict[Entry, Any]) -> None:
    """Let the units forget the parameters that the body deleted.

    ``torch.nn.utils.parametrize`` and similar functions delete them. The next forward finds leaves
    at places that are new to their unit, and raises an error that says to call ``refresh``.
    """
    for unit in scopes:
        gone = {(id(v), name): index for v, name, index in unit.links.places if name not in v}
        for index in gone.values():
            entry = unit.entries[index]
            if changes.get(entry) is None:
                changes.pop(entry, None)
        if gone:
            unit.slots = {
                slot: index
                for slot, index in unit.slots.items()
                if (id(slot.values), slot.name) not in gone
            }
            unit.link()
            unit.checks.watch = None


@hold_interrupts()
def restore_modules(scopes: dict[Unit, Scope]) -> dict[int, torch.Tensor]:
    """Let modules and parameters hold what they held before the scope, if they do not yet.

    Where a scope inside this one is still open, this one ends with that one.

    Returns the scope's tensors, by the id of the parameter that held each.
    """
    if all(scope.is_left for scope in scopes.values()):
        return {}
    ending = {unit: scope for unit, scope in scopes.items() if unit.opened is scope}
    fulls = close_scopes(ending)
    for unit in ending:
        while isinstance(around := unit.opened, Scope) and around.is_left:
            fulls.update(close_scopes({unit: around}))
    for scope in scopes.values():
        scope.tensors = [fulls.get(id(tensor), tensor) for tensor in scope.tensors]
        scope.is_left = True
    late = next((unit for unit in scopes if unit not in ending), None)
    if late is not None:
        raise RuntimeError(
            f"gathered: scopes over unit {late.name!r} were not left in the reverse order of "
            "entry; this one ends with the one inside it, and nothing was written back. Leave the "
            "scope that was entered last first."
        )
    return fulls


def finish(
    scopes: dict[Unit, Scope],
    changes: dict[Entry, Any],
    options: ScopeOptions,
    comparison: EditComparison | None,
    problem: str | None,
) -> None:
    """End a scope: raise for edits that would be lost, on every rank, else write them back.

    Args:
        changes: what the body put in the places of full tensors.
        problem: what is wrong already.
    """
    for unit, scope in scopes.items():
        if scope.is_here:
            problem = problem or find_problem(unit, scope, changes, options)
    agree_with_rank0(list(scopes), options, failed=problem is not None)
    if options.writeback and problem is None:
        take_replacements(scopes, changes)
    if comparison is not None:
        comparison.compare(scopes, problem)
    if problem is not None:
        raise RuntimeError(problem)
    if not options.writeback:
        return
    for unit, scope in scopes.items():
        _write_back(unit, scope, changes, options)
    for unit, scope in scopes.items():
        outer = scope.outer
        while isinstance(outer, Scope) and not outer.is_left:
            remember_versions(unit, outer)
            outer = outer.outer
        if Hold.USER in unit.holds:
            refresh_stale(unit)
            wait_gathered(unit)


def take_replacements(scopes: dict[Unit, Scope], changes: dict[Entry, Any]) -> None:
    """Write what the body put in the place of full tensors into these."""
    present = {unit: scope for unit, scope in scopes.items() if scope.is_here}
    shown = {_memory_of(tensor) for scope in present.values() for tensor in scope.tensors}
    placed = [
        (tensor, changes[entry])
        for unit, scope in present.items()
        for entry, tensor in zip(unit.entries, scope.tensors, strict=True)
        if entry in changes
    ]
    # Two parameters, or views of them, may have changed places: each is read before it is written.
    values = [value.clone() if _memory_of(value) in shown else value for _, value in placed]
    for (tensor, _), value in zip(placed, values, strict=True):
        tensor.detach().copy_(value)


def _memory_of(tensor: torch.Tensor) -> int:
    return part_of(tensor).untyped_storage().data_ptr()


def find_problem(
    unit: Unit, scope: Scope, changes: dict[Entry, Any], options: ScopeOptions
) -> str | None:
    """The error for an edit that leaving the scope would lose; None where there is none."""
    written = list(map(ne, leaf_versions_of(unit), scope.leaf_versions))
    for index, entry in enumerate(unit.entries):
        name = f"parameter {entry.spec.fqn!r} of unit {unit.name!r}"
        tensor = scope.tensors[index]
        value = changes.get(entry, tensor)
        plain = isinstance(value, torch.Tensor) and not is_opaque(value)
        # Without writeback, what is gone may have been deleted, which writeback accepts.
        if value.shape != entry.spec.seen if plain else options.writeback:
            found = tuple(value.shape) if plain else f"a {type(value).__name__}"
            return (
                f"gathered: {name} was replaced by {found}; wanted a tensor of shape "
                f"{tuple(entry.spec.seen)}. Nothing was written back; to change shapes, put one "
                "made of p.full_tensor() there outside the scope on every rank and call refresh, "
                "or change them between undo(model) and fully_shard (resize_token_embeddings)."
            )
        if options.writeback:
            if written[index]:
                return (
                    f"gathered: the shard of {name} was written inside a scope with writeback, as "
                    "an optimizer's step does, and the scope would overwrite it; step the "
                    "optimizer outside the scope."
                )
            if scope.leaf_grads and not has_grad(entry, *scope.leaf_grads[index]):
                return (
                    f"gathered: the sharded gradient of {name} was changed inside a scope with "
                    "with_grads and writeback, which would overwrite it; leave the scope first."
                )
        elif entry in changes and value is None:
            return (
                f"gathered: {name} was taken out of its module inside a scope without writeback, "
                "as pruning and parametrisations do. The module is as it was before the scope; use "
                "`with torch.no_grad(), fsdp_compose.gathered(module, writeback=True):`, and call "
                "fsdp_compose.refresh(model) after it."
            )
        elif entry in changes or _is_edited(entry, tensor, index, scope, written[index]):
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


def _is_edited(
    entry: Entry, tensor: torch.Tensor, index: int, scope: Scope, is_stepped: bool
) -> bool:
    if isinstance(scope.outer, Scope):
        return False  # the tensor is the outer scope's, which writes the edit back or reports it
    if version_of(tensor) != scope.versions[index] or tensor.shape != entry.spec.seen:
        return True
    if tensor.device.type != "cpu" or is_stepped:
        return False  # after a step inside the scope they are meant to differ
    # Writes through .data and numpy leave no version behind; a look at the own slice finds them.
    return not shows_own_slice(entry, tensor)


def _is_as_before(entry: Entry, index: int, scope: Scope) -> bool:
    """Whether a scope that was entered before a backward shows what it showed then.

    A write of the same values would have that backward raise. The sum is over the whole, so that
    all ranks write, and raise, or none.
    """
    tensor = scope.tensors[index]
    if not scope.sums or not shows_own_slice(entry, tensor):
        return False
    return bool(sum_bytes(tensor) == scope.sums[index])


def agree_with_rank0(units: list[Unit], options: ScopeOptions, failed: bool) -> None:
    """Where rank 0 alone writes, tell the others whether it will; on gloo they compare that too."""
    if not (options.rank0_only and options.writeback):
        return
    for mesh in dict.fromkeys(b.mesh for unit in units for b in unit.buckets):
        if all(map(comm.is_point_to_point, mesh.groups)):
            continue
        flag = torch.tensor([int(failed)], dtype=torch.uint8, device=mesh.device)
        for group in (mesh.shard, mesh.replicate):
            comm.broadcast(flag, group)
        if not failed and bool(flag.item()):
            raise RuntimeError(
                "gathered: the scope failed on rank 0, whose parameters are the ones to be written "
                "back with rank0_only; nothing was written. See the error of rank 0; then every "
                "rank may enter it again."
            )


def _write_back(
    unit: Unit, scope: Scope, changes: Collection[Entry], options: ScopeOptions
) -> None:
    position = {entry: index for index, entry in enumerate(unit.entries)}
    for bucket in unit.buckets:
        for entry in bucket.entries:
            tensor = scope.tensors[position[entry]]
            if options.with_grads:
                give_gradient(entry, tensor.grad)
            if entry not in changes and _is_as_before(entry, position[entry], scope):
                continue
            if options.rank0_only:
                part = _from_rank0(bucket, entry, part_of(tensor) if scope.is_here else None)
            else:
                part = part_of(tensor)
            to_local(entry.param).copy_(part_slice(part.detach(), entry.spec))


def _from_rank0(bucket: Bucket, entry: Entry, tensor: torch.Tensor | None) -> torch.Tensor:
    spec, mesh = entry.spec, bucket.mesh
    full = torch.empty(spec.numel, dtype=shard_of(bucket).dtype, device=mesh.device)
    shaped = full.as_strided(spec.shape, spec.stride)
    if tensor is not None:
        shaped.copy_(tensor)
    for group in (mesh.shard, mesh.replicate):
        comm.broadcast(full.view(torch.uint8), group)
    return shaped
