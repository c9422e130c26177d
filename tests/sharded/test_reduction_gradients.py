"""Gradients of reductions are those of the whole where elements are equal, and where all are 0."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_compose as fc

from harness import rank_errors, run_ranks

Reduce = Callable[[Any], Tensor]
EXTREMES: dict[str, Reduce] = {
    "max": torch.max,
    "min": torch.min,
    "amax": torch.amax,
    "amin": torch.amin,
    "norm": lambda x: x.norm(math.inf),
    "least norm": lambda x: torch.linalg.vector_norm(x + 3.0, -math.inf),
    "list of norms": lambda x: torch._foreach_norm([x], math.inf)[0],
    "list of largest": lambda x: torch._foreach_max([x])[0],
}


def build(values: list[float], dtype: torch.dtype) -> nn.Module:
    module = nn.Module()
    module.first = nn.Parameter(torch.tensor(values, dtype=dtype))
    module.other = nn.Parameter(torch.zeros(3, dtype=dtype))
    return module


def compare(reduce: Reduce, values: list[float], dtype: torch.dtype) -> None:
    plain, module = build(values, dtype), fc.fully_shard(build(values, dtype))
    for each in (plain, module):
        reduce(each.first).backward()
    torch.testing.assert_close(module.first.grad.full_tensor(), plain.first.grad, equal_nan=True)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_equal_extremes_share_a_gradient(world: int, dtype: torch.dtype) -> None:
    """One share for each element, however many of them a rank holds."""

    def ranks(rank: int) -> None:
        for reduce in EXTREMES.values():
            compare(reduce, [2.0, 2.0, -2.0, 1.0, 2.0, -2.0, 2.0, -2.0, 2.0], dtype)
        for name in ("max", "min"):
            compare(EXTREMES[name], [1.0, math.nan, 2.0, -1.0, math.nan], dtype)

    run_ranks(ranks, world)


@pytest.mark.parametrize("correction", [0, 1])
def test_deviation_of_nothing_has_no_gradient(correction: int) -> None:
    """Where all elements are equal it is 0, as of a plain tensor, and not NaN."""

    def ranks(rank: int) -> None:
        for values in ([2.0] * 9, [1.0, math.nan], [1.0, 2.0, 4.0]):
            for dtype in (torch.float64, torch.complex64):
                compare(lambda x: x.std(correction=correction), values, dtype)

    run_ranks(ranks, 2)


def compare_second(reduce: Reduce, values: list[float], dtype: torch.dtype) -> None:
    """Compare second derivatives, of the slices and in one process."""
    found = []
    for x in (build(values, dtype).first, fc.fully_shard(build(values, dtype)).first):
        (slope,) = torch.autograd.grad(reduce(x), x, create_graph=True)
        part = torch.view_as_real(slope) if dtype.is_complex else slope
        (part * torch.arange(float(part.numel())).view(part.shape)).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1].full_tensor(), found[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_second_derivatives_of_variances(dtype: torch.dtype) -> None:
    """Elements that are equal to the mean have one too, as where a weight is still all ones."""

    def ranks(rank: int) -> None:
        for values in ([2.0] * 9, [1.0, 2.0, 3.0, -2.0, 0.0]):
            compare_second(Tensor.var, values, dtype)

    run_ranks(ranks, 2)


NORMS: dict[str, Reduce] = {
    "norm": lambda x: x.norm(),
    "of order 3": lambda x: torch.linalg.vector_norm(x, 3),
    "of a list": lambda x: torch._foreach_norm([x, x * 2])[1],
    "distance": lambda x: torch.dist(x, torch.zeros(x.shape, dtype=x.dtype)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("kind", NORMS)
def test_second_derivatives_of_norms(kind: str, dtype: torch.dtype) -> None:
    """Where a rank has nothing but zeros, or no elements, they are finite as in one process."""

    def ranks(rank: int) -> None:
        for values in ([1.0, 2.0, -3.0, *[0.0] * 12], [2.0, 1.0]):
            compare_second(NORMS[kind], values, dtype)

    run_ranks(ranks, 2)


@pytest.mark.parametrize("order", [math.inf, -1.0, -math.inf])
def test_norms_of_narrow_dtypes_raise_on_all_ranks(order: float) -> None:
    """A rank without elements refuses what torch does, and does not wait for the others."""

    def ranks(rank: int) -> None:
        module = fc.fully_shard(build([1.0, 2.0], torch.float64))
        torch.linalg.vector_norm(module.first, order, dtype=torch.float32)

    for text in rank_errors(ranks, 3):
        assert text is not None and "without narrowing" in text
