"""``model.state_dict()`` and ``model.load_state_dict()`` of a sharded module, through hooks.

The hooks are plain functions on each unit's module and find their state through it, so that a deep
copy drives its own. Saving communicates nothing unless ``set_state_dict_type`` asked for full
tensors. Loading converts what the caller passed before torch copies it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_compose.base.process import once
from fsdp_compose.base.torch_private import remove_state_dict_hooks
from fsdp_compose.base.torch_stack import load_under_way
from fsdp_compose.buckets.bucket import Entry
from fsdp_compose.checkpoint import local
from fsdp_compose.checkpoint.contents import (
    CHECKPOINTED,
    are_our_hooks_off,
    changes_keys_on_load,
    copy_tensor,
    refuse_writeback,
    slots_to_load,
    visit_full,
)
from fsdp_compose.checkpoint.model import (
    Kind,
    Matched,
    StateDictType,
    buffer_dtypes,
    is_first,
    match,
    prepare,
    take_problem,
)
from fsdp_compose.checkpoint.optimizer.watch import watch_steps
from fsdp_compose.checkpoint.ranks import meet_in, refuse_left_out
from fsdp_compose.checkpoint.values import find_unwritable, gather_whole, is_ready, show_whole
from fsdp_compose.comm.messages import raise_on_all
from fsdp_compose.construct.names import name_cleaner
from fsdp_compose.core.guards.added_parameters import is_ignored
from fsdp_compose.core.guards.compared_records import compare_records, forget_records
from fsdp_compose.core.guards.failed_steps import clear_failed_steps
from fsdp_compose.core.guards.moved_parameters import require_all_written
from fsdp_compose.core.guards.replaced_parameters import check_place, find_replaced
from fsdp_compose.core.guards.units import get_state, require_units
from fsdp_compose.core.state import Unit, find_state, iter_units
from fsdp_compose.sharded import is_sharded, part_of, spec_of, to_local

_SHARDED = StateDictType("sharded")


def set_state_dict_type(
    module: nn.Module, kind: Kind, *, cpu_offload: bool = False, rank0_only: bool = False
) -> StateDictType:
    """Choose what ``state_dict()`` of ``module`` and of the units in it returns from now on.

    Args:
        module: every unit in it is set, itself included.
        kind, cpu_offload, rank0_only: as for ``fsdp_compose.state_dict``.

    Returns:
        What was chosen before.

    Raises:
        ValueError: options that do not go together, or nothing in ``module`` is sharded.
        RuntimeError: the units in ``module`` were set differently, so there is no one type before;
            or ``rank0_only`` would leave out experts that other ranks hold.

    Example:
        >>> model = fully_shard(nn.Linear(3, 2))
        >>> set_state_dict_type(model, "full", cpu_offload=True)
        StateDictType(kind='sharded', cpu_offload=False, rank0_only=False)
        >>> type(model.state_dict()["weight"])
        <class 'torch.Tensor'>
    """
    wanted = StateDictType(kind, cpu_offload, rank0_only)
    before = get_state_dict_type(module)
    refuse_left_out("set_state_dict_type", module, rank0_only)
    _set(module, wanted)
    return before


def get_state_dict_type(module: nn.Module) -> StateDictType:
    """What ``state_dict()`` of ``module`` returns; sharded unless it was set.

    Raises:
        ValueError: nothing in ``module`` is sharded.
        RuntimeError: the units in it were set differently.

    Example:
        >>> get_state_dict_type(fully_shard(nn.Linear(3, 2)))
        StateDictType(kind='sharded', cpu_offload=False, rank0_only=False)
    """
    advice = "Its state_dict() is what torch makes of it."
    require_units(module, "state_dict_type", advice=advice)
    found: dict[StateDictType, str] = {}
    for name, submodule in module.named_modules():
        state = find_state(submodule)
        if state is not None:
            found.setdefault(state.state_dict_type or _SHARDED, name)
    if len(found) > 1:
        (first, a), (second, b) = list(found.items())[:2]
        raise RuntimeError(
            f"state_dict_type: units of {type(module).__name__} disagree: {a or 'the root'!r} has "
            f"{first}, {b!r} has {second}. Call fsdp_compose.set_state_dict_type(module, kind) on "
            "the outermost module."
        )
    return next(iter(found))


@contextlib.contextmanager
def state_dict_type(
    module: nn.Module, kind: Kind, *, cpu_offload: bool = False, rank0_only: bool = False
) -> Iterator[None]:
    """Scope in which ``state_dict()`` of ``module`` returns ``kind``; see ``set_state_dict_type``.

    Raises:
        ValueError, RuntimeError: as ``set_state_dict_type``.

    Example:
        >>> model = fully_shard(nn.Linear(3, 2))
        >>> with state_dict_type(model, "full"):
        ...     full = model.state_dict()
        >>> type(full["weight"]).__name__, type(model.state_dict()["weight"]).__name__
        ('Tensor', 'ShardedTensor')
    """
    before = set_state_dict_type(module, kind, cpu_offload=cpu_offload, rank0_only=rank0_only)
    try:
        yield
    finally:
        _set(module, before)


def _set(module: nn.Module, wanted: StateDictType) -> None:
    for submodule in module.modules():
        state = find_state(submodule)
        if state is not None:
            state.state_dict_type = wanted


def after_state_dict(module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
    """State-dict post-hook of a unit's module: its values become what the type says."""
    if are_our_hooks_off():
        return
    wanted = get_state_dict_type(module)
    unit = get_state(module).unit
    places = dict(_places(module, unit, prefix, state_dict))
    for index, values, name in places.values():
        check_place(unit, values, name, index)
    if wanted.kind == "sharded":
        if unit.opened is not None and unit.opened.in_forward:
            return  # in a scope of ``gathered`` the caller wants its full tensors
        for key, (index, values, name) in places.items():
            entry = unit.entries[index]
            # A release will free what is gathered now; of a DTensor torch took the whole.
            if values.get(name) is not entry.param or entry.spec.parallel is not None:
                state_dict[key] = show_whole(entry.param)
        return
    refuse_writeback([unit])
    if wanted.kind == "local":
        for key in [*places, *_slices_elsewhere(unit, places, prefix, state_dict)]:
            del state_dict[key]
        if unit.modules[0]() is module:
            state_dict.update((prefix + k, v) for k, v in local.local_values(unit).items())
    else:
        compare_records([unit], "state_dict")
        require_all_written([unit])
        keep = not wanted.rank0_only or is_first(module)
        _gather(unit, places, prefix, state_dict, wanted.cpu_offload, keep)
        _finish_full(module, prefix, state_dict, wanted.cpu_offload, keep)


