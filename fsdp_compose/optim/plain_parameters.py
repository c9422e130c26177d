"""Plain tensors over the shards, for optimizers that are to be fast or know nothing of sharding.

``flat_parameters`` gives one 1-D leaf per trained bucket, ``local_parameters`` one per parameter.
They share memory with the sharded parameters in both directions: what an optimizer writes is what
the next gather sends, and after each backward their ``.grad`` is the sharded gradient, of which the
parameters' own ``.grad`` are slices. Clearing gradients on one side clears them on the other when
the next gradient arrives.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp_compose.base.attributes import get_grad, requires_grad, set_grad
from fsdp_compose.base.process import once
from fsdp_compose.base.torch_private import raw
from fsdp_compose.buckets.bucket import Bucket, Entry
from fsdp_compose.buckets.entries import find_entry, mark_entry
from fsdp_compose.construct.names import named_leaves
from fsdp_compose.core.gathering import renew_bucket
from fsdp_compose.core.guards.moved_parameters import shard_of
from fsdp_compose.core.guards.scope_parameters import leaf_of
from fsdp_compose.core.guards.units import require_units
from fsdp_compose.core.state import owner_of
from fsdp_compose.scopes.unshard import check_reduced
from fsdp_compose.sharded import is_sharded, tag, to_local


def flat_parameters(module: nn.Module) -> list[nn.Parameter]:
    """One plain 1-D parameter per trained bucket of ``module``, over the bucket's shard.

    An optimizer over them has a few long tensors instead of many short ones, padding (which stays
    zero) included. It cannot tell parameters apart: for an elementwise optimizer with the same
    settings for all parameters of a unit and dtype. Where settings differ (weight decay for
    matrices only), use ``local_parameters``; where it looks at a parameter as a whole (Muon,
    Shampoo, Adafactor), ``owner_step``.

    Called again, it returns the same objects. Trained parameters of no unit are in the list as
    they are. A parameter that got no gradient in a unit that ran counts as zero.

    Norms and sums over these tensors are of this rank's part only, which nothing can notice while
    an optimizer takes them: LAMB, LARS, Prodigy, D-Adaptation and Amos would be silently off, and
    are given ``module.parameters()``. (What such an optimizer keeps of its sums differs between
    ranks, and is refused when it is saved.) Clip with ``fsdp_compose.clip_grad_norm_(module,
    ...)``. A gradient can be edited in place on either side;
    one that is replaced after backward is not seen on the other. Gradients that wait to be reduced
    (``no_sync``) are dropped by ``module.zero_grad()``, not by an optimizer over these. After
    ``module.to(...)`` the tensors follow in the next backward; between backward and ``step`` it
    makes ``step`` raise.

    Returns:
        parameters of shape (elements of the shard,), in the shards' dtype.

    Raises:
        ValueError: nothing in ``module`` is sharded, a parameter of it belongs to a unit outside,
            or a bucket holds trained and frozen ones as ``requires_grad`` was changed afterwards.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> optim = torch.optim.AdamW(flat_parameters(model))
        >>> [tuple(param.shape) for param in flat_parameters(model)]  # with padding
        [(8,)]
    """
    found: list[nn.Parameter] = []
    buckets = _list_buckets(module, "flat_parameters")
    for name, leaf in _list_leaves(module).items():
        if is_sharded(leaf) and owner_of(find_entry(leaf)) not in buckets:
            raise ValueError(
                f"flat_parameters: {name!r} of {type(module).__name__} belongs to unit "
                f"{find_entry(leaf).spec.unit!r} outside of it; pass the module that contains both."
            )
    for bucket in buckets:
        with raw():
            trained = [requires_grad(entry.param) for entry in bucket.entries]
        if not any(trained):
            continue
        if not all(trained):
            names = [e.spec.fqn for e, t in zip(bucket.entries, trained, strict=True) if not t]
            raise ValueError(
                f"flat_parameters: {names[0]!r} of unit {bucket.entries[0].spec.unit!r} is frozen, "
                "but shares a buffer with trained parameters, and an optimizer over the buffer "
                "would decay it. Set requires_grad before fully_shard, or use local_parameters."
            )
        found.append(_mirror_of(bucket).make_flat())
    return found + [leaf for leaf in _list_leaves(module).values() if not is_sharded(leaf)]


def local_parameters(module: nn.Module) -> list[nn.Parameter]:
    """A plain 1-D parameter over this rank's slice of each trained parameter.

    The values of ``named_local_parameters``, in order: for optimizers that must not see a tensor
    subclass, or that are faster without one, and that update each element by itself.

    An optimizer that takes a norm, mean or sum takes it over this rank's slices alone here, and
    nothing can notice. Those that do so within a parameter (LAMB, LARS, Adafactor, Muon, Shampoo)
    go to ``owner_step``. Those that sum over all parameters (Prodigy, D-Adaptation) need the
    sharded parameters themselves, whose norms and sums are global: ``(a * b).sum()`` in place of
    ``torch.dot(a.flatten(), b.flatten())``.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> optim = torch.optim.AdamW(local_parameters(model))
        >>> [tuple(param.shape) for param in local_parameters(model)]  # this rank's slices
        [(4,), (2,)]
    """
    return list(named_local_parameters(module).values())


def named_local_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """A plain 1-D parameter over this rank's slice of each trained parameter, by its name.

    In the order of ``module.named_parameters()``, with the names it gives; a slice may be empty.
    With ``granularity`` a block size or ``"row"``, slices begin and end between blocks, so that
    8-bit optimizers and those of rows compute what one process does. Their state with a row for
    each block is saved and loaded on any number of ranks, cut between blocks again.

    For optimizers that treat parameters differently by name::

        shapes = {name: p.dim() for name, p in model.named_parameters()}
        local = named_local_parameters(model)
        decayed = [p for name, p in local.items() if shapes[name] >= 2]
        others = [p for name, p in local.items() if shapes[name] < 2]

    All else is as for ``flat_parameters``, except that parameters may be frozen and trained at any
    time: call again for those that were frozen.

    Raises:
        ValueError: nothing in ``module`` is sharded.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> list(named_local_parameters(model))
        ['weight', 'bias']
    """
    _list_buckets(module, "named_local_parameters")
    found: dict[str, nn.Parameter] = {}
    for name, leaf in _list_leaves(module).items():
        if is_sharded(leaf):
            entry = find_entry(leaf)
            leaf = _mirror_of(owner_of(entry)).make_local(entry)
        found[name] = leaf
    return found


@dataclass(frozen=True)
class Source:
    """What a plain parameter stands for: a bucket's shard, or one entry's slice of it."""

    bucket: weakref.ref[Bucket]
    entry: weakref.ref[Entry] | None

    def __reduce__(self) -> Any:
        """A parameter that was pickled, or copied, stands for itself."""
        return type(None), ()


_SOURCE_KEY = "_fsdp_compose_source"


def source_of(param: torch.Tensor) -> Source | None:
    """What a parameter made by ``flat_parameters`` or ``local_parameters`` stands for."""
    return param.__dict__.get(_SOURCE_KEY)


class _Mirror:
    """The plain parameters over one bucket; they belong to whoever asked for them.

    After ``join_gradients`` the gradient of ``flat`` is one buffer, and the gradients of the
    parameters are its slices; where one has none, its slice is zero.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = weakref.ref(bucket)
        self.flat: weakref.ref[nn.Parameter] | None = None
        self.local: dict[Entry, weakref.ref[nn.Parameter]] = {}

    def make_flat(self) -> nn.Parameter:
        known = None if self.flat is None else self.flat()
        if known is not None:
            return known
        bucket = self.bucket()
        assert bucket is not None
        with torch.inference_mode(False):
            bucket.residence.is_shared = True
            flat = nn.Parameter(shard_of(bucket))  # shares the version counter, unlike .data
        _expect_gradient(flat, bucket)
        flat.__dict__[_SOURCE_KEY] = Source(self.bucket, None)
        self.flat = weakref.ref(flat)
        self.join_gradients(None)
        return flat

    def make_local(self, entry: Entry) -> nn.Parameter:
        ref = self.local.get(entry)
        known = None if ref is None else ref()
        if known is not None:
            return known
        with torch.inference_mode(False):
            entry.spec.residence.is_shared = True
            local = nn.Parameter(to_local(entry.param))
        mark_entry(local, entry)  # an empty slice has no storage to be recognised by
        _expect_gradient(local, owner_of(entry))
        local.__dict__[_SOURCE_KEY] = Source(self.bucket, weakref.ref(entry))
        self.local[entry] = weakref.ref(local)
        self.join_gradients(None)
        return local

    def reconcile(self) -> None:
        """Before gradients arrive: clear on both sides what was cleared on one."""
        bucket, flat = self._follow_bucket()
        with raw():
            for entry, local in self._list_locals():
                if local.grad is None:
                    set_grad(entry.param, None)
                elif get_grad(entry.param) is None:
                    local.grad = None
            if flat is None:
                return
            frozen = [e.spec.fqn for e in bucket.entries if not requires_grad(e.param)]
            if frozen:
                raise RuntimeError(
                    f"parameter {frozen[0]!r} was frozen after flat_parameters was called, and an "
                    "optimizer over the flat parameter would go on changing it; use "
                    "local_parameters, or set requires_grad before fully_shard."
                )
            if flat.grad is None:
                for entry in bucket.entries:
                    set_grad(entry.param, None)
            elif all(get_grad(entry.param) is None for entry in bucket.entries):
                flat.grad = None

    def join_gradients(self, flat: torch.Tensor | None) -> None:
        """After gradients arrived: make the plain parameters' the same memory."""
        bucket, leaf = self._follow_bucket()
        with raw(), torch.no_grad():
            if leaf is not None:
                self._join_bucket(bucket, leaf, flat)
            for entry, local in self._list_locals():
                grad = get_grad(entry.param)
                if grad is None:
                    local.grad = None
                elif local.grad is None or not _same_memory(local.grad, grad):
                    local.grad = to_local(grad)

    def _join_bucket(self, bucket: Bucket, leaf: nn.Parameter, flat: torch.Tensor | None) -> None:
        grads = [get_grad(entry.param) for entry in bucket.entries]
        if leaf.grad is None:
            if all(grad is None for grad in grads):
                return
            leaf.grad = (
                torch.zeros_like(shard_of(bucket), dtype=bucket.dtypes.grad)
                if flat is None
                else flat
            )
        pieces = leaf.grad.split(bucket.views.splits)
        for entry, k, grad in zip(bucket.entries, bucket.views.pieces, grads, strict=True):
            piece = pieces[k]
            if grad is None:
                piece.zero_()
            elif not _same_memory(piece, grad):
                piece.copy_(to_local(grad))
                if not grad.requires_grad:  # else it has a graph that the caller asked for
                    set_grad(entry.param, tag(piece, entry.spec))

    def _list_locals(self) -> Iterator[tuple[Entry, nn.Parameter]]:
        for entry, ref in list(self.local.items()):
            local = ref()
            if local is None:
                del self.local[entry]
            else:
                yield entry, local

    def _follow_bucket(self) -> tuple[Bucket, nn.Parameter | None]:
        """Point the plain parameters to where the shard is now, after ``module.to(...)``."""
        bucket, flat = self.bucket(), None if self.flat is None else self.flat()
        assert bucket is not None
        pairs = [(flat, shard_of(bucket))] if flat is not None else []
        pairs += [(local, to_local(entry.param)) for entry, local in self._list_locals()]
        for plain, now in pairs:
            kind = (plain.dtype, plain.device)
            if kind != (now.dtype, now.device) or not _same_memory(plain, now):
                if kind != (now.dtype, now.device):
                    plain.grad = None
                plain.data = now
                _expect_gradient(plain, bucket)
        return bucket, flat


