"""Lists, tuples and dictionaries of tensors in optimizer state, as one flat dictionary and back.

``{"GG": [a, b], "step": 3}`` is ``{"GG[0]": a, "GG[1]": b, "step": 3}`` when flat: ``[0]`` is an
item of a list, ``(0)`` of a tuple, ``{'left'}`` or ``{0.9}`` an entry of a dictionary. Containers
without a tensor stay one value.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fsdp_compose.base.torch_private import is_opaque
from fsdp_compose.sharded import is_sharded

_STEP = r"\[\d+\]|\(\d+\)|\{-?\d[\d.e+-]*\}|\{'[^']*'\}"
_NESTED = re.compile(rf"(.+?)((?:{_STEP})+)", re.DOTALL)
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_CONSTANTS = (int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def flatten_state(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Give every tensor in one parameter's state a key of its own."""
    found: dict[Any, Any] = {}
    for key, value in values.items():
        if type(value) in (list, tuple, dict) and has_tensor(value):
            found.update(_leaves(str(key), value))
        else:
            found[key] = value
    return found


def is_name(key: object) -> bool:
    """Whether ``key`` is a string that ``flatten_state`` does not make."""
    return isinstance(key, str) and _NESTED.fullmatch(key) is None


def unflatten(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Undo ``flatten_state``."""
    root: dict[Any, Any] = {}
    for key, value in values.items():
        match = _NESTED.fullmatch(key) if isinstance(key, str) else None
        if match is None:
            root[key] = value
            continue
        at: dict[Any, Any] = root
        name: Any = match[1]
        for step in re.findall(_STEP, match[2]):
            at = at.setdefault(name, _Branch())
            name = (step[0], ast.literal_eval(step[1:-1]))
        at[name] = value
    return {key: _build(value) for key, value in root.items()}


_STATE, _GROUPS = "state.", "param_groups."


def is_by_key(keys: Iterable[Any]) -> bool:
    """Whether they are of torch's ``flatten_optimizer_state_dict=True``."""
    return any(isinstance(key, str) and key.startswith(_GROUPS) for key in keys)


def join_keys(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Optimizer state whose keys say it all, as ``state.0.weight.exp_avg``, in the usual form.

    Parameters with the same settings make one group.

    Raises:
        ValueError: it has state of a parameter that has no settings.
    """
    settings: dict[str, dict[str, Any]] = {}
    for key in (key for key in values if key.startswith(_GROUPS)):
        name, _, setting = key.removeprefix(_GROUPS).rpartition(".")
        settings.setdefault(name, {})[setting] = values[key]
    state: dict[str, dict[Any, Any]] = {}
    for key in (key for key in values if key.startswith(_STATE)):
        steps = key.removeprefix(_STATE).split(".")
        for length in range(len(steps) - 1, 0, -1):
            name = ".".join(steps[:length])
            if name in settings:
                what = nested_key(steps[length], steps[length + 1 :])
                state.setdefault(name, {})[what] = values[key]
                break
        else:
            raise ValueError(
                f"optimizer state: {key!r} is of no parameter that has settings, such as "
                f"{_GROUPS}weight.lr; save all that get_optimizer_state_dict gave."
            )
    groups: dict[str, dict[str, Any]] = {}
    for name, group in settings.items():
        groups.setdefault(write_exactly(group), {**group, "params": []})["params"].append(name)
    return {"state": state, "param_groups": list(groups.values())}


def write_exactly(settings: Any) -> str:
    """Write settings for comparison; of tensors, such as a learning rate, every digit."""
    return repr(map_values(lambda tensor: (str(tensor.dtype), tensor.tolist()), settings))


def list_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The settings that two groups do not have alike."""
    pairs = ((key, a.get(key, ...), b.get(key, ...)) for key in sorted(a.keys() | b.keys()))
    return [key for key, one, other in pairs if write_exactly(one) != write_exactly(other)]


def nested_key(key: Any, path: Iterable[Any]) -> Any:
    """The flat key of what lies at ``path`` in lists and dictionaries below ``key``."""
    steps = [_step("[" if type(at) is int else "{", at) for at in path]
    return "".join([str(key), *steps]) if steps else key


def copy_containers(value: Any) -> Any:
    """``value`` with its lists, tuples and dictionaries copied, and NumPy's numbers as Python's.

    Tensors are not copied. A scheduler may set ``lr`` to a number of NumPy, which checkpoints do
    not unpickle.
    """
    if type(value) is dict:
        return {key: copy_containers(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(copy_containers, value))
    numpy = sys.modules.get("numpy")  # where it was not imported, no number is its
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def has_tensor(value: Any) -> bool:
    """Whether ``value`` is a tensor or a container with one in it."""
    if isinstance(value, Tensor):
        return True
    items = value.values() if type(value) is dict else value
    return type(value) in (list, tuple, dict) and any(map(has_tensor, items))


def map_values(function: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to it, or to every tensor in the container it is."""
    if isinstance(value, Tensor):
        return function(value)
    if not has_tensor(value):
        return value
    if type(value) is dict:
        return {key: map_values(function, item) for key, item in value.items()}
    return type(value)(map_values(function, item) for item in value)


def find_object(value: Any) -> Any:
    """The first thing in ``value`` that cannot be saved and resumed on other ranks, or None.

    Tensors, numbers, strings and containers of them can. Objects, and tensors of classes that keep
    their numbers elsewhere, may hold a slice or the whole, and nothing tells which.
    """
    if isinstance(value, Tensor):
        return value if is_opaque(value) and not is_sharded(value) else None
    if value is None or isinstance(value, _CONSTANTS):
        return None
    if type(value) not in (list, tuple, dict):
        return value
    items = [*value, *value.values()] if type(value) is dict else value
    return next((found for item in items if (found := find_object(item)) is not None), None)


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) not in (list, tuple, dict) or not has_tensor(value):
        yield prefix, value
    elif type(value) is dict:
        for key, item in value.items():
            step = _step("{", key)
            if re.fullmatch(_STEP, step) is None:
                raise TypeError(
                    f"optimizer state: {prefix!r} has a key {key!r}; wanted a string or a number"
                )
            yield from _leaves(prefix + step, item)
    else:
        for index, item in enumerate(value):
            yield from _leaves(prefix + _step("[" if type(value) is list else "(", index), item)


def _step(kind: str, key: Any) -> str:
    return f"{kind}{key!r}{_CLOSING[kind]}"


class _Branch(dict[Any, Any]):
    """A container in the making, by (kind, key)."""


def _build(value: Any) -> Any:
    if type(value) is not _Branch:
        return value
    items = {key: _build(item) for (_, key), item in value.items()}
    kind = next(iter(value))[0]
    if kind == "{":
        return items
    ordered = [items[index] for index in sorted(items)]
    return ordered if kind == "[" else tuple(ordered)
