"""Loops over many tensors that run in C, for what is done at every step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

exhaust: Callable[[Iterable[Any]], None] = deque(maxlen=0).extend
"""Run an iterator such as ``map`` to its end, for what it does."""
