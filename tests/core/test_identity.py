"""A sharded model is the same model: its objects, names, hooks, ties, memory; and the way back."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    Prefetch,
    ShardingStrategy,
    fully_shard,
    get_state,
    is_fully_sharded,
    undo,
    wrap,
)
from fsdp_compose.base.torch_private import SCRIPT_HOOK
from fsdp_compose.core.state import STATE_KEY
from fsdp_compose.sharded import ShardedWeightError, is_sharded

from harness import run_ranks
from models import (
    SHARDS,
    WIDTH,
    Block,
    Tower,
    Twin,
    adamw,
    assert_at_rest,
    by_block,
    compare,
    data,
    nested,
    one_unit,
    seeded,
    sgd,
    square,
    units,
    whole,
)

# The optimizer sees the parameters that train


@pytest.mark.parametrize("when", ["before", "after", "after evaluation", "after a step"])
@pytest.mark.parametrize("make", [sgd, adamw], ids=["sgd", "adamw"])
def test_optimizer_built_at_any_time_trains_every_parameter(
    when: str, make: Callable[..., Any]
) -> None:
    def ranks(rank: int) -> None:
        model, plain = seeded(lambda: Tower(2)), seeded(lambda: Tower(2))
        ids = [id(p) for p in model.parameters()]
        optim = make(model.parameters()) if when == "before" else None
        by_block(model)
        if when == "after evaluation":
            with torch.no_grad():
                model(data(5, rank))
        if when == "after a step":
            square(model, data(5, rank)).backward()
            model.zero_grad()
        optim = optim or make(model.parameters())
        wanted = make(plain.parameters())
        for step in range(3):
            square(model, data(step, rank)).backward()
            square(plain, torch.cat([data(step, 0), data(step, 1)])).backward()
            before = [whole(p) for p in model.parameters()]
            optim.step()
            wanted.step()
            after = [whole(p) for p in model.parameters()]
            assert not any(torch.equal(a, b) for a, b in zip(before, after))
            optim.zero_grad()
            wanted.zero_grad()
            assert [id(p) for p in model.parameters()] == ids
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters()):
            torch.testing.assert_close(whole(ours), theirs.detach(), msg=name)

    run_ranks(ranks)


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


def test_the_state_can_be_printed() -> None:
    """Also while nothing is gathered: what is not in memory may not be read."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(lambda: Tower(1)))
        state = get_state(model)
        for _ in range(2):
            for value in (state, state.unit, *state.unit.buckets, *state.unit.buckets[0].entries):
                assert "object at" in repr(value) or len(repr(value)) < 10_000
            square(model, data(0, rank)).backward()

    run_ranks(ranks)


def test_class_names_and_structure_stay() -> None:
    def ranks(rank: int) -> None:
        model = seeded(lambda: Tower(2))
        classes = [type(m) for m in model.modules()]
        keys = {name: set(vars(m)) for name, m in model.named_modules()}
        names = [n for n, _ in model.named_parameters()]
        text, params = repr(model), list(model.parameters())
        shapes = [(p.shape, p.stride(), p.dtype, p.requires_grad, p.numel()) for p in params]
        by_block(model)

        def check() -> None:
            assert [type(m) for m in model.modules()] == classes
            assert [n for n, _ in model.named_parameters()] == names
            assert repr(model) == text
            assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
            found = [(p.shape, p.stride(), p.dtype, p.requires_grad, p.numel()) for p in params]
            assert found == shapes
            assert all(isinstance(p, nn.Parameter) for p in params)
            assert list(model.state_dict()) == names
            for name, module in model.named_modules():
                more = set(vars(module)) - keys[name]
                # The second is what torch.jit.script asks a module for, and is refused by.
                added = {STATE_KEY, SCRIPT_HOOK} if is_fully_sharded(module) else set()
                assert more == added, name

        check()
        square(model, data(0, rank)).backward()
        check()
        assert [m for m in model.modules() if is_fully_sharded(m)] == [model, *model.blocks]
        assert get_state(model).unit is units(model)[0]
        with pytest.raises(ValueError, match="Linear has no sharded state"):
            get_state(model.first)

    run_ranks(ranks)


