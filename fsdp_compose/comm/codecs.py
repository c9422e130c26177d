"""Codecs for gathers and reductions: bf16, and fp8 or int8 values in blocks with a scale each.

A block's scale is a float32 such that its largest value is the largest that the dtype holds. What
is encoded is the scales, then the values, then zeros up to a multiple of 16 bytes, as NCCL wants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fsdp_compose.base.codec import GatherCodec, encode_shard
from fsdp_compose.base.group import Group
from fsdp_compose.base.parts import cut_by_rank
from fsdp_compose.layout.shards import ALIGN_BYTES

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def bf16_codec() -> GatherCodec:
    """Weights travel as bfloat16: half of the bytes of float32.

    Example:
        >>> precision = MixedPrecision(gather_codec=bf16_codec())
        >>> model = fully_shard(nn.Linear(2, 2), mp_policy=precision)
    """
    return GatherCodec(encode_bf16, decode_bf16)


def fp8_codec(block: int = 128) -> GatherCodec:
    """Weights travel as float8_e4m3fn with a float32 scale per block.

    A quarter of the bytes of float32, and 4 bytes for each block besides.

    Args:
        block: elements that share a scale.

    Raises:
        ValueError: ``block`` is not a positive integer.

    Example:
        >>> precision = MixedPrecision(gather_codec=fp8_codec(block=64))
        >>> model = fully_shard(nn.Linear(2, 2), mp_policy=precision)
    """
    return _block_codec("fp8_codec", torch.float8_e4m3fn, block)


def int8_codec(block: int = 128) -> GatherCodec:
    """Weights travel as int8 with a float32 scale per block (Wang et al., "ZeRO++", 2023).

    A quarter of the bytes of float32, and 4 bytes for each block besides.

    Args:
        block: elements that share a scale.

    Raises:
        ValueError: ``block`` is not a positive integer.

    Example:
        >>> int8_codec(64)
        GatherCodec(int8_codec(64).encode, int8_codec(64).decode)
    """
    return _block_codec("int8_codec", torch.int8, block)


def encode_bf16(shard: torch.Tensor) -> torch.Tensor:
    """The shard's values as the bytes of bfloat16."""
    return shard.to(torch.bfloat16).view(torch.uint8)


def decode_bf16(encoded: torch.Tensor, into: torch.Tensor) -> None:
    """Fill ``into`` from the bytes of bfloat16 values."""
    into.copy_(encoded.view(torch.bfloat16))


def _block_codec(name: str, dtype: torch.dtype, block: int) -> GatherCodec:
    found: object = block
    if type(found) is not int or found < 1:
        raise ValueError(f"{name}: block is {block!r}; wanted a number of elements, 1 or more.")

    def encode(shard: torch.Tensor) -> torch.Tensor:
        return encode_blocks(shard, dtype, block)

    def decode(encoded: torch.Tensor, into: torch.Tensor) -> None:
        decode_blocks(encoded, into, dtype, block)

    encode.__qualname__ = f"{name}({block}).encode"  # which ranks compare
    decode.__qualname__ = f"{name}({block}).decode"
    return GatherCodec(encode, decode)


def encode_blocks(values: torch.Tensor, dtype: torch.dtype, block: int) -> torch.Tensor:
    """Encode values as uint8: the scales of their blocks, then the values in ``dtype``.

    Args:
        values: floating point, one dimension.
        dtype: int8, rounded to nearest, or float8_e4m3fn.
    """
    used = 4 * -(-values.numel() // block) + values.numel()
    encoded = values.new_empty(-(-used // ALIGN_BYTES) * ALIGN_BYTES, dtype=torch.uint8)
    encoded[used:].zero_()
    scales, quantized = _views(encoded, values.numel(), dtype, block)
    for found, into in zip(_rows(values.float(), block), _rows(quantized, block), strict=True):
        scale, scales = scales.split([len(found), len(scales) - len(found)])
        largest = torch.linalg.vector_norm(found, torch.inf, dim=1).clamp_(min=1e-30)
        torch.div(largest, _LARGEST[dtype], out=scale)
        exact = found / scale[:, None]
        into.copy_(exact.round_() if dtype == torch.int8 else exact)
    return encoded


def decode_blocks(
    encoded: torch.Tensor, into: torch.Tensor, dtype: torch.dtype, block: int
) -> None:
    """Fill ``into``, floating point, from what ``encode_blocks`` made of as many values."""
    scales, quantized = _views(encoded, into.numel(), dtype, block)
    for found, rows in zip(_rows(quantized, block), _rows(into, block), strict=True):
        scale, scales = scales.split([len(found), len(scales) - len(found)])
        rows.copy_(found).mul_(scale[:, None])


def _views(
    encoded: torch.Tensor, numel: int, dtype: torch.dtype, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales and the values in ``encoded``."""
    start = 4 * -(-numel // block)
    return encoded[:start].view(torch.float32), encoded[start : start + numel].view(dtype)


def _rows(flat: torch.Tensor, block: int) -> list[torch.Tensor]:
    """``flat`` as a matrix of whole blocks, and one of what is left; neither is empty."""
    whole = flat.numel() // block * block
    pieces = flat[:whole], flat[whole:]
    return [p.view(-1, min(block, p.numel())) for p in pieces if p.numel()]


class Encoded(NamedTuple):
    """What a codec made of a shard: ``parts`` of ``whole`` by rank, of which this one's is filled.

    ``decode`` is called when all parts are filled.
    """

    whole: torch.Tensor
    parts: Sequence[torch.Tensor]
    decode: Callable[[], None]


def encode_parts(
    shard: torch.Tensor, full: Sequence[torch.Tensor], codec: GatherCodec, group: Group
) -> Encoded:
    """Encode this rank's ``shard`` for a gather, whose parts are decoded into ``full`` by rank.

    What this rank encoded is decoded here too: all ranks compute with the same weights.
    """
    with torch.no_grad():
        own = encode_shard(codec, shard)
    whole = own.new_empty(own.numel() * group.size)
    parts = cut_by_rank(whole, group.size)
    parts[group.rank].copy_(own)

    def decode() -> None:
        with torch.no_grad():
            for part, into in zip(parts, full, strict=True):
                codec.decode(part, into)

    return Encoded(whole, parts, decode)
