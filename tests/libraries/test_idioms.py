"""What model libraries do around their weights: caches, passed-on tensors, tying, exports."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose import Prefetch, ShardedWeightError, fully_shard, wrap

from harness import rank_errors, run_ranks
from models import WIDTH, Tower, assert_at_rest, by_block, compare, data, seeded, whole
from models import Tolerance as Near


class Passing(nn.Module):
    """A layer that hands on what the first layer made of the input, as relative positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        bias = self.up(x).sin() if bias is None else bias
        return x + torch.tanh(self.up(x) + bias), bias


class Caching(nn.Module):
    """A layer that puts a tensor into a list it was given, and reads what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        cache.append(torch.tanh(self.key(torch.tanh(self.first(x)))))
        return x + self.out(sum(cache))


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Module], depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, caches: list[Any] | None = None) -> Tensor:
        passed = None
        for i, block in enumerate(self.blocks):
            if caches is not None:
                x = block(x, caches[i])
            else:
                x, passed = block(x, passed)
        return self.head(x)


def pair(kind: type[nn.Module], **options: Any) -> tuple[nn.Module, nn.Module]:
    """(sharded, plain)"""
    model = seeded(lambda: Stack(kind))
    return fully_shard(model, units=wrap.by_class({kind}), **options), seeded(lambda: Stack(kind))


def check_grads(model: nn.Module, plain: nn.Module) -> None:
    assert_at_rest(model)
    for (name, param), theirs in zip(model.named_parameters(), plain.parameters()):
        compare(f"gradient of {name}", whole(param.grad), theirs.grad, Near())


def test_a_tensor_passed_on_gathers_nothing() -> None:
    def step(rank: int) -> None:
        model, plain = pair(Passing)
        for seed in range(2):
            with fc.count_traffic() as traffic:
                model(data(seed, rank)).square().mean().backward()
            assert traffic.gathers == 2 * 3 + 1
            batch = torch.cat([data(seed, 0), data(seed, 1)])
            plain(batch).square().mean().backward()
            check_grads(model, plain)

    run_ranks(step, 2)


def through_cache(model: nn.Module, first: Tensor, second: Tensor, used: bool = False) -> Tensor:
    """The loss of a forward that reads what another, of ``first``, left in the caches."""
    caches: list[list[Tensor]] = [[], [], []]
    before = model(first, caches)
    loss = model(second, caches).square().mean()
    return loss + 0 * before.sum() if used else loss


@pytest.mark.parametrize("how", ["gathered", "used"])
def test_backward_through_a_cache_equals_one_process(how: str) -> None:
    def step(rank: int) -> None:
        model, plain = pair(Caching)
        xs = data(0, rank), data(1, rank)
        if how == "gathered":
            with fc.gathered(model):
                loss = through_cache(model, *xs)
        else:
            loss = through_cache(model, *xs, used=True)
        loss.backward()
        batches = [torch.cat([data(seed, 0), data(seed, 1)]) for seed in range(2)]
        through_cache(plain, *batches).backward()
        check_grads(model, plain)

    run_ranks(step, 2)


def test_backward_through_a_cache_raises() -> None:
    """Backward meets the last unit's first forward, of which the loss has only the cache.

    The backward order of the step before has that unit gathered ahead at this moment, in a buffer
    that is being filled; without a check, gradients are wrong and nobody is told.
    """

    def step(rank: int) -> None:
        model, _ = pair(Caching, prefetch=Prefetch(forward=3, backward=3))
        xs = data(0, rank), data(1, rank)
        through_cache(model, *xs, used=True).backward()
        through_cache(model, *xs).backward()

    for error in rank_errors(step, 2):
        assert error.startswith("RuntimeError: backward computed with weights of unit 'blocks.2'")
        assert "key-value cache" in error and "with fsdp_compose.gathered(model):" in error


def test_a_sharded_bias_is_fitted_to_its_weight() -> None:
    """As ``tie_weights`` does: pad by what is missing, which is nothing, and assign ``.data``."""

    def step(rank: int) -> None:
        model = by_block(seeded(Tower))
        bias = model.head.bias
        before = whole(bias)
        bias.data = F.pad(bias.data, (0, model.head.weight.shape[0] - bias.shape[0]), "constant", 0)
        assert model.head.bias is bias and torch.equal(whole(bias), before)
        model(data(0, rank)).sum().backward()
        assert torch.equal(whole(bias.grad), torch.full((2,), 3.0, dtype=torch.float64))
        with pytest.raises(ShardedWeightError, match=r"pad needs the whole of 'head\.bias'"):
            F.pad(bias.data, (0, 1))

    run_ranks(step, 2)


def test_state_dict_inside_gathered_is_full() -> None:
    """What is read from it stays what it was when the scope is left and training goes on."""

    def step(rank: int) -> None:
        model, plain = by_block(seeded(Tower)), seeded(Tower)
        with fc.gathered(model):
            found = model.state_dict()
        for param in model.parameters():
            param.detach().zero_()
        wanted = plain.state_dict()
        assert list(found) == list(wanted)
        for key, value in found.items():
            assert type(value) is Tensor and torch.equal(value, wanted[key]), key

    run_ranks(step, 2)


def test_data_parallel_around_it_is_refused() -> None:
    """As trainers wrap what they are given; it would replace every slice by that of rank 0."""

    def wrap_it(rank: int) -> None:
        model, plain = by_block(seeded(Tower)), seeded(Tower)
        with pytest.raises(RuntimeError, match=r"given 'first\.weight', which is sharded"):
            nn.parallel.DistributedDataParallel(model)
        for param, theirs in zip(model.parameters(), plain.parameters()):
            assert torch.equal(whole(param), theirs)
        plain.extra = fully_shard(nn.Linear(2, 2).double())
        names = [f"extra.{name}" for name, _ in plain.extra.named_parameters()]
        replicate = nn.parallel.DistributedDataParallel
        replicate._set_params_and_buffers_to_ignore_for_model(plain, names)
        wrapped = replicate(plain)
        wrapped.module.extra(wrapped(data(0, rank))).sum().backward()
        assert whole(plain.extra.weight.grad).any() and plain.head.weight.grad.any()

    run_ranks(wrap_it, 2)
