"""Optimizer state and settings load into the kind of optimizer that saved them, as copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import Optimizer

import fsdp_compose as fc

from harness import simulate_ranks
from models import by_block, data, seeded, square, two_blocks

Make = Callable[[Any], Optimizer]


class Cautious(torch.optim.AdamW):
    """AdamW with one more setting."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for settings in (self.defaults, *self.param_groups):
            settings["caution"] = 0.5


MAKES: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": lambda params: torch.optim.AdamW(params, foreach=True),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "cautious": Cautious,
}


def stepped(rank: int, make: Make) -> tuple[nn.Module, Optimizer]:
    model = by_block(seeded(two_blocks))
    optim = make(model.parameters())
    step(model, optim, rank)
    return model, optim


def step(model: nn.Module, optim: Optimizer, rank: int) -> None:
    square(model, data(0, rank)).backward()
    optim.step()
    optim.zero_grad()


OTHERS = [("adamw", "sgd"), ("sgd", "adam"), ("rmsprop", "adamw"), ("adagrad", "sgd")]


@pytest.mark.parametrize(("saved", "loaded"), OTHERS)
def test_state_of_another_optimizer(saved: str, loaded: str, tmp_path: Path) -> None:
    """It would train on with neither state nor settings; plain torch's step fails."""

    def body(rank: int) -> None:
        model, optim = stepped(rank, MAKES[saved])
        other = MAKES[loaded](model.parameters())
        before = other.state_dict()["param_groups"]
        text = f"'first.weight' was saved by another kind of .* of {type(other).__name__}; load"
        with pytest.raises(RuntimeError, match=text):
            fc.load_optim_state_dict(model, other, fc.optim_state_dict(model, optim))
        fc.save_checkpoint(tmp_path / "saved", model, optim)
        with pytest.raises(RuntimeError, match=text):
            fc.load_checkpoint(tmp_path / "saved", model, other)
        assert not other.state and other.state_dict()["param_groups"] == before

    simulate_ranks(body)


@pytest.mark.parametrize(
    ("saved", "loaded"), [("adam", "adamw"), ("adamw", "cautious"), ("cautious", "adamw")]
)
def test_state_of_an_optimizer_alike(saved: str, loaded: str) -> None:
    """Settings that are new, or of other flags and versions, keep what the optimizer has."""

    def body(rank: int) -> None:
        model, optim = stepped(rank, MAKES[saved])
        optim.param_groups[0]["initial_lr"] = 0.5
        found = fc.optim_state_dict(model, optim)
        del found["param_groups"][0]["fused"], found["param_groups"][0]["amsgrad"]
        other = MAKES[loaded](model.parameters())
        fc.load_optim_state_dict(model, other, found)
        assert other.param_groups[0].get("caution", 0.5) == 0.5
        values = fc.optim_state_dict(model, other)["state"]
        torch.testing.assert_close(values, found["state"], rtol=0, atol=0)
        step(model, other, rank)

    simulate_ranks(body)


def test_settings_that_are_tensors_are_copies() -> None:
    """A saved dict and each optimizer it is loaded into have learning rates and betas apart."""

    def make(params: Any) -> Optimizer:
        betas: Any = (torch.tensor(0.9), torch.tensor(0.99))
        return torch.optim.Adam(params, lr=torch.tensor(0.5), betas=betas, foreach=False)

    def settings_of(group: dict[str, Any]) -> list[float]:
        return [float(value) for value in (group["lr"], *group["betas"])]

    def body(rank: int) -> None:
        model, optim = stepped(rank, make)
        saved = fc.optim_state_dict(model, optim)
        wanted = settings_of(saved["param_groups"][0])
        others = [make(model.parameters()) for _ in range(2)]
        for other in others:
            fc.load_optim_state_dict(model, other, saved)
        for changed in (optim, others[0]):
            for value in (changed.param_groups[0]["lr"], *changed.param_groups[0]["betas"]):
                value.fill_(7)
        assert settings_of(saved["param_groups"][0]) == wanted
        assert settings_of(others[1].param_groups[0]) == wanted

    simulate_ranks(body)


