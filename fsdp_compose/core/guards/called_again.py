"""Gradients of a unit's calls in one forward are added up one by one, as those of a plain module.

Calls between which the unit is released have nodes of their own in the graph. The node of each is a
function of what the call before read, and hands it the gradients that it got: there autograd adds
those of the call before to them, one by one. So the sum is the same as where all calls share one
node, as they do in a unit that stays gathered, and the node of the first call gets the whole of it.
"""

from __future__ import annotations

import weakref
from functools import partial
from operator import is_not
from typing import Any

import torch

from fsdp_compose.core.guards.captured import choose_anchor
from fsdp_compose.core.guards.gathered_memory import any_lies_in
from fsdp_compose.core.state import Unit

Tensors = tuple[torch.Tensor | None, ...]
Versions = list[tuple[int, ...]]


def find_sources(
    unit: Unit, trained: tuple[int, ...], versions: Versions
) -> tuple[torch.Tensor, ...]:
    """What the node of a call is a function of: the call before in this forward, or the anchor.

    A call before which the weights were written has nothing to do with those that read others.
    """
    if unit.engine.streams.gather is not None:
        choose_anchor(unit)
    live = unit.run.live
    if live is None or live.pass_id != unit.engine.pass_id or live.trained != trained:
        return (unit.links.anchor,)
    return tuple(live.outputs) if live.versions == versions else (unit.links.anchor,)


def hand_on(unit: Unit, node: Any, grads: Tensors) -> Tensors:
    """The gradients that ``node`` hands to that of the call before, as the unit is released."""
    given = filter(partial(is_not, None), grads)
    if not torch.is_grad_enabled() and any_lies_in(unit.gathered, given):  # type: ignore[arg-type]
        grads = tuple([None if g is None else g.clone() for g in grads])
    handed = [None if g is None else (weakref.ref(g), g._version) for g in grads]
    node.next_functions[-1][0].handed = handed
    return grads


def is_reached(unit: Unit, node: Any, grads: Tensors) -> bool:
    """Whether this backward came through the call, and not only through later ones.

    For a call that is no part of the loss, the unit is not gathered.
    """
    if unit.run.task is not None and unit.run.task.alive:
        return True
    for handed, grad in zip(node.handed, grads, strict=True):
        known, version = handed or (None, 0)
        if grad is not None and (known is None or known() is not grad or grad._version != version):
            return True  # autograd added to it
    return False
