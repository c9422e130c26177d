"""What a failure in one microbatch does to the gradients of others that wait to be reduced."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
from torch import Tensor, nn
from torch import distributed as dist

import fsdp_compose as fc
from fsdp_compose import Offload, ShardingStrategy, simulate

from models import Tower, Twin, by_block, data, square

Switch = Callable[[nn.Module], AbstractContextManager[Any]]


class OnPurpose(BaseException):
    """What a module raises where a test says so; like Ctrl-C, it ends a forward without hooks."""


class Fragile(Tower):
    """Raises in the forward of its middle block, or where that block's backward ends."""

    at: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate((self.first, *self.blocks, self.head)):
            if i == 2 and self.at == "forward":
                raise OnPurpose
            x = block(x)
            if i == 1 and self.at == "backward" and x.requires_grad:
                x.register_hook(self._fail)
        return x

    def _fail(self, grad: Tensor) -> None:
        raise OnPurpose


def make_twin(**options: Any) -> tuple[int, Twin]:
    """This rank's number, and a model that has trained for one step, where ranks compare more."""
    rank = dist.get_rank()
    twin = Twin(rank, 2, Fragile, lambda m: by_block(m, **options))
    twin.train(steps=1)
    return rank, twin


def fail(model: nn.Module, at: str, rank: int) -> None:
    model.at = at
    with pytest.raises(OnPurpose):
        square(model, data(99, rank)).backward()
    model.at = None


def no_reduction(model: nn.Module) -> None:
    fc.set_requires_gradient_sync(model, False)


def no_all_reduce(model: nn.Module) -> None:
    fc.set_requires_all_reduce(model, False)


def not_last(model: nn.Module) -> None:
    fc.set_is_last_backward(model, False)


def restore(model: nn.Module) -> None:
    fc.set_requires_gradient_sync(model, True)
    fc.set_requires_all_reduce(model, True)
    fc.set_is_last_backward(model, True)


WAYS = {
    "no reduction": (no_reduction, {}),
    "no all-reduce": (no_all_reduce, {"strategy": ShardingStrategy.NO_SHARD}),
    "not last": (not_last, {"offload_policy": Offload(params=True)}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_failed_forward_keeps_what_waits(way: str) -> None:
    """The scope is left before the next forward clears what failed: nothing may be lost."""
    postpone, options = WAYS[way]

    def ranks() -> None:
        rank, twin = make_twin(**options)
        postpone(twin.model)
        twin.backward(square, 0)
        fail(twin.model, "forward", rank)
        restore(twin.model)
        twin.backward(square, 1)
        twin.check_grads()
        twin.step()
        twin.check()

    simulate(ranks, 2)


@pytest.mark.parametrize("way", WAYS)
def test_a_failed_backward_drops_what_waits(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """The next step would add to its own what is left of the failed one's. Units are named."""
    postpone, options = WAYS[way]

    def ranks() -> None:
        rank, twin = make_twin(**options)
        postpone(twin.model)
        twin.backward(square, 0)
        fail(twin.model, "backward", rank)
        twin.plain_optim.zero_grad()
        for last in (False, True):
            (restore if last else postpone)(twin.model)
            twin.backward(square, 1 + last)
        twin.check_grads()
        twin.step()
        twin.check()

    with caplog.at_level(logging.WARNING, "fsdp_compose"):
        simulate(ranks, 2)
    said = [record.getMessage() for record in caplog.records]
    assert sum("waited for a later reduction" in text for text in said) == 2, said
    name = r"'(Fragile|blocks\.[012])'"
    named = rf"are dropped, in units such as {name}, {name}, {name}\. Clear \.grad and run"
    assert sum(re.search(named, text) is not None for text in said) == 2, said


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_a_failed_reduction_drops_what_waits(
    fails_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A hook raises in ``reduce_grads``: part of the gradients is gone, which is said."""

    def ranks() -> None:
        _, twin = make_twin()
        calls = 0

        def hook(state: Any, bucket: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == fails_at + 1:
                raise ValueError("of the hook")
            return fc.default_hook(state, bucket)

        with fc.no_sync(twin.model):
            twin.backward(square, 0)
        fc.register_comm_hook(twin.model, None, hook)
        with pytest.raises(ValueError, match="of the hook"):
            fc.reduce_grads(twin.model)
        twin.zero_grad()
        fc.reduce_grads(twin.model)
        assert all(param.grad is None for param in twin.model.parameters())
        fc.register_comm_hook(twin.model, None, None)
        twin.train(steps=1)

    with caplog.at_level(logging.WARNING, "fsdp_compose"):
        simulate(ranks, 2)
    said = [record.getMessage() for record in caplog.records]
    assert sum("Clear .grad and run the whole step again" in text for text in said) == 2, said


def test_an_ordinary_failure_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """What a backward that reduces had packed itself is dropped without a warning."""

    def ranks() -> None:
        rank, twin = make_twin()
        fail(twin.model, "backward", rank)
        twin.zero_grad()
        twin.train(steps=1)

    with caplog.at_level(logging.WARNING, "fsdp_compose"):
        simulate(ranks, 2)
    assert not [r for r in caplog.records if "waited" in r.getMessage()]


@pytest.mark.parametrize(
    "then", ["reduce_grads", "refresh", "skippable", "gathered", "unshard", "no_sync", "accumulate"]
)
def test_what_follows_a_failed_backward_directly(then: str) -> None:
    """No forward comes in between that would clear what the failure left."""

    def ranks() -> None:
        rank, twin = make_twin()
        for scope in (nullcontext, fc.no_sync):
            with scope(twin.model) if scope is fc.no_sync else nullcontext():
                fail(twin.model, "backward", rank)
            twin.zero_grad()
            if then == "reduce_grads":
                fc.reduce_grads(twin.model)
            elif then == "refresh":
                fc.refresh(twin.model)
            elif then == "skippable":
                with fc.skippable_step(twin.model) as step:
                    step.discard("it is a bad batch")
            elif then == "gathered":
                with fc.gathered(twin.model, writeback=True):
                    pass
            elif then == "unshard":
                fc.unshard(twin.model)
                fc.reshard(twin.model)
            elif then == "no_sync":
                with fc.no_sync(twin.model):
                    twin.backward(square, 7)
            else:
                with fc.accumulate(twin.model, "unsharded"):
                    twin.backward(square, 8)
            if then not in ("accumulate", "no_sync"):
                assert all(p.grad is None for p in twin.model.parameters())
            twin.train(steps=1)

    simulate(ranks, 2)