def test_a_rate_that_groups_share_stays_shared() -> None:
    """What is filled in one group reaches the others, as in torch; rates that differ stay apart."""

    def make(model: nn.Module, *rates: Tensor) -> Optimizer:
        groups = [{"params": [p], "lr": r} for p, r in zip(model.parameters(), rates, strict=True)]
        return torch.optim.SGD(groups, lr=0.1, foreach=False)

    def rates_of(optim: Optimizer) -> tuple[float, ...]:
        optim.param_groups[0]["lr"].fill_(7)
        return tuple(float(group["lr"]) for group in optim.param_groups)

    model, one, other = fc.fully_shard(nn.Linear(2, 2)), torch.tensor(0.5), torch.tensor(0.25)
    apart, together = make(model, one, other), make(model, one, one)
    for saved, wanted in ((apart, (7.0, 0.25)), (together, (7.0, 7.0))):
        loaded = make(model, *[torch.tensor(0.125)] * 2)
        fc.load_optim_state_dict(model, loaded, fc.optim_state_dict(model, saved))
        assert rates_of(loaded) == wanted


def test_rates_that_print_alike_are_kept_apart() -> None:
    """Learning rates that are tensors, of which a text has four digits: by key, and joined."""

    def rated(model: nn.Module, *rates: float) -> Optimizer:
        parts = [model] if len(rates) == 1 else list(model)
        groups = zip(parts, rates, strict=True)
        return torch.optim.AdamW(
            [{"params": [*part.parameters()], "lr": torch.tensor(rate)} for part, rate in groups]
        )

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    saved = rated(plain, 0.00100, 0.00104)
    by_key = get_optimizer_state_dict(
        plain, saved, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    model = fc.fully_shard(copy.deepcopy(plain))
    optim = rated(model, 0.5, 0.5)
    fc.load_optim_state_dict(model, optim, by_key)
    assert [round(float(g["lr"]), 6) for g in optim.param_groups] == [0.001, 0.00104]
    state = fc.optim_state_dict(model, optim)
    one = rated(model, 0.5)
    with pytest.raises(RuntimeError, match=r"several groups .* with different \['lr'\]"):
        fc.load_optim_state_dict(model, one, state)
    with pytest.raises(ValueError, match="has several groups"):
        fc.rekey_optim_state_dict(state, "id", model, one)


@pytest.mark.parametrize("kind", ["full", "sharded", "checkpoint"])
def test_state_loaded_for_inference_trains(kind: Any, tmp_path: Path) -> None:
    """State that is loaded under ``torch.inference_mode`` can be stepped outside of it."""

    def body(rank: int) -> None:
        model, optim = stepped(rank, MAKES["sgd"])
        fc.save_checkpoint(tmp_path / "saved", model, optim)
        other = MAKES["sgd"](model.parameters())
        with torch.inference_mode():
            if kind == "checkpoint":
                fc.load_checkpoint(tmp_path / "saved", model, other)
            else:
                fc.load_optim_state_dict(model, other, fc.optim_state_dict(model, optim, kind=kind))
        step(model, other, rank)
        step(model, optim, rank)
        assert other.state_dict()["state"].keys() == optim.state_dict()["state"].keys()

    simulate_ranks(body)


def test_a_parameter_of_two_optimizers_is_refused(tmp_path: Path) -> None:
    """State by name has room for one; one optimizer that is given twice is no other."""

    def body(rank: int) -> None:
        model, optim = stepped(rank, MAKES["adam"])
        other = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)
        saved = fc.optim_state_dict(model, [optim, optim])
        assert len(saved["param_groups"]) == 1
        text = "'head.weight' is a parameter of two of the optimizers"
        with pytest.raises(ValueError, match=text):
            fc.optim_state_dict(model, [optim, other])
        with pytest.raises(ValueError, match=text):
            fc.load_optim_state_dict(model, [optim, other], saved)
        with pytest.raises(ValueError, match=text):
            fc.save_checkpoint(tmp_path / "both", model, [optim, other])
        assert not (tmp_path / "both").exists()

    simulate_ranks(body)