# Memory


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("after", ["sharding", "training", "evaluation", "dropped loss", "error"])
def test_deleting_the_model_frees_it_at_once(after: str, world: int) -> None:
    def ranks(rank: int) -> None:
        for strategy in (None, ShardingStrategy.SHARD_GRAD_OP):
            model = seeded(lambda: Tower(2))
            by_block(model, strategy=strategy)
            optim = sgd(model.parameters())
            x = data(0, rank)
            if after == "evaluation":
                with torch.no_grad():
                    model(x)
            elif after == "dropped loss":
                square(model, x)
            elif after == "training":
                for _ in range(2):
                    square(model, x).backward()
                    optim.step()
                    optim.zero_grad()
                square(model, x).backward()
            elif after == "error":
                handle = model.blocks[1].up.register_forward_hook(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    model(x)
                handle.remove()
            refs = [weakref.ref(m) for m in model.modules()]
            refs += [weakref.ref(p) for p in model.parameters()]
            for unit in units(model):
                refs.append(weakref.ref(unit))
                for bucket in unit.buckets:
                    refs += [weakref.ref(t) for t in (bucket, bucket.shard, bucket.full)]
                    refs += [weakref.ref(t) for t in bucket.aliases]
                    refs += [weakref.ref(e) for e in bucket.entries]
                    refs.append(weakref.ref(bucket.shard.untyped_storage()))
                    storages.append(storage_alive(bucket.shard))
                    storages.append(storage_alive(bucket.full))
            lane = units(model)[0].lane
            del model, optim, unit, bucket
            alive = [ref() for ref in refs if ref() is not None]
            assert not alive, [type(a).__name__ for a in alive]
            assert not any(check() for check in storages)
            assert not list(lane.units)

    def without_gc(rank: int) -> None:
        gc.collect()
        gc.disable()
        ranks(rank)

    storages: list[Callable[[], bool]] = []
    run_ranks(without_gc, world)


def storage_alive(tensor: Tensor) -> Callable[[], bool]:
    from torch.multiprocessing.reductions import StorageWeakRef

    ref = StorageWeakRef(tensor.untyped_storage())
    return lambda: not ref.expired()


@pytest.mark.parametrize("alive", ["loss", "output"])
def test_a_tensor_that_outlives_the_model_does_not_keep_it(alive: str) -> None:
    def ranks(rank: int) -> None:
        gc.collect()
        gc.disable()
        model = by_block(seeded(lambda: Tower(2)))
        out = model(data(0, rank))
        if alive == "loss":
            out = out.square().mean()
        ref = weakref.ref(model)
        del model
        assert ref() is None
        with pytest.raises(RuntimeError, match="deleted after its forward"):
            out.sum().backward()

    run_ranks(ranks)


# The way back


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
    from fsdp_compose import MixedPrecision

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
        with pytest.raises(ValueError, match="is not sharded"):
            undo(model.blocks[0])
        undo(model)
        assert not any(is_sharded(p) for p in model.parameters())

    run_ranks(ranks)


def test_undo_refuses_to_cut_a_tie() -> None:
    def ranks(rank: int) -> None:
        model = Tied("across").double()
        shard_tied(model)
        for part in (model.body[0], model.body[1]):
            with pytest.raises(ValueError, match="tied between units inside and outside"):
                undo(part)
        undo(model)
        assert model.body[0].up.weight is model.body[1].up.weight

    run_ranks(ranks)


# Copies


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
                assert mine.shard.data_ptr() != theirs.shard.data_ptr()
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


@pytest.mark.parametrize("tie", ["inside", "across", "three"])
def test_deep_copy_keeps_ties(tie: str) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Tied(tie), shard_tied)
        twin.train()
        twin.model = copy.deepcopy(twin.model)
        twin.optim = sgd(twin.model.parameters())
        twin.plain_optim = sgd(twin.plain[0].parameters())
        twin.train()

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


