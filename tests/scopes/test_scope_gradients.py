"""Full gradients in a scope, and training through what a scope shows."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_compose import MixedPrecision, fully_shard
from fsdp_compose.base.process import here
from fsdp_compose.scopes.gathered import gathered
from fsdp_compose.sharded import is_sharded

from harness import rank_errors, run_ranks
from models import (
    EVERY_SHARD,
    WIDTH,
    Tower,
    Twin,
    adamw,
    assert_at_rest,
    by_block,
    compare,
    data,
    one_unit,
    seeded,
    square,
    train_twin,
    units,
    whole,
)
from scoped_models import both

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("shard", EVERY_SHARD.values(), ids=EVERY_SHARD)
def test_with_grads_shows_and_writes_full_gradients(world: int, shard: Callable[..., Any]) -> None:
    def check(rank: int) -> None:
        twin = Twin(rank, world, Tower, shard)
        twin.backward(square, 0)
        with gathered(twin.model, with_grads=True):
            for p, q in zip(twin.model.parameters(), twin.reference.parameters()):
                compare("gradient", p.grad, q.grad, twin.tolerance)
        with gathered(twin.model, with_grads=True, writeback=True):
            twin.model.head.weight.grad.mul_(2)
            twin.model.head.bias.grad = torch.ones(2).double()
            twin.model.first.bias.grad = None
        head = twin.reference.head
        head.weight.grad.mul_(2)
        head.bias.grad = torch.ones(2).double()
        twin.reference.first.bias.grad = None
        assert twin.model.first.bias.grad is None
        twin.step()
        twin.check()

    run_ranks(check, world)


def test_an_edited_gradient_needs_writeback() -> None:
    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.backward(square, 0)
        with gathered(twin.model, with_grads=True):
            twin.model.head.weight.grad.zero_()

    for error in rank_errors(check, 2):
        assert error is not None and "gradient of parameter 'head.weight'" in error


def test_no_gradients_is_none() -> None:
    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        with gathered(model, with_grads=True):
            assert all(p.grad is None for p in model.parameters())

    run_ranks(check, 2)


def test_ranks_that_cleared_other_gradients() -> None:
    """They would see zeros in the place of each other's slices."""

    def train(rank: int) -> None:
        model = one_unit(seeded(Tower))
        square(model, data(0, rank)).backward()
        list(model.parameters())[rank].grad = None
        with gathered(model, with_grads=True):
            pass

    for error in rank_errors(train, 2):
        assert "ranks do different things" in error and "'first.weight'" in error


def test_with_grads_refuses_open_accumulation() -> None:
    """``with_grads`` during open accumulation is an error."""

    def check(rank: int) -> None:
        from fsdp_compose.scopes.switches import no_sync

        model = by_block(seeded(Tower))
        with no_sync(model):
            square(model, data(0, rank)).backward()
        with gathered(model, with_grads=True):
            pass

    for error in rank_errors(check, 2):
        assert error is not None and "reduce_grads" in error


@pytest.mark.parametrize("how", ["no_grad", "with_grads", "rank0"])
def test_a_gradient_that_would_get_lost_is_an_error(how: str) -> None:
    def check(rank: int) -> None:
        model = one_unit(seeded(Tower))
        options: dict[str, Any] = {"with_grads": {"with_grads": True}}.get(how, {})
        if how == "rank0":
            options = {"offload_to_cpu": True}
        with torch.set_grad_enabled(how != "no_grad"):
            with gathered(model, **options):
                with torch.enable_grad():
                    loss = model.head.weight.sum()
        loss.backward()

    for error in rank_errors(check, 2):
        assert error is not None and "'head.weight'" in error and "get lost" in error


def chunked_head(model: nn.Module, x: Tensor) -> Tensor:
    """A loss over the head's weight, in chunks, that never calls the head."""
    for module in (model.first, *model.blocks):
        x = module(x)
    with gathered(model.head):
        weight, bias = model.head.weight, model.head.bias
        losses = [F.linear(row, weight, bias).square().mean() for row in x]
    return torch.stack(losses).mean()


