"""A gathered weight that was kept from a forward raises when it is read after its release.

``self.cached = self.weight.t()`` in a forward keeps a view of memory that the release frees, and
reading it would crash the process. The first forward of each kind, and in debug mode every forward,
looks for such views: at once among the attributes of the unit's modules, and at the end of the pass
and of the step among all tensors of the process. The ends of later passes and steps look again
where the weights or their memory have more users than before, and a pass that failed always, since
the frames of its traceback keep what they read. A unit whose modules keep a view is looked at after
every forward. A view that is found, or a weight itself, becomes a ``KeptView``: while the unit is
gathered it reads as before, and otherwise it raises an error that names the unit.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from sys import getrefcount
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_compose.base.attributes import ABOUT_SHAPES
from fsdp_compose.base.parts import kept_views
from fsdp_compose.base.torch_private import buffer_slots, call_raw, raw, storage_use_count
from fsdp_compose.base.tracked import find_tracked, tracked_kinds
from fsdp_compose.base.tree import find_in_lists
from fsdp_compose.base.weak_list import WeakList
from fsdp_compose.buckets.bucket import Bucket, Entry, Phase
from fsdp_compose.core.guards.collective_log import is_debugging
from fsdp_compose.core.guards.kept_tensors import KEPT, count_beside, watch_forwards, watch_inside
from fsdp_compose.core.guards.units import modules_of
from fsdp_compose.core.state import Engine, Unit, unit_of
from fsdp_compose.sharded import ShardedDTensor, ShardedParameter, ShardedTensor, part_of

_SLICES = (ShardedTensor, ShardedParameter, ShardedDTensor)


class _Kept:
    """What outlived the forward it was made in: each read looks whether its memory is there."""

    _kept_from: str
    _kept_in: weakref.ref[Bucket]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _HARMLESS:
            for value in find_in_lists((*args, *(kwargs or {}).values()), _Kept):
                if value.numel() and _is_released(value):
                    raise RuntimeError(value._kept_from)
        if any(issubclass(kind, _SLICES) for kind in types):
            return NotImplemented  # what is sharded answers, as beside a plain tensor
        return call_raw(func, types, args, kwargs or {})

    def __repr__(self: Any, *, tensor_contents: Any = None) -> str:
        if not _is_released(self):
            text: str = super().__repr__()
            return text
        return f"{type(self).__name__}({tuple(self.shape)}, released)"


class KeptView(_Kept, Tensor):  # type: ignore[misc]
    """A view of a gathered weight that was kept, or a weight itself."""


class KeptDTensor(_Kept, DTensor):  # type: ignore[misc]
    """As ``KeptView``, where tensor parallelism split the weight too."""


def _is_released(view: Any) -> bool:
    """Whether what ``view`` reads is gone, or old; static buffers then hold other weights."""
    bucket, storage = view._kept_in(), part_of(view).untyped_storage()
    if bucket is not None and (bucket.static is not None or storage._cdata != bucket.views.storage):
        return bucket.phase is Phase.SHARDED
    return not storage.nbytes()


_HARMLESS = ABOUT_SHAPES | {Tensor.storage_offset, Tensor.stride, Tensor.untyped_storage}


def guard_attributes(unit: Unit) -> None:
    """Guard what the unit's modules keep of its gathered weights, as attributes or in lists."""
    found = _storages([unit])
    modules = modules_of(unit) if found else []
    for submodule in chain.from_iterable(module.modules() for module in modules):
        for holder in _list_holders(submodule):
            items = holder.items() if isinstance(holder, dict) else enumerate(holder)
            for key, value in list(items):
                bucket = _bucket_of(value, found)
                if bucket is not None:
                    holder[key] = _guard(value, bucket)
                    unit.checks.keeps_views = True


def _list_holders(module: nn.Module) -> list[Any]:
    """Where a module keeps tensors: its attributes, buffers, and its own lists and dictionaries."""
    own = vars(module)
    buffers: Any = buffer_slots(module)  # a scripted module's are in C++
    holders: list[Any] = [own, buffers] if isinstance(buffers, dict) else [own]
    return holders + [v for k, v in own.items() if type(v) in (list, dict) and k[:1] != "_"]


def note_forward(units: Sequence[Unit]) -> None:
    """After a forward of ``units`` that a backward may follow: guard what was kept of weights."""
    watch_forwards(units)
    limit = sys.maxsize if is_debugging() else _LOOKS
    noted = [
        unit
        for unit, counts in _count_users(units, _FORWARD)
        if counts not in unit.checks.inspected and len(unit.checks.inspected) < limit
    ]
    if noted:
        _guard_views(noted[0].engine, _storages(noted, released=True))
        for unit, counts in _count_users(noted, _FORWARD):
            _note_seen(unit, counts)


