"""Reductions of a few numbers, which raise on every rank where ranks reduce different things.

An all-reduce of gloo adds up whatever has the same size: the sum of one tensor on one rank and the
norm of another on the next would make a number that nobody asked for. So two numbers that follow
from what is reduced travel at the end of the same message: equal on all ranks, they come back as
known multiples of themselves. On an accelerator nothing is compared, as the host would wait for it.
"""

from __future__ import annotations

import math
import zlib
from typing import Literal

import torch
import torch.distributed as dist

from fsdp_compose.base.group import Group
from fsdp_compose.comm.collectives import all_reduce
from fsdp_compose.comm.heads import meet_alone
from fsdp_compose.comm.messages import gather_objects, is_point_to_point

_MULTIPLE = 8  # of numbers in a message, so that a sum and a maximum, of more numbers, meet


def compares(tensor: torch.Tensor, group: Group) -> bool:
    """Whether ranks that reduce ``tensor`` over ``group`` compare what they reduce."""
    return is_point_to_point(group) and tensor.device.type == "cpu"


def reduce_alike(
    tensor: torch.Tensor, group: Group, op: Literal["sum", "max"], what: str, advice: str = ""
) -> torch.Tensor:
    """``tensor`` combined over the group, another tensor of its dtype and shape.

    Args:
        what: what is reduced, the same on every rank: "take the norm of 'head.weight'".
        advice: what to do where it differs.

    Raises:
        RuntimeError: on every rank, if some reduce something else; who and what.
    """
    if not compares(tensor, group):
        return all_reduce(tensor.clone(), group, op, purpose=_shorten(what))
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    shown = _shorten(what)  # of a model's gradients it has every name
    meet_alone(group, shown, "reduce a few numbers")
    kind = torch.float64 if flat.is_floating_point() else torch.int64
    number = _number(what, group.size)
    check = (number, number**2) if op == "sum" else (number, -number)
    padding = [0] * (-(flat.numel() + 2) % _MULTIPLE)
    both = torch.cat(
        [flat.to(kind), torch.tensor([*padding, *check], dtype=kind, device=flat.device)]
    )
    all_reduce(both, group, op, purpose=shown)
    first, second = both[-2:].tolist()
    alike = first**2 == second * group.size if op == "sum" else first == -second
    if not alike:
        _raise(group, what, advice or _ADVICE)
    result = both[: flat.numel()].to(flat.dtype)
    if tensor.is_complex():
        result = torch.view_as_complex(result.view(-1, 2))
    return result.view(tensor.shape)


def reduce_extreme(numbers: torch.Tensor, group: Group, op: str, what: str) -> torch.Tensor:
    """The largest or smallest of floating-point ``numbers`` over the group; NaN where one is.

    A collective's own maximum may lose a NaN, so whether there is one travels beside it.
    """
    sign = -1.0 if op == "min" else 1.0
    known = torch.nan_to_num(sign * numbers, nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    both = known.repeat(2)  # not torch.cat, which autocast refuses of dtypes other than its own
    both[len(known) :] = numbers.isnan()
    extreme, has_nan = reduce_alike(both, group, "max", what).chunk(2)
    return torch.where(has_nan > 0, math.nan, sign * extreme)


def _number(what: str, ranks: int) -> int:
    """A number for ``what`` whose sum of squares over the ranks is exact in fp64; never 0."""
    bits = 26 - (ranks - 1).bit_length()
    return 1 + zlib.crc32(what.encode()) % ((1 << max(bits, 4)) - 1)


_ADVICE = (
    "Call what is computed over all ranks (p.sum(), p.norm(), grad_norm, clip_grad_norm_) on every "
    "rank, for the same tensors, with the same arguments and in the same order, also where only "
    "rank 0 uses the result."
)


def _raise(group: Group, what: str, advice: str) -> None:
    found = gather_objects(what, group, "a sum or a norm")
    rank = dist.get_rank()
    other = next((r for r, text in zip(group.ranks, found, strict=True) if text != what), rank)
    theirs = found[group.ranks.index(other)]
    raise RuntimeError(
        f"rank {rank} was to {_shorten(what)}, and rank {other} at the same time to "
        f"{_shorten(theirs)}: the result would mix the two. {advice}"
    )


def _shorten(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
