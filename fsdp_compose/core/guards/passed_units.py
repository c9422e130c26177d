"""A unit to which backward brings no more gradients is released once backward is past it.

``autograd.grad(loss, x)`` and ``backward(inputs=[x])`` run no ``Gather`` of a unit for whose
parameters they do not ask, and where a reentrant checkpoint lies inside the unit's own forward, the
backward of that one runs it. So no gradients say that the unit's backward is over. Autograd runs
the nodes of one device from the newest to the oldest: where it comes to a node older than every
``Gather`` of a unit, it is past the unit.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from fsdp_compose.base.torch_private import made_at, running_node, untraced
from fsdp_compose.core.guards.inner_parts import keep_part, list_packed, take_kept
from fsdp_compose.core.passes import show_leaves_after_backward
from fsdp_compose.core.reducing import Arrival
from fsdp_compose.core.state import Task, Unit, unit_of


def keep_parts(task: Task, unit: Unit, parts: Sequence[Arrival]) -> None:
    """Keep gradients of a unit that ``task`` has opened, from a backward inside ``task``."""
    live, work = unit.run.live, unit.engine.schedule.work
    if live is not None and live.trained and unit not in task.unasked:
        _expect_to_pass(task, unit, live.tensors[live.trained[0]].grad_fn)
    for part in parts:
        if keep_part(task, part):
            continue
        work.pack(part)
        if unit_of(part.bucket).switches.sync:
            task.packed.append(part.bucket)
        else:
            work.postpone(part)


def _expect_to_pass(task: Task, unit: Unit, gather: Any) -> None:
    """Close the unit where ``task`` comes to the first node older than ``gather``, its first one.

    That is at an input of the unit's, before what made it runs.
    """
    entrance, task_ref, unit_ref = task.open[unit], weakref.ref(task), weakref.ref(unit)
    if entrance is None or made_at(entrance) < made_at(gather):
        return  # it was read in a recomputation since

    @untraced
    def before_node(grads: Sequence[torch.Tensor | None]) -> None:
        running, left = task_ref(), unit_ref()
        devices = [grad.device for grad in grads if grad is not None]
        if devices and running is not None and left is not None and left.run.task is running:
            release_passed(running, devices[0])

    task.unasked[unit] = made_at(gather)
    # The first that backward reaches is the outermost, whose inputs are the model's.
    pending, seen = [entrance] if task.units[0] is not unit else [], {None}
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            if made_at(node) < made_at(gather):
                node.register_prehook(before_node)
            else:
                pending += [source for source, _ in node.next_functions]


def release_passed(task: Task, device: torch.device) -> None:
    """Close the units of ``task.unasked`` that are newer than the node that runs.

    What backwards inside ``task`` brought them is reduced, unless more of it is to come.

    Args:
        device: where the node runs; autograd may be behind on others.
    """
    now = made_at(running_node())
    for unit, made in list(task.unasked.items()):
        if unit.run.task is not task:
            del task.unasked[unit]
        elif device == unit.gathered[0].full.device and now < min(
            [made, *map(made_at, tuple(unit.graphs.nodes))]
        ):
            del task.unasked[unit]
            show_leaves_after_backward(unit)
            schedule = unit.engine.schedule
            schedule.receive(unit, take_kept(task, unit), ends_backward=True)
            if packed := list_packed(task, unit):
                schedule.work.reduce(packed)
