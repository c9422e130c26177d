"""Saved-tensor hooks around a unit are given its activations, not the gathered weights beside them.

Autograd calls the innermost hooks alone. Hooks that move what is saved to host memory would copy
every gathered weight there, on every rank; the weights are gathered again in backward anyway. So
where a caller's hooks are in force, a unit's forward runs under hooks that keep its weights by
reference and hand everything else on. Those of activation checkpointing are left as they are: they
keep nothing. Hooks entered inside a unit's forward see its weights, as in a plain module.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdp_compose.base.torch_private import (
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saved_tensor_hooks,
)
from fsdp_compose.core.guards.gathered_memory import lies_in
from fsdp_compose.core.state import Engine, Unit


class _Weight:
    """A gathered weight, or a view of one, kept by reference."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def shield_weights(unit: Unit) -> None:
    """Keep the unit's weights from the caller's saved-tensor hooks, until ``unshield``."""
    hooks = saved_tensor_hooks(False)
    if hooks is None or not torch.is_grad_enabled():
        return
    if getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint":
        return
    outer_pack, outer_unpack = hooks
    buckets = unit.gathered

    def pack(tensor: torch.Tensor) -> Any:
        if any(lies_in(bucket, tensor) for bucket in buckets):
            return _Weight(tensor.detach())
        return outer_pack(tensor)

    def unpack(packed: Any) -> torch.Tensor:
        return packed.tensor if type(packed) is _Weight else outer_unpack(packed)

    push_saved_tensor_hooks(pack, unpack)
    unit.run.shield = pack, outer_pack


def unshield(unit: Unit) -> None:
    """End what keeps the weights from the caller's hooks, as the unit's forward is over."""
    unit.run.shield = None
    pop_saved_tensor_hooks()


def recover_shields(engine: Engine) -> None:
    """Remove the hooks of forwards that an interrupt ended without running their last hooks.

    A caller's scope that was left meanwhile removed the innermost hooks, ours in place of its own.
    """
    for unit in reversed(engine.schedule.active):
        if unit.run.shield is not None:
            hooks = saved_tensor_hooks(False)
            if hooks is not None and hooks[0] in unit.run.shield:
                pop_saved_tensor_hooks()
            unit.run.shield = None