def head_unit(model: nn.Module) -> nn.Module:
    """Every child a unit, and no root."""
    for module in (model.first, model.head, *model.blocks):
        fully_shard(module)
    return model


class Chunked(Tower):
    """A tower whose forward uses the head's weight in chunks, inside a scope."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        with gathered(self.head):
            return torch.stack([F.linear(row, self.head.weight, self.head.bias) for row in x])


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("optimizer", [adamw, None], ids=["adamw", "sgd"])
def test_a_chunked_head_trains_after_the_scope(world: int, optimizer: Any) -> None:
    def check(rank: int) -> None:
        options = {} if optimizer is None else {"optimizer": optimizer}
        Twin(rank, world, Tower, head_unit, **options).train(chunked_head)

    run_ranks(check, world)


def test_a_chunked_head_is_gathered_once() -> None:
    """A chunked head is one gather and one reduction."""

    def check(rank: int) -> None:
        model = seeded(Tower)
        fully_shard(model.head)
        here.traffic.reset()
        chunked_head(model, data(0, rank)).backward()
        assert (here.traffic.gathers, here.traffic.reduces) == (1, 1)

    run_ranks(check, 2)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("shard", EVERY_SHARD.values(), ids=EVERY_SHARD)
def test_a_scope_inside_forward(world: int, shard: Callable[..., Any]) -> None:
    train_twin(Chunked, shard=shard, world=world)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_scope_inside_a_checkpointed_forward(reentrant: bool) -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return checkpoint(model, x, use_reentrant=reentrant).square().mean()

    train_twin(Chunked, forward)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("shard", EVERY_SHARD.values(), ids=EVERY_SHARD)
def test_uses_in_forward_and_in_scopes_add_up(world: int, shard: Callable[..., Any]) -> None:
    train_twin(Tower, both, shard, adamw, world=world)


def test_the_model_trains_inside_one_scope() -> None:
    """The whole model trains inside one scope and gathers once."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with gathered(model):
            return model(x).square().mean() + model(x + 1).square().mean()

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.train(forward)
        here.traffic.reset()
        forward(twin.model, data(0, rank)).backward()
        buckets = len(units(twin.model))
        assert (here.traffic.gathers, here.traffic.reduces) == (buckets, buckets)

    run_ranks(check, 2)


def test_backward_inside_a_scope_after_forward() -> None:
    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        for seed in range(2):
            loss, plain = twin.losses(square, seed)
            with gathered(twin.model):
                (loss + twin.model.head.weight.square().mean()).backward()
                assert not is_sharded(twin.model.head.weight)
            (plain + twin.reference.head.weight.square().mean()).backward()
            twin.step()
        twin.check()

    run_ranks(check, 2)


def test_a_forward_in_a_scope_has_the_compute_dtype() -> None:
    def check(rank: int) -> None:
        mp = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = by_block(seeded(Tower).float(), mp_policy=mp)
        x = data(0, rank).float()
        outside = model(x)
        outside.sum().backward()
        wanted = {n: whole(p.grad) for n, p in model.named_parameters()}
        model.zero_grad()
        with gathered(model):
            inside = model(x)
            assert model.head.weight.dtype == torch.float32
        inside.sum().backward()
        assert torch.equal(inside, outside) and inside.dtype == torch.bfloat16
        for name, p in model.named_parameters():
            torch.testing.assert_close(whole(p.grad), wanted[name], msg=name)
        assert_at_rest(model)

    run_ranks(check, 2)


