"""``torch.autograd.grad`` and ``backward`` of sharded tensors.

What is differentiated are slices. So a whole gradient that the caller gives is cut as the tensor is
that it belongs to: autograd would sum what it takes for a broadcast.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fsdp_compose.base.torch_private import beneath_transforms, call_raw, raw
from fsdp_compose.sharded.cut import own_slice
from fsdp_compose.sharded.operands import check_cut, check_differentiable
from fsdp_compose.sharded.spec import ShardedWeightError, refuse
from fsdp_compose.sharded.tensor import first_spec, is_sharded, tag

__all__ = ["autograd_grad", "backward"]


def autograd_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.grad(outputs, inputs, ...)``."""
    if kwargs.get("is_grads_batched") or _is_batched(kwargs.get("grad_outputs")):
        spec = first_spec(args, kwargs)
        raise ShardedWeightError(
            "torch.autograd.grad(is_grads_batched=True), or inside torch.vmap, of sharded "
            f"{spec.fqn!r} (unit {spec.unit!r}): a batch of gradients cannot be reduced over the "
            "ranks as one. Call torch.autograd.grad once for each of grad_outputs, with "
            "retain_graph=True. Only gradients of inputs can be batched."
        )
    outputs, inputs = args
    given = _cut_gradients(func, outputs, kwargs.get("grad_outputs"))
    kwargs = {**kwargs, "grad_outputs": given}
    if (edges := _find_edges(outputs, inputs)) is None:
        grads = call_raw(func, (), args, kwargs)
    else:
        grads = func(outputs, edges, **kwargs)
    for grad, source in zip(grads, inputs, strict=True):
        if type(grad) is Tensor and is_sharded(source):
            tag(grad, source._shard_spec)
    return grads


def backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``tensor.backward(gradient)``, and ``torch.autograd.backward(tensors, grad_tensors)``."""
    name = "gradient" if func is Tensor.backward else "grad_tensors"
    outputs = args if func is Tensor.backward else args[0]
    kwargs = {**kwargs, name: _cut_gradients(func, outputs, kwargs.get(name))}
    if (edges := _find_edges(outputs, kwargs.get("inputs") or ())) is None:
        return call_raw(func, (), args, kwargs)
    return func(*args, **{**kwargs, "inputs": edges})


def _find_edges(outputs: Iterable[Any], inputs: Iterable[Any]) -> tuple[Any, ...] | None:
    """The inputs, of which what is sharded is named by its node; None where that does not do.

    Autograd calls all that it runs in the state that it is called in. In a raw scope a backward of
    the user's own, or a forward that is computed again, would take slices for whole parameters.
    """
    sharded = list(filter(is_sharded, inputs))
    with raw():
        if any(map(is_sharded, outputs)) or not all(t.is_leaf and t.requires_grad for t in sharded):
            return None
        with torch.enable_grad():
            return tuple([get_gradient_edge(t) if is_sharded(t) else t for t in inputs])


def _is_batched(given: Any) -> bool:
    """Whether ``torch.vmap`` wrapped a gradient that the caller gave."""
    grads = [given] if isinstance(given, Tensor) else given or ()
    return any(isinstance(g, Tensor) and beneath_transforms(g) is not g for g in grads)


def _cut_gradients(func: Any, outputs: Iterable[Any], given: Any) -> Any:
    """The gradients of outputs that a caller gave; those of sharded ones are slices as these."""
    if given is None:
        return None
    grads = [given] if isinstance(given, Tensor) else list(given)
    for index, (output, grad) in enumerate(zip(outputs, grads, strict=False)):  # torch compares
        if is_sharded(grad) and not is_sharded(output):
            refuse(func, grad._shard_spec, "what it is the gradient of is not sharded")
        if not is_sharded(output) or not isinstance(grad, Tensor) or grad.shape != output.shape:
            continue
        spec = output._shard_spec
        if is_sharded(grad):
            check_cut(func, grad._shard_spec, spec)
        else:
            check_differentiable(func, grad, spec)
            grads[index] = tag(own_slice(grad, spec), spec)
    return grads
