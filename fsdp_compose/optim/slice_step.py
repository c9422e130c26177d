"""Steps of torch's elementwise optimizers run on the slices themselves, as on plain tensors.

Sharded parameters, gradients and state tell torch what they are in every call, which costs more
than a small update. An optimizer that treats every element alike computes the same on the plain
slices. So the last hook before its step takes the step itself, inside a scope in which slices are
plain tensors, and torch is left a step over nothing. Every hook has had its turn by then, and the
scope ends where it began, also when the step raises. A step tells the next one which state goes
into which of torch's lists (``step_plan``), so that nothing is looked up again.

Optimizers that look at shapes or norms, subclasses with a step of their own, differentiable steps
and state that is not cut as its parameter is are left to torch, whose calls are checked one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain, repeat
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fsdp_compose.base.loops import exhaust, parameters_of
from fsdp_compose.base.strides import flatten
from fsdp_compose.base.torch_private import (
    NO_CAPTURE_WARNING,
    raw,
    set_class,
    step_function,
    untraced,
)
from fsdp_compose.base.torch_stack import below_dispatch, count_modes
from fsdp_compose.optim.state_cut import check_plain_steps, check_state
from fsdp_compose.optim.step_plan import Recorder, StepPlan, list_inputs
from fsdp_compose.sharded import (
    SHARDED_PARAMETERS,
    ShardedParameter,
    ShardedTensor,
    ShardSpec,
    part_of,
    tag,
)

Hooked: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"

_TAKEN = SHARDED_PARAMETERS | {Tensor, nn.Parameter}
_ELEMENTWISE: dict[Callable[..., Any], type[Optimizer]] = {
    step_function(kind): kind
    for kind in (
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    )
}
"""Optimizers whose element k depends on elements k of what they are given, by their step."""

_hooks: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()
_plans: WeakKeyDictionary[Optimizer, StepPlan] = WeakKeyDictionary()


def hook_slice_step(optimizer: Optimizer) -> None:
    """Let the step that begins now run on slices, once the optimizer's own hooks have been called.

    Those run after the hooks that all optimizers share, from one of which this is called. One over
    plain tensors takes its own step.
    """
    unhook_slice_step(optimizer)
    if _find_kind(optimizer) is None:
        return
    params = parameters_of(optimizer)
    if SHARDED_PARAMETERS.isdisjoint(map(type, params)):
        check_plain_steps(optimizer)
    else:
        _hooks[optimizer] = optimizer.register_step_pre_hook(_step_slices)


def unhook_slice_step(optimizer: Optimizer) -> None:
    """Remove the hook of a step: that of the next step must come after hooks added until then."""
    hook = _hooks.pop(optimizer, None)
    if hook is not None:
        hook.remove()


def _find_kind(optimizer: Optimizer) -> type[Optimizer] | None:
    """The class of torch's whose step the optimizer takes; None where somebody changed it."""
    if "_init_group" in vars(optimizer):
        return None
    for own in type(optimizer).__mro__:
        if own.__module__.startswith("torch.optim."):
            break
        if "_init_group" in vars(own):
            return None
    return _ELEMENTWISE.get(step_function(type(optimizer)))


@untraced
def _step_slices(optimizer: Optimizer, args: Any, kwargs: Any) -> Hooked | None:
    """Take the step on the slices, and leave torch one over nothing that returns the same loss."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    again = () if closure is None else (lambda: loss,)
    kind = _find_kind(optimizer)
    assert kind is not None
    params = parameters_of(optimizer)
    if not _take_step(optimizer, params):
        return (optimizer, *again), {}
    return (_make_empty(kind, optimizer), *again), {}


def _take_step(optimizer: Optimizer, params: list[Any]) -> bool:
    """Take the step by the plan that an earlier one left, or as torch does; False if it cannot."""
    found = list_inputs(optimizer, params)
    plan = _plans.get(optimizer)
    if plan is not None and plan.fits(optimizer, found):
        state = plan.pick_state(found.values)
        _step(optimizer, params, found.grads, state, plan.fill(found))
        return True
    _plans.pop(optimizer, None)
    cut_first_state(optimizer)
    known = _list_state(optimizer) if _is_elementwise(optimizer, params) else None
    if known is None:
        check_state(optimizer)
        return False
    sharded = [param for param in params if type(param) is ShardedParameter]
    recorder = Recorder(optimizer)
    try:
        _step(optimizer, sharded, found.grads, known, recorder.init_group)
    finally:
        is_new = _count_state(optimizer) != len(found.values)
        if is_new:
            _tag_state(optimizer)
    plan = None if is_new else recorder.plan(found)
    if plan is not None:
        _plans[optimizer] = plan
    return True


def _make_empty(kind: type[Optimizer], optimizer: Optimizer) -> Optimizer:
    """An optimizer of torch's class ``kind`` without parameters, whose step does nothing."""
    empty: Optimizer = object.__new__(kind)
    empty.__dict__.update(optimizer.__dict__, param_groups=[], **NO_CAPTURE_WARNING)
    return empty


