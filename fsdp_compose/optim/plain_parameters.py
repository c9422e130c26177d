"""Plain tensors over the shards, for optimizers that are to be fast or know nothing of sharding.

``flat_parameters`` gives one 1-D leaf per trained bucket, ``local_parameters`` one per parameter.
They share memory with the sharded parameters in both directions: what an optimizer writes is what
the next gather sends, and after each backward their ``.grad`` is the sharded gradient, of which the
parameters' own ``.grad`` are slices. What is cleared, replaced or set on one side is so on the
other when the next gradient arrives, at the optimizer's step, and where this library takes norms or
unscales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_compose.base.loops import parameters_of
from fsdp_compose.base.process import here, once
from fsdp_compose.base.torch_private import call_at_step_end
from fsdp_compose.base.torch_stack import is_scaled_by_torch
from fsdp_compose.buckets.bucket import Bucket
from fsdp_compose.buckets.entries import find_entry
from fsdp_compose.construct.names import named_leaves
from fsdp_compose.core.gathering import renew_bucket
from fsdp_compose.core.guards.moved_parameters import shard_of
from fsdp_compose.core.guards.scope_parameters import leaf_of
from fsdp_compose.core.guards.units import require_units
from fsdp_compose.core.state import owner_of
from fsdp_compose.optim.mirror import (
    Mirror,
    buckets_under,
    list_frozen,
    mirror_of,
    share_gradients,
)
from fsdp_compose.scopes.unshard import check_stepped, is_open, may_wait
from fsdp_compose.sharded import is_sharded


def flat_parameters(module: nn.Module) -> list[nn.Parameter]:
    """One plain 1-D parameter per trained bucket of ``module``, over the bucket's shard.

    An optimizer over them has a few long tensors instead of many short ones, padding (which stays
    zero) included. It cannot tell parameters apart: for an elementwise optimizer with the same
    settings for all parameters of a unit and dtype. Where settings differ (weight decay for
    matrices only) or step counts that were saved, use ``local_parameters``; where it looks at a
    parameter as a whole (Muon, Shampoo, Adafactor), ``owner_step``.

    Called again, it returns the same objects. Trained parameters of no unit are in the list as
    they are. A parameter that got no gradient in a unit that ran counts as zero.

    Norms and sums over these tensors are of this rank's part only, which nothing can notice while
    an optimizer takes them: LAMB, LARS, Prodigy, D-Adaptation and Amos would be silently off, and
    are given ``module.parameters()``. (What such an optimizer keeps of its sums differs between
    ranks, and is refused when it is saved.) Clip with ``fsdp_compose.clip_grad_norm_(module,
    ...)``. A gradient may be edited, replaced or cleared on either side; hooks belong on the
    module's own parameters. Gradients that wait to be reduced
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
        frozen = list_frozen(bucket)
        if len(frozen) == sum(bool(entry.slots) for entry in bucket.entries):
            continue
        if frozen:
            raise ValueError(
                f"flat_parameters: {frozen[0]!r} of unit {bucket.entries[0].spec.unit!r} is "
                "frozen, but shares a buffer with trained parameters, and an optimizer over the "
                "buffer would decay it. Set requires_grad before fully_shard, or use "
                "local_parameters."
            )
        found.append(_mirror_of(bucket).make(None))
    return found + [leaf for leaf in _list_leaves(module).values() if not is_sharded(leaf)]


def local_parameters(module: nn.Module) -> list[nn.Parameter]:
    """A plain 1-D parameter over this rank's slice of each trained parameter.

    The values of ``named_local_parameters``, in order: for optimizers that must not see a tensor
    subclass, or that are faster without one, and that update each element by itself.

    An optimizer that takes a norm, mean or sum takes it over this rank's slices alone here, and
    nothing can notice. Those that do so within a parameter (LAMB, LARS, Adafactor, Muon, Shampoo)
    go to ``owner_step``. Those that sum over all parameters (Prodigy, D-Adaptation) need the
    sharded parameters themselves, whose norms and sums are global, ``(a * b).sum()`` and
    ``torch.dot(a.flatten(), b.flatten())`` among them.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> optim = torch.optim.AdamW(local_parameters(model))
        >>> [tuple(param.shape) for param in local_parameters(model)]  # this rank's slices
        [(4,), (2,)]
    """
    return list(_make_local(module, "local_parameters").values())


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
    return _make_local(module, "named_local_parameters")


