"""Forwards that compute on other tensors than the unit's gathered parameters, for one call.

``torch.func.functional_call`` puts the caller's tensors in the place of parameters, and forward
reads those. Where they replace all parameters of a unit, nothing is gathered. Sharded tensors among
them (updated leaves, as in MAML) are gathered by a differentiable function of their own.

Under a transform of ``torch.func`` a unit is gathered into a buffer of the call's own, which lives
as long as the graphs that read it: the transform differentiates after forward has returned, at a
level of its own, and perhaps never. The leaves lie below every transform, and so does the node that
connects the gathered tensors to them.
"""

from __future__ import annotations

import torch
from torch import nn

from fsdp_compose.base.torch_private import (
    beneath_transforms,
    outside_transforms,
    transforms_active,
)
from fsdp_compose.base.torch_stack import in_functional_call
from fsdp_compose.buckets.bucket import Bucket, Entry, full_tensor
from fsdp_compose.buckets.entries import put_in_class, wrap
from fsdp_compose.buckets.gather import gather_flat
from fsdp_compose.core.autograd import Spread
from fsdp_compose.core.guards.connect import connect, owners
from fsdp_compose.core.guards.moved_parameters import shard_of
from fsdp_compose.core.guards.replaced_parameters import explain_replaced, find_replaced
from fsdp_compose.core.records import Opened
from fsdp_compose.core.state import Unit, owner_of, tensors_at_rest
from fsdp_compose.sharded import ShardedTensor, ShardSpec, is_sharded, spec_of, view_local

GivenTensors = dict[int, torch.Tensor]
"""Tensors in the place of parameters, by entry."""


def find_given_tensors(unit: Unit) -> GivenTensors:
    """Find the tensors that replace the unit's parameters for the call that begins.

    Raises:
        RuntimeError: a parameter was replaced for good, or by something that cannot be read
            in its place.
    """
    found: GivenTensors = {}
    places = find_replaced(unit)
    if not places:
        return found
    for values, name, index in places:
        value = values.get(name)
        scoped = unit.opened is not None and unit.opened.in_forward  # which allows replacing
        if not isinstance(value, torch.Tensor) or not (
            scoped or not isinstance(value, nn.Parameter) or in_functional_call()
        ):
            raise RuntimeError(explain_replaced(unit, index, value))
        found[index] = value
        _check(unit, index, value)
    for values, name, index in unit.links.places:
        if index in found and values.get(name) is not found[index]:
            entry = unit.entries[index]
            raise RuntimeError(
                f"parameter {entry.spec.fqn!r} of unit {unit.name!r} is tied, and was replaced "
                "under some of its names only. Pass the same tensor for each of them, as "
                "functional_call does with tie_weights=True."
            )
    return found


def _check(unit: Unit, index: int, value: torch.Tensor) -> None:
    """Raise when ``value`` cannot be read in the place of the entry's parameter."""
    spec, wrapper = unit.entries[index].spec, unit.entries[index].wrapper
    what = f"parameter {spec.fqn!r} of unit {unit.name!r}: functional_call was given"
    if wrapper is not None and not isinstance(value, wrapper.kept.kind):
        kind = wrapper.kept.kind.__name__
        raise RuntimeError(
            f"{what} a plain tensor, where the parameter was a {kind}, a class that computes in "
            f"its own way; wanted a {kind} around full tensors. Leave the parameter out of the "
            "dictionary to compute with its own values, or undo(copy.deepcopy(module)) first."
        )
    if is_sharded(value):
        other = spec_of(value)
        if _find_place(other) != _find_place(spec):
            raise RuntimeError(
                f"{what} a tensor that is sharded in another way: a slice of shape "
                f"{tuple(other.shape)} from {other.fqn!r} of unit {other.unit!r}; wanted a slice "
                f"of {tuple(spec.shape)} at the same place of the same ranks, or a full tensor. "
                "Pass value.full_tensor()."
            )
    elif is_sharded(beneath_transforms(value)):
        raise RuntimeError(
            f"{what} its shard, wrapped by a transform of torch.func. The transform does not know "
            "that the shard is only a part. Pass it full tensors, {name: p.full_tensor() for name, "
            "p in model.named_parameters()}, or differentiate with torch.autograd.grad, which "
            "takes sharded parameters."
        )


