"""``undo`` gives the plain model back, and a deep copy is an independent sharded model."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose import (
    MixedPrecision,
    Prefetch,
    ShardingStrategy,
    fully_shard,
    refresh,
    undo,
)
from fsdp_compose.core.guards.moved_parameters import shard_of
from fsdp_compose.sharded import is_sharded

from harness import run_ranks, simulate_ranks
from models import (
    SHARDS,
    WIDTH,
    Tower,
    Twin,
    adamw,
    assert_at_rest,
    by_block,
    data,
    nested,
    one_unit,
    seeded,
    sgd,
    square,
    units,
    whole,
)


def snapshot(module: nn.Module) -> dict[str, Any]:
    """What a person could see of a module: keys, hooks, and the objects they hold."""
    tables = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks",
              "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
              "_forward_hooks_always_called", "_state_dict_hooks", "_state_dict_pre_hooks",
              "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")  # fmt: skip
    seen: dict[str, Any] = {}
    for name, sub in module.named_modules():
        seen[f"{name} keys"] = sorted(vars(sub))
        seen[f"{name} class"] = type(sub)
        for table in tables:
            if table in vars(sub):
                seen[f"{name} {table}"] = dict(vars(sub)[table])
    return seen


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
def test_undo(trained: bool, world: int) -> None:
    def build() -> nn.Module:
        model = Tower(2)
        model.transposed = nn.Parameter(torch.randn(4, 3).t())
        model.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        model.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        model.empty = nn.Parameter(torch.empty(0, 3))
        model.scalar = nn.Parameter(torch.randn(()))
        model.register_buffer("count", torch.arange(3))
        return model

    def ranks(rank: int) -> None:
        model, plain = seeded(build), seeded(build)
        model.head.weight.grad = torch.full_like(model.head.weight, 2.0)
        hook = lambda m, a: None  # noqa: E731
        model.blocks[0].register_forward_pre_hook(hook)
        ids, before = [id(p) for p in model.parameters()], snapshot(model)
        strides = [p.stride() for p in model.parameters()]
        by_block(model)
        if trained:
            square(model, data(0, rank)).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(2)
            square(model, data(0, rank))
        full = {n: whole(p) for n, p in model.named_parameters()}
        grads = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        assert undo(model) is model
        assert [id(p) for p in model.parameters()] == ids
        assert snapshot(model) == before
        assert [p.stride() for p in model.parameters()] == strides
        for name, param in model.named_parameters():
            assert type(param) is nn.Parameter and param.is_leaf
            assert set(vars(param)) == set()
            assert torch.equal(param, full[name]), name
            scale = 2 if trained else 1
            assert torch.equal(param, plain.get_parameter(name) * scale), name
            if name in grads:
                assert type(param.grad) is Tensor and torch.equal(param.grad, grads[name])
            else:
                assert param.grad is None
        assert model.head.weight.grad is not None
        model.zero_grad()
        plain.load_state_dict(model.state_dict())
        square(model, data(3, rank)).backward()
        square(plain, data(3, rank)).backward()
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters()):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                assert torch.equal(ours.grad, theirs.grad), name
        copy.deepcopy(model)
        torch.save(model.state_dict(), io.BytesIO())

    run_ranks(ranks, world)


def test_undo_restores_buffers_and_hooks_of_parameters() -> None:
    def ranks(rank: int) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).double()
        log: list[str] = []
        model[0].weight.register_hook(lambda g: log.append("hook"))
        model[0].bias.register_post_accumulate_grad_hook(lambda p: log.append("post"))
        fully_shard(model, mp_policy=MixedPrecision(buffer_dtype=torch.float32))
        assert model[1].running_mean.dtype == torch.float32
        assert model[1].num_batches_tracked.dtype == torch.int64
        undo(model)
        assert model[1].running_mean.dtype == torch.float64
        square(model, data(0, rank)).backward()
        assert sorted(log) == ["hook", "post"]

    run_ranks(ranks)


@pytest.mark.parametrize("path", ["", "blocks.1"])
def test_undo_of_a_shallow_copy_is_refused(path: str) -> None:
    """``copy.copy`` shares the parameters of the original, which stays sharded."""
    model = by_block(seeded(Tower))
    shallow = copy.copy(model.get_submodule(path))
    with pytest.raises(ValueError, match=r"module is a shallow copy \(copy.copy\) of"):
        undo(shallow)
    with pytest.raises(ValueError, match=r"'0' of module is a shallow copy"):
        undo(nn.Sequential(shallow))
    assert all(map(is_sharded, model.parameters()))
    undo(model)
    assert not any(map(is_sharded, model.parameters()))


def test_undo_inside_a_forward_is_refused() -> None:
    """The error says when to call it; forward, backward and undo work after it."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(lambda: Tower(2)))
        found: list[str] = []

        def undo_here(module: nn.Module, args: Any) -> None:
            with pytest.raises(RuntimeError, match=r"undo: unit .* is inside its forward"):
                undo(model)
            found.append("refused")

        model.blocks[1].register_forward_pre_hook(undo_here)
        square(model, data(0, rank)).backward()
        assert found == ["refused"] and not fc.units_of(undo(model))

    run_ranks(ranks, 2)


