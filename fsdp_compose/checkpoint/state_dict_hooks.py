"""``model.state_dict()`` and ``model.load_state_dict()`` of a sharded module, through hooks.

The hooks are plain functions on each unit's module and find their state through it, so that a deep
copy drives its own. Saving communicates nothing unless ``set_state_dict_type`` asked for full
tensors. Loading converts what the caller passed before torch copies it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compose.base.process import once
from fsdp_compose.base.torch_private import remove_state_dict_hooks
from fsdp_compose.base.torch_stack import strict_of_load
from fsdp_compose.checkpoint import local
from fsdp_compose.checkpoint.contents import (
    CHECKPOINTED,
    are_our_hooks_off,
    copy_tensor,
    visit_full,
    without_our_hooks,
)
from fsdp_compose.checkpoint.model import (
    Kind,
    StateDictType,
    changes_keys_on_load,
    forget_steps,
    is_first,
    match,
    prepare,
)
from fsdp_compose.checkpoint.optimizer.watch import watch_steps
from fsdp_compose.checkpoint.ranks import groups_of
from fsdp_compose.checkpoint.values import is_ready, show_whole
from fsdp_compose.comm.messages import raise_on_all
from fsdp_compose.construct.names import name_cleaner
from fsdp_compose.core.guards.units import require_units
from fsdp_compose.core.state import Unit, find_state, get_state
from fsdp_compose.sharded import is_sharded

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
        RuntimeError: the units in ``module`` were set differently, so there is no one type before.

    Example:
        >>> model = fully_shard(nn.Linear(3, 2))
        >>> set_state_dict_type(model, "full", cpu_offload=True)
        StateDictType(kind='sharded', cpu_offload=False, rank0_only=False)
        >>> type(model.state_dict()["weight"])
        <class 'torch.Tensor'>
    """
    wanted = StateDictType(kind, cpu_offload, rank0_only)
    before = get_state_dict_type(module)
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
    if wanted.kind == "sharded":
        if unit.opened is not None and unit.opened.in_forward:
            return  # in a scope of ``gathered`` the caller wants its full tensors
        for key, (index, values, name) in places.items():
            leaf = unit.entries[index].param
            if values.get(name) is not leaf:  # gathered now; a release will free that value
                state_dict[key] = show_whole(leaf)
            elif unit.entries[index].spec.parallel is not None:
                state_dict[key] = show_whole(leaf)  # torch took the whole DTensor
    elif wanted.kind == "local":
        for key in places:
            del state_dict[key]
        if unit.modules[0]() is module:
            state_dict.update((prefix + k, v) for k, v in local.local_values(unit).items())
    else:
        _gather(module, unit, places, prefix, state_dict, wanted)


def _gather(
    module: nn.Module,
    unit: Unit,
    places: dict[str, Any],
    prefix: str,
    state_dict: Any,
    wanted: StateDictType,
) -> None:
    keep = not wanted.rank0_only or is_first(module)
    keys: dict[int, list[str]] = {}
    for key, (index, _, _) in places.items():
        keys.setdefault(id(unit.entries[index].param), []).append(key)
    leaves = [entry.param for entry in unit.entries if id(entry.param) in keys]

    def take(leaf: nn.Parameter, full: Tensor) -> None:
        if keep:
            copy = copy_tensor(full, wanted.cpu_offload)
            state_dict.update((key, copy.detach()) for key in keys[id(leaf)])

    visit_full(leaves, take)
    for key in [key for key in state_dict if key.startswith(prefix)]:
        if not keep:
            del state_dict[key]
        elif wanted.cpu_offload and isinstance(state_dict[key], Tensor):
            state_dict[key] = state_dict[key].cpu()


def _places(
    module: nn.Module, unit: Unit, prefix: str, state_dict: Any
) -> Iterator[tuple[str, tuple[int, dict[str, Any], str]]]:
    """(key, (entry, values, name)) of every place of the unit that ``state_dict`` has a key for."""
    clean = name_cleaner(module)
    paths: dict[int, list[str]] = {}
    for path, submodule in module.named_modules(remove_duplicate=False):
        paths.setdefault(id(submodule), []).append(f"{path}." if path else "")
    for slot, index in unit.slots:
        for path in paths.get(id(slot.module()), ()):
            for key in (f"{prefix}{path}{slot.name}", f"{prefix}{clean(path + slot.name)}"):
                if key in state_dict:
                    yield key, (index, slot.values, slot.name)
                    break


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

    With ``assign=True`` sharded parameters are written here and stay the same objects.
    """
    if are_our_hooks_off():
        return
    given = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
    with without_our_hooks():
        current = module.state_dict(keep_vars=True)
    if not any(is_sharded(value) for value in current.values()):
        return  # gathered by a scope: torch writes into the full parameters
    leaves = {id(value) for value in current.values() if is_sharded(value)}
    if any(is_ready(value) or id(value) in leaves for value in given.values()):
        return  # an outer unit's hook has converted these values
    versions = getattr(state_dict, "_metadata", None)
    groups = groups_of(module)
    strict = strict_of_load() and not changes_keys_on_load(module)
    matched = match(module, current, given, strict, versions)
    raise_on_all(matched.problem, groups, matched.facts)
    if matched.local is not None:
        local.write_local(module, matched.local)
    forget_steps(module)
    clean = name_cleaner(module)
    for key in given:
        if clean(key) not in matched.unexpected:
            del state_dict[prefix + key]
    if any(key.startswith(CHECKPOINTED) for key in given):
        prefix += CHECKPOINTED  # the module is a wrapper, whose own hook ran before this one
    assign = bool(local_metadata.get("assign_to_params_buffers", False))
    for key, value in {k: prepare(v, current[k]) for k, v in matched.values.items()}.items():
        leaf = current[key]
        if is_sharded(leaf) and assign:
            if value is not leaf:
                with torch.no_grad():
                    leaf.copy_(value)
            value = leaf
        state_dict[prefix + key] = value


def attach_state_dict(module: nn.Module) -> None:
    """Register both hooks on a unit's module, and watch the optimizers that are stepped."""
    once(watch_steps)
    module.register_state_dict_post_hook(after_state_dict)
    module.register_load_state_dict_pre_hook(before_load)


def detach_state_dict(module: nn.Module) -> None:
    """Remove what ``attach_state_dict`` registered, from a copy of the module too."""
    remove_state_dict_hooks(module, after_state_dict, before_load)
