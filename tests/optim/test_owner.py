"""Optimizers of whole matrices: one rank does each, bit-equal to one process."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose.base.process import here
from fsdp_compose.layout.matrix_work import matrix_work

from harness import rank_errors, run_ranks
from models import Tolerance, Tower, by_block, compare, data, mesh_of_replicas, seeded, whole
from structured import MAKE, matrices, others, wholes


def turned() -> Tower:
    """With a weight whose storage has another order."""
    model = Tower()
    weight = model.blocks[1].up.weight
    weight.data = weight.data.t().contiguous().t()
    return model


class Pair:
    """A sharded model stepped by owners, and a plain one that is given the same gradients."""

    def __init__(self, make: Any, rank: int, granularity: Any = wholes, **options: Any) -> None:
        self.rank = rank
        self.plain = seeded(turned)
        self.model = by_block(seeded(turned), granularity=granularity, **options)
        self.optim = fc.owner_step(matrices(self.model), make)
        self.rest = torch.optim.AdamW(others(self.model), lr=0.01)
        self.plain_optim = make(matrices(self.plain))
        self.plain_rest = torch.optim.AdamW(others(self.plain), lr=0.01)

    def step(self, seed: int) -> None:
        self.model(data(seed, self.rank, 4, 6)).square().mean().backward()
        for mine, theirs in zip(self.model.parameters(), self.plain.parameters()):
            theirs.grad = whole(mine.grad)
        for optim in (self.optim, self.rest, self.plain_optim, self.plain_rest):
            optim.step()
            optim.zero_grad()
        assert all(p.grad is None for p in self.model.parameters())

    def check(self) -> None:
        for (name, mine), theirs in zip(self.model.named_parameters(), self.plain.parameters()):
            assert torch.equal(whole(mine), theirs), name


@pytest.mark.parametrize(("ranks", "granularity"), [(1, 1), (2, 1), (2, wholes), (4, 1)])
def test_updates_are_bit_equal_to_one_process(granularity: Any, ranks: int) -> None:
    def body(rank: int) -> None:
        for make in MAKE.values():
            pair = Pair(make, rank, granularity)
            for seed in range(4):
                pair.step(seed)
                pair.check()

    run_ranks(body, ranks)


@pytest.mark.parametrize("granularity", [wholes, 1])
def test_training_equals_one_process(granularity: Any) -> None:
    """SGD, which shows a wrong gradient scale."""

    def body(rank: int) -> None:
        plain, model = seeded(Tower), by_block(seeded(Tower), granularity=granularity)
        optim = fc.owner_step(model.parameters(), MAKE["sgd"])
        plain_optim = MAKE["sgd"](plain.parameters())
        for seed in range(3):
            for m, o, xs in (
                (model, optim, [data(seed, rank, 4, 6)]),
                (plain, plain_optim, [data(seed, r, 4, 6) for r in range(2)]),
            ):
                m(torch.cat(xs)).square().mean().backward()
                o.step()
                o.zero_grad()
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters()):
            compare(name, whole(mine), theirs.detach(), Tolerance())

    run_ranks(body, 2)


@pytest.mark.parametrize("granularity", [wholes, 1])
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_matrix_is_computed_once(granularity: Any, ranks: int) -> None:
    def body(rank: int) -> tuple[int, list[int]]:
        from torch.optim import _muon

        calls, plain = [], _muon._zeropower_via_newtonschulz
        _muon._zeropower_via_newtonschulz = lambda g, *a: calls.append(g.shape) or plain(g, *a)
        model = by_block(seeded(Tower), granularity=granularity)
        optim = fc.owner_step(matrices(model), MAKE["muon"])
        model(data(0, rank, 4, 6)).square().mean().backward()
        optim.step()
        kept = {tuple(p.shape) for p in optim.state}
        assert len(optim.state) == len(calls) and kept == {tuple(s) for s in calls}
        return len(calls), optim.owners

    counts, owners = zip(*run_ranks(body, ranks))
    assert sum(counts) == len(matrices(Tower()))
    assert all(o == owners[0] for o in owners)
    assert list(counts) == [owners[0].count(rank) for rank in range(ranks)]
    assert min(counts) > 0


def test_what_a_step_communicates() -> None:
    def body(rank: int) -> dict[str, tuple[int, int]]:
        found = {}
        for key, granularity in (("whole", "tensor"), ("cut", 1)):
            model = fc.fully_shard(nn.Linear(6, 4, bias=False), granularity=granularity)
            optim = fc.owner_step(model.parameters(), MAKE["muon"])
            model(torch.randn(3, 6)).sum().backward()
            here.traffic.reset()
            optim.step()
            assert here.traffic.gathers == here.traffic.reduces == here.traffic.control == 0
            found[key] = here.traffic.moves, here.traffic.move_bytes
        return found

    first, second = run_ranks(body, 2)
    assert first["whole"] == second["whole"] == (0, 0)
    assert first["cut"] == (2, 2 * 48)  # the owner gets half of 24 numbers and of their gradients
    assert second["cut"] == (2, 48)


@pytest.mark.parametrize(
    "strategy",
    [
        fc.ShardingStrategy.NO_SHARD,
        fc.ShardingStrategy.HYBRID_SHARD,
        fc.ShardingStrategy.HYBRID_SHARD_OPTIMIZER,
        fc.ShardingStrategy.SHARD_GRAD_OP,
    ],
)
@pytest.mark.parametrize("granularity", [wholes, 1])
def test_strategies(strategy: Any, granularity: Any) -> None:
    """Replicas each do the work, and stay equal."""

    def body(rank: int) -> list[Tensor]:
        options: dict[str, Any] = {"strategy": strategy}
        if "HYBRID" in strategy.name:
            options["mesh"] = mesh_of_replicas(2, 2)
        pair = Pair(MAKE["muon"], rank, granularity, **options)
        for seed in range(3):
            pair.step(seed)
            pair.check()
        return [whole(p) for p in pair.model.parameters()]

    first, *rest = run_ranks(body, 4)
    for theirs in rest:
        assert all(torch.equal(a, b) for a, b in zip(first, theirs))


def test_mixed_precision_and_offload() -> None:
    def body(rank: int) -> None:
        for options in (
            {
                "mp_policy": fc.MixedPrecision(
                    torch.bfloat16, torch.float32, cast_forward_inputs=True
                )
            },
            {"offload_policy": fc.Offload(params=True, grads=True)},
        ):
            for granularity in (wholes, 1):
                pair = Pair(MAKE["muon"], rank, granularity, **options)
                for seed in range(2):
                    pair.step(seed)
                    pair.check()

    run_ranks(body, 2)


def test_schedulers_loads_conversions_and_zero_grad() -> None:
    """Settings reach the owner; nothing is stale after weights were loaded or moved."""

    def body(rank: int) -> None:
        for granularity in (wholes, 1):
            pair = Pair(MAKE["sgd"], rank, granularity)
            schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5)
                         for o in (pair.optim, pair.plain_optim)]  # fmt: skip
            pair.step(0)
            for schedule in schedules:
                schedule.step()
            pair.step(1)
            pair.check()
            assert pair.optim.optimizer.param_groups[0]["lr"] == 0.05
            other = seeded(Tower, 5)
            pair.model.load_state_dict(other.state_dict())
            pair.plain.load_state_dict(other.state_dict())
            pair.step(2)
            pair.check()
            pair.model(data(3, rank, 4, 6)).sum().backward()
            pair.optim.zero_grad()
            assert all(p.grad is None for p in matrices(pair.model))
            with pytest.raises(RuntimeError, match="no parameter has a gradient"):
                pair.optim.step()
            pair.model(data(3, rank, 4, 6)).sum().backward()
            chosen = matrices(pair.model)
            before = [whole(p) for p in chosen]
            for p in chosen[::2]:
                p.grad = None
            pair.optim.step()
            same = [torch.equal(a, whole(p)) for a, p in zip(before, chosen)]
            assert same == [i % 2 == 0 for i in range(len(chosen))]

    run_ranks(body, 2)


CLEARED: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "all": lambda optim: optim.state.clear(),
    "another dictionary": lambda optim: setattr(optim, "state", defaultdict(dict)),
    "each": lambda optim: [values.clear() for values in optim.state.values()],
    "replaced": lambda optim: optim.state.update({p: {} for p in optim.state}),
    "one": lambda optim: optim.state.pop(optim.param_groups[0]["params"][0], None),
}


@pytest.mark.parametrize("way", CLEARED)
def test_state_that_a_caller_clears(way: str) -> None:
    """It is gone, as from any optimizer, and so in the next step."""

    def body(rank: int) -> None:
        plain, model = seeded(Tower), by_block(seeded(Tower))
        make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        optim, plain_optim = fc.owner_step(model.parameters(), make), make(plain.parameters())
        for seed in range(4):
            for made, own in ((model, optim), (plain, plain_optim)):
                made(data(seed, 0)).square().mean().backward()
                own.step()
                own.zero_grad()
                if seed == 1:
                    CLEARED[way](own)
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters()):
            compare(name, whole(mine), theirs.detach(), Tolerance())

    run_ranks(body, 2)


def test_to_another_dtype_between_steps() -> None:
    def body(rank: int) -> None:
        for granularity in (wholes, 1):
            model = by_block(seeded(Tower), granularity=granularity)
            optim = fc.owner_step(matrices(model), partial(torch.optim.SGD, lr=0.1))
            plain = seeded(Tower)
            plain_optim = torch.optim.SGD(matrices(plain), lr=0.1)
            for dtype in (torch.float64, torch.float32):
                model.to(dtype)
                plain.to(dtype)
                model(data(0, rank, 4, 6).to(dtype)).square().mean().backward()
                for mine, theirs in zip(model.parameters(), plain.parameters()):
                    theirs.grad = whole(mine.grad)
                optim.step()
                plain_optim.step()
                for mine, theirs in zip(model.parameters(), plain.parameters()):
                    assert mine.dtype == dtype and torch.equal(whole(mine), theirs)
                model.zero_grad()

    run_ranks(body, 2)


def test_a_unit_that_stays_gathered_sees_the_step() -> None:
    def body(rank: int) -> None:
        for granularity in (wholes, 1):
            model = by_block(seeded(Tower), granularity=granularity)
            fc.set_reshard_after_backward(model, False)
            optim = fc.owner_step(matrices(model), MAKE["muon"])
            x = data(0, rank, 4, 6)
            model(x).square().mean().backward()
            optim.step()
            plain = seeded(Tower)
            plain.load_state_dict(fc.state_dict(model))
            torch.testing.assert_close(model(x), plain(x))

    run_ranks(body, 2)


def test_closure() -> None:
    def body(rank: int) -> None:
        model = by_block(seeded(Tower))
        optim = fc.owner_step(matrices(model), MAKE["muon"])

        def loss() -> Tensor:
            optim.zero_grad()
            value = model(data(0, rank, 4, 6)).square().mean()
            value.backward()
            return value

        first = optim.step(loss)
        with torch.no_grad():  # which a step turns on for its closure
            assert optim.step(loss) < first

    run_ranks(body, 2)


def test_owners_are_levelled_over_the_model() -> None:
    def body(rank: int) -> tuple[list[int], list[tuple[int, ...]]]:
        model = by_block(seeded(partial(Tower, 5)))
        optim = fc.owner_step(matrices(model), MAKE["muon"])
        return optim.owners, [tuple(p.shape) for p in matrices(model)]

    owners, shapes = run_ranks(body, 4)[0]
    loads = [sum(matrix_work(s) for s, o in zip(shapes, owners) if o == r) for r in range(4)]
    assert max(loads) <= sum(loads) / 4 + max(map(matrix_work, shapes))
    assert max(loads) / (sum(loads) / 4) < 1.25


class Masked(torch.optim.SGD):
    """One that trains what is small when it is made."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, lr=0.1)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.zeros_like(p.data, memory_format=torch.preserve_format)
                self.state[p]["mask"] = p.detach().abs() < 0.1