def test_undo_in_inference_mode() -> None:
    """Parameters, gradients and buffers are trained on, as those that ``refresh`` gives back."""

    def ranks(rank: int) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double()
        model.register_buffer("seen", torch.zeros(2).double())
        fully_shard(model, mp_policy=MixedPrecision(buffer_dtype=torch.float32))
        square(model, data(0, rank)).backward()
        removed, model[0].bias = model[0].bias, None
        with torch.inference_mode():
            refresh(model)
            undo(model)
        found = [removed, *model.parameters(), *model.buffers()]
        found += [p.grad for p in model.parameters()]
        assert len(found) == 8 and not any(tensor.is_inference() for tensor in found)
        assert model.seen.dtype is torch.float64  # refresh did not take it for a new one
        optim = sgd(model.parameters())
        square(model, data(1, rank)).backward()
        optim.step()

    simulate_ranks(ranks, 2)


def test_sharding_again_after_undo() -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Tower(2))
        twin.train()
        undo(twin.model)
        for again in (lambda m: fully_shard(m, strategy=ShardingStrategy.SHARD_GRAD_OP), nested):
            again(twin.model)
            twin.optim = sgd(twin.model.parameters())
            twin.plain_optim = sgd(twin.plain[0].parameters())
            twin.train()
            undo(twin.model)

    run_ranks(ranks)


def test_what_lives_on_after_undo_is_expected_nowhere() -> None:
    """A caught exception may keep a unit until garbage is collected, on some ranks only."""

    def ranks(rank: int) -> None:
        shard = lambda model: one_unit(model, prefetch=Prefetch(1, 2))  # noqa: E731
        twin = Twin(rank, 2, Tower, shard)
        kept = units(twin.model) if rank == 0 else []
        square(twin.model, data(0, rank))
        undo(twin.model)
        shard(twin.model)
        twin.train(steps=2)
        assert len(kept) == (rank == 0)

    run_ranks(ranks)


