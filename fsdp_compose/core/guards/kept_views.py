"""A view of a gathered weight that was kept from a forward raises when it is read after release.

``self.cached = self.weight.t()`` in a forward keeps a view of memory that the release frees, and
reading it would crash the process. The first forward of each kind, and in debug mode every forward,
looks for such views: at once among the attributes of the unit's modules, and at the end of the step
among all tensors of the process. The end of a step looks again where the released memory has more
users than before. A unit whose modules keep a view is looked at after every forward. A view that is
found becomes a ``KeptView``: while the unit is gathered it reads as before, and otherwise it raises
an error that names the unit.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from fsdp_compose.base.parts import kept_views
from fsdp_compose.base.torch_private import (
    buffer_slots,
    call_raw,
    graph_task_id,
    made_at,
    raw,
    storage_use_count,
    untraced,
)
from fsdp_compose.base.weak_list import WeakList
from fsdp_compose.buckets.bucket import Bucket, Entry, Phase
from fsdp_compose.core.guards.collective_log import is_debugging
from fsdp_compose.core.state import Engine, Unit


class KeptView(Tensor):
    """A view of a gathered weight that outlived the forward it was made in."""

    _kept_from: str
    _kept_in: weakref.ref[Bucket]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _HARMLESS:
            for value in _views((*args, *(kwargs or {}).values())):
                if value.numel() and _is_released(value):
                    raise RuntimeError(value._kept_from)
        return call_raw(func, types, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if not _is_released(self):
            text: str = super().__repr__()
            return text
        return f"KeptView({tuple(self.shape)}, released)"


def _is_released(view: KeptView) -> bool:
    """Whether what ``view`` reads is gone; static buffers then hold other weights."""
    bucket = view._kept_in()
    is_static = bucket is not None and bucket.static is not None and bucket.phase is Phase.SHARDED
    return is_static or not view.untyped_storage().nbytes()


_HARMLESS: frozenset[Callable[..., Any]] = frozenset(
    getattr(Tensor, name).__get__
    for name in "device dtype grad_fn is_leaf ndim requires_grad shape".split()
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


def note_users(units: Iterable[Unit]) -> None:
    """After a step of ``units``: note those whose memory has a number of users not seen before.

    Views keep released memory in use: the library's own views always, and those of a graph as long
    as the graph is kept. Somebody kept any other from the forward.
    """
    for unit, users in _count_users(units):
        if users not in unit.checks.inspected:
            unit.engine.inspected.add(unit)


def _count_users(units: Iterable[Unit]) -> list[tuple[Unit, tuple[int, ...]]]:
    """By unit: for each bucket that is released, the number of users of its memory."""
    released = [
        (u, [b for b in u.gathered if not b.in_place and b.phase is Phase.SHARDED]) for u in units
    ]
    return [(unit, tuple(map(count_users, buckets))) for unit, buckets in released]


def guard_everywhere(engine: Engine) -> None:
    """Guard views of the gathered weights of the noted units, whatever in the process keeps them.

    What was found does not count as seen: who kept a view once may keep another in its place.
    """
    units = list(engine.inspected)
    engine.inspected.clear()
    found = _storages(units)
    if found:
        _guard_views(engine, units, found)
    for unit, users in _count_users(units):
        unit.checks.inspected.add(users)


def _guard_views(engine: Engine, units: list[Unit], found: dict[int, Bucket]) -> None:
    """Guard views of the buckets in ``found``, which are those of ``units`` by their storage.

    Where a graph that reads the weights lives on, a backward may begin at a tensor that was made
    inside the unit's forward, so those tensors are watched.
    """
    known = {id(tensor): tensor for unit in engine.units for tensor in _own_tensors(unit)}
    for value in gc.get_objects():
        if type(value) is Tensor and id(value) not in known:
            bucket = _bucket_of(value, found)
            if bucket is not None:
                _guard(value, bucket)
    users = Counter(map(_storage, known.values()))
    read = {b for key, b in found.items() if count_users(b) > users[key]}
    watch_inside([unit for unit in units if not read.isdisjoint(unit.gathered)])


def watch_forwards(units: Iterable[Unit]) -> None:
    """After a forward of ``units``: watch the tensors that were made inside it.

    This is done after the first forward, in debug mode, and once a backward began at such a tensor.
    """
    debugging = is_debugging()
    watched = [
        unit
        for unit in units
        if debugging or _FIRST not in unit.checks.inspected or KEPT in unit.checks.warned
    ]
    if watched:
        watch_inside(watched)
    for unit in watched:
        unit.checks.inspected.add(_FIRST)


_FIRST = (-1,)
KEPT = "kept"
"""In ``Checks.warned``: a backward began at a tensor that its forward left outside attributes."""


def watch_inside(units: Iterable[Unit]) -> None:
    """Gather units where a backward begins at a tensor that was made inside their last forward."""
    lives = [(u, live) for u in units if (live := u.run.live) is not None]
    spans = [(max(opened_at(u), live.joined_at), live.closed_at, u) for u, live in lives]
    spans = [span for span in spans if 0 <= span[0] < span[1]]
    for value in gc.get_objects() if spans else ():
        node = _node_of(value)
        if node is None:
            continue
        made = made_at(node)
        for start, end, unit in spans:
            hooks = (value._backward_hooks or {}).values()
            if (
                start <= made <= end
                and unit.checks.trigger is not None
                and unit.checks.trigger not in hooks
            ):
                value.register_hook(_begin_inside(unit))


def _begin_inside(unit: Unit) -> Callable[[Tensor], None]:
    """Make the tensor hook that gathers the unit where a backward begins at the tensor."""
    ref = weakref.ref(unit)

    @untraced
    def begin(grad: Tensor) -> None:
        reached = ref()
        if reached is None or reached.checks.trigger is None or _is_foreign(reached.engine):
            return
        task = reached.engine.tasks.get(graph_task_id())
        if task is None or reached not in task.reached:
            if KEPT not in reached.checks.warned:
                reached.checks.warned.add(KEPT)
                _logger.warning(_SLOW, reached.name)
            reached.checks.trigger(grad)

    return begin


def _node_of(value: object) -> Any:
    """The autograd node that made a plain tensor, if there is one that torch lets us see."""
    if type(value) is not Tensor:
        return None
    try:
        return value.grad_fn
    except RuntimeError:  # a view whose base was written since: no backward can begin at it
        return None


def _is_foreign(engine: Engine) -> bool:
    """Whether the backward under way is of another model, which another thread trains.

    Autograd numbers the nodes of each thread from 0, so a tensor of that thread may look as if it
    had been made inside a forward of this engine. On a CPU backward runs in its caller's thread.
    """
    return engine.streams.device.type == "cpu" and engine.thread != get_ident()


_logger = logging.getLogger("fsdp_compose")
_SLOW = (
    "a backward began at a tensor that a forward of unit %r kept outside the attributes of its "
    "modules. From now on all tensors of the process are looked through after each forward of the "
    "unit, which takes time. Keep the tensor in an attribute (self.kept = tensor), or return it."
)


def opened_at(unit: Unit) -> int:
    """When the node of the unit's last forward was made, as in ``made_at``; -1: it has none."""
    for tensor in unit.run.live.tensors if unit.run.live is not None else ():
        if tensor.grad_fn is not None:
            return made_at(tensor.grad_fn)
    return -1


