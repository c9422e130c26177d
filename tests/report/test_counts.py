"""Reports count everything that is there once, and leave what they look at as it was."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import (
    MixedPrecision,
    Offload,
    ShardingStrategy,
    count_traffic,
    default_hook,
    fully_shard,
    register_comm_hook,
    simulate,
    trace,
    trace_execution_order,
    wrap,
)
from fsdp_compose.report import explain, plan

from models import mesh_of_replicas

pytestmark = pytest.mark.filterwarnings("error")


class Tied(nn.Module):
    """An embedding whose weight is the head's, and a layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(10, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(tokens)))


def test_a_tied_parameter_of_no_unit_counts_once() -> None:
    model = Tied()
    nbytes = model.embed.weight.nbytes
    found = plan(model, world_size=2, ignored=[model.embed.weight], optimizer="adamw")
    assert found.memory.outside == 4 * nbytes  # itself, its gradient and two of state
    assert "1 trained parameter (160 B): 'embed.weight'" in found.notes[0]
    fully_shard(model, ignored=[model.embed.weight])
    assert explain(model).other == nbytes


def test_state_in_lists_and_dictionaries_counts() -> None:
    model = fully_shard(nn.Linear(4, 2))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    optim.state[model.weight] = {"factors": [torch.zeros(3), {"left": (torch.zeros(5),)}]}
    optim.state[model.bias] = {"moment": torch.zeros_like(model.bias)}
    assert explain(model, optim).optimizer == 4 * (3 + 5 + 2)


class Drawing(nn.Linear):
    """Draws on the host in its forward, as layers that are left out at random do."""

    def forward(self, x: Tensor) -> Tensor:
        torch.randperm(4, device="cpu")
        random.random()
        return super().forward(x)


def test_a_forward_that_is_looked_at_draws_nothing() -> None:
    model, before = Drawing(4, 4), (torch.get_rng_state(), random.getstate())
    plan(model, world_size=2, sample=torch.ones(1, 4))
    trace_execution_order(model)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_a_gradient_that_is_copied_to_the_host() -> None:
    """One, where no rank sends any: it is memory of the stream that the next are packed on."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    options = {"units": wrap.by_class(nn.Linear), "offload_policy": Offload(params=True)}
    alone, two = (plan(model, world_size=n, **options).moments for n in (1, 2))
    assert max(m.peak.packed and m.peak.reduced for m in alone) == 64 * 64 * 4
    assert alone[-1].peak.reduced == 0 and not any(m.peak.reduced for m in two)


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "HYBRID_SHARD_OPTIMIZER"])
def test_sums_over_replicas_in_one_tree(strategy: str) -> None:
    """They take a reduce-scatter and a gather, and no all-reduce."""

    def ranks() -> None:
        torch.manual_seed(0)
        model, kind, mesh = nn.Linear(7, 3), ShardingStrategy[strategy], mesh_of_replicas(2, 2)
        fully_shard(model, mesh=mesh, strategy=kind, deterministic=4, reshard_after_forward=None)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with count_traffic() as traffic:
                model(torch.ones(1, 7)).sum().backward()
            optim.step()
            optim.zero_grad()
        planned = plan(model).step.to_dict()
        assert planned == {**traffic.to_dict(), "control": 0} and not planned["all_reduces"]

    simulate(ranks, 4)


def test_a_communication_hook_is_noted() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(2, 2)), units=wrap.by_name("0"))
    assert not any("hook" in note for note in plan(model).notes)
    register_comm_hook(model[0], None, default_hook)
    wanted = "a communication hook reduces gradients of unit '0': what it sends is not known"
    assert any(wanted in note for note in plan(model).notes)


def test_a_plan_over_replicas_alone() -> None:
    """Before and after sharding: each of four ranks is sent what the three others add."""

    def ranks() -> None:
        mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard"))
        torch.manual_seed(0)
        model, kind = nn.Linear(64, 64), ShardingStrategy.HYBRID_SHARD_OPTIMIZER
        before = plan(model, mesh=mesh, strategy=kind)
        fully_shard(model, mesh=mesh, strategy=kind)
        assert before.moments == plan(model).moments
        most = max(moment.peak.reduced for moment in before.moments)
        assert most == 3 * before.units[0].shard_bytes

    simulate(ranks, 4)


def test_a_recording_of_complex_gradients() -> None:
    """They are reduced as real numbers, of which each is two."""
    model = fully_shard(nn.Linear(4, 4, bias=False, dtype=torch.complex64))
    with trace(model) as timeline:
        model(torch.ones(1, 4, dtype=torch.complex64)).abs().sum().backward()
    assert [span.nbytes for span in timeline.spans if span.lane == "reduce"] == [4 * 4 * 8]
    planned = plan(nn.Linear(4, 4, bias=False, dtype=torch.complex64), world_size=2)
    assert planned.step.reduce_bytes == 4 * 4 * 8 // 2


@pytest.mark.parametrize("replicas", [1, 4])
def test_gradients_that_are_kept_in_a_narrower_dtype(replicas: int) -> None:
    """Sums in float32 are copied to what ``.grad`` is, of half their bytes, and nothing else."""
    model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    precision = MixedPrecision(reduce_dtype=torch.float32)
    strategy = ShardingStrategy.NO_SHARD if replicas > 1 else None
    found = plan(model, world_size=4, mp_policy=precision, strategy=strategy)
    wanted = 64 * 64 * 2 * replicas // 4
    assert max(moment.peak.reduced for moment in found.moments) == wanted


def test_a_copy_on_the_device_is_cast_once() -> None:
    """Backward gathers from the copies of shards that forward has made, and casts none."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    options = {"units": wrap.by_class(nn.Linear), "mp_policy": MixedPrecision(torch.bfloat16)}
    whole, shard = 64 * 64 * 2, 64 * 64 * 4 // 8
    for policy, cast in ((Offload(params=True), shard), (Offload(optimizer=True), 0)):
        found = plan(model, world_size=8, offload_policy=policy, **options)
        most = {m.phase: 0 for m in found.moments}
        for moment in found.moments:
            most[moment.phase] = max(most[moment.phase], moment.peak.gathered)
        assert most == {"forward": 2 * whole + shard, "backward": 2 * whole + cast}