def test_undo_of_a_part() -> None:
    """One block becomes plain; it then belongs to nobody, so it is not reduced."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(lambda: Tower(2)))
        undo(model.blocks[0])
        assert not is_sharded(model.blocks[0].up.weight) and is_sharded(model.first.weight)
        with pytest.raises(RuntimeError, match=r"not sharded.*blocks\.0\.up\.weight.*refresh"):
            model(data(0, rank))
        model.blocks[0].requires_grad_(False)
        square(model, data(0, rank)).backward()
        assert_at_rest(model)
        with pytest.raises(ValueError, match="undo: Block is not a unit"):
            undo(model.blocks[0])
        undo(model)
        assert not any(is_sharded(p) for p in model.parameters())

    run_ranks(ranks)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("shard", SHARDS)
def test_a_deep_copy_is_independent_and_trains(shard: str, steps: int) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Tower(2), SHARDS[shard], optimizer=adamw)
        if steps:
            twin.train(steps=steps)
        before = [whole(p) for p in twin.model.parameters()]
        copied = Twin.__new__(Twin)
        copied.__dict__.update(vars(twin))
        copied.model = copy.deepcopy(twin.model)
        plain = copy.deepcopy(twin.plain[0])
        from models import replicas

        copied.plain = replicas(plain, 2)
        copied.optim, copied.plain_optim = (
            adamw(copied.model.parameters()),
            adamw(plain.parameters()),
        )
        assert not {id(p) for p in copied.model.parameters()} & {
            id(p) for p in twin.model.parameters()
        }
        for unit, other in zip(units(copied.model), units(twin.model), strict=True):
            assert unit is not other
            for mine, theirs in zip(unit.buckets, other.buckets, strict=True):
                assert shard_of(mine).data_ptr() != shard_of(theirs).data_ptr()
        copied.train()
        for param, value in zip(twin.model.parameters(), before):
            assert torch.equal(whole(param), value)
        twin.train()
        copied.train()
        del twin.model
        copied.train()
        undo(copied.model)

    run_ranks(ranks)


def test_deep_copy_of_a_part_and_inside_a_larger_copy() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(lambda: Tower(2)))
        block = copy.deepcopy(model.blocks[0])
        holder = copy.deepcopy({"a": model, "b": model, "c": [model.blocks[1]]})
        assert holder["a"] is holder["b"] and holder["c"][0] is holder["a"].blocks[1]
        x = data(0, rank)
        torch.testing.assert_close(block(x), model.blocks[0](x))
        torch.testing.assert_close(holder["a"](x), model(x))
        square(block, x).backward()
        assert all(p.grad is not None for p in block.parameters())
        assert all(p.grad is None for p in model.blocks[0].parameters())
        with torch.no_grad():
            for p in block.parameters():
                p.zero_()
        assert not block(x).sub(x).any() and model.blocks[0](x).sub(x).any()

    run_ranks(ranks)


def test_deep_copy_of_recurrent_and_two_bucket_models() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GRU(WIDTH, 3))
        model[0].bias.requires_grad_(False)
        return model

    forward = lambda m, x: m(x)[0].square().mean()  # noqa: E731

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, build, one_unit)
        twin.train(forward)
        twin.model = copy.deepcopy(twin.model)
        twin.optim = sgd(p for p in twin.model.parameters() if p.requires_grad)
        twin.plain_optim = sgd(p for p in twin.plain[0].parameters() if p.requires_grad)
        twin.train(forward)

    run_ranks(ranks)


@pytest.mark.parametrize("save", [pickle.dumps, lambda m: torch.save(m, io.BytesIO())])
def test_pickling_is_refused_and_says_what_to_do(save: Callable[[Any], Any]) -> None:
    def ranks(rank: int) -> None:
        model = by_block(Tower(1))
        for module in (model, model.blocks[0], nn.Sequential(model)):
            with pytest.raises(TypeError, match=r"state_dict\(module, kind='full'\)"):
                save(module)

    run_ranks(ranks)


def test_an_optimizer_used_across_undo() -> None:
    """Its state stays cut, which its step says; converted as the error says, it goes on."""

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower, by_block, adamw)
        twin.backward(square, 0)
        twin.step()
        saved = fc.optim_state_dict(twin.model, twin.optim, kind="full")
        undo(twin.model)
        inputs = twin.inputs(1)
        for model in (twin.model, twin.reference):
            torch.stack([square(model, x) for x in inputs]).mean().backward()
        new = adamw(twin.model.parameters())
        fc.load_optim_state_dict(twin.model, new, saved)
        new.step()
        twin.plain_optim.step()
        for ours, plain in zip(twin.model.parameters(), twin.reference.parameters(), strict=True):
            assert torch.allclose(ours, plain)
        with pytest.raises(RuntimeError, match=r"cut through undo, .*kind='full'.*build a new"):
            twin.optim.step()

    simulate_ranks(check, 2)
