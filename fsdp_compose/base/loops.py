"""Loops over many tensors that run in C, for what is done at every step."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any


def for_each(function: Callable[..., Any], *columns: Iterable[Any]) -> None:
    """Call ``function`` with the items of each row, for what it does; like ``map``."""
    deque(map(function, *columns), maxlen=0)


def has_none(values: Iterable[Any]) -> bool:
    """Whether one of ``values`` is None; tensors are not compared."""
    return any(map(operator.is_, values, repeat(None)))


def are_all_none(values: Iterable[Any]) -> bool:
    return all(map(operator.is_, values, repeat(None)))


def are_same(first: Iterable[Any], second: Iterable[Any]) -> bool:
    """Whether the items of two sequences of one length are the same objects."""
    return all(map(operator.is_, first, second))
