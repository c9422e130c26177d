"""Reductions of everything in a tensor, from the slices that the ranks of a group hold.

Each takes a plain local slice (possibly empty) and its spec, and returns what torch returns for the
whole, the same on every rank. It does one collective over one number per rank (``var`` does two).
Where autograd records, the gradient is averaged over the group, as data-parallel gradients are, and
``average_over_replicas`` averages it over the other ranks that hold the same slice. A reduction
along a dimension returns ``NotImplemented``.

Half precision is accumulated in fp32 and rounded once, as torch does on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fsdp_compose.base.group import Group
from fsdp_compose.base.torch_private import saved_tensor_hooks
from fsdp_compose.base.torch_stack import clipping_under_way, tensors_of_total_norm
from fsdp_compose.comm.small_reduce import compares, reduce_alike, reduce_extreme
from fsdp_compose.sharded.ops import functions
from fsdp_compose.sharded.ranks import GatherRanks, average, count_ties, find_extreme
from fsdp_compose.sharded.spec import ShardedWeightError, ShardSpec

__all__ = ["HALF", "REDUCTIONS", "average_over_replicas", "foreach_reduce", "name_for_ranks"]

Reduction = Callable[..., Any]
dtype_of: Callable[[Tensor], torch.dtype] = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
HALF = (torch.float16, torch.bfloat16)


class _AverageReplicas(torch.autograd.Function):
    """Return what it is given; backward averages over the replicas, so that they stay alike."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Average.apply(grad, ctx.group), None


