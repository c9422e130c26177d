"""What a module's forward triggers: plain functions that find their state through the module.

Nothing is captured, so a deep copy of a module drives its own state, and hooks keep no module
alive. The hook on a unit's outputs refers to the unit weakly: a tensor may outlive the model.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from fsdp_compose.base.policy import FullPrecision
from fsdp_compose.base.torch_private import (
    graph_task_id,
    made_at,
    outside_transforms,
    remove_forward_hooks,
    transforms_active,
    untraced,
    untraced_itself,
)
from fsdp_compose.base.tree import find_tensors, map_tensors
from fsdp_compose.core.autograd import (
    Boundary,
    is_current,
    trained_entries,
    view_parameters,
)
from fsdp_compose.core.bucket import dress
from fsdp_compose.core.gathering import (
    admit,
    drop,
    hold,
    install,
    install_leaves,
    keep,
    lies_in,
    refresh_stale,
    spread_inner,
    wait_gathered,
)
from fsdp_compose.core.guards.added_parameters import check_additions, check_copy
from fsdp_compose.core.guards.callers import allow_script, check_caller, is_foreign, refuse_script
from fsdp_compose.core.guards.forward_writes import (
    check_scope_is_current,
    find_lost_copies,
    find_writes,
    forget_written,
    note_copies,
    raise_lost,
)
from fsdp_compose.core.guards.functional_calls import (
    StandIns,
    close_stand_ins,
    find_stand_ins,
    open_stand_ins,
)
from fsdp_compose.core.guards.inner_backward import (
    opened_at,
    trigger_of,
    unwatch,
    watch_hooked,
    watch_kept,
)
from fsdp_compose.core.guards.saved_tensors import shield_weights, unshield
from fsdp_compose.core.guards.surroundings import find_surroundings
from fsdp_compose.core.order import Change, Order
from fsdp_compose.core.passes import (
    begin_forward_pass,
    carry_prefetched,
    drop_prefetched,
    end_step,
    prefetch_forward,
    recover,
    running_task,
    use_carried,
)
from fsdp_compose.core.records import Hold, Live, Opened
from fsdp_compose.core.state import Lane, Unit, get_state

Expected: TypeAlias = Literal["seen", "hidden", "none"]
"""Whether a backward may reach a unit: announced by a hook, unannounced, or not at all."""

attachments: list[tuple[Callable[[nn.Module], None], Callable[[nn.Module], None]]] = []
"""(attach, detach) of the hooks that higher layers put on every unit; filled in the package's
`__init__`."""


def attach(module: nn.Module) -> None:
    """Gather around ``module``'s forward; ``get_state(module)`` must exist."""
    module.register_forward_pre_hook(before_forward, with_kwargs=True, prepend=True)
    module.register_forward_hook(after_forward, always_call=True)
    refuse_script(module)
    for also_attach, _ in attachments:
        also_attach(module)


def detach(module: nn.Module) -> None:
    """Remove what ``attach`` registered, from a copy of the module too."""
    remove_forward_hooks(module, before_forward, after_forward)
    unwatch(module)
    allow_script(module)
    for _, also_detach in attachments:
        also_detach(module)


