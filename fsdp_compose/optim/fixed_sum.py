"""Sums whose bits do not depend on how the numbers are cut over ranks, or in which order they come.

Each number in [0, 1) is rounded to a multiple of ``2**-30``, and what is left to one of ``2**-60``.
Such multiples are added up exactly: in float64 as long as there are few of them, then as integers.
The sum of a thousand million numbers is off by less than ``2**-30`` of the largest.

Source: Demmel and Nguyen, "Fast Reproducible Floating-Point Summation", 2013.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.functional import pad

_BITS = 30
_MASK = (1 << _BITS) - 1
_PIECE = {"cpu": 1 << 15}  # elements that are worked on at a time: they stay in the cache
_LARGEST_PIECE = 1 << 22  # so many multiples of 2**-30 below 1 are added up exactly in float64
_VECTOR = 32  # a multiple of how many numbers a processor takes at a time
_ROUND = [1.5 * 2.0 ** (52 - _BITS * (limb + 1)) for limb in range(2)]
"""Adding and subtracting these rounds to a multiple of 2**-30, of 2**-60."""


def exponent_of(largest: torch.Tensor) -> torch.Tensor:
    """The least ``e`` for which ``largest`` is below ``2**e``, 0-dim int32; of 0 it is 0.

    Args:
        largest: 0-dim, at least 0; of what is not finite the result means nothing.
    """
    return torch.frexp(largest.double()).exponent.clamp(-1000, 1000)


NUMBERS = 4
"""How many integers stand for one sum."""


def add_powers(
    tensors: Iterable[torch.Tensor], order: float, exponent: torch.Tensor
) -> torch.Tensor:
    """The sum over all elements of ``(|x| * 2**-exponent) ** order``, as four int64 numbers.

    Args:
        tensors: of any dtype and shape, with elements below ``2**exponent``; fewer than ``2**40``
            elements on all ranks together.
        order: more than 0.
        exponent: as ``exponent_of`` gives it, on the tensors' device.
    """
    scale = _power_of_two(-exponent)
    sums: list[torch.Tensor] = [scale.new_zeros(2)]
    for tensor in tensors:
        size = _PIECE.get(tensor.device.type, _LARGEST_PIECE)
        for piece in tensor.reshape(-1).split(size):
            if order == 2 and not piece.is_complex():
                powers = piece.double() * scale  # a new tensor: double() gives a float64 one itself
                powers *= powers
            else:
                powers = piece.abs().double().mul_(scale)
                if order != 1:  # whole vectors: a processor takes what is left with other rounding
                    powers = pad(powers, (0, -powers.numel() % _VECTOR)).pow_(order)
            sums.append(_add_rounded(powers))
    first, second = torch.stack(sums).unbind(1)
    parts = [_split(first), _split(second * 2.0**_BITS)]
    return torch.cat(parts)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """``2**exponent`` in float64, made of its bits: exact on every device."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def _add_rounded(numbers: torch.Tensor) -> torch.Tensor:
    """Exact sums of the numbers rounded to ``2**-30``, and of the rest rounded to ``2**-60``."""
    rounded = (numbers + _ROUND[0]).sub_(_ROUND[0])
    first = rounded.sum()
    numbers -= rounded
    second = numbers.add_(_ROUND[1]).sub_(_ROUND[1]).sum()
    return torch.stack([first, second])


def _split(sums: torch.Tensor) -> torch.Tensor:
    """The sum of multiples of ``2**-30``: whole numbers, and the rest in units of ``2**-30``."""
    whole = sums.floor()
    rest = (sums - whole) * 2.0**_BITS
    return torch.stack([whole.to(torch.int64).sum(), rest.to(torch.int64).sum()])


def carry(counts: torch.Tensor) -> torch.Tensor:
    """The sum itself: whole numbers, units of ``2**-30``, of ``2**-60``, carried as in addition.

    Numbers that were cut otherwise have other counts, and the same sum.
    """
    whole, high, rest, low = counts.unbind()
    high = high + rest + (low >> _BITS)
    return torch.stack([whole + (high >> _BITS), high & _MASK, low & _MASK])


def root_of(counts: torch.Tensor, order: float, exponent: torch.Tensor) -> torch.Tensor:
    """The norm, 0-dim float64, of what ``add_powers`` added up, over all ranks."""
    whole, high, low = carry(counts).double().unbind()
    total = whole + (high * 2.0**-_BITS + low * 2.0 ** (-2 * _BITS))
    return (total.sqrt() if order == 2 else total.pow(1.0 / order)) * _power_of_two(exponent)
