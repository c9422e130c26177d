"""A sharded model is the same model: its objects, names, memory, and what is written to it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    ShardingStrategy,
    fully_shard,
    get_state,
    is_fully_sharded,
)
from fsdp_compose.base.torch_private import SCRIPT_HOOK
from fsdp_compose.core.guards.moved_parameters import shard_of
from fsdp_compose.core.state import STATE_KEY
from fsdp_compose.sharded import ShardedWeightError, is_sharded

from harness import cell, run_ranks
from models import (
    Tower,
    Twin,
    adamw,
    by_block,
    data,
    seeded,
    sgd,
    square,
    units,
    whole,
)


@pytest.mark.parametrize("when", ["before", "after", "after evaluation", "after a step"])
@pytest.mark.parametrize("make", [sgd, adamw], ids=["sgd", "adamw"])
def test_optimizer_built_at_any_time_trains_all(when: str, make: Callable[..., Any]) -> None:
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
        with pytest.raises(ValueError, match="Linear is not a unit"):
            get_state(model.first)

    run_ranks(ranks)


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
                    refs += [weakref.ref(t) for t in (bucket, shard_of(bucket), bucket.full)]
                    refs += [weakref.ref(t) for t in bucket.aliases]
                    refs += [weakref.ref(e) for e in bucket.entries]
                    refs.append(weakref.ref(shard_of(bucket).untyped_storage()))
                    storages.append(storage_alive(shard_of(bucket)))
                    storages.append(storage_alive(bucket.full))
            engine = units(model)[0].engine
            # Units of models that earlier tests left to the collector, which is off here.
            others = len(set(engine.units) - set(units(model)))
            del model, optim, unit, bucket
            alive = [ref() for ref in refs if ref() is not None]
            assert not alive, [type(a).__name__ for a in alive]
            assert not any(check() for check in storages)
            assert len(engine.units) == others

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
def test_a_tensor_that_outlives_the_model(alive: str) -> None:
    """A tensor that outlives the model does not keep it."""

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
def test_weights_written_between_steps_are_read(how: str) -> None:
    """Weights written between steps are what the next forward reads."""

    def ranks(rank: int, strategy: ShardingStrategy) -> None:
        twin = Twin(rank, 2, lambda: Tower(2), lambda m: by_block(m, strategy=strategy))
        for seed in range(2):
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

    def each(rank: int) -> None:
        for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
            with cell(name):
                ranks(rank, ShardingStrategy[name])

    run_ranks(each)


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


def test_an_optimizer_over_a_copy_raises() -> None:
    """It has the shapes and never a gradient, and would train nothing (D4)."""
    plain = seeded(lambda: Tower(1))
    model = by_block(seeded(lambda: Tower(1)))
    over_copy, other = sgd(list(plain.parameters())), sgd([nn.Parameter(torch.ones(3))])
    over_copy.step()  # nothing has a gradient yet
    square(model, data(0, 0)).backward()
    other.step()
    with pytest.raises(RuntimeError, match=r"copy of the model.*model\.parameters\(\)"):
        over_copy.step()
    square(plain, data(0, 0)).backward()
    over_copy.step()
