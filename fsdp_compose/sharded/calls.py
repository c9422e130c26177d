"""What a torch function does to sharded tensors: act on the slice, on the group, or raise.

Elementwise functions act on the slice when every sharded operand is cut in the same way; a plain
operand that broadcasts to the original shape is cut first. Reductions of everything are global.
Everything else raises ShardedWeightError. The tables are in ops.py and reduce.py; this file writes
``HANDLERS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from fsdp_compose.base.streams import await_copies
from fsdp_compose.base.torch_private import call_raw, raw, saved_tensor_hooks
from fsdp_compose.base.torch_stack import is_called_by, is_converted_by_module
from fsdp_compose.base.unwritten import mark_unwritten
from fsdp_compose.comm.collectives import all_reduce
from fsdp_compose.sharded import ops, views
from fsdp_compose.sharded.draws import draw_from, draw_into, draw_like
from fsdp_compose.sharded.gradients import autograd_grad, backward
from fsdp_compose.sharded.operands import (
    PLAIN_FORMATS,
    check_cut,
    compare_partners,
    cut_operand,
    cut_operands,
    refuse_target,
    show_slices,
    with_partners,
)
from fsdp_compose.sharded.reads import call_slices
from fsdp_compose.sharded.reduce import (
    HALF,
    REDUCTIONS,
    average_over_replicas,
    foreach_reduce,
    name_for_ranks,
)
from fsdp_compose.sharded.spec import Handler, ShardSpec, refuse, require_ranks
from fsdp_compose.sharded.tensor import (
    HANDLERS,
    SHARDED,
    ShardedTensor,
    first_spec,
    is_sharded,
    tag,
    tag_alias,
)
from fsdp_compose.sharded.torchstate import view_local
from fsdp_compose.sharded.writes import note_call, note_lists


def _call_shared(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function whose answer is the same for slice and whole."""
    return call_raw(func, (), args, kwargs)


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an elementwise function on the slices."""
    spec: ShardSpec | None = None
    partners: tuple[Tensor, ...] = ()
    plain: list[Tensor] = []
    remembers = False
    for value in (*args, *kwargs.values()):
        if is_sharded(value):
            if spec is None:
                spec, remembers = value._shard_spec, value._is_parameter
            elif value._shard_spec is not spec:
                check_cut(func, value._shard_spec, spec)
                partners += value._shard_spec.partners
        elif isinstance(value, Tensor):
            plain.append(value)
    if spec is None:
        refuse(func, first_spec(args, kwargs))
    given = args, kwargs
    if plain or kwargs:
        args, kwargs = cut_operands(func, args, kwargs, spec)
    if torch.is_grad_enabled() and saved_tensor_hooks() and func not in ops.IN_PLACE:
        args, kwargs = show_slices(args, kwargs)
    out = call_slices(func, args, kwargs)
    if func in ops.IN_PLACE or "out" in kwargs:
        note_call(func, *given)
    if type(out) is Tensor:
        if func in ops.ALIASING and given[0]:
            return tag_alias(out, spec, given[0][0])
        remembers = (remembers or out.requires_grad) and bool(plain or partners)
        tag(out, with_partners(func, spec, plain, partners) if remembers else spec)
    return out


def _cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Convert the slice; the result is sharded."""
    if args and not is_sharded(args[0]):
        return call_slices(func, args, kwargs)
    spec = args[0]._shard_spec
    if kwargs.get("memory_format") not in PLAIN_FORMATS:
        refuse(func, spec, "the slice has no memory format")
    _check_swap(func, spec)
    out = call_slices(func, args, kwargs)
    return tag(out, spec) if type(out) is Tensor else out


def _check_swap(func: Any, spec: ShardSpec) -> None:
    """Refuse ``module.to(...)`` where torch would exchange parameters for others."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    if (swaps or overwrites) and is_converted_by_module():
        refuse(func, spec, "torch is set to exchange it for another parameter", _NO_SWAP)


_NO_SWAP = (
    "A sharded parameter stays the object that optimizers hold, so it cannot be swapped. Convert "
    "or load the module before fully_shard, or after set_swap_module_params_on_conversion(False) "
    "and set_overwrite_module_params_on_conversion(False), both of torch.__future__."
)


def _module_load(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    refuse(func, first_spec(args, kwargs), "", _NO_SWAP)


def _empty_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As an elementwise function; mark what ``module.to_empty()`` makes as not written yet."""
    out = _elementwise(func, args, kwargs)
    if isinstance(args[0], Parameter) and is_sharded(args[0]) and is_converted_by_module():
        spec = args[0]._shard_spec
        _check_swap(func, spec)
        with raw():
            mark_unwritten(out)
        spec.residence.emptied = True
    return out


