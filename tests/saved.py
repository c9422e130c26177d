"""Models, optimizers, training and comparisons that tests of checkpoints share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import fsdp_compose as fc

from models import trainable


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a = nn.Linear(3, 5)
        self.b = nn.Linear(5, 3)
        self.c = nn.Linear(3, 3, bias=False)
        self.c.weight = nn.Parameter(torch.randn(3, 3).t())  # strided
        self.scale = nn.Parameter(torch.randn(()))
        self.gain = nn.Parameter(torch.randn(1))
        self.b.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x).tanh())) * self.scale + self.gain


def shard(model: Net, how: str = "blocks", **kwargs: Any) -> Net:
    if how == "blocks":
        fc.fully_shard(model.a, **kwargs)
        fc.fully_shard(model.b, **kwargs)
    elif how == "row":
        kwargs["granularity"] = "row"
    return fc.fully_shard(model, **kwargs)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    decay = [p for p in trainable(model) if p.dim() >= 2]
    rest = [p for p in trainable(model) if p.dim() < 2]
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 0.003}]


Make = Callable[[nn.Module], Optimizer]


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda m: torch.optim.SGD(trainable(m), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(trainable(m), lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda m: torch.optim.Adam(trainable(m), lr=0.01, amsgrad=True),
    "adamw": lambda m: torch.optim.AdamW(two_groups(m), lr=0.01),
    "adamw_loop": lambda m: torch.optim.AdamW(two_groups(m), lr=0.01, foreach=False),
    "nadam": lambda m: torch.optim.NAdam(trainable(m), lr=0.01),
    "radam": lambda m: torch.optim.RAdam(trainable(m), lr=0.01),
    "adamax": lambda m: torch.optim.Adamax(trainable(m), lr=0.01),
    "adagrad": lambda m: torch.optim.Adagrad(trainable(m), lr=0.01),
    "adadelta": lambda m: torch.optim.Adadelta(trainable(m), lr=0.1),
    "rmsprop": lambda m: torch.optim.RMSprop(trainable(m), lr=0.01, momentum=0.9, centered=True),
    "rprop": lambda m: torch.optim.Rprop(trainable(m), lr=0.01),
    "asgd": lambda m: torch.optim.ASGD(trainable(m), lr=0.01),
}


def train(model: nn.Module, optim: Any, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(100 + step)
        loss = model(torch.randn(4, 3)).square().mean()
        loss.backward()
        for one in [optim] if isinstance(optim, Optimizer) else optim:
            one.step()
            one.zero_grad()
        losses.append(loss.item())
    return losses


def equal(a: Any, b: Any, where: str = "") -> None:
    if isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            equal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            equal(x, y, f"{where}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert type(a) is type(b) is torch.Tensor, where
        assert a.dtype == b.dtype and a.shape == b.shape, where
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=lambda m: f"{where}: {m}")
    else:
        assert a == b, where


class TiedNet(nn.Module):
    """Tied, frozen, strided, scalar, buffers of both kinds, an integer parameter."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5) for _ in range(2)])
        self.norm = nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.randn(()))
        self.turned = nn.Parameter(torch.randn(5, 3).t())
        self.codes = nn.Parameter(torch.arange(5), requires_grad=False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("kept", torch.randn(2))
        self.register_buffer("dropped", torch.randn(2), persistent=False)
        self.blocks[0].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.emb(x)
        for block in self.blocks:
            h = h + block(h).tanh()
        return self.head(self.norm(h) * self.scale + (self.turned.sum(0)))


def shard_tied(model: nn.Module, units: str = "blocks", **kwargs: Any) -> nn.Module:
    if units == "blocks":
        for block in model.blocks:
            fc.fully_shard(block, **kwargs)
    elif units == "head":
        fc.fully_shard(model.head, **kwargs)
    return fc.fully_shard(model, **kwargs)


class Code:
    """Runs when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)
