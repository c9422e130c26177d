"""How errors and reports word what they list."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def quote_names(names: Iterable[str]) -> str:
    """Names in quotes, separated by commas; of many, the first four and how many more there are."""
    found = list(names)
    shown = ", ".join(map(repr, found[:4]))
    return f"{shown} and {len(found) - 4} more" if len(found) > 4 else shown


def describe_clipping(limit: Any, raises: bool) -> str:
    """What a norm is taken for, between commas, as ranks compare it: ``, to clip it to 1.0,``.

    A limit that lies on a device is not read, as the host would wait for it.
    """
    if isinstance(limit, torch.Tensor):
        limit = limit.tolist() if limit.is_cpu else "a tensor"
    shown = float(limit) if isinstance(limit, int | float) else limit
    return f", to clip it to {shown!r}{' or raise where it is not finite' if raises else ''},"
