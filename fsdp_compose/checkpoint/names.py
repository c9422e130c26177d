"""Names: a module's own FQNs whatever wraps it, the sharded leaf behind each, near misses."""

from __future__ import annotations

import contextlib
import difflib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_compose.construct import names
from fsdp_compose.construct.names import name_cleaner
from fsdp_compose.construct.tensor_parallel import check_declared
from fsdp_compose.core.bucket import Bucket, find_entry
from fsdp_compose.core.state import iter_units, owner_of
from fsdp_compose.sharded import is_sharded

CHECKPOINTED = "_checkpoint_wrapped_module."
"""What activation checkpointing puts into the names of what it wraps."""

_bare: ContextVar[bool] = ContextVar("fsdp_compose_bare_state_dict", default=False)


@contextlib.contextmanager
def bare() -> Iterator[None]:
    """Scope in which ``module.state_dict()`` and ``load_state_dict()`` run without our hooks."""
    token = _bare.set(True)
    try:
        yield
    finally:
        _bare.reset(token)


def is_bare() -> bool:
    return _bare.get()


@dataclass(frozen=True)
class Names:
    """What a module's state dict holds.

    Attributes:
        values: clean FQN -> the sharded leaf, or the buffer, plain parameter or extra state, live;
            in the order of ``module.state_dict()``.
        native: clean FQN -> the key that ``module.load_state_dict`` wants.
        metadata: versions of the submodules, as ``state_dict()._metadata``, by clean name.
    """

    values: dict[str, Any]
    native: dict[str, str]
    metadata: OrderedDict[str, Any]

    def leaves(self) -> dict[str, nn.Parameter]:
        """The sharded parameters by clean FQN; a tied one appears under each of its names."""
        return {key: value for key, value in self.values.items() if is_sharded(value)}


def names_of(module: nn.Module) -> Names:
    """Walk ``module`` as its own ``state_dict`` does; parameters are leaves even while gathered."""
    with bare():
        native = module.state_dict(keep_vars=True)
    check_declared(native)
    aliased, clean = aliases_of(module), name_cleaner(module)
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, value in native.items():
        name = clean(key)
        values[name] = aliased.get(id(value), value)
        keys[name] = key
    versions = getattr(native, "_metadata", {})
    metadata = OrderedDict((clean(f"{k}.")[:-1], v) for k, v in versions.items())
    return Names(values, keys, metadata)


def aliases_of(module: nn.Module) -> dict[int, nn.Parameter]:
    """By id of what modules hold now where they hold something else: the leaf of that place."""
    found: dict[int, nn.Parameter] = {}
    for unit in iter_units(module):
        for values, name, index in unit.places:
            leaf = unit.entries[index].param
            if values.get(name) is not leaf and isinstance(values.get(name), torch.Tensor):
                found[id(values[name])] = leaf
    return found


def parameter_names(module: nn.Module) -> dict[int, list[str]]:
    """By id of each parameter, sharded leaves included: its clean FQNs, canonical one first."""
    return {id(param): list(found) for param, found in names.parameter_names(module).items()}


def buckets_of(leaves: Iterable[nn.Parameter]) -> list[Bucket]:
    """The buckets that hold ``leaves``, each once, in the order of first appearance."""
    found: dict[int, Bucket] = {}
    for leaf in leaves:
        bucket = owner_of(find_entry(leaf))
        found.setdefault(id(bucket), bucket)
    return list(found.values())


def cleaned(state_dict: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """A ``state_dict`` of ``module``, or of what it wraps, by clean names.

    Raises:
        ValueError: two keys have the same clean name.
    """
    result: dict[str, Any] = {}
    clean = name_cleaner(module)
    for key, value in state_dict.items():
        name = clean(key)
        if name in result:
            raise ValueError(f"load_state_dict: {key!r} and another key both mean {name!r}.")
        result[name] = value
    return result


def closest(name: str, known: Iterable[str]) -> str:
    """`` (closest: ...)`` for a message, or nothing when no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=2, cutoff=0.6)
    return f" (closest: {', '.join(map(repr, near))})" if near else ""


def listing(given: Iterable[str], known: Iterable[str], limit: int = 8) -> str:
    """Names for a message, each with the closest known ones; the first ``limit`` of them."""
    listed, known = list(given), list(known)
    text = "; ".join(f"{name!r}{closest(name, known)}" for name in listed[:limit])
    return text if len(listed) <= limit else f"{text}; and {len(listed) - limit} more"
