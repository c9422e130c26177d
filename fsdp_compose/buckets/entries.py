"""The entry of a parameter, and the class and attributes that modules read from it."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compose.base.attributes import get_grad
from fsdp_compose.base.process import here
from fsdp_compose.base.torch_private import raw
from fsdp_compose.buckets.bucket import Entry
from fsdp_compose.sharded import KEPT, is_sharded, spec_of, tag

ENTRY_KEY = "_fsdp_compose_entry"
"""Where a parameter has a weak reference to its entry, among its attributes."""


def mark_entry(param: nn.Parameter, entry: Entry) -> None:
    """Note the entry on a parameter, or on a plain parameter over its slice."""
    param.__dict__[ENTRY_KEY] = weakref.ref(entry)


def give_slice(entry: Entry, param: nn.Parameter) -> None:
    """Note that ``param`` holds the entry's slice now."""
    entry.param = param
    here.retrained += 1  # it may not train
    bucket = None if entry.owner is None else entry.owner()
    if bucket is not None:
        bucket.views.params[entry.index] = param


def rename_entry(entry: Entry, fqn: str, unit: str) -> None:
    """Name the parameter, and its gradient where that was given out, which ranks compare."""
    if (entry.spec.fqn, entry.spec.unit) == (fqn, unit):
        return
    entry.spec = replace(entry.spec, fqn=fqn, unit=unit)
    tag(entry.param, entry.spec)
    with raw():
        grad = get_grad(entry.param)
        if is_sharded(grad):
            tag(grad, entry.spec)


def find_entry(param: nn.Parameter) -> Entry:
    """The entry of a sharded parameter.

    Raises:
        ValueError: it is a copy of one, or was computed from one, and is in no bucket.
    """
    entry = entry_of(param)
    if entry is None:
        spec = spec_of(param)
        raise ValueError(
            f"this slice of {spec.fqn!r} (unit {spec.unit!r}) belongs to no unit: the unit's "
            "module is gone, copy.deepcopy of a part of the unit made it, or it was computed from "
            "slices. Copy the whole unit, whose copy is sharded in the same way, or a part inside "
            "`with fsdp_compose.gathered(module):`, whose copy is plain; or put a plain parameter "
            "in its place: nn.Parameter(p.full_tensor()), called on every rank."
        )
    return entry


def entry_of(param: nn.Parameter) -> Entry | None:
    """The entry of a parameter; None if it lies in no bucket."""
    ref = param.__dict__.get(ENTRY_KEY)
    return None if ref is None else ref()


def forget_entry(param: nn.Parameter) -> None:
    """Remove the entry from a parameter that is plain again."""
    param.__dict__.pop(ENTRY_KEY, None)
    param.__dict__ = dict(param.__dict__)
    if isinstance(param, DTensor):
        param._is_param = True


def refusal_of(entry: Entry, deterministic: int) -> Callable[[], str]:
    """The error for a gradient that no reduction brings, where ``deterministic=`` adds them up."""
    ref = weakref.ref(entry)

    def explain() -> str:
        reached = ref()
        name = "" if reached is None else f" {reached.spec.fqn!r} of unit {reached.spec.unit!r}"
        return (
            f"parameter{name} was sharded with deterministic={deterministic}, which adds up the "
            "gradients of microbatches in one tree; found a gradient of its slice, as a loss gives "
            "that reads parameters outside of their unit's forward (a penalty on weights): it "
            "would be added once for each microbatch of a rank, undivided. Compute the loss inside "
            "`with fsdp_compose.gathered(module):`, or use the optimizer's weight_decay."
        )

    return explain


_OURS = frozenset((ENTRY_KEY, "_shard_spec", "_is_param", "dtype", "device", KEPT))


def attributes_of(param: nn.Parameter) -> dict[str, Any]:
    """Attributes of a parameter that this library did not set."""
    return Attributes(param.__dict__)._own()


class Attributes(dict[str, Any]):
    """A parameter's ``__dict__``, which its full tensors have too.

    Copies and pickles of those have what the user set in it alone, as of a plain module's tensors.
    """

    def __bool__(self) -> bool:
        return any(name not in _OURS for name in self)

    def items(self) -> Any:
        return self._own().items()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self._own(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return OrderedDict, (), None, None, iter(self._own().items())  # weights_only reads it

    def _own(self) -> dict[str, Any]:
        return {name: self[name] for name in self if name not in _OURS}


def share_attributes(entry: Entry) -> dict[str, Any]:
    """Give the parameter a ``__dict__`` that its full tensors may have as theirs; return it."""
    param = entry.param
    if type(param.__dict__) is not Attributes:
        param.__dict__ = Attributes(param.__dict__)
    param.__dict__.pop("_is_param", None)  # its class has it, and full tensors have not
    return param.__dict__


def put_in_classes(
    tensors: Sequence[torch.Tensor], entries: Sequence[Entry], indices: Iterable[int]
) -> Sequence[torch.Tensor]:
    """``put_in_class`` for those at ``indices`` of full tensors by entry."""
    found = list(tensors)
    for index in indices:
        found[index] = put_in_class(tensors[index], entries[index])
    return found


def put_in_class(tensor: torch.Tensor, entry: Entry) -> torch.Tensor:
    """Give a full tensor the parameter's class, and its attributes, which they share.

    The class may be one around a tensor: what is returned is what modules read.
    """
    if entry.kind is not nn.Parameter:
        tensor.__class__ = entry.kind
    if "_is_param" in tensor.__dict__:  # for isinstance
        tensor.__dict__ = {**attributes_of(entry.param), "_is_param": True}
    else:
        tensor.__dict__ = entry.param.__dict__
    return wrap(tensor, entry)


def wrap(tensor: torch.Tensor, entry: Entry) -> torch.Tensor:
    """What modules read for a full tensor: it, or around it the class that the parameter had."""
    if entry.wrapper is None:
        return tensor
    wrapped: torch.Tensor = entry.wrapper.wrap(tensor)
    wrapped.__dict__ = {**attributes_of(entry.param), **wrapped.__dict__}
    return wrapped
