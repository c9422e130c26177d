"""Models and ways to compile them, and a trial that trains each beside the uncompiled model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import fsdp_compose as fc
from fsdp_compose.sharded import is_sharded

from models import (
    WIDTH,
    Block,
    Tolerance,
    assert_at_rest,
    by_block,
    compare,
    data,
    seeded,
    sgd,
)

Call = Callable[[Tensor], Any]


Loss = Callable[[nn.Module, Call, Tensor], Tensor]


def import_compiler() -> None:
    """What the compiler imports on first use, once instead of in every rank."""
    torch.compile(lambda x: x.sin(), backend="aot_eager")(torch.ones(1, requires_grad=True))
    torch._dynamo.reset()


class Line(nn.Module):
    """Units without a loop between them, and operations of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.a, self.b = Block(), Block()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(torch.sin(self.first(x))) * 2).cos())

    encode = forward


class Checkpointed(Line):
    def forward(self, x: Tensor) -> Tensor:
        for block in (self.a, self.b):
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def mean_square(model: nn.Module, call: Call, x: Tensor) -> Tensor:
    loss = call(x).square().mean()
    loss.backward()
    return loss


def blocks(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, Block)]


@dataclass
class Trial:
    """Compiled and sharded, only sharded, and one process; ``prepare`` shards, and compiles."""

    rank: int
    world: int
    build: Callable[[], nn.Module]
    prepare: Callable[[nn.Module, Any], Call | None]  # with a backend, or None: do not compile
    backend: str = "eager"
    loss: Loss = mean_square
    optimizer: Any = sgd
    tolerance: Tolerance = field(default_factory=Tolerance)
    exact: bool = True  # else as near to the uncompiled model as to the plain one
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        self.counter = CompileCounterWithBackend(self.backend)
        self.model, self.sharded, self.plain = (seeded(self.build).to(self.dtype) for _ in range(3))
        call = self.prepare(self.model, self.counter)
        self.call = self.model if call is None else call
        self.prepare(self.sharded, None)
        self.optimizers = [
            self.optimizer([p for p in m.parameters() if p.requires_grad])
            for m in (self.model, self.sharded, self.plain)
        ]

    def step(self, seed: int, *shape: int) -> None:
        xs = [data(seed, r, *shape, dtype=self.dtype) for r in range(self.world)]
        mine = self.loss(self.model, self.call, xs[self.rank])
        assert_at_rest(self.model)
        other = self.loss(self.sharded, self.sharded, xs[self.rank])
        if self.exact:
            assert torch.equal(mine, other), "compiled and uncompiled losses differ"
        for (name, param), ours in zip(
            self.sharded.named_parameters(), self.model.parameters(), strict=True
        ):
            assert param.grad is None or is_sharded(param.grad)
            assert (param.grad is None) == (ours.grad is None), name
        for rank, x in enumerate(xs):
            loss = plain_loss(self.plain, x) / self.world
            loss.backward()
            if rank == self.rank:
                compare(
                    "loss", mine.detach().to(loss.dtype), loss.detach() * self.world, self.tolerance
                )
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def run(self, graphs: int, shapes: tuple[tuple[int, ...], ...] = ((),), steps: int = 2) -> None:
        """A step per shape compiles ``graphs`` graphs; further ones must not compile any."""
        for seed, shape in enumerate(shapes):
            self.step(seed, *shape)
        assert self.counter.frame_count == graphs
        with torch.compiler.set_stance("fail_on_recompile"):
            for seed in range(steps):
                self.step(10 + seed, *shapes[seed % len(shapes)])
        assert self.counter.frame_count == graphs
        self.check()

    def check(self) -> None:
        found, again = fc.state_dict(self.model), fc.state_dict(self.sharded)
        wanted = self.plain.state_dict()
        assert list(found) == list(again) == list(wanted)
        for name, value in wanted.items():
            if self.exact:
                assert torch.equal(found[name], again[name]), name
            compare(name, found[name], value, self.tolerance)


def plain_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def shard_then_compile(model: nn.Module, backend: Any) -> None:
    by_block(model)
    for block in blocks(model) if backend else ():
        block.compile(backend=backend, fullgraph=True)