class _Average(torch.autograd.Function):
    """The average over a group, as is its gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return average(values, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Average.apply(grad, ctx.group), None


def average_over_replicas(
    values: Sequence[Tensor], specs: Sequence[ShardSpec | None]
) -> list[Tensor]:
    """The same reduced values, whose gradients are averaged over replicas: one collective each.

    They go by their parameters' names, as each rank may have listed them in another order.
    """
    out = list(values)
    named: list[tuple[str, str, int, ShardSpec]] = []
    for i, (value, spec) in enumerate(zip(out, specs, strict=True)):
        if spec is not None and spec.replicas.size > 1 and _is_recorded(value):
            named.append((spec.unit, spec.fqn, i, spec))
    alike: dict[tuple[Group, torch.dtype], list[int]] = {}
    for _, _, i, spec in sorted(named, key=itemgetter(0, 1, 2)):
        alike.setdefault((spec.replicas, out[i].dtype), []).append(i)
    for (replicas, _), members in alike.items():
        vector = torch.stack([out[i] for i in members])
        for i, value in zip(members, _AverageReplicas.apply(vector, replicas), strict=True):
            out[i] = value
    return out


def _across(partial: Tensor, op: str, spec: ShardSpec, what: str = "") -> Tensor:
    """Combine one number (or vector) per rank; ``what`` names the numbers, by default ``op``."""
    purpose = f"take the {what or op} of {spec.fqn!r}"
    for group in spec.groups:
        partial = _over(partial, op, group, purpose)
    return partial


def _over(partial: Tensor, op: str, group: Group, purpose: str) -> Tensor:
    """Combine one number (or vector) per rank of one group."""
    if group.size == 1:
        return partial
    if op == "sum" and not _is_recorded(partial):
        return reduce_alike(partial.detach(), group, "sum", purpose)
    shape, vector = partial.shape, partial.reshape(-1)
    if vector.dtype == torch.bool:
        vector = vector.to(torch.uint8)
    if op in ("max", "min") and compares(vector, group):  # none is recorded
        return _extreme_over(vector, op, group, purpose).to(partial.dtype).reshape(shape)
    ranks = GatherRanks.apply(vector, group, purpose)
    # For max and min too, because a collective's own maximum may lose a NaN.
    combine: dict[str, Callable[..., Tensor]] = {
        "sum": torch.sum,
        "max": torch.amax,
        "min": torch.amin,
        "prod": torch.prod,
    }
    return combine[op](ranks, 0).to(partial.dtype).reshape(shape)


def _is_recorded(tensor: Tensor) -> bool:
    """Whether autograd records what is done with the tensor."""
    return tensor.requires_grad and torch.is_grad_enabled()


def _extreme_over(vector: Tensor, op: str, group: Group, purpose: str) -> Tensor:
    """Take the largest or smallest over the ranks; NaN where one is."""
    if vector.is_floating_point():
        return reduce_extreme(vector, group, op, purpose)
    if op == "min":
        return ~reduce_alike(~vector, group, "max", purpose)
    return reduce_alike(vector, group, "max", purpose)


def _wide(local: Tensor) -> Tensor:
    """``local`` in the dtype that it is accumulated in."""
    return local.float() if local.dtype in HALF else local


def _plain(dim: Any, keepdim: bool) -> bool:
    """Whether a reduction is over all elements."""
    return dim in (None, (), []) and not keepdim


def _over_all(reduce: Callable[[Tensor, ShardSpec], Tensor]) -> Reduction:
    """Let ``reduce`` run on all elements in the dtype asked for; refuse a dimension."""

    def over_all(
        local: Tensor,
        spec: ShardSpec,
        dim: Any = None,
        keepdim: bool = False,
        *,
        axis: Any = None,
        dtype: Any = None,
    ) -> Any:
        if not _plain(dim, keepdim) or axis is not None:
            return NotImplemented
        if dtype is None:
            return reduce(local, spec)
        return reduce(local.to(dtype), spec).to(dtype)  # integers are added up as int64

    return over_all


@_over_all
def _sum(local: Tensor, spec: ShardSpec) -> Tensor:
    total = _across(_wide(local).sum(), "sum", spec)
    return total.to(local.dtype) if local.dtype in HALF else total


def _nansum(local: Tensor, spec: ShardSpec, *args: Any, **kwargs: Any) -> Any:
    return _sum(torch.where(local.isnan(), torch.zeros_like(local), local), spec, *args, **kwargs)


@_over_all
def _mean(local: Tensor, spec: ShardSpec) -> Tensor:
    if not (local.is_floating_point() or local.is_complex()):
        return local.mean()  # torch's own error
    return (_across(_wide(local).sum(), "sum", spec) / spec.seen.numel()).to(local.dtype)


@_over_all
def _prod(local: Tensor, spec: ShardSpec) -> Tensor:
    total = _across(_wide(local).prod(), "prod", spec)
    # Autocast on a CPU has it stay float32.
    return total.to(local.detach()[:0].prod().dtype) if local.dtype in HALF else total


def _extreme(op: str, reduce: Callable[[Tensor], Tensor]) -> Reduction:
    """A largest or smallest element."""

    def extreme(local: Tensor, spec: ShardSpec, dim: Any = None, keepdim: bool = False) -> Any:
        if not _plain(dim, keepdim):
            return NotImplemented
        if spec.seen.numel() == 0:
            return reduce(local)  # torch's own error
        value = reduce(local) if local.numel() else _limit(local, op)
        what = f"take the {op} of {spec.fqn!r}"
        return _combine_extremes(value, [local], op, spec.groups, what)

    return extreme


def _combine_extremes(
    values: Tensor, slices: Iterable[Tensor], op: str, groups: tuple[Group, ...], what: str
) -> Tensor:
    """Combine the largest or smallest elements of slices; ``values`` is () or has one for each."""
    if not _is_recorded(values):
        for group in groups:
            values = _over(values, op, group, what)
        return values
    each = zip(slices, values.reshape(-1).unbind(), strict=True)
    counts = torch.stack([count_ties(local, value) for local, value in each])
    return find_extreme(values, counts, op, groups, what)


def _limit(local: Tensor, op: str) -> Tensor:
    """Return what changes no result: the least value for a maximum, the greatest for a minimum."""
    if local.dtype == torch.bool:
        value: float = op == "min"
    elif local.is_floating_point():
        value = -math.inf if op == "max" else math.inf
    else:
        info = torch.iinfo(local.dtype)
        value = info.min if op == "max" else info.max
    limit = local.new_full((), value)
    return limit + local.sum() if local.requires_grad else limit  # in the graph on every rank


def _every(op: str, reduce: Callable[[Tensor], Tensor]) -> Reduction:
    """``all`` or ``any``, as a smallest or largest element."""

    def every(local: Tensor, spec: ShardSpec, dim: Any = None, keepdim: bool = False) -> Any:
        if dim is not None or keepdim:  # of no dimensions they are elementwise
            return NotImplemented
        return _across(reduce(local), op, spec)

    return every


def _count_nonzero(local: Tensor, spec: ShardSpec, dim: Any = None) -> Any:
    if not _plain(dim, False):
        return NotImplemented
    return _across(local.count_nonzero(), "sum", spec, "number of nonzero elements")


def _var(
    local: Tensor,
    spec: ShardSpec,
    dim: Any = None,
    unbiased: Any = None,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> Any:
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if not _plain(dim, keepdim):
        return NotImplemented
    if not (local.is_floating_point() or local.is_complex()):
        return local.var()  # torch's own error
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    wide = _wide(local)
    mean = _across(wide.sum(), "sum", spec) / spec.seen.numel()
    away = wide - mean
    squares = _across((away * away.conj()).real.sum(), "sum", spec, "variance")
    return (squares / max(0, spec.seen.numel() - correction)).to(_real(local.dtype))


def _std(local: Tensor, spec: ShardSpec, *args: Any, **kwargs: Any) -> Any:
    out = _var(_wide(local), spec, *args, **kwargs)
    if out is NotImplemented:
        return out
    # The gradient of a deviation of 0 is 0, not the root's of 0, which is infinite.
    root = torch.where(out == 0, out, torch.where(out == 0, 1.0, out).sqrt())
    return root.to(_real(local.dtype))


def _real(dtype: torch.dtype) -> torch.dtype:
    """The dtype of absolute values."""
    return dtype.to_real() if dtype.is_complex else dtype


def _vector_norm(
    local: Tensor,
    spec: ShardSpec,
    ord: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Any:
    if not _plain(dim, keepdim):
        return NotImplemented
    order = float(ord)
    _check_total([spec])
    accumulate = dtype or (torch.float32 if local.dtype in HALF else None)
    value = _local_norm(local, order, accumulate)
    what = f"take the norm of order {order:g}{clipping_under_way()} of {spec.fqn!r}"
    return _combine_norms(value, [local], order, spec.groups, what).to(_real(dtype or local.dtype))


def _local_norm(local: Tensor, order: float, dtype: Any) -> Tensor:
    """The norm of a slice; of an empty one, what changes no result, with torch's own errors."""
    if local.numel() == 0 and (order < 0 or order == math.inf):
        local = torch.nn.functional.pad(local, (0, 1), value=0.0 if order > 0 else math.inf)
    return torch.linalg.vector_norm(local, order, dtype=dtype)


