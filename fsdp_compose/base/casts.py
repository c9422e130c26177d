"""Casts of what goes into a unit and of what comes out, as its precision policy says."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fsdp_compose.base.policy import MixedPrecision
from fsdp_compose.base.tree import map_tensors


def cast_inputs(
    policy: MixedPrecision, args: Any, kwargs: Any, is_outermost: bool, run: Any
) -> tuple[Any, Any] | None:
    """Floating-point inputs in the compute dtype; None where they are not cast.

    What is copied for it is noted in ``run``, of the unit that is called.
    """
    dtype, casts = policy.param_dtype, policy.cast_forward_inputs
    if dtype is None or not (casts is True or (casts == "root" and is_outermost)):
        return None
    cast = partial(_cast, dtype)
    noted = run.copied, len(run.modes)
    given = map_tensors(cast, kwargs, *noted) if kwargs else kwargs
    return map_tensors(cast, args, *noted), given


def cast_output(policy: MixedPrecision, output: Any) -> Any:
    """Floating-point outputs in the output dtype, where one was chosen."""
    if policy.output_dtype is None:
        return output
    return map_tensors(partial(_cast, policy.output_dtype), output)


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
