"""``refresh``: after modules were edited, shard new parameters and give back unused ones.

Buckets whose parameters are still there stay as they are, so optimizer state keeps fitting them.
New parameters go into new buckets of the unit that they are in. A parameter that was removed is
given back whole and plain, and its place in the bucket stays, as padding.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn

from fsdp_compose.attach.build_unit import (
    MetaValues,
    build_bucket,
    cast_buffers,
    initialise_values,
    leave_for_loading,
)
from fsdp_compose.attach.undo import restore_parameters
from fsdp_compose.base.arguments import check_function
from fsdp_compose.base.exchange import check_exchangeable
from fsdp_compose.base.group import Group
from fsdp_compose.base.mesh import MeshLike
from fsdp_compose.base.policy import INITS, Init
from fsdp_compose.base.torch_private import parameter_slots, raw
from fsdp_compose.buckets.bucket import Bucket, Entry, Slot
from fsdp_compose.buckets.build import bind
from fsdp_compose.buckets.entries import find_entry, give_slice, rename_entry
from fsdp_compose.comm.heads import meet_to_call
from fsdp_compose.construct.choose_buckets import plan_buckets
from fsdp_compose.construct.choose_units import check_dense
from fsdp_compose.construct.compare_ranks import compare_plans, count_ranks
from fsdp_compose.construct.initialise import InitFn
from fsdp_compose.construct.names import clean_name
from fsdp_compose.construct.overlaps import check_overlaps
from fsdp_compose.construct.plans import Ignored, Options, ParameterPlan, UnitPlan
from fsdp_compose.construct.tensor_parallel import tensor_parallel_groups
from fsdp_compose.core.guards.added_parameters import is_ignored, list_managed, remember
from fsdp_compose.core.guards.connect import is_running
from fsdp_compose.core.guards.failed_steps import clear_failed_steps
from fsdp_compose.core.guards.moved_parameters import shard_of
from fsdp_compose.core.guards.plain_gradients import share_plain_gradients
from fsdp_compose.core.guards.static_buffers import choose_buffers_again
from fsdp_compose.core.guards.units import get_state, modules_of, require_units
from fsdp_compose.core.passes import begin_forward_pass
from fsdp_compose.core.reducing import drain
from fsdp_compose.core.state import Unit, owner_of
from fsdp_compose.scopes.comm_hooks import forget_rounding
from fsdp_compose.scopes.unshard import check_reduced
from fsdp_compose.sharded import Hooks, is_sharded, set_local, tag

__all__ = ["refresh"]

M = TypeVar("M", bound=nn.Module)


def refresh(module: M, *, init: Init | None = None, param_init_fn: InitFn | None = None) -> M:
    """Shard what was added to a sharded model, and give back what was removed from it.

    Every unit in ``module`` looks through its modules again. New parameters are sharded, into new
    buckets of their unit and with its options. Parameters that are there still, wherever they are
    now, keep their slices, their gradients and their optimizer state; those moved to another place
    take its name. Parameters that no unit reads any more become plain and whole again, as after
    ``undo``; the memory of their slices is kept as padding until ``undo``. Buffers that modules
    were given since are cast to ``buffer_dtype``. The optimizer is the caller's: give it the new
    parameters, and take the removed ones from it.

    Trainable parameters that a forward would leave out raise there and name this function. What is
    in no unit is not seen by it: shard the outermost module, so that everything is in some unit.

    All ranks must call it, after the same edits, between a backward and the next forward.

    Args:
        module: a module that contains units; usually the whole model.
        init: how new parameters start, as in ``fully_shard``; None as the unit was sharded with.
        param_init_fn: for new parameters on the meta device, as in ``fully_shard``.

    Returns:
        ``module``.

    Raises:
        TypeError: ``param_init_fn`` is not a function of one module.
        ValueError: nothing in ``module`` is sharded, or new parameters differ between ranks. The
            same on every rank, with nothing changed; except where the initialisation of new meta
            parameters failed or differs between ranks, which leaves all of them for loading.
        RuntimeError: a unit is in the middle of a forward or backward, or open in a scope.

    Example:
        >>> model = fully_shard(nn.Sequential(nn.Linear(2, 2)))
        >>> model = refresh(model.append(nn.Linear(2, 2)))
        >>> isinstance(model[1].weight, ShardedParameter)
        True
    """
    with _name_refresh():
        _refresh(module, init, param_init_fn)
    return module


@contextmanager
def _name_refresh() -> Iterator[None]:
    """Scope in which what is said of ``fully_shard``, which plans alike, is said of ``refresh``."""
    try:
        yield
    except (TypeError, ValueError) as error:
        before, is_said, text = str(error).partition("fully_shard: ")
        if before or not is_said:
            raise
        if "ignored=" in text or "mp_policy=" in text:
            text += f" For an argument that refresh lacks, {_AGAIN}."
        raise type(error)(f"refresh: {text}") from error.__cause__


_AGAIN = "call fsdp_compose.undo(module), then fully_shard(module, ...) with it"


def _refresh(module: nn.Module, init: Init | None, param_init_fn: InitFn | None) -> None:
    units = require_units(module, "refresh")
    clear_failed_steps(units)
    share_plain_gradients(units)
    groups = dict.fromkeys(g for u in units for b in u.gathered for g in b.mesh.groups)
    meet_to_call("refresh", groups)
    for unit in units:
        if unit.checks.watch is not None:  # it holds modules that were taken out
            unit.checks.watch = replace(unit.checks.watch, children=())
    problem: Exception | None = None
    survey: list[_Change] = []
    try:
        if param_init_fn is not None:
            check_function("refresh", "param_init_fn", param_init_fn, "(module)")
        if init is not None and init not in INITS:
            raise ValueError(f"refresh: init is {init!r}; wanted one of {INITS}.")
        promised: set[int] = set()
        beside = tensor_parallel_groups([module])
        for unit in units:
            _check_at_rest(unit)
            survey.append(_find_change(unit, init, promised, beside))
            known = (entry.held for entry in unit.entries)
            check_exchangeable("refresh", (*known, *(item.param for item in survey[-1].plan.found)))
        check_overlaps("refresh", [module], [change.plan for change in survey])
    except Exception as error:  # whatever it is, the other ranks wait for it
        problem = error
    plans = [change.plan for change in survey]
    for plan in plans:
        plan.options = replace(plan.options, param_init_fn=param_init_fn)
    try:
        metas = _compare(units, plans, problem, module)
    finally:
        del problem  # as in ``compare_plans``
    for engine in dict.fromkeys(unit.engine for unit in units):
        begin_forward_pass(engine)
        drain(engine)
    for unit in units:
        for reason in tuple(unit.holds):
            unit.engine.schedule.drop(unit, reason)
    _claim_buckets(units)
    read = {entry for change in survey for entry in change.read}
    read |= {e for u in _list_other_units(units) for e in u.borrowed}
    for change in survey:
        _give_back(change.unit, read)
    at_home = {e for change in survey for e in change.read if owner_of(e) in change.unit.buckets}
    for change in survey:
        _apply_change(change, metas[change.unit.options.mesh], at_home)
    for unit in units:
        remember(unit)
    choose_buffers_again(units)
    _leave_for_loading(metas, module)


def _claim_buckets(units: Sequence[Unit]) -> None:
    """Give buckets of units whose modules were removed to the first unit that reads from them."""
    lent = [(u, bucket) for u in units for bucket in u.gathered[len(u.buckets) :]]
    if any(_find_unit(bucket) not in units for _, bucket in lent):
        gc.collect()  # as on the other ranks, of which some may have collected a removed module
    for unit, bucket in lent:
        if _find_unit(bucket) is None:
            unit.buckets.append(bucket)
            bucket.users.borrowers.discard(unit)
            bucket.users.unit = weakref.ref(unit)


def _find_unit(bucket: Bucket) -> Unit | None:
    return None if bucket.users.unit is None else bucket.users.unit()


def _leave_for_loading(metas: dict[MeshLike | None, MetaValues], module: nn.Module) -> None:
    """Leave values for loading by mesh; the widest, which is last, says what is wrong."""
    problem: Exception | None = None
    for mesh, meta in metas.items():
        if meta.keys:
            meta.problem = meta.problem or problem
            try:
                leave_for_loading(meta, mesh, [module])
            except Exception as error:
                problem = problem or error
    if problem is not None:
        raise problem


def _compare(
    units: Sequence[Unit], plans: list[UnitPlan], problem: Exception | None, module: nn.Module
) -> dict[MeshLike | None, MetaValues]:
    """Compare the plans over the ranks that each unit is cut over: experts are on fewer ranks.

    The widest mesh comes last, and tells all ranks what others found. Other arguments as for
    ``compare_plans``.
    """
    found: dict[MeshLike | None, MetaValues] = {}
    *narrow, widest = sorted(dict.fromkeys(u.options.mesh for u in units), key=count_ranks)
    for mesh in narrow:
        own = [plan for plan in plans if plan.options.mesh == mesh]
        try:
            found[mesh] = MetaValues(compare_plans(own, mesh, problem, (), "refresh"))
        except Exception as error:
            problem = problem or error
    own = [plan for plan in plans if plan.options.mesh == widest]
    try:
        found[widest] = MetaValues(compare_plans(own, widest, problem, [module], "refresh"))
    finally:
        del problem
    return found


@dataclass
class _Change:
    """What a unit's modules hold now."""

    unit: Unit
    plan: UnitPlan  # its buckets are for what is new
    read: list[Entry]  # of parameters that are sharded already