def _combine_norms(
    norms: Tensor, slices: Sequence[Tensor], order: float, groups: tuple[Group, ...], what: str
) -> Tensor:
    """Combine the norms of slices into the norm of the whole."""
    if abs(order) == math.inf:
        sizes = (local.detach().abs() for local in slices)
        return _combine_extremes(norms, sizes, "max" if order > 0 else "min", groups, what)
    if order > 1 and _is_recorded(norms) and any(group.size > 1 for group in groups):
        # From powers, as a norm has no second derivative where a rank has nothing but zeros.
        powers = torch.stack([_sum_powers(local, order, norms.dtype) for local in slices])
        for group in groups:
            powers = _over(powers, "sum", group, what)
        root = torch.where(powers == 0, 1.0, powers).pow(1 / order)
        return torch.where(powers == 0, powers, root).reshape(norms.shape)
    for group in groups:
        if group.size > 1:
            norms = _norms_over(norms, order, group, what)
    return norms


def _sum_powers(local: Tensor, order: float, dtype: torch.dtype) -> Tensor:
    local = local.to(dtype.to_complex() if local.is_complex() else dtype)
    powers = (local * local.conj()).real if order == 2 else local.abs().pow(order)
    return powers.sum()


def _norms_over(norms: Tensor, order: float, group: Group, what: str) -> Tensor:
    """Combine norms over one group."""
    if order in (0.0, 1.0):
        return _over(norms, "sum", group, what)
    if order == 2.0:
        return _over(norms.double().square(), "sum", group, what).sqrt()
    ranks = GatherRanks.apply(norms.reshape(-1), group, what)
    return torch.linalg.vector_norm(ranks, order, dim=0).reshape(norms.shape)


def _norm(
    local: Tensor,
    spec: ShardSpec,
    p: Any = "fro",
    dim: Any = None,
    keepdim: bool = False,
    dtype: Any = None,
) -> Any:
    if p is None or p == "fro":
        p = 2
    if isinstance(p, str):
        return NotImplemented
    return _vector_norm(local, spec, p, dim, keepdim, dtype=dtype)


