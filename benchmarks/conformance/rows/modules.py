"""Kinds of modules: recurrent ones, attention, odd outputs, other methods, writes in forward."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

import fsdp_compose as fc

from conformance.libraries import Library, compare, data, square, world
from conformance.models import Tower, tower
from conformance.outcomes import row


@row("T7", "an LSTM as a unit")
def lstm(lib: Library) -> None:
    class Recurrent(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0])

    lib.pair(Recurrent, units=lambda m: [m.lstm], unused=True).train()


@row("T7", "nn.MultiheadAttention, which reads out_proj.weight without calling it")
def attention(lib: Library) -> None:
    class Attends(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.attention(x, x, x)[0])

    lib.pair(Attends, units=lambda m: [m.attention], unused=True).train()


@row("T7", "nn.MultiheadAttention with out_proj a unit of its own", names=r"out_proj")
def attention_inner(lib: Library) -> None:
    class Attends(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.attention(x, x, x)[0])

    units = lambda m: [m.attention.out_proj, m.attention]  # noqa: E731
    lib.pair(Attends, units=units, unused=True).train()


class Encodes(Tower):
    def encode(self, x: Tensor) -> Tensor:
        return self.first(x)


@row("U2", "a method other than forward is called (model.encode)", names=r"encode|weight")
def other_method(lib: Library) -> None:
    pair = lib.pair(Encodes, unused=True)
    target = pair.inner if lib.name == "ddp" else pair.model
    for seed in range(2):
        target.encode(data(seed)).square().mean().backward()
        loss = sum(pair.plain.encode(data(seed, r)).square().mean() for r in range(world()))
        (loss / world()).backward()
        pair.step()
    pair.check()


@row("U2", "the same, declared to the library")
def declared_method(lib: Library) -> None:
    declare = lib.pick(
        "has forward alone",
        fsdp2=lambda m: register_fsdp_forward_method(m, "encode"),
        ours=lambda m: fc.register_forward_method(m, "encode"),
    )
    pair = lib.pair(Encodes)
    declare(pair.model)
    for seed in range(2):
        pair.model.encode(data(seed)).square().mean().backward()
        loss = sum(pair.plain.encode(data(seed, r)).square().mean() for r in range(world()))
        (loss / world()).backward()
        pair.step()
    pair.check()


@row("U25", "a submodule's forward before the model's")
def encoder_first(lib: Library) -> None:
    pair = lib.pair(tower)
    with torch.no_grad():
        found = pair.inner.blocks[0](data(0))
    compare({"y": found}, {"y": pair.plain.blocks[0](data(0))})
    pair.train()


@row("U25 T12", "an inference_mode forward before training")
def inference_first(lib: Library) -> None:
    pair = lib.pair(tower)
    with torch.inference_mode():
        pair.model(data(0))
    pair.train()


@row("U25", "evaluation between training steps")
def evaluates_between(lib: Library) -> None:
    pair = lib.pair(tower)
    for seed in range(2):
        pair.backward(seed)
        pair.step()
        with torch.no_grad():
            compare({"y": pair.model(data(9))}, {"y": pair.plain(data(9))})
    pair.check()


@dataclass
class Output:
    y: Tensor
    name: str = "y"


class Ordered(collections.OrderedDict):  # type: ignore[type-arg]
    """As Hugging Face's ModelOutput."""


class Hidden:
    def __init__(self, y: Tensor) -> None:
        self.y = y


def _outputs(lib: Library, wrap: Any, read: Any) -> None:
    class Wraps(Tower):
        def forward(self, x: Tensor) -> Any:
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return wrap(self.head(x))

    lib.pair(Wraps).train(loss=lambda m, x: read(m(x)).square().mean())


@row("T5", "outputs in a dataclass")
def dataclass_output(lib: Library) -> None:
    _outputs(lib, Output, lambda o: o.y)


@row("T5", "outputs in a subclass of OrderedDict")
def ordered_output(lib: Library) -> None:
    _outputs(lib, lambda y: Ordered(y=y), lambda o: o["y"])


@row("D14", "outputs hidden in a plain object", names=r"Hidden|output")
def hidden_output(lib: Library) -> None:
    _outputs(lib, Hidden, lambda o: o.y)


