"""Ranks that reduce different things at one time raise, on every rank; nothing blends."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose.base.group import SELF
from fsdp_compose.base.mesh import group_over
from fsdp_compose.comm.small_reduce import reduce_alike, reduce_extreme
from fsdp_compose.comm.uneven import all_gather_uneven

from harness import rank_errors, run_ranks, simulate_ranks
from models import Tower, by_block, data, seeded, square, whole

Ask = Callable[[nn.Module], Any]


def up(model: Any) -> Tensor:
    return model.blocks[0].up.weight


def other(model: Any) -> Tensor:
    return model.blocks[1].up.weight


ASKS: dict[str, Ask] = {
    "sum": lambda m: up(m).sum(),
    "sum of the gradient": lambda m: up(m).grad.sum(),
    "sum of another": lambda m: other(m).sum(),
    "norm": lambda m: up(m).norm(),
    "norm of another's gradient": lambda m: other(m).grad.norm(),
    "norm of order 1": lambda m: up(m).norm(1),
    "count": lambda m: up(m).count_nonzero(),
    "max": lambda m: up(m).max(),
    "min": lambda m: up(m).min(),
    "max of another": lambda m: other(m).amax(),
    "any": lambda m: up(m).isnan().any(),
    "grad_norm": lambda m: fc.grad_norm(m),
    "grad_norm of a part": lambda m: fc.grad_norm(m.blocks[0]),
}
PAIRS = [
    ("sum", "sum of another"),
    ("sum", "sum of the gradient"),
    ("sum", "norm"),
    ("sum", "count"),
    ("norm", "norm of another's gradient"),
    ("norm", "norm of order 1"),
    ("grad_norm", "grad_norm of a part"),
    ("grad_norm of a part", "norm"),
    ("max", "min"),
    ("sum", "max"),
    ("count", "any"),
    ("max", "max of another"),
]


def trained(rank: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    model = by_block(seeded(Tower).to(dtype))
    square(model, data(0, rank).to(dtype)).backward()
    return model


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_different_reductions_raise_on_every_rank(pair: tuple[str, str]) -> None:
    """In either order, in low precision too; the same ones are right before."""

    def ranks(rank: int) -> None:
        for dtype in (torch.float64, torch.bfloat16):
            model = trained(rank, dtype)
            for order in permutations(pair):
                with torch.no_grad():
                    assert all(torch.isfinite(torch.as_tensor(ASKS[name](model))) for name in pair)
                    with pytest.raises(RuntimeError, match="at the same time") as raised:
                        ASKS[order[rank]](model)
                says = str(raised.value)
                assert f"rank {rank} was to take the " in says and "on every rank" in says

    run_ranks(ranks, 2)


def test_lists_of_other_tensors_raise() -> None:
    """``torch._foreach_norm``, and torch's clipping over it, of another tensor on another rank."""

    def ranks(rank: int) -> None:
        model = trained(rank)
        params = [model.head.weight, other(model) if rank else up(model)]
        torch.nn.utils.clip_grad_norm_(params, 1.0)

    for text in rank_errors(ranks, 2):
        assert text is not None and "at the same time" in text and "blocks.1.up.weight" in text


def test_clipping_in_another_order_is_right() -> None:
    """Where one number is made of all gradients, their order does not matter."""

    def ranks(rank: int) -> Tensor:
        model = trained(rank)
        params = list(model.parameters())[:: 1 if rank else -1]
        first = torch.nn.utils.clip_grad_norm_(params, 1e9)
        norms = [fc.clip_grad_norm_(params, 1e-3), fc.grad_norm(params, torch.inf)]
        torch.testing.assert_close(whole(first), norms[0])
        return torch.stack(norms)

    first, second = run_ranks(ranks, 2)
    assert torch.equal(first, second)


def test_three_ranks_of_which_one_differs() -> None:
    """Also the ranks that agree raise, and where the differing numbers average out."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(lambda: Tower(3)))
        with torch.no_grad():
            model.blocks[rank].up.weight.sum()

    for text in rank_errors(ranks, 3):
        assert text is not None and "at the same time" in text


@pytest.mark.parametrize("kind", [torch.float32, torch.int64, torch.int8, torch.complex64])
def test_results_are_those_of_the_whole(kind: torch.dtype) -> None:
    """The numbers that are compared change neither value nor dtype, infinities and NaN included."""

    def ranks(rank: int) -> None:
        values = torch.tensor([3, -5, 7, 100, 2, 90]).to(kind)
        for special in (None, torch.inf, torch.nan):
            full = values.clone()
            if special is not None:
                if not kind.is_floating_point:
                    continue
                full[rank] = full[1 - rank] = special
            module = nn.Module()
            module.weight = nn.Parameter(full.clone(), requires_grad=False)
            fc.fully_shard(module)
            names = ["sum", "count_nonzero"]
            names += [] if kind.is_complex else ["max", "min", "amax"]
            names += ["norm", "mean"] if kind.is_floating_point or kind.is_complex else []
            for name in names:
                found, wanted = getattr(module.weight, name)(), getattr(full, name)()
                torch.testing.assert_close(found, wanted, equal_nan=True)

    run_ranks(ranks, 2)


def test_numbers_come_out_as_they_are() -> None:
    """Integers beyond what a double holds, infinities; of one rank alone another tensor."""

    def ranks(rank: int) -> None:
        assert dist.group.WORLD is not None
        group = group_over(dist.group.WORLD, torch.device("cpu"))
        total = reduce_alike(torch.tensor([2**60 + rank]), group, "sum", "add")
        assert total.tolist() == [2**61 + 1]
        numbers = torch.tensor([torch.inf, -torch.inf, rank])
        for op, wanted in (("max", 1.0), ("min", 0.0)):
            found = reduce_extreme(numbers, group, op, "compare")
            assert found.tolist() == [torch.inf, -torch.inf, wanted]

    simulate_ranks(ranks)
    own = torch.ones(2)
    all_gather_uneven(own, [2], SELF).zero_()
    assert own.tolist() == [1.0, 1.0]
