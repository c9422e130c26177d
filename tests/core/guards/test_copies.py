"""Copies of parts, shallow copies, fused layers and graphs of sharded modules: right, or one error.

Deep copies of whole units are in test_identity.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval
from torch.testing import assert_close

import fsdp_compose as fc
from fsdp_compose import fully_shard, gathered, undo
from fsdp_compose.sharded import ShardedWeightError

from harness import run_ranks
from models import WIDTH, Block, Tower, assert_at_rest, by_block, data, one_unit, seeded, square


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.conv, self.scale = nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.linear(x))
        return self.scale(self.conv(torch.stack([y, y], 1)))


def test_layers_are_fused_in_a_plain_model() -> None:
    """Or inside ``gathered``, where a layer that is no unit is copied plain."""

    def check(rank: int) -> None:
        x = data(0, rank)
        plain = seeded(Normed).eval()
        plain.scale.running_var.mul_(4)
        wanted = fuse_linear_bn_eval(plain.linear, plain.norm)(x)
        model = one_unit(copy.deepcopy(plain))
        with pytest.raises(ShardedWeightError, match=r"fused in a plain model.*undo\(model\)"):
            fuse_linear_bn_eval(model.linear, model.norm)
        with gathered(model):
            fused = fuse_linear_bn_eval(model.linear, model.norm)
        assert not fc.is_fully_sharded(fused) and type(fused.weight) is nn.Parameter
        assert_close(fused(x), wanted)
        assert_close(model(x), plain(x))

        for layer in (plain.linear, plain.norm, plain.conv):
            fully_shard(layer)
        model = fully_shard(plain)
        with gathered(model):
            with pytest.raises(ShardedWeightError, match="fused in a plain model"):
                fuse_linear_bn_eval(model.linear, model.norm)  # the copy is a sharded unit
        fused = fuse_conv_bn_eval(model.conv, model.scale)  # elementwise, so it works on slices
        with pytest.raises(RuntimeError, match=r"was replaced.*refresh"):
            fused(x.unsqueeze(1).expand(-1, 2, -1))
        with pytest.raises(ValueError, match=r"belongs to no unit.*full_tensor\(\)"):
            fc.refresh(fused)
        fused.weight = nn.Parameter(fused.weight.full_tensor())
        fused.bias = nn.Parameter(fused.bias.full_tensor())
        fc.refresh(fused)
        inputs = x.unsqueeze(1).expand(-1, 2, -1)
        assert_close(fused(inputs), model.scale(model.conv(inputs)))
        twin = undo(copy.deepcopy(model))
        assert_close(fuse_linear_bn_eval(twin.linear, twin.norm)(x), wanted)
        assert fc.is_fully_sharded(model)

    run_ranks(check, 2)


def test_shallow_copies_read_what_the_original_reads() -> None:
    """One whose dictionaries were exchanged carries a unit that does not gather it: an error."""

    def check(rank: int) -> None:
        x = data(0, rank)
        model = by_block(seeded(Tower))
        block = model.blocks[0]
        same = copy.copy(block)
        assert torch.equal(same(x), block(x))
        square(same, x).backward()
        assert all(p.grad is not None for p in block.parameters())
        own_table, own_child = copy.copy(block), copy.copy(block)
        for twin in (own_table, own_child):
            twin._modules = dict(block._modules)
        own_table.up = copy.copy(block.up)
        own_table.up._parameters = dict(block.up._parameters)
        own_child.up = nn.Linear(WIDTH, 7).double()
        for twin in (own_table, own_child):
            with pytest.raises(RuntimeError, match=r"forward was called on a copy.*'up\.weight'"):
                twin(x)
        own_child.up.requires_grad_(False)
        own_child(x)
        model.zero_grad()
        square(model, x).backward()
        assert_at_rest(model)

    run_ranks(check, 2)


def test_copies_of_parts_say_how_to_copy() -> None:
    """And graphs traced from sharded modules; a plain graph may be sharded."""

    def check(rank: int) -> None:
        x, plain = data(0, rank), seeded(Tower)
        model = by_block(copy.deepcopy(plain))
        for part in (model.head, model.blocks[0].up):
            twin = copy.deepcopy(part)
            with pytest.raises(
                ShardedWeightError, match=r"copied without its unit.*Copy the whole"
            ):
                twin(x)
            for use in (fully_shard, fc.state_dict, fc.clip_grad_norm_):
                with pytest.raises(ValueError, match=r"belongs to no unit.*gathered\(module\)"):
                    use(twin, 1.0) if use is fc.clip_grad_norm_ else use(twin)
        with gathered(model):
            twin = copy.deepcopy(model.head)
        assert torch.equal(twin(x), plain.head(x)) and type(twin.weight) is nn.Parameter

        graph = torch.fx.symbolic_trace(one_unit(copy.deepcopy(plain)))
        with pytest.raises(ShardedWeightError, match=r"GraphModule was made from sharded.*trace"):
            graph(x)
        graph = one_unit(torch.fx.symbolic_trace(copy.deepcopy(plain)))
        assert_close(graph(x), plain(x))
        square(graph, x).backward()
        assert graph.head.weight.grad is not None
        with pytest.raises(ShardedWeightError, match=r"GraphModule was made from sharded.*copy"):
            copy.deepcopy(graph)(x)
        assert isinstance(copy.deepcopy(model).blocks[0], Block)

    run_ranks(check, 2)
