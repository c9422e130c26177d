"""What ranks bring is added up in one order, in wide numbers, and rounded once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdp_compose.comm.sums import add_up, scale_in_place

LONG = 300_000  # elements, which are added up in several pieces


def brought(count: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(LONG, generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_are_those_of_whole_tensors(given: torch.dtype, kept: torch.dtype) -> None:
    for count, scale in ((2, 1.0), (3, 0.5), (5, 1 / 3)):
        parts, total = brought(count, given), torch.empty(LONG, dtype=kept)
        add_up(parts, total, scale, in_tree=False)
        wide = torch.float64 if kept is torch.float64 else torch.float32
        wanted = parts[0].to(wide)
        for part in parts[1:]:
            wanted += part
        assert torch.equal(total, (wanted * scale).to(kept))


def test_a_tree_adds_neighbours_first() -> None:
    """In the dtype that is kept, as its nodes may be summed on several ranks."""
    for kept in (torch.float32, torch.bfloat16):
        a, b, c, d = parts = brought(4, kept)
        total = torch.empty(LONG, dtype=kept)
        add_up(parts, total, 0.25, in_tree=True)
        assert torch.equal(total, ((a + b) + (c + d)) * 0.25)


def test_a_sum_may_lie_where_a_part_does() -> None:
    parts = brought(3, torch.float32)
    wanted = (parts[0] + parts[1] + parts[2]) * 2
    add_up(parts, parts[1], 2.0, in_tree=False)
    assert torch.equal(parts[1], wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_scaling_is_that_of_a_number(dtype: torch.dtype) -> None:
    """A factor that is rounded to the tensor's dtype first would give other bits."""
    (part,) = brought(1, dtype)
    wanted = part * (1 / 3)
    assert torch.equal(scale_in_place(part, 1 / 3), wanted) and torch.equal(part, wanted)
