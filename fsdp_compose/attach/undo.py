"""``undo``: sharded modules become plain modules with full parameters again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn

from fsdp_compose.attach.entrances import detach_entrances
from fsdp_compose.base.exchange import check_exchangeable
from fsdp_compose.base.torch_private import give_leaf_hooks, raw, take_leaf_hooks
from fsdp_compose.buckets.bucket import Bucket, Entry
from fsdp_compose.buckets.entries import forget_entry
from fsdp_compose.buckets.gather import gather_flat
from fsdp_compose.core.gathering import install_leaves
from fsdp_compose.core.guards.cast_buffers import convert_buffers
from fsdp_compose.core.guards.compared_records import compare_records
from fsdp_compose.core.guards.connect import is_running
from fsdp_compose.core.guards.failed_steps import clear_failed_steps
from fsdp_compose.core.guards.moved_parameters import shard_of
from fsdp_compose.core.guards.plain_gradients import share_plain_gradients
from fsdp_compose.core.guards.replaced_parameters import refuse_replaced
from fsdp_compose.core.guards.scope_parameters import hide_all
from fsdp_compose.core.guards.units import modules_of, require_units
from fsdp_compose.core.passes import begin_forward_pass
from fsdp_compose.core.reducing import drain
from fsdp_compose.core.state import Unit, find_state
from fsdp_compose.scopes.open_scope import Scope
from fsdp_compose.scopes.unshard import check_reduced
from fsdp_compose.sharded import (
    STATE_KEY,
    close_dtensor,
    close_wrapped,
    gather_part,
    give_back_hooks,
    untag,
)

M = TypeVar("M", bound=nn.Module)


def undo(module: M) -> M:
    """Give back plain, full parameters, bit-identical, with every hook gone.

    Every unit in ``module`` is undone; all ranks must call it. Gradients are gathered too.

    Raises:
        ValueError: nothing in ``module`` is sharded, or a tied parameter of it belongs to a unit
            outside ``module``, or is used by one; or ``copy.copy`` made a module of it.
        RuntimeError: gradients wait to be reduced, or a unit is inside its forward or backward.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> type(undo(model).weight) is nn.Parameter
        True
    """
    units = require_units(module, "undo")
    _check_members(module)
    _check_ties(units, module)
    clear_failed_steps(units)
    for unit in units:
        if is_running(unit):
            raise RuntimeError(
                f"undo: unit {unit.name!r} is inside its forward or backward; call undo between a "
                "backward that reduced and the next forward."
            )
        if isinstance(unit.opened, Scope):
            raise RuntimeError(
                f"undo: unit {unit.name!r} is inside a scope of gathered, which would close none "
                "of its units afterwards; leave the scope first."
            )
    for engine in dict.fromkeys(unit.engine for unit in units):
        begin_forward_pass(engine)  # clears what a failed step left
        drain(engine)
        # An undone unit may live on, on some ranks only: until garbage of theirs is collected.
        engine.schedule.forget_orders(engine.units)
    share_plain_gradients(units)
    check_reduced((bucket for unit in units for bucket in unit.buckets), "undo")
    for unit in units:
        refuse_replaced(unit)
        check_exchangeable("undo", (entry.held for entry in unit.entries))
    compare_records(units, "undo")
    # Parameters that were made in inference mode could not be trained after it.
    with torch.inference_mode(False), torch.no_grad():
        _restore_units(units)
    return module


def _restore_units(units: Sequence[Unit]) -> None:
    """Make the parameters, modules and buffers of the units plain again."""
    for unit in units:
        for reason in tuple(unit.holds):
            unit.engine.schedule.drop(unit, reason)
        unit.opened = None
        for entry in unit.entries:
            hide_all(entry)
        install_leaves(unit)
    for unit in units:
        for bucket in unit.buckets:
            restore_parameters(bucket)
        for member in modules_of(unit):
            state = member.__dict__.pop(STATE_KEY)
            detach_entrances(member)
            convert_buffers(member, state.buffer_dtypes, unit.mp, back=True)
        unit.engine.units.discard(unit)
    for engine in {id(unit.engine): unit.engine for unit in units}.values():
        for other in engine.units:  # around these modules, it finds their parameters plain now
            other.checks.watch = None


def _check_members(module: nn.Module) -> None:
    """Raise where ``copy.copy`` made a module, which holds the unit of the one it was made of."""
    for path, member in module.named_modules():
        state = find_state(member)
        if state is not None and id(member) not in state.unit.links.heads:
            what = f"{path!r} of module" if path else "module"
            raise ValueError(
                f"undo: {what} is a shallow copy (copy.copy) of a module of unit "
                f"{state.unit.name!r}, and shares its parameters; call undo on the model that "
                "fully_shard was called on, or copy with copy.deepcopy."
            )


def _check_ties(units: Sequence[Unit], module: nn.Module) -> None:
    """Raise where a parameter is tied between one of ``units`` and a unit outside ``module``."""
    inside = {id(bucket) for unit in units for bucket in unit.buckets}
    engines = {id(unit.engine): unit.engine for unit in units}.values()
    known = set(units)
    for unit in (unit for engine in engines for unit in engine.units):
        is_outside = unit not in known
        for entry in unit.borrowed:
            is_owned = entry.owner is not None and id(entry.owner()) in inside
            if is_outside == is_owned:
                raise ValueError(
                    f"undo: parameter {entry.spec.fqn!r} is tied between units inside and outside "
                    f"{type(module).__name__}; undo a module that contains both."
                )


def restore_parameters(bucket: Bucket, only: Sequence[Entry] | None = None) -> None:
    """Gather the parameters of a bucket, or those of ``only``, and make them plain again.

    All are gathered before the first is made plain: without memory for one, none is.
    """
    shard = shard_of(bucket)
    full = gather_flat(bucket, shard, shard.dtype, "undo or refresh")
    entries = bucket.entries if only is None else only
    found = [(entry, _copy_part(full, entry), _gather_gradient(entry)) for entry in entries]
    if bucket.history.mirror is not None:
        bucket.history.mirror.unwatch(entries)
    for entry, part, grad in found:
        param, spec = entry.param, entry.spec
        with raw():
            param.grad = None
            untag(param)
            if spec.is_dtensor:
                close_dtensor(param, part, spec)
                grad = None if grad is None else spec.wrap(grad)
            elif entry.wrapper is not None:
                close_wrapped(param, part, entry.wrapper)
            else:
                param.__class__ = entry.kind  # type: ignore[assignment]
                param.data = part
            if bucket.dtypes.grad != bucket.stored.dtype:
                param.grad_dtype = entry.grad_dtype or part.dtype
        param.grad = None if grad is None else grad.to(param.grad_dtype or grad.dtype)
        forget_entry(param)
        take_leaf_hooks(param)
        tables = give_back_hooks(spec)
        give_leaf_hooks(param, tables.gradient, tables.accumulated)


def _copy_part(full: torch.Tensor, entry: Entry) -> torch.Tensor:
    """The entry's parameter in memory of its own, out of the gathered bucket."""
    spec = entry.spec
    part = torch.empty_strided(spec.shape, spec.stride, dtype=full.dtype, device=full.device)
    part.as_strided((spec.numel,), (1,)).copy_(full[spec.offset : spec.offset + spec.numel])
    return part


def _gather_gradient(entry: Entry) -> torch.Tensor | None:
    grad = entry.param.grad
    return None if grad is None else gather_part(grad)
