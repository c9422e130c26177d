"""A parameter that was added to a unit's modules after sharding raises; it is not left out.

The first forward after any change looks through all modules of the unit. Every other forward only
compares the contents of the modules' dictionaries with what the last full look recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from fsdp_compose.base.modules import walk_modules
from fsdp_compose.base.torch_private import (
    backward_hook_tables,
    child_slots,
    forward_hook_tables,
    parameter_slots,
)
from fsdp_compose.base.wording import quote_names
from fsdp_compose.core.records import Watch
from fsdp_compose.core.state import Unit, find_state
from fsdp_compose.sharded import PRIVACY, is_sharded


def check_additions(unit: Unit) -> None:
    """Raise when a trainable parameter of the unit's modules is in no bucket.

    Raises:
        RuntimeError: naming such parameters.
    """
    watch = unit.checks.watch
    if (
        watch is not None
        and tuple(map(len, watch.tables)) == watch.lengths
        and tuple(chain.from_iterable(map(dict.values, watch.parents))) == watch.children
    ):
        for values, name in watch.strays:
            value = values.get(name)
            if value is not None and value.requires_grad:
                break
        else:
            return
    path = _find_path(unit)
    missing = [(path + name, value) for name, value in find_missing(unit)]
    added = [name for name, value in missing if not is_sharded(value)]
    if added:
        raise RuntimeError(
            f"unit {unit.name!r} has trainable parameters that were added, or made trainable, "
            f"after fully_shard and are not sharded: {quote_names(added)}. Their gradients would "
            "differ between ranks. Call fsdp_compose.refresh(model) on every rank, and give them "
            "to the optimizer."
        )
    if missing:
        moved = quote_names(name for name, _ in missing)
        raise RuntimeError(
            f"unit {unit.name!r}: its modules have sharded parameters under names that they did "
            f"not have when the unit was sharded: {moved}. The unit would not gather them there. "
            "Call fsdp_compose.refresh(model) on every rank."
        )
    remember(unit)


def _find_path(unit: Unit) -> str:
    """What a name in a unit of one module begins with in the model; "" for one of several."""
    own = (entry for bucket in unit.buckets for entry in bucket.entries)
    paths = (entry.spec.fqn.removesuffix(entry.names[0]) for entry in own)
    return next(paths, "") if len(unit.modules) == 1 else ""


def check_copy(unit: Unit, module: nn.Module) -> None:
    """Raise for a shallow copy of one of the unit's modules that no longer reads what that reads.

    Raises:
        RuntimeError: naming a parameter of the copy that the unit does not gather.
    """
    known = {(id(values), name) for values, name, _ in unit.links.places}
    for name, value in _find_unknown(unit, walk_modules(module, partial(_is_apart, unit)), known):
        raise RuntimeError(
            f"unit {unit.name!r}: forward was called on a copy of its {type(module).__name__} that "
            "was made by copy.copy or from its __dict__. The copy runs the unit of the original, "
            f"which does not gather the copy's {name!r} ({type(value).__name__}). Copy with "
            "copy.deepcopy(module), which gives the copy a unit of its own; for a plain copy, call "
            "fsdp_compose.undo(copy.deepcopy(module)) on every rank."
        )


def list_managed(unit: Unit) -> Iterator[tuple[str, nn.Module]]:
    """List the modules whose parameters belong to the unit, with their names in it."""
    seen: set[int] = set()
    for position, ref in enumerate(unit.modules):
        root, name = ref(), str(position) if len(unit.modules) > 1 else ""
        if root is not None:
            yield from walk_modules(root, partial(_is_apart, unit), name, seen)


def _is_apart(unit: Unit, child: nn.Module) -> bool:
    """Whether ``child`` is another unit's, was ignored, or is compiled and has no parameters."""
    return (
        find_state(child) is not None
        or is_ignored(unit, child)
        or isinstance(child, torch.jit.ScriptModule)
    )


def is_ignored(unit: Unit, item: object) -> bool:
    """Whether ``item`` was among what ``fully_shard`` was told to ignore."""
    ref = unit.checks.left_alone.get(id(item))
    return ref is not None and ref() is item


def find_missing(unit: Unit) -> list[tuple[str, nn.Parameter]]:
    """Trainable parameters that forward would leave out, and parameters it would read sharded."""
    known = {(id(values), name) for values, name, _ in unit.links.places}
    return _find_unknown(unit, list_managed(unit), known)


def _find_unknown(
    unit: Unit, modules: Iterable[tuple[str, nn.Module]], known: set[tuple[int, str]]
) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) where ``modules`` have one that is not ``known`` and is not ignored."""
    return [
        (f"{prefix}.{name}" if prefix else name, value)
        for prefix, module in modules
        for values in (parameter_slots(module),)
        for name, value in values.items()
        if isinstance(value, nn.Parameter)
        and (id(values), name) not in known
        and (value.requires_grad or is_sharded(value))
        and not is_ignored(unit, value)
    ]


def remember(unit: Unit) -> None:
    """Record what the unit's modules hold now; later forwards compare theirs with it."""
    modules = [module for _, module in list_managed(unit)]
    tables = tuple([t for m in modules for t in (parameter_slots(m), child_slots(m))])
    parents = tuple([children for m in modules if (children := child_slots(m))])
    watched = {(id(values), name) for values, name, _ in unit.links.places}
    roots = {id(ref()) for ref in unit.modules}
    inside = [module for module in modules if id(module) not in roots]
    strays = [
        (values, name)
        for module in modules
        for values in (parameter_slots(module),)
        for name, value in values.items()
        if (id(values), name) not in watched and not is_ignored(unit, value)
    ]
    unit.checks.watch = Watch(
        hooks=tuple(chain.from_iterable(map(forward_hook_tables, inside))),
        backward_hooks=tuple(chain.from_iterable(map(backward_hook_tables, modules))),
        tables=tables,
        lengths=tuple(map(len, tables)),
        parents=parents,
        children=tuple(chain.from_iterable(map(dict.values, parents))),
        strays=tuple(strays),
    )


def refuse_opacus(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Raise when a module of opacus is given sharded parameters.

    Raises:
        RuntimeError: naming a sharded parameter.
    """
    if child is None or not type(parent).__module__.startswith("opacus."):
        return
    for path, param in child.named_parameters():
        if is_sharded(param):
            raise RuntimeError(
                f"{type(parent).__name__} was given {path!r}, which is sharded. {PRIVACY}"
            )


def refuse_replication(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Raise when DistributedDataParallel is given sharded parameters.

    It would start by overwriting every rank's slices with those of rank 0.

    Raises:
        RuntimeError: naming a sharded parameter that it was not told to ignore.
    """
    if not isinstance(parent, DistributedDataParallel) or child is None:
        return
    left_alone = getattr(child, "_ddp_params_and_buffers_to_ignore", ())
    for path, param in child.named_parameters():
        if is_sharded(param) and path not in left_alone:
            raise RuntimeError(
                f"DistributedDataParallel was given {path!r}, which is sharded: it would overwrite "
                "each rank's slice with that of rank 0, and gradients are reduced already. Use the "
                "model as fully_shard returned it; for replicas of it, pass fully_shard a mesh of "
                "(replicate, shard)."
            )


def watch_registrations() -> None:
    """Have torch ask the two functions above before it makes any module part of another."""
    register_module_module_registration_hook(refuse_opacus)
    register_module_module_registration_hook(refuse_replication)
