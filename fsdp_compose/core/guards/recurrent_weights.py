"""Keeps the second list of parameters that recurrent modules read equal to their first."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn

from fsdp_compose.base.torch_private import flat_weights
from fsdp_compose.core.state import Unit


def show_recurrent(unit: Unit, tensors: Sequence[torch.Tensor]) -> None:
    """Let the unit's recurrent modules read ``tensors``, by entry, in their second list too."""
    for ref, positions in find_recurrent(unit):
        module = ref()
        if not isinstance(module, nn.RNNBase):
            continue  # it is gone, and its unit waits for the collector
        weights = flat_weights(module)
        for position, index in positions:
            weights[position] = tensors[index]


def find_recurrent(unit: Unit) -> list[tuple[weakref.ref[nn.Module], list[tuple[int, int]]]]:
    """List each recurrent module of the unit with (position in its second list, entry) pairs."""
    if unit.links.recurrent is not None:
        return unit.links.recurrent
    found: dict[int, tuple[weakref.ref[nn.Module], list[tuple[int, int]]]] = {}
    for slot, index in unit.slots.items():
        module = slot.module()
        if isinstance(module, nn.RNNBase) and slot.name in module._flat_weights_names:
            position = module._flat_weights_names.index(slot.name)
            found.setdefault(id(module), (slot.module, []))[1].append((position, index))
    unit.links.recurrent = list(found.values())
    return unit.links.recurrent
