"""Plain data: what a checkpoint may hold beside tensors, and is unpickled without running code."""

from __future__ import annotations

import io
import pickle
import re
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fsdp_compose.checkpoint.optimizer.shapes import OwnedState

_CONSTANTS = (int, float, complex, str, bool, bytes, type(None))


def is_constant(value: object) -> bool:
    """Whether ``value`` is a number, a string or None, which nobody can change."""
    return type(value) in _CONSTANTS


def load_plain(key: str, file: io.BytesIO) -> Any:
    """Unpickle plain data, as torch does with ``weights_only``.

    Raises:
        RuntimeError: it is something else.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise RuntimeError(
            f"{key!r} holds {_name_object(error)}, and is not unpickled, as that could run code. "
            "If you trust the file, call torch.serialization.add_safe_globals([...]) with the class"
        ) from error


def warn_of_objects(state: Mapping[str, Any]) -> None:
    """Warn where a saved ``state`` holds what loading it will refuse; it must pickle."""
    for place, value in _find_objects("", state):
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        try:
            torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            warnings.warn(
                f"save_checkpoint: {place!r} holds {_name_object(error)}, which load_checkpoint "
                "takes only after torch.serialization.add_safe_globals([...]) with the class, as "
                "unpickling it could run code. Keep numbers, strings, tensors, and lists, tuples "
                "and dictionaries of them, there; or pass it as extra=.",
                stacklevel=4,
            )


def _find_objects(place: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Tensor) or is_constant(value):
        return
    if isinstance(value, dict) and type(value) in (dict, OrderedDict, OwnedState):
        for key, item in value.items():
            yield from _find_objects(f"{place}.{key}" if place else str(key), item)
    elif isinstance(value, list | tuple) and type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _find_objects(f"{place}.{index}", item)
    else:
        yield place, value


def _name_object(error: pickle.UnpicklingError) -> str:
    found = re.search(r"GLOBAL (\S+)|but got <class '([^']+)'>", str(error))
    return "what is not plain data" if found is None else f"a {found[1] or found[2]}"
