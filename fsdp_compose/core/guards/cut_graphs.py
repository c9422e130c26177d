"""A graph over gradients that torch's tensor parallelism would cut raises an error instead.

``DTensor.from_local`` sums a gradient that is partial over the tensor parallel ranks without a
graph over that sum. A gradient penalty on what comes before it (the input, earlier layers) would
lose those terms without any message, on a model that is not sharded too.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch

from fsdp_compose.base.torch_private import (
    hook_for_good,
    made_at,
    running_node,
    transforms_active,
    untraced,
)
from fsdp_compose.base.torch_stack import is_from_local, is_placement
from fsdp_compose.base.tree import find_tensors
from fsdp_compose.core.state import Unit


def watch_conversions(unit: Unit) -> None:
    """Look at what enters the unit as plain tensors, in a backward that makes a graph.

    Those of a layer that is a unit by itself enter it just before its ``Gather``.
    """
    start = min(map(made_at, unit.graphs.nodes), default=0)
    pending: list[Any] = [running_node()]
    seen: set[Any] = {None}
    while pending:
        node = pending.pop()
        if node in seen or (made_at(node) < start and not is_placement(node)):
            continue
        seen.add(node)
        if is_from_local(node):
            node.register_hook(partial(_check_graph, unit.name))
        pending += [source for source, _ in node.next_functions]


def watch_scope(unit: Unit, output: Any) -> None:
    """After a forward in a scope: have a backward look as soon as it comes through ``output``."""
    ref = weakref.ref(unit)

    @untraced
    def look(grad: torch.Tensor) -> None:
        reached = ref()
        if reached is not None and torch.is_grad_enabled():
            watch_conversions(reached)

    for tensor in () if transforms_active() else find_tensors(output)[0]:
        if tensor.requires_grad and tensor.grad_fn is not None:
            hook_for_good(tensor, look)


@untraced
def _check_graph(unit: str, received: Any, given: Any) -> None:
    """After a conversion's backward: it received the gradient ``given``, and made ``received``."""
    if received[0] is None or given[0] is None or not torch.is_grad_enabled():
        return
    if given[0].requires_grad and not received[0].requires_grad:
        raise RuntimeError(_CUT.format(unit))


_CUT = (
    "unit {!r}: create_graph=True wants a graph over the gradient of its input, which is a sum "
    "over tensor parallel ranks that torch makes without a graph (DTensor.from_local), so a "
    "gradient penalty on it would be wrong. Hand the unit its input split over these ranks, by "
    "PrepareModuleInput(input_layouts=(Shard(dim),), desired_input_layouts=(Replicate(),)), or "
    "compute the penalty on a model without tensor parallelism."
)
