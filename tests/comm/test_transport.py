"""Other transports and codecs train as the library's own do, or raise on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import GatherCodec, MixedPrecision, Offload, ShardingStrategy, fully_shard
from fsdp_compose.base.process import here
from fsdp_compose.comm.transports import AT_ONCE, PAIRS

from harness import rank_errors, run_ranks
from models import Tower, by_block, data, seeded


def to_bytes(shard: Tensor) -> Tensor:
    """The shard as it is; gathers then bring what they bring without a codec."""
    return shard.contiguous().view(torch.uint8).clone()


def from_bytes(encoded: Tensor, into: Tensor) -> None:
    into.copy_(encoded.clone().view(into.dtype))


EXACT = GatherCodec(to_bytes, from_bytes)
COLLECTIVES = replace(AT_ONCE, reduce_scatter=PAIRS.reduce_scatter, may_wait=True)
"""Gloo's own gather, which copies the shard, and the exact sum."""

WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "default": ({}, False),
    "kept": ({"strategy": ShardingStrategy.SHARD_GRAD_OP}, False),
    "spread": ({"reshard_after_forward": 2}, False),
    "hybrid": ({"strategy": ShardingStrategy.HYBRID_SHARD}, True),
    "offloaded": ({"offload_policy": Offload(params=True)}, False),
}


def train(options: dict[str, Any], is_hybrid: bool) -> tuple[list[Tensor], tuple[int, int]]:
    if is_hybrid:
        options = options | {"mesh": init_device_mesh("cpu", (2, 2))}
    model = by_block(seeded(Tower), **options)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    for seed in range(3):
        here.traffic.reset()
        model(data(0, seed)).square().mean().backward()
        optim.step()
        optim.zero_grad()
    moved = here.traffic.gather_bytes, here.traffic.reduce_bytes
    return [p.full_tensor() for p in model.parameters()], moved


@pytest.mark.parametrize("way", WAYS)
def test_an_exact_codec_and_a_transport_change_nothing(way: str) -> None:
    """Bit for bit the same weights, and as many bytes, with and without them."""

    def ranks(rank: int) -> None:
        options, is_hybrid = WAYS[way]
        weights, moved = train(options, is_hybrid)
        for more in ({"mp_policy": MixedPrecision(gather_codec=EXACT)}, {"transport": COLLECTIVES}):
            found, bytes_moved = train(options | more, is_hybrid)
            assert all(map(torch.equal, found, weights)), more
            assert bytes_moved == moved, more

    run_ranks(ranks, 4)


def test_ranks_that_chose_others_raise() -> None:
    """A codec or a transport on one rank alone is an error on every rank, before anything."""

    def codec(rank: int) -> None:
        fully_shard(nn.Linear(8, 8), mp_policy=MixedPrecision(gather_codec=EXACT if rank else None))

    def transport(rank: int) -> None:
        fully_shard(nn.Linear(8, 8), transport=COLLECTIVES if rank else None)

    for error in rank_errors(codec, 2):
        assert error is not None and "gather_codec" in error, error
    for error in rank_errors(transport, 2):
        assert error is not None and "transport" in error, error


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"transport": "ring"}, "wanted a Transport"),
        ({"layout": 3}, "layout is 3"),
        ({"layout": lambda extents, itemsize, ranks: 3}, "returned int"),
    ],
)
def test_what_is_no_seam_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        fully_shard(nn.Linear(2, 2), **options)


def test_what_encode_must_return() -> None:
    """A codec whose answer is no row of bytes is an error that says what it returned."""
    wrong = MixedPrecision(gather_codec=GatherCodec(lambda shard: shard, from_bytes))

    def ranks(rank: int) -> None:
        model = fully_shard(nn.Linear(8, 8), mp_policy=wrong)
        model(torch.ones(1, 8))

    for error in rank_errors(ranks, 2):
        assert error is not None and "encode returned" in error and "uint8" in error, error
