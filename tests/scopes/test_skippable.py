"""A step that one rank cannot use is skipped by all, without a hang, and nothing of it stays."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fsdp_compose as fc
from fsdp_compose import ShardingStrategy, skippable_step

from harness import rank_errors, run_ranks, simulate_ranks, single_process
from models import (
    Tower,
    Twin,
    assert_at_rest,
    by_block,
    data,
    mesh_of_replicas,
    seeded,
    square,
    trainable,
    whole,
)
from scoped_models import open_until_reshard
from tp_models import MLP, mesh_of

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Fragile(Tower):
    """Raises where ``at`` says: before a block's forward, or in its backward."""

    at: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            if self.at == i:
                raise ValueError("bad batch")
            x = block(x)
            if self.at == f"backward {i}":
                x.register_hook(_fail)
        if self.at == "end":
            raise ValueError("bad batch")
        return self.head(x)


def _fail(grad: Tensor) -> None:
    raise ValueError("bad batch")


PLACES = (0, 1, "end", "backward 2", "backward 0", None)


def skip(twin: Twin, at: Any, bad: set[int], seed: int = 99, **options: Any) -> Any:
    """A step in which the ranks ``bad`` raise at ``at``; the others see nothing wrong."""
    twin.model.at = at if dist.get_rank() in bad else None
    with skippable_step(twin.model, **options) as step:
        square(twin.model, data(seed, dist.get_rank())).backward()
        if at is None and dist.get_rank() in bad:
            step.discard("bad batch")
    twin.model.at = None
    return step


@pytest.mark.parametrize("strategy", [None, ShardingStrategy.SHARD_GRAD_OP])
@pytest.mark.parametrize("world", [2, 3])
def test_one_rank_raises_and_all_skip(world: int, strategy: ShardingStrategy | None) -> None:
    """Wherever it raises; then a step of all is that of one process, and gradients are None."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, world, Fragile, lambda m: by_block(m, strategy=strategy))
        for number, at in enumerate(PLACES):
            step = skip(twin, at, {number % world})
            assert step.skipped
            assert list(step.reasons) == [number % world], (at, step.reasons)
            assert "bad batch" in step.reasons[number % world]
            assert all(p.grad is None for p in twin.model.parameters())
            assert_at_rest(twin.model)
            twin.train(steps=1)

    run_ranks(ranks, world)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_rank_that_catches_the_error_does_not_go_on(replicas: int) -> None:
    """Each microbatch after it raises too, also over replicas, whose ranks waited for others."""

    def ranks(rank: int) -> None:
        mesh = mesh_of_replicas(2, 2) if replicas > 1 else None
        twin = Twin(rank, 4, Fragile, lambda m: by_block(m, mesh=mesh))
        told = 0
        with skippable_step(twin.model) as step:
            if rank == 0:
                raise ValueError("bad batch")
            for seed in range(3):
                try:
                    square(twin.model, data(seed, rank)).backward()
                except RuntimeError as error:
                    told += "discards this step" in str(error)
        assert step.skipped and told == 3 * (rank > 0)
        twin.train()

    simulate_ranks(ranks, 4)


def test_ranks_fail_in_different_places() -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 3, Fragile)
        twin.train(steps=2)
        for places in ((0, "backward 0", "end"), ("backward 2", 1, "backward 0"), (2, 2, 0)):
            step = skip(twin, places[rank], {0, 1, 2})
            assert step.skipped and step.reasons
            twin.train(steps=1)

    run_ranks(ranks, 3)


@pytest.mark.parametrize("strategy", [None, ShardingStrategy.HYBRID_SHARD_OPTIMIZER])
def test_replicas_are_told_too(strategy: ShardingStrategy | None) -> None:
    """A rank of another shard group and another replica has no group with the one that raises.

    From the first step on, whose collectives are compared over all ranks, who wait there while the
    one that raises waits in a part of them.
    """

    def ranks(rank: int) -> None:
        mesh = mesh_of_replicas(2, 2)
        twin = Twin(rank, 4, Fragile, lambda m: by_block(m, mesh=mesh, strategy=strategy))
        for bad, at in ((0, 1), (3, "backward 1"), (2, "end"), (1, None), (0, "backward 0")):
            step = skip(twin, at, {bad})
            assert step.skipped and list(step.reasons) == [bad], step.reasons
            twin.train(steps=1)

    run_ranks(ranks, 4)


@pytest.mark.parametrize("keep", ["sharded", "unsharded", "no_all_reduce"])
@pytest.mark.parametrize("at", [1, "backward 0"])
def test_earlier_microbatches_stay(keep: Any, at: Any) -> None:
    """A microbatch is skipped inside an accumulation; the step is that of the others."""

    def ranks(rank: int) -> None:
        mesh = mesh_of_replicas(2, 2) if keep == "no_all_reduce" else None
        world = dist.get_world_size()
        twin = Twin(rank, world, Fragile, lambda m: by_block(m, mesh=mesh))
        twin.train(steps=1)
        with fc.accumulate(twin.model, keep=keep):
            twin.backward(square, 1)
            assert skip(twin, at, {1}).skipped
            twin.backward(square, 2)
        twin.step()
        twin.check()
        with skippable_step(twin.model) as step:  # and a whole accumulation
            with fc.accumulate(twin.model, keep=keep):
                square(twin.model, data(3, rank)).backward()
                twin.model.at = at if rank == 0 else None
                square(twin.model, data(4, rank)).backward()
        twin.model.at = None
        assert step.skipped and all(p.grad is None for p in twin.model.parameters())
        twin.train(steps=1)

    run_ranks(ranks, 4 if keep == "no_all_reduce" else 2)


class Reads(TorchDispatchMode):
    """Counts how often the host reads a number of a device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_the_host_waits_once_for_all_gradients() -> None:
    """Whether they are finite is one number, however many parameters there are."""

    def ranks(rank: int) -> None:
        model, reads = by_block(seeded(Tower)), Reads()
        with reads, skippable_step(model, finite_gradients=True) as step:
            square(model, data(0, rank)).backward()
        assert not step.skipped and reads.count == 1

    run_ranks(ranks, 2)


