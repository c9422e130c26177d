"""A plan as a picture; needs matplotlib, which is imported when it is used."""

from __future__ import annotations

from os import PathLike
from typing import Any

from fsdp_compose.report.figures import Plan
from fsdp_compose.report.text import size

MAX_BARS = 40


def plot_plan(plan: Plan, path: str | PathLike[str]) -> None:
    """Draw memory per unit and at the peak as bars into the file ``path`` (.png, .svg, .pdf).

    Of more than ``MAX_BARS`` units the largest are drawn.

    Raises:
        ImportError: matplotlib is not installed.

    Example:
        >>> plot_plan(plan(nn.Linear(8, 8), world_size=4), "plan.png")  # doctest: +SKIP
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter
    except ImportError as error:
        raise ImportError(
            "plot_plan needs matplotlib: pip install matplotlib, or print(plan) instead."
        ) from error
    units = sorted(plan.units, key=lambda unit: -(unit.full_bytes + unit.shard_bytes))[:MAX_BARS]
    figure = Figure(figsize=(10, 2.2 + 0.28 * len(units)), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=[max(len(units), 2), 2])
    _bars(
        upper,
        [unit.name for unit in units],
        {
            "shard on each rank": [unit.shard_bytes for unit in units],
            "gathered, while it is used": [unit.full_bytes for unit in units],
        },
    )
    memory = plan.memory
    parts = {"shards": memory.shards, "optimizer": memory.optimizer, "buffers": memory.buffers}
    peaks = {"forward": memory.forward, "backward": memory.backward}
    stacked = {name: [value, value] for name, value in parts.items() if value}
    for name in ("gathered", "spread", "gradients", "packed", "received", "reduced"):
        values = [getattr(peak, name) for peak in peaks.values()]
        if any(values):
            stacked[name] = values
    _bars(lower, [f"peak in {name}" for name in peaks], stacked)
    for axes in (upper, lower):
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(int(value))))
    ranks = plan.ranks * plan.replicas
    upper.set_title(f"{plan.module} over {ranks} ranks: {size(memory.total)} per rank at the most")
    figure.savefig(path)


def _bars(axes: Any, labels: list[str], parts: dict[str, list[int]]) -> None:
    """Horizontal bars, stacked, the first label on top."""
    left = [0] * len(labels)
    for name, values in parts.items():
        axes.barh(labels, values, left=left, label=name)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.invert_yaxis()
    if parts:
        axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