class Partly(nn.Module):
    """Checkpoints its body once or twice over; adds what its own weight gives outside of that."""

    def __init__(self, depth: int, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.depth, self.use_reentrant = depth, use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        body = self.body
        for _ in range(self.depth):
            body = partial(checkpoint, body, use_reentrant=self.use_reentrant)
        return self.outer(body(x)) + x

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class Outer(nn.Module):
    """Two such blocks, which it checkpoints once more together with a part of its own, and one."""

    def __init__(self, depth: int, use_reentrant: bool, around: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Partly(depth, use_reentrant) for _ in range(3))
        self.around = around

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = checkpoint(self.start, x, use_reentrant=self.around)
        return hidden * 2, self.blocks[2](hidden)

    def start(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](torch.tanh(self.first(x))))


def in_single_precision(depth: int, use_reentrant: bool, around: bool) -> nn.Module:
    mp = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float64)
    model = seeded(lambda: Outer(depth, use_reentrant, around).double())
    for block in model.blocks:
        fully_shard(block, mp_policy=mp)
    return fully_shard(model, mp_policy=mp)


def dtypes(model: nn.Module) -> set[torch.dtype]:
    return {p.dtype for p in model.parameters()}


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_parts_recompute_in_the_compute_dtype(
    depth: int, use_reentrant: bool, around: bool
) -> None:
    """Of units in a scope, and of units that are recomputed themselves, also after an error."""

    def check(rank: int) -> None:
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # inner ones
        model = in_single_precision(depth, use_reentrant, around)
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank), requires_grad=True)
        model(x)[1].square().mean().backward()
        wanted = {n: whole(p.grad) for n, p in model.named_parameters()}
        model.zero_grad()
        with gathered(model):
            for hook in (model.first.weight.register_hook, model.first.register_full_backward_hook):
                handle = hook(_fail)
                with pytest.raises(ArithmeticError):
                    model(x)[1].square().mean().backward()
                handle.remove()
                assert dtypes(model) == {torch.float64}
                model.zero_grad()
            model(x)[1].square().mean().backward()
            assert dtypes(model) == {torch.float64}
        for name, p in model.named_parameters():
            torch.testing.assert_close(whole(p.grad), wanted[name], msg=name)
        model.zero_grad()
        assert_at_rest(model)

    run_ranks(check, 2)


def _fail(*_: object) -> None:
    raise ArithmeticError


def test_a_backward_after_the_scope_shows_shards() -> None:
    """And one inside it what its forward read."""

    def check(rank: int) -> None:
        mp = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float64)
        model = fully_shard(Partly(0, False).double(), mp_policy=mp)
        found: list[torch.dtype] = []
        watched = model.outer
        watched.register_full_backward_hook(lambda *_: found.append(watched.weight.dtype))
        with gathered(model):
            loss = model(torch.ones(2, 4)).sum()
            loss.backward(retain_graph=True)
        loss.backward()
        assert found == [torch.float32, torch.float64]

    run_ranks(check, 2)


def test_edits_are_seen_by_a_forward_in_the_scope() -> None:
    def check(rank: int) -> None:
        model, plain = by_block(seeded(Tower)), seeded(Tower)
        with gathered(model, writeback=True):
            for m in (model, plain):
                nn.init.ones_(m.blocks[1].up.weight)
            assert torch.equal(model(data(0, 0)), plain(data(0, 0)))
        compare("out", model(data(0, 0)), plain(data(0, 0)), Twin(rank, 2, Tower).tolerance)

    run_ranks(check, 2)


def test_autograd_grad_and_a_graph_over_gradients() -> None:
    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        x = data(0, rank)
        with gathered(twin.model):
            loss = twin.model(x).square().mean()
        found = torch.autograd.grad(loss, list(twin.model.parameters()), create_graph=True)
        sum(g.square().sum() for g in found).backward()
        plain = torch.stack([square(m, data(0, r)) for r, m in enumerate(twin.plain)]).mean()
        params = list(twin.reference.parameters())
        wanted = torch.autograd.grad(plain, params, create_graph=True)
        sum(g.square().sum() for g in wanted).backward()
        for f, w in zip(found, wanted):
            compare("gradient", whole(f), w.detach(), twin.tolerance)
        twin.check_grads()

    run_ranks(check, 2)


