"""An error in any phase of a step leaves nothing behind that a later step could see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import Prefetch, ShardingStrategy

from harness import run_ranks
from models import (
    SHARDS,
    Checkpointed,
    Tower,
    Twin,
    by_block,
    data,
    seeded,
    square,
    whole,
)


class Fragile(Tower):
    """Raises where ``at`` says: in its own forward, in a block's, or in a backward."""

    at: Any = None
    error: type[BaseException] = ValueError

    def __init__(self, depth: int = 3) -> None:
        super().__init__(depth)
        for i, block in enumerate(self.blocks):
            inner = block.up.forward

            def forward(x: Tensor, i: int = i, inner: Any = inner) -> Tensor:
                if self.at == i:
                    raise self.error("on purpose")
                return inner(x)

            block.up.forward = forward

    def forward(self, x: Tensor) -> Tensor:
        if self.at == "start":
            raise self.error("on purpose")
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if self.at == f"backward {i}":
                x.register_hook(self._fail)
        if self.at == "end":
            raise self.error("on purpose")
        return self.head(x)

    def _fail(self, grad: Tensor) -> None:
        raise self.error("on purpose")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("strategy", [None, ShardingStrategy.SHARD_GRAD_OP])
@pytest.mark.parametrize("shard", ["blocks", "one"])
def test_a_failed_step_leaves_nothing_behind(
    shard: str, strategy: ShardingStrategy | None, error: type[BaseException]
) -> None:
    """An interrupt ends a forward without running any forward hook."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Fragile, lambda m: SHARDS[shard](m, strategy=strategy))
        for seed, at in enumerate(("start", 0, 1, 2, "end", "backward 0", "backward 2")):
            twin.backward(square, seed)
            twin.step()
            twin.model.at, twin.model.error = at, error
            with pytest.raises(error, match="on purpose"):
                square(twin.model, data(99, rank)).backward()
            twin.model.at = None
            twin.zero_grad()
        twin.train(steps=1)

    run_ranks(ranks)


@pytest.mark.parametrize("at", [1, "end", "backward 1"])
def test_a_failed_first_step(at: Any) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Fragile)
        twin.model.at = at
        with pytest.raises(ValueError, match="on purpose"):
            square(twin.model, data(99, rank)).backward()
        twin.model.at = None
        twin.zero_grad()
        twin.train()

    run_ranks(ranks)


@pytest.mark.parametrize("at", [1, "backward 1"])
def test_gradients_before_a_failed_micro_batch_stay(at: Any) -> None:
    """A failed forward changes no gradient; a failed backward leaves those that were complete."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Fragile)
        twin.backward(square, 0)
        before = [whole(p.grad) for p in twin.model.blocks[0].parameters()]
        twin.model.at = at
        with pytest.raises(ValueError, match="on purpose"):
            square(twin.model, data(99, rank)).backward()
        twin.model.at = None
        if at == 1:
            twin.check_grads()
            twin.backward(square, 1)
            twin.step()
            twin.check()
        else:
            with torch.no_grad():
                twin.model(data(1, rank))
            after = [whole(p.grad) for p in twin.model.blocks[0].parameters()]
            assert all(torch.equal(a, b) for a, b in zip(before, after))

    run_ranks(ranks)


@pytest.mark.parametrize("strategy", [None, ShardingStrategy.SHARD_GRAD_OP])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("depth", [1, 3])
def test_an_update_after_a_failed_micro_batch_is_read(
    error: type[BaseException], strategy: ShardingStrategy | None, depth: int
) -> None:
    """What was gathered ahead of the failure holds the weights from before the update."""

    def ranks(rank: int) -> None:
        ahead = Prefetch(depth, depth)
        shard = lambda m: by_block(m, strategy=strategy, prefetch=ahead)  # noqa: E731
        twin = Twin(rank, 2, Fragile, shard)
        twin.train(steps=2)
        for seed, at in enumerate(("start", 0, 1, 2, "end")):
            twin.backward(square, seed)
            twin.model.at, twin.model.error = at, error
            with pytest.raises(error, match="on purpose"):
                square(twin.model, data(99, rank))
            twin.model.at = None
            if error is KeyboardInterrupt:  # said once, as clipping may have reached nothing
                with pytest.raises(RuntimeError, match="the forward before this one was interrupt"):
                    twin.optim.step()
            for optim in (twin.optim, twin.plain_optim):
                optim.step()
            twin.zero_grad()
        twin.train(steps=1)

    run_ranks(ranks)


def test_error_in_inference_then_training() -> None:
    def ranks(rank: int) -> None:
        for error in (ValueError, KeyboardInterrupt):
            twin = Twin(rank, 2, Fragile)
            for at in (0, 2, "end"):
                twin.model.at, twin.model.error = at, error
                with pytest.raises(error, match="on purpose"), torch.no_grad():
                    twin.model(data(99, rank))
                twin.model.at = None
                twin.train(steps=1)

    run_ranks(ranks)


def test_error_in_recomputation_then_a_normal_step() -> None:
    def ranks(rank: int) -> None:
        for reentrant in (False, True):
            for where in ("outside", "inside", "root"):
                twin = Twin(rank, 2, lambda: Checkpointed(where, reentrant))
                calls = [0]

                def fail(module: nn.Module, args: Any, calls: list[int] = calls) -> None:
                    calls[0] += 1
                    if calls[0] == 2:
                        raise ValueError("on purpose")

                handle = twin.model.blocks[1].norm.register_forward_pre_hook(fail)
                with pytest.raises(ValueError, match="on purpose"):
                    square(twin.model, data(99, rank)).backward()
                handle.remove()
                twin.zero_grad()
                twin.train(steps=1)

    run_ranks(ranks)


@pytest.mark.parametrize(
    ("at", "error"),
    # An interrupt in forward runs no hook, so there the leaves are back in the next forward only.
    [(1, ValueError), ("backward 1", ValueError), ("backward 1", KeyboardInterrupt)],
)
def test_after_a_failure_the_model_holds_its_leaves(at: Any, error: type[BaseException]) -> None:
    """What follows an error is often ``model.zero_grad()``, or a checkpoint of what was trained."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Fragile)
        twin.train(steps=1)
        before = list(twin.model.parameters())
        twin.model.at, twin.model.error = at, error
        with pytest.raises(error, match="on purpose"):
            square(twin.model, data(99, rank)).backward()
        after = list(twin.model.parameters())
        assert all(a is b for a, b in zip(after, before, strict=True))
        twin.model.zero_grad()

    run_ranks(ranks)


def test_a_new_model_after_a_failed_backward() -> None:
    """What the failed step left under way is over before the ranks meet to shard another model."""

    def ranks(rank: int) -> None:
        for _ in range(2):
            model, plain = by_block(seeded(Tower)), seeded(Tower)
            out = model(data(0, rank))
            out.register_hook(lambda grad: grad.view(-1, 7))
            with pytest.raises(RuntimeError):
                out.sum().backward()
        found, wanted = by_block(seeded(Tower))(data(1, rank)), plain(data(1, rank))
        assert torch.equal(found, wanted)

    run_ranks(ranks, timeout=30)
