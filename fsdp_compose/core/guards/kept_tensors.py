"""A backward that begins at a tensor which was made inside a unit's forward gathers the unit.

Hooks on a unit's outputs and on what its modules keep in attributes do so elsewhere. A tensor that
is kept in a list, closure or global is looked for among all tensors of the process, after the first
forward of a unit. Where one was found, later forwards look among the youngest.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from operator import itemgetter
from sys import getrefcount
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from fsdp_compose.base.torch_private import (
    graph_task_id,
    leaf_hooks,
    made_at,
    next_node_number,
    tensor_use_count,
    untraced,
)
from fsdp_compose.base.tracked import find_tracked
from fsdp_compose.core.guards.collective_log import is_debugging
from fsdp_compose.core.schedule import Hold
from fsdp_compose.core.state import Engine, Unit


def watch_forwards(units: Iterable[Unit]) -> None:
    """After a forward of ``units``: watch the tensors that were made inside it.

    All tensors are looked through after the first forward, in debug mode, and once a backward began
    at such a tensor; those made since the last two collections of garbage where a unit kept any.
    """
    debugging = is_debugging()
    watched, keeping = list[Unit](), list[Unit]()
    for unit in units:
        if debugging or _FIRST not in unit.checks.inspected or KEPT in unit.checks.warned:
            watched.append(unit)
        elif _KEEPS in unit.checks.warned:
            keeping.append(unit)
    if watched:
        watch_inside(watched)
    if keeping:
        watch_inside(keeping, (0, 1))
    for unit in watched:
        unit.checks.inspected.add(_FIRST)


_FIRST = (-1,)
_KEEPS = "keeps"
"""In ``Checks.warned``: a forward left a tensor outside attributes; backwards may begin there."""
KEPT = "kept"
"""In ``Checks.warned``: a backward began at a tensor that its forward left outside attributes."""


def watch_inside(units: Iterable[Unit], generations: Sequence[int] = ()) -> None:
    """Gather units where a backward begins at a tensor that was made inside their last forward.

    Args:
        generations: of garbage; only what somebody keeps among those is looked at.
    """
    spans = [
        # A backward that begins at an input of a frozen unit, bound then, needs no weight of it.
        (max(start, live.joined_at, unit.checks.bound_at + 1), live.closed_at, unit)
        for unit in units
        if (live := unit.run.live) is not None and (start := opened_at(unit)) >= 0
    ]
    now = next_node_number()
    spans += [
        (standing.joined_at, now, unit)
        for unit in units
        if (standing := unit.links.standing) and standing.pass_id == unit.engine.pass_id
    ]
    spans = sorted((s for s in spans if s[0] < s[1]), key=itemgetter(0), reverse=True)
    if not spans:
        return
    weights: set[int] = set()
    if generations:
        tensors = [v for g in generations for v in gc.get_objects(g) if type(v) is Tensor]
    else:
        tensors = find_tracked(Tensor)
    counts = list(map(getrefcount, tensors))
    made = {i: made_at(node) for i, t in enumerate(tensors) if (node := _node_of(t)) is not None}
    running: list[tuple[int, int, Unit]] = []
    for index in sorted(made, key=made.__getitem__):
        value, count = tensors[index], counts[index]
        while spans and spans[-1][0] <= made[index]:
            running.append(spans.pop())
        running = [span for span in running if made[index] <= span[1]]
        inside = [unit for _, _, unit in running]
        if not inside:
            continue
        is_seen = count - count_beside(value) > 1  # others are in a graph alone
        weights = weights or _list_read(inside[0].engine)
        is_kept = is_seen and id(value) not in weights
        if generations and not is_kept:
            continue
        hooks = (leaf_hooks(value)[0] or {}).values()
        for unit in inside:
            if unit.checks.trigger is not None and unit.checks.trigger not in hooks:
                value.register_hook(_begin_inside(unit))
                if is_kept:
                    unit.checks.warned.add(_KEEPS)


def _list_read(engine: Engine) -> set[int]:
    """The gathered weights, by id, that forwards read, which are made inside a forward too."""
    kept = [kept for unit in engine.units for kept in (unit.run.live, unit.links.standing)]
    return {id(tensor) for each in kept if each is not None for tensor in each.tensors}


def _begin_inside(unit: Unit) -> Callable[[Tensor], None]:
    """Make the tensor hook that gathers the unit where a backward begins at the tensor."""
    ref = weakref.ref(unit)

    @untraced
    def begin(grad: Tensor) -> None:
        reached = ref()
        if reached is None or reached.checks.trigger is None or _is_foreign(reached.engine):
            return
        task = reached.engine.tasks.get(graph_task_id())
        if task is None or reached not in task.reached:
            # A backward over a backward, or one inside the unit's own, comes through saved tensors.
            is_open = not reached.holds.isdisjoint(_OPEN)
            if not is_open and KEPT not in reached.checks.warned:
                reached.checks.warned.add(KEPT)
                _logger.warning(_SLOW, reached.name)
            reached.checks.trigger(grad)

    return begin


_OPEN = frozenset((Hold.RETAINED, Hold.BACKWARD))


def _node_of(value: Tensor) -> Any:
    """The autograd node that made a tensor, if there is one that torch lets us see."""
    try:
        return value.grad_fn
    except RuntimeError:  # a view whose base was written since: no backward can begin at it
        return None


def _is_foreign(engine: Engine) -> bool:
    """Whether the backward under way is of another model, which another thread trains.

    Autograd numbers the nodes of each thread from 0, so a tensor of that thread may look as if it
    had been made inside a forward of this engine. On a CPU backward runs in its caller's thread.
    """
    return engine.streams.device.type == "cpu" and engine.thread != get_ident()


_logger = logging.getLogger("fsdp_compose")
_SLOW = (
    "a backward began at a tensor that a forward of unit %r kept outside the attributes of its "
    "modules. From now on all tensors of the process are looked through after each forward of the "
    "unit, which takes time. Keep the tensor in an attribute (self.kept = tensor), or return it."
)


def count_beside(tensor: Tensor) -> int:
    """What ``getrefcount`` counts of a tensor in a list beside the references of lists.

    Some versions of torch count all its users in C++ and in graphs as one more.
    """
    return _beside()[tensor_use_count(tensor) > 1]


@cache
def _beside() -> tuple[int, int]:
    """(while only Python holds it, while a graph does too): measured, as each version counts."""
    with torch.inference_mode(False), torch.enable_grad():
        tensors = [torch.ones(1, device="cpu", requires_grad=True)]
        alone = next(map(getrefcount, tensors)) - 1
        tensors.append(tensors[0].sum())  # saves nothing, which hooks of a checkpoint would count
    return alone, next(map(getrefcount, tensors)) - 1


def opened_at(unit: Unit) -> int:
    """When the first node of the unit's last forward was made, as in ``made_at``; -1: none was."""
    for tensor in unit.run.live.tensors if unit.run.live is not None else ():
        if tensor.grad_fn is not None:
            return made_at(tensor.grad_fn)
    return unit.checks.bound_at