def _gather(
    unit: Unit, places: dict[str, Any], prefix: str, state_dict: Any, cpu: bool, keep: bool
) -> None:
    """Replace the unit's slices by full tensors, those that a hook of the user's made too."""
    shown = {key: (index, values.get(name)) for key, (index, values, name) in places.items()}
    for key, index in _slices_elsewhere(unit, places, prefix, state_dict).items():
        shown[key] = index, unit.entries[index].param
    keys: dict[int, list[str]] = {}
    found: dict[int, Any] = {}
    for key, (index, tensor) in shown.items():
        value = _leaf_of(state_dict[key], tensor, unit.entries[index])
        if is_sharded(value):
            found[id(value)] = value
            keys.setdefault(id(value), []).append(key)
        elif isinstance(value, Tensor):
            state_dict[key] = copy_tensor(value, cpu)  # a release will free what a scope shows

    def take(value: nn.Parameter, full: Tensor) -> None:
        if keep:
            copy = copy_tensor(full, cpu)
            state_dict.update((key, copy.detach()) for key in keys[id(value)])

    visit_full(found.values(), take)


def _leaf_of(value: Any, shown: Any, entry: Entry) -> Any:
    """The leaf for what torch read of ``shown``, or what a hook of the user's put in its place."""
    if not is_sharded(value) and entry.spec.parallel is not None:
        return entry.param  # torch took the whole DTensor
    if not is_sharded(shown):
        is_read = isinstance(value, Tensor) and not is_sharded(value) and value.is_set_to(shown)
    else:
        is_read = is_sharded(value) and to_local(value).is_set_to(to_local(shown))
    return entry.param if is_read else value


