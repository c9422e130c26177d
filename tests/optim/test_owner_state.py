"""State of whole-matrix optimizers is saved by name and loaded on any number of ranks."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_compose as fc

import structured
from harness import rank_errors, run_ranks, simulate_ranks
from models import Tower, by_block, seeded, whole
from structured import MAKE, matrices, others, wholes


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


class Rows(torch.optim.Optimizer):
    """A mean for each row, as torch calls state of every element, and a count beside the state."""

    total = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.total += 1
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.update(p, p.grad, self.state[p])

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        mean = state.setdefault("exp_avg_sq", p.new_zeros(len(p), 1))
        mean.lerp_(grad.square().mean(1, keepdim=True), 0.1)
        p.sub_(grad / mean.sqrt(), alpha=0.1 / self.total)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "total": self.total}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.total = state_dict["total"]


class Picked(Rows):
    """Momentum of every third element, in a vector, as SPAM has it of those under its mask."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        chosen = torch.arange(p.numel()).view(p.shape) % 3 == 0
        mean = state.setdefault("exp_avg", torch.zeros_like(p[chosen]))
        p[chosen] -= 0.1 * mean.lerp_(grad[chosen], 0.1)


class Projected(Rows):
    """Momentum of two numbers for each column, as GaLore has it."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        sides = torch.arange(2.0 * len(p), dtype=p.dtype).view(2, -1).sin()
        mean = state.setdefault("exp_avg", p.new_zeros(2, p.shape[1]))
        p.sub_(sides.T @ mean.lerp_(sides @ grad, 0.1), alpha=0.1)


@pytest.mark.parametrize("kind", [Rows, Picked, Projected])
def test_state_of_its_own_shape_and_beside(kind: type[Rows], tmp_path: Path) -> None:
    """What an optimizer keeps beside state is saved, and state of another shape than torch's."""

    def build(seed: int = 0) -> tuple[nn.Module, Any]:
        model = by_block(seeded(Tower, seed=seed))
        return model, fc.owner_step(matrices(model), lambda groups: kind(groups, {}))

    def step(model: nn.Module, optim: Any, seed: int) -> None:
        gradients(model, seed)
        optim.step()

    def run(rank: int) -> None:
        model, optim = build()
        step(model, optim, 0)
        weights, state = (
            dict(fc.state_dict(model)),
            copy.deepcopy(fc.optim_state_dict(model, optim)),
        )
        assert state["total"] == 1
        fc.save_checkpoint(tmp_path / "saved", model, optim)
        step(model, optim, 1)
        for way in ("full", "checkpoint"):
            other, again = build(1)
            if way == "full":
                fc.load_state_dict(other, weights)
                fc.load_optim_state_dict(other, again, state)
            else:
                fc.load_checkpoint(tmp_path / "saved", other, again)
            step(other, again, 1)
            for mine, theirs in zip(matrices(other), matrices(model), strict=True):
                assert torch.equal(whole(mine), whole(theirs))

    simulate_ranks(run, 2)


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


def test_state_that_one_rank_lacks_is_refused() -> None:
    """Ranks are sent what others own, and not what they were not given of slices."""

    def body(rank: int) -> None:
        run = Run("muon", 1).train(0)
        state = fc.optim_state_dict(run.model, run.optims)
        if rank:
            del state["state"]["head.bias"]
        with pytest.raises(RuntimeError, match=r"0 has 19 parameters' .* 1 has 18 parameters'"):
            fc.load_optim_state_dict(run.model, run.optims, state)

    simulate_ranks(body)


