"""What streams and CUDA graphs rely on, broken on purpose: each break fails the test it names."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_compose.attach import build_unit
from fsdp_compose.base import mesh
from fsdp_compose.buckets import reduce
from fsdp_compose.comm import waiting
from fsdp_compose.core import passes
from fsdp_compose.core.guards import called_again

from breaking import assert_noticed, put

CAPTURED = ("core/test_streams.py", "test_a_captured_graph_ends_at_anchors_of_its_own")
MARKS = ("comm/test_waiting.py", "test_the_watch_asks_for_old_marks_alone")

BREAKS: dict[str, tuple[Any, ...]] = {
    "a graph ends at the anchor of all": (
        put(called_again, "choose_anchor", lambda unit: None), *CAPTURED,
    ),
    "what runs beside a graph outlives it": (
        put(passes, "join_graph", lambda streams: None), *CAPTURED,
    ),
    "marks are kept in a graph": (put(waiting, "forget_marks", lambda: None), *MARKS),
    "young marks are asked for": (put(waiting, "POST_AFTER", -1.0), *MARKS),
    "a module of units is on the CPU": (
        put(build_unit, "iter_units", lambda module: ()),
        "construct/test_odd_modules.py", "test_a_module_of_units_alone_is_on_their_device",
    ),
    "two halves are added whole": (
        put(reduce, "math", SimpleNamespace(floor=round, log2=math.log2)),
        "core/test_precision.py", "test_half_precision_is_scaled_before_each_sum",
    ),
    "simulated ranks share a device": (
        put(mesh, "here", SimpleNamespace(simulated=None)),
        "simulation/test_simulate.py", "test_accelerators_are_refused",
    ),
}  # fmt: skip
"""What is not heeded any more: how, and the test that notices it."""


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_stream_is_noticed(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_noticed(BREAKS[name], caplog=caplog, monkeypatch=monkeypatch)
