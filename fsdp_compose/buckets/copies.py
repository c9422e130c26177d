"""A deep copy of a model: independent buckets around the copies of its parameters."""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace
from typing import Any

import torch

from fsdp_compose.base.unwritten import UnwrittenMark
from fsdp_compose.buckets.bucket import Bucket, Entry, Slot
from fsdp_compose.buckets.build import make_bucket
from fsdp_compose.buckets.entries import attributes_of
from fsdp_compose.sharded import Hooks, Residence, set_local, to_local


def copy_slot(slot: Slot, memo: dict[int, Any]) -> Slot:
    """The same place in the copied module, which may still be without its own dictionaries."""
    module = copy.deepcopy(slot.module(), memo)
    assert module is not None
    return Slot(weakref.ref(module), slot.name, copy.deepcopy(slot.values, memo))


def copy_bucket(bucket: Bucket, memo: dict[int, Any]) -> Bucket:
    """An independent bucket around the copies that ``memo`` has or makes of the parameters."""
    residence = Residence(moved=bucket.residence.moved, emptied=bucket.residence.emptied)
    entries = []
    for entry in bucket.entries:
        param = copy.deepcopy(entry.param, memo)
        spec = replace(entry.spec, residence=residence, hooks=Hooks())
        if entry.kind is not torch.nn.Parameter:
            param.__dict__.update(copy.deepcopy(attributes_of(entry.param), memo))
        twin = Entry(param, spec, entry.names, [], kind=entry.kind, grad_dtype=entry.grad_dtype)
        twin.wrapper = entry.wrapper
        entries.append(twin)
    given = [to_local(entry.param) for entry in entries]
    stored = bucket.stored.detach()
    copied = make_bucket(
        entries,
        bucket.layout,
        bucket.mesh,
        torch.empty_like(stored, pin_memory=stored.is_pinned()).copy_(stored),
        bucket.mp,
        bucket.offload,
        bucket.spread,
    )
    if residence.moved:  # the shard lacks the values; the copy's first use copies them into it
        for entry, local in zip(entries, given, strict=True):
            set_local(entry.param, local)
    waiting = [copied.entries[entry.index] for entry, _ in bucket.history.unready]
    copied.history.unready = [(entry, UnwrittenMark(entry.param)) for entry in waiting]
    copied.history.emptied = bucket.history.emptied
    for entry, old in zip(copied.entries, bucket.entries, strict=True):
        entry.slots = [copy_slot(slot, memo) for slot in old.slots if slot.module() is not None]
    return copied