# Ties


class Tied(nn.Module):
    """The same weight in one unit twice, in two units, in three places, or in an idle owner."""

    def __init__(self, tie: str) -> None:
        super().__init__()
        self.tie = tie
        self.emb = nn.Linear(WIDTH, WIDTH)
        self.body = nn.ModuleList(Block(hidden=WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        if tie == "inside":
            self.body[0].down.weight = self.body[0].up.weight
            self.head.weight = self.emb.weight
        elif tie == "across":
            self.body[1].up.weight = self.body[0].up.weight
        elif tie == "root":
            self.body[1].up.weight = self.emb.weight
            self.head.weight = self.emb.weight
        elif tie == "three":
            self.body[1].up.weight = self.body[0].up.weight
            self.body[2].down.weight = self.body[0].up.weight
            self.head.weight = self.body[0].up.weight
        elif tie == "module":
            self.body[2] = self.body[0]
        elif tie == "idle":
            self.body[1].up.weight = self.body[0].up.weight
            self.body[2].up.weight = self.body[0].up.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x)
        for i, block in enumerate(self.body):
            if self.tie != "idle" or i > 0:
                x = block(x)
        return self.head(x)


def shard_tied(model: nn.Module, **options: Any) -> nn.Module:
    return fully_shard(model, units=wrap.by_class({Block}), **options)


TIES = ["inside", "across", "root", "three", "module", "idle"]


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("strategy", [None, ShardingStrategy.SHARD_GRAD_OP])
def test_tied_weights(tie: str, strategy: ShardingStrategy | None) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Tied(tie), lambda m: shard_tied(m, strategy=strategy))
        pairs = dict(twin.model.named_parameters(remove_duplicate=False))
        theirs = dict(twin.plain[0].named_parameters(remove_duplicate=False))
        for a in pairs:
            for b in pairs:
                assert (pairs[a] is pairs[b]) == (theirs[a] is theirs[b])
        twin.train()
        for seed in range(2):
            twin.backward(square, seed)
            twin.backward(square, seed + 10)
            twin.step()
        twin.check()

    run_ranks(ranks)


@pytest.mark.filterwarnings("ignore:the forward of unit")
@pytest.mark.parametrize("first", [0, 1])
def test_a_tied_weight_that_an_idle_unit_keeps_gathered_is_read_fresh(first: int) -> None:
    """One unit stays gathered, its loss dropped; the other trains the weight they share."""

    def ranks(rank: int) -> None:
        shard = lambda m: shard_tied(m, strategy=ShardingStrategy.SHARD_GRAD_OP)  # noqa: E731
        twin = Twin(rank, 2, lambda: Tied("across"), shard)
        idle, used = (0, 1) if first == 0 else (1, 0)
        twin.model.body[idle](data(0, rank))
        for seed in range(3):
            twin.backward(lambda m, x: square(m.body[used], x), seed)
            twin.step()
        twin.train(steps=2)

    run_ranks(ranks)


