"""Views of which a slice is a slice too: flattened, as real numbers, or one run of elements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsdp_compose.base.torch_private import call_raw
from fsdp_compose.sharded.spec import ShardSpec, refuse
from fsdp_compose.sharded.tensor import first_spec, is_sharded, tag

__all__ = ["find_run", "flat_spec", "flatten", "take_run", "view_as_real"]


def flatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``p.flatten()``, ``p.ravel()``, ``p.view(-1)``: one dimension, over the same memory.

    What is stored in another order than its elements are counted in has no such view.
    """
    spec = first_spec(args, kwargs)
    if not args:
        args, kwargs = (kwargs["input"],), {k: v for k, v in kwargs.items() if k != "input"}
    tensor, *rest = args
    if not is_sharded(tensor) or not _asks_for_one_dimension(func.__name__, rest, kwargs, spec):
        refuse(func, spec)
    flat = flat_spec(spec)
    if flat is None:
        refuse(func, spec, "it is stored in another order")
    return tag(call_raw(Tensor.view, (), (tensor, -1)), flat)


def flat_spec(spec: ShardSpec) -> ShardSpec | None:
    """Where a slice of the flattened tensor lies; None for what is stored in another order."""
    outline = torch.empty_strided(spec.shape, spec.stride, device="meta")
    if spec.parallel is not None or not outline.is_contiguous():
        return None
    return replace(spec, shape=torch.Size((spec.numel,)), stride=(1,))


def _asks_for_one_dimension(name: str, rest: list[Any], kwargs: Any, spec: ShardSpec) -> bool:
    if name in ("flatten", "ravel"):
        given = dict(zip(("start_dim", "end_dim"), rest, strict=False)) | kwargs
        first, last = given.pop("start_dim", 0), given.pop("end_dim", -1)
        return not given and first == 0 and last in (-1, max(len(spec.shape) - 1, 0))
    size = kwargs.get("shape", kwargs.get("size", rest[0] if len(rest) == 1 else rest))
    wanted = [size] if isinstance(size, int) else size
    return isinstance(wanted, list | tuple) and [*wanted] in ([-1], [spec.numel])


def take_run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``p[3]``, ``p[2:5]``, ``p[1, :4]``, ``p[...]``: elements that lie in one run of memory."""
    tensor, index = args
    taken = find_run(tensor, index) if is_sharded(tensor) else None
    return refuse(func, first_spec(args, kwargs)) if taken is None else taken


def find_run(tensor: Any, index: Any) -> Any:
    """This rank's part of ``tensor[index]``, over the same memory; None if it is not one run.

    Raises:
        IndexError: as a plain tensor of that shape does.
    """
    spec: ShardSpec = tensor._shard_spec
    indices = index if isinstance(index, tuple) else (index,)
    flat = flat_spec(spec)
    if flat is None or not all(map(_is_plain_index, indices)):
        return None
    view = torch.empty(spec.shape, device="meta")[index]
    if not view.is_contiguous():
        return None
    first = int(view.storage_offset()) if view.numel() else 0
    run = replace(spec, shape=view.shape, stride=view.stride(), offset=spec.offset + first)
    begin = first + run.start - spec.start if run.stop > run.start else 0
    return tag(call_raw(Tensor.narrow, (), (tensor, 0, begin, run.stop - run.start)), run)


def _is_plain_index(index: object) -> bool:
    """Whether it is a number, a range or an ellipsis; a tensor with one number is none."""
    if isinstance(index, slice):
        return index.step in (None, 1)
    return index is Ellipsis or (isinstance(index, int) and not isinstance(index, bool))


def view_as_real(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """View complex elements as two real ones each: a slice of the one is a slice of the other."""
    spec = args[0]._shard_spec
    if spec.parallel is not None:
        refuse(func, spec, "it is split by tensor parallelism")
    real = ShardSpec(
        spec.fqn,
        spec.unit,
        torch.Size((*spec.shape, 2)),
        (*(2 * s for s in spec.stride), 1),
        2 * spec.offset,
        2 * spec.shard_numel,
        spec.group,
        spec.residence,
        replicas=spec.replicas,
        answers=spec.answers,
    )
    return tag(call_raw(func, (), args, kwargs).view(-1), real)