def _linalg_norm(
    local: Tensor,
    spec: ShardSpec,
    ord: Any = None,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Any:
    if ord is not None and len(spec.shape) != 1:
        if ord != "fro" or len(spec.shape) != 2:
            return NotImplemented
        ord = None
    if isinstance(ord, str):
        return NotImplemented
    return _vector_norm(local, spec, 2 if ord is None else ord, dim, keepdim, dtype=dtype)


def name_for_ranks(tensor: Any, spec: ShardSpec) -> str:
    """The name that ranks compare: the parameter's, marked for a gradient or state of it."""
    return spec.fqn if tensor._is_parameter else f"{spec.fqn} (gradient or state)"


def _is_of_fewer(spec: ShardSpec) -> bool:
    """Whether other ranks may hold another parameter in its place, such as another expert."""
    return spec.residence.is_of_fewer and spec.parallel is None


def _check_total(specs: Iterable[ShardSpec | None]) -> None:
    """Raise where torch sums norms of what this rank has, though other ranks have other parts.

    They have where parameters were declared as parts, and where some lie on fewer ranks than
    others, as experts do. Each rank would clip by a norm of its own.
    """
    own = [s for s in specs if s is not None and (s.residence.is_of_fewer or s.parallel)]
    own = [spec for spec in own if _is_of_fewer(spec) or spec.is_declared_part]
    listed = tensors_of_total_norm() if own else None
    if listed is None:
        return
    has_shared = not all(_is_of_fewer(getattr(t, "_shard_spec", own[0])) for t in listed)
    for spec in own:
        if spec.is_declared_part or has_shared:
            raise ShardedWeightError(
                f"torch's total norm over the gradient of {spec.fqn!r} (unit {spec.unit!r}), of "
                "which other ranks hold other parts, or other experts in its place: each rank "
                "would get a norm of its own. Call fsdp_compose.clip_grad_norm_(module, max_norm) "
                "or fsdp_compose.grad_norm, with expert_mesh=mesh['ep'] for experts that are "
                "neither DTensors nor declared."
            )


def foreach_reduce(
    func: Callable[..., Any],
    tensors: Sequence[Tensor],
    specs: Sequence[ShardSpec | None],
    ord: Any = 2,
    dtype: Any = None,
) -> list[Tensor]:
    """``torch._foreach_norm`` and ``_foreach_max``: one collective per group for the whole list.

    Call it in a ``raw`` scope; unlike the rest of this file it takes sharded tensors.
    """
    is_norm = func is torch._foreach_norm
    order = float(ord)
    if is_norm:
        _check_total(specs)
    kinds = [dtype_of(t) for t in tensors]
    half = dtype is None and all(kind in HALF for kind in kinds)
    options = {"ord": order, "dtype": torch.float32 if half else dtype} if is_norm else {}
    held = [
        t.numel() if s is None else s.stop - s.start for t, s in zip(tensors, specs, strict=True)
    ]
    shown = tensors
    if torch.is_grad_enabled() and saved_tensor_hooks() is not None:  # which read shapes
        shown = [t.as_subclass(Tensor) for t in tensors]
    full = [t for t, n in zip(shown, held, strict=True) if n]
    values = iter(func(full, **options) if full else ())

    def empty(t: Tensor) -> Tensor:
        local = t.as_subclass(Tensor)
        return _local_norm(local, order, options["dtype"]) if is_norm else _limit(local, "max")

    out = [next(values) if n else empty(t) for t, n in zip(shown, held, strict=True)]
    by_group: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    for i, spec in enumerate(specs):
        if spec is not None and (spec.group.size > 1 or spec.reads_whole):
            named = name_for_ranks(tensors[i], spec), i
            by_group.setdefault(tuple(map(id, spec.groups)), []).append(named)
    for found in sorted(map(sorted, by_group.values())):  # alike, however each rank orders its list
        members = [i for _, i in found]
        first = specs[members[0]]
        assert first is not None
        vector = torch.stack([out[i] for i in members])
        names = ", ".join([name for name, _ in found])
        if is_norm:
            what = f"take the norms of order {order:g}{clipping_under_way()} of {names}"
            slices = [shown[i] for i in members]
            total = _combine_norms(vector, slices, order, first.groups, what)
        else:
            what = f"take the largest elements of {names}, first of {first.fqn!r}"
            slices = [shown[i] for i in members]
            total = _combine_extremes(vector, slices, "max", first.groups, what)
        for i, value in zip(members, total.unbind(), strict=True):
            out[i] = value
    wanted = [dtype or kind for kind in kinds] if half or by_group or dtype else ()
    for i, kind in enumerate(wanted):
        out[i] = out[i].to(_real(kind))
    return average_over_replicas(out, specs)


_TABLE: tuple[tuple[str, Reduction], ...] = (
    ("sum", _sum),
    ("nansum", _nansum),
    ("mean", _mean),
    ("prod", _prod),
    ("amax", _extreme("max", torch.amax)),
    ("amin", _extreme("min", torch.amin)),
    ("max", _extreme("max", torch.max)),
    ("min", _extreme("min", torch.min)),
    ("all", _every("min", torch.all)),
    ("any", _every("max", torch.any)),
    ("count_nonzero", _count_nonzero),
    ("var", _var),
    ("std", _std),
    ("norm", _norm),
)
REDUCTIONS: dict[Callable[..., Any], Reduction] = {
    **{f: reduction for name, reduction in _TABLE for f in functions(name, torch, torch.Tensor)},
    torch.linalg.vector_norm: _vector_norm,
    torch.linalg.norm: _linalg_norm,
}
"""torch's function -> ``(local, spec, *its other arguments)``."""
