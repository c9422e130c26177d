"""A unit of several modules of which a forward leaves some out, or runs them apart later."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    ShardingStrategy,
    fully_shard,
    set_is_last_backward,
    set_requires_gradient_sync,
)

from harness import run_ranks, simulate_ranks
from models import (
    WIDTH,
    Twin,
    assert_at_rest,
    data,
    mesh_of_replicas,
    seeded,
    sgd,
    square,
    units,
    whole,
)

CHUNKS = 3


class Headed(nn.Module):
    """A language model whose head the caller may run itself."""

    def __init__(self, tied: bool = False, recomputes: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.recomputes = recomputes
        if tied:
            self.head.weight = self.first.weight

    def forward(self, x: Tensor, skips: bool = True) -> Tensor:
        x = checkpoint(self.body, x, use_reentrant=False) if self.recomputes else self.body(x)
        return x if skips else self.head(x)

    def body(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x).tanh())


def together(model: nn.Module, **options: Any) -> nn.Module:
    is_tied = model.head.weight is model.first.weight
    fully_shard([*([model.first] if is_tied else []), model.norm, model.head], **options)
    return fully_shard(model, **options)


def train_on_chunks(model: nn.Module, x: Tensor, share: int) -> None:
    """The loss of each chunk is differentiated before the next is computed; then the rest."""
    hidden = model(x)
    grads = []
    for chunk in hidden.detach().chunk(CHUNKS, dim=1):
        chunk = nn.functional.pad(chunk, (0, WIDTH - chunk.shape[1])).requires_grad_()
        (model.head(chunk).square().sum() / share).backward()
        grads.append(chunk.grad[:, : WIDTH // CHUNKS])
    hidden.backward(torch.cat(grads, dim=1))


@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_a_head_on_chunks_of_the_rest(strategy: ShardingStrategy) -> None:
    """Its gradients join those of the rest, also over microbatches that are reduced once."""
    hybrid = "HYBRID" in strategy.name
    world = 4 if hybrid else 2

    def ranks(rank: int) -> None:
        for tied, recomputes, waits in product((False, True), repeat=3):
            mesh = mesh_of_replicas(2, 2) if hybrid else None
            shard = lambda m: together(m, strategy=strategy, mesh=mesh)  # noqa: E731
            twin = Twin(rank, world, lambda: Headed(tied, recomputes), shard)
            for seed in range(4):
                is_last = seed % 2 == 1
                if waits:
                    set_requires_gradient_sync(twin.model, is_last)
                    set_is_last_backward(twin.model, is_last)
                train_on_chunks(twin.model, data(seed, rank), 1)
                for plain, x in zip(twin.plain, twin.inputs(seed), strict=True):
                    train_on_chunks(plain, x, world)
                if is_last:
                    assert_at_rest(twin.model)
                    twin.step()
            twin.check()

    simulate_ranks(ranks, world)


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_module_is_left_out(recomputes: bool) -> None:
    """The parameters are back after the forward: for clipping, an optimizer made then, and more."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Headed(recomputes=recomputes), together)
        with torch.no_grad():
            twin.model(data(9, rank))
        assert_at_rest(twin.model)
        twin.optim = sgd(twin.model.parameters())
        for seed in range(4):
            skips = seed != 2
            twin.backward(lambda model, x: square(lambda y: model(y, skips), x), seed)
            assert_at_rest(twin.model)
            for params in (twin.model.parameters(), twin.reference.parameters()):
                torch.nn.utils.clip_grad_norm_(params, 0.1)
            twin.step()
        twin.check()

    run_ranks(ranks)


def test_left_out_in_a_functional_call() -> None:
    """The unit is closed where the outermost forward computes on tensors of the caller."""

    def ranks(rank: int) -> None:
        model, plain = seeded(Headed), seeded(Headed)
        together(model)
        given = {"first.weight": torch.eye(WIDTH, dtype=torch.float64)}
        out = functional_call(model, given, (data(0, rank),))
        assert all(isinstance(param, nn.Parameter) for param in model.parameters())
        out.square().mean().backward()
        for other in range(2):
            loss = functional_call(plain, given, (data(0, other),)).square().mean()
            (loss / 2).backward()
        torch.testing.assert_close(whole(model.norm.weight.grad), plain.norm.weight.grad)
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_a_forward_fails_with_modules_left_out() -> None:
    """The next step is right, and gradients from before are there."""

    class Failing(Headed):
        fails = False

        def forward(self, x: Tensor, skips: bool = True) -> Tensor:
            out = super().forward(x, skips)
            if self.fails:
                raise ValueError("a bad batch")
            return out

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Failing, together)
        twin.backward(square, 0)
        twin.model.fails = True
        with pytest.raises(ValueError, match="a bad batch"):
            twin.model(data(1, rank))
        twin.model.fails = False
        assert all(isinstance(param, nn.Parameter) for param in twin.model.parameters())
        twin.backward(square, 2)
        twin.step()
        twin.check()

    simulate_ranks(ranks)


class Opaque(nn.Linear):
    """Returns what cannot be looked into."""

    def forward(self, x: Tensor) -> Any:
        return iter([super().forward(x)])


class Mixed(nn.Module):
    """Backward reaches the opaque output, and the other module's not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.lead, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.opaque = Opaque(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lead(x)
        hidden = next(self.opaque(x))
        return self.last(x.sin()).detach() + hidden.tanh().cos()


@pytest.mark.filterwarnings("ignore:unit .* returned:UserWarning")
def test_a_hidden_output_of_one_module() -> None:
    """The unit stays gathered for it, whatever its other modules return later."""

    def shard(model: nn.Module) -> None:
        fully_shard([model.opaque, model.last])
        fully_shard(model)

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Mixed, shard)
        twin.train(steps=4)

    simulate_ranks(ranks)


class Begun(Headed):
    """The first module of its unit to run does so without gradients, the next one trains."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        if self.way == "recomputed":
            return self.head(checkpoint(self.norm, x, use_reentrant=True))
        with torch.inference_mode() if self.way == "inference" else torch.no_grad():
            scale = self.norm(x)
        return self.head(x * scale.clone() if self.way == "no_grad" else x)


@pytest.mark.parametrize("way", ["recomputed", "no_grad", "inference"])
def test_a_unit_is_begun_without_gradients(way: str) -> None:
    """What runs with gradients later in the same forward trains, once and over two forwards."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Begun(way), together)
        twin.train()
        twin.train(lambda model, x: square(model, x) + square(model, x * 2))

    simulate_ranks(ranks)


@pytest.mark.parametrize("tied", [False, True])
def test_a_copy_has_one_unit_of_its_modules(tied: bool) -> None:
    """Each of them asks for a copy of its unit, while those of the others are under way."""

    def check(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Headed(tied), together, sgd)
        twin.model = copy.deepcopy(twin.model)
        twin.optim = sgd(twin.model.parameters())
        assert len(units(twin.model)) == 2
        twin.train(lambda model, x: square(lambda y: model(y, skips=False), x))

    run_ranks(check, 2)
