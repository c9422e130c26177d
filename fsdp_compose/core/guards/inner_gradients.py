"""What a forward clears or sets in ``.grad`` behind a backward inside it reaches the parameters.

While a unit's forward runs its modules read gathered tensors, whose ``.grad`` is not that of the
parameters. Where a backward inside the forward brought gradients, each tensor gets a stand-in for
its own. One that is gone, or another, when the forward ends was cleared or replaced by the forward,
and so then is the parameter's gradient. To read a stand-in is an error.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from fsdp_compose.base.attributes import ABOUT_SHAPES, get_grad, set_grad
from fsdp_compose.base.torch_private import call_raw, raw
from fsdp_compose.core.state import Unit
from fsdp_compose.sharded import replace_grad


class StandIn(Tensor):
    """Has the shape of a gradient, and none of its numbers."""

    _unread: str
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
        with raw(), torch.no_grad():
            if get_grad(entry.param) is None or type(tensor) is not Tensor:
                continue
            stand_in: Any = tensor.new_zeros(()).expand(tensor.shape).as_subclass(StandIn)
            stand_in._is_zeroed = False
            stand_in._unread = (
                f"the gradient of parameter {entry.spec.fqn!r} was read inside the forward of unit "
                f"{unit.name!r}, where the parameter is gathered and its gradient is not; it may "
                "be cleared or set there. Read it after the forward, use torch.autograd.grad, or "
                "make what runs the backward a module around the unit."
            )
            set_grad(tensor, stand_in)
        unit.run.stand_ins.append((entry, tensor, stand_in))


def carry_gradients(unit: Unit) -> None:
    """Give the parameters what the forward did to their stand-ins, which are taken away."""
    for entry, tensor, stand_in in unit.run.stand_ins:
        with raw(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, for the gradient of no leaf
            found = get_grad(tensor)
            set_grad(tensor, None)
            own = get_grad(entry.param)
            if found is None:
                replace_grad(entry.param, None)
            elif stand_in._is_zeroed and found is stand_in and own is not None:
                own.zero_()
        if found is not None and found is not stand_in:
            entry.param.grad = found
    unit.run.stand_ins.clear()