@pytest.mark.parametrize("strategy", [None, ShardingStrategy.SHARD_GRAD_OP])
@pytest.mark.parametrize("between", ["inference", "failure", "dropped loss"])
def test_weights_that_stay_gathered_are_read_fresh_after_every_change(
    between: str, strategy: ShardingStrategy | None
) -> None:
    """Kept by a dropped loss, changed, read by a forward that keeps nothing, and changed again."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Tower(2), lambda m: by_block(m, strategy=strategy))
        x = data(9, rank)
        for seed in range(2):
            square(twin.model, x)
            for _ in range(3):
                with torch.no_grad():
                    for model in (twin.model, twin.reference):
                        for param in model.parameters():
                            param.mul_(0.9)
                if between == "inference":
                    with torch.no_grad():
                        compare("output", twin.model(x), twin.reference(x), twin.tolerance)
                elif between == "failure":
                    handle = twin.model.head.register_forward_pre_hook(lambda m, a: 1 / 0)
                    with pytest.raises(ZeroDivisionError):
                        twin.model(x)
                    handle.remove()
                else:
                    compare("output", twin.model(x), twin.reference(x), twin.tolerance)
            twin.backward(square, seed)
            twin.step()

    run_ranks(ranks)


def test_a_tied_weight_that_was_gathered_ahead_is_read_fresh() -> None:
    """A forward fails when the weight's owner is gathered ahead; then the weight is changed; then
    the unit that borrows it runs first."""

    def ranks(rank: int) -> None:
        shard = lambda m: shard_tied(m, prefetch=Prefetch(3, 1))  # noqa: E731
        twin = Twin(rank, 2, lambda: Tied("root"), shard)
        twin.train(steps=2)
        handle = twin.model.body[0].norm.register_forward_pre_hook(lambda m, a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            twin.model(data(9, rank))
        handle.remove()
        with torch.no_grad():
            for model in (twin.model, twin.reference):
                for param in model.parameters():
                    param.mul_(0.9)
        twin.backward(square, 5)
        twin.step()

    run_ranks(ranks)


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_tied_weights_with_checkpointing(tie: str, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    def build() -> nn.Module:
        model = Tied(tie)
        for block in {*model.body}:
            inner = block.forward
            block.forward = lambda x, inner=inner: inner(x)
        return model

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        x = model.emb.forward(x) if False else x
        return checkpoint(model, x.requires_grad_(), use_reentrant=reentrant).square().mean()

    def ranks(rank: int) -> None:
        Twin(rank, 2, build, shard_tied).train(forward)

    run_ranks(ranks)


@pytest.mark.parametrize("tie", TIES)
def test_tied_weights_and_autograd_grad(tie: str) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Tied(tie), shard_tied)
        for graph in (False, True):
            loss, plain = twin.losses(square, 0)
            options = {"allow_unused": True, "create_graph": graph}
            ours = torch.autograd.grad(loss, list(twin.model.parameters()), **options)
            theirs = torch.autograd.grad(plain, list(twin.plain[0].parameters()), **options)
            for name, mine, wanted in zip(dict(twin.model.named_parameters()), ours, theirs):
                if wanted is not None:
                    compare(name, whole(mine), wanted.detach(), twin.tolerance)
                else:
                    assert mine is None or not whole(mine).any()
        del ours, theirs, loss, mine  # the graph over the gradients keeps units gathered
        if tie != "idle":
            twin.model.zero_grad()
            twin.train()

    run_ranks(ranks)


# Parameters that others refuse


class Zoo(nn.Module):
    """Parameters of every kind, next to each other in one unit."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.randn(5, 4)
        self.scalar = nn.Parameter(torch.randn(()))
        self.one = nn.Parameter(torch.randn(1))
        self.empty = nn.Parameter(torch.empty(0))
        self.empty_matrix = nn.Parameter(torch.empty(3, 0))
        self.transposed = nn.Parameter(base.t())
        self.channels = nn.Parameter(
            torch.randn(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
        )
        self.strided = nn.Parameter(torch.randn(6, 8)[::2, ::3])
        self.part = nn.Parameter(torch.randn(9)[2:5])
        self.expanded = nn.Parameter(torch.randn(1, 3).expand(2, 3))
        self.wide = nn.Parameter(torch.randn(2, WIDTH))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.wide.t() * self.scalar + self.one
        y = y.sum() + self.transposed.square().sum() + self.channels.sin().sum()
        y = y + self.strided.cos().sum() * self.part.sum() + self.expanded.square().sum()
        return y * self.frozen.sum() + self.empty.sum() + self.empty_matrix.sum()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_zoo_of_parameters(world: int) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Zoo())

    def ranks(rank: int) -> None:
        twin = Twin(rank, world, build, one_unit)
        strides = {n: p.stride() for n, p in twin.plain[0].named_parameters()}
        seen: dict[str, Any] = {}
        zoo = twin.model[1]
        zoo.register_forward_hook(
            lambda m, a, o: seen.update((f"1.{n}", p.stride()) for n, p in m._parameters.items())
        )
        twin.train(lambda m, x: m(x).square().mean())
        for name in ("1.transposed", "1.channels"):
            assert seen[name] == strides[name]
        undo(twin.model)
        for name in ("1.transposed", "1.channels", "1.wide", "1.scalar", "1.empty_matrix"):
            assert twin.model.get_parameter(name).stride() == strides[name], name

    run_ranks(ranks, world)


