"""What ranks' optimizers hold is matched by name, and what cannot be resumed is refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_compose as fc
from fsdp_compose.sharded import is_sharded

from harness import rank_errors, run_ranks, simulate_ranks
from models import Tower, by_block, seeded, whole
from structured import inverse_root

KINDS = ("full", "sharded", "local")


def gradients(model: nn.Module, seed: int) -> None:
    """The same whole gradients wherever the model runs."""
    for index, p in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * seed + index)
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def train(model: nn.Module, optims: list[Any], *seeds: int) -> None:
    for seed in seeds:
        gradients(model, seed)
        for optim in optims:
            optim.step()


def assert_same(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        for key, value in values.items():
            mine = found[name][key]
            same = torch.equal(mine, value) if isinstance(value, torch.Tensor) else mine == value
            assert same, (name, key, mine)


class OpaqueShampoo(torch.optim.Optimizer):
    """Keeps its preconditioners in an object, as ScalableShampoo does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["preconditioner"] = Preconditioner(p.detach().clone())


class Preconditioner:
    def __init__(self, value: Any) -> None:
        self.value = value


class Global(OpaqueShampoo):
    """Keeps a number for all parameters beside those of each."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["progress"]["total"] = torch.ones(1)  # type: ignore[index]


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer, with a state dict of its own format."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        return {"slow": {}, "fast": self.inner.state_dict()}


class Beside(torch.optim.SGD):
    """Keeps slow weights beside the state of its parameters."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": {0: [torch.ones(1)]}}


class ListedShampoo(torch.optim.Optimizer):
    """Statistics in a list, their roots in a dictionary, and a number of shape ``()``."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state["GG"] = [1e-4 * torch.eye(n, dtype=p.dtype) for n in p.shape]
                state["decay"] = torch.zeros((), dtype=p.dtype)
                state["names"] = ["left", "right"]
            state["decay"] += 0.1
            state["GG"][0] += p.grad @ p.grad.T
            state["GG"][1] += p.grad.T @ p.grad
            roots = [inverse_root(matrix, 4, 1e-4) for matrix in state["GG"]]
            state["roots"] = {"left": roots[0], "pair": (roots[1], 2)}
            p.sub_(roots[0] @ p.grad @ roots[1], alpha=self.param_groups[0]["lr"] + state["decay"])


def test_order_of_parameters_is_each_ranks_own(tmp_path: Path) -> None:
    """Units of unequal sizes, groups and optimizers listed backwards on rank 1."""
    plain = seeded(Tower)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    train(plain, [reference], 0, 1)
    names = [name for name, _ in plain.named_parameters()]
    wanted = dict(zip(names, reference.state_dict()["state"].values()))

    def build(rank: int) -> tuple[nn.Module, list[Any]]:
        model = by_block(seeded(Tower))
        params = list(model.parameters())[:: 1 if rank == 0 else -1]
        first = [p for p in params if p.ndim == 2]
        groups = [{"params": p, "lr": 0.01} for p in (first[:4], first[4:])]
        rest = [p for p in params if p.ndim != 2]
        optims = [torch.optim.AdamW(groups), torch.optim.AdamW(rest, lr=0.01)]
        return model, optims[:: 1 if rank == 0 else -1]

    def body(rank: int) -> None:
        model, optims = build(rank)
        train(model, optims, 0, 1)
        assert_same(fc.optim_state_dict(model, optims)["state"], wanted)
        only = fc.optim_state_dict(model, optims, rank0_only=True, cpu_offload=True)
        assert rank or only["state"].keys() == wanted.keys()
        fc.save_checkpoint(tmp_path / "saved", model, optims)
        again, others = build(1 - rank)
        fc.load_checkpoint(tmp_path / "saved", again, others)
        assert_same(fc.optim_state_dict(again, others)["state"], wanted)

    run_ranks(body, 2)


def test_ranks_that_hold_other_things_are_told() -> None:
    def body(rank: int) -> None:
        model = by_block(seeded(Tower))
        for case, text in (
            ("parameters", r"rank 1 does not hold 'head.bias'"),
            ("settings", r"setting 'lr' of 'first.weight' is 0.1 on rank 0 and 0.2 on rank 1"),
            ("steps", r"state 'step' of 'first.weight' is 1.0 on rank 0 and 2.0 on rank 1"),
        ):
            params = list(model.parameters())
            if case == "parameters" and rank:
                params.pop()
            optim = torch.optim.Adam(params, lr=0.2 if case == "settings" and rank else 0.1)
            train(model, [optim], 0)
            if case == "steps" and rank:
                train(model, [optim], 1)
            with pytest.raises(RuntimeError, match=text):
                fc.optim_state_dict(model, optim)
        layers = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        model = fc.fully_shard(layers)  # each rank has all of a layer
        rates = (0.2, 0.1) if rank else (0.1, 0.2)
        groups = [{"params": layer.parameters(), "lr": r} for layer, r in zip(layers, rates)]
        optim = torch.optim.SGD(groups, lr=1.0)
        train(model, [optim], 0)
        text = r"setting 'lr' of '0.weight' is 0.1 on rank 0 and 0.2 on rank 1"
        with pytest.raises(RuntimeError, match=text):
            fc.optim_state_dict(model, optim)

    run_ranks(body, 2)


class SkipsEmpty(torch.optim.SGD):
    """Has no state for tensors without elements."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if (p.to_local() if is_sharded(p) else p).numel():
                state = self.state[p]
                state["sum"] = state.get("sum", torch.zeros_like(p)) + 1
                state["step"] = state.get("step", torch.zeros(())) + 1
                state["name"] = "x"
                state["best"], state["of"], state["at"] = float("inf"), [1, 2], {"low": 3}
                state["not"] = torch.tensor(float("nan"))
                if is_sharded(p):
                    state["row"] = torch.arange(23.0)


