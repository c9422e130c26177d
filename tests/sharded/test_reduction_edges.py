"""Reductions where ranks hold nothing, corrections are large, dtypes mix, or slices were saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_compose as fc

from harness import simulate_ranks


class One(nn.Module):
    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.p = nn.Parameter(values, requires_grad=False)


EXTREMES: dict[str, Callable[[Any], Tensor]] = {
    "max": lambda t: t.max(),
    "min": lambda t: t.min(),
    "amax": lambda t: t.amax(),
    "amin": lambda t: t.amin(),
    "list": lambda t: torch._foreach_max([t])[0],
}
VALUES = {
    "negative": torch.tensor([-5, -7]),
    "positive": torch.tensor([5, 7]),
    "small": torch.tensor([-5, -7], dtype=torch.int8),
    "unsigned": torch.tensor([5, 7], dtype=torch.uint8),
    "float": torch.tensor([-5.0, -7.0]),
    "above": torch.tensor([5.0, 7.0], dtype=torch.bfloat16),
    "true": torch.tensor([True, True]),
    "false": torch.tensor([False, False]),
}


@pytest.mark.parametrize("kind", VALUES)
def test_a_rank_without_elements_has_no_say(kind: str) -> None:
    """The largest and the smallest element are the whole's, where a rank holds no element."""

    def ranks(rank: int) -> None:
        p: Any = fc.fully_shard(One(VALUES[kind].clone())).p
        for name, reduce in EXTREMES.items():
            if name == "list" and not p.dtype.is_floating_point:
                continue  # whose lists are not reduced
            assert torch.equal(reduce(p), reduce(VALUES[kind])), name

    simulate_ranks(ranks, 3)


@pytest.mark.parametrize("correction", [-2, 0, 1, 2, 5])
def test_variances_of_any_correction(correction: int) -> None:
    """Of 6 elements, as torch's: also where the correction is negative, or leaves one element."""
    plain = torch.tensor([1.0, 2.0, 4.0, -3.0, 0.5, 7.0], dtype=torch.float64)

    def ranks(rank: int) -> None:
        p: Any = fc.fully_shard(One(plain.clone())).p
        torch.testing.assert_close(p.var(correction=correction), plain.var(correction=correction))
        torch.testing.assert_close(p.std(correction=correction), plain.std(correction=correction))

    simulate_ranks(ranks, 2)


@pytest.mark.parametrize("name", ["var", "std", "sum", "mean", "amax", "norm"])
def test_a_reduction_along_a_dimension_raises(name: str) -> None:
    """A rank's slice knows nothing of rows: no result, and no None in place of one."""

    def ranks(rank: int) -> None:
        p: Any = fc.fully_shard(One(torch.arange(6.0).view(2, 3))).p
        with pytest.raises(fc.ShardedWeightError, match=name):
            getattr(p, name)(dim=0)

    simulate_ranks(ranks, 2)


def test_norms_of_mixed_dtypes_on_replicas() -> None:
    """In one list each keeps its dtype, and its gradient, which replicas average."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.arange(1.0, 5.0))
            self.b = nn.Parameter(torch.arange(2.0, 6.0, dtype=torch.float64))

    def ranks(rank: int) -> None:
        plain = Mixed()
        model = fc.fully_shard(Mixed(), strategy=fc.ShardingStrategy.NO_SHARD)
        for one in (plain, model):
            norms = torch._foreach_norm([one.a, one.b])
            assert [norm.dtype for norm in norms] == [torch.float32, torch.float64]
            (norms[0] * (rank + 1 if one is model else 1.5) + norms[1]).backward()
        for name in "ab":
            grad: Any = getattr(model, name).grad
            torch.testing.assert_close(grad.full_tensor(), getattr(plain, name).grad)

    simulate_ranks(ranks, 2)


def test_padding_by_nothing_gives_a_copy() -> None:
    """By which libraries fit a bias to its tied weight; any other padding raises."""
    pad = nn.functional.pad

    def ranks(rank: int) -> None:
        plain = torch.arange(5.0)
        p: Any = fc.fully_shard(One(plain.clone())).p
        for copy in (pad(p, (0, 0)), pad(input=p, pad=(0, 0), mode="constant", value=0)):
            copy += 1
            assert torch.equal(copy.full_tensor(), plain + 1)
            assert torch.equal(p.full_tensor(), plain)
        with pytest.raises(fc.ShardedWeightError, match=r"pad"):
            pad(p, (0, 1))

    simulate_ranks(ranks, 2)


def test_backward_reads_slices_that_it_saved() -> None:
    """A product saves the parameter itself, of which its derivative reads the slice."""
    plain = torch.arange(1.0, 6.0)

    def ranks(rank: int) -> None:
        p: Any = fc.fully_shard(One(plain.clone())).p
        p.requires_grad_()
        (p * p).sum().backward()
        assert torch.equal(p.grad.full_tensor(), 2 * plain)

    simulate_ranks(ranks, 2)
