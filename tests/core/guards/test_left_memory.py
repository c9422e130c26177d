"""Memory of gathered weights that something outside torch reads, such as a NumPy array."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fsdp_compose as fc
from fsdp_compose import ShardingStrategy

from harness import run_ranks
from models import assert_at_rest, data, seeded, sgd, square, units, whole

SEEN: list[Any] = []


class Exports(nn.Module):
    """Hands its weight to NumPy in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))
        self.keeps, self.kept = False, None

    def forward(self, x: Tensor) -> Tensor:
        if self.keeps:
            self.kept = self.weight.detach().t()
        SEEN.append(self.weight.detach().numpy())
        return torch.tanh(x @ self.weight + self.bias) * float(np.abs(SEEN[-1]).mean())


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Exports(), nn.Linear(6, 6)
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes:
            return self.last(checkpoint(self.inner, x, use_reentrant=False))
        return self.last(self.inner(x))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_forward_may_hand_weights_to_numpy(recomputes: bool, strategy: str) -> None:
    """It trains as the plain module does, what was handed out reads on, and memory is freed."""

    def ranks(rank: int) -> None:
        plain = seeded(lambda: nn.Sequential(Holder(), Holder()))
        for part in plain:
            part.recomputes = recomputes
        model = copy.deepcopy(plain)
        fc.fully_shard(
            model,
            units=fc.wrap.by_class({Exports, Holder}),
            strategy=ShardingStrategy[strategy],
        )
        optimizers = [sgd(m.parameters()) for m in (model, plain)]
        for step in range(3):
            SEEN.clear()
            loss, before = square(model, data(step, rank, 3, 6)), list(SEEN)
            known = [array.copy() for array in before]
            loss.backward()
            sum(square(plain, data(step, r, 3, 6)) for r in range(2)).div(2).backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert_close(whole(p.grad), q.grad, rtol=1e-12, atol=1e-12)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if strategy != "NO_SHARD":
                for array, values in zip(before, known, strict=True):
                    np.testing.assert_array_equal(array, values)
            with torch.no_grad():
                assert_close(model(data(9, rank, 3, 6)), plain(data(9, rank, 3, 6)))
        if strategy == "FULL_SHARD":
            assert_at_rest(model)
            buckets = [bucket for unit in units(model) for bucket in unit.buckets]
            assert not any(bucket.full.untyped_storage().nbytes() for bucket in buckets)

    run_ranks(ranks, 2)


def test_an_old_view_beside_an_array_raises() -> None:
    """What the array reads stays, but a kept view raises, as its unit is gathered elsewhere."""

    def ranks(rank: int) -> None:
        model = fc.fully_shard(seeded(Exports))
        model.keeps = True
        for step in range(3):
            square(model, data(step, rank, 3, 6)).backward()
            with pytest.raises(RuntimeError, match="of unit 'Exports'"):
                model.kept + 1
            assert np.isfinite(SEEN.pop()).all()

    run_ranks(ranks, 2)
