"""Gradients of which one backward brings two parts: hooks of a parameter get their sum, once.

One part is the unit's, which the engine reduces and sets. Another comes to the leaf itself, and
autograd accumulates it, where the loss reads the parameter outside of its unit's forward, as a
penalty on weights does. Of a parameter with hooks the part that is there first is held until the
other comes, or, if that never does, until the backward ends. Post-reduce hooks of a unit wait too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compose.base.torch_private import graph_task_id, node_will_run, raw, will_accumulate
from fsdp_compose.buckets.bucket import Bucket, Entry
from fsdp_compose.buckets.entries import find_entry
from fsdp_compose.core.guards.scope_parameters import at_rest
from fsdp_compose.core.state import Engine, Task, Unit, owner_of, unit_of
from fsdp_compose.sharded import run_hooks_and_copy, tag


def is_awaited(unit: Unit, bucket: Bucket, node: Any) -> bool:
    """Whether this backward brings more gradients of the bucket, to be reduced with these."""
    # More may follow in a compiled graph, or in a backward inside another.
    return node is None or len(unit.engine.tasks) > 1 or brings_more(unit, bucket)


def brings_more(unit: Unit, bucket: Bucket) -> bool:
    """Whether the backward under way will bring gradients of the bucket from forwards."""
    users = unit, *bucket.users.borrowers
    nodes = [node for user in users for node in user.graphs.nodes]
    standing = [live for user in users if (live := user.links.standing) is not None]
    nodes += [live.tensors[live.trained[0]].grad_fn for live in standing]
    return any(map(_is_expected, nodes))


def _is_expected(node: Any) -> bool:
    """Whether this backward will still run ``node``."""
    return node.received_in != graph_task_id() and node_will_run(node)


def meet_unit(func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor | None:
    """The gradient that hooks of a leaf are to get, where ``args`` are the leaf and its part of it.

    None: the part waits for that of the unit. Handler of ``ShardSpec.answers``.
    """
    leaf, grad = args
    entry = find_entry(leaf)
    hooks, bucket = entry.spec.hooks, owner_of(entry)
    unit = unit_of(bucket)
    if hooks.held is not None:
        with raw():
            total = tag((hooks.held + grad).to(grad.dtype), entry.spec)
        hooks.held = None
        return total
    if not _is_under_way(unit, entry):
        return grad
    _hold(unit.engine, entry, grad)
    return None


def _is_under_way(unit: Unit, entry: Entry) -> bool:
    """Whether this backward brings a gradient from the unit's forward that was not set yet."""
    engine, bucket = unit.engine, owner_of(entry)
    if engine.tasks.keys() - {graph_task_id()}:  # the gradient of a backward inside another
        return False
    if torch.is_grad_enabled():  # with a graph, it is set as the backward ends
        return any(entry in task.results for task in engine.tasks.values()) or brings_more(
            unit, bucket
        )
    if not unit.switches.sync:
        return False
    if any(_is_compiled(user) for user in (unit, *bucket.users.borrowers)):
        return True
    begun = [*engine.reductions, *(landing.reduction for landing in engine.landing)]
    is_begun = bucket.arriving.packed or any(reduction.bucket is bucket for reduction in begun)
    return bool(engine.tasks and is_begun) or brings_more(unit, bucket)


def _is_compiled(unit: Unit) -> bool:
    """Whether a compiled graph over the unit is a part of this backward."""
    return unit.traced is not None and will_accumulate(unit.traced.anchor)


def meet_leaves(
    unit: Unit, entries: list[Entry], grads: Sequence[Tensor]
) -> tuple[list[Entry], list[nn.Parameter], list[Tensor]]:
    """Run hooks on reduced gradients, and on what is held beside them.

    Returns what is to be added to ``.grad`` now, with entries and parameters: not what waits for a
    part at its leaf.
    """
    task = graph_task_id()
    may_wait = [*unit.engine.tasks] == [task]
    now: list[Entry] = []
    found: list[Tensor] = []
    for entry, grad in zip(entries, grads, strict=True):
        hooks = entry.spec.hooks
        is_first = task != -1 and hooks.arrived_in != task and (hooks.gradient or hooks.accumulated)
        if may_wait and is_first and will_accumulate(entry.param):
            _hold(unit.engine, entry, grad.clone())  # optimizers may have its memory
            continue
        held, hooks.held = hooks.held, None
        total = grad if held is None else (grad + held).to(grad.dtype)
        now.append(entry)
        found.append(run_hooks_and_copy(hooks, tag(total, entry.spec)))
    return now, [entry.param for entry in now], found


def _hold(engine: Engine, entry: Entry, grad: Tensor) -> None:
    entry.spec.hooks.held = grad
    engine.held.append(entry)


def add_held(engine: Engine, task: Task) -> dict[Entry, Tensor]:
    """The gradients to set as ``task`` ends: those with a graph, plus what is held.

    What is held is set as the outermost backward ends, alone where the other part did not come.
    Post-reduce hooks are told of gradients with a graph after that.
    """
    total = dict(task.results)
    if not engine.tasks:
        held = {entry: entry.spec.hooks.held for entry in engine.held}
        forget_held(engine)
        with raw():
            for entry, grad in held.items():
                if grad is not None:
                    known = total.get(entry)
                    total[entry] = grad if known is None else (known + grad).to(known.dtype)
    set_now: dict[Bucket, list[Entry]] = {}
    for entry in task.results:
        set_now.setdefault(owner_of(entry), []).append(entry)
    task.late += [(unit_of(bucket), entries) for bucket, entries in set_now.items()]
    return total


def tell_reduced(unit: Unit, entries: list[Entry]) -> None:
    """Call the unit's post-reduce hooks.

    The backward calls them as it ends where it also brings a part of a gradient to its leaf.
    """
    task = unit.engine.tasks.get(graph_task_id())
    with raw():
        if task is not None and any(will_accumulate(entry.param) for entry in entries):
            task.late.append((unit, entries))
            return
    for hook in tuple(unit.post_reduce_hooks.values()):
        with at_rest(entries):
            hook(unit.modules[0](), [entry.held for entry in entries])


def tell_late(task: Task) -> None:
    """Call the post-reduce hooks that waited for the end of the backward."""
    late, task.late = task.late, []
    for unit, entries in late:
        tell_reduced(unit, entries)


def forget_held(engine: Engine) -> None:
    """Drop what a backward that failed has held."""
    for entry in engine.held:
        entry.spec.hooks.held = None
    engine.held.clear()
