"""Plans and recordings as pictures; matplotlib is imported when one is drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from os import PathLike
from typing import Any

from torch import nn

from fsdp_compose.base.arguments import check_kind, check_path
from fsdp_compose.report.buckets import PlannedBucket
from fsdp_compose.report.figures import Plan
from fsdp_compose.report.plan import plan as plan_of
from fsdp_compose.report.schedule import Peak, PlannedMoment
from fsdp_compose.report.text import plural, shorten_name, size
from fsdp_compose.report.timeline import LANES, Timeline

MAX_ROWS = 30
"""Units, or groups of units that are alike, in one picture; of more, the largest are drawn."""

_COLORS = {
    "shards": "#4c5b73",
    "optimizer state": "#8fa3bf",
    "buffers": "#c3cfdf",
    "static buffers": "#9fb7c9",
    "gathered": "#3b82c4",
    "kept in part": "#9ecae8",
    "gradients": "#e08e2b",
    "packed": "#d1495b",
    "activations": "#b8a9d9",
    "compute": "#3b82c4",
    "wait": "#d9d9d9",
    "gather": "#58a55c",
    "reduce": "#d1495b",
}


def plot_memory(source: Plan | Timeline, path: str | PathLike[str]) -> None:
    """Draw memory over one step, stacked: what is kept, gathered weights, gradients, buffers.

    Args:
        source: a plan, drawn over the moments of the step that it played; or a recording of
            ``trace``, whose last step is drawn over time. Of a recording, optimizer state and
            activations are not known.
        path: of the file (.png, .svg, .pdf).

    Raises:
        ImportError: matplotlib is not installed.

    Example:
        >>> plot_memory(plan(nn.Linear(8, 8), world_size=4), "memory.png")  # doctest: +SKIP
    """
    check_kind("plot_memory", "source", source, (Plan, Timeline), "a plan, or a recording by trace")
    check_path("plot_memory", path)
    figure = _figure("plot_memory", 10, 4.8)
    axes = figure.subplots()
    curve = _planned_curve(source) if isinstance(source, Plan) else _recorded_curve(source)
    axes.stackplot(
        curve.positions,
        *curve.parts.values(),
        step="post",
        labels=list(curve.parts),
        colors=[_COLORS[name] for name in curve.parts],
        linewidth=0,
    )
    axes.set_ylim(0, 1.12 * max(1, *map(sum, zip(*curve.parts.values(), strict=True))))
    axes.set_xlim(curve.positions[0], max(curve.positions[-1], curve.positions[0] + 1e-9))
    _use_bytes(axes, "y")
    if curve.turn is not None:
        axes.axvline(curve.turn, color="black", linewidth=0.8, linestyle=":")
        for text, x, side in (("forward ", curve.turn, "right"), (" backward", curve.turn, "left")):
            axes.text(x, 0.995, text, transform=axes.get_xaxis_transform(), ha=side, va="top")
    starts = [i for i, name in enumerate(curve.units) if name != curve.units[i - 1] or not i]
    every = 1 + len(starts) // 16
    if starts:
        names = [curve.units[i] for i in starts[::every]]
        places = [curve.positions[i] for i in starts[::every]]
        axes.set_xticks(places, names, rotation=40, ha="right", fontsize="x-small")
    for index, number in curve.gaps.items():
        at = curve.positions[index]
        axes.axvline(at, color="white", linewidth=5)
        place = axes.get_xaxis_transform()
        axes.text(at, 0.03, f"{number} alike", rotation=90, ha="center", transform=place, size=7)
    axes.set_xlabel(curve.label)
    axes.set_title(curve.title, fontsize="medium")
    _legend(axes, reverse=True)  # in the order in which they lie on each other
    figure.savefig(path, dpi=130)


@dataclass(frozen=True)
class _Curve:
    """Stacked parts by position; ``turn`` is where backward begins."""

    title: str
    label: str
    positions: list[float]
    parts: dict[str, list[int]]
    turn: float | None
    units: Sequence[str] = ()
    gaps: Mapping[int, int] = field(default_factory=dict)  # how many units are left out before


def _planned_curve(source: Plan) -> _Curve:
    memory, (moments, gaps) = source.memory, _fold_moments(source)
    count = max(1, len(moments))
    on_host = sum(bucket.shard_bytes for bucket in source.buckets if bucket.on_host)
    kept = memory.shards - on_host + memory.outside + memory.weight_copies
    state = memory.optimizer - (memory.host - on_host)
    fixed = {"shards": kept, "optimizer state": state, "buffers": memory.buffers}
    fixed["static buffers"] = memory.static_buffers
    parts = {name: [v] * count for name, v in fixed.items() if v > 0 or name == "shards"}
    for name, attributes in (
        ("gathered", ("gathered", "encoded")),
        ("kept in part", ("spread",)),
        ("packed", ("packed", "received")),
        ("gradients", ("gradients", "reduced")),
    ):
        values = [sum(getattr(m.peak, a) for a in attributes) for m in moments] or [0]
        if any(values):
            parts[name] = values
    turns = [i for i, moment in enumerate(moments) if moment.phase == "backward"]
    title = f"{source.module} over {plural(source.ranks, 'rank')}: planned memory of a rank, " + (
        f"{size(memory.total)} at the most"
    )
    label = "the unit that runs, from left to right; activations are not drawn"
    first = turns[0] if turns else count  # forward has fewer moments, and a third of the width
    stretch = max(1.0, (count - first) / (2 * max(1, first)))
    positions = [min(i, first) * stretch + max(0, i - first) for i in range(count)]
    names = [shorten_name(moment.unit, 20) for moment in moments]
    turn = positions[turns[0]] if turns else None
    return _Curve(title, label, positions, parts, turn, names, gaps)


def _fold_moments(source: Plan) -> tuple[list[PlannedMoment], dict[int, int]]:
    """Leave out the middle of a run of units that are alike; where, and how many they were."""
    looks = {unit.name: (unit.shard_bytes, unit.full_bytes) for unit in source.units}
    visits = [list(run) for _, run in groupby(source.moments, key=lambda m: (m.phase, m.unit))]
    kept: list[PlannedMoment] = []
    gaps: dict[int, int] = {}
    for run in _fold(visits, lambda visit: (visit[0].phase, looks.get(visit[0].unit))):
        shown = run if len(run) <= 2 * _ENDS + 1 else [*run[:_ENDS], *run[-_ENDS:]]
        for number, visit in enumerate(shown):
            if number == _ENDS and len(shown) < len(run):
                gaps[len(kept)] = len(run) - len(shown)
            kept += visit
    return kept, gaps


_ENDS = 2  # units that are drawn at each end of a run of alike ones


def _recorded_curve(source: Timeline) -> _Curve:
    step = source.last_step()
    moments = step.moments
    start = moments[0].time if moments else 0.0
    parts = {"shards": [source.shards] * max(1, len(moments))}
    for name in ("gathered", "packed", "gradients"):
        parts[name] = [getattr(moment, name) for moment in moments] or [0]
    turns = [1e3 * (m.time - start) for m in moments if m.phase == "backward"]
    title = f"Memory of rank {source.rank} in a recorded step: weights and gradients"
    positions = [1e3 * (moment.time - start) for moment in moments] or [0.0]
    return _Curve(title, "milliseconds", positions, parts, turns[0] if turns else None)


def plot_timeline(timeline: Timeline, path: str | PathLike[str]) -> None:
    """Draw the last step of a recording: compute, waits, gathers and reductions, by unit.

    ``timeline.save`` writes all of it for Perfetto. The file is .png, .svg or .pdf.

    Raises:
        ImportError: matplotlib is not installed.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> with trace(model) as timeline:
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> plot_timeline(timeline, "timeline.svg")  # doctest: +SKIP
    """
    check_kind("plot_timeline", "timeline", timeline, Timeline, "a recording by trace")
    check_path("plot_timeline", path)
    step = timeline.last_step()
    busy: dict[str, float] = {}
    for span in step.spans:
        busy[span.unit] = busy.get(span.unit, 0.0) + span.end - span.start
    longest = sorted(busy, key=lambda name: -busy[name])[:MAX_ROWS]
    names = [name for name in busy if name in longest]
    figure = _figure("plot_timeline", 11, 1.8 + 0.42 * max(2, len(names)))
    axes = figure.subplots()
    start = min((span.start for span in step.spans), default=0.0)
    height = 0.8 / len(LANES)
    used = [lane for lane in LANES if any(span.lane == lane for span in step.spans)]
    for number, lane in enumerate(used):
        for row, name in enumerate(names):
            spans = [s for s in step.spans if (s.lane, s.unit) == (lane, name)]
            bars = [(1e3 * (s.start - start), 1e3 * (s.end - s.start)) for s in spans]
            at = (row - 0.4 + number * height, height)
            axes.broken_barh(bars, at, facecolors=_COLORS[lane], label=lane if row == 0 else None)
    axes.set_yticks(range(len(names)), [shorten_name(name, 30) for name in names])
    axes.set_ylim(max(1, len(names)) - 0.5, -0.5)
    for row in range(1, len(names)):
        axes.axhline(row - 0.5, color="#eeeeee", linewidth=0.8, zorder=0)
    axes.set_xlabel("milliseconds of the host")
    waited = sum(span.end - span.start for span in step.spans if span.lane == "wait")
    length = max((span.end for span in step.spans), default=0.0) - start
    axes.set_title(
        f"A step of rank {timeline.rank}: {1e3 * length:.1f} ms, of which {1e3 * waited:.1f} ms "
        "waiting for ranks",
        fontsize="medium",
    )
    if names:
        _legend(axes)
    figure.savefig(path, dpi=130)


def plot_shards(source: Plan | nn.Module, path: str | PathLike[str]) -> None:
    """Draw which rank owns which rows of which parameter; buckets that are alike, once.

    Args:
        source: a plan, or a module that is sharded.
        path: of the file (.png, .svg, .pdf).

    Raises:
        ImportError: matplotlib is not installed.

    Example:
        >>> plot_shards(plan(nn.Linear(8, 8), world_size=4), "shards.png")  # doctest: +SKIP
    """
    check_kind("plot_shards", "source", source, (Plan, nn.Module), "a plan, or a sharded module")
    check_path("plot_shards", path)
    found = plan_of(source) if isinstance(source, nn.Module) else source
    runs = _fold(found.buckets, lambda b: (b.offsets, b.shapes, b.shard_numel, b.ranks, b.storage))
    runs = sorted(runs, key=lambda run: -run[0].numel)[:MAX_ROWS]
    figure = _figure("plot_shards", 12, 1.4 + 1.15 * len(runs))
    all_axes = figure.subplots(max(1, len(runs)), 1, squeeze=False)[:, 0]
    for axes, run in zip(all_axes, runs, strict=False):
        _draw_bucket(axes, run)
    figure.suptitle(
        f"{found.module}: who owns what, over {plural(found.ranks, 'rank')}; colors are ranks, "
        "boxes are parameters",
        fontsize="medium",
    )
    figure.savefig(path, dpi=130)


def _draw_bucket(axes: Any, run: Sequence[PlannedBucket]) -> None:
    """A bucket as a bar: ranks above in colors, parameters below in boxes."""
    bucket = run[0]
    total = bucket.shard_numel * bucket.ranks
    shown = min(bucket.ranks, 64)
    for rank in range(shown):
        left, right = rank * total / shown, (rank + 1) * total / shown
        axes.barh(
            1, right - left, left=left, height=0.8, color=_rank_color(rank), edgecolor="white"
        )
        first = rank * bucket.ranks // shown  # of the ranks that this color stands for
        text = f"rank {rank}" if shown <= 16 else str(first)
        axes.text((left + right) / 2, 1, text, ha="center", va="center", fontsize=7 - shown // 32)
    for name, offset, shape in zip(bucket.parameters, bucket.offsets, bucket.shapes, strict=True):
        numel = math.prod(shape)
        axes.barh(
            0, numel, left=offset, height=0.8, color="#f4f1ea", edgecolor="#555555", linewidth=0.6
        )
        if numel > total / 11:
            text = f"{name.removeprefix(bucket.unit + '.')}\n{_rows(bucket, offset, shape)}"
            axes.text(offset + numel / 2, 0, text, ha="center", va="center", fontsize=6.5)
    axes.set_xlim(0, max(total, 1))
    axes.set_ylim(-0.45, 1.45)
    axes.set_yticks([])
    axes.set_xticks([])
    for side in axes.spines.values():
        side.set_visible(False)
    of = f", padding {bucket.padding}" if bucket.padding else ""
    each = f", a color for each {bucket.ranks / shown:.3g} ranks" if shown < bucket.ranks else ""
    title = f"{_name_run(bucket.unit, 50, run)}: {bucket.numel:,} elements{of}{each}"
    axes.set_title(title, fontsize="small", loc="left", pad=2)


def _rows(bucket: PlannedBucket, offset: int, shape: tuple[int, ...]) -> str:
    """Which ranks own which rows, a line for each of few, as ``rank 0: rows 0-511``."""
    if not shape or not bucket.shard_numel:
        return ""
    width = max(1, math.prod(shape[1:]))
    first = offset // bucket.shard_numel
    last = (offset + math.prod(shape) - 1) // bucket.shard_numel
    if last - first > 3:
        return f"ranks {first} to {last}"
    parts = []
    for rank in range(first, last + 1):
        start = max(0, rank * bucket.shard_numel - offset)
        stop = min(math.prod(shape), (rank + 1) * bucket.shard_numel - offset)
        parts.append(f"rank {rank}: rows {start // width}-{(stop - 1) // width}")
    return "\n".join(parts)


def _rank_color(rank: int) -> Any:
    from matplotlib import colormaps

    return colormaps["tab20"](rank % 20 / 20 + 0.025)


def plot_plan(plan: Plan, path: str | PathLike[str], measured: Timeline | None = None) -> None:
    """Draw what each unit takes, and what a step needs: planned, and beside it measured.

    Args:
        plan: of the model; units that are alike are drawn once, the largest 30 of them.
        path: of the file (.png, .svg, .pdf).
        measured: a recording of a step of the same model by ``trace``.

    Raises:
        ImportError: matplotlib is not installed.

    Example:
        >>> plot_plan(plan(nn.Linear(8, 8), world_size=4), "plan.png")  # doctest: +SKIP
    """
    check_kind("plot_plan", "plan", plan, Plan, "a plan")
    check_path("plot_plan", path)
    if measured is not None:
        check_kind("plot_plan", "measured", measured, Timeline, "a recording by trace, or None")
    runs = _fold(plan.units, lambda u: (u.shard_bytes, u.full_bytes, u.padding_bytes))
    runs = sorted(runs, key=lambda run: -run[0].full_bytes)[:MAX_ROWS]
    rows = 2 if measured is None else 4
    figure = _figure("plot_plan", 10, 2.6 + 0.3 * len(runs) + 0.35 * rows)
    upper, lower = figure.subplots(2, 1, height_ratios=[max(len(runs), 2), 2 + rows / 2])
    _bars(
        upper,
        [_name_run(run[0].name, 28, run) for run in runs],
        {
            "shards": [run[0].shard_bytes for run in runs],
            "gathered": [run[0].full_bytes for run in runs],
        },
    )
    upper.set_title(
        f"{plan.module} over {plural(plan.ranks * plan.replicas, 'rank')}: "
        f"{size(plan.memory.total)} per rank at the most, activations not counted",
        fontsize="medium",
    )
    labels, parts = _peaks(plan, None if measured is None else measured.last_step())
    _bars(lower, labels, parts)
    lower.set_title("weights and gradients of a rank at the peak of a step", fontsize="medium")
    figure.savefig(path, dpi=130)


def _peaks(plan: Plan, measured: Timeline | None) -> tuple[list[str], dict[str, list[int]]]:
    """Stacked bars: the peak of each pass; beside a measured one, of what a recording sees."""
    labels: list[str] = []
    rows: list[dict[str, int]] = []
    for phase in ("forward", "backward"):
        found = [moment.peak for moment in plan.moments if moment.phase == phase]
        if measured is not None:
            unseen = dict.fromkeys(("encoded", "gradients", "received", "spread"), 0)
            found = [replace(peak, **unseen) for peak in found]
        peak = max(found, key=lambda peak: peak.total, default=Peak())
        labels.append(f"{phase}, planned")
        rows.append(
            {
                "shards": plan.memory.shards,
                "gathered": peak.gathered + peak.encoded + peak.spread,
                "packed": peak.packed + peak.received,
                "gradients": peak.gradients + peak.reduced,
            }
        )
        seen = [m for m in measured.moments if m.phase == phase] if measured else []
        if measured is not None and seen:
            most = max(seen, key=lambda moment: moment.total)
            labels.append(f"{phase}, measured")
            parts = {name: getattr(most, name) for name in ("gathered", "packed", "gradients")}
            rows.append({"shards": measured.shards, **parts})
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    return labels, {name: [row[name] for row in rows] for name in names}


def _name_run(name: str, width: int, run: Sequence[object]) -> str:
    """A name in at most ``width`` columns, and how many others it stands for."""
    alike = f" and {len(run) - 1} alike" if len(run) > 1 else ""
    return f"{shorten_name(name, width)}{alike}"


def _fold(items: Iterable[Any], key: Any) -> list[list[Any]]:
    """Neighbours with the same key, together."""
    return [list(run) for _, run in groupby(items, key=key)]


def _bars(axes: Any, labels: list[str], parts: dict[str, list[int]]) -> None:
    """Horizontal bars, stacked, the first label on top."""
    left = [0] * len(labels)
    for name, values in parts.items():
        axes.barh(labels, values, left=left, label=name, color=_COLORS[name], height=0.7)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.invert_yaxis()
    _use_bytes(axes, "x")
    if parts:
        _legend(axes)


def _figure(name: str, width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"{name} needs matplotlib: pip install matplotlib, or print the plan instead."
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def _use_bytes(axes: Any, which: str) -> None:
    """Ticks at round binary sizes: 1, 2, 5, 10, 20, 50, ... of the unit that fits."""
    from matplotlib.ticker import FixedLocator, FuncFormatter

    axis = axes.yaxis if which == "y" else axes.xaxis
    most = (axes.get_ylim() if which == "y" else axes.get_xlim())[1]
    unit = 1024 ** max(0, int(math.log(max(most, 1), 1024)))
    steps = [unit * digit * 10**power / 10 for power in range(5) for digit in (1, 2, 5)]
    step = next((s for s in steps if most / s <= 8), steps[-1])
    axis.set_major_locator(FixedLocator([step * i for i in range(int(most / step) + 1)]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    axes.grid(axis=which, color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)


def _tick(value: float) -> str:
    number, unit = size(round(value)).split(" ")
    return f"{float(number):g} {unit}"


def _legend(axes: Any, reverse: bool = False) -> None:
    """Beside the picture, where it covers nothing."""
    place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
    axes.legend(fontsize="small", frameon=False, reverse=reverse, **place)
