"""The gradients of plain parameters over a shard, and those of the sharded ones, are the same.

Either side's may be cleared, replaced or set at any time, by a caller or by autograd. What changed
since both sides agreed is seen by identity: a gradient is a tensor object, and each side's is noted
then. Whether any may have changed is asked first, as it is in every step: of the plain ones by
identity too, and of the sharded ones, which are many, by a flag of their bucket that is cleared by
whatever sets one (``Residence.is_mirrored``). ``share_gradients`` passes on what changed. It runs
before and after gradients arrive, before a step, and before norms are taken or a scaler unscales.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, repeat
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from fsdp_compose.base.attributes import get_grad, requires_grad
from fsdp_compose.base.torch_private import leaf_hooks, raw
from fsdp_compose.buckets.bucket import Bucket, Entry
from fsdp_compose.buckets.entries import ENTRY_KEY, entry_of, mark_entry, refusal_of
from fsdp_compose.core.guards.moved_parameters import shard_of
from fsdp_compose.sharded import (
    SHARDED_PARAMETERS,
    is_sharded_parameter,
    replace_grad,
    tag,
    to_local,
)

Grad: TypeAlias = torch.Tensor | None
Note: TypeAlias = weakref.ref[torch.Tensor] | None


@dataclass(frozen=True)
class Source:
    """What a plain parameter stands for: a bucket's shard, or one entry's slice of it.

    Attributes:
        bucket: gives None where the bucket is gone, and for a copy of the parameter.
        entry: gives None of a bucket's shard, too.
        nodes: at which autograd adds to the sharded gradients; kept, as they are watched.
    """

    bucket: Callable[[], Bucket | None]
    entry: Callable[[], Entry | None]
    nodes: list[Any]

    def __reduce__(self) -> Any:
        """A parameter that was pickled stands for itself."""
        return type(None), ()


@dataclass(frozen=True)
class _Copy:
    """Copies a plain parameter; the copy is over memory that no model reads."""

    plain: weakref.ref[nn.Parameter]

    def __call__(self, memo: dict[int, Any]) -> nn.Parameter:
        plain: Any = self.plain()
        copied: nn.Parameter = nn.Parameter.__deepcopy__(plain, memo)
        copied.__dict__[_SOURCE_KEY] = Source(_find_nothing, _find_nothing, [])
        return copied

    def __reduce__(self) -> Any:
        return type(None), ()


def _find_nothing() -> None:
    """What a parameter that stands for itself alone lies over."""


_SOURCE_KEY = "_fsdp_compose_source"


def source_of(param: torch.Tensor) -> Source | None:
    """What a parameter made by ``flat_parameters`` or ``local_parameters`` stands for."""
    return param.__dict__.get(_SOURCE_KEY)


def bucket_of(param: nn.Parameter) -> Bucket | None:
    """The bucket that holds a parameter, or that a plain one of an optimizer's lies over."""
    source = source_of(param)
    if source is not None:
        return source.bucket()
    entry = entry_of(param) if is_sharded_parameter(param) else None
    return None if entry is None or entry.owner is None else entry.owner()


def buckets_under(params: Iterable[torch.Tensor]) -> list[Callable[[], Bucket | None]]:
    """What gives the buckets that plain parameters among ``params`` are over; None for one gone."""
    sources = map(dict.get, map(_get_attributes, params), repeat(_SOURCE_KEY))
    return list(dict.fromkeys(map(_get_bucket, filter(None, sources))))


def find_buckets(
    params: Sequence[nn.Parameter],
) -> tuple[list[nn.Parameter], list[Callable[[], Bucket | None] | None]]:
    """Those of ``params`` in or over a bucket, and what gives it; no Python runs for each."""
    sources = list(map(dict.get, map(_get_attributes, params), repeat(_SOURCE_KEY)))
    sharded = list(compress(params, map(SHARDED_PARAMETERS.__contains__, map(type, params))))
    refs = list(map(dict.get, map(_get_attributes, sharded), repeat(ENTRY_KEY)))
    entries = list(map(weakref.ref.__call__, filter(None, refs)))
    over, inside = compress(params, sources), compress(compress(sharded, refs), entries)
    given = map(_get_bucket, filter(None, sources)), map(_get_owner, filter(None, entries))
    return [*over, *inside], [*given[0], *given[1]]


