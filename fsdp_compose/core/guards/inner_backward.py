"""A unit is gathered when backward reaches it: by its outputs, or by a tensor inside it.

A backward may start in the middle of a unit, at a tensor that a forward hook on one of its
submodules kept (feature extraction, attribution of single neurons), or that its forward left in an
attribute or a list. It then never reaches the unit's outputs. So three kinds of tensors get the
hook that the outputs have: the inputs and outputs of submodules that have hooks, what is found in
attributes, and, until a backward has come through the outputs, every node of the forward's graph.
kept_tensors.py looks for tensors that were kept and do not lead to the outputs.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from fsdp_compose.base.process import here
from fsdp_compose.base.torch_private import (
    forward_hook_tables,
    forward_level,
    gradient_hooks,
    graph_task_id,
    hook_for_good,
    made_at,
    next_node_number,
    remove_forward_hooks,
    running_node,
    transforms_active,
    untraced,
)
from fsdp_compose.base.tree import find_tensors
from fsdp_compose.core.autograd import DELETED
from fsdp_compose.core.guards.added_parameters import list_managed
from fsdp_compose.core.guards.cut_graphs import watch_conversions
from fsdp_compose.core.guards.gathered_memory import lies_in
from fsdp_compose.core.guards.kept_tensors import opened_at
from fsdp_compose.core.guards.moved_parameters import moved_before_backward
from fsdp_compose.core.guards.passed_units import release_passed
from fsdp_compose.core.guards.surroundings import check_noted
from fsdp_compose.core.guards.weight_versions import read_versions
from fsdp_compose.core.passes import open_backward, retain, running_task
from fsdp_compose.core.records import Live
from fsdp_compose.core.schedule import Backward
from fsdp_compose.core.state import Unit, as_read


def trigger_of(unit: Unit) -> Callable[[torch.Tensor], None]:
    """Make the tensor hook that gathers the unit when backward reaches it."""
    if unit.checks.trigger is None:
        ref, epoch = weakref.ref(unit), unit.checks.epoch

        @untraced
        def trigger(grad: torch.Tensor) -> None:
            reached = ref()
            if reached is None:
                raise RuntimeError(DELETED)
            checks = reached.checks
            if checks.epoch != epoch:
                raise RuntimeError(moved_before_backward(reached.gathered[0]))
            if checks.surroundings is not None:
                check_noted(reached)
            task = running_task(reached)
            task.reached.add(reached)
            if checks.entrance == "unknown":
                checks.entrance = "outputs"
            if task.unasked and isinstance(grad, torch.Tensor):  # not at a node inside of it
                release_passed(task, grad.device)
            if reached.run.task is task and reached.engine.reductions:
                finish_before_earlier_call(reached)
            open_backward(reached, task)
            if reached.links.dtensors and torch.is_grad_enabled():
                watch_conversions(reached)

        unit.checks.trigger = trigger
    return unit.checks.trigger


def finish_before_earlier_call(unit: Unit) -> None:
    """Finish reductions under way where the unit's backward goes on to an earlier call of it.

    They had the backward of the last call to come to an end; what follows may be as long as the
    calls are many, and holds their buffers until then.
    """
    live = unit.run.live
    if live is not None and made_at(running_node()) < live.joined_at:
        unit.engine.schedule.work.finish_reductions()


def watch_hooked(unit: Unit) -> None:
    """Watch the inputs and outputs of submodules that have forward hooks, from now on."""
    roots = {id(ref()) for ref in unit.modules}
    for _, module in list_managed(unit):
        if id(module) in roots:
            continue
        before, after = forward_hook_tables(module)
        if any(map(_may_keep, before.values())) and watch_taken not in before.values():
            module.register_forward_pre_hook(watch_taken, prepend=True)
        if any(map(_may_keep, after.values())) and watch_given not in after.values():
            module.register_forward_hook(watch_given, prepend=True)


def _may_keep(hook: Any) -> bool:
    """Whether a hook may keep tensors; tensor parallelism's do not, and compile into one graph."""
    return not str(getattr(hook, "__module__", "")).startswith("torch.distributed.tensor.")


def unwatch(module: nn.Module) -> None:
    """Remove what ``watch_hooked`` registered on ``module`` and its submodules."""
    for submodule in module.modules():
        remove_forward_hooks(submodule, watch_taken, watch_given)


@untraced
def watch_taken(module: nn.Module, args: Any) -> None:
    """Forward pre-hook: watch the inputs of a submodule that has hooks."""
    _watch(args)


