"""``kind="local"``: each bucket's raw shard as one value, with the layout it only fits in.

The fastest restart: no gather, no cutting, one copy per bucket. It loads into a model that is
sharded the same way over as many ranks, and says what differs otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fsdp_compose.buckets.bucket import Bucket
from fsdp_compose.buckets.entries import entry_of
from fsdp_compose.construct.names import named_leaves, walk_named
from fsdp_compose.core.guards.moved_parameters import shard_of
from fsdp_compose.core.state import Unit, find_state, owner_of
from fsdp_compose.sharded import ShardSpec, is_sharded, tag, to_local

LAYOUT = "_fsdp_compose_layout"
SHARD = "_fsdp_compose_shard."


def named_units(module: nn.Module) -> Iterator[tuple[str, Unit]]:
    """(clean prefix, unit) of every unit, at its first module, else at one in ``module``."""
    seen: set[int] = set()
    found = [(f"{name}." if name else "", submodule) for name, submodule in walk_named(module)]
    prefixes = {id(submodule): prefix for prefix, submodule in reversed(found)}
    for prefix, submodule in found:
        state = find_state(submodule)
        if state is not None and id(state.unit) not in seen:
            seen.add(id(state.unit))
            yield prefixes.get(id(state.unit.modules[0]()), prefix), state.unit


def require_whole_buckets(module: nn.Module) -> None:
    """Raise where a parameter in ``module`` lies in the shard of a unit that is not in it.

    Raises:
        RuntimeError: naming the parameter.
    """
    held = {id(bucket) for _, unit in named_units(module) for bucket in unit.buckets}
    for name, leaf in named_leaves(module):
        entry = entry_of(leaf)
        if entry is not None and id(owner_of(entry)) not in held:
            raise RuntimeError(
                f"local state of {type(module).__name__}: {name!r} lies in the shard of unit "
                f"{entry.spec.unit!r}, which is outside of it, and kind='local' holds whole "
                "shards. Pass a module that contains the unit, or kind='sharded' or 'full'."
            )


def describe_layout(unit: Unit) -> dict[str, Any]:
    """The layout of a unit in plain data; equal exactly where local shards fit."""
    return {
        "version": 1,
        "world_size": unit.buckets[0].layout.world_size if unit.buckets else 1,
        "buckets": [
            {
                "dtype": str(shard_of(bucket).dtype),
                "shard_numel": bucket.layout.shard_numel,
                "names": [entry.names[0] for entry in bucket.entries],
                "shapes": [list(entry.spec.shape) for entry in bucket.entries],
                "strides": [list(entry.spec.stride) for entry in bucket.entries],
                "offsets": list(bucket.layout.offsets),
                **_list_parts(bucket),
            }
            for bucket in unit.buckets
        ],
    }


def _list_parts(bucket: Bucket) -> dict[str, Any]:
    """Say where this rank's parts lie in parameters that tensor parallelism split."""
    found = {
        entry.names[0]: [list(parallel.shape), list(parallel.offsets)]
        for entry in bucket.entries
        if (parallel := entry.spec.parallel) is not None and parallel.splits
    }
    return {"parts": found} if found else {}


def local_values(unit: Unit) -> dict[str, Any]:
    """The unit's raw shards and their layout; shards are live, and sharded tensors themselves."""
    values: dict[str, Any] = {LAYOUT: describe_layout(unit)}
    for index, bucket in enumerate(unit.buckets):
        name = f"{SHARD}{index}"
        values[name] = tag(shard_of(bucket).detach(), bucket_spec(bucket, name))
    return values


def bucket_spec(bucket: Bucket, name: str) -> ShardSpec:
    """The bucket's flat buffer as a parameter of shape ``(layout.numel,)``."""
    first = bucket.entries[0].spec
    return dataclasses.replace(
        first,
        fqn=f"{first.unit}.{name}",
        shape=torch.Size([bucket.layout.numel]),
        stride=(1,),
        offset=0,
        hooks=type(first.hooks)(),
        parallel=None,
        is_own_file=True,
    )


def is_local(incoming: Mapping[str, Any]) -> bool:
    """Whether a state dict holds raw shards."""
    return any(key.rpartition(".")[2] == LAYOUT for key in incoming)