class Counting(torch.optim.SGD):
    """SGD that counts its steps outside of state and groups."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        super().load_state_dict({k: state_dict[k] for k in ("state", "param_groups")})


def test_what_two_optimizers_keep_beside_state(tmp_path: Path) -> None:
    """It is by no parameter: two that are alike are saved, and two that differ have no room."""
    model = fc.fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    both = [Counting(layer.parameters()) for layer in model]
    model(torch.ones(1, 2)).sum().backward()
    for optim in both:
        optim.step()
    fc.save_checkpoint(tmp_path, model, both)
    both[0].step()
    for save in (fc.optim_state_dict, partial(fc.save_checkpoint, tmp_path)):
        with pytest.raises(TypeError, match=r"'count', beside .* is 2 of one .* and 1 of another"):
            save(model, both)
    fc.load_checkpoint(tmp_path, model, both)
    assert [optim.count for optim in both] == [1, 1]


@pytest.mark.parametrize("way", ["state dict", "checkpoint"])
def test_a_rank_that_cannot_load_is_told_of(way: str, tmp_path: Path) -> None:
    """Out of memory, or a load hook that fails, on one rank is an error on every rank."""

    def fail(optim: Optimizer) -> None:
        raise MemoryError("no room for the state")

    def body(rank: int) -> None:
        model, optim = stepped(rank, MAKES["adam"])
        saved = fc.optim_state_dict(model, optim)
        fc.save_checkpoint(tmp_path / "saved", model, optim)
        if rank == 1:
            optim.register_load_state_dict_post_hook(fail)
        load = {
            "state dict": lambda: fc.load_optim_state_dict(model, optim, saved),
            "checkpoint": lambda: fc.load_checkpoint(tmp_path / "saved", model, optim),
        }[way]
        with pytest.raises((MemoryError, RuntimeError), match="no room for the state"):
            load()

    simulate_ranks(body)


@pytest.mark.parametrize("way", ["full", "sharded", "local", "numbers", "checkpoint"])
def test_groups_without_parameters_load_as_saved(way: Any, tmp_path: Path) -> None:
    """Each of them in its turn, as in torch; the loop may read the learning rate off them."""

    def build(lrs: tuple[float, ...]) -> tuple[nn.Module, Optimizer]:
        model = by_block(seeded(two_blocks))
        members = [[], list(model.parameters()), []]
        groups = [{"params": p, "lr": lr} for p, lr in zip(members, lrs, strict=True)]
        return model, torch.optim.AdamW(groups)

    def body(rank: int) -> None:
        model, optim = build((0.1, 0.2, 0.3))
        step(model, optim, rank)
        other, again = build((9.0, 9.0, 9.0))
        if way == "checkpoint":
            fc.save_checkpoint(tmp_path, model, optim)
            fc.load_checkpoint(tmp_path, other, again)
        elif way == "numbers":
            state = fc.optim_state_dict(model, optim)
            numbered = fc.rekey_optim_state_dict(state, "id", model, optim)
            fc.load_optim_state_dict(other, again, numbered)
        else:
            fc.load_optim_state_dict(other, again, fc.optim_state_dict(model, optim, kind=way))
        assert [group["lr"] for group in again.param_groups] == [0.1, 0.2, 0.3]

    simulate_ranks(body, 2)


def test_state_from_before_layers_were_unfrozen(tmp_path: Path) -> None:
    """It goes into an optimizer of what was trained, which is then given the others, as said."""

    def ranks(rank: int) -> None:
        model = seeded(two_blocks)
        model.blocks[0].requires_grad_(False)
        by_block(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        optim = torch.optim.AdamW(trained)
        square(model, data(0, rank)).backward()
        optim.step()
        fc.save_checkpoint(tmp_path, model, optim)
        model.blocks[0].requires_grad_(True)
        text = "no group has 'blocks.0.* optimizer of what was saved, and give it the others by add"
        with pytest.raises(RuntimeError, match=text):
            fc.load_checkpoint(tmp_path, model, torch.optim.AdamW(model.parameters()))
        again = torch.optim.AdamW(trained)
        fc.load_checkpoint(tmp_path, model, again)
        again.add_param_group({"params": model.blocks[0].parameters()})
        square(model, data(1, rank)).backward()
        again.step()
        blocks = [again.state[block.up.weight] for block in model.blocks]
        assert [int(state["step"]) for state in blocks] == [1, 2]

    simulate_ranks(ranks, 2)
