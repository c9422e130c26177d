"""A language model split by tensor parallelism, how to train it, and the plain one it equals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from fsdp_compose import fully_shard, wrap
from fsdp_compose.sharded import is_sharded

STEPS = 3


TOKENS = 4


class Attention(nn.Module):
    """Causal self-attention over the heads that this rank has."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for w in self.projections)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))

    @property
    def projections(self) -> tuple[nn.Module, ...]:
        return self.wq, self.wk, self.wv


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, head: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, head)
        self.norm2, self.mlp = nn.LayerNorm(width), MLP(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LM(nn.Module):
    """A small language model; its blocks may recompute their activations."""

    def __init__(self, vocabulary: int = 10, width: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, hidden, 2) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.recompute = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


def language_model() -> LM:
    torch.manual_seed(0)
    return LM().double()


def parallelize(model: LM, tp: DeviceMesh) -> LM:
    """Column, row and sequence parallel layers; the head gives logits split over the classes."""
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, tp, plan)
    for block in model.blocks:
        gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        inner = {
            "norm1": SequenceParallel(),
            "norm2": SequenceParallel(),
            "attention": PrepareModuleInput(**gathered),
            "mlp": PrepareModuleInput(**gathered),
            **{f"attention.w{k}": ColwiseParallel() for k in "qkv"},
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, tp, inner)
    return model


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def tokens_of(seed: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    both = torch.randint(0, 10, (2, 2, TOKENS), generator=generator)
    return both[0], both[1]


def cross_entropy(model: nn.Module, seed: int, rank: int) -> Tensor:
    tokens, targets = tokens_of(seed, rank)
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def mean_cross_entropy(model: nn.Module, seed: int, ranks: int) -> Tensor:
    return torch.stack([cross_entropy(model, seed, rank) for rank in range(ranks)]).mean()


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def whole(tensor: Tensor) -> Tensor:
    if is_sharded(tensor) or isinstance(tensor, DTensor):
        return tensor.full_tensor().detach()
    return tensor.detach().clone()


def assert_equal(model: nn.Module, reference: nn.Module, what: str = "", **tolerance: Any) -> None:
    theirs = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        assert param.shape == theirs[name].shape, name
        torch.testing.assert_close(
            whole(param),
            theirs[name].detach(),
            msg=lambda m, n=name: f"{what}{n}: {m}",
            **tolerance,
        )


def sharded_lm(mesh: DeviceMesh, units: bool = True, **options: Any) -> LM:
    model = parallelize(language_model(), mesh["tp"])
    policy = wrap.by_class({Block}) if units else None
    return fully_shard(model, mesh=mesh["dp"], units=policy, **options)


def train(model: nn.Module, optim: torch.optim.Optimizer, rank: int, first: int = 0) -> None:
    for seed in range(first, first + STEPS):
        with loss_parallel():
            cross_entropy(model, seed, rank).backward()
        optim.step()
        optim.zero_grad()


def train_plain(model: nn.Module, optim: torch.optim.Optimizer, ranks: int, first: int = 0) -> None:
    for seed in range(first, first + STEPS):
        mean_cross_entropy(model, seed, ranks).backward()
        optim.step()
        optim.zero_grad()


_PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
