"""Norms and clipping of sharded gradients: the calls, and what torch's own clipping asks.

``optim/norms.py`` has how a norm is taken.
"""

from __future__ import annotations

from numbers import Real
from operator import is_
from typing import Any

import torch

from fsdp_compose.base.arguments import check_flags, check_not_negative, check_number
from fsdp_compose.base.attributes import get_grad
from fsdp_compose.base.mesh import Ranks, check_ranks
from fsdp_compose.base.torch_private import raw
from fsdp_compose.base.torch_stack import clipping_under_way, find_clipping
from fsdp_compose.base.wording import describe_clipping
from fsdp_compose.optim.gradients import (
    Gradient,
    Params,
    collect_gradients,
    join_buckets,
    list_parameters,
    share_groups,
)
from fsdp_compose.optim.norms import (
    Norm,
    adds_in_tree,
    by_kind,
    compute_norm,
    experts_of,
    first_nonfinite,
    stages_of,
)
from fsdp_compose.optim.unaveraged_parameters import check_clipped
from fsdp_compose.sharded import ON_SLICES, ShardedParameter


def grad_norm(
    module_or_params: Params,
    norm_type: float = 2.0,
    expert_mesh: Ranks | None = None,
    pipeline_mesh: Ranks | None = None,
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
        pipeline_mesh: the ranks that hold the other stages of a pipeline, likewise: the norm is
            that of all stages. A weight that two stages share counts in each. Without it, each
            stage has a norm of its own.

    Returns:
        0-dim, fp32 (fp64 where a gradient is), on the gradients' device; 0.0 without gradients.

    Raises:
        RuntimeError: gradients were accumulated without synchronisation and not reduced yet; or
            some are spread over fewer ranks than others and nothing says what the other ranks hold.
        ValueError: ``norm_type`` is 0 with ``expert_mesh``, or nan; or a mesh has several
            dimensions.
        TypeError: an argument is of the wrong type, such as a list of modules.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> round(float(grad_norm(model)), 3)
        2.449
    """
    _check_arguments("grad_norm", norm_type, expert_mesh, pipeline_mesh)
    params = list_parameters(module_or_params, "grad_norm")
    grads = collect_gradients(params, "grad_norm", joins=norm_type > 0)
    stages = stages_of(pipeline_mesh, params)
    return compute_norm(grads, Norm(float(norm_type)), experts_of(grads, expert_mesh), stages)


def clip_grad_norm_(
    module_or_params: Params,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    expert_mesh: Ranks | None = None,
    pipeline_mesh: Ranks | None = None,
) -> torch.Tensor:
    """Scale all gradients in place so that their norm is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_`` on the unsharded model. Every rank must call it.

    Args:
        module_or_params: as for ``grad_norm``.
        max_norm: the largest norm left as it is, the same on every rank.
        norm_type: as for ``grad_norm``.
        error_if_nonfinite: raise when the norm is infinite or NaN; waits for the device.
        expert_mesh: as for ``grad_norm``.
        pipeline_mesh: as for ``grad_norm``; every stage is scaled alike.

    Returns:
        The norm before clipping, as ``grad_norm`` gives it.

    Raises:
        RuntimeError: on every rank, naming the first parameter whose gradient is not finite; or
            gradients were accumulated without synchronisation and not reduced yet; or ranks were
            given different limits (between CPUs); or as for ``grad_norm``.
        TypeError: an argument is of the wrong type, such as a string for ``max_norm``.
        ValueError: ``max_norm`` is a number that is negative or nan.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> norm = clip_grad_norm_(model, max_norm=1.0)  # of before
        >>> round(float(norm), 3), round(float(grad_norm(model)), 3)
        (2.449, 1.0)
    """
    check_flags("clip_grad_norm_", error_if_nonfinite=error_if_nonfinite)
    _check_arguments("clip_grad_norm_", norm_type, expert_mesh, pipeline_mesh)
    params = list_parameters(module_or_params, "clip_grad_norm_")
    grads = collect_gradients(params, "clip_grad_norm_", joins=norm_type > 0)
    experts, stages = experts_of(grads, expert_mesh), stages_of(pipeline_mesh, params)
    norm = Norm(float(norm_type), describe_clipping(max_norm, error_if_nonfinite))
    total = compute_norm(grads, norm, experts, stages)
    _check_limit(max_norm)  # ranks have compared it
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {total.item()}: "
            f"{first_nonfinite(params, expert_mesh, stages)}. To clip anyway, pass "
            "error_if_nonfinite=False."
        )
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    scaled = [grad.local if grad.stored is None else grad.stored for grad in grads]
    with torch.no_grad():
        for key, members in by_kind(scaled).items():
            torch._foreach_mul_(members, scale.to(key[0]))
    return total


def _check_arguments(
    caller: str, norm_type: object, expert_mesh: object, pipeline_mesh: object
) -> None:
    wanted = "a number, such as 2.0 or math.inf"
    check_number(caller, "norm_type", norm_type, wanted)
    if norm_type != norm_type:
        raise ValueError(f"{caller}: norm_type is {norm_type}; wanted {wanted}.")
    check_ranks(caller, "expert_mesh", expert_mesh, "the experts' ranks, such as mesh['ep']")
    check_ranks(caller, "pipeline_mesh", pipeline_mesh, "the stages' ranks, such as mesh['pp']")


def _check_limit(max_norm: Any) -> None:
    """Raise unless it is one; a tensor is not read, as the host would wait for its device."""
    check = check_not_negative if isinstance(max_norm, Real) else check_number
    check("clip_grad_norm_", "max_norm", max_norm, "a number, 0 or more, such as 1.0 or math.inf")


# What ``torch.nn.utils`` does with sharded gradients when it clips; the stack tells that it does.


def take_norms(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer ``_foreach_norm``; torch's clipping is given one norm of all gradients at once.

    It takes the norm of the norms that it gets, so one of all is as good as one of each.
    """
    is_joint = len(args) == 2 and not kwargs and args[1] > 0
    found = _find_clipped(args[0] if is_joint else None)
    if found is None:
        return ON_SLICES[func](func, args, kwargs)
    norm = Norm(float(args[1]), clipping_under_way())
    return [compute_norm(found, norm, None).to(found[0].local.dtype)]


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
        if _CHECKED not in clipping.notes:
            check_clipped(params)
            clipping.notes[_CHECKED] = True
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
        if not adds_in_tree(clipped):
            return None
        found = collect_gradients(clipped, "clip_grad_norm_")
    clipping.notes[_NOTE] = list(grads), found
    return found


_NOTE = "fsdp_compose_clipped"
"""The gradients whose norm was taken and how they were joined, for their multiplication."""
_CHECKED = "fsdp_compose_checked"
"""Noted where gradients beside sharded ones were looked at: it is asked for each gradient."""
