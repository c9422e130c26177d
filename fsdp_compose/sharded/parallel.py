"""Where a rank's part lies in a larger tensor that tensor parallelism split, before sharding.

Tensor parallelism splits a parameter, or repeats it, over other ranks than those that the library
shards it over. What one rank would hold without sharding is its *part*, and buckets shard parts. A
DTensor reads as the whole tensor; a parameter that was split by hand reads as its part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_compose.base.group import Group
from fsdp_compose.base.torch_private import dtensor_spec, local_part
from fsdp_compose.comm.uneven import all_gather_uneven

__all__ = ["Axis", "Parallel", "like_dtensor", "part_of", "split_axes"]


@dataclass(frozen=True, eq=False)
class Axis:
    """One dimension of a tensor-parallel mesh."""

    group: Group
    dim: int | None  # which dimension of the tensor it splits; None: each rank has the same
    sizes: tuple[int, ...] = ()  # of that dimension, by rank of the group


@dataclass(frozen=True, eq=False)
class Parallel:
    """Where a part lies in the whole tensor.

    Attributes:
        shape, stride: of the whole.
        axes: outermost first; a dimension may be split by several.
        dtensor: the spec of the DTensor that the parameter is; None when it was split by hand.
        reads_whole: whether a slice reads as the whole although it is no DTensor.
        sizes, offsets: of the part.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    axes: tuple[Axis, ...]
    dtensor: Any = None
    reads_whole: bool = False
    sizes: tuple[int, ...] = field(init=False)
    offsets: tuple[int, ...] = field(init=False)
    key: tuple[object, ...] = field(init=False)

    def __post_init__(self) -> None:
        sizes, offsets = list(self.shape), [0] * len(self.shape)
        for axis in self.axes:
            if axis.dim is not None:
                offsets[axis.dim] += sum(axis.sizes[: axis.group.rank])
                sizes[axis.dim] = axis.sizes[axis.group.rank]
        object.__setattr__(self, "sizes", tuple(sizes))
        object.__setattr__(self, "offsets", tuple(offsets))
        splits = tuple((axis.dim, axis.sizes) for axis in self.axes if axis.dim is not None)
        object.__setattr__(self, "key", (tuple(self.shape), self.offsets, *splits))

    @property
    def splits(self) -> tuple[Axis, ...]:
        """The axes whose ranks hold different elements."""
        return tuple(a for a in self.axes if a.dim is not None and a.group.size > 1)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of more than one rank."""
        return tuple(axis.group for axis in self.axes if axis.group.size > 1)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of those that hold the same part."""
        return all(axis.group.rank == 0 for axis in self.axes if axis.dim is None)

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part of a plain tensor that broadcasts to the whole shape, or of a DTensor.

        Raises:
            ValueError: a DTensor on another mesh.
        """
        if isinstance(whole, DTensor):
            spec = self.dtensor
            if spec is None or whole.device_mesh != spec.mesh:
                wanted = "no DTensor" if spec is None else f"one on {spec.mesh}"
                raise ValueError(f"a DTensor on {whole.device_mesh}; wanted {wanted}")
            return local_part(whole.redistribute(placements=spec.placements))
        part = whole.expand(self.shape)
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        return part

    def assemble(self, part: Tensor) -> Tensor:
        """Gather the whole plain tensor from every rank's part; one collective per split."""
        for axis in reversed(self.axes):
            if axis.dim is None or axis.group.size == 1:
                continue
            before, after = part.shape[: axis.dim], part.shape[axis.dim + 1 :]
            row = math.prod(before) * math.prod(after)
            lengths = [size * row for size in axis.sizes]
            flat = all_gather_uneven(part.reshape(-1), lengths, axis.group)
            pieces = zip(flat.split(lengths), axis.sizes, strict=True)
            part = torch.cat([p.view(*before, n, *after) for p, n in pieces], axis.dim)
        if part.stride() == self.stride:
            return part
        return torch.empty_strided(
            self.shape, self.stride, dtype=part.dtype, device=part.device
        ).copy_(part)

    def wrap(self, part: Tensor) -> Tensor:
        """Return what a module reads: ``part``, or a DTensor around it, differentiable."""
        if self.dtensor is None:
            return part
        if part.requires_grad and torch.is_grad_enabled():
            dtensor = _Wrap.apply(part, self.dtensor)
        else:
            dtensor = _around(part, self.dtensor)
        if isinstance(part, torch.nn.Parameter):
            dtensor._is_param = True
        return dtensor

    def to_plain(self) -> tuple[Any, ...]:
        """Return the place as plain data without process groups, for a pickled slice."""
        axes = tuple((a.group.rank, a.group.ranks, a.dim, a.sizes) for a in self.axes)
        return tuple(self.shape), self.stride, axes, self.dtensor is not None or self.reads_whole

    @classmethod
    def from_plain(cls, plain: tuple[Any, ...]) -> Parallel:
        """The place that ``to_plain`` described, with groups that cannot communicate."""
        shape, stride, axes, reads_whole = plain
        found = tuple(
            Axis(Group(None, rank, len(ranks), "none", tuple(ranks)), dim, tuple(sizes))
            for rank, ranks, dim, sizes in axes
        )
        return cls(torch.Size(shape), tuple(stride), found, None, reads_whole)


def chunk_sizes(numel: int, ranks: int) -> tuple[int, ...]:
    """The sizes into which DTensor splits a dimension of ``numel``: equal except the last ones."""
    chunk = -(-numel // ranks)
    return tuple(min(chunk, max(0, numel - rank * chunk)) for rank in range(ranks))


def split_axes(
    shape: Sequence[int], placed: Sequence[tuple[Group, int | None]]
) -> tuple[Axis, ...]:
    """The axes of a DTensor, from each mesh dimension's group and the dimension that it splits."""
    sizes = list(shape)
    axes: list[Axis] = []
    for group, dim in placed:
        if dim is None:
            axes.append(Axis(group, None))
            continue
        cut = chunk_sizes(sizes[dim], group.size)
        axes.append(Axis(group, dim, cut))
        sizes[dim] = cut[group.rank]
    return tuple(axes)


def _around(part: Tensor, spec: Any) -> Any:
    """A DTensor like ``spec`` around this rank's part."""
    return DTensor.from_local(
        part, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
    )


class _Wrap(torch.autograd.Function):
    """``DTensor.from_local``, whose own backward loses the graph where it moves a gradient.

    The gradient of what is repeated over ranks arrives as a partial sum. Here it is summed
    differentiably, so that a gradient penalty sees through it.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, spec: Any) -> Any:
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        return _around(part.detach(), spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor | None, None]:
        if grad is None:
            return None, None
        if grad.placements != ctx.spec.placements:
            grad = grad.redistribute(placements=ctx.spec.placements)
        return grad.to_local(), None


def like_dtensor(dtensor: DTensor, part: Tensor) -> DTensor:
    """A DTensor on the mesh and with the placements of ``dtensor``, around ``part``."""
    return _around(part, dtensor_spec(dtensor))


def part_of(tensor: Tensor) -> Tensor:
    """What this rank holds of an unsharded DTensor, outside autograd; else the tensor itself."""
    return local_part(tensor) if isinstance(tensor, DTensor) else tensor
