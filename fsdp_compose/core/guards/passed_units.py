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


def release_passed(task: Task, grad: torch.Tensor) -> None:
    """Close the units of ``task.unasked`` that are newer than the node at which ``grad`` is."""
    now = made_at(running_node())
    for unit in list(task.unasked):
        if unit.run.task is not task:
            task.unasked.remove(unit)  # its gradients came: a checkpoint had made newer nodes
        elif grad.device == unit.gathered[0].full.device and now < min(
            map(made_at, tuple(unit.graphs.nodes)), default=-1
        ):
            task.unasked.remove(unit)
            close_backward(unit)
