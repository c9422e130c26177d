"""A parameter that no rank used keeps ``grad is None``; one that some used counts as zero there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import (
    MixedPrecision,
    Offload,
    ShardingStrategy,
    accumulate,
    bf16_compress_hook,
    fully_shard,
    gathered,
    no_sync,
    participate,
    register_comm_hook,
    reshard,
    set_find_unused_parameters,
    unshard,
)
from fsdp_compose.comm import collectives as comm
from fsdp_compose.core.guards import used_parameters as used_module
from fsdp_compose.scopes.comm_hooks import default_hook

from harness import rank_errors, run_ranks, simulate_ranks
from laws import PLANS, Choosy, check_steps, choose
from models import (
    WIDTH,
    Twin,
    adamw,
    data,
    mesh_of_replicas,
    seeded,
    square,
    whole,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "grad_op": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "none": {"strategy": ShardingStrategy.NO_SHARD},
    "offload": {"offload_policy": Offload(params=True, grads=True)},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_what_no_rank_used_is_left_alone(option: str) -> None:
    """Whatever ranks use from step to step; AdamW and SGD with weight decay."""

    def train(rank: int) -> None:
        check_steps(Twin(rank, 2, Choosy, lambda m: fully_shard(m, **OPTIONS[option]), adamw))
        decayed = lambda params: torch.optim.SGD(params, 0.1, weight_decay=0.1)  # noqa: E731
        check_steps(Twin(rank, 2, Choosy, lambda m: fully_shard(m, **OPTIONS[option]), decayed))

    run_ranks(train, 2)


@pytest.mark.parametrize("heads", [True, False])
def test_replicas_find_what_others_used(heads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over both axes, with the all-reduce in every backward and in the last one only.

    Without heads ahead of the data, as on other backends than gloo, the ranks are asked apart.
    """
    if not heads:
        monkeypatch.setattr(comm, "is_point_to_point", lambda group: False)

    def train(rank: int) -> None:
        for strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2):
            mesh = mesh_of_replicas(2, 2)
            shard = lambda m: fully_shard(m, mesh=mesh, strategy=strategy)  # noqa: E731
            twin = Twin(rank, 4, Choosy, shard, adamw)
            check_steps(twin, [[(0,), (0,), (0,), (1,)], [(0,)] * 4, [(2,), (1,), (0,), (0,)]])
            with accumulate(twin.model, keep="no_all_reduce"):
                for seed, plan in enumerate([[(0,)] * 4, [(0,), (0,), (1,), (0,)], [(0,)] * 4]):
                    choose(twin, plan)
                    twin.backward(square, seed)
            assert twin.model.layers[2].weight.grad is None
            twin.step()

    run_ranks(train, 4)


@pytest.mark.parametrize("keep", ["sharded", "unsharded", "no_all_reduce"])
def test_accumulation_counts_what_any_microbatch_used(keep: Any) -> None:
    """A parameter first used in the last microbatch, or in the first alone, on one rank."""

    def train(rank: int) -> None:
        twin = Twin(rank, 2, Choosy, fully_shard, adamw)
        plans = [[(0,), (0,)], [(0,), (1,)], [(0,), (0,)], [(0, 2), (0,)]]
        for _ in range(2):
            with accumulate(twin.model, keep=keep):
                for seed, plan in enumerate(plans):
                    choose(twin, plan)
                    twin.backward(square, seed)
            assert twin.model.scale.grad is None
            twin.step()
        with no_sync(twin.model):
            choose(twin, plans[1])
            twin.backward(square, 7)
        choose(twin, plans[0])
        twin.backward(square, 8)
        twin.step()
        twin.check()

    run_ranks(train, 2)


def test_other_ways_for_gradients_to_arrive() -> None:
    """Communication hooks, scopes, mixed precision, ``autograd.grad`` and ``participate``."""

    def train(rank: int) -> None:
        twin = Twin(rank, 2, Choosy, fully_shard, adamw)
        register_comm_hook(twin.model, None, default_hook)
        check_steps(twin, PLANS[:4])
        register_comm_hook(twin.model, None, None)
        for plan in PLANS[2:4]:
            choose(twin, plan)
            with gathered(twin.model):
                loss, plain = twin.losses(square, 5)
            loss.backward()
            plain.backward()
            twin.step()
            unshard(twin.model)
            loss, plain = twin.losses(square, 6)
            reshard(twin.model)
            loss.backward()
            plain.backward()
            twin.step()
        small = fully_shard(Choosy(), mp_policy=MixedPrecision(torch.bfloat16))
        register_comm_hook(small, None, bf16_compress_hook)
        small.chosen = ((0,), (0, 1))[rank]
        small(data(0, rank, dtype=torch.float32)).float().mean().backward()
        assert [layer.weight.grad is None for layer in small.layers] == [False, False, True]

    run_ranks(train, 2)