_get_attributes: Callable[[Any], dict[str, Any]] = attrgetter("__dict__")
_get_bucket = attrgetter("bucket")
_get_owner = attrgetter("owner")
_get_tensor = weakref.ref.__call__


class Mirror:
    """The plain parameters over one bucket; they belong to whoever asked for them.

    Where both sides agree the gradient of the flat one is one buffer, and the gradients of the
    sharded parameters are its slices; where one has none, its slice is zero.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = weakref.ref(bucket)
        hash(self.bucket)  # it remembers this, and has none any more when the bucket is gone
        self.plain: dict[Entry | None, weakref.ref[nn.Parameter]] = {}  # None: the flat one
        self.noted_plain: dict[Entry | None, Note] = {}
        self.noted: dict[Entry, Note] = {}
        self.ids: list[int] = []  # of what was noted of the plain ones
        self.gone: list[object] = []  # gets an item when a noted gradient is deleted
        self.has_lost = False  # a parameter was taken out of the bucket that a plain one was over

    def make(self, entry: Entry | None) -> nn.Parameter:
        """The plain parameter over an entry's slice, or over the whole shard."""
        ref = self.plain.get(entry)
        known = None if ref is None else ref()
        if known is not None:
            return known
        self.share_gradients()
        bucket = self.bucket()
        assert bucket is not None
        with torch.inference_mode(False):
            bucket.residence.is_shared = True
            # Both share the version counter, unlike ``.data``.
            plain = nn.Parameter(shard_of(bucket) if entry is None else to_local(entry.param))
        if entry is not None:
            mark_entry(plain, entry)  # an empty slice has no storage to be recognised by
        _expect_gradient(plain, bucket)
        nodes = self._watch(bucket, entry, plain)
        source = Source(self.bucket, _find_nothing if entry is None else weakref.ref(entry), nodes)
        plain.__dict__[_SOURCE_KEY] = source
        plain.__dict__["__deepcopy__"] = _Copy(weakref.ref(plain))
        self.plain[entry] = weakref.ref(plain, partial(_forget_plain, weakref.ref(self), entry))
        self.share_gradients()
        return plain

    def _watch(self, bucket: Bucket, entry: Entry | None, plain: nn.Parameter) -> list[Any]:
        """Share gradients before autograd itself adds to one, as for a penalty on the weights."""
        share, nodes = partial(_share_first, weakref.ref(self)), []
        entries = bucket.entries if entry is None else [entry]
        with raw(), torch.inference_mode(False), torch.enable_grad():
            for own in entries:
                if requires_grad(own.param):
                    nodes.append(get_gradient_edge(own.param).node)
                    nodes[-1].register_prehook(share)
            if bucket.mesh.microbatches is not None:
                refusal = refusal_of(entries[0], bucket.mesh.microbatches)
                nodes.append(get_gradient_edge(plain).node)
                nodes[-1].register_prehook(partial(_refuse_arrival, refusal))
        return nodes

    def unwatch(self, entries: Iterable[Entry]) -> None:
        """Let go of ``entries``, which become plain: autograd wants gradients of slices of them.

        What was over one of them stands for nothing any more.
        """
        with raw():
            gone = {id(entry.param) for entry in entries}
            alive = [plain for ref in self.plain.values() if (plain := ref()) is not None]
            for source in filter(None, map(source_of, alive)):
                source.nodes[:] = [n for n in source.nodes if id(n.variable) not in gone]
        for ref in filter(None, [self.plain.pop(entry, None) for entry in entries]):
            if (lost := ref()) is not None:
                lost.__dict__[_SOURCE_KEY] = Source(_find_nothing, _find_nothing, [])
                self.has_lost = True

    def share_gradients(
        self, flat: Grad = None, are_set: bool = False, converted: bool = False
    ) -> None:
        """Have both sides' gradients be the same memory, as of now.

        Args:
            flat: the buffer that new gradients of the bucket are slices of, if it is one.
            are_set: sharded gradients were set just now, as they arrived.
            converted: the sharded gradients are other tensors since the module was converted, and
                not because somebody set them.
        """
        bucket = self.bucket()
        if bucket is None or not self.plain:
            return
        with raw():
            if not (are_set or converted) and _agree([self]):
                return
        with raw(), torch.no_grad():
            gone: list[object] = []
            self.gone = gone
            alive = [
                (entry, plain) for entry, ref in self.plain.items() if (plain := ref()) is not None
            ]
            for entry, plain in alive:
                self._follow(bucket, entry, plain)
                _refuse_hooks(bucket, plain)
                if not _is_noted(plain.grad, self.noted_plain.get(entry)):
                    for own, grad in _cut(bucket, entry, plain.grad):
                        self._send(own, grad, converted)
            for entry, plain in sorted(alive, key=lambda pair: pair[0] is not None):
                self._fetch(bucket, entry, plain, flat)
                self.noted_plain[entry] = _note(plain.grad, gone)
            self.noted = {e: _note(get_grad(e.param), gone) for e in bucket.entries}
            self.ids = [id(plain.grad) for _, plain in alive]
            bucket.residence.is_mirrored = True

    def _send(self, entry: Entry, grad: Grad, converted: bool) -> None:
        """Give a sharded parameter what was changed, unless it was given something else since."""
        own = get_grad(entry.param)
        if own is None or converted or _is_noted(own, self.noted.get(entry)):
            replace_grad(entry.param, None if grad is None else tag(grad.detach(), entry.spec))

    def _fetch(self, bucket: Bucket, entry: Entry | None, plain: nn.Parameter, flat: Grad) -> None:
        """Give a plain parameter the gradient that the sharded ones have."""
        if entry is not None:
            grad = get_grad(entry.param)
            if grad is None:
                plain.grad = None
            elif plain.grad is None or not _same_memory(plain.grad, grad):
                plain.grad = to_local(grad).detach()
            return
        _refuse_frozen(bucket)
        if all(get_grad(own.param) is None for own in bucket.entries):
            plain.grad = None
            return
        if plain.grad is None:
            if flat is None:
                flat = torch.zeros_like(shard_of(bucket), dtype=bucket.dtypes.grad)
            plain.grad = flat.detach()
        for own, piece in _cut(bucket, None, plain.grad):
            assert piece is not None
            _join(own, piece)

    def _follow(self, bucket: Bucket, entry: Entry | None, plain: nn.Parameter) -> None:
        """Point a plain parameter to where the shard is now, after ``module.to(...)``."""
        now = shard_of(bucket) if entry is None else to_local(entry.param)
        if (plain.dtype, plain.device) != (now.dtype, now.device):
            if plain.grad is not None:
                plain.grad, self.noted_plain[entry] = None, None
            plain.data = now
            source = source_of(plain)
            assert source is not None
            source.nodes[:] = self._watch(bucket, entry, plain)
        elif not _same_memory(plain, now):
            plain.data = now
        _expect_gradient(plain, bucket)

    def forget_plain(self, entry: Entry | None) -> None:
        """Forget a plain parameter that is gone; what was cleared through it is cleared."""
        del self.plain[entry]
        bucket, note = self.bucket(), self.noted_plain.pop(entry, None)
        if bucket is None or note is None or note() is not None:
            return
        with raw():
            for own in bucket.entries if entry is None else [entry]:
                if _is_noted(get_grad(own.param), self.noted.get(own)):
                    replace_grad(own.param, None)


