"""A rank that skips a unit joins what the others communicate for it, with zero gradients.

The unit's own hooks run, around a body that computes nothing: it is gathered, prefetched, watched
and recorded as in a forward, and its ``Gather`` node gets undefined gradients, which pack as zeros.
So the ranks' events match one by one, in forward and in backward.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from fsdp_compose.base.order import Order, Pass, Ref
from fsdp_compose.core.guards.units import list_nested, modules_of, require_units
from fsdp_compose.core.hooks import call_as_forward
from fsdp_compose.core.state import Unit, find_state, iter_units

__all__ = ["participate"]


def participate(module: nn.Module, x: torch.Tensor | None = None) -> torch.Tensor:
    """Join the collectives of a forward of ``module``, and of its backward, without running it.

    Call it in place of ``module(...)`` on a rank that skips the module while other ranks run it, at
    the same position among the units that the rank runs::

        x = unit(x) if mine else fsdp_compose.participate(unit, x)     # in the middle of a model
        loss = loss + fsdp_compose.participate(unit)                   # or wherever it ran
        loss = participate(model)                                      # no batch on this rank

    Units nested in ``module`` are joined too: in the order in which they ran last inside it,
    whatever ran since, or in the order they are registered in where they never ran. The unit's
    parameters get the same gradients as on the other ranks, averaged over all ranks, those that
    skipped counted with zero (``set_gradient_divide_factor`` changes that). What forward does
    besides is not done: no buffer is updated, and collectives of the module's own, such as those of
    tensor parallelism, are not joined. Inside activation checkpointing, call it inside the
    checkpointed function. A unit that trains nothing is gathered for backward only where an input
    of it needs a gradient, so pass ``x`` for such units. Without gradients it joins the gathers
    alone.

    Args:
        module: a unit, or a module that contains units.
        x: a floating-point activation that is handed through, cast as the unit casts its inputs and
            outputs.

    Returns:
        ``x``, or a zero to add to the loss. Backward must reach it, as on the other ranks it
        reaches the unit's output.

    Raises:
        ValueError: ``module`` is not a unit and contains none.
        TypeError: ``x`` is not a floating-point tensor.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> loss = participate(model)  # on a rank that has no batch
        >>> loss.backward()
    """
    units = require_units(module, "participate")
    given: Any = x
    if x is not None and not (isinstance(given, torch.Tensor) and given.is_floating_point()):
        found = given.dtype if isinstance(given, torch.Tensor) else type(given).__name__
        raise TypeError(
            f"participate: x is {found}; wanted a floating-point activation, which is handed "
            "through, or nothing."
        )
    if find_state(module) is not None:
        return _join_module(module, x)
    pending = deque(_list_visits(units))
    if not pending and x is None:
        return _make_zero(units[0])
    while pending:
        x = _join_unit(pending, x)
    assert x is not None
    return x


def _join_module(
    module: nn.Module, x: torch.Tensor | None, visits: deque[Unit] | None = None
) -> Any:
    """A forward of ``module``, which is a unit's, that computes nothing."""
    return call_as_forward(
        module, partial(_run_body, module, visits), () if x is None else (x,), {}
    )


def _join_unit(visits: deque[Unit], x: torch.Tensor | None) -> torch.Tensor | None:
    """The next of ``visits``, with those of the following that are inside it."""
    unit = visits.popleft()
    for module in modules_of(unit):
        x = _join_module(module, x, visits)
    return x


def _run_body(
    module: nn.Module, visits: deque[Unit] | None, x: torch.Tensor | None = None
) -> torch.Tensor:
    state = find_state(module)
    assert state is not None
    unit = state.unit
    # What the modules read now: the outputs of Gather, or what a scope over the unit put there.
    held = [values[name] for values, name, _ in unit.links.places]
    linked = list({id(tensor): tensor for tensor in held if tensor.requires_grad}.values())
    inner = set(iter_units(module)) - {unit}
    hands_on = bool(inner) and passes_on(unit, module, inner)
    if hands_on:
        x = _join(unit, x, linked)
    if inner:
        if visits is None:
            visits = deque(_list_visits([u for u in list_nested(unit) if u in inner], unit))
        while visits and visits[0] in inner:
            x = _join_unit(visits, x)
    return x if hands_on and x is not None else _join(unit, x, linked)


def _join(unit: Unit, x: torch.Tensor | None, linked: list[torch.Tensor]) -> torch.Tensor:
    if x is None:
        x = _make_zero(unit)
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return x.view_as(x)  # not the caller's tensor, whose backward is not this unit's
    return Join.apply(weakref.ref(unit), x, *linked)


def passes_on(unit: Unit, module: nn.Module, inner: set[Unit]) -> bool:
    """Whether forward returns what a unit inside it returned, which backward then reaches first.

    The last backward tells; where there was none, ``nn.Sequential`` is known to.
    """
    for visited in list_passes(unit.engine.schedule.backward_order):
        if unit in visited and not inner.isdisjoint(visited):
            first = min(map(visited.index, inner.intersection(visited)))
            return first < visited.index(unit)
    if type(module) is not nn.Sequential or not len(module):
        return False
    last = find_state(module[-1])
    return last is not None and last.unit in inner


