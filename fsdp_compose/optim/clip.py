"""Norms and clipping of sharded gradients.

A norm is taken over the gradients' own slices, or over the buffers they lie in, with one foreach
call per dtype, then combined with one all-reduce of a few numbers per shard group. The host never
waits for a device, unless it is asked to raise for what is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compose.base.arguments import check_flag, check_kind, check_number
from fsdp_compose.base.attributes import get_grad
from fsdp_compose.base.group import Group
from fsdp_compose.base.mesh import group_of, refuse_ended
from fsdp_compose.base.torch_private import raw
from fsdp_compose.base.torch_stack import clipping_under_way, find_clipping
from fsdp_compose.base.wording import describe_clipping
from fsdp_compose.buckets.entries import find_entry
from fsdp_compose.comm import collectives as comm
from fsdp_compose.comm.small_reduce import reduce_alike
from fsdp_compose.core.guards.divisors import held_by_fewer
from fsdp_compose.core.state import owner_of
from fsdp_compose.optim.fixed_sum import add_powers, exponent_of, root_of
from fsdp_compose.optim.gradients import (
    Gradient,
    Params,
    collect_gradients,
    join_buckets,
    list_parameters,
    share_groups,
)
from fsdp_compose.optim.unaveraged_parameters import check_clipped
from fsdp_compose.sharded import ON_SLICES, ShardedParameter


class _Norm(NamedTuple):
    """Which norm is taken and what for, as ranks compare it."""

    order: float
    use: str = ""  # ", to clip it to 1,"


def grad_norm(
    module_or_params: Params,
    norm_type: float = 2.0,
    expert_mesh: DeviceMesh | dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The norm of all gradients together, as if they were one vector: the same on every rank.

    Args:
        module_or_params: a module, a parameter or several. Sharded gradients count as the whole
            that they are, gradients of plain parameters, equal on all ranks, once.
        norm_type: any p, ``inf`` and ``-inf`` included. 0 counts, as
            ``torch.nn.utils.clip_grad_norm_`` does, the parameters with a gradient that is not
            all zero.
        expert_mesh: the ranks that hold different experts, a DeviceMesh of one dimension or a
            ProcessGroup: gradients that are spread over fewer ranks than others are counted on
            each of them. Not for experts that are DTensors, or were declared with
            ``declare_tensor_parallel``, which count over those ranks by themselves.

    Returns:
        0-dim, fp32 (fp64 where a gradient is), on the gradients' device; 0.0 without gradients.

    Raises:
        RuntimeError: gradients were accumulated without synchronisation and not reduced yet; or
            some are spread over fewer ranks than others and nothing says what the other ranks hold.
        ValueError: ``norm_type`` is 0 with ``expert_mesh``.
        TypeError: an argument is of the wrong type, such as a list of modules.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> round(float(grad_norm(model)), 3)
        2.449
    """
    _check_arguments("grad_norm", norm_type, expert_mesh)
    grads = collect_gradients(module_or_params, "grad_norm", joins=norm_type > 0)
    return _compute_norm(grads, _Norm(float(norm_type)), _experts_of(grads, expert_mesh))