def check_local(module: nn.Module, incoming: Mapping[str, Any]) -> None:
    """Raise RuntimeError where raw shards do not fit ``module``; nothing is written."""
    wanted = dict(named_units(module))
    found = {key[: -len(LAYOUT)] for key in incoming if key.rpartition(".")[2] == LAYOUT}
    if found != set(wanted):
        only = sorted(found ^ set(wanted))
        raise RuntimeError(
            f"local state: the units differ, first at {only[0].rstrip('.')!r}: saved from units "
            f"{sorted(p.rstrip('.') for p in found)}, this model has "
            f"{sorted(p.rstrip('.') for p in wanted)}. {_ADVICE}"
        )
    for prefix, unit in wanted.items():
        _check_unit(prefix, unit, incoming)


_ADVICE = (
    "Local shards fit only the layout they were saved from; save kind='sharded' or 'full' to load "
    "anywhere."
)


def _check_unit(prefix: str, unit: Unit, incoming: Mapping[str, Any]) -> None:
    mine, theirs = describe_layout(unit), incoming[f"{prefix}{LAYOUT}"]
    name = prefix.rstrip(".") or unit.name
    if not isinstance(theirs, dict):
        raise TypeError(f"local state of unit {name!r}: layout is a {type(theirs).__name__}")
    buckets = theirs.get("buckets")
    if not isinstance(buckets, list) or not all(isinstance(bucket, dict) for bucket in buckets):
        raise RuntimeError(
            f"local state of unit {name!r}: buckets were {buckets!r:.80}, here a list of "
            f"dictionaries. {_ADVICE}"
        )
    # A unit without parameters is cut over no ranks; what differs is then said of its buckets.
    ranks = theirs.get("world_size")
    if mine["buckets"] and buckets and _are_unlike(ranks, mine["world_size"]):
        raise RuntimeError(
            f"local state of unit {name!r} was saved at world size {ranks!r}, this model is cut "
            f"over {mine['world_size']} ranks. {_ADVICE}"
        )
    if (difference := _compare(mine, theirs)) is not None:
        raise RuntimeError(f"local state of unit {name!r}: {difference}. {_ADVICE}")
    for index, bucket in enumerate(unit.buckets):
        value = incoming.get(f"{prefix}{SHARD}{index}")
        if not is_sharded(value):
            raise RuntimeError(
                f"local state of unit {name!r}: shard {index} is a {type(value).__name__}; wanted "
                "the sharded tensor that state_dict(kind='local') gave."
            )
        spec, want = value._shard_spec, bucket.mesh.shard
        if spec.group.rank != want.rank:
            raise RuntimeError(
                f"local state of unit {name!r} is that of rank {spec.group.rank}, this is rank "
                f"{want.rank}; load each rank's own file."
            )
        shard = shard_of(bucket)
        if to_local(value).shape != shard.shape or value.dtype != shard.dtype:
            raise RuntimeError(
                f"local state of unit {name!r}: shard {index} has {to_local(value).numel()} "
                f"elements of {value.dtype}; wanted {shard.numel()} of {shard.dtype}."
            )


def _compare(mine: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """Say where two layouts differ first; None where they do not."""
    wanted, saved = mine["buckets"], theirs["buckets"]
    for index, (want, found) in enumerate(zip(wanted, saved, strict=False)):
        if (key := _find_unlike(want, found)) is not None:
            return f"{key} of bucket {index} were {found.get(key)!r}, here {want.get(key)!r}"
    if len(wanted) != len(saved):
        return f"saved {len(saved)} buckets, here {len(wanted)}"
    key = _find_unlike({**mine, "buckets": []}, {**theirs, "buckets": []})
    return None if key is None else f"{key} were {theirs.get(key)!r}, here {mine.get(key)!r}"


def _find_unlike(want: dict[str, Any], found: dict[str, Any]) -> str | None:
    unlike = (key for key in [*want, *found] if _are_unlike(found.get(key), want.get(key)))
    return next(unlike, None)


def _are_unlike(found: Any, want: Any) -> bool:
    """Whether a value of a damaged layout, which may be a tensor, is not the one that is wanted."""
    return type(found) is not type(want) or bool(found != want)


def write_local(module: nn.Module, incoming: Mapping[str, Any]) -> None:
    """Copy checked raw shards into the model."""
    with torch.no_grad():
        for prefix, unit in named_units(module):
            for index, bucket in enumerate(unit.buckets):
                shard_of(bucket).copy_(to_local(incoming[f"{prefix}{SHARD}{index}"]))
