"""A set that keeps nothing alive and has an order, so that every rank goes through it alike."""

from __future__ import annotations

import weakref
from typing import TypeVar

T = TypeVar("T")


class OrderedWeakSet(weakref.WeakKeyDictionary[T, None]):
    """Objects in the order they were added, each as long as something else keeps it alive.

    A ``WeakSet`` goes by addresses, which differ between ranks: gathers and hooks on gradients that
    followed its order would be in another order on each rank.
    """

    def add(self, item: T) -> None:
        self[item] = None

    def discard(self, item: T) -> None:
        self.pop(item, None)
