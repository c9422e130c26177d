"""Writes through a slice that autograd does not count are read by the next pass, or raise."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import (
    GatherCodec,
    MixedPrecision,
    Offload,
    Prefetch,
    ShardingStrategy,
    bf16_codec,
    count_traffic,
    fp8_codec,
    fully_shard,
    int8_codec,
    named_local_parameters,
    prefetch_units,
)

from harness import simulate_ranks
from models import Tower, by_block, data, mesh_of_replicas, seeded, square, whole

NAME = "blocks.1.up.weight"
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "prefetch": {"prefetch": Prefetch(3, 3)},
    "smaller groups": {"reshard_after_forward": 2},
    "kept": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "replicas": {"strategy": ShardingStrategy.HYBRID_SHARD},
    "optimizer over replicas": {"strategy": ShardingStrategy.HYBRID_SHARD_OPTIMIZER},
    "optimizer offloaded": {"offload_policy": Offload(optimizer=True)},
    "offloaded": {"offload_policy": Offload(params=True)},
}
RAISES = {
    ("smaller groups", "backward"),
    ("kept", "backward"),
    ("optimizer over replicas", "forward"),
    ("optimizer over replicas", "backward"),
}


def world_of(way: str) -> int:
    """How many ranks a way needs: those over two axes do something else on four than on two."""
    return 4 if "replicas" in way or way == "smaller groups" else 2


def trained(way: str) -> tuple[nn.Module, nn.Module, dict[str, nn.Parameter]]:
    """A model that has run two steps, the same in plain, and the slices that were handed out."""
    options = dict(WAYS[way])
    if "replicas" in way:
        options["mesh"] = mesh_of_replicas(2, 2)
    model, plain = by_block(seeded(Tower), **options), seeded(Tower)
    slices = named_local_parameters(model)
    for seed in range(2):
        square(model, data(seed, 0)).backward()
        model.zero_grad()
    return model, plain, slices


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("way", WAYS)
def test_a_write_is_read_or_raises(way: str, when: str) -> None:
    def ranks(rank: int) -> None:
        model, plain, slices = trained(way)
        losses = [square(either, data(5, 0)) for either in (model, plain)]
        if when == "forward":
            for loss in losses:
                loss.backward()
            model.zero_grad()
            plain.zero_grad()
        for name, plain_slice in slices.items():  # each rank has a part, so that each raises
            if name.startswith("blocks"):  # not of the outermost unit, which is kept
                plain_slice.data.mul_(1.5)
                plain.get_parameter(name).data.mul_(1.5)
        raises = (way, when) in RAISES
        wanted = pytest.raises(RuntimeError, match="in a way that autograd does not count")
        with wanted if raises else nullcontext():
            if when == "forward":
                losses = [square(either, data(6, 0)) for either in (model, plain)]
                torch.testing.assert_close(*losses)
            for loss in losses:
                loss.backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            if not raises:
                torch.testing.assert_close(whole(ours.grad), theirs.grad)

    simulate_ranks(ranks, world_of(way))


@pytest.mark.parametrize("index", [0, 1])
def test_units_gathered_ahead_of_a_second_forward(index: int) -> None:
    """Each of them is looked at when the forward comes to it."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower), prefetch=Prefetch(3, 0))
        sum(square(model, data(i, rank)) for i in range(2)).backward()
        slices = named_local_parameters(model)
        square(model, data(2, rank))
        slices[f"blocks.{index}.up.weight"].data.mul_(2)
        with pytest.raises(RuntimeError, match=f"blocks.{index}' was written while the unit"):
            model(data(3, rank))

    simulate_ranks(ranks)


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_that_writes_its_own_slices(way: str) -> None:
    """The parameter itself, which it kept from before: the next forward reads it, as in plain."""

    class Doubles(nn.Linear):
        kept: tuple[nn.Parameter, ...] = ()

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for param in self.kept:
                    param.mul_(2.0)
            return super().forward(x)

    def ranks(rank: int) -> None:
        options = dict(WAYS[way])
        if "replicas" in way:
            options["mesh"] = mesh_of_replicas(2, 2)
        plain = seeded(lambda: Doubles(4, 4))
        model = seeded(lambda: Doubles(4, 4))
        kept, x = tuple(model.parameters()), data(0, 0, 1, 4)
        fully_shard(model, **options)
        for module, params in ((plain, tuple(plain.parameters())), (model, kept)):
            module.kept = params
            module(x)
            module.kept = ()
        torch.testing.assert_close(model(x), plain(x))

    simulate_ranks(ranks, world_of(way))


@pytest.mark.parametrize("early", [True, False])
def test_units_that_the_user_gathered_ahead(early: bool) -> None:
    """Slices handed out before ``prefetch_units`` or after; a write that autograd sees is read."""

    def ranks(rank: int) -> None:
        model, plain = by_block(seeded(Tower)), seeded(Tower)
        slices = named_local_parameters(model) if early else {}
        prefetch_units(model, model.blocks)
        slices = slices or named_local_parameters(model)
        with torch.no_grad():
            slices[NAME].mul_(2)
            plain.get_parameter(NAME).mul_(2)
        torch.testing.assert_close(model(data(0, rank)), plain(data(0, rank)))
        prefetch_units(model, model.blocks)
        slices[NAME].data.mul_(2)
        with pytest.raises(RuntimeError, match=r"blocks\.1' was written while the unit"):
            model(data(1, rank))

    simulate_ranks(ranks)


def test_data_handed_out_before_costs_no_gather() -> None:
    """A unit is gathered for its forward and for its backward, and not again inside them."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        assert model.get_parameter(NAME).data is not None
        for seed in range(3):
            with count_traffic() as traffic:
                square(model, data(seed, rank)).backward()
            model.zero_grad()
        assert traffic.gathers == 2 * 3 + 1  # each block twice, and the outermost unit, which stays

    simulate_ranks(ranks)


def round_at_random() -> GatherCodec:
    """Whole numbers, of which the last bit is drawn."""

    def encode(shard: Tensor) -> Tensor:
        return (shard * 2**20 + torch.rand_like(shard)).floor().view(torch.uint8)

    def decode(encoded: Tensor, into: Tensor) -> None:
        into.copy_(encoded.view(into.dtype) / 2**20)

    return GatherCodec(encode, decode)


@pytest.mark.parametrize("codec", [bf16_codec, fp8_codec, int8_codec, round_at_random])
def test_what_a_codec_changed_is_no_write(codec: Callable[[], GatherCodec]) -> None:
    """A write behind it raises; where a codec rounds at random, nothing can tell one."""

    def ranks(rank: int) -> None:
        policy = MixedPrecision(gather_codec=codec())
        options: dict[str, Any] = {"strategy": ShardingStrategy.SHARD_GRAD_OP}
        model = by_block(seeded(Tower).float(), mp_policy=policy, **options)
        slices = named_local_parameters(model)
        for seed in range(2):
            square(model, data(seed, rank).float()).backward()
        loss = square(model, data(2, rank).float())
        for plain_slice in slices.values():
            plain_slice.data.mul_(1.5)
        wanted = pytest.raises(RuntimeError, match="in a way that autograd does not count")
        with nullcontext() if codec is round_at_random else wanted:
            loss.backward()

    simulate_ranks(ranks)
