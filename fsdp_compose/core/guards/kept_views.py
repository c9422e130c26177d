"""A view of a gathered weight that was kept from a forward raises when it is read after release.

``self.cached = self.weight.t()`` in a forward keeps a view of memory that is freed behind it, and
reading that would end the process. Such views are looked for when a forward of a kind is over for
the first time, and in debug mode after each: among the attributes of the unit's modules at once,
and among all tensors of the process at the end of the step. A unit whose modules keep one is looked
at after every forward. What is found becomes a ``KeptView``: the tensor as before while the unit is
gathered, and an error that names the unit otherwise.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fsdp_compose.base.torch_private import buffer_slots, call_raw, raw
from fsdp_compose.core.bucket import Bucket, Entry
from fsdp_compose.core.state import Lane, Unit


class KeptView(Tensor):
    """A view of a gathered weight that outlived the forward it was made in."""

    _kept_from: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _HARMLESS:
            with raw():
                for value in _views((*args, *(kwargs or {}).values())):
                    if value.numel() and not value.untyped_storage().nbytes():
                        raise RuntimeError(value._kept_from)
        return call_raw(func, types, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with raw():
            if self.untyped_storage().nbytes():
                text: str = super().__repr__()
                return text
            return f"KeptView({tuple(self.shape)}, released)"


_HARMLESS: frozenset[Callable[..., Any]] = frozenset(
    getattr(Tensor, name).__get__
    for name in "device dtype is_leaf ndim requires_grad shape".split()
) | {Tensor.dim, Tensor.numel, Tensor.size, Tensor.stride, Tensor.untyped_storage}


def guard_attributes(unit: Unit) -> None:
    """Guard what the unit's modules keep of its gathered weights, as attributes or in lists."""
    found = _storages([unit])
    for ref in unit.modules if found else ():
        module = ref()
        for submodule in () if module is None else module.modules():
            own = vars(submodule)
            buffers: Any = buffer_slots(submodule)  # a scripted module's are in C++
            holders: list[Any] = [own, buffers] if isinstance(buffers, dict) else [own]
            holders += [v for k, v in own.items() if type(v) in (list, dict) and k[:1] != "_"]
            for holder in holders:
                items = holder.items() if isinstance(holder, dict) else enumerate(holder)
                for key, value in list(items):
                    bucket = _bucket_of(value, found)
                    if bucket is not None:
                        holder[key] = _guard(value, bucket)
                        unit.checks.keeps_views = True


def guard_everywhere(lane: Lane) -> None:
    """Guard what anything in the process keeps of the gathered weights of units just looked at."""
    units = list(lane.inspected)
    lane.inspected.clear()
    found = _storages(units)
    if not found:
        return
    known = {id(tensor) for unit in units for tensor in _own_tensors(unit)}
    for value in gc.get_objects():
        if type(value) is Tensor and id(value) not in known:
            bucket = _bucket_of(value, found)
            if bucket is not None:
                _guard(value, bucket)


def _storages(units: Iterable[Unit]) -> dict[int, Bucket]:
    """The buckets whose gathered weights are freed, by their memory."""
    buckets = [b for unit in units for b in unit.gathered if not b.in_place and b.full.numel()]
    return {bucket.full.untyped_storage()._cdata: bucket for bucket in buckets}


def _own_tensors(unit: Unit) -> Iterable[Tensor]:
    """What the library itself holds over that memory."""
    yield from unit.run.live.tensors if unit.run.live is not None else ()
    yield from unit.run.showing or ()
    for bucket in unit.gathered:
        views = bucket.views
        yield from (bucket.full, views.own, views.whole_bytes, *views.part_bytes)
        yield from bucket.aliases
        if bucket.inner is not None:
            yield from (bucket.inner.own, *bucket.inner.parts)


def _bucket_of(value: object, found: dict[int, Bucket]) -> Bucket | None:
    if type(value) is not Tensor and type(value) is not torch.nn.Parameter:
        return None
    try:
        return found.get(value.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None  # without memory of its own


def _guard(value: Any, bucket: Bucket) -> Tensor:
    entry = _entry_at(bucket, value.storage_offset())
    if any(value is alias for alias in bucket.aliases):
        value = value.detach()  # the library goes on using that object
    value.__class__ = KeptView
    value._kept_from = (
        f"a tensor of shape {tuple(value.shape)} that was kept from a forward is a view of "
        f"parameter {entry.spec.fqn!r} of unit {entry.spec.unit!r}, whose gathered weights were "
        "released since; keep a copy of it (.clone()), read the parameter again inside forward, or "
        "read both inside `with fsdp_compose.gathered(module):`."
    )
    guarded: Tensor = value
    return guarded


def _entry_at(bucket: Bucket, offset: int) -> Entry:
    for entry in bucket.entries:
        if entry.spec.offset <= offset < entry.spec.offset + entry.spec.numel:
            return entry
    return bucket.entries[0]


def _views(values: Iterable[Any]) -> Iterable[KeptView]:
    for value in values:
        if type(value) is KeptView:
            yield value
        elif isinstance(value, list | tuple):
            yield from _views(value)
