"""Whole tensors are levelled over ranks, inside a unit and from unit to unit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fsdp_compose as fc
from fsdp_compose.buckets.entries import find_entry
from fsdp_compose.core.state import owner_of
from fsdp_compose.layout.matrix_work import balance, matrix_work, spread_work, whole_work
from fsdp_compose.layout.planner import plan_layout
from fsdp_compose.layout.shards import Extent

from harness import run_ranks
from models import Tower
from scripts import run_script
from structured import MAKE, matrices, wholes

sizes = st.tuples(st.integers(1, 6), st.integers(1, 6))


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 5), st.data())
@settings(max_examples=200, deadline=None)
def test_balance_keeps_holders_and_levels_the_rest(
    work: list[int], ranks: int, draw: st.DataObject
) -> None:
    holders = [draw.draw(st.none() | st.integers(0, ranks - 1)) for _ in work]
    owners = balance(work, holders, ranks)
    assert all(o == h if h is not None else 0 <= o < ranks for o, h in zip(owners, holders))
    free = balance(work, [None] * len(work), ranks)
    loads = [sum(w for w, o in zip(work, free) if o == rank) for rank in range(ranks)]
    assert max(loads) <= sum(work) / ranks + max(work, default=0)


def test_ranks_are_busy_with_what_they_hold() -> None:
    """The first rank too: what nobody holds goes to the other one."""
    for holder in (0, 1):
        assert balance([5.0, 1.0, 1.0], [holder, None, None], 2) == [holder, 1 - holder, 1 - holder]


@given(
    st.lists(st.lists(st.tuples(sizes, st.sampled_from(["tensor", 1])), max_size=6), max_size=5),
    st.integers(1, 5),
)
@settings(max_examples=200, deadline=None)
def test_spreading_cuts_and_pads_nothing(units: list[list[Any]], ranks: int) -> None:
    """``Layout`` proves bounds, overlaps and cuts of each; the shard stays as large as it was."""
    loads = [0] * ranks
    for unit in units:
        extents = [Extent(f"p{i}", shape, how) for i, (shape, how) in enumerate(unit)]
        plan = plan_layout(extents, 4, ranks)
        total = list(loads)
        spread = spread_work(plan, total)
        assert spread.shard_numel == plan.shard_numel
        assert spread == plan or len(set(loads)) > 1  # nothing is gained by moving it
        assert sorted(whole_work(spread)) == sorted(whole_work(plan))
        assert total == [a + b for a, b in zip(loads, whole_work(spread))]
        assert max(total) <= max(a + b for a, b in zip(loads, whole_work(plan)))
        for index, extent in enumerate(extents):
            if extent.granularity == "tensor":
                assert len(spread.owners(index)) <= 1
        # Never more than one whole tensor a rank above what an even cut would take.
        widest = max((e.numel for e in extents if e.granularity == "tensor"), default=0)
        assert plan.shard_numel <= -(-sum(e.numel for e in extents) // ranks) + widest + 4
        loads = total


def gpt(layers: int, width: int) -> nn.Module:
    with torch.device("meta"):
        block = lambda: nn.Sequential(  # noqa: E731
            nn.Linear(width, 3 * width), nn.Linear(width, width),
            nn.Linear(width, 4 * width), nn.Linear(4 * width, width),
        )  # fmt: skip
        return nn.Sequential(*(block() for _ in range(layers)))


@pytest.mark.parametrize(
    ("ranks", "layers_in_unit", "ratio", "padding"),
    [
        (2, 1, 1.00, 0.17),
        (4, 1, 1.02, 0.34),
        (8, 1, 1.03, 1.67),  # four matrices of a layer over eight ranks: half of a shard is padding
        (8, 4, 1.00, 0.17),
        (16, 8, 1.06, 0.17),
        (16, 1, 1.12, 4.33),
    ],
)
def test_plan_reports_who_owns_what(
    ranks: int, layers_in_unit: int, ratio: float, padding: float
) -> None:
    """A GPT of 24 layers: max over mean of the work, and padding, by layers in a unit."""
    model = gpt(24, 768)
    if layers_in_unit > 1:
        starts = range(0, 24, layers_in_unit)
        model = nn.Sequential(*(model[i : i + layers_in_unit] for i in starts))
    plan = fc.plan(
        model,
        world_size=ranks,
        granularity=wholes,
        units=fc.wrap.by_fn(lambda name, m: name.isdigit()),
    )
    assert plan.owner_imbalance <= ratio
    assert sum(unit.padding_bytes for unit in plan.units) / (4 * plan.numel) <= padding
    assert "whole tensors" in str(plan) and f"{plan.owner_imbalance:.2f} times the mean" in str(
        plan
    )


def test_cut_matrices_are_levelled_whatever_the_units() -> None:
    """Without granularity nothing is padded, and who owns what does not depend on the layout."""
    work = [matrix_work(p.shape) for p in gpt(24, 768).parameters() if p.ndim == 2]
    for ranks in (2, 4, 8, 16):
        owners = balance(work, [None] * len(work), ranks)
        loads = [sum(w for w, o in zip(work, owners) if o == rank) for rank in range(ranks)]
        assert max(loads) * ranks == sum(work)


def test_the_module_has_the_owners_that_were_planned() -> None:
    def body(rank: int) -> None:
        options = {"granularity": wholes, "units": fc.wrap.by_class({type(Tower().blocks[0])})}
        planned = fc.plan(Tower(5), **options)
        model = fc.fully_shard(Tower(5), **options)
        assert fc.plan(model).owner_work == planned.owner_work
        loads = [0] * 4
        optim = fc.owner_step(matrices(model), MAKE["muon"])
        for p, owner in zip(matrices(model), optim.owners):
            loads[owner] += matrix_work(p.shape)
            assert owner_of(find_entry(p)).layout.owners(find_entry(p).index)[0] == owner
        assert loads == list(planned.owner_work) and min(loads) > 0

    run_ranks(body, 4)


@pytest.mark.slow
def test_the_example_trains_and_resumes_on_other_ranks(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "muon.py"

    saved = str(tmp_path / "saved")
    first = run_script(script, "--steps", 12, "--save", saved)
    losses = [float(v) for v in re.findall(r"loss ([\d.]+)", first)]
    assert losses[-1] < losses[0] - 1
    assert sum(map(int, re.findall(r"Muon has (\d+) of 16", first))) == 16
    again = run_script(script, "--whole", "--steps", 2, "--resume", saved, ranks=3)
    assert float(re.findall(r"step   13  loss ([\d.]+)", again)[0]) < losses[0] - 1
    assert sum(map(int, re.findall(r"Muon has (\d+) of 16", again))) == 16
