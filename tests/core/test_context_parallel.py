"""Sequences cut over ranks, batches over others, parameters over both: as one process.

Every rank has some positions of some sequences. Attention reads the keys and values of the other
ranks with the same sequences, which is the model's own communication; that gradients are averaged
over all ranks makes the loss the mean over tokens.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.utils.checkpoint import checkpoint

from fsdp_compose import clip_grad_norm_, count_traffic, fully_shard, wrap

from harness import run_ranks
from models import (
    MakeOptimizer,
    Tolerance,
    adamw,
    assert_at_rest,
    compare,
    data,
    seeded,
    sgd,
    whole,
)

DIM, HEADS, LENGTH, SEQUENCES = 8, 2, 8, 2


class _Pass(torch.autograd.Function):
    """Hand a tensor to the next rank of a ring; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, step: int = 1) -> Tensor:
        ctx.group, ctx.step = group, step
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        x, received = x.contiguous(), torch.empty_like(x)
        peers = [dist.get_global_rank(group, (rank + s) % size) for s in (step, -step)]
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, peers[0], group),
                dist.P2POp(dist.irecv, received, peers[1], group),
            ]
        )
        for work in works:
            work.wait()
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Pass.apply(grad, ctx.group, -ctx.step), None, None


def ring_attention(q: Tensor, k: Tensor, v: Tensor, cp: DeviceMesh) -> Tensor:
    """Causal attention over all positions, of which this rank has one run of ``q``, ``k``, ``v``.

    One block of keys and values at a time, with a softmax that is put together as they come.
    """
    size, rank, group = cp.size(), cp.get_local_rank(), cp.get_group()
    block = torch.stack([k, v])
    positions = torch.arange(q.shape[-2])
    highest = torch.full((*q.shape[:-1], 1), -math.inf, dtype=q.dtype)
    total = torch.zeros_like(highest)
    out = torch.zeros_like(q)
    for turn in range(size):
        source = (rank - turn) % size
        ahead = positions + (source - rank) * len(positions) > positions[:, None]
        scores = q @ block[0].mT / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(ahead, -math.inf)
        peak = torch.maximum(highest, scores.amax(-1, keepdim=True)).detach()
        weights = (scores - peak).exp()
        shrink = (highest - peak).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + weights @ block[1]
        highest = peak
        if turn < size - 1:
            block = _Pass.apply(block, group)
    return out / total


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, cp: DeviceMesh) -> Tensor:
    """The same, with all keys and values gathered at once."""
    both = DTensor.from_local(torch.stack([k, v]), cp, [Shard(3)], run_check=False)
    both = both.full_tensor(grad_placements=[Partial()])  # every rank's queries read them
    first = cp.get_local_rank() * q.shape[-2]
    seen = torch.arange(both.shape[-2]) <= torch.arange(first, first + q.shape[-2])[:, None]
    return nn.functional.scaled_dot_product_attention(q, both[0], both[1], seen)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 11), nn.Linear(11, DIM)
        self.attention: Any = lambda q, k, v: nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(LENGTH, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, 3)
        self.recompute = False

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        x = x + self.positions(torch.arange(first, first + x.shape[1]))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x)


ATTENTION = {"ring": ring_attention, "gathered": gathered_attention}


def train(
    rank: int,
    shape: tuple[int, int],
    attention: str,
    optimizer: MakeOptimizer,
    hybrid: bool = False,
    recompute: bool = False,
) -> dict[str, int]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
    dp, cp = (mesh[name].get_local_rank() for name in ("dp", "cp"))
    model, plain = seeded(Model), seeded(Model)
    model.recompute = recompute
    for layer in model.layers:
        layer.attention = lambda q, k, v: ATTENTION[attention](q, k, v, mesh["cp"])
    over = mesh if hybrid else mesh["dp", "cp"]._flatten("dp_cp")
    fully_shard(model, mesh=over, units=wrap.by_class({Layer}))
    optims = optimizer(model.parameters()), optimizer(plain.parameters())
    each = LENGTH // shape[1]
    for seed in range(3):
        batch = data(seed, 0, shape[0] * SEQUENCES, LENGTH, DIM)
        mine = batch.chunk(shape[0])[dp].narrow(1, cp * each, each)
        with count_traffic() as traffic:
            loss = model(mine, cp * each).square().mean()
            loss.backward()
        everything = plain(batch)
        local = everything.chunk(shape[0])[dp].narrow(1, cp * each, each)
        compare("loss", loss.detach(), local.detach().square().mean(), Tolerance())
        everything.square().mean().backward()
        assert_at_rest(model)
        theirs = dict(plain.named_parameters())
        for name, param in model.named_parameters():
            compare(f"gradient of {name}", whole(param.grad), theirs[name].grad, Tolerance())
        before = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        compare("norm", clip_grad_norm_(model, 0.01), before, Tolerance())
        for optim in optims:
            optim.step()
            optim.zero_grad()
    for name, param in model.named_parameters():
        compare(name, whole(param), theirs[name].detach(), Tolerance())
    return traffic.to_dict()


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
def test_sequences_cut_over_ranks_train(
    shape: tuple[int, int], attention: str, optimizer: MakeOptimizer
) -> None:
    """Each unit gathers twice, the root's once, and reduces once over all ranks together."""
    for traffic in run_ranks(train, math.prod(shape), shape, attention, optimizer):
        assert (traffic["gathers"], traffic["reduces"], traffic["all_reduces"]) == (5, 3, 0)


def test_replicas_of_parameters_over_batches() -> None:
    """Sharded over the ranks of a sequence, copied over the others."""
    for traffic in run_ranks(train, 4, (2, 2), "ring", sgd, hybrid=True):
        assert (traffic["gathers"], traffic["reduces"], traffic["all_reduces"]) == (5, 3, 3)


def test_recomputation_passes_keys_and_values_again() -> None:
    """The ring's own messages and the library's keep to the same order on every rank."""
    run_ranks(train, 4, (2, 2), "ring", sgd, recompute=True)
