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

    below = _take_hooks()
    _put_back(below)
    push_saved_tensor_hooks(pack, unpack)
    unit.run.shield = [pack, *(caller_pack for caller_pack, _ in below)]


def unshield(unit: Unit) -> None:
    """Remove the hooks of ``shield_weights``, as the unit's forward is over."""
    unit.run.shield = None
    pop_saved_tensor_hooks()


def recover_shields(engine: Engine) -> None:
    """Remove the hooks of forwards that an interrupt ended without running their last hooks.

    A caller's scope that was left meanwhile removed the innermost hooks, which were ours, and not
    its own; those are removed here then, also from below what was entered since.
    """
    shielded = {unit for unit in engine.schedule.active if unit.run.shield is not None}
    if not shielded:
        return
    known = {id(pack) for unit in shielded for pack in unit.run.shield or ()}
    left, hooks = len(shielded), []
    for pack, unpack in _take_hooks():
        if left and id(pack) in known:
            left -= 1
        else:
            hooks.append((pack, unpack))
    _put_back(hooks)
    for unit in shielded:
        unit.run.shield = None


def _take_hooks() -> list[tuple[Any, Any]]:
    """Take all saved-tensor hooks off torch's stack, the innermost first."""
    taken = []
    while (hooks := saved_tensor_hooks()) is not None:
        pop_saved_tensor_hooks()
        taken.append(hooks)
    return taken


def _put_back(hooks: list[tuple[Any, Any]]) -> None:
    """Undo ``_take_hooks``."""
    for pack, unpack in reversed(hooks):
        push_saved_tensor_hooks(pack, unpack)
