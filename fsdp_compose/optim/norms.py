"""Norms of sharded gradients: powers of local norms, combined over the ranks.

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
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import nn

from fsdp_compose.base.group import Group
from fsdp_compose.base.mesh import Ranks, group_over
from fsdp_compose.buckets.entries import find_entry
from fsdp_compose.comm import collectives as comm
from fsdp_compose.comm.small_reduce import reduce_alike, reduce_extreme
from fsdp_compose.core.guards.divisors import held_by_fewer
from fsdp_compose.core.state import owner_of
from fsdp_compose.optim.fixed_sum import NUMBERS, add_powers, exponent_of, root_of
from fsdp_compose.optim.gradients import Gradient, Params, collect_gradients, share_groups


class Norm(NamedTuple):
    """Which norm is taken and what for, as ranks compare it."""

    order: float
    use: str = ""  # ", to clip it to 1,"


def by_kind(
    tensors: Sequence[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return kinds


@dataclass(frozen=True, eq=False)
class Experts:
    """Gradients that are not alike on the ranks of a group, which hold other parameters."""

    group: Group
    grads: list[Gradient]


@dataclass(frozen=True, eq=False)
class StageRanks:
    """The ranks that hold the stages of a pipeline, and where this one's parameters are."""

    group: Group
    device: torch.device


def experts_of(grads: list[Gradient], mesh: Ranks | None) -> Experts | None:
    """Which gradients are experts'; check that every other one counts on all ranks alike."""
    if mesh is None and share_groups(grads):
        return None
    held = {find_entry(grad.param): grad for grad in grads if grad.param is not None}
    most = max((owner_of(entry).mesh.size for entry in held), default=1)
    fewer = {entry: owner_of(entry).mesh.size for entry in held_by_fewer(held)}
    if mesh is not None:
        group = group_over(mesh, grads[0].local.device if grads else torch.device("cpu"))
        for entry, ranks in fewer.items():
            if ranks * group.size != most:
                raise RuntimeError(
                    _explain_uneven(held[entry], ranks, most, f"an expert_mesh of {group.size}")
                )
        return Experts(group, [held[entry] for entry in fewer])
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


def stages_of(ranks: Ranks | None, params: nn.Module | list[torch.Tensor]) -> StageRanks | None:
    """The ranks that hold the stages of a pipeline, one of which has ``params``."""
    if ranks is None:
        return None
    listed = params.parameters() if isinstance(params, nn.Module) else iter(params)
    device = next((param.device for param in listed), torch.device("cpu"))
    return StageRanks(group_over(ranks, device), device)


def compute_norm(
    grads: list[Gradient], norm: Norm, experts: Experts | None, stages: StageRanks | None = None
) -> torch.Tensor:
    """Powers of the local norms, summed over each group; a collective is a sum or a maximum."""
    order = norm.order
    if experts is not None and order == 0:
        raise ValueError(
            "norm_type is 0, which counts gradients and does not go with expert_mesh; wanted a "
            "norm_type larger than 0, such as 2.0."
        )
    if not grads and experts is None and stages is None:
        return torch.zeros((), device=torch.get_default_device())
    if order == 0 or not share_groups(grads):  # by name, however each rank ordered parameters
        grads = sorted(grads, key=attrgetter("names"))
    elsewhere = torch.device("cpu") if stages is None else stages.device
    device = grads[0].local.device if grads else elsewhere
    wide = torch.float64 if device.type != "mps" else torch.float32
    doubles = torch.float64, torch.complex128
    has_double = any(grad.local.dtype in doubles for grad in grads)
    result = torch.float64 if has_double else torch.float32
    with torch.no_grad():
        held = (grad.param for grad in grads if grad.param is not None)
        if 0 < order < math.inf and adds_in_tree(held):
            fixed = _compute_fixed_norm(grads, norm, device)
            if stages is not None:
                fixed = _add_stages(fixed.pow(order), norm, stages).pow(1.0 / order)
            return fixed.to(result)
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
        total = (total != 0).sum().to(wide) if order == 0 else _combine(total, order)
        if stages is not None:
            total = _add_stages(total, norm, stages)
        if order == 0:
            return total.to(result)
        return (total if math.isinf(order) else total.pow(1.0 / order)).to(result)


