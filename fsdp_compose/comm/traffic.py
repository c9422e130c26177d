"""What this process has communicated, counted: for tests and reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Traffic:
    """What this process has communicated, for tests and reports.

    Counts are collectives; bytes are what this rank receives: ``(W - 1) / W`` of a buffer for a
    gather or a reduce-scatter, twice that for an all-reduce. Moves are pieces of any size between
    pairs of ranks, outside the passes.
    """

    gathers: int = 0
    gather_bytes: int = 0
    reduces: int = 0
    reduce_bytes: int = 0
    all_reduces: int = 0
    all_reduce_bytes: int = 0
    moves: int = 0
    move_bytes: int = 0
    control: int = 0

    @property
    def collectives(self) -> int:
        """Without ``control``, which counts messages outside the passes: checks, errors."""
        return self.gathers + self.reduces + self.all_reduces + self.moves

    @property
    def total_bytes(self) -> int:
        return self.gather_bytes + self.reduce_bytes + self.all_reduce_bytes + self.move_bytes

    def reset(self) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, 0)


traffic = Traffic()
