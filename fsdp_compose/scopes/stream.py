"""Streams of full parameters, a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compose.base.arguments import check_kind, check_module, check_not_negative, describe_value
from fsdp_compose.base.torch_private import parameter_slots
from fsdp_compose.buckets.bucket import Bucket, Entry
from fsdp_compose.comm import collectives as comm
from fsdp_compose.comm.heads import meet_alone
from fsdp_compose.core.guards.compared_records import compare_records
from fsdp_compose.core.guards.moved_parameters import require_all_written, shard_of
from fsdp_compose.core.guards.units import list_all_units, units_holding
from fsdp_compose.core.state import owner_of
from fsdp_compose.scopes.open_scope import Scope, gather_stored
from fsdp_compose.sharded import is_sharded, to_local

DEFAULT_BUCKET_BYTES = 256 << 20


def iter_full(
    module: nn.Module,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, full tensor)`` for every parameter, in the order of ``named_parameters()``.

    A tied parameter comes under each of its names, as in ``state_dict()``; buffers do not come,
    since they are not sharded. The tensors are the caller's own, detached. At any time this holds
    ``bucket_bytes`` or one parameter, whichever is more, besides the tensor yielded. Every rank
    must run the iteration, and as far as every other. Where an optimizer steps between two of them,
    later ones have the new values, except those of a bucket that was gathered before the step.

    Args:
        module: any module.
        bucket_bytes: buckets up to this size are gathered whole; of larger ones the parameters come
            one by one from the ranks that own them.
        dtype: of floating-point tensors yielded; None leaves them as they are stored.
        device: of the tensors yielded; None leaves them where they are gathered.

    Raises:
        RuntimeError: on every rank: units were undone or made since the iteration began.
        TypeError: an argument is of the wrong type.
        ValueError: ``bucket_bytes`` is negative, or ``device`` is no device's name.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> [(name, tuple(tensor.shape)) for name, tensor in iter_full(model)]
        [('weight', (2, 2)), ('bias', (2,))]
    """
    check_module("iter_full", module)
    check_not_negative("iter_full", "bucket_bytes", bucket_bytes, "a number of bytes, 0 or more")
    if dtype is not None:
        check_kind("iter_full", "dtype", dtype, torch.dtype, "a torch.dtype or None")
    _check_device(device)
    entries = {
        (id(values), name): (unit, unit.entries[index])
        for unit in list_all_units()
        for values, name, index in unit.links.places
    }
    slots = [
        (f"{prefix}.{name}" if prefix else name, parameter_slots(owner), name, is_sharded(value))
        for prefix, owner in module.named_modules(remove_duplicate=False)
        for name, value in parameter_slots(owner).items()
        if value is not None
    ]
    _compare_ranks(module)
    flat: torch.Tensor | None = None
    last: Bucket | None = None
    for full_name, values, name, was_sharded in slots:
        unit, entry = entries.get((id(values), name), (None, None))
        is_new = unit is None and is_sharded(values.get(name)) != was_sharded
        if is_new or (unit is not None and unit not in unit.engine.units):
            raise RuntimeError(
                f"iter_full: {full_name!r} was sharded or undone since the iteration began; what "
                "is left would not be what the rest was. Call fully_shard and undo before it or "
                "after it."
            )
        if unit is None or entry is None or isinstance(unit.opened, Scope):
            tensor = values[name].detach()
            if entry is not None and entry.spec.parallel is not None and not entry.spec.is_dtensor:
                tensor = entry.spec.parallel.assemble(tensor)
        else:
            bucket = owner_of(entry)
            spec = entry.spec
            if bucket.layout.numel * shard_of(bucket).element_size() > bucket_bytes:
                tensor = _gather_parameter(bucket, entry)
            else:
                if bucket is not last or flat is None:
                    flat = last = None
                    flat, last = gather_stored(bucket, "iter_full"), bucket
                tensor = flat.as_strided(spec.shape, spec.stride, spec.offset)
            if spec.parallel is not None:
                tensor = spec.parallel.assemble(tensor)
        if isinstance(tensor, DTensor):  # that a scope shows, or that is not sharded
            tensor = tensor.full_tensor()
        kind = dtype if tensor.is_floating_point() else None
        yield full_name, tensor.to(device=device, dtype=kind, copy=True)
        del tensor  # a view of what was gathered, which the next gather would find held


def _check_device(device: object) -> None:
    wanted = "a torch.device, its name or index, or None"
    if device is not None:
        check_kind("iter_full", "device", device, (torch.device, str, int), wanted)
    if isinstance(device, str):
        try:
            torch.device(device)
        except RuntimeError as error:
            raise ValueError(
                f"iter_full: device is {describe_value(device)}; wanted {wanted}."
            ) from error


def _compare_ranks(module: nn.Module) -> None:
    """Raise on every rank where some have other weights, or nobody has written any."""
    units = units_holding(module)
    compare_records(units, "iter_full")
    require_all_written(unit for unit in units if not isinstance(unit.opened, Scope))


def _gather_parameter(bucket: Bucket, entry: Entry) -> torch.Tensor:
    """The full parameter from the ranks that own it, each sending its slice once."""
    spec, group = entry.spec, bucket.mesh.shard
    full = torch.empty(spec.numel, dtype=shard_of(bucket).dtype, device=bucket.mesh.device)
    full[spec.start : spec.stop].copy_(to_local(entry.param))
    start = 0
    meet_alone(group, f"gather {spec.fqn!r} for iter_full")
    for rank, length in enumerate(spec.lengths):
        if length:
            comm.broadcast(full[start : start + length].view(torch.uint8), group, rank)
        start += length
    return full.as_strided(spec.shape, spec.stride)
