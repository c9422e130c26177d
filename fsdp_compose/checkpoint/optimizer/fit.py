"""How saved optimizer state becomes what this rank's parameters take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fsdp_compose.checkpoint.optimizer.members import Part
from fsdp_compose.checkpoint.optimizer.shapes import block_spec, gather_owned, is_one_number
from fsdp_compose.checkpoint.optimizer.watch import ELEMENTWISE
from fsdp_compose.checkpoint.values import fit, gather_whole, is_cut, whole_shape
from fsdp_compose.sharded import ShardSpec, flat_spec, is_sharded

NUMBERS = "_fsdp_compose_numbers"
"""The entry of state by canonical name with the keys that are one number of a larger parameter."""


def find_numbers(parts: Mapping[str, Part], state: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Find the keys under which a parameter of several elements has a tensor of one."""
    return {
        key
        for name, values in state.items()
        if name in parts and math.prod(parts[name].shape) > 1
        for key, value in values.items()
        if isinstance(value, Tensor) and math.prod(whole_shape(value)) == 1
    }


def gather_state(parts: Mapping[str, Part], given: Mapping[str, Any]) -> dict[str, Any]:
    """Give checked state with what is cut in other ways gathered and fitted; a collective.

    It is gathered in the order of the names, since ranks may list parameters in different orders.
    """
    state = dict(given["state"])
    for name in sorted(state.keys() & parts.keys()):
        values = state[name]
        ready = {
            key: _gather_value(parts[name], key, values[key], given)
            for key in sorted(values, key=str)
            if is_cut(values[key])
        }
        state[name] = {key: ready.get(key, value) for key, value in values.items()}
    return state


def _gather_value(part: Part, key: str, value: Tensor, given: Mapping[str, Any]) -> Any:
    if part.spec is not None and part.owner is not None:
        return gather_owned(value, part)
    if part.spec is not None and is_elementwise(key, value, part, given):
        return fit(value, part.spec)
    cut = find_pieces(part, key, value, given)
    return gather_whole(value) if cut is None else fit(value, cut)


def find_pieces(part: Part, key: str, value: Any, given: Mapping[str, Any]) -> ShardSpec | None:
    """Say how a value of another shape than its parameter's is cut; None if it is not cut.

    It has the shape of ``p.flatten()``, or, of a raw piece, a row for each of its blocks.
    """
    if not isinstance(value, Tensor) or not value.ndim or part.owner is not None:
        return None
    if is_elementwise(key, value, part, given) or is_one_number(key, value):
        return None
    if part.span is None:
        is_flat = len(part.shape) > 1
        if not part.shape:  # of shape (1,), as a number that larger parameters have may be, too
            is_flat = is_sharded(value) or _has_elements(key, part, given)
        flat = flat_spec(part.spec) if is_flat and part.spec is not None else None
        return flat if flat is not None and flat.shape == whole_shape(value) else None
    spec = block_spec(part, key, tuple(value.shape[1:]))
    return spec if spec is not None and spec.shape == value.shape else None


def is_elementwise(key: str, value: Any, part: Part, given: Mapping[str, Any]) -> bool:
    """Whether a state value is cut as its parameter is."""
    if not isinstance(value, Tensor) or tuple(whole_shape(value)) != tuple(part.shape):
        return False
    if is_sharded(value) or value.numel() != 1:
        return True
    # A parameter of one number: the same state of a larger parameter tells which it is.
    if key in given[NUMBERS]:
        return False
    sizes = _sizes_of_others(key, part, given)
    if max(sizes, default=0) > 1 or is_one_number(key, value):
        return max(sizes, default=0) > 1
    return key in ELEMENTWISE or (bool(part.shape) and not sizes)


def _has_elements(key: str, part: Part, given: Mapping[str, Any]) -> bool:
    """Whether a parameter of several elements tells that this state has a place for each."""
    return key not in given[NUMBERS] and max(_sizes_of_others(key, part, given), default=0) > 1


def _sizes_of_others(key: str, part: Part, given: Mapping[str, Any]) -> list[int]:
    """How many elements the same state of each other parameter has."""
    held = (v.get(key) for name, v in given["state"].items() if name != part.name)
    return [math.prod(whole_shape(other)) for other in held if isinstance(other, Tensor)]