def _check_at_rest(unit: Unit) -> None:
    if unit.opened is not None and not is_running(unit):
        raise RuntimeError(
            f"refresh: unit {unit.name!r} is inside a scope that shows its full parameters; leave "
            "it first, or call reshard where unshard was called."
        )
    if is_running(unit) or unit.run.calls:
        raise RuntimeError(
            f"refresh: unit {unit.name!r} is inside its forward or backward; call refresh between "
            "a backward that reduced and the next forward."
        )
    check_reduced(unit.buckets, "refresh")


def _find_change(
    unit: Unit, init: Init | None, promised: set[int], beside: Sequence[Group]
) -> _Change:
    options: Options = unit.options if init is None else replace(unit.options, init=init)
    modules = modules_of(unit)
    plan = UnitPlan(unit.name, modules, options, _is_named(unit, modules))
    known_ids = unit.checks.left_alone.items()
    left_alone = frozenset(key for key, ref in known_ids if ref() is not None)  # else another's id
    ignored = tuple(unit.checks.left_alone.values())
    plan.ignored = Ignored(left_alone, left_alone, left_alone, ignored)
    known = {id(values) for values, _, _ in unit.links.places}
    if unit.checks.watch is not None:
        known |= {id(table) for table in unit.checks.watch.tables}
    found: dict[int, ParameterPlan] = {}
    fresh: list[tuple[str, nn.Module]] = []
    for prefix, submodule in list_managed(unit):
        if id(parameter_slots(submodule)) not in known:
            fresh.append((prefix, submodule))
        for key, param in parameter_slots(submodule).items():
            if isinstance(param, nn.Parameter) and not is_ignored(unit, param):
                check_dense(plan, prefix, submodule)
                item = found.setdefault(id(param), ParameterPlan(param))
                item.names.append(clean_name(f"{prefix}.{key}" if prefix else key))
                item.slots.append(Slot.of(submodule, key))
    items = list(found.values())
    plan.found = [item for item in items if not is_sharded(item.param)]
    plan_buckets(plan, promised, {}, beside)
    plan.found = items
    plan.members = [_select_inside(fresh, position, modules) for position in range(len(modules))]
    return _Change(unit, plan, [find_entry(i.param) for i in items if is_sharded(i.param)])


