"""Dictionaries and lists in a saved state, which torch.distributed.checkpoint cuts into parts.

Torch saves each part under a path of its own, and keeps neither empty dictionaries nor keys that
are no strings. So each such value is saved whole too, and put together from its parts only where a
checkpoint has nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor

Place: TypeAlias = "tuple[str | int, ...]"

OBJECTS = "fsdp_compose_objects"
"""The entry of a saved state below which such values are whole, by their place as JSON."""


def find_containers(state: Mapping[str, Any]) -> dict[str, Any]:
    """Find the values that torch would cut into parts, by their place in ``state`` as JSON."""
    optim: Mapping[str, Any] = state.get("optim", {})
    groups: list[dict[str, Any]] = optim.get("param_groups", [])
    other = {name: v for name, v in optim.items() if name not in ("state", "param_groups")}
    return {
        json.dumps([*place, str(name)]): value
        for place, values in (
            (("model",), state["model"]),
            (("optim",), other),
            *((("optim", "param_groups", i), group) for i, group in enumerate(groups)),
            *((("optim", "state", n), of) for n, of in optim.get("state", {}).items()),
        )
        for name, value in values.items()
        if _is_container(value)
    }


def _is_container(value: object) -> bool:
    if isinstance(value, list):
        return any(isinstance(item, (Mapping, list, Tensor)) for item in value)
    return isinstance(value, Mapping)


def read_place(text: str) -> Place:
    """Read a place that ``find_containers`` wrote.

    Raises:
        ValueError: it is none.
    """
    steps = json.loads(text)
    if (
        not isinstance(steps, list)
        or not steps
        or any(type(step) not in (str, int) for step in steps)
    ):
        raise ValueError(f"found {text!r:.80} where the place of a value was wanted")
    return tuple(steps)


def container_of(path: Place) -> Place:
    """The place of the extra state, or of the setting of a group, that ``path`` is a part of."""
    for i, step in enumerate(path):
        if str(step).rpartition(".")[2] == "_extra_state":
            return path[: i + 1]
        if step == "param_groups" and type(path[min(i + 1, len(path) - 1)]) is int:
            return path[: i + 3]
    return path


def join_parts(parts: Mapping[Place, Any]) -> Any:
    """Put a value together: dictionaries of what has names, lists of what has numbers.

    Raises:
        ValueError: an item of a list is missing, as torch leaves out an empty dictionary.
    """
    if () in parts:
        return parts[()]
    inner: dict[str | int, dict[Place, Any]] = {}
    for path, value in parts.items():
        inner.setdefault(path[0], {})[path[1:]] = value
    if any(type(step) is str for step in inner):
        return {str(step): join_parts(rest) for step, rest in inner.items()}
    if lost := [i for i in range(len(inner)) if i not in inner]:
        raise ValueError(f"a list of {len(inner)} saved items has none with number {lost[0]}")
    return [join_parts(inner[i]) for i in range(len(inner))]
