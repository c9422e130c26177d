"""Either a weight keeps what a forward writes into it, or that forward raises.

A forward reads gathered weights, and what it writes into them is lost when they are released. A
write stays, as in a plain module, only where the gathered buffer is the shard itself (a world of
one, ``NO_SHARD``); replicas then compare what they wrote. Operators count their writes in a
tensor's version, which is looked at after every forward, and so is whether modules hold another
tensor in a weight's place. Writes through ``.data`` are not counted: for those the first forward of
each kind, and in debug mode every forward, compares this rank's part of the gathered weights with
its shard.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch

from fsdp_compose.base.process import here
from fsdp_compose.base.streams import is_capturing
from fsdp_compose.base.torch_private import gradient_hooks, read_version
from fsdp_compose.buckets.bucket import Bucket, Entry, alias
from fsdp_compose.buckets.gather import versions_of
from fsdp_compose.core.guards.collective_log import code_of
from fsdp_compose.core.guards.hooked_weights import find_hooked
from fsdp_compose.core.guards.kept_views import guard_attributes
from fsdp_compose.core.guards.rank_differences import WRITE
from fsdp_compose.core.guards.replaced_parameters import is_shown_by_another
from fsdp_compose.core.guards.replicas import checksum
from fsdp_compose.core.guards.weight_versions import find_difference
from fsdp_compose.core.records import Opened
from fsdp_compose.core.schedule import Hold
from fsdp_compose.core.state import Unit, log_of, owner_of
from fsdp_compose.sharded import part_of

_LOST = (
    "parameter {fqn!r} of unit {unit!r} was written while it was gathered for a forward: in place "
    "under no_grad (clamp_, copy_, nn.Embedding(max_norm=...)), through .data, or by another "
    "tensor in its place. Every rank keeps only a part of it, so the write would be lost. Write "
    "the parameter after optimizer.step() instead: under torch.no_grad() elementwise functions "
    "such as p.clamp_() act on the sharded parameter, and `with fsdp_compose.gathered(module, "
    "writeback=True):` gives a whole one to write. Or leave the parameter whole, with "
    "fully_shard(..., ignored=[module])."
)
Problem = str


def find_writes(unit: Unit, training: bool, output: Any) -> Problem | None:
    """After forward, while the unit is gathered: the error text for a write that would be lost."""
    if output is None and sys.exc_info()[0] is not None:  # one that handles an error may run it
        return None  # forward raised, and that error is the one to see
    lost: Entry | None = None
    kept: list[Entry] = []
    for bucket in unit.gathered:
        counts = list(map(read_version, bucket.aliases))
        if counts != bucket.counts:
            pairs = zip(bucket.entries, counts, bucket.counts, strict=True)
            written = [entry for entry, now, before in pairs if now != before]
            bucket.counts = counts
            if bucket.in_place:
                kept += written
            else:
                lost = lost or written[0]
    links, shown = unit.links, unit.run.showing
    if shown is not None:
        placed = shown if links.indices is None else map(shown.__getitem__, links.indices)
        if not all(map(is_, map(dict.get, links.tables, links.names), placed)):
            lost = lost or _find_replaced(unit)
        if any(map(gradient_hooks, shown)) and (problem := find_hooked(unit, shown)):
            return problem
    try:
        if links.pointers != []:  # None: not looked for yet
            kept += _keep_assigned(unit, _shown_by(unit))
        if kept:
            _compare_replicas(unit, kept)
    except RuntimeError as error:
        return str(error)
    kind = (torch.is_grad_enabled(), training)
    is_due = kind not in unit.checks.inspected or here.is_debugging
    if lost is None and is_due and not is_capturing():
        lost = _find_unseen(unit, _shown_by(unit))
        if lost is None:
            unit.checks.inspected.add(kind)
            unit.engine.inspected.add(unit)
            guard_attributes(unit)
    elif unit.checks.keeps_views:
        guard_attributes(unit)
    if lost is None:
        return None
    _tell_ranks(unit, lost)
    return _LOST.format(fqn=lost.spec.fqn, unit=unit.name)


def forget_written(unit: Unit) -> None:
    """Have the next forward gather again, so that it does not read what this one wrote."""
    unit.engine.schedule.drop(unit, Hold.KEPT)
    unit.run.live = unit.links.standing = None
    for bucket in unit.gathered:
        bucket.fill.stamp = object()


@contextmanager
def count_writes() -> Iterator[None]:
    """Make tensors that count what is written into them, which those of inference mode do not."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():  # the first alone enables gradients
        yield


def note_copies(opened: Opened, read: Sequence[torch.Tensor]) -> None:
    """Record the copies that a forward in a scope or a functional call reads, by entry."""
    opened.copies = [
        (index, tensor, tensor._version)
        for index, tensor in enumerate(read)
        if tensor is not opened.tensors[index]
    ]


def leaf_versions_of(unit: Unit) -> list[int]:
    """Count how often each parameter's slice was written, by itself or with all of its shard."""
    return _by_entry(unit, {bucket: versions_of(bucket) for bucket in unit.gathered})


def versions_at_fill(unit: Unit) -> list[int]:
    """As ``leaf_versions_of``, when what the unit holds now was gathered."""
    held = {b: versions_of(b) if b.in_place else b.fill.versions for b in unit.gathered}
    return _by_entry(unit, held)


def _by_entry(unit: Unit, counts: Mapping[Bucket, Sequence[int]]) -> list[int]:
    pairs = ((counts[owner_of(entry)], entry.index) for entry in unit.entries)
    return [shard + slices[index] for (shard, *slices), index in pairs]


