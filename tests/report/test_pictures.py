"""Recordings of a step, and pictures of plans and recordings."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_compose as fc
from fsdp_compose import wrap
from fsdp_compose.comm.codecs import int8_codec
from fsdp_compose.core.autograd import EngineWork
from fsdp_compose.report.plots import _fold_moments, _peaks, _planned_curve, _rows

from harness import run_ranks
from models import Tower, by_block, data, seeded, square

SHOWN = {"plot_memory", "plot_timeline", "plot_shards", "plot_plan"}


def recorded(rank: int, steps: int = 3) -> tuple[fc.Timeline, fc.Plan]:
    model = by_block(seeded(Tower))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    before = dict(vars(EngineWork))
    with fc.trace(model) as timeline:
        for seed in range(steps):
            square(model, data(seed, rank)).backward()
            optim.step()
            optim.zero_grad()
    assert dict(vars(EngineWork)) == before  # nothing of it is left
    return timeline, fc.plan(model)


def test_a_recording_has_every_gather_and_reduction() -> None:
    """Spans of the last step are what a plan counts, and moments what it holds at the most."""

    def ranks(rank: int) -> None:
        timeline, plan = recorded(rank)
        step = timeline.last_step()
        assert 0 < step.seconds <= timeline.seconds and timeline.rank == rank
        of = {lane: [s for s in step.spans if s.lane == lane] for lane in ("gather", "reduce")}
        assert len(of["gather"]) == plan.step.gathers
        assert len(of["reduce"]) == plan.step.reduces
        assert {s.unit for s in of["reduce"]} == {unit.name for unit in plan.units}
        assert all(s.start <= s.end and s.nbytes > 0 for s in (*of["gather"], *of["reduce"]))
        assert timeline.shards == plan.memory.shards
        for name in ("blocks.0", "blocks.1", "blocks.2", "Tower"):
            phases = [s.phase for s in step.spans if (s.lane, s.unit) == ("compute", name)]
            assert "forward" in phases and "backward" in phases, name
        computed = [s.unit for s in step.spans if (s.lane, s.phase) == ("compute", "forward")]
        assert computed[-1] == "Tower"  # its head runs after the units inside it
        assert sum(s.lane == "wait" for s in step.spans) > plan.step.gathers  # for reductions too
        labels, parts = _peaks(plan, step)
        rows = dict(zip(labels, zip(*parts.values(), strict=True), strict=True))
        assert rows["forward, planned"] == rows["forward, measured"]
        assert rows["backward, planned"] == rows["backward, measured"]
        forward = [moment for moment in step.moments if moment.phase == "forward"]
        labels, _ = _peaks(plan, replace(step, moments=forward))
        assert labels == ["forward, planned", "forward, measured", "backward, planned"]
        assert timeline.moments[-1].total == 0

    run_ranks(ranks)


def test_only_the_units_asked_for_are_recorded() -> None:
    models = [fc.fully_shard(nn.Linear(2, 2)) for _ in range(2)]
    with fc.trace(models[0]) as one, fc.trace() as both:
        for model in models:
            model(torch.ones(1, 2)).sum().backward()
        models[0](torch.ones(1, 2))  # which no backward follows
    assert len(both.moments) > len(one.moments)
    assert {moment.phase for moment in both.last_step().moments} == {"forward", "backward"}
    assert not any(moment.gathered for moment in both.moments)  # one rank computes with its shards
    with pytest.raises(KeyError), fc.trace():
        raise KeyError
    assert not fc.Timeline().last_step().spans


@pytest.mark.parametrize("seed", range(4))
def test_simulated_ranks_record_themselves(seed: int) -> None:
    """Each rank its own calls, though their scopes end in any order; then nothing is timed."""

    def train() -> list[str]:
        model = by_block(seeded(Tower))
        with fc.trace() as timeline:
            square(model, data(0, 0)).backward()
        return [moment.unit for moment in timeline.moments]

    before = dict(vars(EngineWork))
    first, *others = fc.simulate(train, 3, seed=seed)
    assert dict(vars(EngineWork)) == before
    assert first[:3] == ["Tower", "Tower", "blocks.0"]  # of its own calls: a gather, a wait
    assert all(found == first for found in others)


def test_a_recording_is_a_chrome_trace(tmp_path: Path) -> None:
    """The file has what Perfetto reads: complete events, pairs of asynchronous ones, counters."""

    def ranks(rank: int) -> None:
        timeline, _ = recorded(rank, steps=1)
        timeline.save(tmp_path / f"{rank}.json")
        assert json.loads(json.dumps(timeline.to_dict()))["rank"] == rank

    run_ranks(ranks)
    events = json.loads((tmp_path / "1.json").read_text())["traceEvents"]
    kinds: dict[str, list[Any]] = {}
    for event in events:
        assert event["pid"] == 1
        kinds.setdefault(event["ph"], []).append(event)
    assert set(kinds) == {"M", "X", "b", "e", "C"}
    assert {e["id"] for e in kinds["b"]} == {e["id"] for e in kinds["e"]}
    assert all(e["dur"] >= 0 for e in kinds["X"])
    threads = {e["tid"]: e["args"]["name"] for e in kinds["M"] if e["name"] == "thread_name"}
    assert all(threads[e["tid"]] == e["name"].split()[0] for e in (*kinds["X"], *kinds["b"]))


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    def ranks(rank: int) -> None:
        timeline, plan = recorded(rank)
        if rank == 0:
            fc.plot_memory(plan, tmp_path / "planned.svg")
            fc.plot_memory(timeline, tmp_path / "recorded.svg")
            fc.plot_timeline(timeline, tmp_path / "timeline.svg")
            fc.plot_shards(plan, tmp_path / "shards.svg")
            fc.plot_shards(fc.plan(nn.Linear(64, 64), world_size=128), tmp_path / "many.svg")
            fc.plot_plan(plan, tmp_path / "plan.svg", timeline)

    run_ranks(ranks)
    texts = {path.stem: path.read_text() for path in tmp_path.glob("*.svg")}
    for word in ("gathered", "packed", "gradients", "shards", "backward"):
        assert f"<!-- {word}" in texts["planned"] or f"<!--  {word}" in texts["planned"], word
    assert "rank 0" in texts["shards"] and "blocks.0 and 2 alike" in texts["shards"]
    assert "rank 0: rows 0-" in texts["shards"] and "backward, measured" in texts["plan"]
    assert "a color for each 2 ranks" in texts["many"] and "<!-- 126 -->" in texts["many"]
    assert "blocks.2" in texts["timeline"] and "waiting for ranks" in texts["timeline"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"offload_policy": fc.Offload(params=True)},
        {"offload_policy": fc.Offload(optimizer=True)},
        {"mp_policy": fc.MixedPrecision(gather_codec=int8_codec()), "reshard_after_forward": True},
        {"static_buffers": True},
        {"reshard_after_forward": 2},
        {"world_size": (2, 4), "strategy": fc.ShardingStrategy.HYBRID_SHARD_OPTIMIZER},
    ],
)
def test_what_is_drawn_adds_up_to_the_plan(options: dict[str, Any]) -> None:
    """At every moment: nothing is below 0, and the most is what the plan says."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.BatchNorm1d(64))
    given = {"world_size": 8, "optimizer": "adamw", "ignored": [model[4]], **options}
    plan = fc.plan(model, units=wrap.by_class(nn.Linear), **given)
    parts = _planned_curve(plan).parts
    assert all(value >= 0 for values in parts.values() for value in values)
    drawn = list(map(sum, zip(*parts.values(), strict=True)))
    assert max(drawn) == plan.memory.total
    turn = next(i for i, moment in enumerate(plan.moments) if moment.phase == "backward")
    assert max(drawn[:turn]) == plan.memory.persistent + plan.memory.forward.total
    bars = list(map(sum, zip(*_peaks(plan, None)[1].values(), strict=True)))
    passes = plan.memory.forward, plan.memory.backward
    assert bars == [plan.memory.shards + peak.total for peak in passes]