def _foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function over lists of tensors on the slices.

    Usually each list has slices of the same specs, which one comparison of lists tells: lists
    compare their items by identity, and specs have no other equality.
    """
    specs: list[ShardSpec] | None = None
    value: Any
    try:
        for value in (*args, *kwargs.values()) if kwargs else args:
            if type(value) in (list, tuple) and value and isinstance(value[0], Tensor):
                if specs is not None and all(type(t) is Tensor and not t.ndim for t in value):
                    continue  # the step counts of a fused optimizer
                found = [t._shard_spec for t in value]
                specs = specs or found
                if specs != found or not SHARDED.issuperset(map(type, value)):
                    return _foreach_mixed(func, args, kwargs)
    except AttributeError:
        return _foreach_mixed(func, args, kwargs)
    return _call_lists(func, args, kwargs, specs, (args, kwargs))


def _call_lists(
    func: Any, args: Any, kwargs: Any, specs: Sequence[ShardSpec | None] | None, given: Any
) -> Any:
    """Call a function over lists of slices, note what it wrote, and tag what it returns.

    Args:
        specs: of what it returns; None for a plain tensor.
        given: its arguments before plain tensors among them were cut.
    """
    out = call_slices(func, args, kwargs)
    if func in ops.FUSED:
        with raw():  # torch does not count what a fused kernel wrote, and kept units look at it
            increment_version(args[0] if args else kwargs["self"])
    elif func in ops.FOREACH_IN_PLACE:
        note_lists(func, *given)
    if out is not None and specs is not None:
        for result, spec in zip(out, specs, strict=True):
            if spec is not None and type(result) is Tensor:
                tag(result, spec)
    return out


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(t, Tensor) for t in value)


def _foreach_mixed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a foreach function with plain tensors among the sharded ones, or with other specs."""
    names = [*range(len(args)), *kwargs]
    values = [*args, *kwargs.values()]
    lists = {name: list(v) for name, v in zip(names, values, strict=True) if _is_list(v)}
    first = next(iter(lists))
    specs: list[ShardSpec | None] = []
    for i in range(len(lists[first])):
        spec: ShardSpec | None = None
        for items in lists.values():
            if i >= len(items) or not is_sharded(items[i]):
                continue
            other = items[i]._shard_spec
            if spec is None:
                spec = other
            elif other is not spec:
                check_cut(func, other, spec)
        specs.append(spec)
        if spec is None:
            continue
        for name, items in lists.items():
            if i >= len(items) or is_sharded(items[i]):
                continue
            if (name == first and func in ops.FOREACH_IN_PLACE) or (
                func in ops.FUSED and items[i].ndim
            ):
                refuse_target(func, items[i], spec)
            items[i] = cut_operand(func, items[i], spec)
    cut = tuple(lists.get(i, value) for i, value in enumerate(args))
    named = {k: lists.get(k, value) for k, value in kwargs.items()}
    return _call_lists(func, cut, named, specs, (args, kwargs))


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Unscale gradients; every rank of a group learns of an infinity in any rank's slice."""
    grads, found_inf = args[0], args[1]
    await_copies(found_inf)  # torch's scaler copies it to offloaded gradients, and does not wait
    out = _foreach(func, args, kwargs)
    specs = sorted((g._shard_spec for g in grads if is_sharded(g)), key=lambda s: (s.unit, s.fqn))
    for group in dict.fromkeys(group for spec in specs for group in spec.whole_groups):
        all_reduce(found_inf, group, "max")
    return out