def note_users(units: Iterable[Unit]) -> None:
    """After a step of ``units``: note those whose memory has a number of users not seen before.

    Views keep released memory in use: the library's own views always, and those of a graph as long
    as the graph is kept. Somebody kept any other from the forward.
    """
    for unit, counts in _count_users(units, _STEP):
        if counts not in unit.checks.inspected or KEPT in unit.checks.warned:
            unit.engine.inspected.add(unit)


_FORWARD, _STEP = 0, 1
_LOOKS = 32
"""Where each forward makes another graph, the ends of forwards are looked into no more."""


def _count_users(units: Iterable[Unit], moment: int) -> list[tuple[Unit, tuple[int, ...]]]:
    """By unit: ``moment``, references to the tensors that modules read, users of their memory.

    This runs after every forward and step, so it calls no other Python where no view is guarded.
    """
    counted: list[tuple[Unit, tuple[int, ...]]] = []
    for unit in units:
        live, standing = unit.run.live, unit.links.standing
        counts: tuple[int, ...] = (moment, sum(map(getrefcount, unit.links.aliases)))
        if standing is not None:
            counts += (sum(map(getrefcount, standing.tensors)),)
        if live is not None:
            counts += (sum(map(getrefcount, live.tensors)),)
        for bucket in unit.gathered:
            if not bucket.in_place:
                found = storage_use_count(bucket.views.storage) - 1  # its object in Python
                counts += (found if bucket.users.views is None else count_users(bucket),)
        counted.append((unit, counts))
    return counted


def guard_after_error(engine: Engine) -> None:
    """After a pass that failed: guard what frames of its traceback, and others, keep of weights."""
    engine.inspected.update(engine.units)
    guard_everywhere(engine)


def guard_everywhere(engine: Engine) -> None:
    """Guard views of the gathered weights of the noted units, whatever in the process keeps them.

    What was found does not count as seen: who kept a view once may keep another in its place. Where
    a graph that reads the weights lives on, a backward may begin at a tensor that was made inside
    the unit's forward, so those tensors are watched.
    """
    units = list(engine.inspected)
    engine.inspected.clear()
    read = _guard_views(engine, _storages(units))
    watch_inside([unit for unit in units if not read.isdisjoint(unit.gathered)])
    for unit, counts in _count_users(units, _STEP):
        _note_seen(unit, counts)


def _note_seen(unit: Unit, counts: tuple[int, ...]) -> None:
    """Look no more where the unit's users are ``counts``, unless what was found is among them."""
    if unit.checks.found_in != unit.engine.pass_id:
        unit.checks.inspected.add(counts)


def _guard_views(engine: Engine, found: dict[int, Bucket]) -> set[Bucket]:
    """Guard views of the buckets in ``found``, by their storage; return those a graph reads."""
    shared = _held_by_others(engine)
    known = {id(tensor): tensor for unit in engine.units for tensor in _own_tensors(unit)}
    users = Counter(map(_storage, known.values()))
    others = any(count_users(bucket) > users[key] for key, bucket in found.items())
    if not others and not any(_bucket_of(tensor, found) for tensor in shared):
        return set()
    kinds = filter(_is_looked_at, tracked_kinds())
    tensors = [value for value in find_tracked(*kinds) if id(value) not in known]
    references = list(map(getrefcount, tensors))
    parts = Counter(id(part_of(value)) for value in tensors if isinstance(value, DTensor))
    guarded: set[Bucket] = set()
    for value, count in zip(tensors, references, strict=True):
        bucket = _bucket_of(value, found)
        if bucket is not None and count - count_beside(value) > 1 + parts[id(value)]:
            guarded.add(bucket)  # others are in a graph alone, and seen by nobody
            base = value._base
            _guard(value, bucket)
            if id(base) not in known and _bucket_of(base, found) is not None:
                _guard(base, bucket)
    for value in shared:
        bucket = _bucket_of(value, found)
        if bucket is not None:
            guarded.add(bucket)
            _give_up(engine, value)
            _guard(value, bucket)
    for unit in engine.units:
        if not guarded.isdisjoint(unit.gathered):
            unit.checks.found_in = engine.pass_id
    return {bucket for key, bucket in found.items() if count_users(bucket) > users[key]}


def _held_by_others(engine: Engine) -> list[Tensor]:
    """The tensors that modules read in a forward, as far as others than the library hold them."""
    lists = _read_in_forwards(engine)
    counts = Counter(map(id, chain.from_iterable(lists)))
    references = [list(map(getrefcount, tensors)) for tensors in lists]  # before any has a name
    pairs = zip(chain.from_iterable(lists), chain.from_iterable(references), strict=True)
    found = {id(t): t for t, count in pairs if count - count_beside(t) > counts[id(t)]}
    return list(found.values())


