"""What a plan says: notes, text, plain data, errors and a picture."""

from __future__ import annotations

import json
import re
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import (
    ShardingStrategy,
    fully_shard,
    wrap,
)
from fsdp_compose.report import Plan, TrafficReport, count_traffic, plan
from fsdp_compose.report.text import size

from harness import fake_world, run_ranks
from models import (
    Tower,
    by_block,
    data,
    one_unit,
    seeded,
    square,
)
from planned_models import BF16, BF16_FP32, BLOCKS, NORMS_FP32, WIDTH, Model, Tied

pytestmark = pytest.mark.filterwarnings("error")


S = ShardingStrategy


def notes(model: nn.Module, **options: Any) -> str:
    return "\n".join(plan(model, world_size=2, **{"units": BLOCKS, **options}).notes)


def test_notes_on_ties() -> None:
    text = notes(Tied())
    assert (
        "tied inside unit 'Tied': 'first.weight' = 'head.weight', stored and reduced once" in text
    )
    assert "tied across units: 'blocks.3.up.weight' of unit 'blocks.3' is " in text
    assert "'blocks.1.up.weight' of unit 'blocks.1'" in text
    live = "\n".join(plan(by_block(Tied())).notes)
    of_ties = lambda text: sorted(t for t in text.split("\n") if "tied" in t)  # noqa: E731
    assert of_ties(text) == of_ties(live)
    assert "tied" not in notes(Model())


def test_notes_on_mixed_dtypes() -> None:
    text = notes(Model(), mp_policy=NORMS_FP32)
    assert (
        "mixed dtypes, a bucket for each: float32 (2 parameters) and float32 computing in " in text
    )
    assert "bfloat16, reduced in float32 (3 parameters), in 4 units ('blocks.0'" in text
    assert "mixed dtypes" not in notes(Model())


def test_notes_on_frozen_parameters_in_a_trained_unit() -> None:
    text = notes(Model("blocks.2.up"))
    numel = 2 * WIDTH * WIDTH + 2 * WIDTH
    assert "frozen and trained parameters mixed in unit 'blocks.2': 33.0k frozen elements" in text
    assert numel == 33024 and "with the trained ones, 129 KiB more at once" in text
    assert "mixed" not in notes(Model("blocks.2"))
    alone = plan(Model("blocks.2.up"), world_size=1, units=BLOCKS)  # where nothing is gathered
    assert "elements; their buckets make no gradient, reduction or opt" in "\n".join(alone.notes)
    model = one_unit(Model())
    model.head.requires_grad_(False)
    assert "as large as if they were trained" in "\n".join(plan(model).notes)


def test_notes_on_parameters_used_far_apart() -> None:
    text = notes(Model())
    assert "unit 'Model' holds parameters used far apart: gradients of 'head.weight', " in text
    assert "(64.5 KiB)" in text and "when those of 'first.weight', 'first.bias' arrive" in text
    head_apart = BLOCKS | wrap.by_fn(lambda name, module: name == "head")
    assert "far apart" not in notes(Model(), units=head_apart)
    assert "far apart" not in notes(Model("head"))
    assert "far apart" not in notes(Model("first"))
    tied = Tied()
    tied.head.bias = None
    assert "far apart" not in notes(tied)  # its gradients are added where the first arrive


def test_a_head_of_its_own_lowers_the_planned_peak() -> None:
    head_apart = BLOCKS | wrap.by_fn(lambda name, module: name == "head")
    together = plan(Model(), world_size=64, units=BLOCKS).memory.backward
    apart = plan(Model(), world_size=64, units=head_apart).memory.backward
    assert apart.total < together.total


def test_notes_on_what_was_left_out() -> None:
    model = Model("first")
    text = notes(model, ignored=[model.head, model.first.weight])
    assert "in no unit, ignored or left out: 2 trained parameters (64.5 KiB): 'head.weight'" in text
    assert "their gradients are not averaged over ranks" in text
    assert "1 frozen parameter (64.0 KiB): 'first.weight'; whole on every rank." in text
    pair = [nn.Linear(4, 4), nn.Linear(4, 4)]
    found = plan(pair, world_size=2, ignored=[layer.weight for layer in pair])
    assert "2 trained parameters (128 B): '0.weight', '1.weight'" in found.notes[0]
    for block in model.blocks:
        fully_shard(block)
    assert "in no unit" in plan(model).notes[0] and "2 trained parameters" in plan(model).notes[0]


def test_notes_on_the_largest_unit_and_padding() -> None:
    assert "largest unit: 'blocks.0', 258 KiB gathered, " in notes(Model())
    assert "the whole model is gathered at once: name units inside it" in notes(Model(), units=None)
    many = "\n".join(plan(Model(), world_size=16384, units=BLOCKS).notes)
    assert "in 5 units ('blocks.0', 'blocks.1', 'blocks.2', 'blocks.3' and 1 more)" in many
    assert "padding is up to " in many and "padding" not in notes(Model())


def test_names_are_clean_of_wrappers() -> None:
    model = nn.Sequential(nn.Module(), nn.Linear(2, 2))
    model[0]._orig_mod = nn.Linear(2, 2)  # as torch.compile(module) does
    assert plan(model, world_size=2).buckets[0].parameters[0] == "0.weight"
    left = plan(model, world_size=2, ignored=[model[0]._orig_mod.weight])
    assert "'0.weight'" in left.notes[0]
    fully_shard(model[0])
    assert plan(model).buckets[0].parameters[0] == "0.weight"
    assert "'1.weight'" in plan(model).notes[0]