@untraced
def watch_given(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook: watch the outputs of a submodule that has hooks."""
    _watch(output)


def _watch(values: Any) -> None:
    """Watch the tensors in ``values`` for all units whose forwards are under way.

    Under a transform of ``torch.func`` units compute on buffers that live as long as its graph.
    """
    if not torch.is_grad_enabled() or transforms_active():
        return
    for engine in here.engines.values():
        _watch_tensors(engine.schedule.active, find_tensors(values)[0])


def _watch_tensors(units: list[Unit], tensors: list[torch.Tensor]) -> None:
    """Let backward gather these units, each inside the one before, when it reaches ``tensors``."""
    for unit in units:
        start = opened_at(unit)
        for tensor in tensors:
            node = tensor.grad_fn
            # An input's gradient is complete after the unit's backward, when it is released again.
            if tensor.requires_grad and node is not None and made_at(node) >= start:
                tensor.register_hook(trigger_of(unit))


def watch_outputs(unit: Unit, output: Any) -> Backward:
    """Hook the outputs; ``"hidden"`` where no hook can tell when the unit's backward begins."""
    tensors, opaque = [output], False
    if output is None:  # forward raised, as the end of a recomputation does
        tensors = []
    elif type(output) is not torch.Tensor or output.__dict__:
        tensors, opaque = find_tensors(output)
    if forward_level() >= 0:  # a backward may come through what it computes beside the outputs
        found = [forward_ad.unpack_dual(tensor).tangent for tensor in tensors]
        tensors = [*tensors, *(tangent for tangent in found if tangent is not None)]
    if not unit.gathered:
        opaque = False  # nothing that would have to stay
    watched, trigger = False, unit.checks.trigger or trigger_of(unit)
    start = opened_at(unit) if len(tensors) > 1 else -1
    for tensor in tensors:
        if tensor.requires_grad and (node := tensor.grad_fn) is not None:
            if start >= 0 and made_at(node) < start:
                continue  # an input passed through: its gradient comes after the unit's backward
            hook_for_good(tensor, trigger)
            if (base := tensor._base) is not None:
                _watch_base(unit, base, trigger)
            watched = True
    if watched and not torch.is_grad_enabled() and graph_task_id() == -1:
        unit.run.live = _list_read(unit)  # for parts of it that backward recomputes
    live, checks = unit.run.live, unit.checks
    if live is not None and torch.is_grad_enabled():
        live.closed_at = next_node_number() - 1
    is_complete = checks.entrance == "outputs" and not checks.keepers
    if watched and not is_complete and graph_task_id() == -1:
        watch_kept(unit, tensors)
    if _read_weights(unit, tensors):
        if live is not None and live.trained and torch.is_grad_enabled() and graph_task_id() == -1:
            retain(unit, *list(unit.graphs.nodes)[-1:])  # the caller's graph reads them each time
        return "hidden"
    if not opaque or not torch.is_grad_enabled():
        return "seen" if watched else "none"
    if "hidden" not in unit.checks.warned:
        unit.checks.warned.add("hidden")
        warnings.warn(
            f"unit {unit.name!r} returned a {type(output).__name__} with something in it that "
            "cannot be looked into and may hold tensors, so nothing tells when its backward "
            "begins, and the unit stays gathered until then. Return tensors in tuples, dicts, "
            "dataclasses or plain objects.",
            stacklevel=2,
        )
    return "hidden"


def _watch_base(unit: Unit, base: torch.Tensor, trigger: Callable[[torch.Tensor], None]) -> None:
    """Hook what an output is a view of: an output that is written in place loses its own hook."""
    node, start = base.grad_fn, opened_at(unit)
    is_inside = node is not None and 0 <= start <= made_at(node)
    if is_inside and trigger not in (gradient_hooks(base) or ()):
        hook_for_good(base, trigger)


def _list_read(unit: Unit) -> Live:
    """What the ending forward, under ``no_grad``, has read; its gradients join no other's."""
    standing = unit.links.standing
    if standing is None:
        standing = Live(unit.links.aliases, 0, (), read_versions(unit))
    with torch.enable_grad():
        return replace(standing, tensors=as_read(unit, standing.tensors), pass_id=0)


def _read_weights(unit: Unit, outputs: list[torch.Tensor]) -> bool:
    """Whether an output is a view of a gathered weight, which must then outlive the forward."""
    for bucket in unit.gathered:
        for output in () if bucket.in_place else outputs:
            if lies_in(bucket, output):
                return True
    return False


def watch_kept(unit: Unit, outputs: list[torch.Tensor]) -> None:
    """Watch tensors that the ending forward left in its modules and, at first, its whole graph."""
    if unit.checks.entrance == "outputs":
        if unit.checks.keepers:
            found = find_tensors([values.get(name) for values, name in unit.checks.keepers])[0]
            _watch_tensors([*unit.engine.schedule.active, unit], found)
        return
    start = opened_at(unit)
    if start < 0:
        return
    keepers: list[tuple[dict[str, Any], str]] = []
    kept: list[torch.Tensor] = []
    for _, module in list_managed(unit):
        for name, value in vars(module).items():
            if name not in _OWN and isinstance(value, torch.Tensor | list | tuple | dict):
                mine = [t for t in find_tensors(value)[0] if _is_made_since(start, t)]
                if mine:
                    keepers.append((vars(module), name))
                    kept += mine
    unit.checks.keepers = tuple(keepers)
    _watch_tensors([*unit.engine.schedule.active, unit], kept)
    _watch_graph(unit, [*outputs, *kept], start)


_OWN = frozenset(vars(nn.Module()))


def _is_made_since(start: int, tensor: torch.Tensor) -> bool:
    """Whether the tensor's autograd node is not older than ``start``."""
    return tensor.grad_fn is not None and made_at(tensor.grad_fn) >= start


def _watch_graph(unit: Unit, tensors: list[torch.Tensor], start: int) -> None:
    """Gather the unit before any node of its forward runs, in a backward that came another way."""
    ref = weakref.ref(unit)

    @untraced
    def before_node(grads: Any) -> None:
        reached = ref()
        if reached is None:
            return
        task = reached.engine.tasks.get(graph_task_id())
        if task is None or reached not in task.reached:
            reached.checks.entrance = "inside"
            trigger_of(reached)(grads)

    pending: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen or not node.next_functions or made_at(node) <= start:
            continue
        seen.add(node)
        node.register_prehook(before_node)
        pending += [source for source, _ in node.next_functions]
