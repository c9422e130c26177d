"""Modules with ways of their own, and hooks that users put on modules, work as on plain modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from fsdp_compose import fully_shard, wrap

from harness import run_ranks
from models import (
    WIDTH,
    Block,
    Tower,
    Twin,
    by_block,
    compare,
    data,
    one_unit,
    square,
    train_twin,
)


class Attention(nn.Module):
    """Reads out_proj.weight without calling out_proj."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out, weights = self.attention(x[None], x[None], x[None])
        return self.norm(out[0]) + weights.sum()


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, 5, num_layers=2, bidirectional=True)
        self.head = nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH, padding_idx=0)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 4).long().clamp(max=10)
        return self.block(self.embedding(tokens)).mean(0)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, affine=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.norm(self.first(x)))


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spectral = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.weight = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.orthogonal = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.orthogonal(self.weight(self.spectral(x))))


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.up = nn.ConvTranspose1d(WIDTH, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.conv(x[None, None]).mean((0, 1)).t())


MODULES = {
    "attention": Attention,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "embedding": Embedded,
    "batch_norm": Normalised,
    "parametrized": Parametrized,
    "convolution": Convolutional,
    "transformer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 5, dropout=0.0),
    "prelu": lambda: nn.Sequential(nn.Linear(WIDTH, 3), nn.PReLU(3), nn.GroupNorm(3, 3)),
}


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("split", [False, True], ids=["one", "children"])
def test_modules(kind: str, split: bool) -> None:
    """As one unit, and with every child a unit of its own."""

    def shard(model: nn.Module) -> nn.Module:
        if not split:
            return fully_shard(model)
        children = list(model.children())
        return fully_shard(model, units=wrap.by_fn(lambda _, m: any(m is c for c in children)))

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, MODULES[kind], shard)
        twin.train()
        x = data(7, rank)
        twin.model.eval()
        for plain in twin.plain:
            plain.eval()
        with torch.no_grad():
            compare("evaluation", twin.model(x), twin.mine(x), twin.tolerance)
        compare("evaluation", twin.model(x), twin.mine(x), twin.tolerance)
        twin.model.train()
        for plain in twin.plain:
            plain.train()
        twin.train()

    run_ranks(ranks)


@pytest.mark.parametrize("mode", ["eager", "checkpointed"])
def test_recurrent_modules_inside_a_unit(mode: str) -> None:
    """The unit is a module around the recurrent one, which reads its second list of weights."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Recurrent(nn.LSTM)

        def forward(self, x: Tensor) -> Tensor:
            if mode == "checkpointed":
                return checkpoint(self.inner, x, use_reentrant=False)
            return self.inner(x)

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Wrapped, one_unit)
        twin.train()
        flat = twin.model.inner.rnn._flat_weights
        assert all(a is b for a, b in zip(flat, twin.model.inner.rnn.parameters(), strict=True))

    run_ranks(ranks)


def test_hooks_of_the_user_see_what_they_would_see() -> None:
    """Forward and backward hooks of the user see what they would see."""

    def attach(model: nn.Module, log: list[Any]) -> None:
        for module in (model, model.blocks[0], model.blocks[0].up, model.head):
            module.register_forward_pre_hook(lambda m, a: log.append(("pre", a[0].detach())))
            module.register_forward_hook(lambda m, a, o: log.append(("out", o.detach())))
            module.register_full_backward_hook(
                lambda m, i, o: log.extend(("grad", g.clone()) for g in (*i, *o) if g is not None)
            )
            module.register_full_backward_pre_hook(
                lambda m, o: log.append(("before", o[0].detach().clone()))
            )
            module.register_forward_hook(lambda m, a, o: o * 1.5)

    def ranks(rank: int, first: bool) -> None:
        for shard in (by_block, one_unit):
            log: list[Any] = []
            wanted: list[Any] = []

            def build() -> nn.Module:
                return Tower(2)

            def hooked(model: nn.Module, log: list[Any] = log) -> None:
                if first:
                    attach(model, log)
                shard(model)
                if not first:
                    attach(model, log)

            twin = Twin(rank, 2, build, hooked)
            for i, plain in enumerate(twin.plain):
                attach(plain, wanted if i == rank else [])
            for seed in range(2):
                log.clear()
                wanted.clear()
                twin.backward(lambda m, x: square(m, x.clone().requires_grad_()), seed)
                assert [kind for kind, _ in log] == [kind for kind, _ in wanted]
                for (kind, ours), (_, theirs) in zip(log, wanted):
                    scale = 2 if kind in ("grad", "before") else 1
                    compare(kind, ours, theirs * scale, twin.tolerance)
                twin.step()
            twin.check()

    run_ranks(ranks, 2, True)
    run_ranks(ranks, 2, False)


def test_forward_hook_of_the_user_may_use_the_weight() -> None:
    """A regulariser written as a forward hook, registered before sharding: it sees full weights."""

    def build() -> nn.Module:
        model = Tower(2)
        for block in model.blocks:
            block.up.register_forward_hook(lambda m, a, o: o + m.weight.square().mean())
        return model

    train_twin(build)