def _select_inside(
    fresh: list[tuple[str, nn.Module]], position: int, modules: Sequence[nn.Module]
) -> list[tuple[str, nn.Module]]:
    """Select the modules of ``fresh`` in one of the unit's modules, named as in it."""
    if len(modules) == 1:
        return fresh
    start = f"{position}."
    return [(name.removeprefix(start), m) for name, m in fresh if name.startswith(start)]


def _is_named(unit: Unit, modules: Sequence[nn.Module]) -> bool:
    """Whether parameters of the unit are named behind its own name."""
    entries = [entry for bucket in unit.buckets for entry in bucket.entries]
    if entries:  # those that other units read by now are named as there
        return any(entry.spec.fqn == f"{unit.name}.{entry.names[0]}" for entry in entries)
    return unit.name != "+".join(type(module).__name__ for module in modules)


def _list_other_units(units: list[Unit]) -> list[Unit]:
    engines, known = dict.fromkeys(unit.engine for unit in units), set(units)
    return [other for engine in engines for other in engine.units if other not in known]


def _give_back(unit: Unit, read: set[Entry]) -> None:
    """Give back the unit's parameters that nothing reads; their slices become padding."""
    for bucket in list(unit.buckets):
        gone = [entry for entry in bucket.entries if entry.slots and entry not in read]
        if not gone:
            continue
        with torch.inference_mode(False), torch.no_grad():
            restore_parameters(bucket, gone)
        if len(gone) == sum(bool(entry.slots) for entry in bucket.entries):
            unit.buckets.remove(bucket)
            forget_rounding(unit)
            continue
        for entry in gone:
            _pad_bucket(bucket, entry)


