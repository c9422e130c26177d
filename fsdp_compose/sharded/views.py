"""Views of which a slice is a slice too: runs of elements, real numbers, and other dtypes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsdp_compose.base.torch_private import call_raw
from fsdp_compose.sharded.spec import ShardSpec, refuse
from fsdp_compose.sharded.tensor import first_spec, is_sharded, tag_alias

__all__ = [
    "SHAPING",
    "contiguous",
    "find_run",
    "flat_spec",
    "pad",
    "shape_as",
    "take_run",
    "view_as_real",
    "view_runs",
]


def view_runs(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``p.flatten()``, ``p.view(heads, -1)``, ``p.chunk(3)``: each result is one run of memory.

    What they would be is asked of a tensor without memory. The results lie over ``p``'s slice.
    """
    spec = first_spec(args, kwargs)
    if not args:
        kwargs = dict(kwargs)
        args = (kwargs.pop("input" if "input" in kwargs else "tensor"),)
    tensor, *rest = args
    if not is_sharded(tensor) or any(map(is_sharded, (*rest, *kwargs.values()))):
        refuse(func, spec)
    dtypes = [value for value in (*rest, *kwargs.values()) if isinstance(value, torch.dtype)]
    if dtypes:
        return _view_bits(func, tensor, dtypes[0])
    found = _find_runs(tensor, lambda outline: func(outline, *rest, **kwargs))
    return refuse(func, spec, "the result is in another order") if found is None else found


def shape_as(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``whole.view_as(p)``, ``row.expand_as(p)``: only the shape of ``p`` is asked for."""
    tensor, other = *args, *kwargs.values()
    if tensor is other or (is_sharded(tensor) and func is Tensor.expand_as):
        refuse(func, first_spec(args, kwargs))
    return SHAPING[func](tensor, other.shape)


SHAPING: dict[Any, Callable[..., Any]] = {
    Tensor.expand_as: Tensor.expand,
    Tensor.reshape_as: Tensor.reshape,
    Tensor.view_as: Tensor.view,
}
"""Functions that take a shape from another tensor, and those that are given it."""


def take_run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``p[3]``, ``p[2:5]``, ``p[1, :4]``, ``p[...]``: elements that lie in one run of memory."""
    found = find_run(*args) if is_sharded(args[0]) else None
    return refuse(func, first_spec(args, kwargs)) if found is None else found


def find_run(tensor: Any, index: Any) -> Any:
    """This rank's part of ``tensor[index]``, over the same memory; None if it is not one run.

    Raises:
        IndexError: as a plain tensor of that shape does.
    """
    indices = index if isinstance(index, tuple) else (index,)
    if not all(map(_is_plain_index, indices)):
        return None
    return _find_runs(tensor, lambda outline: outline[index])


def _is_plain_index(index: object) -> bool:
    """Whether it is a number, a range or an ellipsis; a tensor with one number is none."""
    if isinstance(index, slice):
        return index.step in (None, 1)
    return index is Ellipsis or (isinstance(index, int) and not isinstance(index, bool))


def _find_runs(tensor: Any, call: Callable[[Tensor], Any]) -> Any:
    """What ``call`` makes of a sharded tensor, a view or several; None if one is not one run."""
    spec: ShardSpec = tensor._shard_spec
    if flat_spec(spec) is None:
        return None
    views = call(torch.empty(spec.shape, dtype=tensor.dtype, device="meta"))
    each = (views,) if isinstance(views, Tensor) else tuple(views)
    if any(view.dtype != tensor.dtype or not view.is_contiguous() for view in each):
        return None
    runs = tuple(_cut_run(tensor, spec, view) for view in each)
    return runs[0] if isinstance(views, Tensor) else runs


def _cut_run(tensor: Any, spec: ShardSpec, view: Tensor) -> Any:
    first = int(view.storage_offset()) if view.numel() else 0
    run = replace(spec, shape=view.shape, stride=view.stride(), offset=spec.offset + first)
    begin = first + run.start - spec.start if run.stop > run.start else 0
    narrow = call_raw(Tensor.narrow, (), (tensor, 0, begin, run.stop - run.start))
    return tag_alias(narrow, run, tensor)


def flat_spec(spec: ShardSpec) -> ShardSpec | None:
    """Where a slice of the flattened tensor lies; None for what is stored in another order."""
    outline = torch.empty_strided(spec.shape, spec.stride, device="meta")
    if spec.parallel is not None or not outline.is_contiguous():
        return None
    return replace(spec, shape=torch.Size((spec.numel,)), stride=(1,))


def detach_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Detach a gradient, which is a view that torch would refuse, and mostly has no graph.

    A parameter is frozen by it.
    """
    if args[0]._is_parameter:
        args[0].requires_grad = False
        return args[0]
    is_plain = not call_raw(Tensor.requires_grad.__get__, (), (args[0],))  # type: ignore[attr-defined]
    return args[0] if is_plain else call_raw(func, (), args, kwargs)


def _view_bits(func: Any, tensor: Any, dtype: torch.dtype) -> Any:
    """``p.view(torch.int32)``: the same bytes as elements of another dtype."""
    spec: ShardSpec = tensor._shard_spec
    whole = torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype, device="meta")
    whole = whole.view(dtype)
    old, new = tensor.dtype.itemsize, dtype.itemsize
    if old != new:
        if flat_spec(spec) is None:
            refuse(func, spec, "the result is in another order")
        ends = old * spec.offset, old * spec.shard_numel
        if any(end % new for end in ends):
            refuse(func, spec, f"ranks hold parts of what one element of {dtype} would be")
        offset, shard_numel = (end // new for end in ends)
        shape, stride = whole.shape, whole.stride()
        spec = replace(spec, shape=shape, stride=stride, offset=offset, shard_numel=shard_numel)
    return tag_alias(call_raw(func, (), (tensor, dtype), {}), spec, tensor)


def contiguous(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not args[0].is_contiguous(*args[1:], **kwargs):
        refuse(func, args[0]._shard_spec, "it is stored in another order")
    return args[0]


def pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Allow padding by nothing, by which libraries fit a bias to its tied weight."""
    tensor = kwargs["input"] if "input" in kwargs else args[0]
    widths = kwargs["pad"] if "pad" in kwargs else args[1]
    if any(widths) or len(widths) % 2:
        refuse(func, tensor._shard_spec)
    return tensor.clone()


def view_as_real(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """View complex elements as two real ones each: a slice of the one is a slice of the other."""
    spec = args[0]._shard_spec
    if spec.parallel is not None:
        refuse(func, spec, "it is split by tensor parallelism")
    real = replace(
        spec,
        shape=torch.Size((*spec.shape, 2)),
        stride=(*(2 * s for s in spec.stride), 1),
        offset=2 * spec.offset,
        shard_numel=2 * spec.shard_numel,
    )
    return tag_alias(call_raw(func, (), args, kwargs).view(-1), real, args[0])