def count_users(bucket: Bucket) -> int:
    """Count the tensors over the memory of a bucket, without views that are guarded."""
    storage = bucket.full.untyped_storage()
    users = storage_use_count(storage._cdata) - 1  # ``storage`` itself
    views = bucket.users.views
    return users if views is None else users - sum(_storage(v) == storage._cdata for v in views)


def _storage(tensor: Tensor) -> int:
    """The identity of a tensor's storage."""
    with raw():
        return tensor.untyped_storage()._cdata


def _storages(units: Iterable[Unit]) -> dict[int, Bucket]:
    """The buckets of ``units`` whose gathered weights a release frees, by their storage."""
    buckets = [b for unit in units for b in unit.gathered if not b.in_place and b.full.numel()]
    return {_storage(bucket.full): bucket for bucket in buckets}


def _own_tensors(unit: Unit) -> Iterable[Tensor]:
    """List the library's own tensors over the memory of the unit's gathered weights."""
    yield from unit.run.live.tensors if unit.run.live is not None else ()
    yield from unit.run.showing or ()
    for bucket in unit.gathered:
        views = bucket.views
        yield from (bucket.full, views.own, views.whole_bytes, *kept_views(views.part_bytes))
        yield from bucket.aliases
        if bucket.inner is not None:
            yield from (bucket.inner.own, *kept_views(bucket.inner.parts))


def _bucket_of(value: object, found: dict[int, Bucket]) -> Bucket | None:
    """The bucket whose gathered weights ``value`` is a view of, if any."""
    if type(value) is not Tensor and type(value) is not torch.nn.Parameter:
        return None
    try:
        return found.get(value.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None  # without memory of its own


def _guard(value: Any, bucket: Bucket) -> Tensor:
    """Make a kept view raise while its unit is released."""
    entry = _entry_at(bucket, value.storage_offset())
    if any(value is alias for alias in bucket.aliases):
        value = value.detach()  # the library goes on using that object
    value.__class__ = KeptView
    value._kept_in = weakref.ref(bucket)
    bucket.users.views = bucket.users.views or WeakList()
    bucket.users.views.add(value)
    value._kept_from = (
        f"a tensor of shape {tuple(value.shape)} that was kept from a forward is a view of "
        f"parameter {entry.spec.fqn!r} of unit {entry.spec.unit!r}, whose gathered weights were "
        "released since. Keep a copy of it (.clone()), read the parameter again inside forward, or "
        "read both inside `with fsdp_compose.gathered(module):`."
    )
    guarded: Tensor = value
    return guarded


def _entry_at(bucket: Bucket, offset: int) -> Entry:
    """The entry that has the element at ``offset`` of the bucket."""
    for entry in bucket.entries:
        if entry.spec.offset <= offset < entry.spec.offset + entry.spec.numel:
            return entry
    return bucket.entries[0]


def _views(values: Iterable[Any]) -> Iterable[KeptView]:
    """List the kept views among arguments, at any depth."""
    for value in values:
        if type(value) is KeptView:
            yield value
        elif isinstance(value, list | tuple):
            yield from _views(value)