def test_the_text() -> None:
    found = plan(
        Model("blocks.1"), world_size=8, units=BLOCKS, mp_policy=BF16_FP32, optimizer="adamw"
    )
    text = str(found)
    assert text.startswith("plan for Model: 5 units, 297k parameter elements (231k trained)")
    assert "over 8 ranks" in text.split("\n")[0]
    assert "A unit is gathered as a whole." in text.split("\n")[1]
    header, *rows = text.split("\n\n")[1].split("\n")
    assert header.split() == [
        "unit", "stored", "computed", "reduced", "parameters", "frozen", "shard", "gathered",
    ]  # fmt: skip
    dtypes = ["float32", "bfloat16", "float32"]
    assert rows[0].split()[:6] == ["blocks.0", *dtypes, "66.0k", "0"]
    assert rows[1].split()[:6] == ["blocks.1", *dtypes, "66.0k", "66.0k"]
    assert "blocks.2 .. 3 (2 alike)" in rows[2]
    assert len(text.split("\n")) < 60 and max(map(len, text.split("\n"))) <= 100
    traffic = text.partition("communication per rank")[2].partition("\n\n")[0]
    assert max(map(len, traffic.split("\n"))) <= 80 and "all-reduces" not in traffic
    for word in (
        "optimizer state",
        "peak in backward",
        "gathers",
        "on top of shards",
        "pass sample=",
    ):
        assert word in text
    assert "sharded Model" in str(plan(by_block(Model())))
    replicas = plan(Model(), world_size=(4, 8), strategy=S.HYBRID_SHARD)
    assert "over 4 replicas of 8 ranks" in str(replicas)
    static = plan(Model(), world_size=8, units=BLOCKS, static_buffers=True)
    row = f"static buffers +{size(static.memory.static_buffers)} +for gathers and packed"
    assert re.search(row, str(static))


def test_as_plain_data() -> None:
    found = plan(Model(), world_size=4, units=BLOCKS, optimizer="adamw", mp_policy=BF16)
    as_dict = json.loads(json.dumps(found.to_dict()))
    assert as_dict["memory"]["total"] == found.memory.total
    assert as_dict["units"][0]["buckets"][0]["compute"] == "bfloat16"
    assert as_dict["step"]["total_bytes"] == found.step.total_bytes
    assert as_dict["units"][0]["full_bytes"] == found.units[0].full_bytes


def test_a_plan_is_frozen() -> None:
    found = plan(Model(), world_size=4)
    with pytest.raises(FrozenInstanceError):
        found.ranks = 5  # type: ignore[misc]


def test_the_sum_over_units_is_the_total() -> None:
    found = plan(Model(), world_size=4, units=BLOCKS, reshard_after_forward=2)
    summed = sum((unit.forward + unit.backward for unit in found.units), TrafficReport())
    assert summed == found.step == found.forward + found.backward
    assert [unit.keeps for unit in found.units] == [False] * 5
    assert [u.keeps for u in plan(Model(), world_size=4, units=BLOCKS).units] == [False] * 4 + [
        True
    ]


def test_planning_changes_nothing() -> None:
    model = Tower()
    before = {name: (p, p.clone()) for name, p in model.named_parameters()}
    keys = set(model.__dict__)
    plan(model, world_size=4, units=BLOCKS)
    for name, p in model.named_parameters():
        assert p is before[name][0] and torch.equal(p, before[name][1])
        assert not p.__dict__
    assert set(model.__dict__) == keys and not model._forward_pre_hooks


def test_options_for_a_sharded_module_are_refused() -> None:
    model = by_block(Tower())
    with pytest.raises(ValueError, match="Tower is sharded already, so world_size, strategy would"):
        plan(model, world_size=4, strategy=S.FULL_SHARD)
    assert isinstance(plan(model, optimizer="adamw"), Plan)


@pytest.mark.parametrize("world", [0, -1, 2.5, True, (2, 0)])
def test_wrong_world_sizes(world: Any) -> None:
    with pytest.raises(ValueError, match="plan: world_size is"):
        plan(Tower(), world_size=world)


def test_errors_are_those_of_fully_shard() -> None:
    with pytest.raises(ValueError, match="the strategy is for a mesh of 2 axes"):
        plan(Tower(), world_size=4, strategy=S.HYBRID_SHARD)
    with pytest.raises(ValueError, match="the strategy is for a mesh of 1 axes"):
        plan(Tower(), world_size=(1, 4), strategy=S.FULL_SHARD)
    with pytest.raises(ValueError, match="wanted a divisor of it"):
        plan(Tower(), world_size=4, reshard_after_forward=3)
    with pytest.raises(ValueError, match="matches no submodule of Tower"):
        plan(Tower(), world_size=4, units=wrap.by_class(nn.Conv2d))
    with pytest.raises(TypeError, match=r"wanted an nn.Module"):
        plan(3, world_size=4)  # type: ignore[arg-type]
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(ValueError, match="world_size or mesh, not both"):
            plan(Tower(), world_size=4, mesh=mesh)


def test_without_a_world_size_it_is_the_world_there_is() -> None:
    assert plan(Tower()).ranks == 1
    with fake_world(16):
        assert plan(Tower()).ranks == 16


def test_traffic_is_counted_inside_the_scope() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        square(model, data(0, rank)).backward()
        with count_traffic() as traffic:
            square(model, data(1, rank)).backward()
        assert (traffic.gathers, traffic.reduces, traffic.all_reduces) == (2 * 3 + 1, 4, 0)
        assert traffic.collectives == 11
        assert traffic.total_bytes == traffic.gather_bytes + traffic.reduce_bytes
        with pytest.raises(RuntimeError), count_traffic() as failed:  # noqa: PT012
            square(model, data(2, rank))
            raise RuntimeError
        assert failed.gathers == 4
        lines = str(traffic).split("\n")
        assert lines[1].split()[:2] == ["gather", "7"] and lines[4].split()[:2] == ["all", "11"]

    run_ranks(ranks)