def _slices_elsewhere(
    unit: Unit, places: dict[str, Any], prefix: str, state_dict: Any
) -> dict[str, int]:
    """Entries of the unit by the other keys that a hook of the user's gave slices of them."""
    indices = {(entry.spec.unit, entry.spec.fqn): i for i, entry in enumerate(unit.entries)}
    others = {k: v for k, v in state_dict.items() if k.startswith(prefix) and k not in places}
    specs = {key: spec_of(value) for key, value in others.items() if is_sharded(value)}
    return {
        key: indices[spec.unit, spec.fqn]
        for key, spec in specs.items()
        if (spec.unit, spec.fqn) in indices
    }


def _finish_full(module: nn.Module, prefix: str, state_dict: Any, cpu: bool, keep: bool) -> None:
    """Make the rest plain copies, of the dtypes they had, on the host if asked for; or drop all."""
    dtypes, clean = buffer_dtypes(module), name_cleaner(module)
    held = [t for t in (*module.parameters(), *module.buffers()) if not is_sharded(t)]
    live = {part_of(tensor).untyped_storage().data_ptr() for tensor in held}
    for key in [key for key in state_dict if key.startswith(prefix)]:
        value = state_dict[key]
        if isinstance(value, DTensor):
            value = gather_whole(value.detach())
        if not keep:
            del state_dict[key]
        elif isinstance(value, Tensor):
            dtype = dtypes.get(clean(key[len(prefix) :]), value.dtype)
            is_live = not is_sharded(value) and value.untyped_storage().data_ptr() in live
            device = "cpu" if cpu else value.device
            state_dict[key] = value.detach().to(device, dtype, copy=is_live)


def _places(
    module: nn.Module, unit: Unit, prefix: str, state_dict: Any
) -> Iterator[tuple[str, tuple[int, dict[str, Any], str]]]:
    """(key, (entry, values, name)) of every place of the unit that ``state_dict`` has a key for."""
    clean = name_cleaner(module)
    paths: dict[int, list[str]] = {}
    for path, submodule in module.named_modules(remove_duplicate=False):
        paths.setdefault(id(submodule), []).append(f"{path}." if path else "")
    for slot, index in unit.slots.items():
        for path in paths.get(id(slot.module()), ()):
            for key in (f"{prefix}{path}{slot.name}", f"{prefix}{clean(path + slot.name)}"):
                if key in state_dict:
                    yield key, (index, slot.values, slot.name)
                    break


_raw_shards: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()
"""What a load under way has of ``kind="local"``, by the module whose hook has checked it."""


def before_load(
    module: nn.Module,
    state_dict: Any,
    prefix: str,
    local_metadata: Any,
    _strict: bool,  # torch passes True, whatever the caller chose
    missing_keys: Any,
    unexpected_keys: Any,
    error_msgs: Any,
) -> None:
    """Load-state-dict pre-hook of a unit's module: check all below it, then convert its values.

    With ``assign=True`` sharded parameters are written here, or in ``after_load``, and stay the
    same objects.
    """
    _raw_shards.pop(module, None)  # of a load that failed
    if are_our_hooks_off():
        return
    clear_failed_steps(iter_units(module))
    given = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
    current = slots_to_load(module)
    if not any(is_sharded(value) for value in current.values()):
        return  # gathered by a scope: torch writes into the full parameters
    leaves = {id(value) for value in current.values() if is_sharded(value)}
    if any(is_ready(value) or id(value) in leaves for value in given.values()):
        return  # an outer unit's hook has converted these values
    versions = getattr(state_dict, "_metadata", None)
    assign = bool(local_metadata.get("assign_to_params_buffers", False))
    outer = "" if given else prefix
    matched, custom = _match_given(module, given, current, versions, assign, outer)
    if matched.local is not None:
        _raw_shards[module] = matched.local
    forget_records(iter_units(module))
    clean = name_cleaner(module)
    ready = {k: prepare(v, current[k], not custom) for k, v in matched.values.items()}
    if assign:
        casts, units = buffer_dtypes(module), list(iter_units(module))
        ready = {k: _to_assign(v, current[k], clean(k) in casts, units) for k, v in ready.items()}
    for key in given:
        if clean(key) not in matched.unexpected:
            del state_dict[prefix + key]
    if any(key.startswith(CHECKPOINTED) for key in given):
        prefix += CHECKPOINTED  # the module is a wrapper, whose own hook ran before this one
    state_dict.update((prefix + key, value) for key, value in ready.items())


