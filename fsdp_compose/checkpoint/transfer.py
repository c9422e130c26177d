"""State that only rank 0 has, sent to the others one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_compose.base.mesh import Group
from fsdp_compose.checkpoint.consensus import settle
from fsdp_compose.comm import collectives as comm
from fsdp_compose.sharded import is_sharded, spec_of, tag, whole_slice


@dataclass(frozen=True)
class Outline:
    """A tensor to come."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def broadcast_object(value: Any, groups: Sequence[Group]) -> Any:
    """Rank 0's picklable ``value`` on every rank."""
    for group in groups:
        first = value if group.rank == 0 else None
        value = comm.gather_objects(first, group)[0]
    return value


def broadcast_tensor(tensor: Tensor, groups: Sequence[Group]) -> Tensor:
    """Rank 0's ``tensor``, in place; the groups are passed in turn, rows before columns."""
    for group in groups:
        comm.broadcast(tensor, group)
    return tensor


def broadcast_state(
    state: Any, groups: Sequence[Group], target_of: Callable[[str], Any], device: torch.device
) -> dict[str, Any]:
    """Rank 0's plain state by name, one tensor at a time.

    Args:
        target_of: what a name's value will be written into; where that is a sharded tensor of the
            same shape, only this rank's slice is kept.
        device: where the groups communicate.

    Raises:
        TypeError: rank 0's state is not a dictionary of plain tensors and picklable values.
    """
    if not groups:
        return dict(state)
    first = all(group.rank == 0 for group in groups)
    problem: Exception | None = None
    if first and not isinstance(state, Mapping):
        problem = TypeError(f"broadcast_from_rank0: rank 0 has a {type(state).__name__}")
    elif first and (sliced := [k for k, v in state.items() if is_sharded(v)]):
        problem = TypeError(
            f"broadcast_from_rank0: rank 0's {sliced[0]!r} is a slice; wanted full tensors."
        )
    settle(problem, groups)
    outline = broadcast_object(_outline(state) if first else None, groups)
    result: dict[str, Any] = {}
    for name, value in outline.items():
        if not isinstance(value, Outline):
            result[name] = value
            continue
        target = target_of(name)
        tensor = (
            state[name].detach().to(device).contiguous()
            if first
            else torch.empty(value.shape, dtype=value.dtype, device=device)
        )
        broadcast_tensor(tensor, groups)
        if is_sharded(target) and tuple(spec_of(target).whole_shape) == value.shape:
            spec = target._shard_spec
            tensor = tag(whole_slice(tensor, spec).clone(), spec)
        result[name] = tensor
    return result


def _outline(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: Outline(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
        for name, value in state.items()
    }
