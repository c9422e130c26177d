"""How errors and reports word what they list."""

from __future__ import annotations

from collections.abc import Iterable


def quote_names(names: Iterable[str], most: int = 4) -> str:
    """Names in quotes, separated by commas; of many, the first and how many more there are."""
    found = list(names)
    shown = ", ".join(map(repr, found[:most]))
    return f"{shown} and {len(found) - most} more" if len(found) > most else shown
