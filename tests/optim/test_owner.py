"""Optimizers of whole matrices, rows and blocks: one rank does each, bit-equal to one process."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structured
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose.comm import collectives as comm
from fsdp_compose.core.bucket import find_entry
from fsdp_compose.core.state import owner_of
from fsdp_compose.layout.plan import (
    Extent,
    balance,
    matrix_work,
    plan_layout,
    spread_work,
    whole_work,
)

from harness import rank_errors, run_ranks
from models import Tolerance, Tower, by_block, compare, data, mesh_of_replicas, seeded, whole

MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "muon": partial(torch.optim.Muon, lr=0.02, weight_decay=0.1),
    "adafactor": partial(torch.optim.Adafactor, lr=0.05),
    "shampoo": partial(structured.Shampoo, lr=0.1),
    "soap": partial(structured.Soap, lr=0.01),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


def wholes(fqn: str, param: nn.Parameter) -> Any:
    return "tensor" if param.ndim == 2 else 1


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def others(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim != 2]


class Pair:
    """A sharded model stepped by owners, and a plain one that is given the same gradients."""

    def __init__(self, make: Any, rank: int, granularity: Any = wholes, **options: Any) -> None:
        self.rank = rank
        self.plain = seeded(Tower)
        self.model = by_block(seeded(Tower), granularity=granularity, **options)
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


@pytest.mark.parametrize("granularity", [wholes, 1])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_updates_are_bit_equal_to_one_process(granularity: Any, ranks: int) -> None:
    def body(rank: int) -> None:
        for make in MAKE.values():
            pair = Pair(make, rank, granularity)
            for seed in range(4):
                pair.step(seed)
                pair.check()

    run_ranks(body, ranks)


@pytest.mark.parametrize("granularity", [wholes, 1])
def test_training_equals_one_process_on_the_whole_batch(granularity: Any) -> None:
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
            comm.traffic.reset()
            optim.step()
            assert comm.traffic.gathers == comm.traffic.reduces == comm.traffic.control == 0
            found[key] = comm.traffic.moves, comm.traffic.move_bytes
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


def test_schedulers_weight_loads_conversions_and_zero_grad() -> None:
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


# State: saved by name, loaded on any number of ranks.


def gradients(model: nn.Module, seed: int) -> None:
    """The same on any number of ranks."""
    for index, p in enumerate(model.parameters()):
        p.grad = torch.randn(
            p.shape, generator=torch.Generator().manual_seed(100 * seed + index), dtype=p.dtype
        )


class Run:
    """A model and its optimizers, given the same gradients wherever it runs."""

    def __init__(self, name: str, granularity: Any = None) -> None:
        self.model = seeded(Tower)
        make = MAKE[name]
        self.optims: list[torch.optim.Optimizer]
        if granularity is None:
            self.optims = [make(matrices(self.model))]
        else:
            by_block(self.model, granularity=granularity)
            self.optims = [fc.owner_step(matrices(self.model), make)]
        self.optims.append(torch.optim.AdamW(others(self.model), lr=0.01))

    def train(self, *seeds: int) -> Run:
        for seed in seeds:
            gradients(self.model, seed)
            for optim in self.optims:
                optim.step()
                optim.zero_grad()
        return self

    def weights(self) -> list[Tensor]:
        return [whole(p) for p in self.model.parameters()]


@pytest.mark.parametrize("name", ["muon", "shampoo", "soap", "adafactor"])
def test_checkpoints_load_on_any_number_of_ranks(name: str, tmp_path: Path) -> None:
    wanted = Run(name).train(0, 1, 2, 3).weights()

    def save(rank: int) -> None:
        run = Run(name, wholes).train(0, 1)
        fc.save_checkpoint(tmp_path / "saved", run.model, run.optims)

    def load(rank: int, granularity: Any) -> None:
        run = Run(name, granularity)
        fc.load_checkpoint(tmp_path / "saved", run.model, run.optims)
        for mine, theirs in zip(run.train(2, 3).weights(), wanted):
            assert torch.equal(mine, theirs)

    run_ranks(save, 3)
    run_ranks(load, 1, wholes)
    run_ranks(load, 2, 1)
    run_ranks(load, 4, wholes)


@pytest.mark.parametrize("kind", ["full", "sharded", "local"])
@pytest.mark.parametrize("name", ["shampoo", "soap"])
def test_state_dicts_load_back(name: str, kind: Any) -> None:
    plain = Run(name).train(0, 1)
    names = [n for n, p in Tower().named_parameters() if p.ndim == 2]
    states = copy.deepcopy(plain.optims[0].state_dict()["state"])
    by_name = dict(zip(names, states.values()))
    wanted = plain.train(2, 3).weights()

    def body(rank: int) -> None:
        run = Run(name, wholes).train(0, 1)
        state = fc.optim_state_dict(run.model, run.optims, kind=kind)
        if kind == "full":
            for fqn, values in by_name.items():
                for key, value in values.items():
                    found = state["state"][fqn][key]
                    assert found == value if isinstance(value, int) else torch.equal(found, value)
        targets = [wholes] if kind == "local" else [wholes, 1]
        for granularity in targets:
            other = Run(name, granularity)
            other.model.load_state_dict(fc.state_dict(run.model))
            fc.load_optim_state_dict(other.model, other.optims, copy.deepcopy(state))
            assert all(torch.equal(a, b) for a, b in zip(other.train(2, 3).weights(), wanted))

    run_ranks(body, 2)


def test_state_of_one_process_and_of_rank_0_loads() -> None:
    plain = Run("muon").train(0, 1)
    state, weights = plain.optims[0].state_dict(), plain.model.state_dict()
    wanted = copy.deepcopy(plain).train(2).weights()

    def body(rank: int) -> None:
        for only in (False, True):
            run = Run("muon", wholes)
            run.model.load_state_dict(weights)
            given = (
                state
                if not only
                else fc.rekey_optim_state_dict(state, "name", run.model, run.optims[0])
            )
            fc.load_optim_state_dict(
                run.model, run.optims[0], given if rank == 0 or not only else {},
                broadcast_from_rank0=only,
            )  # fmt: skip
            run.train(2)
            for mine, theirs in zip(matrices(run.model), [w for w in wanted if w.ndim == 2]):
                assert torch.equal(whole(mine), theirs)

    run_ranks(body, 2)


def test_local_state_wants_the_same_owners() -> None:
    def body(rank: int) -> None:
        run = Run("muon", 1).train(0)
        state = fc.optim_state_dict(run.model, run.optims[0], kind="local")
        backwards = fc.owner_step(matrices(run.model), MAKE["muon"], work=lambda s: 1 / s.numel())
        assert backwards.owners != run.optims[0].owners
        fc.load_optim_state_dict(run.model, backwards, state)

    for error in rank_errors(body, 4):
        assert error is not None and "cut elsewhere" in error


def test_a_value_that_cannot_be_saved_is_named() -> None:
    class Keeps(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    self.state[p]["basis"] = {p.grad}

    def body(rank: int) -> None:
        model = fc.fully_shard(nn.Linear(3, 2, bias=False))
        optim = fc.owner_step(model.parameters(), partial(Keeps, lr=0.1))
        gradients(model, 0)
        optim.step()
        fc.optim_state_dict(model, optim, kind="sharded")

    assert "TypeError: optimizer state: 'basis' of 'weight' in OwnerOptimizer is a set" in str(
        rank_errors(body, 1)
    )


# Blocks and rows that are never cut.


def local_run(kind: str, sharded: bool, block: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 33), nn.Linear(33, 50), nn.Linear(50, 2))
    if sharded:
        fc.fully_shard(model, granularity=block)
    params = fc.local_parameters(model) if sharded else list(model.parameters())
    if kind == "8bit":
        return model, structured.AdamW8bit(params)
    widths = [p.shape[-1] if p.ndim > 1 else 1 for p in model.parameters()]
    groups = [{"params": [p], "width": w} for p, w in zip(params, widths)]
    return model, structured.RowAdagrad(groups)


def train_local(model: nn.Module, optim: torch.optim.Optimizer, *seeds: int) -> list[Tensor]:
    for seed in seeds:
        gradients(model, seed)
        if optim.param_groups[0]["params"][0].ndim == 1:
            for p, local in zip(model.parameters(), fc.local_parameters(model)):
                local.grad = p.grad.to_local()
        optim.step()
    return [whole(p) for p in model.parameters()]


BLOCKWISE = [("8bit", structured.BLOCK), ("rows", "row")]


@pytest.mark.parametrize(("kind", "block"), BLOCKWISE)
def test_blocks_and_rows_equal_one_process(kind: str, block: Any, tmp_path: Path) -> None:
    """The updates, and again after the state was saved and loaded on another number of ranks."""
    plain = local_run(kind, False, block)
    first = train_local(*plain, 0, 1, 2)
    first = [w.clone() for w in first]
    last = train_local(*plain, 3, 4)

    def save(rank: int) -> None:
        model, optim = local_run(kind, True, block)
        weights = train_local(model, optim, 0, 1, 2)
        assert all(torch.equal(a, b) for a, b in zip(weights, first))
        fc.save_checkpoint(tmp_path / "saved", model, optim)
        full = fc.optim_state_dict(model, optim)["state"]
        for (name, p), state in zip(plain[0].named_parameters(), full.values()):
            for key, value in state.items():
                if key.endswith(("_scale", "rows")):
                    assert value.shape == plain[1].state[p][key].shape, (name, key)

    def load(rank: int) -> None:
        model, optim = local_run(kind, True, block)
        fc.load_checkpoint(tmp_path / "saved", model, optim)
        weights = train_local(model, optim, 3, 4)
        assert all(torch.equal(a, b) for a, b in zip(weights, last))

    run_ranks(save, 4)
    for ranks in (2, 3, 5):
        run_ranks(load, ranks)


def test_blocks_that_would_be_cut_are_refused() -> None:
    """Scales of blocks are not those of another cut, and are not passed off as it."""

    def save(rank: int) -> None:
        model, optim = local_run("8bit", True, 1)
        train_local(model, optim, 0)
        fc.optim_state_dict(model, optim)

    def load(rank: int) -> None:
        model, optim = local_run("8bit", True, structured.BLOCK)
        train_local(model, optim, 0)
        state = fc.optim_state_dict(model, optim)
        fc.load_optim_state_dict(*local_run("8bit", True, 1), state)

    for error in rank_errors(save, 2):
        assert error is not None and "neither its slice nor a row for each of its blocks" in error
    for error in rank_errors(load, 2):
        assert error is not None and "shard with the granularity it was saved with" in error


def test_the_codebooks_and_a_round_trip() -> None:
    for book in (structured.SIGNED, structured.UNSIGNED):
        assert len(book) == 256 and book.max() == 1.0 and 0.0 in book
        values = torch.randn(1000) if book.min() < 0 else torch.rand(1000)
        back = structured.dequantise(*structured.quantise(values, book), book)
        assert (back - values).abs().max() < 0.06 * values.abs().max()


# The planner: whole tensors levelled over ranks, inside a unit and from unit to unit.

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


@given(
    st.lists(st.lists(st.tuples(sizes, st.sampled_from(["tensor", 1])), max_size=6), max_size=5),
    st.integers(1, 5),
)
@settings(max_examples=200, deadline=None)
def test_spreading_cuts_nothing_pads_nothing_and_levels(units: list[list[Any]], ranks: int) -> None:
    """``Layout`` proves bounds, overlaps and cuts of each; the shard stays as large as it was."""
    loads = [0] * ranks
    for unit in units:
        extents = [Extent(f"p{i}", shape, how) for i, (shape, how) in enumerate(unit)]
        plan = plan_layout(extents, 4, ranks)
        total = list(loads)
        spread = spread_work(plan, total)
        assert spread.shard_numel == plan.shard_numel
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


def test_the_sharded_module_has_the_owners_that_were_planned() -> None:
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


# The example.


@pytest.mark.slow
def test_the_example_trains_and_resumes_on_other_ranks(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "muon.py"

    def run(*args: str) -> str:
        command = [sys.executable, str(script), *args]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    saved = str(tmp_path / "saved")
    first = run("--steps", "12", "--save", saved)
    losses = [float(v) for v in re.findall(r"loss ([\d.]+)", first)]
    assert losses[-1] < losses[0] - 1
    assert sum(map(int, re.findall(r"Muon has (\d+) of 16", first))) == 16
    again = run("--whole", "--steps", "2", "--nproc", "3", "--resume", saved)
    assert "step   12" not in again or float(re.findall(r"loss ([\d.]+)", again)[0]) < losses[0] - 1
    assert sum(map(int, re.findall(r"Muon has (\d+) of 16", again))) == 16
