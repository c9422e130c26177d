"""Gradients of chosen parameters, as ``autograd.grad`` asks for them: in scopes and graphs.

A parameter that a scope shows in full is a function of its shard, and what autograd finds there is
this rank's alone. So where ``autograd.grad`` or ``backward(inputs=)`` asks for one, autograd is
asked for the shard. ``grad`` then gives the gradient of the whole, averaged over ranks as
everywhere; of a tensor computed from it (``p.clone()``), it gives this rank's own.

A sharded leaf is no input of a compiled graph; its unit's anchor stands for it there. So where
parameters of a traceable unit are asked for, autograd is asked for the anchors too, and what
arrives for them is handed to the parameters here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdp_compose.base.torch_private import raw
from fsdp_compose.buckets.bucket import Bucket, Entry
from fsdp_compose.buckets.entries import entry_of, find_entry
from fsdp_compose.core.autograd import Spread
from fsdp_compose.core.guards.scope_parameters import is_connected, leaf_of
from fsdp_compose.core.state import ChosenGradients, Unit, owner_of, unit_of
from fsdp_compose.scopes.compile import set_traceable as set_traceable
from fsdp_compose.sharded import HANDLERS, is_sharded_parameter, run_gradient_hooks, tag

_grad, _backward = HANDLERS[torch.autograd.grad], HANDLERS[torch.autograd.backward]


def backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.backward(tensors, ..., inputs=)``."""
    if kwargs.get("inputs") is None:
        return _backward(func, args, kwargs)
    given = tuple([leaf_of(t) if is_connected(t) else t for t in kwargs["inputs"]])
    units, entries = _find_traceable(given)
    if not units:
        return _backward(func, args, {**kwargs, "inputs": given})
    inputs = (*given, *(u.traced.anchor for u in units if u.traced is not None))
    with ChosenGradients(units, frozenset(entries.values()), None):
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
            parallel = entry.spec.parallel
            results[entry] = full if parallel is None else parallel.wrap(full)
    return results


def _grad_of_leaves(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    inputs = args[1]
    units, entries = _find_traceable(inputs)
    if not units:
        return _grad(func, args, kwargs)
    anchors = [u.traced.anchor for u in units if u.traced is not None]
    changed = {"allow_unused": True, "materialize_grads": False}
    results: dict[Entry, torch.Tensor] = {}
    with ChosenGradients(units, frozenset(entries.values()), results):
        found = _grad(func, (args[0], (*inputs, *anchors)), {**kwargs, **changed})
    grads = []
    for index, source in enumerate(inputs):
        value, entry = found[index], entries.get(index)
        if entry in results:
            extra = run_gradient_hooks(entry.spec.hooks, _tag_local(results[entry], entry))
            value = extra if value is None else value + extra
        if value is None and kwargs.get("materialize_grads"):
            value = torch.zeros_like(source)
        if value is None and not kwargs.get("allow_unused"):
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set "
                "allow_unused=True if this is the desired behavior."
            )
        grads.append(value)
    return tuple(grads)


def _tag_local(local: torch.Tensor, entry: Entry) -> torch.Tensor:
    with raw():
        return tag(local, entry.spec)


def _find_traceable(inputs: Sequence[Any]) -> tuple[list[Unit], dict[int, Entry]]:
    """Units inside compiled graphs that read parameters among ``inputs``, and their entries."""
    units: list[Unit] = []
    entries: dict[int, Entry] = {}
    for index, source in enumerate(inputs):
        if not (isinstance(source, torch.nn.Parameter) and is_sharded_parameter(source)):
            continue
        if (entry := entry_of(source)) is not None:
            bucket = owner_of(entry)
            users = unit_of(bucket), *bucket.users.borrowers
            readers = [user for user in users if user.traced is not None]
            if readers:
                entries[index] = entry
                units += [unit for unit in readers if unit not in units]
    return [u for u in units if u.traced is not None and any(u.traced.trained)], entries


HANDLERS[torch.autograd.grad], HANDLERS[torch.autograd.backward] = grad, backward
