"""One binary tree over the microbatches of a step, whichever rank computes each of them.

With ``fully_shard(deterministic=8)`` a step has 8 microbatches. In backward number ``j`` of
a step, rank ``r`` of ``W`` computes microbatch ``j * W + r``. So one reduction adds up ``W``
microbatches that follow each other, and each rank adds up such sums over its backwards:

    number 0   1   2   3   4   5   6   7
            \\_/     \\_/     \\_/     \\_/         2 ranks reduce these
              \\_____/         \\_____/           4 ranks these too
                  \\_______________/             8 ranks all

Every number is added to the same other number at every number of ranks, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


def check_microbatches(count: int, ranks: int) -> None:
    """Raise unless the ranks' reductions are nodes of the tree over ``count`` microbatches.

    Raises:
        ValueError: ``ranks`` is no power of two, or does not divide ``count``.
    """
    if ranks & (ranks - 1) or count % ranks:
        allowed = [n for k in range(count.bit_length()) if count % (n := 1 << k) == 0]
        raise ValueError(
            f"fully_shard: deterministic={count} microbatches a step cannot be added up in one "
            f"tree by {ranks} ranks; wanted a number of ranks that is a power of two and divides "
            f"{count}: {', '.join(map(str, allowed))}. Run on so many, or choose a number of "
            "microbatches that is a multiple of every number of ranks you want."
        )


def add_in_tree(parts: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """Set ``total`` to the sum of ``parts``: neighbours first, then sums of neighbours.

    Args:
        parts: a power of two of them, 2 or more, all of one dtype.
        total: of the dtype in which is added; it may be the memory of the first or second part.
    """
    if len(parts) == 2 and parts[0].dtype == total.dtype:
        torch.add(parts[0], parts[1], out=total)
    elif len(parts) == 2:
        total.copy_(parts[0]).add_(parts[1])
    else:
        half = len(parts) // 2
        add_in_tree(parts[:half], total)
        upper = torch.empty_like(total)
        add_in_tree(parts[half:], upper)
        total += upper


@dataclass(eq=False, slots=True)
class MicrobatchSums:
    """Sums of the microbatches of a step that have arrived, by the backwards of this rank.

    Attributes:
        nodes: one for each bit of ``arrived`` that is set, of so many backwards; earlier ones
            first.
        arrived: backwards of the step so far.
        steps: steps whose sums were completed since an optimizer took one.
    """

    nodes: list[torch.Tensor] = field(default_factory=list)
    arrived: int = 0
    steps: int = 0

    def add(self, reduced: torch.Tensor, backwards: int) -> torch.Tensor | None:
        """Add what a backward reduced; the sum over the step after the last of ``backwards``."""
        count = self.arrived
        while count & 1:
            reduced, count = self.nodes.pop().add_(reduced), count >> 1
        self.nodes.append(reduced)
        self.arrived += 1
        if self.arrived < backwards:
            return None
        total = self.nodes.pop()
        while self.nodes:
            total = self.nodes.pop().add_(total)
        self.arrived = 0
        self.steps += 1
        return total

    def clear(self) -> None:
        """Forget the step so far."""
        self.nodes.clear()
        self.arrived = 0

    def copy(self) -> MicrobatchSums:
        """An independent one."""
        return MicrobatchSums([node.clone() for node in self.nodes], self.arrived, self.steps)
