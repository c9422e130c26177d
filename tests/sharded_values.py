"""Sharded tensors made from whole ones, without a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_compose.base.group import SELF, Group
from fsdp_compose.base.mesh import group_of
from fsdp_compose.sharded import (
    Residence,
    ShardSpec,
    is_sharded,
    tag,
)

from harness import run_ranks

CPU = torch.device("cpu")


WORLDS = [1, 2, 3]


def world() -> Group:
    return group_of(torch.distributed.group.WORLD, CPU)


def shard(values: list[torch.Tensor], group: Group) -> list[Any]:
    """The values as parameters that are slices of one bucket, cut evenly over the group."""
    total = sum(v.numel() for v in values)
    width = -(-total // group.size)
    flat = torch.zeros(width * group.size, dtype=values[0].dtype)
    residence, offset, params = Residence(), 0, []
    specs = []
    for i, value in enumerate(values):
        flat.as_strided(value.shape, value.stride(), offset).copy_(value)
        spec = ShardSpec(
            f"layer.{i}",
            "layer",
            value.shape,
            value.stride(),
            offset,
            width,
            group,
            residence,
        )
        specs.append(spec)
        offset += value.numel()
    mine = flat[group.rank * width : (group.rank + 1) * width].clone()
    for value, spec in zip(values, specs):
        param = nn.Parameter(value.clone(), requires_grad=value.is_floating_point())
        at = max(spec.offset + spec.start - group.rank * width, 0) if spec.stop > spec.start else 0
        param.data = mine[at : at + spec.stop - spec.start]
        params.append(tag(param, spec))
    return params


def examples(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Two and more dimensions, transposed, scalar, empty and long: several cuts fall inside."""
    gen = torch.Generator().manual_seed(0)
    rand = lambda *s: torch.randn(*s, generator=gen).to(dtype)  # noqa: E731
    return [
        rand(4, 3),
        rand(5, 3).t(),
        rand(()),
        rand(7),
        torch.zeros(0, 2, dtype=dtype),
        rand(2, 3, 2).permute(2, 0, 1),
        rand(1, 9),
    ]


def on_ranks(body: Callable[[Group], Any], ranks: int) -> None:
    """Run on a world of one without a process group, or on real ranks."""
    if ranks == 1:
        body(SELF)
    else:
        run_ranks(lambda rank: body(world()) and None, ranks)


def same(sharded: Any, whole: torch.Tensor, **tolerance: float) -> None:
    assert is_sharded(sharded), type(sharded)
    assert sharded.shape == whole.shape and sharded.dtype == whole.dtype
    full = sharded.full_tensor()
    assert full.shape == whole.shape
    torch.testing.assert_close(full, whole.detach(), rtol=0, atol=0, equal_nan=True, **tolerance)