def test_parameters_smaller_than_the_world() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False))

    def ranks(rank: int) -> None:
        shard = lambda m: fully_shard(m, units=wrap.by_class(nn.Linear))  # noqa: E731
        forward = lambda m, x: m(x[:, :1]).square().mean()  # noqa: E731
        Twin(rank, 4, build, shard).train(forward)

    run_ranks(ranks, 4)


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("frozen", ["first", "blocks", "some", "biases", "all but one", "head"])
def test_frozen_parameters(frozen: str, shard: str) -> None:
    def build() -> nn.Module:
        model = Tower(3)
        for name, param in model.named_parameters():
            param.requires_grad_(
                {
                    "first": not name.startswith("first"),
                    "blocks": not name.startswith(("blocks.0", "blocks.2")),
                    "some": "up" not in name,
                    "biases": "bias" not in name,
                    "all but one": name == "blocks.1.up.weight",
                    "head": "head" not in name,
                }[frozen]
            )
        return model

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, build, SHARDS[shard])
        twin.train()
        twin.train(lambda m, x: square(m, x.requires_grad_()))
        for param in twin.model.parameters():
            assert param.requires_grad or param.grad is None

    run_ranks(ranks)


@pytest.mark.parametrize("shard", SHARDS)
def test_requires_grad_may_change_between_steps(shard: str) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Tower(2), SHARDS[shard])
        patterns = ["", "first", "up", "blocks.0", "bias", ""]
        for seed, frozen in enumerate(patterns):
            for model in (twin.model, twin.plain[0]):
                for name, param in model.named_parameters():
                    param.requires_grad_(not frozen or frozen not in name)
            twin.backward(square, seed)
            for name, param in twin.model.named_parameters():
                if frozen and frozen in name:
                    assert param.grad is None, name
            assert_at_rest(twin.model)
            twin.step()
        for model in (twin.model, twin.plain[0]):
            model.requires_grad_(False)
        with pytest.raises(RuntimeError, match="does not require grad"):
            square(twin.model, data(0, rank)).backward()
        for model in (twin.model, twin.plain[0]):
            model.requires_grad_(True)
        twin.train()

    run_ranks(ranks)


def test_trained_parameters_that_were_sharded_frozen() -> None:
    def ranks(rank: int) -> None:
        model = seeded(lambda: Tower(2)).requires_grad_(False)
        by_block(model)
        square(model, data(0, rank))
        model.requires_grad_(True)
        plain = seeded(lambda: Tower(2))
        for step in range(2):
            square(model, data(step, rank)).backward()
            square(plain, torch.cat([data(step, 0), data(step, 1)])).backward()
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters()):
            torch.testing.assert_close(whole(ours.grad), theirs.grad, msg=name)

    run_ranks(ranks)


