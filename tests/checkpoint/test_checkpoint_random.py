"""Any shapes, dtypes, ties and cuts, at any world size, into any other: bit for bit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fsdp_compose as fc
from fsdp_compose.base.group import Group
from fsdp_compose.checkpoint import (
    load_checkpoint,
    load_full,
    load_optim_state_dict,
    load_state_dict,
    optim_state_dict,
    save_checkpoint,
    save_full,
    state_dict,
)
from fsdp_compose.layout.planner import plan_layout
from fsdp_compose.layout.shards import Extent
from fsdp_compose.sharded import Residence, ShardSpec
from fsdp_compose.sharded.chunks import cut_chunks

from harness import run_ranks
from saved import equal

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int32)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
params = st.lists(
    st.tuples(shapes, st.sampled_from(DTYPES), st.booleans(), st.permutations(range(4))),
    min_size=1,
    max_size=5,
)
cuts = st.tuples(
    st.sampled_from([1, 2, 3, "row", "tensor"]),
    st.booleans(),  # halves are units of their own
    st.sampled_from([None, *fc.ShardingStrategy][:4]),
)


class Tree(nn.Module):
    """Parameters of any sort in two halves; the first may be tied into the second."""

    def __init__(self, spec: Any, tied: bool, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.left, self.right = nn.Module(), nn.Module()
        for i, (shape, dtype, trained, order) in enumerate(spec):
            order = [d for d in order if d < len(shape)]
            values = torch.randn([shape[d] for d in order], dtype=torch.float64) * 100
            back = [order.index(d) for d in range(len(order))]
            values = values.to(dtype).permute(back)
            trained = trained and dtype not in (torch.int32, torch.complex64)
            half = self.left if i % 2 else self.right
            setattr(half, f"p{i}", nn.Parameter(values, trained))
        if tied:
            self.left.again = self.right.p0
        self.register_buffer("count", torch.randn(3))

    def cut(self, how: Any) -> Tree:
        granularity, halves, strategy = how
        for half in (self.left, self.right) if halves else ():
            fc.fully_shard(half, granularity=granularity, strategy=strategy)
        return fc.fully_shard(self, granularity=granularity, strategy=strategy)

    def optimizer(self, steps: int) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad] or [self.right.p0]
        optim = torch.optim.Adam(trained, lr=0.1)
        for step in range(steps):
            for p in trained:
                if p.requires_grad:
                    p.grad = p.detach() * (step + 1)
            optim.step()
        return optim


def write(rank: int, spec: Any, tied: bool, how: Any, path: Path) -> Any:
    model = Tree(spec, tied, 1).cut(how)
    optim = model.optimizer(2)
    save_checkpoint(path / "c", model, optim)
    save_full(path / "f", model, max_file_bytes=64)
    return dict(state_dict(model)), optim_state_dict(model, optim)


def read(rank: int, spec: Any, tied: bool, how: Any, path: Path, saved: Any) -> None:
    for way in ("dcp", "safetensors", "memory", "self"):
        model = Tree(spec, tied, 2).cut(how)
        optim = model.optimizer(1)
        if way == "dcp":
            load_checkpoint(path / "c", model, optim)
        elif way == "safetensors":
            load_full(path / "f", model)
            load_optim_state_dict(model, optim, saved[1])
        elif way == "memory":
            load_state_dict(model, saved[0])
            load_optim_state_dict(model, optim, saved[1])
        else:  # from a model that is cut in another way
            other = Tree(spec, tied, 3).cut((1, False, None))
            other_optim = other.optimizer(1)
            load_checkpoint(path / "c", other, other_optim)
            model.load_state_dict(other.state_dict())
            load_optim_state_dict(model, optim, optim_state_dict(other, other_optim, "sharded"))
        exactly(dict(state_dict(model)), saved[0])
        exactly(optim_state_dict(model, optim), saved[1])


def exactly(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert set(a) == set(b)
        for key in a:
            exactly(a[key], b[key])
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(torch.nan_to_num(a, 7), torch.nan_to_num(b, 7)) or not a.numel()
    else:
        equal(a, b)


@settings(max_examples=12)
@given(
    spec=params, tied=st.booleans(), how=cuts, then=cuts, worlds=st.tuples(*[st.integers(1, 4)] * 2)
)
def test_saved_and_loaded_bit_for_bit(
    spec: Any, tied: bool, how: Any, then: Any, worlds: tuple[int, int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = run_ranks(write, worlds[0], spec, tied, how, Path(folder))[0]
        run_ranks(read, worlds[1], spec, tied, then, Path(folder), saved)


@given(shapes, st.permutations(range(4)), st.integers(1, 7), st.integers(0, 9))
def test_boxes_of_all_ranks_are_the_tensor(shape: Any, order: Any, world: int, before: int) -> None:
    """Every element in exactly one box, where the original has it, whatever the strides."""
    order = [d for d in order if d < len(shape)]
    numel = torch.Size(shape).numel()
    back = [order.index(d) for d in range(len(order))]
    whole = torch.arange(numel).view([shape[d] for d in order]).permute(back)
    layout = plan_layout([Extent("x", (before,)), Extent("p", shape)], 8, world)
    flat = torch.full((layout.numel,), -1)
    flat[before : before + numel] = torch.arange(numel)
    seen = torch.zeros(shape, dtype=torch.long)
    for rank in range(world):
        spec = ShardSpec(
            fqn="p",
            unit="u",
            shape=torch.Size(shape),
            stride=whole.stride(),
            offset=before,
            shard_numel=layout.shard_numel,
            group=Group(None, rank, world, "none", tuple(range(world))),
            residence=Residence(),
        )
        first = rank * layout.shard_numel
        mine = flat[max(before, first) : min(before + numel, first + layout.shard_numel)]
        for box, data in cut_chunks(spec, mine.clone() if mine.numel() else flat[:0].clone()):
            place = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes))
            assert torch.equal(data, whole[place])
            seen[place] += 1
    assert (seen == 1).all()
