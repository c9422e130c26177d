"""Compares the copies of a parameter on several ranks, so that a write into only one is found.

Under NO_SHARD every rank holds all parameters, under a hybrid strategy each replica holds all
slices. Copies get the same gradients, so they stay equal until something writes only one of them:
an edit that depends on the rank, a load on one rank, an optimizer with other settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from fsdp_compose.base.arguments import check_module
from fsdp_compose.base.group import Group
from fsdp_compose.base.strides import as_bytes, flatten, storage_order
from fsdp_compose.buckets.bucket import Bucket, Entry
from fsdp_compose.comm import collectives as comm
from fsdp_compose.core.gathering import renew_bucket
from fsdp_compose.core.guards.units import units_holding
from fsdp_compose.core.state import Unit
from fsdp_compose.sharded import dense_of, to_local

Copies = dict[tuple[str, str, int, int], int]
"""By (unit, name of the parameter, first and last element here): a checksum of this rank's slice.

Tensor parallelism may leave a parameter whole while it splits others of the bucket unevenly. The
ranks then cut that parameter at different places, and only equal slices are compared."""


def verify_replicas(module: nn.Module) -> None:
    """Raise unless all copies of the same elements hold the same numbers.

    Every rank must call it, between steps. It reads every copied parameter once and sends 8 bytes
    for each; where nothing is copied (FULL_SHARD over all ranks) it does nothing. In debug mode
    (``set_debug``) every backward that is not inside another compares the units it reached.

    >>> import torch, fsdp_compose as fc
    >>> model = fc.fully_shard(torch.nn.Linear(2, 2))
    >>> fc.verify_replicas(model)

    Args:
        module: a module that contains units, or is a part of some.

    Raises:
        RuntimeError: on every rank of the unit's mesh, naming the parameter, its unit, and which
            ranks hold what.
    """
    check_module("verify_replicas", module)
    verify_units(units_holding(module), "verify_replicas")


def verify_units(units: Iterable[Unit], caller: str) -> None:
    """As ``verify_replicas``, of these units, the same and in the same order on every rank."""
    by_group: dict[Group, Copies] = {}
    meshes: dict[Group, tuple[Group, ...]] = {}
    for unit in units:
        for bucket in unit.buckets:
            for group, copies in _copies(unit, bucket):
                by_group.setdefault(group, {}).update(copies)
                meshes.setdefault(group, bucket.mesh.groups)
    problem: str | None = None
    others: dict[Group, None] = {}
    for group, copies in by_group.items():
        problem = problem or _difference(copies, comm.gather_objects(copies, group, caller), group)
        others.update(dict.fromkeys((*meshes[group], group)))
    for group in others:  # so that ranks whose own copies agree raise too
        problems = comm.gather_objects(problem, group, caller)
        problem = next((p for p in problems if p is not None), None)
    if problem is not None:
        raise RuntimeError(f"{caller}: {problem}")


def _copies(unit: Unit, bucket: Bucket) -> Iterable[tuple[Group, Copies]]:
    """List the groups whose ranks hold copies of the bucket's parameters, with this rank's."""
    if bucket.residence.moved:
        renew_bucket(bucket)
    found: dict[Group, list[Entry]] = {}
    for entry in bucket.entries:
        for group in groups_of_copies(bucket, entry):
            found.setdefault(group, []).append(entry)
    for group, entries in found.items():
        yield (
            group,
            {
                (unit.name, e.spec.fqn, e.spec.start, e.spec.stop): checksum(to_local(e.param))
                for e in entries
            },
        )


def groups_of_copies(bucket: Bucket, entry: Entry) -> Sequence[Group]:
    """List the groups whose ranks all hold the elements of ``entry`` that this rank holds."""
    parallel = entry.spec.parallel
    axes = () if parallel is None else parallel.axes
    groups = [bucket.mesh.replicate, *(axis.group for axis in axes if axis.dim is None)]
    return [group for group in groups if group.size > 1 and group.backend != "fake"]


def _difference(mine: Copies, found: list[Copies], group: Group) -> str | None:
    """The error for the first parameter whose copies differ; None where all are equal."""
    for key in mine:
        ranks: dict[int, list[int]] = {}
        for rank, copies in zip(group.ranks, found, strict=True):
            if key in copies:
                ranks.setdefault(copies[key], []).append(rank)
        if len(ranks) > 1:
            unit, name, _, _ = key
            parts = " and other numbers on ".join(f"ranks {held}" for held in ranks.values())
            return (
                f"parameter {name!r} of unit {unit!r} is copied on ranks {list(group.ranks)}, and "
                f"the copies differ: one set of numbers on {parts}. Something wrote the parameter "
                "on some ranks only. Make the same edit on every rank; to take the numbers of rank "
                "0, call load_state_dict(model, state_dict) on every rank with rank 0's state "
                "dict."
            )
    return None


def checksum(tensor: torch.Tensor) -> int:
    """Return a 64-bit sum over the bytes of ``tensor``, weighted so that permutations differ."""
    return int(sum_bytes(tensor).item()) % (1 << 64)


_CHUNK = 1 << 20  # words at a time, so that memory does not grow with the parameter


def sum_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """As ``checksum``, as a 0-dim tensor on the tensor's device."""
    plain = dense_of(tensor).detach().resolve_conj().resolve_neg()
    data = as_bytes(flatten(plain, storage_order(plain)))
    whole = data.numel() // 8 * 8
    aligned = data.storage_offset() % 8 == 0
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    count = min(_CHUNK, data.numel() // 8 + 8)
    weights = torch.arange(1, 2 * count, 2, device=data.device)
    for start in range(0, whole, 8 * _CHUNK):
        piece = data[start : min(start + 8 * _CHUNK, whole)]
        words = (piece if aligned else piece.clone()).view(torch.int64)
        total += (words * weights[: words.numel()]).sum()
        if start:
            total += words.sum() * (start // 4)
    if whole < data.numel():
        tail = data[whole:].to(torch.int64)
        total += (tail * weights[: tail.numel()]).sum()
    return total
