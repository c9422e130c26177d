"""Low-rank adapters and frozen bases in few bits train as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_compose import (
    MixedPrecision,
    count_traffic,
    gathered,
    set_reshard_after_backward,
    set_reshard_after_forward,
    state_dict,
    undo,
)
from fsdp_compose.core.guards.moved_parameters import shard_of

from harness import run_ranks
from models import (
    WIDTH,
    MakeOptimizer,
    Tolerance,
    Tower,
    Twin,
    adamw,
    by_block,
    compare,
    data,
    one_unit,
    seeded,
    sgd,
    square,
    train_twin,
    trainable,
    units,
)
from surgery import (
    blocks_with,
    low_rank,
    same,
)


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize(("shard", "world"), [(by_block, 2), (one_unit, 2), (by_block, 4)])
def test_adapters_by_hand(shard: Any, world: int, optimizer: MakeOptimizer) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, world, blocks_with(low_rank), shard, optimizer)
        twin.train()
        for sign in (1, -1):
            with gathered(twin.model, writeback=True):
                for block in twin.model.blocks:
                    block.up.merge(sign)
            for block in twin.reference.blocks:
                block.up.merge(sign)
            for plain in twin.plain:
                for block in plain.blocks:
                    block.up.merged = sign > 0
            with torch.no_grad():
                found = twin.model(data(9, rank))
                compare("output", found, twin.mine(data(9, rank)), Tolerance())
        twin.train()

    run_ranks(ranks, world)


def test_frozen_buckets_reduce_nothing_and_gather_less() -> None:
    """A frozen unit in front of everything trained is gathered once: no backward needs it."""

    def build() -> nn.Module:
        model = Tower(3)
        model.requires_grad_(False)
        low_rank(model.blocks[2])
        model.head.requires_grad_(True)
        return model

    def ranks(rank: int) -> None:
        model = by_block(seeded(build))
        root, *rest = units(model)
        assert [len(u.buckets) for u in (root, *rest)] == [2, 1, 1, 2]
        for step in range(3):
            with count_traffic() as traffic:
                square(model, data(step, rank)).backward()
        # The root's two buckets stay gathered; the adapted block's are gathered for backward too.
        assert (traffic.gathers, traffic.reduces) == (2 + 1 + 1 + 2 * 2, 2)
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)

    run_ranks(ranks, 2)


def test_frozen_units_stay_gathered_until_changed() -> None:
    """Frozen units may stay gathered until their weights change."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, blocks_with(lambda b: b.requires_grad_(False)), by_block, sgd)
        for block in twin.model.blocks:
            set_reshard_after_forward(block, False)
            set_reshard_after_backward(block, False)

        def gathers(seed: int) -> int:
            with count_traffic() as traffic:
                twin.backward(square, seed)
            assert traffic.reduces == 1
            twin.optim.step()
            twin.plain_optim.step()
            twin.zero_grad()
            return traffic.gathers

        assert [gathers(0), gathers(1), gathers(2)] == [3, 1, 1]
        for model in (twin.model, twin.reference):
            with torch.no_grad():
                model.blocks[0].up.weight.mul_(2)
        assert [gathers(3), gathers(4)] == [2, 1]
        same(twin.model, twin.reference)

    run_ranks(ranks, 2)


def test_a_frozen_encoder_stays_gathered() -> None:
    """So do units in front of all that is trained, which no backward reaches."""

    def build() -> nn.Module:
        model = seeded(Tower)
        for part in (model.first, *model.blocks):
            part.requires_grad_(False)
        return model

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, build, by_block, sgd)
        for block in twin.model.blocks:
            set_reshard_after_forward(block, False)
            set_reshard_after_backward(block, False)
        found = []
        for seed in range(3):
            with count_traffic() as traffic:
                twin.backward(square, seed)
            twin.step()
            found.append(traffic.gathers)
        roots = 2  # the buckets of the root: frozen, and trained
        assert found == [roots + 3, roots, roots]
        for model in (twin.model, twin.reference):
            with torch.no_grad():
                model.blocks[0].up.weight.mul_(2)
        twin.backward(square, 3)
        twin.step()
        same(twin.model, twin.reference)

    run_ranks(ranks, 2)


