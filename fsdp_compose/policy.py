"""What the user chose, as frozen values that check themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeAlias

import torch
from torch import nn

from fsdp_compose.layout import Granularity


class ShardingStrategy(Enum):
    """Where weights and gradients live between the passes that need them."""

    FULL_SHARD = "full_shard"
    SHARD_GRAD_OP = "shard_grad_op"
    NO_SHARD = "no_shard"
    HYBRID_SHARD = "hybrid_shard"
    HYBRID_SHARD_ZERO2 = "hybrid_shard_zero2"

    @property
    def is_hybrid(self) -> bool:
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)

    @property
    def keeps_after_forward(self) -> bool:
        return self in (
            ShardingStrategy.SHARD_GRAD_OP,
            ShardingStrategy.HYBRID_SHARD_ZERO2,
            ShardingStrategy.NO_SHARD,
        )


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of a unit's compute and communication; the shards keep the dtype they came with.

    Args:
        param_dtype: dtype of floating-point parameters in forward and backward, and of the gather.
        reduce_dtype: dtype in which gradients travel; ``param_dtype``'s when None. They are summed
            in at least fp32 where the library sums (gloo) and end in the shard's dtype.
        output_dtype: dtype floating-point outputs of the unit are cast to.
        buffer_dtype: dtype the unit's floating-point buffers are cast to, once, when sharded.
        cast_forward_inputs: cast floating-point inputs of the unit to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point
            ):
                raise ValueError(
                    f"MixedPrecision: {name} is {dtype!r}; wanted a floating-point torch.dtype "
                    "such as torch.bfloat16, or None."
                )


MixedPrecisionLike: TypeAlias = (
    "MixedPrecision | Callable[[str, nn.Parameter], MixedPrecision | None]"
)
GranularityLike: TypeAlias = "Granularity | Callable[[str, nn.Parameter], Granularity | None]"


@dataclass(frozen=True)
class Prefetch:
    """How many units are gathered ahead of use.

    Args:
        forward: units gathered ahead in forward.
        backward: units gathered ahead in backward.
        backward_moment: ``"pre"`` issues them before a unit's own backward, ``"post"`` after it,
            None never.
    """

    forward: int = 1
    backward: int = 1
    backward_moment: Literal["pre", "post"] | None = "pre"

    def __post_init__(self) -> None:
        if self.forward < 0 or self.backward < 0:
            raise ValueError(
                f"Prefetch: forward={self.forward}, backward={self.backward}; wanted depths >= 0."
            )
        if self.backward_moment not in ("pre", "post", None):
            raise ValueError(
                f"Prefetch: backward_moment is {self.backward_moment!r}; wanted 'pre', 'post' or "
                "None."
            )


Init: TypeAlias = Literal["verify", "broadcast", "as_is"]
INITS: tuple[Init, ...] = ("verify", "broadcast", "as_is")


def keeps_after_forward(
    strategy: ShardingStrategy | None, reshard_after_forward: bool | None
) -> bool | None:
    """Whether a unit stays gathered from forward to backward; None leaves it to the nesting.

    Raises:
        ValueError: the two options contradict each other.
    """
    if strategy is None:
        return None if reshard_after_forward is None else not reshard_after_forward
    if reshard_after_forward is not None and reshard_after_forward is strategy.keeps_after_forward:
        raise ValueError(
            f"fully_shard: strategy {strategy.name} means reshard_after_forward="
            f"{not strategy.keeps_after_forward}, but reshard_after_forward="
            f"{reshard_after_forward} was passed; pass one of the two."
        )
    if strategy.keeps_after_forward:
        return True
    return None if reshard_after_forward is None else not reshard_after_forward
