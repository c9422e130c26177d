"""A list that keeps nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

_ROOM = 8


class WeakList:
    """Objects in the order they were added, each as long as something else keeps it alive.

    A ``WeakSet`` runs Python when an object dies, which costs a step more than to add it. Here the
    dead are looked for when the list has grown to twice what was alive the last time.
    """

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Any]] = []
        self._room = _ROOM

    def add(self, item: Any) -> None:
        self._refs.append(weakref.ref(item))
        if len(self._refs) > self._room:
            self._refs = [ref for ref in self._refs if ref() is not None]
            self._room = _ROOM + 2 * len(self._refs)

    def __iter__(self) -> Iterator[Any]:
        return (item for ref in tuple(self._refs) if (item := ref()) is not None)