def _make_local(module: nn.Module, caller: str) -> dict[str, nn.Parameter]:
    _list_buckets(module, caller)
    found: dict[str, nn.Parameter] = {}
    for name, leaf in _list_leaves(module).items():
        if is_sharded(leaf):
            entry = find_entry(leaf)
            leaf = _mirror_of(owner_of(entry)).make(entry)
        found[name] = leaf
    return found


def _guard_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _mirror_of(bucket: Bucket) -> Mirror:
    once(_guard_steps)
    if bucket.residence.moved:
        renew_bucket(bucket)
    known = mirror_of(bucket)
    if known is None:
        bucket.history.mirror = known = Mirror(bucket)
    return known


class _Stepped(NamedTuple):
    """What an optimizer last stepped, and what gives the buckets that it lies over."""

    params: list[Any]
    buckets: list[Callable[[], Bucket | None]]

    def __reduce__(self) -> Any:
        """A copied optimizer has other parameters."""
        return _Stepped, ([], [])


_STEPPED_KEY = "_fsdp_compose_stepped"
"""The attribute of an optimizer of plain parameters; with it goes what is in there."""


def _find_buckets(optimizer: Any) -> list[Callable[[], Bucket | None]]:
    """Find the buckets under the optimizer's plain parameters; kept while it has the same ones."""
    params = parameters_of(optimizer)
    known = _find_stepped(optimizer)
    is_known = len(params) == len(known.params) and all(map(is_, params, known.params))
    if not is_known or any(map(_has_lost, _list_mirrors(known.buckets))):
        known = _Stepped(params, buckets_under(params))
        optimizer.__dict__[_STEPPED_KEY] = known
    return known.buckets


def _list_mirrors(refs: Iterable[Callable[[], Bucket | None]]) -> list[Mirror]:
    """The plain parameters over each bucket that is there."""
    return list(filter(None, map(_get_mirror, filter(None, [ref() for ref in refs]))))


_get_mirror: Callable[[Bucket], Any] = attrgetter("history.mirror")
_has_lost: Callable[[Mirror], bool] = attrgetter("has_lost")


def _find_stepped(optimizer: Any) -> _Stepped:
    return optimizer.__dict__.get(_STEPPED_KEY) or _Stepped([], [])


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    refs = _find_buckets(optimizer)
    buckets = [ref() for ref in refs]
    if buckets and isinstance(optimizer, _OF_WHOLE):
        raise RuntimeError(
            f"{type(optimizer).__name__} computes with norms and sums of whole parameters, and "
            "flat_parameters and local_parameters are this rank's part of them. Give Adafactor to "
            "owner_step; LBFGS has no sharded form."
        )
    if buckets and is_scaled_by_torch():
        raise RuntimeError(
            "torch.amp.GradScaler looks for infinities in this rank's part of flat_parameters and "
            "local_parameters alone, so ranks would skip different steps; use "
            "fsdp_compose.GradScaler, which asks all ranks."
        )
    waits = any(map(may_wait, here.engines.values()))
    for bucket in buckets:
        if bucket is None:
            raise RuntimeError(
                f"{type(optimizer).__name__} holds plain parameters of a module that is no longer "
                "sharded (undo was called, refresh took them out, or it was deleted), or copies of "
                "plain parameters (copy.deepcopy), so its step would train nothing; build an "
                "optimizer over module.parameters(), or over plain parameters of the copied module."
            )
        if bucket.residence.moved:
            raise RuntimeError(
                f"unit {bucket.entries[0].spec.unit!r} was converted (module.to(...), p.data = "
                "...) between backward and step, and the plain parameters in "
                f"{type(optimizer).__name__} are over its former memory; convert after step."
            )
        if waits and is_open(bucket):
            check_stepped(bucket, f"{type(optimizer).__name__}.step()")
    share_gradients(_list_mirrors(refs))
    if buckets:
        call_at_step_end(optimizer, _after_step)


_OF_WHOLE = (torch.optim.LBFGS, torch.optim.Adafactor)


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Fused optimizers write without counting it, and a unit kept gathered would not notice."""
    buckets = filter(None, [ref() for ref in _find_stepped(optimizer).buckets])
    increment_version([shard_of(b) if b.residence.moved else b.stored for b in buckets])


def _list_buckets(module: nn.Module, caller: str) -> list[Bucket]:
    return [bucket for unit in require_units(module, caller) for bucket in unit.buckets]


def _list_leaves(module: nn.Module) -> dict[str, nn.Parameter]:
    """Trained parameters, each once, by its first name."""
    found: dict[nn.Parameter, str] = {}
    for name, param in named_leaves(module):
        if param.requires_grad:
            found.setdefault(leaf_of(param), name)
    return {name: leaf for leaf, name in found.items()}