def _find_place(spec: ShardSpec) -> tuple[object, ...]:
    """What two slices have in common that one can be read in the place of the other."""
    part = None if spec.parallel is None else spec.parallel.key
    return spec.shape, spec.offset, spec.shard_numel, spec.group, part


def open_functional_call(
    unit: Unit, found: GivenTensors, stored: bool = False
) -> list[torch.Tensor] | None:
    """Let the unit's modules hold the tensors in ``found`` until ``close_functional_call``.

    Returns the tensors that the forward reads, by entry, in the dtype it computes in. Returns None
    where the unit is gathered in the normal way, for the parameters that were not replaced.
    """
    held = tensors_at_rest(unit)
    scoped = unit.opened is not None and unit.opened.in_forward
    apart = stored or transforms_active()
    complete = len(found) == len(unit.entries) or scoped or apart
    outer = unit.opened
    unit.opened = Opened(
        tensors=[found.get(index, tensor) for index, tensor in enumerate(held)],
        in_forward=complete,
        calls=int(complete),
        outer=outer,
        for_call=True,
        stored=stored,
    )
    unit.engine.opened.add(unit)
    try:
        given = _gather_given(unit, found)
        if not complete:
            unit.opened.given = {i: t.to(_dtype_read(unit, i, stored)) for i, t in given.items()}
            return None
        if scoped:
            given = {**dict(enumerate(held)), **given}
        rest = [entry for index, entry in enumerate(unit.entries) if index not in given]
        with outside_transforms():
            own = _gather_apart(unit, rest, stored)
    except BaseException:
        unit.opened = outer
        raise
    shown = [given[i] if i in given else own[entry] for i, entry in enumerate(unit.entries)]
    read = [tensor.to(_dtype_read(unit, index, stored)) for index, tensor in enumerate(shown)]
    for index, entry in enumerate(unit.entries):
        if index not in found and read[index] is held[index]:
            read[index] = wrap(read[index], entry)
        elif index not in found:
            read[index] = put_in_class(read[index], entry)
    return read


def _dtype_read(unit: Unit, index: int, stored: bool) -> torch.dtype:
    """The dtype in which a forward reads the parameter of an entry."""
    bucket = owner_of(unit.entries[index])
    return shard_of(bucket).dtype if stored else bucket.full.dtype


def close_functional_call(unit: Unit) -> None:
    """End the call; ``functional_call`` itself takes its tensors out of the modules again."""
    assert unit.opened is not None
    unit.opened = unit.opened.outer


def _gather_apart(unit: Unit, entries: list[Entry], stored: bool) -> dict[Entry, torch.Tensor]:
    """Gather full parameters into a buffer of their own, connected to the leaves.

    A forward under ``no_grad`` may turn gradients on inside, a forward in inference mode not.
    """
    fulls: dict[Entry, torch.Tensor] = {}
    wanted = set(entries)
    with torch.no_grad():
        for bucket in unit.gathered if entries else ():
            members = [entry for entry in bucket.entries if entry in wanted]
            if members:
                dtype = shard_of(bucket).dtype if stored else bucket.full.dtype
                shard = shard_of(bucket).to(bucket.mesh.device)
                flat = gather_flat(bucket, shard, dtype, "functional_call")
                fulls.update((e, full_tensor(flat, e)) for e in members)
    if torch.is_inference_mode_enabled():
        return fulls
    with torch.enable_grad():
        return connect(owners(unit), fulls, [])


def _gather_given(unit: Unit, found: GivenTensors) -> GivenTensors:
    """Return ``found`` with sharded tensors gathered, once per bucket."""
    by_bucket: dict[Bucket, list[int]] = {}
    for index, value in found.items():
        if is_sharded(value):
            by_bucket.setdefault(owner_of(unit.entries[index]), []).append(index)
    fulls = dict(found)
    for bucket, indices in by_bucket.items():
        given: list[ShardedTensor] = [found[index] for index in indices]  # type: ignore[misc]
        entries = [unit.entries[index] for index in indices]
        with outside_transforms():
            slices = [view_local(tensor) for tensor in given]
            whole = Spread.apply(bucket, entries, bucket.full.dtype, *slices)
        for index, entry, full in zip(indices, entries, whole, strict=True):
            fulls[index] = entry.spec.wrap(full)
    return fulls