@row("U13", "inputs hidden in a plain object, between units", names=r"Hidden|input|output")
def hidden_between(lib: Library) -> None:
    class Link(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(6, 6)

        def forward(self, h: Hidden) -> Hidden:
            return Hidden(h.y + torch.tanh(self.up(h.y)))

    class Chained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Link(), Link()])
            self.head = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = Hidden(x)
            for block in self.blocks:
                h = block(h)
            return self.head(h.y)

    lib.pair(Chained).train()


@row("D16 T22", "a forward that clamps its own weight in place", names=r"weight")
def writes_weight(lib: Library) -> None:
    class Clamps(Tower):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.head.weight.clamp_(-0.05, 0.05)
            return super().forward(x)

    pair = lib.pair(Clamps, lr=0.0)
    pair.train(1)


@row(
    "D16 T22",
    "nn.Embedding(max_norm=), whose forward writes the rows that are looked up",
    names=r"weight",
)
def max_norm(lib: Library) -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(8, 6, max_norm=0.5)
            self.head = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            index = (x[:, 0].abs() * 100).long() % 4 + 4 * (x.sum() > 0).long()
            return self.head(self.emb(index))

    lib.pair(Looks, units=lambda m: [m.emb]).train()


@row("D16", "a buffer that counts forwards")
def counts(lib: Library) -> None:
    class Counts(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return super().forward(x)

    pair = lib.pair(Counts)
    for seed in range(3):
        square(pair.model, data(seed)).backward()
    compare({"count": pair.inner.count}, {"count": torch.tensor(3.0)})


@row("U39", "sparse gradients of an embedding", names=r"sparse|weight")
def sparse(lib: Library) -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(8, 6, sparse=True)
            self.head = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.emb((x[:, 0].abs() * 100).long() % 8))

    lib.pair(Looks).train()


@row("U27", "weight_norm added after sharding", names=r"weight|parametriz")
def weight_norm(lib: Library) -> None:
    pair = lib.pair(tower)
    for module in (pair.inner, pair.plain):
        nn.utils.parametrizations.weight_norm(module.head)
    pair.optims = [pair.make(m.parameters()) for m in (pair.model, pair.plain)]
    pair.train()


@row("U27", "weight_norm on a module before sharding")
def weight_norm_before(lib: Library) -> None:
    def build() -> nn.Module:
        model = tower()
        nn.utils.parametrizations.weight_norm(model.head)
        return model

    lib.pair(build).train()


@row("U27", "model.to(torch.float32) after sharding")
def moved(lib: Library) -> None:
    pair = lib.pair(tower)
    pair.model.to(torch.float32)
    pair.plain.to(torch.float32)
    pair.dtype = torch.float32
    for seed in range(2):
        pair.backward(seed)
        pair.step()
    pair.check(1e-6)


@row("basic", "dropout: the random state stays this rank's own")
def dropout(lib: Library) -> None:
    class Drops(Tower):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), 0.5)

    pair = lib.pair(Drops)
    torch.manual_seed(7)
    found = pair.model(data(0))
    torch.manual_seed(7)
    compare({"y": found}, {"y": pair.plain(data(0))})


@row("basic", "two models trained in turn, as a GAN's")
def two_models(lib: Library) -> None:
    made, judged = lib.pair(tower), lib.pair(lambda: nn.Linear(2, 1))
    for seed in range(2):
        for pair in (made, judged):
            judged.model(made.model(data(seed))).square().mean().backward()
            losses = [
                judged.plain(made.plain(data(seed, r))).square().mean() for r in range(world())
            ]
            (sum(losses) / world()).backward()
            for optim in pair.optims:
                optim.step()
            for other in (made, judged):
                for optim in other.optims:
                    optim.zero_grad()
    made.check()
    judged.check()


@row("basic", "ranks with batches of different sizes")
def other_sizes(lib: Library) -> None:
    pair = lib.pair(tower)
    sizes = [2, 5]
    square(pair.model, data(0, None, sizes[dist.get_rank()], 6)).backward()
    losses = [square(pair.plain, data(0, r, n, 6)) for r, n in enumerate(sizes)]
    (sum(losses) / world()).backward()
    pair.check_grads()
