"""Parameters that torch holds weakly: autocast's cache lets go of them, a profile is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

import fsdp_compose as fc
from fsdp_compose import ShardingStrategy

from harness import simulate_ranks
from models import Tower, by_block, data, seeded, square, whole

F32 = torch.float32


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("writeback", [False, True])
def test_gathered_inside_autocast(strategy: str, writeback: bool) -> None:
    def ranks(rank: int) -> None:
        plain = seeded(Tower).float()
        model = by_block(seeded(Tower).float(), strategy=ShardingStrategy[strategy])
        x = data(0, rank, dtype=F32)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            with fc.gathered(model, writeback=writeback):
                found = model(x)
            assert torch.equal(found, plain(x))
        square(model, x).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            before = model.head.weight.full_tensor()
            fc.apply(model, lambda part: part is model and part(x))
            assert torch.equal(before, model.head.weight.full_tensor())

    simulate_ranks(ranks)


def enter(model: nn.Module) -> None:
    with fc.gathered(model):
        model(torch.ones(2, 8))


CALLS: dict[str, Callable[[nn.Module], object]] = {
    "gathered": enter,
    "undo": fc.undo,
    "refresh": fc.refresh,
}


def values_of(model: nn.Module) -> list[tuple[type, Tensor]]:
    return [(type(param), whole(param).clone()) for param in model.parameters()]


@pytest.mark.parametrize("call", CALLS)
def test_a_profile_that_holds_tensors_is_told(call: str) -> None:
    """Before anything is changed; once it is gone the call is right."""
    model = fc.fully_shard(nn.Sequential(nn.Linear(8, 4)))
    before = values_of(model)
    with profile(record_shapes=True) as held:
        model(torch.ones(2, 8)).sum().backward()
        with pytest.raises(RuntimeError, match=f"{call}: torch's profiler holds the tensors"):
            CALLS[call](model)
    after = values_of(model)
    assert [kind for kind, _ in after] == [kind for kind, _ in before]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(after, before))
    model.zero_grad()
    del held
    gc.collect()
    CALLS[call](model)


def test_fully_shard_inside_a_profile() -> None:
    """And after it, while what it recorded is there."""
    model = nn.Linear(8, 4)
    with profile(record_shapes=True) as held:
        before = model(torch.ones(2, 8))
        with pytest.raises(RuntimeError, match="fully_shard: torch's profiler holds the tensors"):
            fc.fully_shard(model)
        assert not fc.is_fully_sharded(model)
        assert torch.equal(model(torch.ones(2, 8)), before)
    with pytest.raises(RuntimeError, match="fully_shard: torch's profiler holds the tensors"):
        fc.fully_shard(model)
    del held
    gc.collect()
    assert torch.equal(fc.fully_shard(model)(torch.ones(2, 8)), before)
