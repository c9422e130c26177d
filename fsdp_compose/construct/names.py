"""Names of parameters and the parameters of names: shared ones under all, wrappers' prefixes gone.

A name is the path of attributes from the module that was asked, without what wrappers put in:
``torch.compile``, activation checkpointing, DistributedDataParallel, FullyShardedDataParallel.
Between passes and while a unit is gathered the answer is the same: the parameters an optimizer has.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fsdp_compose.base.arguments import check_flags, check_module
from fsdp_compose.base.torch_private import child_slots, parameter_slots
from fsdp_compose.buckets.entries import entry_of
from fsdp_compose.core.state import find_state, iter_units

PREFIXES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Attributes that only wrappers have."""
_MODULE_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def clean_name(name: str) -> str:
    """``name`` without wrappers' attributes, as far as the name alone tells: ``module.`` stays."""
    return ".".join([part for part in name.split(".") if part not in PREFIXES])


def name_cleaner(module: nn.Module) -> Callable[[str], str]:
    """What turns names in ``module``, as torch spells them, into those without any wrapper's part.

    Unlike ``clean_name`` it sees which ``module.`` belongs to a wrapper. For the paths of modules
    there is ``path_cleaner``.
    """
    found = module.named_modules(remove_duplicate=False)
    paths = [path for path, inner in found if isinstance(inner, _MODULE_WRAPPERS)]
    if not paths:
        return clean_name
    hidden = {f"{path}.module." if path else "module." for path in paths}
    hidden |= {clean_name(prefix) for prefix in hidden}  # hooks of torch's may have been before
    longest_first = sorted(hidden, key=len, reverse=True)

    def clean(name: str) -> str:
        for prefix in longest_first:
            if name.startswith(prefix):
                name = prefix.removesuffix("module.") + name.removeprefix(prefix)
        return clean_name(name)

    return clean


def path_cleaner(module: nn.Module) -> Callable[[str], str]:
    """As ``name_cleaner``, for the paths of modules in ``module``."""
    clean = name_cleaner(module)
    return lambda path: clean(f"{path}.")[:-1]


def walk_named(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module under every clean name; a wrapper has its content's name and comes first."""
    yield prefix, module
    for name, child in child_slots(module).items():
        if child is None:
            continue
        path = prefix if is_wrapped(module, name) else f"{prefix}.{name}" if prefix else name
        yield from walk_named(child, path)


def is_wrapped(module: nn.Module, child: str) -> bool:
    """Whether ``module`` is a wrapper and ``child`` the attribute that holds what it wraps."""
    return child in PREFIXES or (child == "module" and isinstance(module, _MODULE_WRAPPERS))


def named_leaves(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(clean name, parameter) for each name, shared parameters under every one of theirs.

    Sharded parameters also where full ones stand in for them at the moment.
    """
    leaves = {
        (id(values), name): unit.entries[index].held
        for unit in iter_units(module)
        for values, name, index in unit.links.places
    }
    for path, submodule in walk_named(module):
        values = parameter_slots(submodule)
        for key, value in values.items():
            leaf = leaves.get((id(values), key))
            if isinstance(value, nn.Parameter):
                entry = entry_of(value)  # of a class of the user's, a full one is a parameter too
                leaf = value if entry is None else entry.held
            if leaf is not None:
                yield (f"{path}.{key}" if path else key), leaf


def parameter_names(module: nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
    """All names of each parameter, in the order of ``module.named_parameters()``.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> parameter_names(model)[model.bias]
        ('bias',)
    """
    check_module("parameter_names", module)
    names: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, leaf in named_leaves(module):
        known = names.setdefault(id(leaf), (leaf, []))[1]
        if name not in known:
            known.append(name)
    return {leaf: tuple(found) for leaf, found in names.values()}


def first_names(module: nn.Module) -> dict[str, str]:
    """The first name of each parameter, by each of its names."""
    return {name: names[0] for names in parameter_names(module).values() for name in names}


def parameters_by_name(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameter of each name; a shared one under every one of its names.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> parameters_by_name(model)["bias"] is model.bias
        True
    """
    check_module("parameters_by_name", module)
    return dict(named_leaves(module))


def units_of(module: nn.Module, root_only: bool = False) -> list[nn.Module]:
    """Modules in ``module``, itself included, that are units; parents first.

    A unit of several modules is listed by the first of them.

    Args:
        root_only: leave out units inside other units of the list.

    Example:
        >>> model = fully_shard(nn.Sequential(nn.Linear(2, 2)), units=wrap.by_class({nn.Linear}))
        >>> [type(module).__name__ for module in units_of(model)]
        ['Sequential', 'Linear']
    """
    check_flags("units_of", root_only=root_only)
    check_module("units_of", module)
    found: dict[int, nn.Module] = {}  # by unit
    inner: set[int] = set()
    for member in module.modules():
        state = find_state(member)
        if state is not None:
            found.setdefault(id(state.unit), member)
            if root_only:
                inner.update(id(m) for m in member.modules() if m is not member)
    return [member for member in found.values() if id(member) not in inner]


def find_holders(module: nn.Module) -> dict[int, tuple[str, nn.Module]]:
    """Find the clean name and the first module of each parameter and buffer, by its id."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for path, submodule in walk_named(module):
        tensors: dict[str, torch.Tensor | None] = {
            **dict(submodule.named_parameters(recurse=False)),
            **dict(submodule.named_buffers(recurse=False)),
        }
        for key, tensor in tensors.items():
            if tensor is not None:
                found.setdefault(id(tensor), (f"{path}.{key}" if path else key, submodule))
    return found


def clean_keys(state_dict: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """A ``state_dict`` of ``module``, or of what it wraps, by clean names.

    Raises:
        ValueError: two keys have the same clean name.
    """
    result: dict[str, Any] = {}
    clean = name_cleaner(module)
    for key, value in state_dict.items():
        name = clean(key)
        if name in result:
            raise ValueError(
                f"load_state_dict: {key!r} and another key both mean {name!r}; remove one of them."
            )
        result[name] = value
    return result


def _show_closest(name: str, known: Iterable[str]) -> str:
    """`` (closest: ...)`` for a message, or nothing when no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=2, cutoff=0.6)
    return f" (closest: {', '.join(map(repr, near))})" if near else ""


def list_names(given: Iterable[str], known: Iterable[str]) -> str:
    """Names for a message, each with the closest known ones; the first eight of them."""
    listed, known = list(given), list(known)
    text = "; ".join(f"{name!r}{_show_closest(name, known)}" for name in listed[:8])
    return text if len(listed) <= 8 else f"{text}; and {len(listed) - 8} more"
