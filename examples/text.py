"""Real text to learn from, as bytes: the documentation that ships inside CPython."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Corpus:
    """Bytes to learn from and bytes held out, as 1-D uint8 tensors."""

    train: Tensor
    held_out: Tensor


def documentation() -> str:
    """The documentation that ships inside CPython, every paragraph once.

    Topics quote each other at length: a paragraph that came twice could be in both splits.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise RuntimeError(
            "this Python has no pydoc_data.topics, the text this example trains on; it belongs to "
            "CPython's standard library (some distributions package it apart)"
        ) from error
    paragraphs = (p.strip("\n") for name in sorted(topics) for p in topics[name].split("\n\n"))
    return "\n\n".join(dict.fromkeys(paragraphs))


def split(text: str, piece: int = 4096, every: int = 10) -> Corpus:
    """Cuts the text's bytes into pieces and holds out the last of every ``every`` pieces."""
    pieces = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).split(piece)
    if len(pieces) < every:
        raise ValueError(
            f"the text is {sum(map(len, pieces))} bytes long; to hold a piece out it must be "
            f"longer than {piece * (every - 1)}"
        )
    train = [p for i, p in enumerate(pieces) if (i + 1) % every]
    return Corpus(torch.cat(train), torch.cat(pieces[every - 1 :: every]))


def unigram_entropy(data: Tensor) -> float:
    """Entropy of the byte frequencies of ``data``, in nats per byte.

    No model that ignores the context can have a lower loss on ``data``.
    """
    counts = torch.bincount(data.long())
    p = counts[counts > 0].double() / data.numel()
    return float(-(p * p.log()).sum())


def windows(data: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """``data`` as consecutive inputs and targets, (windows, block) each; the rest is left out."""
    count = (len(data) - 1) // block
    inputs = data[: count * block].long().view(count, block)
    targets = data[1 : count * block + 1].long().view(count, block)
    return inputs, targets


@dataclass(frozen=True)
class Batches:
    """The training batches: a function of the step alone, so to resume needs no reader state."""

    data: Tensor
    rows: int  # over all ranks
    block: int
    seed: int

    def full(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one step, (rows, block) each."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.data) - self.block, (self.rows, 1), generator=generator)
        tokens = self.data[starts + torch.arange(self.block + 1)].long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def share(self, step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        """The rows of one rank of them."""
        inputs, targets = (t.chunk(ranks)[rank] for t in self.full(step))
        return inputs, targets
