"""A plan as text: a table of units, memory, communication, notes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from fsdp_compose.inspect.schedule import Communication, Peak
from fsdp_compose.inspect.text import count, dtype_name, plural, size, table

if TYPE_CHECKING:
    from fsdp_compose.inspect.plan import Memory, Plan, PlannedUnit

_HEADER = (
    "unit", "buckets", "storage", "compute", "reduce", "parameters", "trained", "frozen",
    "shard/rank", "gathered", "padding",
)  # fmt: skip


def render(plan: Plan) -> str:
    ranks = f"{plan.ranks} {'rank' if plan.ranks == 1 else 'ranks'}"
    if plan.replicas > 1:
        ranks = f"{plan.replicas} replicas of {ranks}"
    title = (
        f"{'sharded' if plan.is_sharded else 'plan for'} {plan.module}: "
        f"{plural(len(plan.units), 'unit')}, {count(plan.numel)} parameter elements "
        f"({count(plan.trained_numel)} trained) over {ranks}"
    )
    parts = [title, _units(plan.units), _memory(plan.memory, plan.optimizer), _traffic(plan)]
    if plan.notes:
        parts.append("\n".join(["notes", *(f"  - {note}" for note in plan.notes)]))
    return "\n\n".join(parts)


def _units(units: Sequence[PlannedUnit]) -> str:
    rows: list[tuple[str, ...]] = [_HEADER]
    for _, run in groupby(units, key=_row):
        alike = list(run)
        name = alike[0].name
        if len(alike) > 1:
            name = f"{name} .. {alike[-1].name} ({len(alike)} alike)"
        rows.append((name, *_row(alike[0])))
    return table(rows)


def _row(unit: PlannedUnit) -> tuple[str, ...]:
    def kinds(attribute: str) -> str:
        names = [dtype_name(getattr(bucket, attribute)) for bucket in unit.buckets]
        return "+".join(dict.fromkeys(re.sub("float", "f", n) for n in names)) or "-"

    padding = f"{size(unit.padding_bytes)} ({unit.padding:.2%})" if unit.padding_bytes else "0 B"
    return (
        str(len(unit.buckets)),
        *(kinds(name) for name in ("storage", "compute", "reduce")),
        count(unit.numel),
        count(unit.trained_numel),
        count(unit.numel - unit.trained_numel),
        size(unit.shard_bytes),
        size(unit.full_bytes),
        padding,
    )


def _memory(memory: Memory, optimizer: str | None) -> str:
    rows = [
        ("memory per rank", "", ""),
        ("parameter shards", size(memory.shards), ""),
        ("gradient shards", size(memory.gradients), ""),
        ("optimizer state", size(memory.optimizer), optimizer or "none named"),
        ("buffers", size(memory.buffers), ""),
    ]
    for name in ("outside", "weight_copies", "host"):
        value = getattr(memory, name)
        if value:
            comments = {
                "outside": "parameters of no unit, with gradients and state",
                "weight_copies": "in the compute dtype, for gathers to read",
                "host": "of these in host memory",
            }
            rows.append((name.replace("_", " "), size(value), comments[name]))
    rows += [
        ("peak in forward", size(memory.forward.total), _parts(memory.forward)),
        ("peak in backward", size(memory.backward.total), _parts(memory.backward)),
        ("total", size(memory.total), "activations not counted"),
    ]
    widths = [max(len(row[i]) for row in rows[1:]) for i in range(2)]
    lines = [rows[0][0]]
    for name, value, comment in rows[1:]:
        lines.append(f"  {name.ljust(widths[0])}  {value.rjust(widths[1])}  {comment}".rstrip())
    return "\n".join(lines)


def _parts(peak: Peak) -> str:
    names = ("gathered", "spread", "gradients", "packed", "received", "reduced")
    return " + ".join(f"{n} {size(v)}" for n in names if (v := getattr(peak, n)))


def _traffic(plan: Plan) -> str:
    rows = [("communication", "gathers", "", "reduces", "", "all-reduces", "", "collectives", "")]
    for name, found in (
        ("forward", plan.forward),
        ("backward", plan.backward),
        ("step", plan.step),
    ):
        rows.append((name, *_counts(found)))
    return "per rank and step\n" + table(rows)


def _counts(found: Communication) -> tuple[str, str, str, str, str, str, str, str]:
    return (
        str(found.gathers),
        size(found.gather_bytes),
        str(found.reduces),
        size(found.reduce_bytes),
        str(found.all_reduces),
        size(found.all_reduce_bytes),
        str(found.collectives),
        size(found.total_bytes),
    )
