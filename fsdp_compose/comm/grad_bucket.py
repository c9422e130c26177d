"""The gradients of a bucket, as a communication hook is given them, and what it makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_compose.base.group import Group
from fsdp_compose.base.mesh import with_process_group
from fsdp_compose.base.parts import cut_by_rank
from fsdp_compose.comm.heads import Caller


@dataclass(frozen=True, eq=False, repr=False)
class GradBucket:
    """The gradients of a bucket, as a communication hook is given them.

    Attributes:
        unit: name of the unit.
        key: for state of each bucket, the same on every rank and in every step until ``refresh``.
            It begins with the unit's name, which units that were sharded apart may share: give
            those a state each.
        flat: packed gradients, real, in the reduce dtype; every parameter in full.
        parts: ``flat`` by rank of ``shard``.
        shard: the group over which gradients are reduced and scattered; ``shard.pg`` is torch's,
            None where there is no process group at all.
        replicate: the group over which the scattered sum is reduced.
        scale: what the sum over both groups is to be multiplied with, ``1 / ranks`` by default.
        dtype: of the parameters' shards, in which the result is kept.
        caller: compares what the library's hooks send with what other ranks do, on gloo.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> def reduce(state, grads):
        ...     print(grads.unit, grads.flat.numel(), len(grads.parts))
        ...     return default_hook(state, grads)
        >>> register_comm_hook(model, None, reduce)
        >>> model(torch.ones(1, 2)).sum().backward()
        Linear 8 1
    """

    unit: str
    key: str
    flat: torch.Tensor
    parts: Sequence[torch.Tensor]
    shard_axis: Group
    replicate_axis: Group
    scale: float
    dtype: torch.dtype
    caller: Caller | None = None

    @property
    def shard(self) -> Group:
        return with_process_group(self.shard_axis)

    @property
    def replicate(self) -> Group:
        return with_process_group(self.replicate_axis)


def run_hook(
    hook: Callable[..., Any], state: Any, given: GradBucket, over_both: bool
) -> torch.Tensor:
    """What a communication hook makes of ``given``, flat; it may be memory that the hook keeps.

    Args:
        over_both: the bucket is sharded over both groups, so that the hook returns what all
            replicas of this rank hold.

    Raises:
        ValueError: the hook returned something else than this rank's part.
    """
    with torch.no_grad():
        grad = hook(state, given)
    wanted = given.parts[0].numel()
    is_real = isinstance(grad, torch.Tensor) and grad.is_floating_point()
    if not is_real or grad.numel() != wanted:
        raise ValueError(
            f"communication hook of unit {given.unit!r} returned {type(grad).__name__} "
            f"{tuple(getattr(grad, 'shape', ()))}{_name_dtype(grad)}; wanted this rank's part of "
            f"the averaged gradient, {wanted} elements in a floating-point dtype."
        )
    grad = grad.reshape(-1)
    both = given.replicate_axis
    return cut_by_rank(grad, both.size)[both.rank] if over_both else grad


def has_state(state: Any) -> bool:
    """Whether what a hook remembers can be saved and loaded, and so copied and put back."""
    names = ("state_dict", "load_state_dict")
    return all(callable(getattr(state, name, None)) for name in names)


def _name_dtype(value: object) -> str:
    return f" of {value.dtype}" if isinstance(value, torch.Tensor) else ""
