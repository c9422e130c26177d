"""The models whose host cost is measured, and how each side shards them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import fsdp_compose
from fsdp_compose.base.torch_private import (
    GATHER_OPTIONS,
    REDUCE_OPTIONS,
    all_gather_single,
    reduce_scatter_single,
)

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """The model that is measured: ``units`` residual blocks of ``linears`` biased linear layers.

    Attributes:
        adapters: the layers are frozen, and each has a trained adapter of two matrices.
        checkpointed: the forward of each block is computed again in backward.
    """

    units: int
    linears: int
    width: int
    batch: int
    param_dtype: torch.dtype
    adapters: bool = False
    checkpointed: bool = False

    @property
    def low_precision(self) -> bool:
        return self.param_dtype != torch.float32


class Adapted(nn.Module):
    """A frozen linear layer with a trained update of rank 2 beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    """One unit: ``linears`` square layers with bias, so 2·``linears`` parameters."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        make = Adapted if shape.adapters else lambda width: nn.Linear(width, width)
        self.layers = nn.Sequential(*(make(shape.width) for _ in range(shape.linears)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Stack(nn.Sequential):
    """Blocks one after the other, each in a checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def blocks(shape: Shape) -> nn.Sequential:
    torch.manual_seed(0)
    stack = Stack if shape.checkpointed else nn.Sequential
    return stack(*(Block(shape) for _ in range(shape.units)))


def plain(shape: Shape) -> nn.Module:
    return blocks(shape).to(shape.param_dtype)


def fsdp1(shape: Shape, *, use_orig_params: bool) -> nn.Module:
    precision = None
    if shape.low_precision:
        precision = torch_fsdp.MixedPrecision(
            param_dtype=shape.param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=True
        )
    wrap = partial(
        torch_fsdp.FullyShardedDataParallel,
        use_orig_params=use_orig_params,
        device_id=CPU,
        mixed_precision=precision,
    )
    model = blocks(shape)
    return wrap(type(model)(*(wrap(block) for block in model)))


def fsdp2(shape: Shape, mesh: DeviceMesh) -> nn.Module:
    precision = torch_fsdp.MixedPrecisionPolicy()
    if shape.low_precision:
        precision = torch_fsdp.MixedPrecisionPolicy(
            param_dtype=shape.param_dtype, reduce_dtype=torch.float32
        )
    model = blocks(shape)
    for module in (*model, model):
        torch_fsdp.fully_shard(module, mesh=mesh, mp_policy=precision)
    return model


def ours(shape: Shape, mesh: DeviceMesh) -> nn.Module:
    precision = fsdp_compose.MixedPrecision()
    if shape.low_precision:
        precision = fsdp_compose.MixedPrecision(
            param_dtype=shape.param_dtype, reduce_dtype=torch.float32
        )
    model = blocks(shape)
    for module in (*model, model):
        fsdp_compose.fully_shard(module, mesh=mesh, mp_policy=precision)
    return model


def builders(mesh: DeviceMesh) -> dict[str, Callable[[Shape], nn.Module]]:
    return {
        "plain": plain,
        "FSDP2": partial(fsdp2, mesh=mesh),
        "FSDP1 original parameters": partial(fsdp1, use_orig_params=True),
        "FSDP1 flat": partial(fsdp1, use_orig_params=False),
        "ours": partial(ours, mesh=mesh),
    }


class Copies:
    """What every side must copy in a step of each unit, and nothing else: no module runs.

    Two gathers, each gradient into the buffer that is reduced, and a reduce-scatter, called as
    cheaply as torch lets anyone. The fake process group copies on this processor what a network
    would move, so a side of large units is charged for this too, which is no cost of its host.
    """

    def __init__(self, shape: Shape, mesh: DeviceMesh) -> None:
        self.group, size, self.units = mesh.get_group(), mesh.size(), []
        for _ in range(shape.units):
            grads = [torch.randn_like(param) for param in Block(shape).parameters()]
            sizes = [grad.numel() for grad in grads]
            full = torch.zeros(-(-sum(sizes) // size) * size)
            pieces = full[: sum(sizes)].split(sizes)
            views = [piece.view_as(grad) for piece, grad in zip(pieces, grads, strict=True)]
            self.units.append((full, torch.zeros(len(full) // size), views, grads))

    def step(self) -> tuple[float, float]:
        """One forward and one backward of all units; returns the µs of each."""
        start = time.process_time()
        for full, shard, _, _ in self.units:
            all_gather_single(self.group, full, shard, GATHER_OPTIONS)
        middle = time.process_time()
        with torch.no_grad():
            for full, shard, views, grads in self.units:
                all_gather_single(self.group, full, shard, GATHER_OPTIONS)
                torch._foreach_copy_(views, grads)
                reduce_scatter_single(self.group, shard, full, REDUCE_OPTIONS)
        end = time.process_time()
        return (middle - start) * 1e6, (end - middle) * 1e6


SIDES = ["plain", "FSDP2", "FSDP1 original parameters", "FSDP1 flat", "ours"]


def input_for(shape: Shape, side: str) -> Tensor:
    """fp32 for the sharded sides, which cast it themselves; the plain model takes its own."""
    torch.manual_seed(1)
    dtype = shape.param_dtype if side == "plain" else torch.float32
    return torch.randn(shape.batch, shape.width, dtype=dtype, requires_grad=shape.adapters)