def _pad_bucket(bucket: Bucket, entry: Entry) -> None:
    """Put a frozen zero that nobody reads in the place of ``entry``."""
    spec = replace(entry.spec, fqn=f"{entry.spec.fqn} (removed)", hooks=Hooks(), parallel=None)
    piece = shard_of(bucket).split(bucket.views.splits)[bucket.views.pieces[entry.index]]
    with raw(), torch.no_grad():
        param = nn.Parameter(piece.new_empty(0), requires_grad=False)
        set_local(param, piece.zero_())
        tag(param, spec)
    padding = Entry(param, spec, (f"{entry.names[0]} (removed)",), [])
    bucket.entries[entry.index] = padding
    bind(bucket, padding, entry.index)
    give_slice(padding, param)
    unready = bucket.history.unready
    bucket.history.unready = [pair for pair in unready if pair[0] is not entry]


def _apply_change(change: _Change, meta: MetaValues, at_home: set[Entry]) -> None:
    """Make the new buckets, and let the unit know where everything is.

    A parameter that left the unit whose bucket holds it is named by the first unit that reads it.
    """
    unit, plan = change.unit, change.plan
    prefixes = _find_prefixes(unit, change)
    values = initialise_values(plan, meta)
    for bucket_plan in plan.buckets:
        unit.buckets.append(build_bucket(plan, bucket_plan))
    entries = [find_entry(item.param) for item in plan.found]
    for item, entry in zip(plan.found, entries, strict=True):
        if owner_of(entry) in unit.buckets or entry not in at_home:
            at_home.add(entry)
            _rename_entry(entry, item, prefixes)
    own = [entry for bucket in unit.buckets for entry in bucket.entries]
    unit.borrowed = list(dict.fromkeys(entry for entry in entries if entry not in own))
    index = {entry: i for i, entry in enumerate([*own, *unit.borrowed])}
    unit.slots = {
        slot: index[entry]
        for item, entry in zip(plan.found, entries, strict=True)
        for slot in item.slots
    }
    _forget_unready_buffers(unit)
    unit.checks.epoch, unit.checks.trigger, unit.run.live = unit.checks.epoch + 1, None, None
    unit.link()
    _cast_new_buffers(unit, plan)
    meta.values.update((value.key, (unit, value)) for value in values)


def _cast_new_buffers(unit: Unit, plan: UnitPlan) -> None:
    """Cast the buffers of new modules, and those that modules were given since they were sharded.

    A module may be new under the name of one whose buffers were cast.
    """
    for module in plan.modules:
        before = get_state(module).buffer_dtypes
        for name, _, _, buffer in plan.managed_buffers(module):
            if buffer.dtype != unit.mp.buffer_dtype:
                before.pop(name, None)
    every = list(list_managed(unit))
    plan.members = [_select_inside(every, i, plan.modules) for i in range(len(plan.modules))]
    cast_buffers(plan, unit.mp)


def _forget_unready_buffers(unit: Unit) -> None:
    """Wait no more for values of buffers that are not in the unit any more."""
    inside = {id(module) for _, module in list_managed(unit)}
    unit.checks.unready_buffers = [
        (name, slot, mark)
        for name, slot, mark in unit.checks.unready_buffers
        if id(slot.module()) in inside and slot.values.get(slot.name) is not None
    ]


def _find_prefixes(unit: Unit, change: _Change) -> dict[str, str]:
    """What stands before a parameter's name in the unit, by module of the unit."""
    if len(unit.modules) == 1:
        return {"": f"{unit.name}."} if change.plan.is_named else {}
    found: dict[str, str] = {}
    own = unit.entries[: len(unit.entries) - len(unit.borrowed)]
    for entry in {own[index] for index in unit.slots.values() if index < len(own)}:
        position, _, name = entry.names[0].partition(".")  # others read by now have names elsewhere
        found[position] = entry.spec.fqn.removesuffix(name)
    return found


def _rename_entry(entry: Entry, item: ParameterPlan, prefixes: dict[str, str]) -> None:
    """Record where, and under which names, modules read the parameter now."""
    first = item.names[0]
    position, _, rest = first.partition(".")
    if position in prefixes:
        fqn = prefixes[position] + rest
    else:
        fqn = prefixes.get("", "") + first
    entry.names, entry.slots = tuple(item.names), item.slots
    rename_entry(entry, fqn, entry.spec.unit)