def _reduce(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reduce all elements over the group; ``max(a, b)`` is elementwise, a dimension is refused."""
    source = next((k for k in ("input", "self", "x", "A") if k in kwargs), None)
    if source is not None:
        args = (kwargs[source], *args)
    kwargs = {k: v for k, v in kwargs.items() if k != source and v is not None}
    tensor, rest = args[0], args[1:]
    if any(isinstance(value, Tensor) for value in (*rest, *kwargs.values())):
        if func in _EXTREMES:
            return _elementwise(func, args, kwargs)
        refuse(func, first_spec(args, kwargs))
    spec = tensor._shard_spec
    require_ranks(spec, getattr(func, "__name__", "a reduction"))
    if spec.partners:
        compare_partners([spec])
    named = spec if tensor._is_parameter else replace(spec, fqn=name_for_ranks(tensor, spec))
    out = REDUCTIONS[func](view_local(tensor), named, *rest, **kwargs)
    if out is NotImplemented:
        refuse(func, spec, "along a dimension")
    return average_over_replicas([out], [spec])[0]


_EXTREMES = ops.functions("max min", torch, Tensor)


def _foreach_reduce(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = args[0] if args else kwargs["self"]
    specs = [t._shard_spec if is_sharded(t) else None for t in tensors]
    for spec in specs:
        if spec is not None:
            require_ranks(spec, func.__name__)
    compare_partners([spec for spec in specs if spec is not None and spec.partners])
    with raw():
        return foreach_reduce(func, tensors, specs, *args[1:], **kwargs)


def _loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compare two tensors element by element, then reduce over all elements of all ranks.

    Every loss here depends on the difference alone, which is taken first: torch warns where a slice
    is shorter than the shape that it reports.
    """
    given = dict(zip(("input", "target"), args, strict=False)) | kwargs
    given = {name: value for name, value in given.items() if value is not None}
    one, other, reduction = given.pop("input"), given.pop("target"), given.pop("reduction", "mean")
    known = isinstance(reduction, str) and reduction in ("none", "mean", "sum")
    known = known and isinstance(one, Tensor) and isinstance(other, Tensor)
    if not known or len(args) > 2 or not {*given} <= {"beta", "delta"}:
        refuse(func, first_spec(args, kwargs), f"with reduction={reduction!r} or other arguments")
    difference = torch.sub(one, other)
    pair = (difference, torch.zeros_like(difference))
    each = _elementwise(func, pair, {**given, "reduction": "none"})
    return each if reduction == "none" else getattr(each, reduction)()


def _activate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse ``inplace=True``, as ranks would not compare what it writes."""
    if any(value is True for value in (*args, *kwargs.values())):
        refuse(func, first_spec(args, kwargs), "with inplace=True")
    return _elementwise(func, args, kwargs)


def _where(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) + len(kwargs) < 3:
        refuse(func, first_spec(args, kwargs), "its result has no fixed shape")
    return _elementwise(func, args, kwargs)


def _set_item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``p[2:5] = x``, and ``p[mask] = number`` with a mask that is cut the same way."""
    tensor, index, value = args
    if not is_sharded(tensor):
        refuse(func, first_spec(args, kwargs))
    if is_sharded(index) and index.dtype == torch.bool:
        if isinstance(value, Tensor) and value.numel() != 1:
            refuse(func, tensor._shard_spec)
        return _elementwise(Tensor.masked_fill_, (tensor, index, value), {})
    run = views.find_run(tensor, index)
    if run is None:
        refuse(func, tensor._shard_spec)
    write = Tensor.copy_ if isinstance(value, Tensor) else Tensor.fill_
    return _elementwise(write, (run, value), {})


def _constant(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch.no_grad():
        return _elementwise(Tensor.fill_, (*args, *kwargs.values()), {})


def _dot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Half precision is multiplied in fp32, as torch does it: fp16 loses what is below 6e-8."""
    spec = first_spec(args, kwargs)
    if len(args) != 2 or kwargs or args[0].ndim != 1 or args[0].shape != args[1].shape:
        refuse(func, spec)
    one, other = args[0].conj() if func in _CONJUGATING else args[0], args[1]
    if one.dtype == other.dtype and one.dtype in HALF:
        return (one.float() * other.float()).sum().to(one.dtype)
    return (one * other).sum()


_CONJUGATING = ops.functions("vdot", torch, Tensor)


def _dist(input: Any, other: Any, p: Any = 2) -> Any:
    return torch.norm(input - other, p)


def _equal(input: Any, other: Any) -> bool:
    return bool(input.shape == other.shape and input.eq(other).all())


def _all_close(*args: Any, **kwargs: Any) -> bool:
    return bool(torch.isclose(*args, **kwargs).all())


def _same_size(input: Any, other: Any) -> bool:
    return input.shape == other.shape


def _data_ptr(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse the address, except to ``RNNBase.flatten_parameters``, which gets 0 for each weight.

    That function leaves weights alone where two share an address, so a sharded recurrent module can
    be moved to CUDA.
    """
    if is_called_by(nn.RNNBase.flatten_parameters):
        return 0
    return refuse(func, args[0]._shard_spec)


def _item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the number that a one-element tensor holds; every rank must ask for it."""
    if args[0]._shard_spec.seen.numel() != 1:
        refuse(func, args[0]._shard_spec, "it has more than one element")
    return func(args[0].full_tensor())


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``p.new_zeros(size)`` and the like: sharded if the size is p's own, else plain."""
    tensor, *rest = args
    spec = tensor._shard_spec
    if "size" in kwargs:
        size = kwargs["size"]
    else:
        size = rest[0] if rest and not isinstance(rest[0], int) else rest
    with raw():
        if tuple(size) != tuple(spec.seen):
            return func(*args, **kwargs)
        local = (spec.stop - spec.start,)
        if "size" in kwargs:
            return tag(func(tensor, *rest, **{**kwargs, "size": local}), spec)
        fill = rest[1:] if rest and not isinstance(rest[0], int) else ()
        return tag(func(tensor, local, *fill, **kwargs), spec)


def _new_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a tensor of numbers like ``p``; refuse sharded tensors among the numbers."""
    data = kwargs["data"] if "data" in kwargs else args[1]
    if is_sharded(data):
        refuse(func, data._shard_spec)
    with raw():
        return func(*args, **kwargs)


def _call_instead(call: Callable[..., Any]) -> Handler:
    """A handler that calls what takes the arguments of torch's function."""
    return lambda func, args, kwargs: call(*args, **kwargs)


def _getter(name: str) -> Handler:
    return lambda func, args, kwargs: getattr(args[0], name)


def _setter(name: str) -> Handler:
    return lambda func, args, kwargs: setattr(args[0], name, args[1])


def _handle(functions: Iterable[Callable[..., Any]], handler: Handler) -> None:
    HANDLERS.update(dict.fromkeys(functions, handler))


_handle(ops.SHARED, _call_shared)
_handle([Tensor.backward], backward)
_handle(ops.ELEMENTWISE, _elementwise)
_handle(ops.CASTS, _cast)
_handle([torch.empty_like], _empty_like)
_handle(ops.DRAWING | ops.INITIAL, draw_into)
_handle(ops.DRAWING_LIKE, draw_like)
_handle(ops.functions("bernoulli", torch, Tensor), draw_from)
_handle([torch.Tensor.module_load], _module_load)
_handle(ops.FOREACH, _foreach)
_handle(ops.functions("_amp_foreach_non_finite_check_and_unscale_", torch), _unscale)
_handle(ops.functions("_foreach_max _foreach_norm", torch), _foreach_reduce)
_handle(REDUCTIONS, _reduce)
_handle(ops.ACTIVATIONS, _activate)
_handle(ops.LOSSES, _loss)
_handle(ops.functions("where", torch, Tensor), _where)
_handle(ops.functions("__setitem__", Tensor), _set_item)
_handle(ops.functions("dot inner vdot", torch, Tensor), _dot)
_handle(ops.functions("dist", torch, Tensor), _call_instead(_dist))
_handle(ops.functions("equal", torch, Tensor), _call_instead(_equal))
_handle(ops.functions("allclose", torch, Tensor), _call_instead(_all_close))
_handle(ops.functions("is_same_size", torch, Tensor), _call_instead(_same_size))
_handle(
    ops.functions("__bool__ __complex__ __float__ __index__ __int__ is_nonzero item", Tensor), _item
)
_handle(ops.functions("is_nonzero", torch), _item)
_handle(ops.functions("new_empty new_full new_ones new_zeros", Tensor), _new)
_handle(ops.functions("new_tensor", Tensor), _new_tensor)
_handle(ops.functions("contiguous", Tensor), views.contiguous)
_handle(ops.functions("data_ptr", Tensor), _data_ptr)
_handle([torch.nn.functional.pad], views.pad)
_handle(ops.VIEWS, views.view_runs)
_handle(views.SHAPING, views.shape_as)
_handle(ops.functions("detach_", torch, Tensor), views.detach_in_place)
_handle(ops.functions("__getitem__", Tensor), views.take_run)
_handle(ops.functions("view_as_real", torch), views.view_as_real)
_handle([torch.nn.init.constant_], _constant)
_handle(ops.functions("dense_dim", Tensor), _call_instead(ShardedTensor.dim))
for _name in (
    "__format__ __len__ __reduce_ex__ __repr__ dim is_contiguous ndimension nelement numel "
    "register_hook register_post_accumulate_grad_hook requires_grad_ size stride"
).split():
    _handle(ops.functions(_name, torch, Tensor), _call_instead(getattr(ShardedTensor, _name)))
for _name in "data grad nbytes ndim shape".split():
    _handle(ops.getters(_name), _getter(_name))
for _name in "data grad requires_grad".split():
    _handle(ops.setters(_name), _setter(_name))

ON_SLICES: dict[Callable[..., Any], Handler] = {
    torch.autograd.grad: autograd_grad,
    torch.autograd.backward: backward,
    torch._foreach_norm: _foreach_reduce,
    torch._foreach_mul_: _foreach,
    torch.linalg.vector_norm: _reduce,
    **dict.fromkeys(ops.setters("grad_dtype"), _call_shared),
}
"""What is done to slices for functions that their unit may answer instead."""


def _ask_unit(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let the unit answer, or act on the slices."""
    answer = first_spec(args, kwargs).answers.get(func, ON_SLICES[func])
    return answer(func, args, kwargs)


_handle(ON_SLICES, _ask_unit)