def test_sparse_gradients_are_looked_at() -> None:
    """Those of an ignored embedding; that torch compares no sparse tensors discards no step."""
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    fc.fully_shard(model, ignored=[model[0]])
    for factor in (1.0, float("inf")):
        with skippable_step(model, finite_gradients=True) as step:
            (model(torch.tensor([1, 1, 2])).sum() * factor).backward()
        assert step.skipped == (factor != 1.0), step.reasons


@pytest.mark.parametrize("reason", ["discard", "loss", "gradient", "error"])
@pytest.mark.parametrize("shape", [(2, 2), (1, 2)], ids=str)
def test_ranks_with_other_parts_skip_too(shape: tuple[int, int], reason: str) -> None:
    """A reason that one rank has after its backward reaches those that hold the rest of a layer."""

    def ranks(rank: int) -> None:
        mesh = mesh_of(dp=shape[0], tp=shape[1])
        model = parallelize_module(MLP(6, 8).double(), mesh["tp"], PLAN)
        fc.fully_shard(model, mesh=mesh["dp"])
        for bad in range(shape[0] * shape[1]):
            with skippable_step(model, finite_gradients=True) as step:
                loss = square(model, data(bad, mesh.get_local_rank("dp")))
                loss.backward()
                if rank == bad and reason == "error":
                    raise ValueError("bad batch")
                if rank == bad and reason == "discard":
                    step.discard("bad batch")
                if rank == bad and reason == "loss":
                    step.check(float("nan"))
                if rank == bad and reason == "gradient":
                    for param in model.parameters():  # of some this rank has no element
                        param.grad.fill_(float("nan"))
            assert step.skipped and bad in step.reasons
            assert all(p.grad is None for p in model.parameters())
            assert_at_rest(model)
        with skippable_step(model, finite_gradients=True) as step:
            square(model, data(0, rank)).backward()
        assert not step.skipped

    simulate_ranks(ranks, shape[0] * shape[1])