class Unasking(torch.optim.SGD):
    """A step as the Muon package has it, which takes every parameter to have a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.add_(torch.zeros_like(p).lerp_(p.grad, 0.1), alpha=-0.1)


def step_of_every_parameter(model: nn.Module) -> None:
    model(data(0, 0).float()).sum().backward()
    fc.owner_step(matrices(model), Unasking).step()


def step_after_sharding_again(model: nn.Module) -> None:
    optim = fc.owner_step(matrices(model), MAKE["muon"])
    by_block(fc.undo(model))(data(0, 0).float()).sum().backward()
    optim.step()


ERRORS: dict[str, tuple[Callable[[nn.Module], Any], str, str]] = {
    "plain parameter": (
        lambda m: fc.owner_step(nn.Linear(3, 2).parameters(), MAKE["muon"]),
        "ValueError", r"shape \(2, 3\) is not sharded.*call fully_shard",
    ),
    "not an optimizer": (
        lambda m: fc.owner_step(matrices(m), lambda groups: None),
        "TypeError", "make returned NoneType; wanted an optimizer",
    ),
    "wrong shape": (
        lambda m: fc.owner_step(m.parameters(), MAKE["muon"]),
        "ValueError", "Muon only supports 2D parameters",
    ),
    "sharded no more": (
        lambda m: (optim := fc.owner_step(matrices(m), MAKE["muon"]), fc.undo(m), optim.step()),
        "RuntimeError", "'first.weight'.*was sharded another way.*build another owner_step",
    ),
    "sharded again": (
        step_after_sharding_again, "RuntimeError", "'first.weight'.*was sharded another way",
    ),
    "values read": (
        lambda m: fc.owner_step(matrices(m), Masked),
        "RuntimeError", r"make reads the values of parameters \(abs\).*in its first step",
    ),
    "gradients of others": (
        step_of_every_parameter,
        "TypeError", "owner_step: the step of Unasking fails where a parameter has no gradient",
    ),
    "late group": (
        lambda m: fc.owner_step(matrices(m), MAKE["muon"]).add_param_group({"params": others(m)}),
        "RuntimeError", "after the owners were chosen",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_raised_on_every_rank(name: str) -> None:
    build, kind, message = ERRORS[name]
    for error in rank_errors(lambda rank: build(by_block(Tower())), 2):
        assert error is not None and error.startswith(f"{kind}: ") and re.search(message, error)
