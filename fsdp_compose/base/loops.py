"""Loops over many tensors that run in C, for what is done at every step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from operator import itemgetter
from typing import Any

exhaust: Callable[[Iterable[Any]], None] = deque(maxlen=0).extend
"""Run an iterator such as ``map`` to its end, for what it does."""

_get_params = itemgetter("params")


def parameters_of(optimizer: Any) -> list[Any]:
    """The parameters of all groups of an optimizer, in order."""
    return list(chain.from_iterable(map(_get_params, optimizer.param_groups)))