def test_values_that_are_not_finite() -> None:
    """A loss or a gradient on one rank alone; without being asked nothing is looked at."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Fragile)
        for look in ("loss", "gradients"):
            with skippable_step(twin.model, finite_gradients=look == "gradients") as step:
                loss = square(twin.model, data(0, rank)) * (float("nan") if rank else 1.0)
                if look == "loss":
                    assert step.check(loss) == (rank == 0)
                loss.backward()
            assert step.skipped and f"{look[:4]}" in min(step.reasons.values()), step.reasons
            twin.train(steps=1)
        with skippable_step(twin.model, finite_gradients=True) as step:
            twin.backward(square, 1)
        assert not step.skipped and not step.reasons
        twin.step()
        twin.check()

    run_ranks(ranks)


def open_all(model: Any) -> Any:
    return fc.gathered(model)


def open_one_block(model: Any) -> Any:
    return fc.gathered(model.blocks[1])


def open_with_grads(model: Any) -> Any:
    return fc.gathered(model, with_grads=True, writeback=True)


SCOPES = (open_all, open_one_block, open_with_grads, open_until_reshard)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("earlier", [False, True])
def test_steps_inside_scopes_are_discarded(scope: Any, earlier: bool) -> None:
    """Gradients are what they were before, and one that is not finite is seen, in open units too.

    There a parameter holds the full tensor, and its gradient is elsewhere.
    """

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        with scope(model):
            if earlier:  # with the same gradients on every rank, which a scope may write back
                square(model, data(0, 0)).backward()
            before = [None if p.grad is None else whole(p.grad).clone() for p in trainable(model)]
            with skippable_step(model, finite_gradients=True) as step:
                (square(model, data(1, rank)) * (float("nan") if rank else 1.0)).backward()
            after = [None if p.grad is None else whole(p.grad) for p in trainable(model)]
        assert step.skipped and "gradient" in min(step.reasons.values())
        for grad, wanted in zip(after, before, strict=True):
            assert torch.equal(grad, wanted) if earlier else grad is wanted is None

    simulate_ranks(ranks, 2)


def test_a_step_that_leaves_units_open() -> None:
    """A step that fails between ``unshard`` and ``reshard`` is discarded too."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        with skippable_step(model) as step:
            fc.unshard(model)
            square(model, data(1, rank)).backward()
            if rank:
                raise ValueError("bad batch")
        fc.reshard(model)
        assert step.skipped and all(p.grad is None for p in model.parameters())

    simulate_ranks(ranks, 2)


def test_a_loss_may_be_a_number() -> None:
    model = fc.fully_shard(nn.Linear(2, 2))
    for value, skipped in ((0.5, False), (1, False), (float("nan"), True), (float("-inf"), True)):
        with skippable_step(model) as step:
            assert step.check(value) is not skipped
        assert step.skipped is skipped


def test_wrong_calls_are_no_reason_to_skip() -> None:
    """They would skip every step: the error leaves the scope."""
    model = fc.fully_shard(nn.Linear(2, 2))
    wrong: Any
    for wrong in ("0.5", None, [0.5]):
        with pytest.raises(TypeError, match=r"check\(\) was given .*; wanted a tensor or a number"):
            with skippable_step(model) as step:
                step.check(wrong)
    for wrong in (5, None, ValueError("bad batch")):
        with pytest.raises(TypeError, match=r"discard\(\) was given .*; wanted a string"):
            with skippable_step(model) as step:
                step.discard(wrong)
    for wrong in ([ValueError], ValueError, "x", None, (1,), (KeyboardInterrupt,), ("x",)):
        with pytest.raises(TypeError, match=r"errors .*; wanted a tuple of classes of exceptions"):
            with skippable_step(model, errors=wrong):
                pytest.fail("the scope was entered")
    wrong = "no"
    with pytest.raises(TypeError, match="finite_gradients is 'no'; wanted True or False"):
        with skippable_step(model, finite_gradients=wrong):
            pytest.fail("the scope was entered")


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def test_buffers_and_plain_tensors() -> None:
    """Running statistics of a skipped batch are undone, and flat parameters hold no gradient."""

    def ranks(rank: int) -> None:
        torch.manual_seed(0)
        model = Normed().double()
        model.register_buffer("shown", torch.ones(1).expand(6))  # which copy_ does not write
        fc.fully_shard(model)
        flat = fc.flat_parameters(model)
        optim = torch.optim.SGD(flat, lr=0.1)
        before = [whole(p) for p in model.parameters()]
        with skippable_step(model) as step:
            square(model, data(0, rank) * (float("nan") if rank else 1.0)).backward()
            if rank:
                raise ValueError("bad batch")
        assert step.skipped
        assert torch.equal(model.norm.running_mean, torch.zeros(6).double())
        assert int(model.norm.num_batches_tracked) == 0
        square(model, data(1, rank)).backward()
        optim.step()
        after = [whole(p) for p in model.parameters()]
        assert all(torch.isfinite(p).all() for p in after)
        assert not any(torch.equal(p, q) for p, q in zip(before, after, strict=True))

    run_ranks(ranks)