class Choosy(Tower):
    """Skips blocks and parameters, differently in every step."""

    skip: tuple[Any, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            if i not in self.skip:
                x = block(x) if "down" not in self.skip else x + block.norm(x)
        return self.head(x)


@pytest.mark.filterwarnings("ignore:the forward of unit")
@pytest.mark.parametrize("shard", SHARDS)
def test_unused_in_a_step(shard: str) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Choosy(3), SHARDS[shard])
        for seed, skip in enumerate([(), (1,), (0, 2), (), ("last",), (0, 1, 2), ()]):
            for model in (twin.model, *twin.plain):
                model.skip = skip
            twin.backward(square, seed)
            assert_at_rest(twin.model)
            if shard != "one":
                for i in (0, 1, 2):
                    for param in twin.model.blocks[i].parameters():
                        assert (param.grad is None) == (i in skip)
            twin.step()
        twin.check()

    run_ranks(ranks)


def test_a_parameter_of_a_unit_that_ran_is_unused() -> None:
    """Its gradient counts as zero, so that ranks may differ in what they use."""

    class Maybe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.use = True

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x) if self.use else self.a(x)

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Maybe, one_unit)
        for seed in range(3):
            twin.model.use = rank == 0 or seed == 0
            for r, plain in enumerate(twin.plain):
                plain.use = r == 0 or seed == 0
            twin.backward(square, seed)
            twin.step()
        twin.check()

    run_ranks(ranks)


class Numbers(nn.Module):
    """Complex, integer, bool and low-precision parameters beside ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.complex = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128))
        self.integer = nn.Parameter(torch.arange(7), requires_grad=False)
        self.byte = nn.Parameter(torch.arange(13, dtype=torch.uint8), requires_grad=False)
        self.flag = nn.Parameter(torch.arange(5) % 2 == 0, requires_grad=False)
        self.low = nn.Parameter(torch.randn(3).half(), requires_grad=False)
        self.weight = nn.Parameter(torch.randn(WIDTH, 5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        z = (x @ self.weight).to(torch.complex128) @ self.complex
        y = torch.view_as_real(z).sum(-1) * self.integer.sum() / 10 + self.byte[12]
        return y * self.flag.sum() + self.low.double()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_numbers_of_every_kind(world: int) -> None:
    class Model(nn.Sequential):
        def double(self) -> Model:
            return self

    def ranks(rank: int) -> None:
        twin = Twin(rank, world, lambda: Model(Numbers()), one_unit)
        twin.train()
        assert len(units(twin.model)[0].buckets) == 6
        undo(twin.model)
        for name, param in twin.model.named_parameters():
            assert param.dtype == twin.plain[0].get_parameter(name).dtype

    run_ranks(ranks, world)


# Hooks on parameters


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("shard", SHARDS)
def test_hooks_on_parameters_fire_once_with_the_reduced_gradient(shard: str, when: str) -> None:
    def ranks(rank: int) -> None:
        log: list[tuple[str, Tensor]] = []
        wanted: list[tuple[str, Tensor]] = []

        def attach(model: nn.Module, log: list[Any]) -> None:
            for name, param in model.named_parameters():
                param.register_hook(lambda g, n=name: log.append((f"hook {n}", whole(g))))
                param.register_hook(lambda g: g * 2)
                param.register_hook(lambda g, n=name: log.append((f"twice {n}", whole(g))))
                param.register_post_accumulate_grad_hook(
                    lambda p, n=name: log.append((f"post {n}", whole(p.grad)))
                )

        def sharded(model: nn.Module) -> None:
            if when == "before":
                attach(model, log)
            SHARDS[shard](model)
            if when == "after":
                attach(model, log)

        twin = Twin(rank, 2, lambda: Tower(2), sharded)
        attach(twin.plain[0], wanted)
        for seed in range(3):
            log.clear()
            wanted.clear()
            twin.backward(square, seed)
            found = dict(log)
            assert len(found) == len(log) == len(wanted)
            for name, value in wanted:
                compare(name, found[name], value, twin.tolerance)
            twin.step()
        twin.check()

    run_ranks(ranks)


def test_hooks_on_parameters_can_be_removed() -> None:
    def ranks(rank: int) -> None:
        log: list[str] = []
        twin = Twin(rank, 2, lambda: Tower(1))
        weight = twin.model.first.weight
        handles = [
            weight.register_hook(lambda g: log.append("hook")),
            weight.register_post_accumulate_grad_hook(lambda p: log.append("post")),
        ]
        twin.backward(square, 0)
        assert log == ["hook", "post"]
        for handle in handles:
            handle.remove()
        twin.step()
        twin.train()
        assert log == ["hook", "post"]

    run_ranks(ranks)


def test_hooks_registered_before_sharding_can_be_removed_after() -> None:
    def ranks(rank: int) -> None:
        log: list[str] = []
        model = seeded(lambda: Tower(1))
        first = model.first.weight.register_hook(lambda g: log.append("hook"))
        second = model.first.bias.register_post_accumulate_grad_hook(lambda p: log.append("post"))
        by_block(model)
        first.remove()
        second.remove()
        square(model, data(0, rank)).backward()
        assert not log

    run_ranks(ranks)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", ["slice", "whole", "in place"])
def test_a_hook_may_change_the_gradient(change: str, when: str) -> None:
    """It may return a sharded tensor, a whole one of the parameter's shape, or write into it."""

    def hook(grad: Tensor) -> Tensor | None:
        if change == "slice":
            return grad * 3
        if change == "whole":
            return torch.full(grad.shape, 0.5, dtype=grad.dtype)
        grad.mul_(3)
        return None

    def ranks(rank: int) -> None:
        def attach(model: nn.Module) -> None:
            for name in ("first.weight", "blocks.0.up.bias", "head.bias"):
                model.get_parameter(name).register_hook(hook)

        def sharded(model: nn.Module) -> None:
            if when == "before":
                attach(model)
            by_block(model)
            if when == "after":
                attach(model)

        twin = Twin(rank, 2, lambda: Tower(1), sharded)
        attach(twin.plain[0])
        twin.train(steps=2)

    run_ranks(ranks)


