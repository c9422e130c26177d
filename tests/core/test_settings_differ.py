"""An optimizer's settings that differ by rank are found when the next step ends."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import fsdp_compose as fc
from fsdp_compose.core.guards.rank_differences import explain_settings
from fsdp_compose.core.state import iter_units
from fsdp_compose.optim import step_guard
from fsdp_compose.sharded import to_local

from harness import run_ranks, simulate_ranks
from models import Tower, adamw, by_block, data, mesh_of_replicas, seeded, sgd, square
from watching import compare_as_on_a_device

FOUND = r"settings that differ between ranks: parameter 'first.weight' of unit .* stepped with lr="


def train(model: nn.Module, optims: list[Any], rank: int, seed: int) -> None:
    for optim in optims:
        optim.zero_grad()
    square(model, data(seed, rank)).backward()
    for optim in optims:
        optim.step()


@pytest.mark.parametrize(
    "take",
    [nn.Module.parameters, fc.flat_parameters, fc.local_parameters],
    ids=lambda f: f.__name__,
)
def test_a_plateau_of_its_own_on_each_rank(take: Callable[[nn.Module], Any]) -> None:
    """Every rank raises, and trains again when weights were loaded and the rates are the same."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        optim = sgd(take(model))
        plateau = ReduceLROnPlateau(optim, patience=0)
        first = {name: p.detach().clone() for name, p in model.named_parameters()}
        for seed in range(2):
            train(model, [optim], rank, seed)
            plateau.step(1.0 + seed if rank == 1 else 1.0 - seed)
        train(model, [optim], rank, 2)
        with pytest.raises(RuntimeError, match=FOUND) as raised:
            train(model, [optim], rank, 3)
        text = str(raised.value)
        assert "on ranks 0 and 2 and lr=" in text and "on rank 1" in text, text
        optim.param_groups[0]["lr"] = 0.1
        train(model, [optim], rank, 4)  # it was said, and is not said again
        model.load_state_dict(first)
        for seed in range(3):
            train(model, [optim], rank, seed)

    simulate_ranks(ranks, 3)


@pytest.mark.parametrize(
    ("name", "value"), [("weight_decay", 0.5), ("betas", (0.5, 0.5)), ("lr", None)]
)
def test_any_setting_of_any_group(name: str, value: Any) -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        first, *rest = model.parameters()
        optims = [sgd([first]), adamw(rest)]
        if rank:
            optims[1].param_groups[0][name] = torch.tensor(0.5) if value is None else value
        train(model, optims, rank, 0)
        with pytest.raises(RuntimeError, match=f"stepped with {name}="):
            train(model, optims, rank, 1)

    run_ranks(ranks)


def test_a_second_optimizer_over_two_groups() -> None:
    """Of each optimizer, whatever stepped before it, the ranks of each group compare settings."""

    def ranks(rank: int) -> None:
        mesh = mesh_of_replicas(2, 2)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for layer, name in zip(model, ("shard", "replicate"), strict=True):
            fc.fully_shard(layer, init="broadcast", mesh=mesh[name])
        names = dict(model.named_parameters())
        optims = [
            sgd([p for n, p in names.items() if n.endswith(kind)]) for kind in ("bias", "weight")
        ]
        optims[1].param_groups[0]["lr"] = 0.1 + mesh.get_local_rank("replicate")

        def step() -> None:
            model(torch.ones(1, 4)).sum().backward()
            for optim in optims:
                optim.step()

        step()
        with pytest.raises(RuntimeError, match=r"'weight' .* lr=0\.1 on rank \d and lr=1\.1 on"):
            step()

    simulate_ranks(ranks, 4)


def test_rates_that_one_rank_has_exchanged() -> None:
    """As where groups come out of a set of names, and a schedule goes by their positions."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        first, *rest = model.parameters()
        optim = torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1)
        for seed in range(2):
            train(model, [optim], rank, seed)
        optim.param_groups[rank]["lr"] = 0.2
        train(model, [optim], rank, 2)
        with pytest.raises(RuntimeError, match=FOUND):
            train(model, [optim], rank, 3)

    simulate_ranks(ranks)


def test_on_a_device_it_is_found_a_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host does not wait for the comparison of the step that it has just issued."""
    compare_as_on_a_device(monkeypatch)

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        optim = sgd(model.parameters())
        train(model, [optim], rank, 0)
        optim.param_groups[0]["lr"] = 0.1 + rank
        train(model, [optim], rank, 1)
        optim.param_groups[0]["lr"] = 0.1
        train(model, [optim], rank, 2)
        with pytest.raises(RuntimeError, match=FOUND):
            train(model, [optim], rank, 3)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_ranks(ranks)


