"""A unit is gathered when backward reaches it: by its outputs, or by a tensor that a hook saw.

A backward may start in the middle of a unit, at a tensor that a forward hook on one of its
submodules kept (feature extraction, attribution of single neurons). The outputs of the unit are
then not reached, so what hooked submodules take and give is watched as the unit's outputs are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_compose.adopt import moved_before_backward
from fsdp_compose.audit import managed
from fsdp_compose.engine import open_backward, running_task
from fsdp_compose.gather import DELETED
from fsdp_compose.state import Unit, _lanes
from fsdp_compose.surroundings import check_noted
from fsdp_compose.torch_private import (
    forward_hook_tables,
    made_at,
    remove_forward_hooks,
    untraced,
)
from fsdp_compose.tree import find_tensors


def trigger_of(unit: Unit) -> Callable[[torch.Tensor], None]:
    """The tensor hook that gathers the unit when backward reaches it."""
    if unit.trigger is None:
        ref, epoch = weakref.ref(unit), unit.epoch

        @untraced
        def trigger(grad: torch.Tensor) -> None:
            reached = ref()
            if reached is None:
                raise RuntimeError(DELETED)
            if reached.epoch != epoch:
                raise RuntimeError(moved_before_backward(reached.gathered[0]))
            if reached.surroundings is not None:
                check_noted(reached)
            open_backward(reached, running_task(reached))

        unit.trigger = trigger
    return unit.trigger


def opened_at(unit: Unit) -> int:
    """When the unit's node was made, as in ``made_at``; -1 where it has none."""
    for tensor in unit.live.tensors if unit.live is not None else ():
        if tensor.grad_fn is not None:
            return made_at(tensor.grad_fn)
    return -1


def watch_hooked(unit: Unit) -> None:
    """Watch the inputs and outputs of submodules that have forward hooks, from now on."""
    roots = {id(ref()) for ref in unit.modules}
    for _, module in managed(unit):
        if id(module) in roots:
            continue
        before, after = forward_hook_tables(module)
        if before and watch_inputs not in before.values():
            module.register_forward_pre_hook(watch_inputs, prepend=True)
        if after and watch_outputs not in after.values():
            module.register_forward_hook(watch_outputs, prepend=True)


def unwatch(module: nn.Module) -> None:
    """Remove what ``watch_hooked`` registered on ``module`` and its submodules."""
    for submodule in module.modules():
        remove_forward_hooks(submodule, watch_inputs, watch_outputs)


@untraced
def watch_inputs(module: nn.Module, args: Any) -> None:
    _watch(args)


@untraced
def watch_outputs(module: nn.Module, args: Any, output: Any) -> None:
    _watch(output)


def _watch(values: Any) -> None:
    if not torch.is_grad_enabled():
        return
    for unit in [lane.active[-1] for lane in _lanes.values() if lane.active]:
        start = opened_at(unit)
        for tensor in find_tensors(values)[0]:
            node = tensor.grad_fn
            # What the unit was given is reached after its backward, when it is released again.
            if tensor.requires_grad and node is not None and made_at(node) >= start:
                tensor.register_hook(trigger_of(unit))
