"""Sums whose bits do not depend on how the numbers are cut over ranks, or in which order they come.

Each number in [0, 1) becomes three integers of 22 bits each, which are added up exactly, over
tensors and over ranks. What is below ``2**-66`` is left out of each number, so the sum of a million
million numbers is off by less than ``2**-26`` of the largest. This is the idea of a long
accumulator (Kulisch, "Computer Arithmetic and Validity", 2008) that is as long as a norm needs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

BITS, LIMBS = 22, 3
_PIECE = {"cpu": 1 << 16}  # elements that are worked on at a time: they stay in the cache
_LARGE_PIECE = 1 << 22


def exponent_of(largest: torch.Tensor) -> torch.Tensor:
    """The least ``e`` for which ``largest`` is below ``2**e``, 0-dim int32; of 0 it is 0.

    Args:
        largest: 0-dim, at least 0; of what is not finite the result means nothing.
    """
    return torch.frexp(largest.double()).exponent.clamp(-1000, 1000)


def add_powers(
    tensors: Iterable[torch.Tensor], order: float, exponent: torch.Tensor
) -> torch.Tensor:
    """The sum over all elements of ``(|x| * 2**-exponent) ** order``, as ``LIMBS`` int64 numbers.

    Args:
        tensors: of any dtype and shape, with elements below ``2**exponent``; fewer than ``2**40``
            elements on all ranks together.
        order: more than 0.
        exponent: as ``exponent_of`` gives it, on the tensors' device.
    """
    total = torch.zeros(LIMBS, dtype=torch.int64, device=exponent.device)
    scale = torch.ldexp(torch.ones((), dtype=torch.float64, device=exponent.device), -exponent)
    for tensor in tensors:
        size = _PIECE.get(tensor.device.type, _LARGE_PIECE)
        for piece in tensor.reshape(-1).split(size):
            powers = piece.abs().double() * scale
            if order == 2:
                powers *= powers
            elif order != 1:
                powers.pow_(order)
            for limb in range(LIMBS):
                powers *= 1 << BITS
                whole = powers.floor()
                powers -= whole
                total[limb] += whole.to(torch.int64).sum()
    return total


def root_of(limbs: torch.Tensor, order: float, exponent: torch.Tensor) -> torch.Tensor:
    """The norm, 0-dim float64, of what ``add_powers`` added up, over all ranks."""
    places = [2.0 ** (-BITS * (limb + 1)) for limb in range(LIMBS)]
    terms = [limbs[limb].double() * place for limb, place in enumerate(places)]
    total = terms[0] + (terms[1] + terms[2])
    return torch.ldexp(total.sqrt() if order == 2 else total.pow(1.0 / order), exponent)
