"""A unit for whose parameters a backward does not ask is released once backward is past it.

``autograd.grad(loss, x)`` and ``backward(inputs=[x])`` run no ``Gather`` of such a unit, so no
gradients say that its own backward is over. Autograd runs the nodes of one device from the newest
to the oldest: where it comes to a node older than every ``Gather`` of a unit, it is past the unit.
"""

from __future__ import annotations

import torch

from fsdp_compose.base.torch_private import made_at, running_node
from fsdp_compose.core.passes import close_backward
from fsdp_compose.core.state import Task


def release_passed(task: Task, grad: object) -> None:
    """Close the units of ``task.unasked`` that are newer than the node at which ``grad`` is."""
    if not isinstance(grad, torch.Tensor):
        return  # at a node inside of a unit, where a backward began there
    now = made_at(running_node())
    for unit, made in list(task.unasked.items()):
        if unit.run.task is not task:
            del task.unasked[unit]
        elif grad.device == unit.gathered[0].full.device and now < min(
            [made, *map(made_at, tuple(unit.graphs.nodes))]
        ):
            del task.unasked[unit]
            close_backward(unit)
