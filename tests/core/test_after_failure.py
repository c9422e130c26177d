"""After what failed, the next call computes on what it is given, and nothing else is kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from fsdp_compose import (
    GradBucket,
    MixedPrecision,
    ShardingStrategy,
    accumulate,
    default_hook,
    fully_shard,
    get_state,
    load_checkpoint,
    load_state_dict,
    no_sync,
    owner_step,
    refresh,
    register_comm_hook,
    set_requires_all_reduce,
    set_requires_gradient_sync,
    state_dict,
)
from fsdp_compose.core import gathering
from fsdp_compose.core.guards import partly_run
from fsdp_compose.sharded import is_sharded

from harness import run_ranks, simulate_ranks
from models import Checkpointed, Tower, Twin, by_block, data, seeded, square, units, whole


class OnPurpose(Exception):
    """What a hook raises in backward."""


def fail_in_backward(model: nn.Module, rank: int, before: str | None = None) -> None:
    """Raise after the first block's backward, or where the backward of ``before`` begins."""

    def fail(*_: Any) -> None:
        raise OnPurpose

    if before is None:
        hook = model.blocks[0].register_full_backward_hook(fail)
    else:
        hook = model.get_submodule(before).register_full_backward_pre_hook(fail)
    with pytest.raises(OnPurpose):
        square(model, data(0, rank)).backward()
    hook.remove()


@pytest.mark.parametrize("way", ["grad", "inputs"])
def test_chosen_gradients_after_a_failure(way: str) -> None:
    """A backward of a forward before the failure gives those that are asked for, and no others."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        loss, wanted = twin.losses(square, 1)
        fail_in_backward(twin.model, rank)
        twin.model.zero_grad()
        first, plain = next(twin.model.parameters()), next(twin.reference.parameters())
        (expected,) = torch.autograd.grad(wanted, [plain])
        if way == "grad":
            (found,) = torch.autograd.grad(loss, [first], allow_unused=True)
            torch.testing.assert_close(whole(found), expected)
            assert all(p.grad is None for p in twin.model.parameters())
        else:
            loss.backward(inputs=[first])
            torch.testing.assert_close(whole(first.grad), expected)
            assert [p is first for p in twin.model.parameters()] == [
                p.grad is not None for p in twin.model.parameters()
            ]

    simulate_ranks(ranks)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_after_a_failure(reentrant: bool) -> None:
    """Parts of a unit that a forward before the failure checkpointed are computed again."""
    model, plain = (seeded(lambda: Checkpointed("outside", reentrant)) for _ in range(2))
    fully_shard(model)
    for each in (plain, model):
        loss = square(each, data(1, 0))
        if each is model:
            fail_in_backward(model, 0)
            model.zero_grad()
        loss.backward()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(found.grad), wanted.grad)


@pytest.mark.parametrize("how", ["plain", "transform", "full precision"])
def test_functional_call_after_a_failure(how: str) -> None:
    """Tensors given for one call are read by it: not the weights, and not the failed pass's."""

    def ranks(rank: int) -> None:
        mp = MixedPrecision(full_precision_in_eval=how == "full precision")
        model, plain = by_block(seeded(Tower), mp_policy=mp), seeded(Tower)
        fail_in_backward(model, rank)
        weights = {name: param.detach() * 1.5 for name, param in plain.named_parameters()}
        x = data(1, rank)
        wanted = functional_call(plain, weights, (x,))
        if how == "transform":
            call = lambda x: functional_call(model, weights, (x,))  # noqa: E731
            found = torch.vmap(call)(x)
        else:
            model.train(how == "plain")
            found = functional_call(model, weights, (x,))
        torch.testing.assert_close(found, wanted)

    run_ranks(ranks, 2)


@pytest.mark.parametrize("world", [1, 2])
def test_conversion_after_a_failure(world: int) -> None:
    """Reductions of the failed backward were under way when their buffers were made anew."""

    def ranks(rank: int) -> None:
        model, plain = by_block(seeded(Tower)), seeded(Tower)
        fail_in_backward(model, rank, before="first")
        model.float(), plain.float()
        state_dict(model)  # reads all shards as they are now
        model.zero_grad()
        square(model, data(1, rank).float()).backward()
        sum(square(plain, data(1, r).float()) / world for r in range(world)).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert p.grad is not None and p.grad.dtype == torch.float32
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)

    run_ranks(ranks, world)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's, of zero_grad