def test_gradient_hooks_see_the_sharded_gradient() -> None:
    def check(rank: int) -> None:
        model = fully_shard(seeded(lambda: nn.Linear(4, 2)))
        seen: list[Any] = []
        model.weight.register_hook(lambda g: g * 2)
        model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(whole(p.grad)))
        with gathered(model):
            loss = model.weight.sum()
        loss.backward()
        assert len(seen) == 1 and torch.equal(seen[0], torch.full((2, 4), 2.0).double())

    run_ranks(check, 2)


def test_unsynchronised_uses_are_reduced_later() -> None:
    from fsdp_compose.scopes.switches import no_sync

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        with no_sync(twin.model):
            twin.backward(both, 0)
            twin.backward(both, 1)
        twin.backward(both, 2)
        twin.step()
        twin.check()

    run_ranks(check, 2)


def test_a_scope_without_backward_frees_its_memory() -> None:
    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        gc.disable()
        with gathered(model):
            storage = torch.multiprocessing.reductions.StorageWeakRef(
                model.head.weight.untyped_storage()
            )
            loss = model.head.weight.sum()
        assert not storage.expired() or loss is not None
        del loss
        assert storage.expired()

    run_ranks(check, 2)


def test_nested_scopes_share_their_tensors() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with gathered(model):
            outer = model.head.weight
            with gathered(model.head), gathered(model):
                assert model.head.weight is outer
                return model(x).square().mean() + model.head.weight.square().sum()

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.train(forward)
        here.traffic.reset()
        forward(twin.model, data(0, rank)).backward()
        assert here.traffic.gathers == len(units(twin.model))

    run_ranks(check, 2)


def test_an_outer_scope_sees_an_inner_scopes_edit() -> None:
    """An inner scope writes and all around it have the edit."""

    def check(rank: int) -> None:
        model = one_unit(seeded(Tower))
        with gathered(model), gathered(model):
            with gathered(model, writeback=True):
                nn.init.ones_(model.head.weight)
                model.head.bias = nn.Parameter(torch.full((2,), 4.0).double())
            assert torch.equal(model.head.bias, torch.full((2,), 4.0).double())
        assert torch.equal(whole(model.head.weight), torch.ones(2, WIDTH).double())
        assert torch.equal(whole(model.head.bias), torch.full((2,), 4.0).double())

    run_ranks(check, 2)


def test_an_inner_edit_is_written_by_the_outer_scope() -> None:
    def check(rank: int) -> None:
        model = one_unit(seeded(Tower))
        with torch.no_grad(), gathered(model, writeback=True):
            with torch.enable_grad(), gathered(model):
                nn.init.ones_(model.head.weight)
        assert torch.equal(whole(model.head.weight), torch.ones(2, WIDTH).double())

    run_ranks(check, 2)


def test_tied_weights_across_units() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))

    def shard(model: nn.Module) -> None:
        fully_shard(model.a)
        fully_shard(model.b)
        fully_shard(model)

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with gathered(model.b):
            assert model.a.weight is model.b.weight and not is_sharded(model.a.weight)
            use = (x @ model.b.weight.T + model.b.bias).square().mean()
            inside = model(x).square().mean()
        return use + inside + square(model, x)

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tied, shard)
        twin.train(forward)
        with gathered(twin.model.a, writeback=True):
            nn.init.ones_(twin.model.b.weight)
        assert torch.equal(whole(twin.model.a.weight), torch.ones(WIDTH, WIDTH).double())

    run_ranks(check, 2)


def test_frozen_units_train_through_the_scope() -> None:
    def build() -> nn.Module:
        model = Tower()
        model.blocks.requires_grad_(False)
        model.first.weight.requires_grad_(False)
        return model

    for shard in EVERY_SHARD.values():
        train_twin(build, both, shard)