def _is_elementwise(optimizer: Optimizer, params: list[Any]) -> bool:
    """Whether the step computes on plain slices what it computes on sharded parameters."""
    kinds = set(map(type, params))
    if not kinds <= _TAKEN or kinds.isdisjoint(SHARDED_PARAMETERS):
        return False
    groups = (optimizer.defaults, *optimizer.param_groups)
    return not any(group.get("differentiable") for group in groups)


def cut_first_state(optimizer: Optimizer) -> None:
    """Cut state of whole parameters that was made before ``fully_shard``, if no step used it.

    Adagrad makes some when it is built, the same on every rank.
    """
    if _find_kind(optimizer) is None:
        return
    param: Any
    for param, values in optimizer.state.items():
        if type(param) not in SHARDED_PARAMETERS:
            continue
        spec = param._shard_spec
        found = {key: _find_part(value, spec) for key, value in values.items() if key != "step"}
        parts = {key: part for key, part in found.items() if part is not None}
        if parts and float(values.get("step", 1)) == 0:
            for key, part in parts.items():
                flat = flatten(part, spec.stride)
                values[key] = tag(flat[spec.start : spec.stop].clone(), spec)


def _find_part(value: Any, spec: ShardSpec) -> Tensor | None:
    """What ``spec`` says how to cut, where ``value`` is like the parameter before it was sharded.

    That is all of it, or what tensor parallelism left of it.
    """
    if type(value) is DTensor and spec.parallel is not None and spec.is_dtensor:
        known = spec.parallel.dtensor
        is_alike = value.device_mesh == known.mesh and value.placements == known.placements
        return part_of(value) if is_alike else None
    is_alike = type(value) is Tensor and value.shape == spec.shape
    return value if is_alike and not spec.reads_whole else None


def _list_state(optimizer: Optimizer) -> list[Tensor] | None:
    """The sharded tensors of the state; None unless each is cut as its parameter is."""
    found: list[Tensor] = []
    param: Any
    for param, values in optimizer.state.items():
        spec = param._shard_spec if type(param) in SHARDED_PARAMETERS else None
        for value in values.values():
            if type(value) is ShardedTensor:
                if value._shard_spec is not spec and not _is_cut_alike(value._shard_spec, spec):
                    return None
                found.append(value)
            elif type(value) is Tensor:
                if value.ndim and spec is not None:
                    return None
            elif value is None or isinstance(value, Tensor):
                return None
    return found


def _is_cut_alike(one: ShardSpec, other: ShardSpec | None) -> bool:
    return other is not None and one.key == other.key


def _step(
    optimizer: Optimizer,
    params: list[Any],
    grads: list[Tensor | None],
    state: Sequence[Any],
    init_group: Callable[..., Any],
) -> None:
    """Take the step with every sharded tensor's class changed to the plain one, and back after it.

    In the scope all act as plain tensors anyway, but reading ``grad`` runs Python, and kernels take
    longer to recognise another class. DTensors, whose class has other slots, keep theirs.

    Args:
        params: the sharded ones.
        state: its sharded tensors.
        init_group: called in the place of torch's.
    """
    tagged = [grad for grad in grads if type(grad) is ShardedTensor]
    is_watched = count_modes() > 0  # then operators ask parameters' classes, which must stay
    if is_watched:
        params = []
    with raw(), nullcontext() if is_watched else below_dispatch():
        try:
            optimizer.__dict__["_init_group"] = init_group
            _set_classes(params, nn.Parameter)
            _set_classes(tagged, Tensor)
            _set_classes(state, Tensor)
            step_function(type(optimizer))(optimizer)
        finally:
            _count_writes(optimizer, is_watched)
            _set_classes(params, ShardedParameter)
            _set_classes(tagged, ShardedTensor)
            _set_classes(state, ShardedTensor)
            del optimizer.__dict__["_init_group"]


def _set_classes(tensors: Sequence[Any], kind: type) -> None:
    exhaust(map(set_class, tensors, repeat(kind)))


def _count_state(optimizer: Optimizer) -> int:
    """How many values the state has; torch's optimizers never put another tensor in one's place."""
    return sum(map(len, optimizer.state.values()))


def _tag_state(optimizer: Optimizer) -> None:
    """Tag the state that a step made of slices as sharded, except numbers of shape ()."""
    param: Any
    for param, values in optimizer.state.items():
        if type(param) in SHARDED_PARAMETERS:
            for value in values.values():
                if type(value) is Tensor and value.ndim:
                    tag(value, param._shard_spec)


def _count_writes(optimizer: Optimizer, is_watched: bool) -> None:
    """Count what torch does not, as what is kept gathered goes by the count.

    That is what fused kernels write and, in a dispatch mode, functions over lists.
    """
    groups = optimizer.param_groups
    uncounted = [group["params"] for group in groups if is_watched or group.get("fused")]
    if uncounted:
        increment_version([p for p in chain.from_iterable(uncounted) if p.grad is not None])
