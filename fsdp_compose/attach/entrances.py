"""Every place at which torch calls the library for a unit, from forward to an optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_compose.base.process import once
from fsdp_compose.checkpoint.state_dict_hooks import attach_state_dict, detach_state_dict
from fsdp_compose.core.guards import parted_gradients
from fsdp_compose.core.guards.added_parameters import watch_registrations
from fsdp_compose.core.guards.methods import attach_methods, detach_methods
from fsdp_compose.core.hooks import attach_hooks, detach_hooks
from fsdp_compose.optim import clip
from fsdp_compose.optim.step_guard import guard_steps
from fsdp_compose.scopes import chosen_gradients, unreduced
from fsdp_compose.scopes.compile import detach_traced
from fsdp_compose.sharded import Handler, run_gradient_hooks

_plain: Any = torch.Tensor

ANSWERS: dict[Callable[..., Any], Handler] = {
    torch.autograd.grad: chosen_gradients.grad,
    torch.autograd.backward: chosen_gradients.backward,
    _plain.grad.__get__: unreduced.read_grad,
    _plain.grad.__set__: unreduced.write_grad,
    _plain.grad_dtype.__set__: unreduced.write_dtype,
    run_gradient_hooks: parted_gradients.meet_unit,
    torch._foreach_norm: clip.take_norms,
    torch._foreach_mul_: clip.scale,
    torch.linalg.vector_norm: clip.take_norm,
}
"""Functions of torch, and one of our own, on sharded tensors that their unit answers."""


def attach_entrances(module: nn.Module, methods: Sequence[str]) -> None:
    """Let a unit's module gather around ``methods``, and its state dicts be sharded.

    The first call in a process also has the steps of all optimizers checked, and what becomes part
    of DistributedDataParallel or opacus.
    """
    once(guard_steps)
    once(watch_registrations)
    attach_hooks(module)
    attach_methods(module, methods)
    attach_state_dict(module)


def detach_entrances(module: nn.Module) -> None:
    """Remove what ``attach_entrances`` and switches added, from a copy of the module too."""
    detach_hooks(module)
    detach_methods(module)
    detach_traced(module)
    detach_state_dict(module)
