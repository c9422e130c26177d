"""A set that keeps nothing alive and has an order, so that every rank goes through it alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from operator import is_not
from typing import Any, TypeVar

T = TypeVar("T")


class OrderedWeakSet(weakref.WeakKeyDictionary[T, None]):
    """Objects in the order they were added, each as long as something else keeps it alive.

    A ``WeakSet`` goes by addresses, which differ between ranks: gathers and hooks on gradients that
    followed its order would be in another order on each rank.
    """

    def __iter__(self) -> Iterator[T]:
        """Those of now, without Python for each; what is added meanwhile is not among them."""
        return filter(_is_there, map(_get_item, self.keyrefs()))

    def add(self, item: T) -> None:
        self[item] = None

    def discard(self, item: T) -> None:
        self.pop(item, None)


_get_item: Callable[[Any], Any] = weakref.ref.__call__
_is_there: Callable[[object], bool] = partial(is_not, None)