@pytest.mark.parametrize("held", [fc.local_parameters, nn.Module.parameters])
def test_state_that_a_rank_skipped_as_empty(held: Any) -> None:
    """It is what another rank has, of whatever type."""

    def body(rank: int) -> None:
        model = by_block(seeded(Tower))
        optim = SkipsEmpty(held(model), lr=0.1)
        assert any(not p.to_local().numel() for p in model.parameters())
        if held is nn.Module.parameters:
            gradients(model, 0)
        optim.step()
        full = fc.optim_state_dict(model, optim)
        for name, p in model.named_parameters():
            values = full["state"][name]
            assert torch.equal(values["sum"], torch.ones(p.shape, dtype=p.dtype))
            assert values["step"] == 1 and values["name"] == "x"
            assert (values["best"], values["of"], values["at"]) == (torch.inf, [1, 2], {"low": 3})
            row = values.get("row", torch.arange(23.0))
            assert torch.equal(row, torch.arange(23.0)) and values["not"].isnan()
        again = SkipsEmpty(held(model), lr=0.1)
        fc.load_optim_state_dict(model, again, full)
        found = fc.optim_state_dict(model, again)["state"]
        for values in (*found.values(), *full["state"].values()):
            assert values.pop("not").isnan()
        assert_same(found, full["state"])

    run_ranks(body, 2)


def test_opaque_state_is_refused_everywhere(tmp_path: Path) -> None:
    """Every kind, loading and checkpoints; on every rank where they communicate."""

    def body(rank: int) -> None:
        model = by_block(seeded(Tower))
        optim = OpaqueShampoo(model.parameters())
        fresh = fc.optim_state_dict(model, optim)
        train(model, [optim], 0)
        text = r"'preconditioner' of 'first.weight' in \S+ is a Preconditioner"
        for kind in KINDS:
            with pytest.raises(TypeError, match=text):
                fc.optim_state_dict(model, optim, kind=kind)
        with pytest.raises(TypeError, match=text):
            fc.save_checkpoint(tmp_path / "saved", model, optim)
        given = {**fresh, "state": {"first.weight": {"m": [Preconditioner(1)]}}}
        with pytest.raises(RuntimeError, match=r"'m' of 'first.weight' .*holds a Preconditioner"):
            fc.load_optim_state_dict(model, OpaqueShampoo(model.parameters()), given)
        owner = fc.owner_step([p for p in model.parameters() if p.ndim == 2], OpaqueShampoo)
        train(model, [owner], 1)
        with pytest.raises(TypeError, match=r"'preconditioner' of .* is a Preconditioner"):
            fc.optim_state_dict(model, owner)
        everywhere = Global(model.parameters())
        train(model, [everywhere], 0)
        with pytest.raises(TypeError, match="Global keeps state under 'progress'"):
            fc.optim_state_dict(model, everywhere)
        wrapped = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(TypeError, match=r"Lookahead.state_dict\(\) has \['fast', 'slow'\]"):
            fc.optim_state_dict(model, wrapped)
        with pytest.raises(TypeError, match=r"Beside.state_dict\(\) has 'slow' beside 'state'"):
            fc.optim_state_dict(model, Beside(model.parameters(), lr=0.1))
        only = OpaqueShampoo(model.parameters())
        if rank == 1:
            train(model, [only], 0)
        fc.optim_state_dict(model, only)

    for error in rank_errors(body, 2):
        assert error is not None and "is a Preconditioner" in error and "TypeError" in error


