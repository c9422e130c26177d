"""Every torch optimizer and more than ten others train, save and resume as one process does.

On slices of which some are empty: what is elementwise, or takes norms and sums of whole tensors,
runs on the sharded parameters; what needs whole matrices runs under ``owner_step``, or is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_compose as fc
from fsdp_compose.sharded import ShardedWeightError

import optimizers as other
import structured
from harness import run_ranks
from models import Tower, by_block, data, one_unit, seeded, square, whole
from optimizers import EXACT

STEPS = 2
OTHERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lion": other.Lion,
    "adan": other.Adan,
    "sophia": other.Sophia,
    "adabelief": other.AdaBelief,
    "lamb": other.Lamb,
    "lars": partial(other.Lars, lr=1.0),
    "amos": other.Amos,
    "lookahead": partial(other.Lookahead, lr=0.1, momentum=0.9),
    "prodigy": other.Prodigy,
    "prodigy's package": other.PackagedProdigy,
    "d-adaptation": other.DAdaptSGD,
    "schedule-free": partial(other.ScheduleFree, lr=0.1),
}
MATRICES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "kron": other.Kron,
    "shampoo": structured.Shampoo,
    "soap": structured.Soap,
    "adafactor": partial(torch.optim.Adafactor, lr=0.05),
    "muon": partial(torch.optim.Muon, lr=0.02),
}
NAMES = [*EXACT, *OTHERS, *MATRICES]


def build(name: str, model: nn.Module, is_sharded: bool) -> list[torch.optim.Optimizer]:
    """The optimizers of one process, or those over ``model``'s slices."""
    if name not in MATRICES:
        return [({**EXACT, **OTHERS})[name](model.parameters())]
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = torch.optim.SGD([p for p in model.parameters() if p.ndim != 2], lr=0.1)
    make = MATRICES[name]
    return [fc.owner_step(matrices, make) if is_sharded else make(matrices), rest]


def tower() -> nn.Module:
    return Tower(depth=1)


def train(model: nn.Module, optims: list[Any], ranks: range, *seeds: int) -> None:
    """Steps on the mean loss over ``ranks``' batches: all of them, or this rank's own."""
    for seed in seeds:
        loss = sum(square(model, data(seed, rank)) for rank in ranks) / len(ranks)
        loss.backward()
        for optim in optims:
            optim.step()
            optim.zero_grad()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [whole(p) for p in model.parameters()]


def close(name: str, found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8, msg=lambda m: f"{name}: {m}")


@pytest.mark.slow
def test_optimizers_train_and_resume_as_one_process() -> None:
    """Two ranks train, save, and resume cut otherwise; three ranks resume what two saved."""

    def body(rank: int) -> dict[str, Any]:
        saved: dict[str, Any] = {}
        for name in NAMES:
            plain, model = seeded(tower), by_block(seeded(tower))
            if rank == 0:
                assert any(not p.to_local().numel() for p in model.parameters())
            reference, optims = build(name, plain, False), build(name, model, True)
            train(plain, reference, range(2), *range(STEPS))
            train(model, optims, range(rank, rank + 1), *range(STEPS))
            close(name, weights(model), weights(plain))
            state = fc.state_dict(model), fc.optim_state_dict(model, optims)
            again = one_unit(seeded(tower, seed=1))
            others = build(name, again, True)
            fc.load_state_dict(again, state[0])
            fc.load_optim_state_dict(again, others, state[1])
            train(again, others, range(rank, rank + 1), STEPS)
            train(plain, reference, range(2), STEPS)
            close(f"{name}, resumed", weights(again), weights(plain))
            train(model, optims, range(rank, rank + 1), STEPS)
            close(f"{name}, went on", weights(again), weights(model))
            saved[name] = dict(state[0]), state[1]
        return saved

    def resume(rank: int, saved: dict[str, Any]) -> dict[str, Any]:
        for name, state in saved.items():
            plain, model = seeded(tower), by_block(seeded(tower, seed=1))
            reference, optims = build(name, plain, False), build(name, model, True)
            plain.load_state_dict(state[0])
            fc.load_state_dict(model, state[0])
            for one, mine in zip(reference, optims, strict=True):
                names = [fc.optim_state_dict(model, mine)["param_groups"][0]["params"]]
                part = {n: v for n, v in state[1]["state"].items() if n in names[0]}
                groups = [g for g in state[1]["param_groups"] if g["params"] == names[0]]
                own = {**state[1], "state": part, "param_groups": groups}
                one.load_state_dict(fc.rekey_optim_state_dict(own, "id", model))
            fc.load_optim_state_dict(model, optims, state[1])
            train(plain, reference, range(3), STEPS)
            train(model, optims, range(rank, rank + 1), STEPS)
            close(f"{name}, on three", weights(model), weights(plain))
        return {}

    run_ranks(resume, 3, run_ranks(body, 2, timeout=120)[0], timeout=120)


def test_optimizers_that_need_the_whole_are_refused() -> None:
    """Matrices, vectors of everything, sparse gradients, and sums over what one rank owns."""

    def body(rank: int) -> None:
        model = by_block(seeded(tower))
        params = list(model.parameters())
        matrices = [p for p in params if p.ndim == 2]
        before = weights(model)
        for make in MATRICES.values():
            optim = make(matrices)
            square(model, data(0, rank)).backward()
            with pytest.raises(ShardedWeightError, match="owner_step"):
                optim.step()
            optim.zero_grad()
        with pytest.raises(ShardedWeightError, match=r"'first.weight' \(unit 'Tower'\)"):
            torch.optim.LBFGS(params).step(lambda: square(model, data(0, rank)))
        with pytest.raises(TypeError, match=r"LBFGS\.step needs a closure"):
            fc.owner_step(matrices, torch.optim.LBFGS)
        square(model, data(0, rank)).backward()
        with pytest.raises(RuntimeError, match="does not support dense gradients"):
            torch.optim.SparseAdam(params).step()
        close("refused", weights(model), before)
        model.zero_grad()
        for make in (other.Prodigy, other.DAdaptSGD):
            optim = fc.owner_step(matrices, make)
            with pytest.raises(RuntimeError, match="sums over all parameters"):
                train(model, [optim], range(rank, rank + 1), 0, 1, 2)
            model.zero_grad()
            local = make(fc.local_parameters(model))
            square(model, data(2, rank)).backward()
            for _ in range(3):
                local.step()
            with pytest.raises(RuntimeError, match="takes them of one rank's slices"):
                fc.optim_state_dict(model, local)

    run_ranks(body, 2)
