"""How numbers and tables are written in every report."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(nbytes: int) -> str:
    """Write bytes with three significant digits, ``'1.46 GiB'``; exact below 1 KiB."""
    value, unit = float(nbytes), 0
    while value >= 1023.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{_digits(value) if unit else str(nbytes)} {_UNITS[unit]}"


def count(number: int) -> str:
    """Write a number with three significant digits, ``'33.1M'``; exact below 1000."""
    value, unit = float(number), 0
    while value >= 999.5 and unit < 5:
        value, unit = value / 1000, unit + 1
    return f"{_digits(value)}{'kMGTP'[unit - 1]}" if unit else str(number)


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def table(rows: Sequence[Sequence[str]], left: Container[int] = (0,), indent: str = "  ") -> str:
    """Write columns of text; those whose numbers are in ``left`` lean left."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(indent + "  ".join(cells).rstrip())
    return "\n".join(lines)


def plain(value: Any) -> Any:
    """Convert dataclasses, with the properties that ``DERIVED`` lists, to plain data."""
    if is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in fields(value)] + list(getattr(value, "DERIVED", ()))
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value
