"""The objects of some classes among all that Python's garbage collector knows.

A list of all objects refers to tuples that other threads are still filling, as of a generator, and
such a thread fails with a SystemError if it goes on meanwhile. So no list of all is kept: objects
are found as what refers to their classes.
"""

from __future__ import annotations

import gc
from itertools import chain
from typing import Any


def tracked_kinds() -> set[type]:
    """The classes that there are objects of."""
    every = chain.from_iterable(map(gc.get_objects, [None]))  # which lists them in the next call
    return set(map(type, every))


def find_tracked(*kinds: type) -> list[Any]:
    """List the objects of exactly these classes."""
    return [value for value in gc.get_referrers(*kinds) if type(value) in kinds]