def test_units_that_are_alike_are_folded(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
    plan = fc.plan(model, world_size=2, units=wrap.by_class(nn.Linear))
    kept, gaps = _fold_moments(plan)
    assert {moment.unit for moment in kept} >= {"0", "1", "10", "11"}
    assert "5" not in {moment.unit for moment in kept} and set(gaps.values()) == {8}
    assert max(m.peak.total for m in kept) == plan.memory.backward.total
    pytest.importorskip("matplotlib")
    fc.plot_memory(plan, tmp_path / "folded.svg")
    assert (tmp_path / "folded.svg").read_text().count("<!-- 8 alike -->") == 2  # of both passes


def test_which_rows_ranks_have() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
    few, many = (fc.plan(model, world_size=n).buckets[0] for n in (4, 8))
    assert _rows(few, few.offsets[1], (4, 4)) == "rank 2: rows 0-1\nrank 3: rows 2-3"
    assert _rows(many, 0, (8, 4)) == "ranks 0 to 7" and _rows(many, 0, ()) == ""


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_pictures_of_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty model and an empty recording are drawn; without matplotlib, the error says so."""
    source = fc.Timeline() if name == "plot_timeline" else fc.plan(nn.Sequential(), world_size=2)
    getattr(fc, name)(source, tmp_path / "empty.png")
    for module in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=f"{name} needs matplotlib: pip install matplotlib"):
        getattr(fc, name)(source, tmp_path / "none.png")