def _expect_gradient(plain: nn.Parameter, bucket: Bucket) -> None:
    if plain.grad_dtype != bucket.dtypes.grad:
        plain.grad_dtype = bucket.dtypes.grad


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() or not a.numel()


def _hook_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _mirror_of(bucket: Bucket) -> _Mirror:
    once(_hook_steps)
    if bucket.residence.moved:
        renew_bucket(bucket)
    if bucket.history.mirror is None:
        bucket.history.mirror = _Mirror(bucket)
    assert isinstance(bucket.history.mirror, _Mirror)
    return bucket.history.mirror


def _list_buckets_of(optimizer: Any) -> list[Bucket | None]:
    """The buckets that the optimizer's plain parameters are over; None for one that is gone."""
    sources = [
        source.bucket
        for group in optimizer.param_groups
        for param in group["params"]
        if type(param) is nn.Parameter and (source := param.__dict__.get(_SOURCE_KEY))
    ]
    return [bucket() for bucket in {id(bucket): bucket for bucket in sources}.values()]


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    for bucket in _list_buckets_of(optimizer):
        if bucket is None:
            raise RuntimeError(
                f"{type(optimizer).__name__} holds plain parameters of a module that is no longer "
                "sharded (undo was called, or it was deleted), so its step would train nothing; "
                "build an optimizer over module.parameters()."
            )
        if bucket.residence.moved:
            raise RuntimeError(
                f"unit {bucket.entries[0].spec.unit!r} was converted (module.to(...), p.data = "
                "...) between backward and step, and the plain parameters in "
                f"{type(optimizer).__name__} are over its former memory; convert after step."
            )
        check_reduced([bucket], f"{type(optimizer).__name__}.step()")


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Fused optimizers write without counting it, and a unit kept gathered would not notice."""
    for bucket in _list_buckets_of(optimizer):
        if bucket is not None:
            increment_version(shard_of(bucket))


def _list_buckets(module: nn.Module, caller: str) -> list[Bucket]:
    return [bucket for unit in require_units(module, caller) for bucket in unit.buckets]


def _list_leaves(module: nn.Module) -> dict[str, nn.Parameter]:
    """Trained parameters, each once, by its first name."""
    found: dict[nn.Parameter, str] = {}
    for name, param in named_leaves(module):
        if param.requires_grad:
            found.setdefault(leaf_of(param), name)
    return {name: leaf for leaf, name in found.items()}