def _add_stages(total: torch.Tensor, norm: Norm, stages: StageRanks) -> torch.Tensor:
    """This stage's power, maximum or count, combined with those of the other stages."""
    what = f"take the norm of order {norm.order:g}{norm.use} of the gradients of all stages"
    return _combine_over_ranks(total.reshape(1), norm.order, stages.group, what).squeeze(0)


def adds_in_tree(params: Iterable[nn.Parameter]) -> bool:
    """Whether gradients are to have the same bits at every number of ranks (``deterministic=``)."""
    return any(owner_of(find_entry(param)).mesh.microbatches is not None for param in params)


def _compute_fixed_norm(grads: list[Gradient], norm: Norm, device: torch.device) -> torch.Tensor:
    """The norm by sums of integers, which have no order; see fixed_sum.py."""
    order = norm.order
    largest = compute_norm(grads, norm._replace(order=math.inf), None).to(device)
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
    combined = torch.cat(_combine_over_groups(pending, norm, grads))
    counts = combined.view(-1, NUMBERS).sum(0)
    total = root_of(counts, order, exponent)
    return torch.where(largest.isfinite(), total, largest.double())


def _reduce_norms(
    grads: list[Gradient], norm: Norm, wide: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Numbers over all ranks of each gradient's groups, to be combined to the norm's power."""
    order = norm.order
    if not grads:
        nothing = _norm_of_nothing(order) if math.isinf(order) else 0.0  # to the power of order
        return torch.full((1,), nothing, dtype=wide, device=device)
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


def _local_norms(
    locals_: list[torch.Tensor], order: float, wide: torch.dtype, device: torch.device
) -> torch.Tensor:
    """One number per tensor: its norm; of an empty slice, what changes nothing.

    In the order of the tensors, made without a list of places, which the host would have to send.
    """
    norms: dict[int, torch.Tensor] = {}
    for (_, dtype), members in by_kind(locals_).items():
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
    return 0.0 if order >= 0 else math.inf


def _combine_local(norms: torch.Tensor, order: float) -> torch.Tensor:
    """What is combined over ranks: one number for all tensors; where they are counted, one each."""
    if order == 0:
        return norms
    return _combine(norms if math.isinf(order) else norms.pow(order), order).reshape(1)


def _describe_norm(grads: list[Gradient], norm: Norm) -> str:
    """What ranks that combine norms compare, however each ordered its parameters."""
    shown = _join_names(tuple([grad.names for grad in grads]))
    return f"take the norm of order {norm.order:g}{norm.use} of the gradients of {shown}"


@lru_cache(maxsize=16)
def _join_names(gradients: tuple[tuple[str, ...], ...]) -> str:
    return ", ".join(sorted(chain.from_iterable(gradients)))


def _combine_over_groups(
    pending: dict[tuple[Group, ...], torch.Tensor], norm: Norm, grads: list[Gradient]
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
    if math.isinf(order):
        return reduce_extreme(numbers, group, "max" if order > 0 else "min", what)
    return reduce_alike(numbers, group, "sum", what)


def first_nonfinite(params: Params, expert_mesh: Ranks | None, stages: StageRanks | None) -> str:
    """Name the first parameter whose gradient is not finite, on whatever rank."""
    found = collect_gradients(params, "clip_grad_norm_", joins=False)
    grads = sorted(found, key=attrgetter("names"))
    experts = experts_of(grads, expert_mesh)
    flags = [not bool(torch.isfinite(grad.local).all()) for grad in grads]
    for group in dict.fromkeys(group for grad in grads for group in grad.groups):
        members = [i for i, grad in enumerate(grads) if group in grad.groups]
        device = grads[members[0]].local.device
        shared = torch.tensor([float(flags[i]) for i in members], device=device)
        for i, flag in zip(members, comm.all_reduce(shared, group, "max").tolist(), strict=True):
            flags[i] = bool(flag)
    name = grads[flags.index(True)].names[0] if any(flags) else None
    for other in (experts, stages):
        if other is not None:
            names = comm.gather_objects(name, other.group, "clip_grad_norm_")
            name = next((found for found in names if found is not None), None)
    if name is None:
        return "every gradient is finite, but their norm is not"
    return f"the gradient of {name} is not finite"
