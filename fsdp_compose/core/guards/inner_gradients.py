"""What user code does to ``.grad`` of a gathered parameter reaches the parameter, or raises.

While a unit's forward or backward runs its modules read gathered tensors, whose ``.grad`` is not
that of the parameters. Where a backward inside a forward brought gradients, each tensor gets a
stand-in for its own. One that is gone, or another, when the forward ends was cleared or replaced by
the forward, and so then is the parameter's gradient. To read a stand-in is an error.

Hooks of modules find stand-ins in the backward of their own unit, too. There the gradient of this
backward is still to come, and so to clear or to set one is an error as well.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from fsdp_compose.base.attributes import ABOUT_SHAPES, get_grad, set_grad
from fsdp_compose.base.torch_private import call_raw, raw
from fsdp_compose.buckets.bucket import Entry
from fsdp_compose.core.state import Unit
from fsdp_compose.sharded import replace_grad


class StandIn(Tensor):
    """Has the shape of a gradient, and none of its numbers."""

    _unread: str
    _lost: str | None  # why it may not be cleared or set either
    _is_zeroed: bool

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (Tensor.zero_, Tensor.detach_, Tensor.requires_grad_):
            args[0]._is_zeroed |= func is Tensor.zero_
            return args[0]
        if func in ABOUT_SHAPES:
            return call_raw(func, types, args, kwargs or {})
        stand_in = next(arg for arg in args if isinstance(arg, StandIn))
        raise RuntimeError(stand_in._unread)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StandIn({tuple(self.shape)})"


def show_stand_ins(unit: Unit) -> None:
    """Give what the unit's forward reads stand-ins for the gradients that its parameters have."""
    for entry, tensor in zip(unit.entries, unit.run.showing or (), strict=False):
        with raw():
            has_gradient = get_grad(entry.param) is not None
        if has_gradient and type(tensor) is Tensor:
            _show(
                unit,
                entry,
                tensor,
                f"the gradient of parameter {entry.spec.fqn!r} was read inside the forward of unit "
                f"{unit.name!r}, where the parameter is gathered and its gradient is not; it may "
                "be cleared or set there. Read it after the forward, use torch.autograd.grad, or "
                "make what runs the backward a module around the unit.",
            )


def guard_hooks(unit: Unit) -> None:
    """Give what backward hooks of its modules read stand-ins for gradients."""
    for entry, tensor in zip(unit.entries, unit.run.showing or (), strict=True):
        if type(tensor) is Tensor and tensor.requires_grad:
            read, lost = (
                _IN_BACKWARD.format(did, entry.spec.fqn, unit.name)
                for did in ("read", "cleared or set")
            )
            _show(unit, entry, tensor, read, lost)


_IN_BACKWARD = (
    "a hook {} the gradient of parameter {!r} in the backward of its own unit {!r}, where the "
    "parameter is gathered and its gradient is not there yet. Do it after the backward, or in "
    "p.register_post_accumulate_grad_hook, which runs when the gradient has been averaged."
)


def _show(unit: Unit, entry: Entry, tensor: Tensor, unread: str, lost: str | None = None) -> None:
    with raw(), torch.no_grad():
        stand_in: Any = tensor.new_zeros(()).expand(tensor.shape).as_subclass(StandIn)
        stand_in._unread, stand_in._lost, stand_in._is_zeroed = unread, lost, False
        set_grad(tensor, stand_in)
    unit.run.stand_ins.append((entry, tensor, stand_in))


def carry_gradients(unit: Unit) -> None:
    """Give the parameters what user code did to their stand-ins, which are taken away.

    Raises:
        RuntimeError: a backward ends, and not by an error, in which a hook cleared or set one.
    """
    stand_ins, unit.run.stand_ins = unit.run.stand_ins, []
    lost: list[str] = []
    for entry, tensor, stand_in in stand_ins:
        with raw(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, for the gradient of no leaf
            found = get_grad(tensor)
            set_grad(tensor, None)
        if not stand_in._is_zeroed and found is stand_in:
            continue
        if stand_in._lost is None:
            _carry(entry, stand_in, found)
        else:
            lost.append(stand_in._lost)
    task = None if unit.run.task is None else unit.engine.tasks.get(unit.run.task.id)
    if lost and (task is None or task.alive):
        raise RuntimeError(lost[0])


def _carry(entry: Entry, stand_in: Tensor, found: Tensor | None) -> None:
    if found is None:
        replace_grad(entry.param, None)
    elif found is not stand_in:
        entry.param.grad = found
    else:
        with raw():
            own = get_grad(entry.param)
            if own is not None:
                own.zero_()
