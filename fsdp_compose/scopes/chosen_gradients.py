"""Gradients of chosen parameters, as ``autograd.grad`` and ``backward(inputs=)`` ask for them.

In the graph a unit's anchor stands for its parameters, see core/autograd.py. So where parameters
are asked for, autograd is asked for the anchors of the units that read them too, and what arrives
there is handed to the parameters here. A parameter itself is in the graph where its slice was used.

A parameter that a scope shows in full is a function of its shard, and what autograd finds there is
this rank's alone. So where ``autograd.grad`` or ``backward(inputs=)`` asks for one, autograd is
asked for the shard. ``grad`` then gives the gradient of the whole, averaged over ranks as
everywhere; of a tensor computed from it (``p.clone()``), it gives this rank's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fsdp_compose.base.torch_private import raw
from fsdp_compose.buckets.bucket import Bucket, Entry
from fsdp_compose.buckets.entries import entry_of, find_entry
from fsdp_compose.core.autograd import Spread
from fsdp_compose.core.guards.scope_parameters import is_connected, leaf_of
from fsdp_compose.core.state import ChosenGradients, Unit, owner_of, unit_of
from fsdp_compose.sharded import ON_SLICES, is_sharded_parameter, run_gradient_hooks, tag

_grad, _backward = ON_SLICES[torch.autograd.grad], ON_SLICES[torch.autograd.backward]


def backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.backward(tensors, ..., inputs=)``."""
    if kwargs.get("inputs") is None:
        return _backward(func, args, kwargs)
    given = tuple([leaf_of(t) if is_connected(t) else t for t in kwargs["inputs"]])
    units, entries = _find_units(given)
    inputs = (*given, *(unit.links.anchor for unit in units))
    with _choose_gradients(units, entries.values(), None):
        return _backward(func, args, {**kwargs, "inputs": inputs})


def grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.grad(outputs, inputs, ...)``."""
    outputs, inputs = args
    shown = {i: find_entry(p) for i, p in enumerate(inputs) if is_connected(p)}
    if not shown:
        return _grad_of_leaves(func, (outputs, inputs), kwargs)
    leaves = tuple([shown[i].param if i in shown else p for i, p in enumerate(inputs)])
    grads = list(_grad_of_leaves(func, (outputs, leaves), kwargs))
    found = {entry: grads[i] for i, entry in shown.items() if grads[i] is not None}
    with torch.set_grad_enabled(bool(kwargs.get("create_graph"))):
        whole = _gather_gradients(found, {entry: inputs[i].dtype for i, entry in shown.items()})
    return tuple([whole.get(shown[i], g) if i in shown else g for i, g in enumerate(grads)])


def _gather_gradients(
    grads: dict[Entry, Any], dtypes: dict[Entry, torch.dtype]
) -> dict[Entry, Any]:
    """Sharded gradients as those of the whole parameters: one gather per bucket."""
    by_bucket: dict[Bucket, list[Entry]] = {}
    for entry in sorted(grads, key=lambda e: (e.spec.unit, e.spec.fqn)):  # as on other ranks
        by_bucket.setdefault(owner_of(entry), []).append(entry)
    results: dict[Entry, Any] = {}
    for bucket, entries in by_bucket.items():
        with raw():
            slices = [grads[entry] for entry in entries]
            fulls = Spread.apply(bucket, entries, dtypes[entries[0]], *slices)
        for entry, full in zip(entries, fulls, strict=True):
            results[entry] = entry.spec.wrap(full)
    return results


def _grad_of_leaves(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    inputs = args[1]
    units, entries = _find_units(inputs)
    anchors = [unit.links.anchor for unit in units]
    changed = {"allow_unused": True, "materialize_grads": False}
    results: dict[Entry, torch.Tensor] = {}
    with _choose_gradients(units, entries.values(), results), _postpone_hooks(entries.values()):
        found = _grad(func, (args[0], (*inputs, *anchors)), {**kwargs, **changed})
    grads = []
    for index, source in enumerate(inputs):
        value, entry = found[index], entries.get(index)
        if entry in results:
            with raw():
                extra = tag(results[entry], entry.spec)
            value = extra if value is None else value + extra
        if entry is not None and value is not None:
            value = run_gradient_hooks(entry.spec.hooks, value)
        if value is None and kwargs.get("materialize_grads"):
            value = torch.zeros_like(source)
        if value is None and not kwargs.get("allow_unused"):
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set "
                "allow_unused=True if this is the desired behavior."
            )
        grads.append(value)
    return tuple(grads)


@contextmanager
def _choose_gradients(
    units: list[Unit], entries: Iterable[Entry], results: dict[Entry, torch.Tensor] | None
) -> Iterator[None]:
    """Scope in which only ``entries`` of ``units`` receive gradients, and no later backward."""
    chosen, outer = ChosenGradients(frozenset(entries), results), [u.run.chosen for u in units]
    try:  # an interrupt here leaves no unit without its gradients
        for unit in units:
            unit.run.chosen = chosen
        yield
    finally:
        for unit, before in zip(units, outer, strict=True):
            unit.run.chosen = before


@contextmanager
def _postpone_hooks(entries: Iterable[Entry]) -> Iterator[None]:
    """Scope in which autograd leaves hooks to the caller, who runs them on the whole gradient."""
    hooks = [entry.spec.hooks for entry in entries]
    outer = [hook.is_summed for hook in hooks]
    try:
        for hook in hooks:
            hook.is_summed = True
        yield
    finally:
        for hook, before in zip(hooks, outer, strict=True):
            hook.is_summed = before


def _find_units(inputs: Sequence[Any]) -> tuple[list[Unit], dict[int, Entry]]:
    """Units that read parameters among ``inputs``, and the entries of these, by position."""
    units: dict[Unit, None] = {}
    entries: dict[int, Entry] = {}
    for index, source in enumerate(inputs):
        if not (isinstance(source, torch.nn.Parameter) and is_sharded_parameter(source)):
            continue
        if (entry := entry_of(source)) is not None:
            bucket = owner_of(entry)
            entries[index] = entry
            units.update(dict.fromkeys((unit_of(bucket), *bucket.users.borrowers)))
    return list(units), entries