def _match_given(
    module: nn.Module,
    given: dict[str, Any],
    current: dict[str, Any],
    versions: Any,
    assign: bool,
    outer: str,
) -> tuple[Matched, bool]:
    """Match what is loaded with what the module has, alike on all ranks, or raise on all.

    The second is whether keys are the user's own, which only the user's code can read.

    Args:
        outer: where the module is in what is loaded, if no key that was given begins so.
    """
    groups = meet_in("load_state_dict", module)
    call = load_under_way()
    custom = changes_keys_on_load(call.get("self", module))
    strict = bool(call.get("strict")) and not custom
    matched = match(module, current, given, strict, changes_keys_on_load(module), versions)
    as_is = {k for k, v in current.items() if custom or (assign and not is_sharded(v))}
    written = {k: None if k in as_is else v for k, v in current.items()}
    if outer and matched.problem is not None:
        where = f"no key begins with {outer!r}, where this module is in what is loaded"
        matched.problem = RuntimeError(f"{matched.problem}; {where}")
    matched.problem = matched.problem or find_unwritable(matched.values, written)
    raise_on_all(take_problem(matched, written), groups, matched.facts, "load_state_dict")
    return matched, custom


def _to_assign(value: Any, current: Any, is_cast: bool, units: Iterable[Unit]) -> Any:
    """What torch shall put in the place of ``current`` with ``assign=True``.

    Sharded parameters stay the same objects, and buffers in the dtype they were cast to; what takes
    the place of an ignored parameter is ignored.
    """
    if is_sharded(current) and is_sharded(value):
        if value is not current:
            with torch.no_grad():
                current.copy_(value)
        return current
    if is_cast and isinstance(value, Tensor):
        value = value.to(current.dtype)
    for unit in units:
        if is_ignored(unit, current) and isinstance(value, Tensor):
            if isinstance(current, nn.Parameter) and not isinstance(value, nn.Parameter):
                value = nn.Parameter(value, current.requires_grad)
            unit.checks.left_alone[id(value)] = weakref.ref(value)
    return value


def after_load(module: nn.Module, _incompatible_keys: Any) -> None:
    """Load-state-dict post-hook of a unit's module: parameters stay the same objects.

    With ``assign=True`` torch puts what a hook of the user's made into the module. Raw shards are
    written last: hooks of ``state_dict`` have not changed them, so those of loading must not.
    """
    unit = get_state(module).unit
    raw_shards = _raw_shards.pop(module, None)
    if raw_shards is not None:
        local.write_local(module, raw_shards)
    if are_our_hooks_off() or unit.opened is not None or not load_under_way().get("assign"):
        return
    for values, name, index in find_replaced(unit):
        leaf, assigned = unit.entries[index].param, values.get(name)
        if isinstance(assigned, Tensor):
            with torch.no_grad():
                leaf.copy_(assigned)
            values[name] = leaf


def attach_state_dict(module: nn.Module) -> None:
    """Register the hooks on a unit's module, and watch the optimizers that are stepped."""
    once(watch_steps)
    module.register_state_dict_post_hook(after_state_dict)
    module.register_load_state_dict_pre_hook(before_load)
    module.register_load_state_dict_post_hook(after_load)


def detach_state_dict(module: nn.Module) -> None:
    """Remove what ``attach_state_dict`` registered, from a copy of the module too."""
    remove_state_dict_hooks(module, after_state_dict, before_load, after_load)
