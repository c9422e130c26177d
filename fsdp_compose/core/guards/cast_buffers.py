"""Buffers that mixed precision has cast follow the precision in which a forward computes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fsdp_compose.base.policy import MixedPrecision
from fsdp_compose.base.torch_private import buffer_slots, outside_transforms
from fsdp_compose.core.state import Unit, find_state


def convert_buffers(
    module: nn.Module, dtypes: Mapping[str, torch.dtype], mp: MixedPrecision, *, back: bool
) -> None:
    """Cast buffers to ``buffer_dtype``, or ``back``; those that were converted since stay as is.

    A module that is not there any more is left out.

    Args:
        dtypes: what the buffers were before they were cast, by name.
    """
    converted: dict[int, torch.Tensor] = {}
    for name, dtype in dtypes.items():
        path, _, key = name.rpartition(".")
        try:
            buffers = buffer_slots(module.get_submodule(path))
        except AttributeError:  # it was taken out
            continue
        buffer = buffers.get(key)
        found, wanted = (mp.buffer_dtype, dtype) if back else (dtype, mp.buffer_dtype)
        if buffer is not None and buffer.dtype == found:
            buffers[key] = converted.setdefault(id(buffer), buffer.to(wanted))


def computes_as_stored(unit: Unit, module: nn.Module) -> bool:
    """Whether this forward computes in the dtype of the shards, not in ``param_dtype``."""
    return unit.mp.full_precision_in_eval and not module.training


def choose_precision(unit: Unit, module: nn.Module) -> bool:
    """Let buffers have the precision of the forward that begins; whether it is the stored one."""
    is_stored, state = computes_as_stored(unit, module), find_state(module)
    if state is not None and state.buffer_dtypes:
        # Buffers that were made in inference mode, or under a transform, could not be used after.
        with outside_transforms(), torch.inference_mode(False):
            convert_buffers(module, state.buffer_dtypes, unit.mp, back=is_stored)
    return is_stored
