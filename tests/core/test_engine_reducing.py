"""What is reduced when, over which ranks, and what waits meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_compose import (
    ShardingStrategy,
    gathered,
    local_parameters,
    no_sync,
    reduce_grads,
    register_post_reduce_hook,
    set_requires_all_reduce,
)
from fsdp_compose.base.process import here
from fsdp_compose.comm import collectives as comm
from fsdp_compose.scopes.unreduced import UnreducedGradient
from fsdp_compose.sharded import is_sharded

from harness import fake_world, simulate_ranks
from models import (
    Tower,
    Twin,
    by_block,
    data,
    mesh_of_replicas,
    seeded,
    square,
    two_blocks,
    whole,
)


def test_what_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend's gathers and reductions in the first step; none where a tree adds them up."""
    planned: list[str] = []

    def note(name: str) -> None:
        plan = getattr(comm, name)
        monkeypatch.setattr(comm, name, lambda *given: (planned.append(name), plan(*given))[1])

    note("plan_gather")
    note("plan_reduce")
    with fake_world(4):
        model = by_block(seeded(two_blocks))
        for seed in range(3):
            square(model, data(seed, 0)).backward()
            assert sorted(planned) == ["plan_gather"] * 3 + ["plan_reduce"] * 3
        planned.clear()
        model = by_block(seeded(two_blocks), deterministic=4)
        square(model, data(0, 0)).backward()
        assert planned == ["plan_gather"] * 3


def test_a_backward_leaves_what_replicas_gathered() -> None:
    """Until the optimizer writes, further passes gather over the shard group alone."""

    def ranks(rank: int) -> None:
        strategy = ShardingStrategy.HYBRID_SHARD_OPTIMIZER
        model = by_block(seeded(two_blocks), mesh=mesh_of_replicas(2, 2), strategy=strategy)

        def evaluate() -> tuple[int, int]:
            here.traffic.reset()
            with torch.no_grad():
                model(data(0, rank))
            return here.traffic.gathers, here.traffic.gather_bytes

        first, wanted = evaluate(), evaluate()
        square(model, data(1, rank)).backward()
        assert first > wanted == evaluate()

    simulate_ranks(ranks, 4)


def test_without_replicas_nothing_waits_for_them() -> None:
    """``set_requires_all_reduce(False)`` puts off the sum over replicas, and there are none."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks)
        set_requires_all_reduce(twin.model, False)
        twin.train(steps=2)

    simulate_ranks(ranks)


def test_gradients_asked_for_while_others_wait() -> None:
    """They are averaged over all replicas, and do not join what waits to be."""

    def ranks(rank: int) -> None:
        mesh = mesh_of_replicas(2, 2)
        twin = Twin(rank, 4, two_blocks, lambda m: by_block(m, mesh=mesh))
        set_requires_all_reduce(twin.model, False)
        twin.backward(square, 0)
        loss, plain = twin.losses(square, 1)
        found = torch.autograd.grad(loss, list(twin.model.parameters()))
        wanted = torch.autograd.grad(plain, list(twin.reference.parameters()))
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(whole(mine), theirs)
        assert all(type(p.grad) is UnreducedGradient for p in twin.model.parameters())
        set_requires_all_reduce(twin.model, True)
        twin.backward(square, 2)
        twin.step()
        twin.check()

    simulate_ranks(ranks, 4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_asked_for_leave_what_waits(ranks: int) -> None:
    """What waits packed is seen to wait still: a read of it raises, and clearing drops it."""

    def train(rank: int) -> None:
        twin = Twin(rank, ranks, two_blocks)
        params = list(twin.model.parameters())
        with no_sync(twin.model):
            square(twin.model, data(0, rank)).backward()
        torch.autograd.grad(square(twin.model, data(1, rank)), params)
        assert all(type(p.grad) is UnreducedGradient for p in params)
        twin.model.zero_grad()
        assert all(p.grad is None for p in params)
        twin.train(steps=1)

    simulate_ranks(train, ranks)


def test_what_is_added_to_gradients_with_a_graph() -> None:
    """As in autograd, adding to ``.grad`` in place makes no graph of its own."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        params = list(model.parameters())
        found = torch.autograd.grad(square(model, data(0, rank)), params, create_graph=True)
        before = [grad.grad_fn for grad in found]
        for param, grad in zip(params, found, strict=True):
            param.grad = grad
        with no_sync(model):
            square(model, data(1, rank)).backward()
        reduce_grads(model)
        assert None not in before and [param.grad.grad_fn for param in params] == before

    simulate_ranks(ranks)


def test_gradients_that_a_hook_took_are_gone() -> None:
    """An optimizer over plain parameters that steps in a hook and clears its gradients."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks))
        optim = torch.optim.SGD(local_parameters(model.blocks[0]), lr=0.1)

        def step(*_: Any) -> None:
            optim.step()
            optim.zero_grad()

        register_post_reduce_hook(model.blocks[0], step)
        square(model, data(0, rank)).backward()
        assert all(param.grad is None for param in model.blocks[0].parameters())
        assert all(param.grad is not None for param in model.blocks[1].parameters())

    simulate_ranks(ranks)


def test_hooks_in_a_scope_see_slices() -> None:
    """As in any backward, though the parameters are full around it."""

    def ranks(rank: int) -> None:
        model, seen = by_block(seeded(two_blocks)), list[bool]()
        weight = model.blocks[0].up.weight
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(is_sharded(p)))
        look = lambda _, params: seen.extend(map(is_sharded, params))  # noqa: E731
        register_post_reduce_hook(model.blocks[0], look)
        with gathered(model):
            square(model, data(0, rank)).backward()
            assert not is_sharded(weight)
        assert seen == [True] * 6

    simulate_ranks(ranks)


def test_gradients_added_up_in_a_tree_are_averaged() -> None:
    """``deterministic=`` changes the order of the sum, not what it is."""

    def ranks(rank: int) -> None:
        shard = lambda m: by_block(m, deterministic=2)  # noqa: E731
        Twin(rank, 2, two_blocks, shard).train(steps=2)

    simulate_ranks(ranks)


def test_a_loss_outside_of_forwards_is_in_no_tree() -> None:
    """A penalty on slices would be added once for each microbatch of a rank."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks), deterministic=4)
        name, param = next(iter(model.named_parameters()))
        with pytest.raises(RuntimeError) as raised:
            param.square().sum().backward()
        text = str(raised.value)
        assert f"parameter {name!r} of unit" in text and "with deterministic=4, which adds" in text
        assert "`with fsdp_compose.gathered(module):`" in text and param.grad is None

    simulate_ranks(ranks)


def test_hooks_run_while_backward_goes_on() -> None:
    """A unit's gradients arrive before the backward of the last unit begins, not at its end."""

    def ranks(rank: int) -> None:
        model, events = by_block(seeded(Tower)), list[str]()
        for index, block in enumerate(model.blocks):
            note = lambda *_, index=index: events.append(f"reduced {index}")  # noqa: E731
            register_post_reduce_hook(block, note)
        model.blocks[0].register_full_backward_pre_hook(lambda *_: events.append("backward of 0"))
        for seed in range(2):
            events.clear()
            square(model, data(seed, rank)).backward()
            assert events == ["reduced 2", "backward of 0", "reduced 1", "reduced 0"]

    simulate_ranks(ranks)
