"""How numbers and tables are written in every report."""

from __future__ import annotations

import math
import re
import textwrap
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


def parse_size(value: Any) -> int:
    """Read bytes: a number, or a text such as ``'80GiB'``, ``'16 GB'`` or ``'17179869184'``.

    Raises:
        ValueError: it is neither.
    """
    text = value if isinstance(value, str) else ""
    found = re.fullmatch(r"\s*(\d+\.?\d*)\s*(?:([kKMGTP]?)(i?)B)?\s*", text)
    if found:
        power = " KMGTP".index((found[2] or " ").upper())
        return int(float(found[1]) * (1024 if found[3] else 1000) ** power)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(
            f'plan: device_memory is {value!r}; wanted bytes, as a number or as "80GiB" or "16GB".'
        )
    return int(value)


def count(number: int) -> str:
    """Write a number with three significant digits, ``'33.1M'``; exact below 1000."""
    value, unit = float(number), 0
    while value >= 999.5 and unit < 5:
        value, unit = value / 1000, unit + 1
    return f"{_digits(value)}{'kMGTP'[unit - 1]}" if unit else str(number)


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


WIDTH = 100
"""Columns of every report."""


def wrap_text(text: str, indent: str = "  ", bullet: str = "") -> str:
    """Break text at ``WIDTH`` columns; lines after the first stand under its first word."""
    return "\n".join(
        textwrap.fill(
            line,
            WIDTH,
            initial_indent=indent + (bullet if i == 0 else " " * len(bullet)),
            subsequent_indent=indent + " " * len(bullet),
            break_long_words=True,
            break_on_hyphens=False,
        )
        for i, line in enumerate(text.split("\n"))
    )


def shorten_name(name: str, width: int) -> str:
    """A name in at most ``width`` columns: its beginning and its end."""
    if len(name) <= width:
        return name
    ahead = (width - 1) // 2
    return f"{name[:ahead]}…{name[len(name) - (width - 1 - ahead) :]}"


def fit_names(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Shorten the first column so that a table of ``rows`` is at most ``WIDTH`` wide."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = max(12, WIDTH - 2 - sum(2 + width for width in widths[1:]))
    return [[shorten_name(row[0], room), *row[1:]] for row in rows]


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
    return value