def mirror_of(bucket: Bucket) -> Mirror | None:
    """The plain parameters over a bucket, if somebody asked for them."""
    known = bucket.history.mirror
    assert known is None or isinstance(known, Mirror)
    return known


def share_gradients(mirrors: Sequence[Mirror]) -> bool:
    """Share the gradients of these plain parameters before they are read; whether any changed."""
    with raw():
        if not mirrors or _agree(mirrors):
            return False
    for mirror in mirrors:
        mirror.share_gradients()
    return True


def _agree(mirrors: Iterable[Mirror]) -> bool:
    """Whether no gradient is another than when both sides of each agreed."""
    plain: list[Any] = []
    noted: list[int] = []
    for mirror in mirrors:
        bucket = mirror.bucket()
        if mirror.gone or bucket is None or not bucket.residence.is_mirrored:
            return False
        plain += map(_get_tensor, mirror.plain.values())
        noted += mirror.ids
    try:
        return list(map(id, map(get_grad, plain))) == noted
    except TypeError:  # None in place of a plain one that is being deleted
        return False


def leaves_of(param: torch.Tensor) -> Sequence[Any]:
    """The sharded parameters that a plain one stands for; of any other, itself."""
    source = source_of(param)
    bucket = None if source is None else source.bucket()
    if source is None or bucket is None:
        return [param]
    entry = source.entry()
    return bucket.views.params if entry is None else [entry.param]