@pytest.mark.parametrize("where", ["blocks.1.down", "head"])
def test_gradients_from_before_an_interrupt(where: str) -> None:
    """``model.zero_grad()`` did not reach them, so the next forward raises; then it does."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.train()
        for cleared_by in (twin.model, twin.optim):
            square(twin.model, data(0, rank)).backward()
            handle = twin.model.get_submodule(where).register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                twin.model(data(1, rank))
            handle.remove()
            cleared_by.zero_grad()
            if cleared_by is twin.model:
                with pytest.raises(RuntimeError, match=r"was interrupted.*\.weight"):
                    twin.model(data(1, rank))
                twin.model.zero_grad()
            twin.train()

    simulate_ranks(ranks)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "ZERO1"])
def test_an_interrupt_while_leaves_are_put_back(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of the outermost forward: the next one does not read what modules held then."""
    install, left = partly_run.install_leaves, set[int]()

    def interrupted(unit: Any) -> None:
        if unit.name == "Tower" and dist.get_rank() in left:
            left.discard(dist.get_rank())
            raise KeyboardInterrupt
        install(unit)

    monkeypatch.setattr(partly_run, "install_leaves", interrupted)

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Tower, partial(by_block, strategy=ShardingStrategy[strategy]))
        twin.train()
        left.add(rank)
        with pytest.raises(KeyboardInterrupt):
            twin.model(data(1, rank))
        twin.train()

    simulate_ranks(ranks)


@pytest.mark.parametrize("at", range(4))
def test_an_interrupt_between_two_leaves(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a unit's forward: what its modules hold still is not taken for the user's."""
    left: dict[int, int] = {}

    def interrupted(table: dict[str, Any], name: str, value: Any) -> None:
        rank = dist.get_rank()
        if rank in left and is_sharded(value):
            left[rank] -= 1
            if left[rank] < 0:
                del left[rank]
                raise KeyboardInterrupt
        table[name] = value

    monkeypatch.setattr(gathering, "setitem", interrupted)

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.train()
        left[rank] = at
        with pytest.raises(KeyboardInterrupt):
            twin.model(data(1, rank))
        twin.optim.zero_grad()
        twin.train()
        assert all(is_sharded(p) for p in twin.model.parameters())

    simulate_ranks(ranks)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: fully_shard(model, granularity=lambda *_: -3),
        lambda model: refresh(fully_shard(model), init="nope"),
        lambda model: load_state_dict(fully_shard(model), {}),
        lambda model: fully_shard(model).load_state_dict({}),
        lambda model: load_checkpoint("none", fully_shard(model)),
        lambda model: owner_step(fully_shard(model).parameters(), lambda groups: 3),
    ],
)
def test_errors_keep_no_model(call: Callable[[nn.Module], object]) -> None:
    """Not even until Python collects garbage: no frame of an error's holds the error."""
    gc.collect()
    gc.disable()
    try:
        model = seeded(Tower)
        found = weakref.ref(model)
        with suppress(RuntimeError, TypeError, ValueError):
            call(model)
        del model
        assert found() is None
    finally:
        gc.enable()


def reopen(scope: AbstractContextManager[None]) -> None:
    with scope:
        pass


@pytest.mark.parametrize(
    "change",
    [
        partial(set_requires_gradient_sync, value=False),
        partial(set_requires_all_reduce, value=False),
        lambda model: reopen(no_sync(model)),
        lambda model: reopen(accumulate(model, keep="no_all_reduce")),
        partial(register_comm_hook, state=None, hook=default_hook),
    ],
    ids=["sync", "all-reduce", "no_sync", "accumulate", "hook"],
)
def test_reductions_of_a_failed_step_end_before(change: Callable[[nn.Module], None]) -> None:
    """Who changes how gradients are reduced changes it for the steps that come, not for that one.

    On another rank a reduction of the failed step may have ended as it began.
    """

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower), strategy=ShardingStrategy.NO_SHARD)
        fail_in_backward(model, rank)
        engine = get_state(model).unit.engine
        assert engine.reductions
        change(model)
        assert not engine.reductions

    simulate_ranks(ranks, 2)


def test_a_hook_gets_no_gradients_of_a_failed_step() -> None:
    """It is called for the units of the next step, once each."""

    def ranks(rank: int) -> None:
        model, called = by_block(seeded(Tower)), list[str]()

        def hook(state: object, grads: GradBucket) -> torch.Tensor:
            called.append(grads.unit)
            return default_hook(state, grads)

        fail_in_backward(model, rank)
        register_comm_hook(model, None, hook)
        square(model, data(1, rank)).backward()
        assert sorted(called) == sorted(unit.name for unit in units(model))

    simulate_ranks(ranks, 2)