def clip_grad_norm_(
    module_or_params: Params,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    expert_mesh: DeviceMesh | dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Scale all gradients in place so that their norm is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_`` on the unsharded model. Every rank must call it.

    Args:
        module_or_params: as for ``grad_norm``.
        max_norm: the largest norm left as it is, the same on every rank.
        norm_type: as for ``grad_norm``.
        error_if_nonfinite: raise when the norm is infinite or NaN; waits for the device.
        expert_mesh: as for ``grad_norm``.

    Returns:
        The norm before clipping, as ``grad_norm`` gives it.

    Raises:
        RuntimeError: on every rank, naming the first parameter whose gradient is not finite; or
            gradients were accumulated without synchronisation and not reduced yet; or ranks were
            given different limits (between CPUs); or as for ``grad_norm``.
        TypeError: an argument is of the wrong type, such as a string for ``max_norm``.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> norm = clip_grad_norm_(model, max_norm=1.0)  # of before
        >>> round(float(norm), 3), round(float(grad_norm(model)), 3)
        (2.449, 1.0)
    """
    check_flag("clip_grad_norm_", "error_if_nonfinite", error_if_nonfinite)
    _check_arguments("clip_grad_norm_", norm_type, expert_mesh)
    params = list_parameters(module_or_params, "clip_grad_norm_")
    grads = collect_gradients(params, "clip_grad_norm_", joins=norm_type > 0)
    experts = _experts_of(grads, expert_mesh)
    norm = _Norm(float(norm_type), describe_clipping(max_norm, error_if_nonfinite))
    total = _compute_norm(grads, norm, experts)
    check_number("clip_grad_norm_", "max_norm", max_norm, "a number")  # ranks have compared it
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {total.item()}: "
            f"{_first_nonfinite(params, expert_mesh)}. To clip anyway, pass "
            "error_if_nonfinite=False."
        )
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    with torch.no_grad():
        for key, members in _by_kind([grad.local for grad in grads]).items():
            torch._foreach_mul_(members, scale.to(key[0]))
    return total


def _check_arguments(caller: str, norm_type: object, expert_mesh: object) -> None:
    check_number(caller, "norm_type", norm_type, "a number, such as 2.0 or math.inf")
    if expert_mesh is not None:
        wanted = "a DeviceMesh or process group over the experts' ranks, such as mesh['ep']"
        kinds = (DeviceMesh, dist.ProcessGroup)
        check_kind(caller, "expert_mesh", expert_mesh, kinds, wanted)
        refuse_ended(expert_mesh, caller)


def _by_kind(
    tensors: Sequence[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return kinds


@dataclass(frozen=True, eq=False)
class _Experts:
    """Gradients that are not alike on the ranks of a group, which hold other parameters."""

    group: Group
    grads: list[Gradient]


def _experts_of(
    grads: list[Gradient], mesh: DeviceMesh | dist.ProcessGroup | None
) -> _Experts | None:
    """Which gradients are experts'; check that every other one counts on all ranks alike."""
    if mesh is None and share_groups(grads):
        return None
    held = {find_entry(grad.param): grad for grad in grads if grad.param is not None}
    most = max((owner_of(entry).mesh.size for entry in held), default=1)
    fewer = {entry: owner_of(entry).mesh.size for entry in held_by_fewer(held)}
    if mesh is not None:
        pg = mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh
        group = group_of(pg, grads[0].local.device if grads else torch.device("cpu"))
        for entry, ranks in fewer.items():
            if ranks * group.size != most:
                raise RuntimeError(
                    _explain_uneven(held[entry], ranks, most, f"an expert_mesh of {group.size}")
                )
        return _Experts(group, [held[entry] for entry in fewer])
    for entry, ranks in fewer.items():
        raise RuntimeError(_explain_uneven(held[entry], ranks, most, "no expert_mesh"))
    return None


def _explain_uneven(grad: Gradient, ranks: int, most: int, given: str) -> str:
    return (
        f"the gradient of {grad.names[0]} is spread over {ranks} of the {most} ranks that others "
        f"are spread over, with {given}, so it is not known what the other ranks hold. If they "
        "hold other experts, pass expert_mesh=mesh['ep'], or make the experts DTensors over that "
        "mesh, or declare_tensor_parallel them, before fully_shard. If they hold the same "
        "parameters and see the same data, say so with set_gradient_divide_factor(module, "
        f"{ranks})."
    )


def _compute_norm(grads: list[Gradient], norm: _Norm, experts: _Experts | None) -> torch.Tensor:
    """Powers of the local norms, summed over each group; a collective is a sum or a maximum."""
    order = norm.order
    if experts is not None and order == 0:
        raise ValueError(
            "norm_type is 0, which counts gradients and does not go with expert_mesh; wanted a "
            "norm_type larger than 0, such as 2.0."
        )
    if not grads and experts is None:
        return torch.zeros((), device=torch.get_default_device())
    grads = _order_alike(grads)
    device = grads[0].local.device if grads else torch.device("cpu")
    wide = torch.float64 if device.type != "mps" else torch.float32
    result = torch.float64 if any(_is_double(grad.local) for grad in grads) else torch.float32
    with torch.no_grad():
        held = (grad.param for grad in grads if grad.param is not None)
        if 0 < order < math.inf and _adds_in_tree(held):
            return _compute_fixed_norm(grads, norm, device).to(result)
        if experts is None:
            total = _reduce_norms(grads, norm, wide, device)
        else:
            alike = _reduce_norms([g for g in grads if g not in experts.grads], norm, wide, device)
            # One number on every rank, whatever experts it has and whether any was used.
            own = _combine(_reduce_norms(experts.grads, norm, wide, device), order).reshape(1)
            others = _combine_over_ranks(
                own, order, experts.group, "take the norm of experts' gradients"
            )
            total = torch.cat([alike, others])
        if order == 0:
            return (total != 0).sum().to(result)
        total = _combine(total, order)
        return (total if math.isinf(order) else total.pow(1.0 / order)).to(result)


def _order_alike(grads: list[Gradient]) -> list[Gradient]:
    """The gradients of several groups by name, however each rank's caller ordered parameters."""
    return grads if share_groups(grads) else sorted(grads, key=_names_of)


def _names_of(grad: Gradient) -> tuple[str, ...]:
    return tuple(grad.names)


def _adds_in_tree(params: Iterable[nn.Parameter]) -> bool:
    """Whether gradients are to have the same bits at every number of ranks (``deterministic=``)."""
    return any(owner_of(find_entry(param)).mesh.slots is not None for param in params)


def _compute_fixed_norm(grads: list[Gradient], norm: _Norm, device: torch.device) -> torch.Tensor:
    """The norm by sums of integers, which have no order; see fixed_sum.py."""
    order = norm.order
    largest = _compute_norm(grads, norm._replace(order=math.inf), None).to(device)
    exponent = exponent_of(largest)
    members: dict[tuple[Group, ...], list[torch.Tensor]] = {}
    for grad in grads:
        if grad.copies > 1:
            raise ValueError(
                f"clip_grad_norm_, grad_norm: {grad.names[0]} is split by tensor parallelism, "
                "beside parameters that were sharded with deterministic=; take its norm apart."
            )
        members.setdefault(grad.groups, []).append(grad.local.to(device))
    pending = {groups: add_powers(found, order, exponent) for groups, found in members.items()}
    counts = torch.stack(_combine_over_groups(pending, norm, grads)).sum(0)
    total = root_of(counts, order, exponent)
    return torch.where(largest.isfinite(), total, largest.double())


def _reduce_norms(
    grads: list[Gradient], norm: _Norm, wide: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Numbers over all ranks of each gradient's groups, to be combined to the norm's power."""
    order = norm.order
    if not grads:
        return torch.full((1,), _norm_of_nothing(order), dtype=wide, device=device)
    members: dict[tuple[tuple[Group, ...], int], list[torch.Tensor]] = {}
    for grad in grads:
        members.setdefault((grad.groups, grad.copies), []).append(grad.local)
    pending: dict[tuple[Group, ...], torch.Tensor] = {}
    for (groups, copies), found in members.items():
        joined = _combine_local(_local_norms(found, order, wide, device), order)
        if copies > 1 and not math.isinf(order):
            joined /= copies  # each adds its share: ranks get one norm even if they differ
        pending[groups] = torch.cat([pending[groups], joined]) if groups in pending else joined
    combined = _combine_over_groups(pending, norm, grads)
    return combined[0] if len(combined) == 1 else torch.cat(combined)


def _combine(numbers: torch.Tensor, order: float) -> torch.Tensor:
    if math.isinf(order):
        return numbers.amax() if order > 0 else numbers.amin()  # NaN where one is
    return numbers.sum()


def _is_double(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float64, torch.complex128)


def _local_norms(
    locals_: list[torch.Tensor], order: float, wide: torch.dtype, device: torch.device
) -> torch.Tensor:
    """One number per tensor: its norm; of an empty slice, what changes nothing.

    In the order of the tensors, made without a list of places, which the host would have to send.
    """
    norms: dict[int, torch.Tensor] = {}
    for (_, dtype), members in _by_kind(locals_).items():
        half = dtype in (torch.float16, torch.bfloat16)
        found = torch._foreach_norm(members, order, dtype=torch.float32 if half else None)
        if len(members) == len(locals_):
            return torch.stack(found).to(device=device, dtype=wide)
        norms.update(zip(map(id, members), found, strict=True))
    nothing = torch.full((), _norm_of_nothing(order), dtype=wide, device=device)
    listed = [norms.get(id(tensor), nothing) for tensor in locals_]
    if len({(norm.device, norm.dtype) for norm in listed}) > 1:
        listed = [norm.to(device=device, dtype=wide) for norm in listed]
    return torch.stack(listed).to(device=device, dtype=wide)


def _norm_of_nothing(order: float) -> float:
    if math.isinf(order):
        return 0.0 if order > 0 else math.inf
    return 0.0 if order >= 0 else math.inf


def _combine_local(norms: torch.Tensor, order: float) -> torch.Tensor:
    """What is combined over ranks: one number for all tensors; where they are counted, one each."""
    if order == 0:
        return norms
    return _combine(norms if math.isinf(order) else norms.pow(order), order).reshape(1)


def _describe_norm(grads: list[Gradient], norm: _Norm) -> str:
    """What ranks that combine norms compare; only where they are counted does the order matter."""
    shown = _join_names(tuple([tuple(grad.names) for grad in grads]), norm.order == 0)
    return f"take the norm of order {norm.order:g}{norm.use} of the gradients of {shown}"


@lru_cache(maxsize=16)
def _join_names(gradients: tuple[tuple[str, ...], ...], in_order: bool) -> str:
    names = chain.from_iterable(gradients)
    return ", ".join(names if in_order else sorted(names))


def _combine_over_groups(
    pending: dict[tuple[Group, ...], torch.Tensor], norm: _Norm, grads: list[Gradient]
) -> list[torch.Tensor]:
    """Combine numbers over the groups of each, with one all-reduce per group and mesh dimension."""
    done: list[torch.Tensor] = []
    if len(pending) == 1:
        ((groups, numbers),) = pending.items()
        for group in groups:
            numbers = _combine_over_ranks(numbers, norm.order, group, _describe_norm(grads, norm))
        return [numbers]
    while pending:
        rest: dict[tuple[Group, ...], list[torch.Tensor]] = {}
        for group in dict.fromkeys(groups[0] for groups in pending if groups):
            waiting = [groups for groups in pending if groups and groups[0] == group]
            what = _describe_norm([grad for grad in grads if group in grad.groups], norm)
            flat = _combine_over_ranks(
                torch.cat([pending[groups] for groups in waiting]), norm.order, group, what
            )
            pieces = flat.split([pending[groups].numel() for groups in waiting])
            for groups, piece in zip(waiting, pieces, strict=True):
                rest.setdefault(groups[1:], []).append(piece)
        done += [numbers for groups, numbers in pending.items() if not groups]
        pending = {groups: torch.cat(found) for groups, found in rest.items()}
    return done


def _combine_over_ranks(
    numbers: torch.Tensor, order: float, group: Group, what: str
) -> torch.Tensor:
    if not math.isinf(order):
        return reduce_alike(numbers, group, "sum", what)
    # A collective's own maximum may lose a NaN, so whether there is one travels beside it.
    sign = 1.0 if order > 0 else -1.0
    extreme = torch.nan_to_num(sign * numbers, nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    both = torch.cat([extreme, numbers.isnan().to(numbers.dtype)])
    extreme, has_nan = reduce_alike(both, group, "max", what).chunk(2)
    return torch.where(has_nan > 0, math.nan, sign * extreme)


def _first_nonfinite(params: Params, expert_mesh: DeviceMesh | dist.ProcessGroup | None) -> str:
    """Name the first parameter whose gradient is not finite, on whatever rank."""
    found = collect_gradients(params, "clip_grad_norm_", joins=False)
    grads = sorted(found, key=_names_of)
    experts = _experts_of(grads, expert_mesh)
    flags = [not bool(torch.isfinite(grad.local).all()) for grad in grads]
    for group in dict.fromkeys(group for grad in grads for group in grad.groups):
        members = [i for i, grad in enumerate(grads) if group in grad.groups]
        device = grads[members[0]].local.device
        shared = torch.tensor([float(flags[i]) for i in members], device=device)
        for i, flag in zip(members, comm.all_reduce(shared, group, "max").tolist(), strict=True):
            flags[i] = bool(flag)
    name = grads[flags.index(True)].names[0] if any(flags) else None
    if experts is not None:
        names = comm.gather_objects(name, experts.group, "clip_grad_norm_")
        name = next((found for found in names if found is not None), None)
    if name is None:
        return "every gradient is finite, but their norm is not"
    return f"the gradient of {name} is not finite"


# What ``torch.nn.utils`` does with sharded gradients when it clips; the stack tells that it does.


def take_norms(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer ``_foreach_norm``; torch's clipping is given one norm of all gradients at once.

    It takes the norm of the norms that it gets, so one of all is as good as one of each.
    """
    is_joint = len(args) == 2 and not kwargs and args[1] > 0
    found = _find_clipped(args[0] if is_joint else None)
    if found is None:
        return ON_SLICES[func](func, args, kwargs)
    norm = _Norm(float(args[1]), clipping_under_way())
    return [_compute_norm(found, norm, None).to(found[0].local.dtype)]


def take_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer ``vector_norm``, which torch's clipping calls for each gradient."""
    _find_clipped(None)
    return ON_SLICES[func](func, args, kwargs)


def scale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer ``_foreach_mul_``; for torch's clipping, buffers are scaled as wholes."""
    found = _find_clipped(None if kwargs else args[0])
    if found is None:
        return ON_SLICES[func](func, args, kwargs)
    with raw():
        torch._foreach_mul_([gradient.local for gradient in found], *args[1:])
    return None


def _find_clipped(grads: Any) -> list[Gradient] | None:
    """The gradients that ``torch.nn.utils`` clips, if ``grads`` are those of whole buckets.

    Any others too where norms are to be the same at every number of ranks (``deterministic=``).

    Raises:
        RuntimeError: it clips them together with gradients that nothing averages.
    """
    clipping = find_clipping()
    if clipping is None:
        return None
    params, noted = clipping.params, clipping.notes.get(_NOTE)
    if noted is not None and grads is not None and len(noted[0]) == len(grads):
        known: list[Gradient] = noted[1]
        if all(map(is_, noted[0], grads)):
            return known
    if set(map(type, params)) != {ShardedParameter}:
        check_clipped(params)
        return None
    if grads is None:
        return None
    found, left = join_buckets(params, grads if len(grads) == len(params) else None)
    with raw():
        is_all = all(get_grad(param) is None for param in left)
    is_all &= sum(len(gradient.names) for gradient in found) == len(grads)
    if not (is_all and share_groups(found)):
        with raw():
            own = set(map(id, grads))
            clipped: list[Any] = [param for param in params if id(get_grad(param)) in own]
        if not _adds_in_tree(clipped):
            return None
        found = collect_gradients(clipped, "clip_grad_norm_")
    clipping.notes[_NOTE] = list(grads), found
    return found


_NOTE = "fsdp_compose_clipped"
"""The gradients whose norm was taken and how they were joined, for their multiplication."""
