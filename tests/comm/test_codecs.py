"""Codecs: what a block loses, how many bytes travel, and that ranks must use the same one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fsdp_compose import (
    GatherCodec,
    Int8ErrorFeedback,
    MixedPrecision,
    Prefetch,
    ShardingStrategy,
    bf16_codec,
    fp8_codec,
    fully_shard,
    int8_codec,
    int8_error_feedback_hook,
    register_comm_hook,
    reshard,
    unshard,
    wrap,
)
from fsdp_compose.base.codec import encoded_nbytes
from fsdp_compose.comm.transports import PAIRS
from fsdp_compose.core.guards.moved_parameters import shard_of
from fsdp_compose.report import TrafficReport, count_traffic, plan

from harness import rank_errors, run_ranks
from models import Block, Ledger, data, seeded, square, units
from planned_models import WIDTH, Model

# The most that a value loses, in parts of the largest of its block.
LOST = {bf16_codec: 2**-8, fp8_codec: 2**-4, int8_codec: 0.501 / 127}


@given(
    st.sampled_from(list(LOST)),
    st.integers(1, 700),
    st.sampled_from([1, 7, 64, 128]),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=60)
def test_a_value_loses_no_more_than_its_block_allows(
    make: Callable[..., GatherCodec], numel: int, block: int, dtype: torch.dtype, seed: int
) -> None:
    """Both ways for any length, whole blocks or not; zeros stay zeros, and length is foretold."""
    codec = make() if make is bf16_codec else make(block)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)
    values *= 10.0 ** (torch.arange(numel) % 9 - 4)
    values[::5] = 0
    encoded, found = codec.encode(values), torch.full_like(values, torch.nan)
    codec.decode(encoded, found)
    width = 1 if make is bf16_codec else block
    largest = torch.cat([p.abs().amax().expand(len(p)) for p in values.split(width)])
    assert ((found - values).abs() <= LOST[make] * largest).all()
    assert not found[::5].any()
    assert encoded.numel() == encoded_nbytes(codec, numel, dtype)
    if make is not bf16_codec:
        assert encoded.numel() == -(-(numel + 4 * -(-numel // block)) // 16) * 16


BLOCK = 64
CODECS: dict[str, tuple[GatherCodec, int]] = {
    "bf16": (bf16_codec(), 2),
    "fp8": (fp8_codec(BLOCK), 4),
    "int8": (int8_codec(BLOCK), 4),
}
KEPT = {"units": wrap.by_class({Block}), "strategy": ShardingStrategy.SHARD_GRAD_OP}


def shard(codec: GatherCodec | None, **options: Any) -> nn.Module:
    precision = MixedPrecision(gather_codec=codec)
    model = seeded(Model).float()
    before = plan(model, mp_policy=precision, **{**KEPT, **options})
    fully_shard(model, mp_policy=precision, transport=PAIRS, **{**KEPT, **options})
    after = plan(model)
    assert (before.step, before.memory) == (after.step, after.memory)
    return model


def step(model: nn.Module, rank: int) -> TrafficReport:
    square(model, data(0, rank, 1, WIDTH, dtype=torch.float32)).backward()
    with count_traffic() as traffic:
        square(model, data(1, rank, 1, WIDTH, dtype=torch.float32)).backward()
    return traffic


def scale_bytes(numel: int) -> int:
    """Of a shard: 4 a block, and what rounds all that is sent up to 16."""
    return -(-(numel + 4 * -(-numel // BLOCK)) // 16) * 16 - numel


def test_gathers_send_a_half_and_a_quarter() -> None:
    """Values are exactly 1/2 or 1/4 of float32; a block's scale is 4 bytes besides; as planned."""

    def ranks(rank: int) -> None:
        exact = step(shard(None), rank)
        for codec, part in CODECS.values():
            model = shard(codec)
            found = step(model, rank)
            shards = [b.layout.shard_numel for unit in units(model) for b in unit.buckets]
            scales = sum(map(scale_bytes, shards)) if part == 4 else 0
            assert part * (found.gather_bytes - 2 * scales) == exact.gather_bytes
            wanted = plan(model).step
            assert (found.gathers, found.gather_bytes) == (wanted.gathers, wanted.gather_bytes)
            assert (found.reduces, found.reduce_bytes) == (exact.reduces, exact.reduce_bytes)
            unshard(model)
            reshard(model)  # what rounding changed is no write

    run_ranks(ranks, 3)


def test_memory_of_encoded_gathers_is_planned() -> None:
    """The buffer that a gather receives into is counted until it is decoded."""

    def ranks(rank: int) -> None:
        for codec in (int8_codec(BLOCK), None):
            model = shard(codec, strategy=ShardingStrategy.FULL_SHARD, prefetch=Prefetch(2, 2))
            step(model, rank)
            known = [shard_of(b) for unit in units(model) for b in unit.buckets]
            x = data(1, rank, 1, WIDTH, dtype=torch.float32)
            for param in model.parameters():
                param.grad = None
            with Ledger(x, *known) as ledger:
                loss = square(model, x)
                forward, ledger.peak = ledger.peak, ledger.live()
                loss.backward()
            memory, work = plan(model).memory, 0
            if codec is not None:  # what encoding a shard needs besides: its values as float32
                work = 4 * max(b.layout.shard_numel for u in units(model) for b in u.buckets)
                assert memory.forward.encoded
            for peak, planned in ((forward, memory.forward), (ledger.peak, memory.backward)):
                assert planned.total <= 1.02 * peak, (peak, planned)
                assert peak <= 1.02 * planned.total + work + 100 * WIDTH, (peak, planned)

    run_ranks(ranks, 4)


def test_reductions_send_a_quarter() -> None:
    """With error feedback too: values are 1/4 of float32, and 4 bytes a block besides."""

    def ranks(rank: int) -> None:
        model = shard(None)
        exact = step(model, rank)
        register_comm_hook(model, Int8ErrorFeedback(BLOCK), int8_error_feedback_hook)
        found = step(model, rank)
        shards = [b.layout.shard_numel for unit in units(model) for b in unit.buckets]
        scales = 2 * sum(map(scale_bytes, shards))
        assert 4 * (found.reduce_bytes - scales) == exact.reduce_bytes

    run_ranks(ranks, 3)


def test_ranks_use_the_same_codec() -> None:
    """Blocks of another size would be decoded as nonsense."""

    def ranks(rank: int) -> None:
        shard(int8_codec(BLOCK + rank))

    for error in rank_errors(ranks, 2):
        assert error is not None and "int8_codec(65)" in error, error


@pytest.mark.parametrize("block", [0, -1, 2.5, True])
def test_a_block_has_elements(block: Any) -> None:
    for make in (int8_codec, fp8_codec):
        with pytest.raises(ValueError, match=f"block is {block!r}; wanted"):
            make(block)


def test_a_codec_that_reads_values_is_planned() -> None:
    """Its encoded size is found with zeros instead of on the meta device."""
    codec = GatherCodec(lambda shard: torch.ones(int(shard.sum()) + 5, dtype=torch.uint8), print)
    assert encoded_nbytes(codec, 10, torch.float32) == 5