def test_only_what_trained_is_gathered_again() -> None:
    """In a unit that stays gathered only what trained is gathered again."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(blocks_with(low_rank)))
        for block in model.blocks:
            set_reshard_after_forward(block, False)
            set_reshard_after_backward(block, False)
        optim, found = adamw(trainable(model)), []
        for step in range(3):
            with count_traffic() as traffic:
                square(model, data(step, rank)).backward()
            found.append((traffic.gathers, traffic.reduces))
            optim.step()
            optim.zero_grad()
        assert found == [(5, 3), (3, 3), (3, 3)]

    run_ranks(ranks, 2)


def test_only_the_adapters_are_saved() -> None:
    """Sharded values gather one by one, so the frozen weights move no byte."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, blocks_with(low_rank), by_block, sgd)
        twin.train()
        names = [n for n, p in twin.model.named_parameters() if p.requires_grad and ".up." in n]
        values = twin.model.state_dict()
        with count_traffic() as traffic:
            saved = {name: values[name].full_tensor() for name in names}
        assert traffic.gathers == len(names)
        for name in names:
            assert torch.equal(saved[name], twin.reference.state_dict()[name])
        with torch.no_grad():
            for name in names:
                twin.model.get_parameter(name).zero_()
        twin.model.load_state_dict(saved, strict=False)
        twin.check()

    run_ranks(ranks, 2)


class LowBit(nn.Module):
    """Weights in 8 or packed 4 bits with a scale per row, and a trained update."""

    def __init__(self, bits: int, signed: bool) -> None:
        super().__init__()
        self.bits, self.signed = bits, signed
        columns = WIDTH * bits // 8
        dtype = torch.int8 if signed else torch.uint8
        packed = torch.randint(0, 256, (7, columns)).to(torch.uint8).view(dtype)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(7, 1) * 0.01, requires_grad=False)
        self.a = nn.Parameter(torch.randn(2, WIDTH))
        self.b = nn.Parameter(torch.randn(7, 2) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        q = self.packed
        if self.bits == 4:
            q = torch.stack([q & 15, q >> 4], -1).flatten(1)
        weight = (q.to(x.dtype) - (0 if self.signed else 2 ** (self.bits - 1))) * self.scale
        return F.linear(x, weight.to(x.dtype)) + F.linear(F.linear(x, self.a), self.b)


@pytest.mark.parametrize("shard", [by_block, one_unit])
@pytest.mark.parametrize(("bits", "signed"), [(8, False), (8, True), (4, False)])
def test_low_bit_bases(bits: int, signed: bool, shard: Any) -> None:
    def change(block: nn.Module) -> None:
        block.requires_grad_(False)
        block.up = LowBit(bits, signed)

    def build() -> nn.Module:
        return blocks_with(change)()

    for optimizer in (sgd, adamw):
        train_twin(build, shard=shard, optimizer=optimizer)


def test_low_bit_bases_are_cut_in_bytes_and_never_cast() -> None:
    def ranks(rank: int) -> None:
        model = Tower(1)
        torch.manual_seed(0)
        model.blocks[0].up = LowBit(4, False)
        kept = model.blocks[0].up.packed.detach().clone()
        by_block(model, mp_policy=MixedPrecision(param_dtype=torch.bfloat16))
        packed = model.blocks[0].up.packed
        buckets = [b for u in units(model) for b in u.buckets if shard_of(b).dtype == torch.uint8]
        assert [b.views.nbytes for b in buckets] == [32]  # 21 bytes, and 16 per rank at the least
        square(model, data(0, rank, dtype=torch.float32)).backward()
        model.to(torch.bfloat16)
        square(model, data(0, rank, dtype=torch.bfloat16)).backward()
        assert packed.grad is None and packed.dtype == torch.uint8
        assert torch.equal(packed.full_tensor(), kept)
        assert torch.equal(state_dict(model, kind="full")["blocks.0.up.packed"], kept)
        undo(model)
        assert packed is model.blocks[0].up.packed and torch.equal(packed, kept)

    run_ranks(ranks, 2)