def test_hooks_of_both_times_outlive_undo() -> None:
    """Registered before or while sharded, they see plain gradients afterwards, and can go."""

    def ranks(rank: int) -> None:
        model, log = seeded(lambda: Tower(1)), []
        note = lambda g: log.append((type(g), g.shape))  # noqa: E731
        handles = [model.first.weight.register_hook(note)]
        by_block(model)
        handles += [
            model.first.weight.register_hook(note),
            model.first.weight.register_post_accumulate_grad_hook(lambda p: note(p.grad)),
        ]
        square(model, data(0, rank)).backward()
        assert len(log) == 3 and all(shape == (WIDTH, WIDTH) for _, shape in log)
        undo(model)
        log.clear()
        square(model, data(0, rank)).backward()
        assert log == [(Tensor, (WIDTH, WIDTH))] * 3
        for handle in handles:
            handle.remove()
        log.clear()
        square(model, data(0, rank)).backward()
        assert not log

    run_ranks(ranks)


@pytest.mark.parametrize("shard", SHARDS)
def test_optimizer_in_backward(shard: str) -> None:
    """Each parameter has an optimizer, which steps and clears the gradient in the hook."""

    def attach(model: nn.Module) -> None:
        for param in model.parameters():
            optim = torch.optim.AdamW([param], lr=0.01)

            def step(p: Tensor, optim: Any = optim) -> None:
                optim.step()
                optim.zero_grad()

            param.register_post_accumulate_grad_hook(step)

    def ranks(rank: int) -> None:
        def sharded(model: nn.Module) -> None:
            SHARDS[shard](model)
            attach(model)

        twin = Twin(rank, 2, lambda: Tower(2), sharded)
        attach(twin.plain[0])
        for seed in range(3):
            twin.backward(square, seed)
            assert all(p.grad is None for p in twin.model.parameters())
            twin.check()

    run_ranks(ranks)


