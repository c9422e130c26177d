"""Gradients of chosen parameters, asked for by name, also through units inside compiled graphs.

A sharded leaf is no input of a compiled graph; its unit's anchor stands for it there. So where
``autograd.grad`` or ``backward(inputs=)`` asks for parameters of a traceable unit, autograd is
asked for the anchors too, and what arrives for them is handed to the parameters here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdp_compose.bucket import Entry, find_entry
from fsdp_compose.sharded import HANDLERS, is_sharded_parameter, run_gradient_hooks, tag
from fsdp_compose.state import Asked, Unit, owner_of, unit_of
from fsdp_compose.torch_private import raw
from fsdp_compose.traced import set_traceable as set_traceable

_grad, _backward = HANDLERS[torch.autograd.grad], HANDLERS[torch.autograd.backward]


def backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.backward(tensors, ..., inputs=)``."""
    units, entries = _traceable(kwargs.get("inputs") or ())
    if not units:
        return _backward(func, args, kwargs)
    inputs = (*kwargs["inputs"], *(u.traced.anchor for u in units if u.traced is not None))
    with Asked(units, frozenset(entries.values()), None):
        return _backward(func, args, {**kwargs, "inputs": inputs})


def grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.grad(outputs, inputs, ...)``."""
    inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
    units, entries = _traceable(inputs)
    if not units:
        return _grad(func, args, kwargs)
    anchors = [u.traced.anchor for u in units if u.traced is not None]
    changed = {"allow_unused": True, "materialize_grads": False}
    results: dict[Entry, torch.Tensor] = {}
    with Asked(units, frozenset(entries.values()), results):
        found = _grad(func, (args[0], (*inputs, *anchors)), {**kwargs, **changed})
    grads = []
    for index, source in enumerate(inputs):
        value, entry = found[index], entries.get(index)
        if entry in results:
            extra = run_gradient_hooks(entry.spec.hooks, _tagged(results[entry], entry))
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


def _tagged(local: torch.Tensor, entry: Entry) -> torch.Tensor:
    with raw():
        return tag(local, entry.spec)


def _traceable(inputs: Sequence[Any]) -> tuple[list[Unit], dict[int, Entry]]:
    """Units inside compiled graphs that read parameters among ``inputs``, and their entries."""
    units: list[Unit] = []
    entries: dict[int, Entry] = {}
    for index, source in enumerate(inputs):
        if isinstance(source, torch.nn.Parameter) and is_sharded_parameter(source):
            entry = find_entry(source)
            bucket = owner_of(entry)
            readers = [u for u in (unit_of(bucket), *bucket.borrowers) if u.traced is not None]
            if readers:
                entries[index] = entry
                units += [unit for unit in readers if unit not in units]
    return [u for u in units if u.traced is not None and any(u.traced.trained)], entries


HANDLERS[torch.autograd.grad], HANDLERS[torch.autograd.backward] = grad, backward
