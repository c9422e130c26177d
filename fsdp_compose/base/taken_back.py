"""What a forward that is only looked at leaves in its modules, taken back when it is over."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_CONTAINERS = (list, deque, set, dict, OrderedDict, defaultdict)


@contextmanager
def take_back(module: nn.Module) -> Iterator[None]:
    """At the end, give all modules in ``module`` the attributes that they had at the beginning.

    So have their lists, dictionaries and sets what was in them; what is in these is left alone.
    Random numbers of the host go on as if none had been drawn.
    """
    drawn = random.getstate()
    attributes = [(vars(inner), dict(vars(inner))) for inner in module.modules()]
    held: list[Any] = [value for _, before in attributes for value in before.values()]
    copies = [(v, v.copy()) for v in held if type(v) in _CONTAINERS]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(drawn)
        for now, before in [*attributes, *copies]:
            now.clear()
            fill = now.extend if isinstance(now, list | deque) else now.update
            fill(before)