# D1 at the boundary of a unit


def test_a_sharded_weight_used_outside_its_unit_raises() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(lambda: Tower(1)))
        x = data(0, rank)
        for use in (
            lambda: x @ model.first.weight.t(),
            lambda: model.first(x),
            lambda: model.blocks[0].up(x),
            lambda: nn.functional.linear(x, model.first.weight),
        ):
            with pytest.raises(ShardedWeightError, match="gathered"):
                use()
        square(model, x).backward()

    run_ranks(ranks)


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "no_grad": lambda p: p.detach().mul_(1.01),
    "data": lambda p: p.data.mul_(1.01),
    "new data": lambda p: setattr(p, "data", p.data * 1.01),
    "whole data": lambda p: setattr(p, "data", whole(p) * 1.01),
    "local": lambda p: (p.to_local().detach() if is_sharded(p) else p.detach()).mul_(1.01),
    "copy": lambda p: p.detach().copy_(whole(p) * 1.01),
    "foreach": lambda p: torch._foreach_mul_([p.detach()], 1.01),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_weights_written_between_steps_are_what_the_next_forward_reads(
    how: str, strategy: str
) -> None:
    def ranks(rank: int) -> None:
        shard = lambda m: by_block(m, strategy=ShardingStrategy[strategy])  # noqa: E731
        twin = Twin(rank, 2, lambda: Tower(2), shard)
        for seed in range(3):
            square(twin.model, data(0, rank))  # its loss is dropped: weights may stay gathered
            for model in (twin.model, twin.plain[0]):
                for param in model.parameters():
                    WRITES[how](param)
            twin.backward(square, seed)
            twin.step()
            for model in (twin.model, twin.plain[0]):
                for param in model.parameters():
                    WRITES[how](param)
        twin.check()

    run_ranks(ranks)


@pytest.mark.parametrize("move", ["float", "double", "to", "half and back", "requires_grad_"])
def test_moving_the_model_after_sharding(move: str) -> None:
    """It trains on as the plain model does, or says no; the old shard may not linger in silence."""

    def change(model: nn.Module) -> None:
        if move == "float":
            model.float()
        elif move == "double":
            model.double()
        elif move == "to":
            model.to("cpu")
        elif move == "half and back":
            model.bfloat16()
            model.double()
        else:
            model.requires_grad_(True)

    def ranks(rank: int) -> None:
        model, plain = by_block(seeded(lambda: Tower(2))), seeded(lambda: Tower(2))
        try:
            change(model)
            dtype = model.first.weight.dtype
            change(plain)
            optim, wanted = sgd(model.parameters()), sgd(plain.parameters())
            for step in range(3):
                xs = [data(step, r, dtype=dtype) for r in range(2)]
                square(model, xs[rank]).backward()
                square(plain, torch.cat(xs)).backward()
                optim.step()
                wanted.step()
                optim.zero_grad()
                wanted.zero_grad()
        except (RuntimeError, ValueError, TypeError) as error:
            if "shard" in str(error):
                return
            raise
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters()):
            torch.testing.assert_close(whole(ours), theirs.detach(), msg=name)

    run_ranks(ranks)


class Reuser(nn.Module):
    """A module inside a unit that the root calls too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Tower(2)
        self.again = self.inner.blocks[0].up

    def forward(self, x: Tensor) -> Tensor:
        first = self.again(x)[:, :1]
        return self.inner(x) + first + self.again(x)[:, 1:2]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_module_reachable_from_two_units(checkpointed: bool) -> None:
    def shard(model: nn.Module) -> None:
        for block in model.inner.blocks:
            fully_shard(block)
        fully_shard(model)

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Reuser, shard)

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            out = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
            return out.square().mean()

        for seed in range(3):
            twin.backward(loss, seed)
            twin.step()
        twin.check()

    run_ranks(ranks)
