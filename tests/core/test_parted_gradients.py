"""Hooks get a gradient whole where a loss reads a parameter in its unit's forward and outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import (
    MixedPrecision,
    Offload,
    ShardingStrategy,
    flat_parameters,
    fully_shard,
    no_sync,
    register_post_reduce_hook,
    set_traceable,
    wrap,
)
from fsdp_compose.core.state import iter_units

from harness import run_ranks, simulate_ranks
from models import WIDTH, seeded, sgd, whole

WAYS: dict[str, dict[str, Any]] = {
    "released": {},
    "kept": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "replicated": {"strategy": ShardingStrategy.NO_SHARD},
    "offloaded": {"offload_policy": Offload(params=True)},
    "in another dtype": {"mp_policy": MixedPrecision(torch.float64, torch.float64)},
}


class Pair(nn.Module):
    """Two layers, of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        y = self.first(x).tanh()
        z = self.second(y)
        return z if both else y


def shard(model: nn.Module, **way: Any) -> nn.Module:
    return fully_shard(model, units=wrap.by_class({nn.Linear}), **way)


def batch(seed: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def penalty(model: Any) -> Tensor:
    total: Tensor = model.first.weight.square().sum() + model.second.weight.square().sum()
    return total


def loss_of(model: Any, x: Tensor, order: str) -> Tensor:
    """Fit and penalty; which of the two parts comes first in backward follows from the order."""
    if order == "penalty first":
        early = penalty(model)
        loss: Tensor = 20 * model(x).square().mean() + early
        return loss
    loss = 20 * model(x, both=order != "one left out").square().mean()
    return (0.0 if order == "penalty alone" else loss) + penalty(model)


class Counted:
    """Clips what it is given, and counts."""

    def __init__(self, model: nn.Module, is_late: bool) -> None:
        self.calls = 0
        for param in model.parameters():
            if is_late:
                param.register_post_accumulate_grad_hook(self.clip)
            else:
                param.register_hook(self.clipped)

    def clipped(self, grad: Tensor) -> Tensor:
        self.calls += 1
        return grad.clamp(-0.2, 0.2)

    def clip(self, param: Any) -> None:
        self.calls += 1
        param.grad.clamp_(-0.2, 0.2)


def compare(sharded: nn.Module, plain: nn.Module, what: str) -> None:
    for (name, param), wanted in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        found: Any = param.grad
        if wanted.grad is None:
            assert found is None, name
        else:
            torch.testing.assert_close(found.full_tensor(), wanted.grad, msg=f"{what}: {name}")


@pytest.mark.parametrize("is_late", [False, True], ids=["hook", "post-accumulate hook"])
@pytest.mark.parametrize(
    "order", ["penalty first", "penalty last", "one left out", "penalty alone"]
)
def test_one_call_for_the_sum(order: str, is_late: bool) -> None:
    def ranks(rank: int) -> None:
        for name, way in WAYS.items():
            plain, sharded = seeded(Pair), shard(seeded(Pair), **way)
            counts = [Counted(model, is_late) for model in (plain, sharded)]
            for seed in range(2):
                inputs = torch.cat([batch(seed, 0), batch(seed, 1)]), batch(seed, rank)
                for model, x in zip((plain, sharded), inputs, strict=True):
                    model.zero_grad()
                    loss_of(model, x, order).backward()
                compare(sharded, plain, name)
            assert counts[0].calls == counts[1].calls, name

    simulate_ranks(ranks)


@pytest.mark.filterwarnings("ignore:.*create_graph=True will create a reference cycle")
@pytest.mark.parametrize("is_late", [False, True], ids=["hook", "post-accumulate hook"])
def test_one_call_for_the_sum_with_a_graph(is_late: bool) -> None:
    """Also a second derivative goes through both parts."""

    def ranks(rank: int) -> None:
        for order in ("penalty first", "penalty last", "one left out", "penalty alone"):
            plain, sharded = seeded(Pair), shard(seeded(Pair))
            counts = [Counted(model, is_late) for model in (plain, sharded)]
            inputs = torch.cat([batch(0, 0), batch(0, 1)]), batch(0, rank)
            for model, x in zip((plain, sharded), inputs, strict=True):
                if is_late:
                    loss_of(model, x, order).backward(create_graph=True)
                    continue
                loss_of(model, x, order).backward(create_graph=True)
                grads: list[Any] = [p.grad for p in model.parameters() if p.grad is not None]
                torch.stack([grad.square().sum() for grad in grads]).sum().backward()
            compare(sharded, plain, order)
            assert counts[0].calls == counts[1].calls, order

    simulate_ranks(ranks)


def test_one_call_for_the_sum_over_a_compiled_graph() -> None:
    def ranks(rank: int) -> None:
        for order in ("penalty first", "penalty last"):
            plain, sharded = seeded(Pair), shard(seeded(Pair))
            set_traceable(sharded)
            counts = [Counted(model, is_late=False) for model in (plain, sharded)]
            compiled = torch.compile(sharded, backend="aot_eager")
            for seed in range(2):
                loss_of(plain, torch.cat([batch(seed, 0), batch(seed, 1)]), order).backward()
                loss_of(compiled, batch(seed, rank), order).backward()
            compare(sharded, plain, order)
            assert counts[0].calls == counts[1].calls, order

    simulate_ranks(ranks)


@pytest.mark.filterwarnings("ignore:.*create_graph=True will create a reference cycle")
@pytest.mark.parametrize("with_graph", [False, True], ids=["no graph", "graph"])
@pytest.mark.parametrize("order", ["penalty first", "penalty last"])
def test_post_reduce_hooks_see_the_sum_once(order: str, with_graph: bool) -> None:
    def ranks(rank: int) -> None:
        for is_hooked in (False, True):
            plain, sharded = seeded(Pair), shard(seeded(Pair))
            seen: list[tuple[Any, Tensor]] = []

            def note(_: nn.Module, params: list[Any], seen: list[Any] = seen) -> None:
                seen.extend((p, p.grad.full_tensor().detach()) for p in params)

            register_post_reduce_hook(sharded, note)
            inputs = torch.cat([batch(0, 0), batch(0, 1)]), batch(0, rank)
            for model, x in zip((plain, sharded), inputs, strict=True):
                if is_hooked:
                    Counted(model, is_late=False)
                loss_of(model, x, order).backward(create_graph=with_graph)
            assert len(seen) == 4
            by_param = dict(seen)
            for param, wanted in zip(sharded.parameters(), plain.parameters(), strict=True):
                assert wanted.grad is not None
                torch.testing.assert_close(by_param[param], wanted.grad.detach())

    simulate_ranks(ranks)


def test_an_optimizer_in_backward_steps_once() -> None:
    def ranks(rank: int) -> None:
        models = seeded(Pair), shard(seeded(Pair))
        steps: dict[Any, torch.optim.Optimizer] = {}

        def step(param: Any) -> None:
            steps[param].step()
            steps[param].zero_grad()

        for model in models:
            for param in model.parameters():
                steps[param] = torch.optim.Adam([param], lr=0.1)
                param.register_post_accumulate_grad_hook(step)
        for seed in range(4):
            inputs = torch.cat([batch(seed, 0), batch(seed, 1)]), batch(seed, rank)
            for model, x in zip(models, inputs, strict=True):
                order = ["penalty first", "penalty last"][seed % 2]
                loss_of(model, x, order).backward()
        for param, wanted in zip(models[1].parameters(), models[0].parameters(), strict=True):
            found: Any = param
            torch.testing.assert_close(found.full_tensor(), wanted.detach())

    run_ranks(ranks)


@pytest.mark.parametrize("order", ["penalty first", "penalty last"])
def test_what_a_failed_backward_held_is_dropped(order: str) -> None:
    def ranks(rank: int) -> None:
        plain, sharded = seeded(Pair), shard(seeded(Pair))
        for model in (plain, sharded):
            Counted(model, is_late=False)
        fail: list[int] = []

        def failing(grad: Tensor) -> None:
            fail.append(1)
            raise KeyError("no more")

        x = batch(0, rank).requires_grad_()
        handle = x.register_hook(failing)
        with pytest.raises(KeyError):
            loss_of(sharded, x, order).backward()
        handle.remove()
        sharded.zero_grad()
        engines = {unit.engine for unit in iter_units(sharded)}
        for model, given in (
            (plain, torch.cat([batch(1, 0), batch(1, 1)])),
            (sharded, batch(1, rank)),
        ):
            (20 * model(given).square().mean()).backward()
        compare(sharded, plain, order)
        assert fail and not any(engine.held for engine in engines)

    run_ranks(ranks)


def test_a_backward_of_the_penalty_alone() -> None:
    """As for plain parameters: what one backward brings is one gradient, and two bring two."""

    def ranks(rank: int) -> None:
        plain, sharded = seeded(Pair), shard(seeded(Pair))
        counts = [Counted(model, is_late=False) for model in (plain, sharded)]
        inputs = torch.cat([batch(0, 0), batch(0, 1)]), batch(0, rank)
        for model, x in zip((plain, sharded), inputs, strict=True):
            fit = 20 * model(x).square().mean()
            penalty(model).backward()
            fit.backward()
        compare(sharded, plain, "apart")
        assert [count.calls for count in counts] == [6, 6]

    simulate_ranks(ranks)


def test_a_backward_inside_ends_no_wait() -> None:
    """What is held of a gradient waits for the end of the outermost backward."""

    class Between(torch.autograd.Function):
        """Trains the second layer in its backward."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
            ctx.layer = layer
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            with torch.enable_grad():
                ctx.layer(torch.ones_like(grad)).sum().backward()
            return grad, None

    plain = seeded(Pair)
    model = shard(seeded(Pair))
    found: list[list[Tensor]] = []
    for each in (plain, model):
        seen: list[Tensor] = []
        each.first.weight.register_hook(seen.append)
        y = Between.apply(each(batch(0, 0), both=False), each.second)
        (y.sum() + each.first.weight.square().sum()).backward()
        found.append([*seen, each.first.weight.grad, each.second.weight.grad])
    wanted, mine = found
    assert len(mine) == len(wanted) == 3
    for grad, other in zip(mine, wanted, strict=True):
        torch.testing.assert_close(whole(grad), other)


@pytest.mark.parametrize("with_unit", [False, True], ids=["penalty", "penalty and a forward"])
def test_a_backward_inside_is_a_gradient_of_its_own(with_unit: bool) -> None:
    """Hooks get it apart from that of the backward around it, which is reduced at that time."""

    class Between(torch.autograd.Function):
        """Trains the second layer in its backward, once the gradient of that layer is there."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, model: nn.Module) -> Tensor:
            ctx.model = model
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            with torch.enable_grad():
                loss = ctx.model.second.weight.square().sum()
                if with_unit:
                    loss = loss + ctx.model.first(torch.ones_like(grad)).sum()
                loss.backward()
            return grad, None

    def ranks(rank: int) -> None:
        found: list[list[Tensor]] = []
        for each in (seeded(Pair), shard(seeded(Pair))):
            seen: list[Tensor] = []
            each.second.weight.register_hook(seen.append)
            each.second(Between.apply(each.first(batch(0, 0)), each)).sum().backward()
            seen.sort(key=lambda grad: float(grad.norm()))  # a reduction may come later
            found.append([*seen, each.first.weight.grad, each.second.weight.grad])
        wanted, mine = found
        assert len(mine) == len(wanted) == 4
        for grad, other in zip(mine, wanted, strict=True):
            torch.testing.assert_close(whole(grad), other)

    simulate_ranks(ranks)


def test_inside_no_sync_the_penalty_does_not_wait() -> None:
    """The forward's part waits for the reduction, with those of other microbatches."""

    def ranks(rank: int) -> None:
        plain, sharded = seeded(Pair), shard(seeded(Pair))
        with no_sync(sharded):
            loss_of(sharded, batch(0, rank), "penalty last").backward()
        loss_of(sharded, batch(1, rank), "penalty last").backward()
        for seed in range(2):
            x = torch.cat([batch(seed, 0), batch(seed, 1)])
            loss_of(plain, x, "penalty last").backward()
        compare(sharded, plain, "no_sync")

    simulate_ranks(ranks)


def test_optimizers_over_flat_parameters() -> None:
    def ranks(rank: int) -> None:
        plain, sharded = seeded(Pair), shard(seeded(Pair))
        optims = [sgd(plain.parameters()), sgd(flat_parameters(sharded))]
        for model in (plain, sharded):
            Counted(model, is_late=False)
        for seed in range(3):
            inputs = torch.cat([batch(seed, 0), batch(seed, 1)]), batch(seed, rank)
            for model, optim, x in zip((plain, sharded), optims, inputs, strict=True):
                optim.zero_grad()
                loss_of(model, x, "penalty last" if seed else "penalty first").backward()
                optim.step()
        for param, wanted in zip(sharded.parameters(), plain.parameters(), strict=True):
            found: Any = param
            torch.testing.assert_close(found.full_tensor(), wanted.detach())

    run_ranks(ranks)
