"""What travels when weights are gathered, in place of their own bytes: a seam for quantisation.

Pass a ``GatherCodec`` as ``MixedPrecision(gather_codec=)``. The library's own are in
comm/codecs.py; examples/change_one_thing/int8_gather.py shows how one is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_compose.base.arguments import check_function


@dataclass(frozen=True, repr=False)
class GatherCodec:
    """How a rank's shard travels in a gather, as two plain functions.

    Every rank decodes what each rank encoded, its own shard too, so all compute with the same
    weights; shards, gradients and checkpoints stay exact. A world of one encodes nothing.

    Attributes:
        encode: ``(shard)``: this rank's part of a bucket, floating point, one dimension, to one
            uint8 tensor of one dimension whose length depends on ``shard.numel()`` alone.
        decode: ``(encoded, into)``: fill ``into``, one rank's part of the gathered bucket in the
            compute dtype, from what that rank encoded.
    """

    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor, torch.Tensor], None]

    def __repr__(self) -> str:
        """Show the names of its functions, which ranks compare."""
        return f"GatherCodec({name_function(self.encode)}, {name_function(self.decode)})"

    def __post_init__(self) -> None:
        check_function("GatherCodec", "encode", self.encode, "(shard)")
        check_function("GatherCodec", "decode", self.decode, "(encoded, into)")


def name_function(function: object) -> str:
    """The name of a function as it is written, the same on every rank."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def encoded_nbytes(codec: GatherCodec, numel: int, dtype: torch.dtype) -> int:
    """How many bytes ``codec`` makes of a shard of so many elements."""
    try:
        return encode_shard(codec, torch.empty(numel, dtype=dtype, device="meta")).numel()
    except (NotImplementedError, RuntimeError, TypeError):  # it reads values
        return encode_shard(codec, torch.zeros(numel, dtype=dtype, device="cpu")).numel()


def encode_shard(codec: GatherCodec, shard: torch.Tensor) -> torch.Tensor:
    """What ``codec`` makes of ``shard``.

    Raises:
        TypeError: it is no one-dimensional tensor of uint8.
    """
    encoded: Any = codec.encode(shard)
    if not isinstance(encoded, torch.Tensor) or (encoded.dtype, encoded.dim()) != (torch.uint8, 1):
        found = (
            f"a {encoded.dim()}-dimensional tensor of {encoded.dtype}"
            if isinstance(encoded, torch.Tensor)
            else type(encoded).__name__
        )
        raise TypeError(
            f"gather_codec: encode returned {found} for a shard of {shard.numel()} elements; "
            "wanted one uint8 tensor of one dimension: values.view(torch.uint8)."
        )
    return encoded
