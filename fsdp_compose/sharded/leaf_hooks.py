"""A sharded parameter's hooks: run once for each gradient, when it is reduced and whole."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fsdp_compose.base.torch_private import (
    enable_torch_function,
    graph_task_id,
    raw,
    set_leaf_hooks,
)
from fsdp_compose.sharded.kept_grad import stop_keeping
from fsdp_compose.sharded.spec import Handler, Hooks, ShardSpec


class DeferredHook:
    """A post-accumulate hook, in the table that autograd reads.

    The engine calls ``deliver`` once it has set the reduced gradient. Autograd, which got None as
    the gradient, has called the hook before, and that call does nothing. Only where autograd
    accumulates a gradient itself (``create_graph``) does its own call run the hook.
    """

    def __init__(self, hook: Callable[[Any], None], hooks: Hooks) -> None:
        self.hook, self.hooks = hook, hooks

    def __call__(self, param: Any) -> None:
        if self.hooks.is_arriving:
            self.deliver(param)

    def deliver(self, param: Any) -> None:
        with enable_torch_function():  # a backward pass may run in a raw scope
            self.hook(param)


def run_gradient_hooks(hooks: Hooks, grad: Tensor) -> Tensor:
    """Apply the hooks that a user registered on a parameter to its sharded gradient."""
    for hook in tuple((hooks.gradient or {}).values()):
        changed = hook(grad)
        if changed is not None:
            grad = changed
    return grad


def run_hooks_and_copy(hooks: Hooks, grad: Tensor) -> Tensor:
    """What the hooks make of ``grad``, to be added to later: they may keep what they are given.

    Autograd, too, copies a gradient that is held elsewhere before it sets it.
    """
    return run_gradient_hooks(hooks, grad).clone() if hooks.gradient else grad


def listen(param: Tensor, spec: ShardSpec) -> None:
    """Let autograd call a leaf's hooks for gradients that it accumulates or returns itself."""
    spec.residence.is_hooked = True
    _watch_arrivals(param, spec.hooks, spec.answers.get(run_gradient_hooks))


def refuse_arrivals(param: Tensor, hooks: Hooks, refusal: Callable[[], str]) -> None:
    """Raise what ``refusal`` says where autograd is about to accumulate a gradient itself."""
    hooks.refusal = refusal
    _watch_arrivals(param, hooks)


def _watch_arrivals(param: Tensor, hooks: Hooks, meet_unit: Handler | None = None) -> None:
    """Have autograd tell of gradients that it accumulates, which may wait for the unit's part."""
    leaf = weakref.ref(param)

    def on_arrival(grad: Tensor | None) -> Tensor | None:
        hooks.is_arriving, hooks.arrived_in = grad is not None, graph_task_id()
        if grad is None or hooks.is_summed:
            return None
        if hooks.refusal is not None:
            raise RuntimeError(hooks.refusal())
        if meet_unit is not None and leaf() is not None:
            part, grad = grad, meet_unit(run_gradient_hooks, (leaf(), grad), {})
            if grad is None:
                hooks.is_arriving = False
                return torch.zeros_like(part)
        return run_gradient_hooks(hooks, grad)

    stop_keeping(param)
    hooks.gradient = OrderedDict() if hooks.gradient is None else hooks.gradient
    hooks.accumulated = OrderedDict() if hooks.accumulated is None else hooks.accumulated
    with raw():
        set_leaf_hooks(param, {0: on_arrival}, hooks.accumulated)


def give_back_hooks(spec: ShardSpec) -> Hooks:
    """Return the hooks' tables, with the hooks as their owners registered them."""
    hooks = spec.hooks
    if hooks.gradient:
        hooks.gradient.update({key: hook.__wrapped__ for key, hook in hooks.gradient.items()})
    if hooks.accumulated:
        hooks.accumulated.update({key: hook.hook for key, hook in hooks.accumulated.items()})
    return hooks


def add_hook(hooks: OrderedDict[int, Any] | None, hook: Callable[..., Any]) -> RemovableHandle:
    assert hooks is not None, "call listen first"
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