@pytest.mark.parametrize("slices_first", [True, False])
def test_state_between_owners_and_slices(slices_first: bool, tmp_path: Path) -> None:
    """Full state and checkpoints load into either; sharded state of owners says to take those."""

    def build() -> tuple[nn.Module, Any, Any]:
        model = by_block(seeded(Tower))
        owners = fc.owner_step(matrices(model), lambda groups: torch.optim.AdamW(groups, lr=0.01))
        slices = torch.optim.AdamW(matrices(model), lr=0.01)
        return (model, slices, owners) if slices_first else (model, owners, slices)

    def ranks(rank: int) -> None:
        model, first, _ = build()
        gradients(model, 0)
        first.step()
        wanted = fc.optim_state_dict(model, first)
        fc.save_checkpoint(tmp_path, model, first)
        for way in ("full", "checkpoint"):
            other, _, second = build()
            if way == "full":
                fc.load_optim_state_dict(other, second, wanted)
            else:
                fc.load_checkpoint(tmp_path, other, second)
            found = fc.optim_state_dict(other, second)
            for name, values in wanted["state"].items():
                for key, value in values.items():
                    assert torch.equal(found["state"][name][key], value)
        other, _, second = build()
        sharded = fc.optim_state_dict(model, first, kind="sharded")
        if slices_first:
            fc.load_optim_state_dict(other, second, sharded)
        else:
            with pytest.raises(RuntimeError, match=r"owner alone holds.*kind='full' and save_ch"):
                fc.load_optim_state_dict(other, second, sharded)
            assert not second.state

    run_ranks(ranks, 2)


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
    return model, structured.RowAdagrad(groups, lr=0.1)


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


class Counting(Rows):
    """Counts its steps in the state, under a name that is no parameter, as SPAM does."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        self.state["steps"] = self.total
        super().update(p, grad, state)


def test_state_of_no_parameter_is_refused() -> None:
    """Saved without it, an optimizer would begin it anew; its own state dict has it."""

    def run(rank: int) -> None:
        model = by_block(seeded(Tower))
        optim = fc.owner_step(matrices(model), lambda groups: Counting(groups, {}))
        gradients(model, 0)
        optim.step()
        with pytest.raises(TypeError, match=r"keeps state under 'steps', which is no parameter"):
            fc.optim_state_dict(model, optim)
        optim.load_state_dict(optim.state_dict())
        assert optim.optimizer.state["steps"] == optim.state["steps"] == 1

    simulate_ranks(run, 2)


def test_state_after_undo_is_refused() -> None:
    """Each rank would give the state of what it owned, as if that were all of it."""

    def ranks(rank: int) -> None:
        run = Run("muon", wholes).train(0)
        wanted = fc.optim_state_dict(run.model, run.optims[0], kind="full")
        fc.undo(run.model)
        with pytest.raises(ValueError, match=r"is sharded no more \(undo\).* Call fully_shard"):
            fc.optim_state_dict(run.model, run.optims[0], kind="full")
        by_block(run.model)
        found = fc.optim_state_dict(run.model, run.optims[0], kind="full")
        assert found["state"].keys() == wanted["state"].keys()

    run_ranks(ranks, 2)


def test_a_load_that_fails_leaves_owners_as_they_were() -> None:
    """The owners had loaded when the optimizer beside them failed; a rate was set since a step."""
    model = fc.fully_shard(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)))
    first = fc.owner_step(model[0].parameters(), partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    second = torch.optim.AdamW(model[1].parameters())

    def train() -> None:
        gradients(model, 1)
        first.step()
        second.step()

    train()
    saved = fc.optim_state_dict(model, [first, second])
    train()
    first.param_groups[0]["lr"] = 0.5
    twin, other = copy.deepcopy((model, first))
    hook = second.register_load_state_dict_post_hook(lambda optim: {}["no room"])
    with pytest.raises(RuntimeError, match="AdamW cannot read the state that was to be loaded"):
        fc.load_optim_state_dict(model, [first, second], saved)
    hook.remove()
    assert first.param_groups[0]["lr"] == 0.5
    for each, optim in ((model, first), (twin, other)):
        gradients(each, 2)
        optim.step()
    assert torch.equal(whole(model[0].weight), whole(twin[0].weight))


def test_state_that_was_cleared_is_begun_anew() -> None:
    """As an optimizer's own is, whose momentum is reset so."""
    found = []
    for owns in (True, False):
        model = seeded(lambda: nn.Linear(4, 4))
        make = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)  # noqa: E731
        if owns:
            fc.fully_shard(model)
        optim = fc.owner_step(model.parameters(), make) if owns else make(model.parameters())
        for step in range(3):
            gradients(model, step)
            optim.step()
            if step == 1:
                optim.state.clear()
        found.append([whole(p) for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