def _share_first(mirror: weakref.ref[Mirror], _: Any) -> None:
    """Share gradients; called by autograd before it adds to one."""
    found = mirror()
    if found is not None:
        found.share_gradients()
        if (bucket := found.bucket()) is not None:
            bucket.residence.is_mirrored = False  # autograd adds to one now


def _refuse_arrival(refusal: Callable[[], str], _: Any) -> None:
    """Raise where a loss reads a plain parameter, whose gradient no tree would add up."""
    raise RuntimeError(refusal())


def _forget_plain(mirror: weakref.ref[Mirror], entry: Entry | None, _: Any) -> None:
    found = mirror()
    if found is not None:
        found.forget_plain(entry)


def _note(grad: Grad, gone: list[object]) -> Note:
    return None if grad is None else weakref.ref(grad, gone.append)


def _is_noted(grad: Grad, note: Note) -> bool:
    """Whether a gradient is the tensor that was noted, or is None as it was."""
    if grad is None or note is None:
        return grad is None and note is None
    return note() is grad


def _cut(bucket: Bucket, entry: Entry | None, grad: Grad) -> Iterable[tuple[Entry, Grad]]:
    """Cut a plain parameter's gradient into the parts of the entries."""
    if entry is not None:
        return [(entry, grad)]
    if grad is None:
        return [(own, None) for own in bucket.entries]
    pieces = grad.detach().split(bucket.views.splits)
    return [(e, pieces[k]) for e, k in zip(bucket.entries, bucket.views.pieces, strict=True)]


def _join(entry: Entry, piece: torch.Tensor) -> None:
    """Make a sharded gradient the memory of ``piece``, which is zero where there is none."""
    grad = get_grad(entry.param)
    if grad is None:
        piece.zero_()
    elif not _same_memory(piece, grad):
        piece.copy_(to_local(grad))
        if not grad.requires_grad:  # else it has a graph that the caller asked for
            replace_grad(entry.param, tag(piece, entry.spec))


def _expect_gradient(plain: nn.Parameter, bucket: Bucket) -> None:
    if plain.grad_dtype != bucket.dtypes.grad:
        plain.grad_dtype = bucket.dtypes.grad


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() or not a.numel()


def list_frozen(bucket: Bucket) -> list[str]:
    """Names of the parameters in it that are not trained; what ``refresh`` took out is padding."""
    with raw():
        return [e.spec.fqn for e in bucket.entries if e.slots and not requires_grad(e.param)]


def _refuse_frozen(bucket: Bucket) -> None:
    frozen = list_frozen(bucket)
    if frozen:
        raise RuntimeError(
            f"parameter {frozen[0]!r} was frozen after flat_parameters was called, and an "
            "optimizer over the flat parameter would go on changing it; use local_parameters, or "
            "set requires_grad before fully_shard."
        )


def _refuse_hooks(bucket: Bucket, plain: nn.Parameter) -> None:
    """Autograd delivers nothing to a plain parameter, so its hooks would never run."""
    if any(leaf_hooks(plain)):
        raise RuntimeError(
            f"a hook was registered on a plain parameter of unit {bucket.entries[0].spec.unit!r} "
            "(flat_parameters, local_parameters), where it would never run; register it on the "
            "module's own parameter, which gets the gradient first."
        )
    if not plain.requires_grad:
        raise RuntimeError(
            f"requires_grad of a plain parameter of unit {bucket.entries[0].spec.unit!r} "
            "(flat_parameters, local_parameters) was set to False, which freezes nothing; freeze "
            "the module's own parameter, and call local_parameters again."
        )