def check_scope_is_current(unit: Unit, opened: Opened) -> None:
    """Raise when shards were written since a scope gathered what its forwards read.

    Raises:
        RuntimeError: naming the first such parameter.
    """
    now = leaf_versions_of(unit)
    if now == opened.leaf_versions:
        return
    pairs = zip(unit.entries, now, opened.leaf_versions, strict=True)
    written = next(entry for entry, a, b in pairs if a != b)
    raise RuntimeError(
        f"unit {unit.name!r}: forward was called inside gathered() after the shard of "
        f"{written.spec.fqn!r} was written, for example by an optimizer's step. The scope shows "
        "what it gathered when it was entered. Leave the scope before the next forward, or use "
        "fsdp_compose.unshard(module), after which forward reads what the step wrote."
    )


def find_lost_copies(unit: Unit, opened: Opened, output: Any) -> Problem | None:
    """After that forward: the error text for a write into a copy that was made for it alone."""
    copies, opened.copies = opened.copies, []
    for index, tensor, version in copies:
        has_raised = output is None and sys.exc_info()[0] is not None
        if tensor._version != version and not has_raised:
            return _LOST.format(fqn=unit.entries[index].spec.fqn, unit=unit.name)
    return None


def raise_lost(problem: Problem | None) -> None:
    """Raise the error that was found, if there is one.

    Raises:
        RuntimeError: the problem.
    """
    if problem is not None:
        raise RuntimeError(problem)


def _find_replaced(unit: Unit) -> Entry | None:
    """A weight in whose place a forward put another tensor, if it read the unit's own."""
    shown = _shown_by(unit)
    if unit.run.showing is not shown:
        return None
    for values, name, index in unit.links.places:
        if values.get(name) is not shown[index] and not is_shown_by_another(unit, values, name):
            return unit.entries[index]
    return None


def _find_unseen(unit: Unit, shown: Sequence[torch.Tensor]) -> Entry | None:
    """A weight whose values or memory were exchanged without any version showing it."""
    lost: Entry | None = None
    for index, entry in enumerate(unit.entries):
        bucket = owner_of(entry)
        gathered = bucket.full.untyped_storage()
        read = unit.links.aliases[index] if entry.wrapper else part_of(shown[index])
        for tensor in (unit.links.aliases[index], read):
            if bucket.in_place or tensor.untyped_storage()._cdata == gathered._cdata:
                continue
            lost = lost or entry
            if tensor is unit.links.aliases[index]:
                tensor.data = alias(bucket.full, entry.spec.offset, entry.spec)
    return lost or next(filter(None, map(find_difference, unit.gathered)), None)


def _home(entry: Entry) -> int:
    """Where the entry lies in a bucket whose gathered buffer is its shard."""
    full = owner_of(entry).full
    return full.data_ptr() + entry.spec.offset * full.element_size() if entry.spec.numel else 0


def _shown_by(unit: Unit) -> Sequence[torch.Tensor]:
    """What the unit's modules read in its forward, by entry, leaving out what a caller gave."""
    is_functional = unit.opened is not None and unit.opened.for_call
    return unit.links.aliases if unit.run.showing is None or is_functional else unit.run.showing


def _keep_assigned(unit: Unit, shown: Sequence[torch.Tensor]) -> list[Entry]:
    """After ``weight.data = x`` in a forward whose buffer is the shard, copy x into the shard."""
    if unit.links.pointers is None:
        wrapped = unit.links.dtensors or any(entry.wrapper for entry in unit.entries)
        fixed = not wrapped and all(bucket.in_place for bucket in unit.gathered)
        unit.links.pointers = list(map(_home, unit.entries)) if fixed else []
    kept: list[Entry] = []
    pointers = unit.links.pointers
    if not pointers or list(map(torch.Tensor.data_ptr, shown)) == pointers:
        return kept
    unit.links.standing = None  # it may read the memory that was assigned
    for index, (tensor, pointer) in enumerate(zip(shown, pointers, strict=True)):
        if tensor.data_ptr() == pointer:
            continue
        entry = unit.entries[index]
        bucket = owner_of(entry)
        home = alias(bucket.full, entry.spec.offset, entry.spec)
        if tensor.shape != home.shape or tensor.dtype != home.dtype:
            raise RuntimeError(
                f"parameter {entry.spec.fqn!r} of unit {unit.name!r}: a forward assigned to its "
                f".data a {tensor.dtype} tensor of shape {tuple(tensor.shape)}; wanted a "
                f"{home.dtype} tensor of shape {tuple(home.shape)}. Convert or cut the tensor "
                "before it is assigned."
            )
        with torch.no_grad():
            home.copy_(tensor.detach())
        if tensor is unit.links.aliases[index]:
            tensor.data = home
        kept.append(entry)
    return kept


def _compare_replicas(unit: Unit, written: list[Entry]) -> None:
    """Raise where ranks that hold the same parameter wrote other values into it."""
    for entry in written:
        bucket = owner_of(entry)
        log = log_of(unit.engine, bucket.mesh)
        if log is None:
            continue
        value = alias(bucket.full, entry.spec.offset, entry.spec)
        digest = checksum(value)
        purpose = f"parameter {entry.spec.fqn!r}, values with checksum {digest:016x}"
        log.note((code_of(WRITE, entry.spec.fqn, digest), WRITE, unit.name, purpose))


def _tell_ranks(unit: Unit, lost: Entry) -> None:
    """Where ranks compare each event, tell the others that this rank is going to raise."""
    for bucket in unit.gathered[:1]:
        log = log_of(unit.engine, bucket.mesh)
        if log is None or not log.is_stepwise:
            continue
        purpose = f"parameter {lost.spec.fqn!r} inside a forward"
        try:
            log.note((code_of(WRITE, unit.number), WRITE, unit.name, purpose))
        except RuntimeError:
            return  # the others wrote nothing, and now know which rank did
