"""A backward that begins at a tensor which was made inside a unit's forward gathers the unit.

Hooks on a unit's outputs and on what its modules keep in attributes do so elsewhere. A tensor that
is kept in a list, closure or global is looked for among all tensors of the process.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any

from torch import Tensor

from fsdp_compose.base.torch_private import (
    graph_task_id,
    leaf_hooks,
    made_at,
    next_node_number,
    untraced,
)
from fsdp_compose.core.guards.collective_log import is_debugging
from fsdp_compose.core.schedule import Hold
from fsdp_compose.core.state import Engine, Unit


def watch_forwards(units: Iterable[Unit]) -> None:
    """After a forward of ``units``: watch the tensors that were made inside it.

    This is done after the first forward, in debug mode, and once a backward began at such a tensor.
    """
    debugging = is_debugging()
    watched = [
        unit
        for unit in units
        if debugging or _FIRST not in unit.checks.inspected or KEPT in unit.checks.warned
    ]
    if watched:
        watch_inside(watched)
    for unit in watched:
        unit.checks.inspected.add(_FIRST)


_FIRST = (-1,)
KEPT = "kept"
"""In ``Checks.warned``: a backward began at a tensor that its forward left outside attributes."""


def watch_inside(units: Iterable[Unit]) -> None:
    """Gather units where a backward begins at a tensor that was made inside their last forward."""
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
    spans = [span for span in spans if span[0] < span[1]]
    for value in gc.get_objects() if spans else ():
        node = _node_of(value)
        if node is None:
            continue
        made = made_at(node)
        for start, end, unit in spans:
            hooks = (leaf_hooks(value)[0] or {}).values()
            if (
                start <= made <= end
                and unit.checks.trigger is not None
                and unit.checks.trigger not in hooks
            ):
                value.register_hook(_begin_inside(unit))


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


def _node_of(value: object) -> Any:
    """The autograd node that made a plain tensor, if there is one that torch lets us see."""
    if type(value) is not Tensor:
        return None
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


def opened_at(unit: Unit) -> int:
    """When the first node of the unit's last forward was made, as in ``made_at``; -1: none was."""
    for tensor in unit.run.live.tensors if unit.run.live is not None else ():
        if tensor.grad_fn is not None:
            return made_at(tensor.grad_fn)
    return unit.checks.bound_at
