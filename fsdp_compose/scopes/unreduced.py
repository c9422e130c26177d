"""What ``.grad`` is while gradients of a parameter wait to be reduced.

They lie in a flat buffer of the unit then. ``zero_grad()`` finds something to clear, and what would
read the gradient raises, where it would otherwise find none, or only what was there before. A dtype
that the reduced gradient will not have is refused too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.overrides import resolve_name

from fsdp_compose.base.attributes import get_grad, requires_grad
from fsdp_compose.base.torch_private import call_raw, raw
from fsdp_compose.base.tree import find_tensors
from fsdp_compose.buckets.bucket import Entry
from fsdp_compose.buckets.entries import entry_of
from fsdp_compose.buckets.gradients import any_waits, cut, discard_waiting
from fsdp_compose.core.state import owner_of
from fsdp_compose.scopes.unshard import explain_open
from fsdp_compose.sharded import (
    CASTS,
    CLEARING,
    HARMLESS,
    ShardedTensor,
    replace_grad,
    tag,
    to_local,
)


class UnreducedGradient(ShardedTensor):
    """A gradient that was accumulated without synchronisation and is not reduced yet.

    It has the shape, dtype and device that the reduced one will have, and can be cleared.
    """

    _entry: Entry

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in HARMLESS:
            return call_raw(func, (), args, kwargs or {})
        if func in CASTS and type(args[0]) is cls:
            return args[0]  # module.to(), after which the unit converts what waits
        if func not in CLEARING:
            found, _ = find_tensors((args, kwargs))
            name = resolve_name(func) or func.__name__
            next(t for t in found if type(t) is cls).refuse(name.removesuffix(".__get__"))
        for tensor in args if func is torch.Tensor.zero_ else args[0]:
            if type(tensor) is cls:
                _zero(tensor._entry)
            else:
                tensor.zero_()
        return args[0]

    def refuse(self, caller: str) -> NoReturn:
        """Raise for a call that would read it."""
        raise RuntimeError(explain_open(owner_of(self._entry), caller, self._entry.spec))

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        spec = self._entry.spec
        return f"{type(self).__name__}({spec.fqn!r} of unit {spec.unit!r}: not reduced yet)"


def _accept_cast(gradient: UnreducedGradient, value: torch.Tensor) -> None:
    """Let ``module.to()`` write back what a cast returned."""
    if value is not gradient and getattr(value, "_entry", None) is not gradient._entry:
        gradient.refuse("data")


def _make_refusal(name: str) -> Callable[..., NoReturn]:
    return lambda gradient, *args: gradient.refuse(name)


for _name in "__copy__ __deepcopy__ __format__ __reduce_ex__ full_tensor to_local".split():
    setattr(UnreducedGradient, _name, _make_refusal(_name))
setattr(UnreducedGradient, "data", property(_make_refusal("data"), _accept_cast))  # noqa: B010


def read_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Answer ``p.grad`` where gradients of the parameter's bucket waited a while ago."""
    (param,) = args
    entry = entry_of(param)
    with raw():
        reduced = get_grad(param)
    if entry is not None and waits(entry):
        like = to_local(param).new_empty(0, dtype=owner_of(entry).dtypes.grad)
        gradient = tag(like, entry.spec)
        gradient.__class__, gradient._entry = UnreducedGradient, entry
        return gradient
    return reduced if reduced is None else tag(reduced, param._shard_spec)


def write_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Set ``p.grad``, and drop what waited for the parameter, unless that is what it is set to."""
    param, value = args
    entry, residence = entry_of(param), param._shard_spec.residence
    pending = entry is not None and waits(entry)
    if pending and type(value) is UnreducedGradient and value._entry is entry:
        return
    residence.awaits = False
    try:
        param.grad = value  # which raises for what does not fit
    finally:
        residence.awaits = True
    if entry is not None and pending:
        _drop(entry)


def write_dtype(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Set ``p.grad_dtype`` where it is that of the parameter's bucket.

    Raises:
        ValueError: it is another, which gradients of the bucket will not have.
    """
    param, wanted = args
    entry = entry_of(param)
    kept = wanted if entry is None else owner_of(entry).dtypes.grad
    if wanted not in (None, kept):
        raise ValueError(
            f"grad_dtype of {param._shard_spec.fqn!r} (unit {param._shard_spec.unit!r}) was set to "
            f"{wanted} after fully_shard; wanted {kept}, in which its gradients are kept. They "
            "are reduced and kept by bucket: shard with mp_policy=MixedPrecision(reduce_dtype="
            f"{wanted}, keep_low_precision_grads=True), or with a function (fqn, parameter) that "
            "gives it for some."
        )
    call_raw(func, (), args, kwargs)


def waits(entry: Entry) -> bool:
    """Whether gradients of it lie outside ``.grad``."""
    bucket = owner_of(entry)
    bucket.residence.awaits = any_waits(bucket)
    return bucket.residence.awaits and _is_used(entry)


def _is_used(entry: Entry) -> bool:
    """Whether what waits in the bucket is of this parameter too.

    Where this rank took part without a gradient of its own (``participate``), it may be of any.
    """
    arriving = owner_of(entry).arriving
    if arriving.used or not arriving.joined:
        return bool(arriving.used >> entry.index & 1)
    with raw():
        return requires_grad(entry.param)


def cut_partial(entry: Entry, flat: torch.Tensor) -> torch.Tensor:
    """Its elements of a bucket's ``partial``, larger than a shard where replicas cut it again."""
    bucket = owner_of(entry)
    partial = torch.view_as_complex(flat.view(-1, 2)) if bucket.dtypes.grad.is_complex else flat
    start = entry.spec.offset - bucket.mesh.gather_axis.rank * partial.numel()
    return partial[max(start, 0) : max(start + entry.spec.numel, 0)]


def _drop(entry: Entry) -> None:
    """Clear what waits for one parameter, and free the bucket's buffers if that was the last."""
    bucket = owner_of(entry)
    arriving = bucket.arriving
    if not arriving.used:
        arriving.used = sum(1 << e.index for e in bucket.entries if _is_used(e))
    arriving.used &= ~(1 << entry.index)
    if not arriving.used:
        discard_waiting(bucket)
        return
    with torch.no_grad():
        if arriving.packed and bucket.grads is not None:
            bucket.grads.views[entry.index].zero_()
        if arriving.partial is not None:
            cut_partial(entry, arriving.partial).zero_()
        for flat in (arriving.waiting, *arriving.sums.nodes):
            if flat is not None:
                cut(bucket, flat)[entry.index].zero_()


def _zero(entry: Entry) -> None:
    """Make the gradient zero, as ``p.grad.zero_()`` makes one that was reduced."""
    _drop(entry)
    with raw():
        grad = get_grad(entry.param)
        if grad is None:
            zeros = torch.zeros_like(to_local(entry.param), dtype=owner_of(entry).dtypes.grad)
            replace_grad(entry.param, zeros)
        else:
            grad.zero_()