def test_ranks_may_have_other_groups() -> None:
    """Of what they hold a part of; what they have in common was stepped alike."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower), granularity="tensor")
        mine = [p for p in model.parameters() if to_local(p).numel()]
        groups = [{"params": [p], "lr": 0.1 + p.numel() / 100} for p in mine]
        optim = torch.optim.SGD(groups, lr=0.1)
        (log,) = {log for unit in iter_units(model) for log in unit.links.logs}
        train(model, [optim], rank, 0)
        assert log.steps.are_compared
        with fc.count_traffic() as traffic:
            train(model, [optim], rank, 1)
        assert not log.steps.are_compared
        with fc.count_traffic() as later:
            train(model, [optim], rank, 2)
        assert later.control < traffic.control

    simulate_ranks(ranks)


class Named(nn.Module):
    """Each rank has an expert of its own, by its own name."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.dense = nn.Linear(6, 6)
        self.experts = nn.ModuleDict({str(rank): nn.Linear(6, 6)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (expert,) = self.experts.values()
        return expert(self.dense(x))


def test_groups_of_experts_have_names_of_their_own() -> None:
    """Ranks still compare what the groups of those say that all ranks have."""

    def ranks(rank: int) -> None:
        model = Named(rank).double()
        for expert in model.experts.values():
            fc.fully_shard(expert, mesh="self")
            fc.set_gradient_divide_factor(expert, 2)
        fc.fully_shard(model)
        groups = [{"params": model.dense.parameters()}, {"params": model.experts.parameters()}]
        groups[1]["lr"] = 0.2
        optim = torch.optim.SGD(groups, lr=0.1)
        for seed in range(2):
            train(model, [optim], rank, seed)
        optim.param_groups[0]["lr"] = 0.1 + rank
        train(model, [optim], rank, 2)
        with pytest.raises(RuntimeError, match=r"'dense.weight' of unit .* stepped with lr="):
            train(model, [optim], rank, 3)

    run_ranks(ranks)


def test_optimizers_in_another_order_on_each_rank() -> None:
    """They may step in any order, and a rate that differs afterwards is found all the same."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        first, *rest = model.parameters()
        optims = [torch.optim.SGD([first], lr=0.1), torch.optim.SGD(rest, lr=0.2)]
        for seed in range(2):
            train(model, optims[:: 1 - 2 * rank], rank, seed)
        optims[0].param_groups[0]["lr"] = 0.1 + rank
        train(model, optims, rank, 2)
        with pytest.raises(RuntimeError, match=FOUND):
            train(model, optims, rank, 3)

    run_ranks(ranks)


def test_one_parameter_tells_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more is looked at where one group of ranks shares all parameters and the first trains."""
    seen: list[int] = []
    find = step_guard.find_buckets
    monkeypatch.setattr(
        step_guard, "find_buckets", lambda params: seen.append(len(params)) or find(params)
    )

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        train(model, [sgd(model.parameters())], rank, 0)

    simulate_ranks(ranks)
    assert seen == [1, 1], "one on each rank"


def test_what_the_same_settings_send() -> None:
    """No collective more than without an optimizer, however often the rate changes."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        optim = adamw(model.parameters())
        counts = []
        for seed in range(4):
            with fc.count_traffic() as traffic:
                train(model, [optim] if seed % 2 else [], rank, seed)
            optim.param_groups[0]["lr"] *= 0.5
            counts.append(traffic.control)
        assert counts[1:] == counts[1:2] * 3

    simulate_ranks(ranks)


def test_the_text_names_what_differs() -> None:
    a, b = {"lr": "0.1", "eps": "1"}, {"lr": "0.2", "eps": "1"}
    assert explain_settings(3, [(0, {("u", "w"): a}), (1, {("u", "v"): b})]) is None
    text = explain_settings(3, [(0, {("u", "w"): a}), (1, {("u", "w"): b}), (2, {("u", "w"): a})])
    assert text is not None and "lr=0.1 on ranks 0 and 2 and lr=0.2 on rank 1" in text
    assert "'w' of unit 'u'" in text and "before step 3" in text


@pytest.mark.parametrize("of", [lambda nan: nan, lambda nan: (nan, 0.9)], ids=["alone", "pair"])
def test_a_setting_that_is_nan_hides_no_other(of: Callable[[float], Any]) -> None:
    """Python's hash of NaN follows from where it lies, which no two ranks have alike."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        optim = sgd(model.parameters())
        lie_elsewhere = [float("nan") for _ in range(1 + rank * 100)]
        optim.param_groups[0]["best"] = of(lie_elsewhere[-1])
        train(model, [optim], rank, 0)
        train(model, [optim], rank, 1)
        optim.param_groups[0]["lr"] = 0.1 + rank
        train(model, [optim], rank, 2)
        with pytest.raises(RuntimeError, match=FOUND):
            train(model, [optim], rank, 3)

    run_ranks(ranks)


def test_a_step_keeps_no_model_alive() -> None:
    """What is remembered of a step, until ranks compare, holds neither optimizer nor weights."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        optim = adamw(model.parameters())
        train(model, [optim], rank, 0)
        refs = [weakref.ref(optim), *map(weakref.ref, model.parameters())]
        del model, optim
        gc.collect()
        assert [ref() for ref in refs] == [None] * len(refs)

    run_ranks(ranks)