def _read_in_forwards(engine: Engine) -> list[Sequence[Tensor]]:
    """The library's lists of what modules read in a forward, each once."""
    lists: list[Sequence[Tensor]] = []
    for unit in engine.units:
        live, standing = unit.run.live, unit.links.standing
        lists += (
            [unit.links.aliases]
            if live is None
            else [unit.links.aliases, live.tensors, live.outputs]
        )
        lists.append(() if standing is None else standing.tensors)
        lists += [bucket.aliases for bucket in unit.buckets]
    return list({id(tensors): tensors for tensors in lists}.values())


def _give_up(engine: Engine, tensor: Tensor) -> None:
    """Have the library go on with another tensor over the same memory, where it can."""
    _forget_standing(engine, tensor)
    other = tensor.detach()
    for tensors in _read_in_forwards(engine):
        if isinstance(tensors, list):
            tensors[:] = [other if known is tensor else known for known in tensors]


def _forget_standing(engine: Engine, tensor: Tensor) -> None:
    """Have the next forward without gradients read other tensors, if it would read this one."""
    for unit in engine.units:
        standing = unit.links.standing
        if standing is not None and any(known is tensor for known in standing.tensors):
            unit.links.standing = None


def count_users(bucket: Bucket) -> int:
    """Count the tensors over the memory of a bucket, without views that are guarded."""
    storage, views = bucket.views.storage, bucket.users.views
    users = storage_use_count(storage) - 1  # its object in Python
    return users if views is None else users - sum(_storage(view) == storage for view in views)


def _storage(tensor: Tensor) -> int:
    """The identity of a tensor's storage."""
    with raw():
        return tensor.untyped_storage()._cdata


def _storages(units: Iterable[Unit], released: bool = False) -> dict[int, Bucket]:
    """The buckets of ``units`` whose gathered weights a release frees, by their storage.

    Args:
        released: only those that are released now.
    """
    buckets = [b for unit in units for b in unit.gathered if not b.in_place and b.full.numel()]
    found = {_storage(bucket.full): bucket for bucket in buckets}
    return {k: b for k, b in found.items() if not released or b.phase is Phase.SHARDED}


def _own_tensors(unit: Unit) -> Iterable[Tensor]:
    """List the library's own tensors over the memory of the unit's gathered weights."""
    for kept in unit.run.live, unit.links.standing:
        read = (*kept.tensors, *kept.outputs) if kept is not None else ()
        yield from read
        yield from map(part_of, read)
    for bucket in unit.gathered:
        views = bucket.views
        yield from (bucket.full, views.own, views.whole_bytes, *kept_views(views.part_bytes))
        yield from bucket.aliases
        if bucket.inner is not None:
            yield from (bucket.inner.own, *kept_views(bucket.inner.parts))


def _bucket_of(value: Any, found: dict[int, Bucket]) -> Bucket | None:
    """The bucket whose gathered weights ``value`` is a view of, if any."""
    if not _is_looked_at(type(value)):
        return None
    try:
        return found.get(_storage(part_of(value)))
    except (RuntimeError, NotImplementedError):
        return None  # without memory of its own


def _is_looked_at(kind: type) -> bool:
    """Whether it is a class of tensors, and none of this library's."""
    return issubclass(kind, Tensor) and not kind.__module__.startswith("fsdp_compose.")


def _guard(value: Any, bucket: Bucket) -> Tensor:
    """Make a kept view raise while its unit is released."""
    if isinstance(value, DTensor):
        if not isinstance(part_of(value), KeptView):
            _guard(part_of(value), bucket)
    elif any(value is alias for alias in bucket.aliases):
        value = value.detach()  # the library goes on using that object
    else:
        _forget_standing(unit_of(bucket).engine, value)
    entry = _entry_at(bucket, int(part_of(value).storage_offset()))
    shared: dict[str, Any] = value.__dict__
    value.__dict__ = dict(shared.items())  # the parameter's were shared
    value._kept_in = weakref.ref(bucket)
    value._kept_from = (
        f"a tensor of shape {tuple(value.shape)} that was kept from a forward is a view of "
        f"parameter {entry.spec.fqn!r} of unit {entry.spec.unit!r}, whose gathered weights were "
        "released since. Keep a copy of it (.clone()), read the parameter again inside forward, or "
        "run the forward, and read what it kept, in one `with fsdp_compose.gathered(module):`."
    )
    if isinstance(value, DTensor):
        value.__class__ = KeptDTensor
    else:
        value.__class__ = KeptView
        bucket.users.views = bucket.users.views or WeakList()
        bucket.users.views.add(value)
    guarded: Tensor = value
    return guarded


def _entry_at(bucket: Bucket, offset: int) -> Entry:
    """The entry that has the element at ``offset`` of the bucket."""
    for entry in bucket.entries:
        if entry.spec.offset <= offset < entry.spec.offset + entry.spec.numel:
            return entry
    return bucket.entries[0]
