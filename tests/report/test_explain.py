"""``explain`` tells what is in memory, why, and what happens next, at every moment of a step."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp_compose import (
    Offload,
    ShardingStrategy,
    fully_shard,
    no_sync,
    reshard,
    set_is_last_backward,
    set_requires_all_reduce,
    set_reshard_after_backward,
    unshard,
)
from fsdp_compose.core.guards.moved_parameters import shard_of
from fsdp_compose.report import Explanation, explain, plan

from harness import run_ranks
from models import Block, Ledger, Tower, by_block, data, one_unit, seeded, square, units

pytestmark = pytest.mark.filterwarnings("error")


def unit_of(found: Explanation, name: str) -> Any:
    return next(unit for unit in found.units if unit.name == name)


def test_at_rest() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        found = explain(model)
        assert found.gathered == () and found.now == () and found.next == ()
        assert [unit.name for unit in found.units] == ["Tower", "blocks.0", "blocks.1", "blocks.2"]
        assert all(unit.phase == "sharded" and not unit.reasons for unit in found.units)
        shards = sum(shard_of(b).nbytes for u in units(model) for b in u.buckets)
        assert found.total == shards == sum(unit.shards for unit in found.units)

    run_ranks(ranks)


def test_between_forward_and_backward() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        loss = square(model, data(0, rank))
        found = explain(model)
        assert found.gathered == ("Tower",)
        root = unit_of(found, "Tower")
        assert root.phase == "gathered" and root.reasons == ("kept for backward",)
        assert root.gathered == units(model)[0].buckets[0].views.nbytes
        assert "stay gathered until backward, or the next forward: 'Tower'" in found.next[0]
        assert "torch.no_grad(), or call reshard(module)" in found.next[0]
        loss.backward()
        assert explain(model).gathered == ()

    run_ranks(ranks)


class Asking(Block):
    """Explains the whole model inside its forward and when its gradient arrives."""

    model: Any = None

    def forward(self, x: Tensor) -> Tensor:
        found = self.model[0]
        self.model[1].append(explain(found))
        x = x * 1
        x.register_hook(lambda grad: self.model[1].append(explain(found)))
        return super().forward(x)


def test_inside_forward_and_backward() -> None:
    def ranks(rank: int) -> None:
        model = seeded(lambda: Tower(2))
        model.blocks[1] = Asking().double()
        torch.manual_seed(0)
        by_block(model, init="as_is")
        seen: list[Explanation] = []
        for seed in range(2):
            seen.clear()
            model.blocks[1].model = (model, seen)
            square(model, data(seed, rank)).backward()
            model.blocks[1].model = None
        forward, backward = seen
        assert unit_of(forward, "blocks.1").reasons == ("its forward is running",)
        assert unit_of(forward, "Tower").reasons == ("its forward is running",)
        assert forward.now == ("in forward: 'Tower' > 'blocks.1'",)
        assert "its backward is running" in unit_of(backward, "Tower").reasons
        assert "kept for backward" in unit_of(backward, "Tower").reasons
        assert unit_of(backward, "blocks.1").reasons == ("its backward is running",)
        assert unit_of(backward, "blocks.0").reasons == ("gathered ahead of use",)
        assert backward.now[0].startswith("in backward: 'Tower'")

    run_ranks(ranks)


def test_what_the_user_holds() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        unshard(model.blocks[1])
        found = explain(model)
        assert found.gathered == ("blocks.1",)
        assert "unshard(module) was called and reshard(module) was not" in str(found)
        assert "stay gathered until reshard(module): 'blocks.1'" in found.next
        reshard(model.blocks[1])
        assert explain(model).gathered == ()

    run_ranks(ranks)


def test_a_graph_over_gradients() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        x = data(0, rank).requires_grad_()
        (grad,) = torch.autograd.grad(square(model, x), x, create_graph=True)
        found = explain(model)
        assert set(found.gathered) == {u.name for u in found.units}
        assert "create_graph" in unit_of(found, "blocks.0").reasons[0]
        assert any("until the backward over their graph has run" in text for text in found.next)
        grad.square().sum().backward()

    run_ranks(ranks)


def test_gradients() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        square(model, data(0, rank)).backward()
        found = explain(model)
        wanted = sum(shard_of(b).nbytes for u in units(model) for b in u.buckets)
        assert sum(unit.gradients for unit in found.units) == wanted
        assert "have gradients: 'Tower', 'blocks.0', 'blocks.1', 'blocks.2'" in found.next[0]
        assert "zero_grad()" in found.next[0]
        model.zero_grad()
        assert sum(unit.gradients for unit in explain(model).units) == 0

    run_ranks(ranks)


def test_gradients_that_wait_to_be_reduced() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        with no_sync(model):
            square(model, data(0, rank)).backward()
            inside = explain(model)
        flat = sum(b.layout.numel * 8 for u in units(model) for b in u.buckets)
        assert sum(unit.packed for unit in inside.units) == flat
        assert "the next backward with gradient sync adds to them and reduces" in inside.next[0]
        square(model, data(1, rank)).backward()
        assert sum(unit.packed for unit in explain(model).units) == 0

    run_ranks(ranks)


def test_gradients_that_wait_for_replicas() -> None:
    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = by_block(seeded(Tower), mesh=mesh)
        set_requires_all_reduce(model, False)
        square(model, data(0, rank)).backward()
        found = explain(model)
        assert all(unit.partial == unit.shards for unit in found.units)
        assert any("wait for the all-reduce over replicas" in text for text in found.next)
        set_requires_all_reduce(model, True)
        square(model, data(1, rank)).backward()
        assert not any(unit.partial for unit in explain(model).units)

    run_ranks(ranks, 4)


def test_gradients_of_earlier_microbatches() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower), offload_policy=Offload(grads=True, pin_memory=False))
        set_is_last_backward(model, False)
        square(model, data(0, rank)).backward()
        found = explain(model)
        assert all(unit.waiting == unit.shards for unit in found.units)
        assert any("set_is_last_backward(module, True) brings them" in t for t in found.next)
        set_is_last_backward(model, True)
        square(model, data(1, rank)).backward()

    run_ranks(ranks)


def test_what_is_spread_over_fewer_ranks() -> None:
    def ranks(rank: int) -> None:
        model = one_unit(seeded(Tower), reshard_after_forward=2)
        loss = square(model, data(0, rank))
        (unit,) = explain(model).units
        assert unit.spread == units(model)[0].buckets[0].views.nbytes // 2 and not unit.gathered
        loss.backward()
        assert explain(model).units[0].spread == 0

    run_ranks(ranks, 4)


def test_what_is_kept_and_stale() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower), strategy=ShardingStrategy.SHARD_GRAD_OP)
        set_reshard_after_backward(model, False)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        square(model, data(0, rank)).backward()
        found = explain(model)
        assert "kept from backward on (set_reshard_after_backward)" in str(found)
        assert not any(unit.is_stale for unit in found.units)
        optim.step()
        found = explain(model)
        assert all(unit.is_stale for unit in found.units)
        assert any("gathered again in the next forward" in text for text in found.next)

    run_ranks(ranks)


def test_how_far_a_deterministic_step_is() -> None:
    model = fully_shard(nn.Linear(4, 4), deterministic=4)
    for done in range(3):
        told = "".join(explain(model).next)
        assert (f"{done} of 4 backwards of a step are summed (unit 'Linear'" in told) == (done > 0)
        model(torch.ones(1, 4)).sum().backward()


def test_a_backward_that_failed() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        loss = square(model, data(0, rank))

        def fail(grad: Tensor) -> Tensor:
            raise KeyError("on purpose")

        x = data(1, rank).requires_grad_()
        x.register_hook(fail)
        with pytest.raises(KeyError):
            (loss * square(model, x)).backward()
        assert any("ended with an error; the next forward" in text for text in explain(model).now)
        square(model, data(2, rank)).backward()
        assert not any("error" in text for text in explain(model).now)

    run_ranks(ranks)


def test_the_report_changes_and_communicates_nothing() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        square(model, data(0, rank)).backward()
        versions = [p._version for p in model.parameters()]
        if rank == 0:  # one rank alone, and no hang
            with Ledger() as ledger:
                str(explain(model))
            assert ledger.peak <= 8 * model.head.weight.numel()
        assert versions == [p._version for p in model.parameters()]
        square(model, data(1, rank)).backward()

    run_ranks(ranks)


def test_optimizer_and_what_is_in_no_unit() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    fully_shard(model[0])
    optim = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optim.step()
    found = explain(model, optim)
    numel = sum(p.numel() for p in model.parameters())
    assert found.optimizer == 2 * 4 * numel + 4 * len(list(model.parameters()))
    outside = sum(p.numel() for p in (*model[1].parameters(), *model[2].parameters()))
    assert found.other == 2 * 4 * outside + 8 * 4 * 2 + 8
    assert found.total == found.units[0].total + found.optimizer + found.other
    assert "in no unit, ignored or left out: 4 trained parameters" in found.notes[0]
    assert "optimizer state" in str(found)


def test_parts_of_tensor_parallelism_in_no_unit() -> None:
    """Of a DTensor that was ignored, its gradient and its state, this rank's part is counted."""

    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        parallelize_module(model[1], mesh["tp"], ColwiseParallel())
        nbytes = 4 * 8 * 8 // 2
        given = {"mesh": mesh["dp"], "ignored": [model[1]]}
        assert plan(model, optimizer="adamw", **given).memory.outside == 4 * nbytes
        fully_shard(model, **given)
        optim = torch.optim.AdamW(model[1].parameters())
        model(torch.ones(1, 8)).sum().backward()
        optim.step()
        found = explain(model, optim)
        assert (found.other, found.optimizer) == (2 * nbytes, 2 * nbytes + 4)

    run_ranks(ranks)


def test_why_it_is_this_big_is_said_as_in_a_plan() -> None:
    model = by_block(seeded(Tower))
    text = str(explain(model))
    assert "why it is this big" in text and "used far apart" in text
    assert text.startswith("Tower on this rank: ")


def test_one_rank_computes_with_its_shards() -> None:
    model = fully_shard(nn.Linear(3, 2))
    model(torch.ones(1, 3))
    assert [(unit.phase, unit.gathered) for unit in explain(model).units] == [("gathered", 0)]


def test_as_plain_data() -> None:
    found = explain(by_block(seeded(Tower)))
    as_dict = json.loads(json.dumps(found.to_dict()))
    assert as_dict["total"] == found.total
    assert as_dict["units"][0]["phase"] == "sharded"


def test_a_module_that_is_not_sharded() -> None:
    with pytest.raises(ValueError, match=r"Tower is not a unit.*plan\(module, world_size=...\)"):
        explain(Tower())
