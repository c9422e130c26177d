"""Parameters that answer for their slice also where torch asks no ``__torch_function__``.

``torch.tensor(p)``, ``torch.as_tensor(p, dtype=...)``, ``torch.vmap`` over ``p``, collectives of
``torch.distributed`` and operators of other packages go straight to the dispatcher. That asks
``__torch_dispatch__``, of tensors that torch made with a class that has one. So such a tensor takes
the place of what a parameter holds, and the object stays the same. Gradients, optimizer state and
what is computed from them are not asked: autograd holds those, so nothing can take their places.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from fsdp_compose.base.exchange import swap_contents
from fsdp_compose.base.torch_private import (
    beneath_transforms,
    call_raw,
    disabled_torch_dispatch,
    graph_task_id,
    is_torch_function_enabled,
    make_subclass,
    outside_transforms,
    raw,
    tensor_use_count,
)
from fsdp_compose.base.torch_stack import (
    asks_dtensors,
    below_dispatch,
    count_modes,
    is_dispatched,
    records_below_transforms,
    refuse_fakes,
)
from fsdp_compose.sharded.advice import KEPT_SLICE, READ
from fsdp_compose.sharded.spec import Handler, ShardSpec, refuse

_Base: Any = object
_ALIAS = torch.ops.aten.alias.default


class Dispatched(_Base):
    """Mixin of the sharded parameters."""

    __slots__ = ()
    _shard_spec: ShardSpec

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Act on slices in a ``raw`` scope and in a backward; else nobody asked the parameter."""
        if is_torch_function_enabled() and graph_task_id() == -1:
            _refuse_read(func, [*args, *(kwargs or {}).values()])
        with raw():
            return disabled_torch_dispatch(func, types, args, kwargs or {})


def _refuse_read(func: Any, pending: list[Any]) -> None:
    while not isinstance(pending[0], Dispatched):
        value = pending.pop(0)
        pending += value if isinstance(value, list | tuple) else ()
    if not isinstance(pending[0], _Left):  # of which only torch's own graphs know
        # Torch makes the node of p.to_local() anew, by this operator, once p was written.
        refuse(func, pending[0]._shard_spec, "", KEPT_SLICE + READ if func is _ALIAS else READ)


def call_slices(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function on the slices; faster than by ``__torch_dispatch__`` where no mode looks."""
    if count_modes():
        refuse_fakes(f"call {func.__name__} of a sharded tensor")
        found = call_raw(func, (), args, kwargs)
        if (name := func.__name__).startswith("_foreach_") and name.endswith("_"):
            increment_version(args[0] if args else kwargs["self"])  # torch counts none in a mode
        return found
    with below_dispatch():
        return call_raw(func, (), args, kwargs)


def call_beneath(handler: Handler, func: Any, args: Any, kwargs: Any) -> Any:
    """Act on slices below the transforms of ``torch.func``, unless these wrapped an argument.

    To a transform a slice is a constant. The graph that leads to the parameter lies below it, and
    what a transform returns for a slice does not show that it has one.
    """
    values = [*args, *kwargs.values()]
    for value in values:
        if isinstance(value, list | tuple):
            values += value
        elif isinstance(value, Tensor) and beneath_transforms(value) is not value:
            return handler(func, args, kwargs)
    with torch.set_grad_enabled(records_below_transforms()), outside_transforms():
        return handler(func, args, kwargs)


def watch_reads(param: Any, cls: type) -> None:
    """Let the dispatcher ask ``cls`` from now on, which the parameter is about to get.

    A parameter that a graph or a view was made from is left as it is: those keep what it holds.
    So is a DTensor of a torch that does not ask its class.
    """
    with raw():
        if tensor_use_count(param) == 1 and (asks_dtensors() or not issubclass(cls, DTensor)):
            _exchange(param, make_subclass(cls, param.detach(), param.requires_grad))


def ignore_reads(param: Any) -> None:
    """Undo ``watch_reads``, before the parameter gets a plain class again.

    A graph that was computed from the parameter reaches it no more, so the graph's backward raises.
    """
    with raw():
        if not is_dispatched(param):
            return
        is_used, name = tensor_use_count(param) > 1, param._shard_spec.fqn
        other: Any = nn.Parameter(param.detach(), param.requires_grad)
        _exchange(param, other)
        if is_used:
            other.register_hook(partial(_refuse_backward, name))
            other.__class__ = _Left


class _Left(Dispatched, nn.Parameter):  # type: ignore[misc]
    """What a sharded parameter held, and a graph still does."""


def _refuse_backward(name: str, grad: Tensor) -> NoReturn:
    raise RuntimeError(
        f"backward of a graph that was computed from the sharded parameter {name!r}, which became "
        "plain since (undo, refresh): call backward before that, or compute the loss again."
    )


def _exchange(param: Any, other: Tensor) -> None:
    """Let a leaf hold what ``other`` does; its gradient and hooks were taken from it before."""
    grad_dtype = param.grad_dtype
    swap_contents(param, other)
    if param.grad_dtype != grad_dtype:
        param.grad_dtype = grad_dtype