class Averaged(nn.Module):
    """Puts other tensors in the places of its buffers, and makes some in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("first", None)

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().mean(0)
        self.mean = 0.9 * self.mean + 0.1 * now
        if self.first is None:
            self.first = now
            self.register_buffer("last", now)
        self.last = now
        return self.head(x - self.mean)


def test_buffers_that_a_forward_replaces() -> None:
    """As those that it writes into: the scope leaves what was there, and nothing where it was."""

    def ranks(rank: int) -> None:
        model, plain = fc.fully_shard(seeded(Averaged)), seeded(Averaged)
        for seed in range(3):
            bad = {0: True, 1: False, 2: True}[seed]
            x = torch.full((2, 4), float("nan") if bad else float(seed))
            with skippable_step(model) as step:
                step.check(model(x).sum())
            assert step.skipped is bad
            if not bad:
                plain(x)
            for name, buffer in plain.named_buffers():
                assert torch.equal(model.get_buffer(name), buffer), name
            assert len(list(model.buffers())) == len(list(plain.buffers()))

    run_ranks(ranks)


def test_what_is_no_reason_leaves_the_scope() -> None:
    """Other errors, an interrupt, and ranks that run different units; without a scope, the text."""

    def interrupted(rank: int) -> None:
        twin = Twin(rank, 1, Fragile, lambda m: by_block(m, mesh="self"))
        for error in (KeyboardInterrupt, TypeError):
            with pytest.raises(error), skippable_step(twin.model, errors=(ValueError,)):
                raise error
        twin.train(steps=1)
        assert skip(twin, 1, {0}).skipped
        twin.train(steps=1)

    run_ranks(interrupted, 1)

    def different(rank: int) -> None:
        twin = Twin(rank, 2, Fragile)
        with skippable_step(twin.model):
            x = data(0, rank)
            twin.model.blocks[rank](x).sum().backward()

    errors = rank_errors(different, 2)
    assert all(e is not None and "ranks run different units" in e for e in errors), errors

    def alone(rank: int) -> None:
        twin = Twin(rank, 2, Fragile)
        if rank == 0:
            skip(twin, 1, {0})
        else:
            square(twin.model, data(0, rank)).backward()

    told = rank_errors(alone, 2)[1]
    assert told is not None and "rank 0 discards this step" in told and "skippable_step" in told


def test_nothing_of_what_failed_is_kept() -> None:
    """Its frames go with the scope, not when garbage is collected.

    Torch below 2.13 keeps hooks of an interrupted ``checkpoint`` there, which would record the next
    step.
    """

    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            kept = nn.Module()
            if not held:
                held.append(weakref.ref(kept))
                raise ValueError("once")
            return super().forward(x)

    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    held: list[weakref.ref[nn.Module]] = []
    model = fc.fully_shard(Model(nn.Linear(3, 3), Failing(3, 3)))
    gc.disable()
    try:
        for fails in (True, False):
            with skippable_step(model) as step:
                model(torch.ones(2, 3)).sum().backward()
            assert step.skipped is fails and held[0]() is None
    finally:
        gc.enable()


def test_it_is_refused_in_another_and_in_a_forward() -> None:
    """Ranks could not tell which of two scopes another discards; a forward could not go on."""
    with single_process():
        twin = Twin(0, 1, Tower)

        def enter(*_: Any) -> None:
            with pytest.raises(RuntimeError, match="inside its forward or backward"):
                with skippable_step(twin.model):
                    raise ValueError("a bad batch")

        handle = twin.model.blocks[1].up.register_forward_pre_hook(enter)
        twin.train(steps=1)
        handle.remove()
        other = by_block(seeded(Tower))
        with pytest.raises(RuntimeError, match="inside another skippable_step"):
            with skippable_step(twin.model), skippable_step(other) as inner:
                inner.discard("a bad batch")
        with skippable_step(nn.ModuleList([twin.model, other])) as step:
            step.discard("a bad batch")
        assert step.skipped
        twin.train()


def test_a_recurrent_model_that_is_gone_is_passed_over() -> None:
    """Its unit is there until the collector has run, and its modules are not."""
    with single_process():
        gc.disable()
        try:
            gone: Any = nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 4))
            fc.fully_shard(gone, units=fc.wrap.by_class({nn.LSTM}))
            gone(torch.ones(5, 3))[0].sum().backward()
            del gone
            model = fc.fully_shard(nn.Linear(3, 3))
            with skippable_step(model) as step:
                raise ValueError("a bad batch")
            assert step.skipped
            model(torch.ones(1, 3)).sum().backward()
        finally:
            gc.enable()


WAITING: dict[str, tuple[int, str, dict[str, Any]]] = {
    "unsharded": (2, "unsharded", {}),
    "of replicas": (4, "no_all_reduce", {"strategy": ShardingStrategy.HYBRID_SHARD}),
    "unsharded, of replicas": (4, "unsharded", {"strategy": ShardingStrategy.HYBRID_SHARD}),
}


@pytest.mark.parametrize("case", WAITING)
def test_gradients_that_wait_are_looked_at(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """One of three microbatches is not finite; the others are what is stepped."""
    world, keep, options = WAITING[case]

    def ranks(rank: int) -> None:
        mesh = mesh_of_replicas(2, 2) if world == 4 else None
        model: Any = fc.fully_shard(nn.Linear(2, 1), mesh=mesh, init="broadcast", **options)
        skipped = []
        with fc.accumulate(model, keep=keep):
            for scale in (1.0, float("inf"), 1.0):
                with skippable_step(model, finite_gradients=True) as step:
                    (model(torch.ones(1, 2)).sum() * (scale if rank == 0 else 1.0)).backward()
                skipped.append(step.skipped)
        assert skipped == [False, True, False]
        assert model.bias.grad.full_tensor().item() == pytest.approx(2.0)

    simulate_ranks(ranks, world)
    assert "are dropped" not in caplog.text


def test_what_waits_again_is_not_taken_for_none() -> None:
    """The discarded step had reduced it, and somebody read the gradient that came of it."""
    model, x = fc.fully_shard(nn.Linear(2, 2)), torch.ones(1, 2)
    with fc.no_sync(model):
        model(x).sum().backward()
    with skippable_step(model) as step:
        model(x).sum().backward()
        step.discard(str(model.bias.grad))
    with pytest.raises(RuntimeError, match="was accumulated without synchronisation"):
        model.bias.grad.norm()
    fc.reduce_grads(model)
    assert model.bias.grad.full_tensor().tolist() == [1, 1]


def test_what_waits_again_is_missed_by_a_step() -> None:
    """Also where another optimizer has stepped since the discarded step had reduced it."""
    model, x = fc.fully_shard(nn.Linear(2, 2)), torch.ones(1, 2)
    other = fc.fully_shard(nn.Linear(2, 2))
    optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other)]
    with fc.no_sync(model):
        model(x).sum().backward()
    with skippable_step(model) as step:
        (model(x).sum() + other(x).sum()).backward()
        optims[1].step()
        step.discard("bad batch")
    with pytest.raises(RuntimeError, match="was accumulated without synchronisation"):
        optims[0].step()


def test_sums_of_a_tree_are_looked_at() -> None:
    """``deterministic=`` adds microbatches up when the last has come."""

    def ranks(rank: int) -> None:
        model: Any = fc.fully_shard(nn.Linear(2, 1), deterministic=4)
        for scale, wanted in ((float("inf"), True), (1.0, False), (1.0, False)):
            with skippable_step(model, finite_gradients=True) as step:
                (model(torch.ones(1, 2)).sum() * (scale if rank == 0 else 1.0)).backward()
            assert step.skipped == wanted
        assert model.bias.grad.full_tensor().item() == pytest.approx(1.0)

    simulate_ranks(ranks)
