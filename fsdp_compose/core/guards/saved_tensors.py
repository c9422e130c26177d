"""A caller's saved-tensor hooks get a unit's activations, but not its gathered weights.

Hooks that move saved tensors to host memory would copy every gathered weight there, on every rank,
although backward gathers the weights again. So where a caller's hooks are in force, a unit's
forward runs under hooks that keep its weights by reference and pass everything else to the
caller's: autograd calls the innermost hooks only. The hooks of activation checkpointing keep
nothing and are left as they are. Hooks entered inside a unit's forward see its weights, as in a
plain module.
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


def shield_weights(unit: Unit, hooks: tuple[Any, Any]) -> None:
    """Keep the unit's weights from ``hooks``, which the caller entered, until ``unshield``."""
    if not torch.is_grad_enabled():
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
    """Remove the hooks of ``shield_weights``, as the unit's forward is over."""
    unit.run.shield = None
    pop_saved_tensor_hooks()


def recover_shields(engine: Engine) -> None:
    """Remove the hooks of forwards that an interrupt ended without running their last hooks.

    A caller's scope that was left meanwhile removed our hooks, which were innermost, and not its
    own; these are then removed here.
    """
    for unit in reversed(engine.schedule.active):
        if unit.run.shield is not None:
            hooks = saved_tensor_hooks()
            if hooks is not None and hooks[0] in unit.run.shield:
                pop_saved_tensor_hooks()
            unit.run.shield = None