def test_autograd_grad_gives_what_others_used() -> None:
    """None for what no rank used, this rank's part of the average for what another did."""

    def train(rank: int) -> None:
        twin = Twin(rank, 2, Choosy, fully_shard)
        for create_graph in (False, True):
            choose(twin, PLANS[3])
            ours, plain = twin.losses(square, 0)
            options = {"allow_unused": True, "create_graph": create_graph}
            found = torch.autograd.grad(ours, list(twin.model.parameters()), **options)
            wanted = torch.autograd.grad(plain, list(twin.reference.parameters()), **options)
            for mine, theirs in zip(found, wanted):
                assert (mine is None) == (theirs is None)
                if mine is not None:
                    torch.testing.assert_close(whole(mine.detach()), theirs.detach())

    run_ranks(train, 2)


def test_a_rank_that_skips_a_unit_joins() -> None:
    """What ran elsewhere counts as zero here; what ran nowhere keeps None."""

    def train(rank: int) -> None:
        model = seeded(Choosy)
        fully_shard(model)
        for step in range(3):
            model.chosen = (0, 2)
            x = data(step, rank)
            loss = square(model, x) if rank == step % 2 else participate(model)
            loss.backward()
            assert [p.weight.grad is None for p in model.layers] == [False, True, False]
            model.zero_grad()

    run_ranks(train, 2)


def test_a_unit_tied_to_another_that_uses_less() -> None:
    """Two units share a weight; on one rank only one of them uses it."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Choosy()
            self.outer = nn.Linear(WIDTH, WIDTH)
            self.outer.weight = self.inner.layers[0].weight
            self.chosen: tuple[int, ...] = ()

        def forward(self, x: Tensor) -> Tensor:
            self.inner.chosen = self.chosen
            x = self.inner(x)
            return self.outer(x) if 0 in self.chosen else x + self.outer.bias

    def shard(model: nn.Module) -> nn.Module:
        fully_shard(model.inner)
        return fully_shard(model)

    def train(rank: int) -> None:
        twin = Twin(rank, 2, Tied, shard, adamw)
        for seed, plan in enumerate(([(0,), (1,)], [(1,), (1,)], [(1,), (0,)])):
            choose(twin, plan)
            twin.backward(square, seed)
            assert twin.model.inner.scale.grad is None
            twin.step()

    run_ranks(train, 2)


@pytest.mark.parametrize("asked", [False, True])
def test_accelerators_go_by_what_ranks_agreed_on(asked: bool) -> None:
    """Patterns as in the first step are exact; another is an error, unless ranks were to ask."""

    def train(rank: int) -> None:
        twin = Twin(rank, 2, Choosy, fully_shard, adamw)
        if asked:
            set_find_unused_parameters(twin.model, True)
        # A communication hook's gradients travel without flags, as all do on an accelerator.
        register_comm_hook(twin.model, None, default_hook)
        used_module.is_known_at_once = lambda *_: False
        comm.is_point_to_point = lambda _: False
        check_steps(twin, [PLANS[1]] * 3)
        check_steps(twin, [PLANS[5]])

    if asked:
        run_ranks(train, 2)
        return
    for error in rank_errors(train, 2):
        assert "parameter 'layers." in str(error) and "set_find_unused_parameters" in str(error)


@pytest.mark.parametrize("option", ["full", "none"])
def test_gradients_carry_what_was_used(option: str) -> None:
    """No message is sent for that alone, except where a hook sends the gradients."""

    def count(rank: int) -> list[int]:
        send, sent = comm.send_heads, list[str]()

        def noted(caller: Any, head: Any, group: Any, purpose: str, *rest: Any, **more: Any) -> Any:
            sent.append(purpose)
            return send(caller, head, group, purpose, *rest, **more)

        comm.send_heads = noted
        model, counts = fully_shard(seeded(Choosy), **OPTIONS[option]), list[int]()
        for hook in (None, default_hook):
            if hook is not None:
                register_comm_hook(model, None, hook)
            for step in range(2):
                sent.clear()
                square(model, data(step, rank)).backward()
                counts.append(sent.count("compare gradients"))
        assert sent
        return counts

    assert run_ranks(count, 2) == [[0, 0, 1, 1]] * 2


def test_a_rank_that_used_all_counts_for_the_others() -> None:
    """It sends no list of what it used; the others know from that."""

    class Two(nn.ModuleList):
        def forward(self, x: Tensor, count: int) -> Tensor:
            return sum((part(x) for part in self[:count]), torch.zeros(()))

    def ranks(rank: int) -> list[float]:
        model = fully_shard(Two([nn.Linear(4, 4), nn.Linear(4, 4)]))
        model(torch.ones(1, 4), 1 + rank).sum().backward()
        return [whole(param.grad).sum().item() for param in model.parameters()]

    assert simulate_ranks(ranks) == [[16.0, 4.0, 8.0, 2.0]] * 2