@untraced
def before_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Gather the unit and let its modules read full parameters."""
    unit = get_state(module).unit
    check_caller(unit)
    if id(module) not in unit.heads:
        check_copy(unit, module)
    opened = unit.opened
    if opened is not None and opened.in_forward:
        if opened.for_call and unit.lane.active[:1] == [unit] and not _is_running(module):
            with outside_transforms():
                recover(unit.lane)  # an interrupt ended a forward without running its hooks
            return before_forward(module, args, kwargs)
        given = {} if opened.calls else find_stand_ins(unit)
        if given:
            return _enter_apart(unit, given, args, kwargs)
        return _enter_opened(unit, opened, args, kwargs)
    stored = unit.mp.full_precision_in_eval and not module.training
    if stored or transforms_active():
        if not unit.calls:
            if unit.task is not None and not unit.task.alive:
                with outside_transforms():
                    recover(unit.lane)  # a backward failed
            settled = unit.task is None and not unit.finished
            given = find_stand_ins(unit) if settled else {}
            return _enter_apart(unit, given, args, kwargs, stored)
        if not stored:
            return _enter_again(unit, args, kwargs)
    recomputing = graph_task_id() != -1
    if unit.calls == 0 and not recomputing:
        admit(unit)
    lane = unit.lane
    if lane.active and lane.active[0] is unit and not _is_running(module):
        recover(lane)  # an interrupt ended a forward without running its hooks
    trained = trained_entries(unit)
    if not lane.active and not recomputing:
        if unit.live is None or not _goes_on(unit, unit.live, lane, trained):
            begin_forward_pass(lane)
    elif not lane.active:
        lane.pass_id += 1
    if not unit.calls and unit.task is None and not unit.finished:
        given = find_stand_ins(unit)
        if given:
            shown = open_stand_ins(unit, given)
            if shown is not None:
                return _enter_shown(unit, shown, args, kwargs)
    lane.active.append(unit)
    unit.calls += 1
    if unit.calls == 1 and not unit.finished:
        try:
            _open_forward(unit, lane, recomputing, trained)
        except BaseException:
            _abandon_forward(unit, lane)
            raise
        shield_weights(unit)
    dtype = _input_dtype(unit, len(lane.active) == 1)
    is_frozen = not trained and torch.is_grad_enabled()
    if dtype is None and not is_frozen:
        return None
    if dtype is not None:
        args, kwargs = map_tensors(partial(_cast, dtype), (args, kwargs))
    if is_frozen:
        args, kwargs = _bound(unit, (args, kwargs))
    return args, kwargs


@untraced
def after_forward(module: nn.Module, args: Any, output: Any) -> Any:
    """Put the leaves back, release the unit, and see to it that its backward gathers again.

    Runs also when forward raised: non-reentrant checkpointing ends a recomputation so.
    """
    unit = get_state(module).unit
    if is_foreign(unit.lane):
        return None  # it was refused before it opened
    if unit.opened is not None and unit.opened.calls:
        return _leave_opened(unit, unit.opened, output)
    lane = unit.lane
    if unit.calls == 0:
        return None  # the error was raised before this unit opened
    unit.calls -= 1
    if unit.calls and transforms_active():
        lane.active.pop()
        return _cast_output(unit, output)
    while lane.active and lane.active.pop() is not unit:
        pass
    output = _cast_output(unit, output)
    lost = None if unit.calls else find_writes(unit, module.training)
    backward: Expected = _watch_outputs(unit, output) if lost is None else "none"
    unit.finished.add(id(module))
    if unit.calls == 0 and unit.shield is not None:
        unshield(unit)
    if unit.calls == 0 and (len(unit.finished) >= len(unit.modules) or not lane.active):
        unit.finished.clear()
        _close_forward(unit, lane, backward)
    if lost is not None:
        forget_written(unit)
    if not lane.active:
        _end_pass(unit, lane, failed=lost is not None or sys.exc_info()[0] is not None)
    raise_lost(lost)
    return output


def _cast_output(unit: Unit, output: Any) -> Any:
    if unit.mp.output_dtype is None:
        return output
    return map_tensors(partial(_cast, unit.mp.output_dtype), output)


@untraced_itself
def call_as_forward(module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``function`` as if it were ``module``'s forward, which must be a unit's."""
    changed = before_forward(module, args, kwargs)
    if changed is not None:
        args, kwargs = changed
    try:
        output = function(*args, **kwargs)
    except BaseException:
        after_forward(module, args, None)
        raise
    return after_forward(module, args, output)


def _enter_opened(unit: Unit, opened: Opened, args: Any, kwargs: Any) -> Any:
    """A forward inside ``gathered``: on the scope's tensors, in the compute dtype."""
    if opened.leaf_versions and not opened.calls:
        check_scope_is_current(unit, opened)
    opened.calls += 1
    if opened.calls == 1:
        pairs = zip(opened.tensors, unit.aliases, strict=True)
        tensors = [tensor.to(alias.dtype) for tensor, alias in pairs]
        note_copies(opened, tensors)
        for index in unit.dressed:
            if tensors[index] is not opened.tensors[index]:
                dress(tensors[index], unit.entries[index])
        install(unit, tensors)
    if opened.stored:
        return None
    dtype = _input_dtype(unit, not unit.lane.active)
    return None if dtype is None else map_tensors(partial(_cast, dtype), (args, kwargs))


def _leave_opened(unit: Unit, opened: Opened, output: Any) -> Any:
    opened.calls -= 1
    lost = find_lost_copies(unit, opened) if opened.calls == 0 else None
    if opened.calls == 0 and opened.for_call:
        _leave_apart(unit, opened)
    elif opened.calls == 0:
        install(unit, opened.tensors)
    raise_lost(lost)
    if opened.stored and isinstance(unit.mp, FullPrecision):
        return output
    return _cast_output(unit, output)


def _enter_apart(unit: Unit, given: StandIns, args: Any, kwargs: Any, stored: bool = False) -> Any:
    """A forward on the caller's tensors or the call's own, which no pass of the unit is for."""
    if graph_task_id() == -1:
        with outside_transforms():
            admit(unit)
    shown = open_stand_ins(unit, given, stored)
    assert shown is not None
    return _enter_shown(unit, shown, args, kwargs)