def _list_visits(registered: list[Unit], around: Unit | None = None) -> list[Unit]:
    """Units of one module in the order in which they are to be joined.

    Args:
        registered: in the order their modules are registered in.
        around: the unit that is that module, if one is.
    """
    schedule, inner = registered[0].engine.schedule, set(registered)
    if schedule.active or around is not None:
        found = _find_upcoming(schedule.order, inner, around)
    else:
        found = _find_outermost(schedule.forward_order, inner)
    if found is None:
        orders = filter(None, (schedule.eval_order, schedule.forward_order))
        passes = (visited for order in orders for visited in list_passes(order))
        runs = (_find_last_run(visited, inner, around) for visited in passes)
        found = next((run for run in runs if run is not None), None)
    return list(dict.fromkeys(registered)) if found is None else found


def _find_upcoming(order: Order, inner: set[Unit], around: Unit | None) -> list[Unit] | None:
    """Those of ``inner`` that are expected next in the pass under way; None: nothing is known.

    Where it is another unit's turn, the pass takes another route than last time; but for a unit
    that ran none of them, and for a container whose next runs the call before this one joined too.
    """
    if order.place is None:
        return None
    known, at = order.recorded[order.place], order.cursor
    if known.is_partial:
        return None
    found = _take_while_inside(_list_existing(known[at:]), inner)
    if found:
        return found
    if around is not None:
        return found if known[at - 1]() is around else None
    before = _take_while_inside(_list_existing(known[at - 1 :: -1]), inner)
    return found if len(set(before)) < len(before) else None


def _find_outermost(order: Order, inner: set[Unit]) -> list[Unit] | None:
    """The units of the last passes that began in ``inner``, each beginning once; None: of none."""
    known = {refs[0](): refs for refs in order.routes[::-1] if not refs.is_partial}
    for passes in (order.last, order.current, order.routes[::-1]):
        begun = {refs[0](): refs for refs in passes}
        found = [_list_whole(unit, known, refs) for unit, refs in begun.items() if unit in inner]
        if found:
            return list(chain.from_iterable(found))
    return None


def _list_whole(unit: Unit, known: dict[Any, Pass], ran: Pass) -> list[Unit]:
    """The units of the pass that ``unit`` began, or of one before in which nobody was left out."""
    whole = known.get(unit) if ran.is_partial else ran
    return list_nested(unit) if whole is None else _list_existing(whole)


def _find_last_run(visited: list[Unit], inner: set[Unit], around: Unit | None) -> list[Unit] | None:
    """List units of ``inner`` that ran last in ``around``, or in a row; None: it did not run."""
    ends = inner if around is None else {around}
    start = next((i for i in reversed(range(len(visited))) if visited[i] in ends), None)
    if start is None:
        return None
    if around is not None:
        return _take_while_inside(visited[start + 1 :], inner)
    return _take_while_inside(visited[start::-1], inner)[::-1]


def list_passes(order: Order) -> Iterator[list[Unit]]:
    """The units of each pass that ended and is known whole, the last one first."""
    ended = order.current[:-1] if order.is_open else order.current
    for refs in (*reversed(ended), *order.routes):
        if not refs.is_partial:
            yield _list_existing(refs)


def _list_existing(refs: list[Ref]) -> list[Unit]:
    return [unit for ref in refs if (unit := ref()) is not None]


def _take_while_inside(units: list[Unit], inner: set[Unit]) -> list[Unit]:
    stop = next((i for i, unit in enumerate(units) if unit not in inner), len(units))
    return units[:stop]


def _make_zero(unit: Unit) -> torch.Tensor:
    """A scalar zero in the unit's compute dtype, where that is a floating-point one."""
    dtypes = [b.full.dtype for b in unit.gathered if b.full.dtype.is_floating_point]
    device = unit.gathered[0].mesh.device if unit.gathered else unit.engine.streams.device
    return torch.zeros((), dtype=dtypes[0] if dtypes else torch.float32, device=device)


class Join(torch.autograd.Function):
    """Identity that depends on a unit's parameters and gives them no gradient."""

    @staticmethod
    def forward(
        ctx: Any, unit_ref: weakref.ref[Unit], x: torch.Tensor, *linked: torch.Tensor
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.unit_ref = unit_ref
        ctx.kinds = [(t.shape, t.dtype, t.device) for t in linked]
        # Something saved, so that checkpointing recomputes here, as it does for the unit's weights.
        ctx.save_for_backward(x.new_empty(0))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        _ = ctx.saved_tensors
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a backward with create_graph=True reached a unit that this rank skipped with "
                "participate(), which cannot join what the other ranks communicate in a backward "
                "through that graph; run the unit here too, with its output times zero."
            )
        unit = ctx.unit_ref()
        for bucket in () if unit is None else unit.buckets:
            bucket.arriving.joined = True
        chosen = None if unit is None else unit.run.chosen
        if chosen is not None and chosen.results is not None:
            # autograd.grad is to return what this rank has of the average, not None.
            return None, grad, *(torch.zeros(s, dtype=d, device=v) for s, d, v in ctx.kinds)
        return None, grad, *(None for _ in ctx.kinds)
