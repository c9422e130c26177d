"""Bits that ranks combine with an or, as integers and as bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Flags:
    """``count`` bits of the ``possible`` ones, combined over ranks with a bitwise or."""

    bits: int
    count: int
    possible: int = -1

    @property
    def is_full(self) -> bool:
        return self.bits == (1 << self.count) - 1

    @property
    def nbytes(self) -> int:
        return (self.count + 7) // 8

    def to_bytes(self) -> torch.Tensor:
        data = bytearray(self.bits.to_bytes(self.nbytes, "little"))
        return torch.frombuffer(data, dtype=torch.uint8)

    def add(self, other: torch.Tensor) -> None:
        self.bits |= int.from_bytes(bytes(other.tolist()), "little")

    def to_tensor(self) -> torch.Tensor:
        """The flags as one byte each, for a maximum over ranks."""
        bits = [self.bits >> i & 1 for i in range(self.count)]
        return torch.tensor(bits, dtype=torch.uint8, device="cpu")

    def take(self, combined: torch.Tensor) -> None:
        self.bits = sum(1 << i for i, bit in enumerate(combined.tolist()) if bit)