def _enter_shown(unit: Unit, shown: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
    opened, lane = unit.opened, unit.lane
    assert opened is not None
    note_copies(opened, shown)
    install(unit, shown)
    lane.active.append(unit)
    if not opened.stored:
        _order(lane)  # units inside it that are gathered as always may run without gradients
    dtype = None if opened.stored else _input_dtype(unit, len(lane.active) == 1)
    return None if dtype is None else map_tensors(partial(_cast, dtype), (args, kwargs))


def _leave_apart(unit: Unit, opened: Opened) -> None:
    lane = unit.lane
    install_leaves(unit)
    close_stand_ins(unit)
    while lane.active and lane.active.pop() is not unit:
        pass
    if not lane.active and not transforms_active():
        order = _order(lane)
        if order.is_open:
            _end_pass(unit, lane, failed=sys.exc_info()[0] is not None)
        lane.eval_order = None


def _enter_again(unit: Unit, args: Any, kwargs: Any) -> Any:
    """A call under a transform inside the unit's own forward, on what that reads."""
    unit.calls += 1
    unit.lane.active.append(unit)
    dtype = _input_dtype(unit, False)
    return None if dtype is None else map_tensors(partial(_cast, dtype), (args, kwargs))


def _open_forward(unit: Unit, lane: Lane, recomputing: bool, trained: tuple[int, ...]) -> None:
    standing_in = unit.opened is not None and unit.opened.for_call
    if unit.task is None and not standing_in:
        check_additions(unit)
    if trained and not unit.looked_around:
        find_surroundings(unit)
    if unit.watch is not None and any(unit.watch.hooks):
        watch_hooked(unit)
    if not recomputing or unit.task is None:
        refresh_stale(unit)
    if lane.carried and unit in lane.carried:
        use_carried(unit)
    hold(unit, Hold.FORWARD)
    drop(unit, Hold.PREFETCH)
    wait_gathered(unit)
    live = unit.live
    if trained and live is not None and live.pass_id == lane.pass_id and is_current(unit, live):
        tensors = live.tensors  # a second call in one forward: its gradients join the first's
    else:
        tensors = view_parameters(unit, trained)
    if standing_in:
        assert unit.opened is not None
        given = unit.opened.given
        tensors = [given.get(index, tensor) for index, tensor in enumerate(tensors)]
    install(unit, tensors)
    if recomputing:
        return
    order = _order(lane)
    if len(lane.active) == 1:
        order.begin(unit)
    else:
        _follow(lane, order.visit(unit))
    prefetch_forward(unit, order)


def _goes_on(unit: Unit, live: Live, lane: Lane, trained: tuple[int, ...]) -> bool:
    """Whether an outermost forward continues the one before: the same unit, with none inside it.

    A head that is called on chunks of its input: the gradients of all calls are reduced together.
    """
    order = lane.forward_order
    return (
        live.pass_id == lane.pass_id
        and live.trained == trained != ()
        and len(unit.modules) == 1
        and not lane.tasks
        and bool(order.current)
        and len(order.current[-1]) == 1
    )


def _abandon_forward(unit: Unit, lane: Lane) -> None:
    """The unit could not be opened: as if its forward had not been called."""
    unit.calls -= 1
    lane.active.pop()
    if Hold.FORWARD in unit.holds:
        install_leaves(unit)
        drop(unit, Hold.FORWARD)
    if unit.opened is not None and unit.opened.for_call:
        close_stand_ins(unit)
    if not lane.active:
        lane.eval_order = None


def _close_forward(unit: Unit, lane: Lane, backward: Expected) -> None:
    if graph_task_id() != -1:
        # Recomputed inside a backward that will need it; released when its gradients arrive.
        task = running_task(unit)
        hold(unit, Hold.BACKWARD)
        task.units.append(unit)
        if unit.task is not None and unit.live is not None:
            install(unit, unit.live.tensors)
        else:
            install_leaves(unit)
    else:
        install_leaves(unit)
        kept = unit.switches.keep_after_forward
        if kept is None:
            kept = not lane.active and backward == "seen"
        if backward == "hidden" or (kept and (backward == "seen" or not torch.is_grad_enabled())):
            keep(unit, Hold.KEPT)
        elif backward == "seen":
            spread_inner(unit)
    if unit.opened is not None and unit.opened.for_call:
        close_stand_ins(unit)
    drop(unit, Hold.FORWARD)


def _end_pass(unit: Unit, lane: Lane, failed: bool) -> None:
    if graph_task_id() == -1:
        order = _order(lane)
        change = order.end(complete=not failed)
        if torch.is_grad_enabled():
            _follow(lane, change, unit)
            carry_prefetched(lane)
        else:
            drop_prefetched(lane)
            lane.reached.update(*(visited.logs for visited in order.visited()))
            order.close()
            lane.eval_order = None
            if not failed:
                end_step(lane, trained=False)
    lane.eval_order = None


def _follow(lane: Lane, change: Change | None, outermost: Unit | None = None) -> None:
    """Keep nothing gathered for an order that changed, and say so once for each outermost unit."""
    if change is None:
        return
    drop_prefetched(lane)
    outermost = outermost or lane.active[0]
    if lane.eval_order is not None or "order" in outermost.warned:
        return
    outermost.warned.add("order")
    expected, found = change.expected.name, change.found and change.found.name
    warnings.warn(
        f"the forward of unit {outermost.name!r} {'ended' if found is None else 'ran unit'} "
        f"{'' if found is None else repr(found) + ' '}where unit {expected!r} was expected from "
        "the one before. Results are not affected, and the new order is what is expected next; "
        "but what was gathered ahead for the old one was in vain. If the order never repeats, pass "
        "prefetch=Prefetch(forward=0). If ranks should differ here, see what each runs with "
        "fsdp_compose.set_debug(True).",
        stacklevel=2,
    )


def _order(lane: Lane) -> Order:
    """Training has one order per device; an inference forward has that of its outermost unit."""
    if lane.eval_order is None and len(lane.active) == 1 and not torch.is_grad_enabled():
        lane.eval_order = lane.active[0].eval_order
    return lane.forward_order if lane.eval_order is None else lane.eval_order


def _watch_outputs(unit: Unit, output: Any) -> Expected:
    """Hook the outputs; ``"hidden"`` when the unit is needed in a way that cannot be seen."""
    tensors, opaque = find_tensors(output)
    if not unit.gathered:
        opaque = False  # nothing that would have to stay
    watched = False
    start = opened_at(unit) if len(tensors) > 1 else -1
    for tensor in tensors:
        if tensor.requires_grad and (node := tensor.grad_fn) is not None:
            if start >= 0 and made_at(node) < start:
                continue  # passed through; its gradient is complete long after the unit's backward
            tensor.register_hook(trigger_of(unit))
            watched = True
    if watched and (unit.entrance != "outputs" or unit.keepers) and graph_task_id() == -1:
        watch_kept(unit, tensors)
    if any(_reads_weights(unit, tensor) for tensor in tensors):
        return "hidden"
    if watched or not opaque or not torch.is_grad_enabled():
        return "seen" if watched else "none"
    if "hidden" not in unit.warned:
        unit.warned.add("hidden")
        warnings.warn(
            f"unit {unit.name!r} returned a {type(output).__name__} in which no differentiable "
            "tensor was found, so its backward cannot be seen coming: it stays gathered until "
            "backward ends. Return tensors in tuples, dicts, dataclasses or plain objects.",
            stacklevel=2,
        )
    return "hidden"


def _reads_weights(unit: Unit, output: torch.Tensor) -> bool:
    """Whether an output is a view of a gathered weight, which must then outlive the forward."""
    return any(lies_in(bucket, output) for bucket in unit.gathered if not bucket.in_place)


def _bound(unit: Unit, inputs: Any) -> Any:
    """Pass the inputs that need gradients through one node, so that a frozen unit knows its end."""
    tensors, _ = find_tensors(inputs)
    needing = {id(t): t for t in tensors if t.requires_grad}
    unit.bound_at = -1
    if not needing:
        return inputs
    outputs = Boundary.apply(weakref.ref(unit), *needing.values())
    unit.bound_at = made_at(outputs[0].grad_fn)
    replaced = dict(zip(needing, outputs, strict=True))
    return map_tensors(lambda tensor: replaced.get(id(tensor), tensor), inputs)


def _input_dtype(unit: Unit, outermost: bool) -> torch.dtype | None:
    """What floating-point inputs are cast to, None for not at all."""
    casts = unit.mp.cast_forward_inputs
    return unit.mp.param_dtype if casts is True or (casts == "root" and outermost) else None


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _is_running(module: nn.Module) -> bool:
    """Whether a call of ``module`` besides the present one is on this thread's stack."""
    frame: FrameType | None = sys._getframe()
    calls = 0
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            calls += frame.f_locals.get("self") is module
        elif frame.f_code is call_as_forward.__code__:
            calls += frame.f_locals["module"] is module
        frame = frame.f_back
    return calls > 1