def test_lists_and_dictionaries_of_tensors_resume(tmp_path: Path) -> None:
    """Under ``owner_step``; saved by two ranks, resumed by two and by three."""

    def matrices(model: nn.Module) -> list[nn.Parameter]:
        return [p for p in model.parameters() if p.ndim == 2]

    plain = seeded(Tower)
    reference = ListedShampoo(matrices(plain))
    train(plain, [reference], 0, 1)
    state = copy.deepcopy(reference.state_dict()["state"])
    train(plain, [reference], 2)
    wanted = [p.detach() for p in matrices(plain)]

    def check(model: nn.Module, optim: Any) -> None:
        assert all(values["names"] == ["left", "right"] for values in optim.state.values())
        train(model, [optim], 2)
        for mine, theirs in zip(matrices(model), wanted):
            torch.testing.assert_close(whole(mine), theirs)

    def save(rank: int) -> None:
        model = by_block(seeded(Tower))
        optim = fc.owner_step(matrices(model), ListedShampoo)
        train(model, [optim], 0, 1)
        fc.save_checkpoint(tmp_path / "saved", model, optim)
        full = fc.optim_state_dict(model, optim)
        for mine, theirs in zip(full["state"].values(), state.values()):
            assert mine.keys() == theirs.keys() and mine["names"] == ["left", "right"]
            assert type(mine["GG"]) is list and type(mine["roots"]["pair"]) is tuple
            assert mine["roots"]["pair"][1] == 2 and mine["decay"].shape == ()
            for a, b in zip(mine["GG"], theirs["GG"]):
                torch.testing.assert_close(a, b)
        again = ListedShampoo(matrices(seeded(Tower)))
        again.load_state_dict(fc.rekey_optim_state_dict(full, "id", model))
        for kind in KINDS:
            given = copy.deepcopy(fc.optim_state_dict(model, optim, kind=kind))
            fresh = by_block(seeded(Tower))
            fresh.load_state_dict(fc.state_dict(model))
            other = fc.owner_step(matrices(fresh), ListedShampoo)
            fc.load_optim_state_dict(fresh, other, given)
            check(fresh, other)

    def load(rank: int) -> None:
        model = by_block(seeded(Tower))
        optim = fc.owner_step(matrices(model), ListedShampoo)
        fc.load_checkpoint(tmp_path / "saved", model, optim)
        check(model, optim)

    run_ranks(save, 2)
    run_ranks(load, 3)


class LocalSums(torch.optim.SGD):
    """Prodigy's flaw in small: a sum over all that it was given, kept in the group."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        norms = [p.grad.norm() for p in group["params"]]
        group["d"] = float(torch.stack(norms).norm())


def test_sums_of_local_parameters_are_not_saved(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model = by_block(seeded(Tower))
        local = LocalSums(fc.local_parameters(model), lr=0.1)
        for p in local.param_groups[0]["params"]:
            p.grad = torch.full_like(p, 1.0 + rank)
        local.step()
        text = "setting 'd' of 'first.weight' is .* on rank 0 .*local_parameters"
        with pytest.raises(RuntimeError, match=text):
            fc.optim_state_dict(model, local)
        with pytest.raises(
            RuntimeError, match=r"'first.weight'.* d=.* on rank 0 .*local_parameters"
        ):
            fc.save_checkpoint(tmp_path / "saved", model, local)
        whole_sums = LocalSums(model.parameters(), lr=0.1)
        train(model, [whole_sums], 0)
        fc.optim_state_dict(model, whole_sums)

    run_ranks(body, 2)


class Counted(torch.optim.SGD):
    """Keeps a number beside the state of parameters, as optimizers with a global sum do."""

    total = 1.0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "total": self.total}


@pytest.mark.parametrize("call", ["full", "save", "load"])
def test_numbers_beside_the_state_differ(call: str, tmp_path: Path) -> None:
    """Rank 0's would be every rank's when the optimizer is loaded."""

    def body(rank: int) -> None:
        model = by_block(seeded(Tower))
        optim = Counted(model.parameters(), lr=0.1, momentum=0.9)
        gradients(model, 0)
        optim.step()
        full = fc.optim_state_dict(model, optim)
        assert full["total"] == 1.0
        fc.load_optim_state_dict(model, optim, full)
        optim.total = full["total"] = 1.0 + rank
        calls = {
            "full": lambda: fc.optim_state_dict(model, optim),
            "save": lambda: fc.save_checkpoint(tmp_path, model, optim),
            "load": lambda: fc.load_optim_state_dict(model, optim, full),
        }
        with pytest.raises(RuntimeError, match=r"'total', beside .* is 1.0 on rank 0 and 2.0 on"):
            calls[call]()

    simulate_ranks(body, 2)
