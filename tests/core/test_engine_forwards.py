"""How forwards begin, join and end in cases that few models bring about."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fsdp_compose import MixedPrecision, fully_shard, gathered, set_debug, wrap
from fsdp_compose.base.process import here
from fsdp_compose.sharded import is_sharded, own_slice

from autograd_steps import leaves
from harness import run_ranks, simulate_ranks, single_process
from models import (
    WIDTH,
    Checkpointed,
    Tower,
    Twin,
    TwoKinds,
    by_block,
    data,
    mesh_of_replicas,
    one_unit,
    seeded,
    square,
    units,
    whole,
)


def test_a_graph_over_a_scope_holds_no_unit() -> None:
    """Its tensors are the scope's own, so nothing is gathered for the graph, or kept."""

    def ranks(rank: int) -> None:
        model = one_unit(seeded(lambda: Tower(1)))
        (unit,) = units(model)
        with gathered(model):
            penalty = sum(param.square().sum() for param in model.parameters())
        here.traffic.reset()
        found = torch.autograd.grad(penalty, leaves(model), create_graph=True)
        assert here.traffic.gathers == 0 and not unit.holds
        assert all(grad.requires_grad for grad in found)

    simulate_ranks(ranks)


def test_asking_for_gradients_releases_units() -> None:
    """As in an ordinary backward: each one when its own gradients are there."""

    def ranks(rank: int) -> None:
        model, seen = by_block(seeded(Tower)), list[bool]()
        x = data(0, rank).requires_grad_()
        x.register_hook(lambda grad: seen.extend(not unit.holds for unit in units(model)[1:]))
        torch.autograd.grad(square(model, x), [*leaves(model), x])
        assert seen == [True] * 3

    simulate_ranks(ranks)


def test_what_is_made_between_calls_is_not_theirs() -> None:
    """In debug mode tensors inside a forward lead to its unit; those between two of them do not."""

    def ranks(rank: int) -> None:
        set_debug(True)
        head = fully_shard(seeded(lambda: nn.Linear(WIDTH, 2)), reshard_after_forward=True)
        kept = [head(data(0, rank))]
        between = torch.ones(2, requires_grad=True).exp()
        kept.append(head(data(1, rank)))
        here.traffic.reset()
        between.sum().backward()
        assert here.traffic.gathers == 0

    simulate_ranks(ranks)


def test_gradients_of_one_bucket_are_asked_for() -> None:
    """The other one of its unit has none to reduce."""
    with single_process():
        plain = TwoKinds()
        model = fully_shard(copy.deepcopy(plain))
        for ours, theirs in zip(model, plain, strict=True):
            (wanted,) = torch.autograd.grad(square(plain, data(0, 0)), theirs.bias)
            (found,) = torch.autograd.grad(square(model, data(0, 0)), ours.bias)
            torch.testing.assert_close(whole(found), wanted)


def test_a_recomputed_part_has_two_buckets() -> None:
    """Its gradients wait for the rest of the unit's, those of both kinds."""

    class Whole(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](checkpoint(self[0], x, use_reentrant=True))

    with single_process():
        plain = Whole(TwoKinds(), nn.Linear(WIDTH, 2).double())
        model = fully_shard(copy.deepcopy(plain))
        x = data(0, 0).requires_grad_()
        square(plain, x).backward()
        square(model, x).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(ours.grad), theirs.grad)


def test_ranks_that_give_other_tensors_are_told() -> None:
    """Second gradients of what they gave would be added up for different parameters."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(lambda: Tower(1)))
        names = ["head.weight", "head.bias"][: rank + 1]
        given = {name: model.get_parameter(name) * 2 for name in names}
        with pytest.raises(RuntimeError, match="reduce"):
            functional_call(model, given, (data(0, rank),)).sum().backward()

    simulate_ranks(ranks)


class Catching(Tower):
    """Goes on without a block that was interrupted."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.blocks[0](x)
        except KeyboardInterrupt:
            return self.head(x)
        return self.head(self.first(x))


def test_a_forward_that_catches_an_interrupt() -> None:
    """The interrupt runs no hook of the block's; the forward around it ends all the same."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def ranks(rank: int) -> None:
        model = by_block(seeded(lambda: Catching(1)))
        handle = model.blocks[0].up.register_forward_pre_hook(interrupt)
        model(data(0, rank))
        handle.remove()
        assert not units(model)[0].engine.schedule.active

    simulate_ranks(ranks)


def test_a_head_on_chunks_behind_units_in_units() -> None:
    """Its calls join although the forward before them ran several units."""

    def ranks(rank: int) -> None:
        model = seeded(lambda: nn.Sequential(Tower(1), nn.Linear(2, 2)))
        names = {"0", "0.blocks.0", "1"}
        fully_shard(model, units=wrap.by_fn(lambda name, _: name in names))
        here.traffic.reset()
        parts = model[0](data(0, rank)).chunk(3)
        sum(model[1](part).square().sum() for part in parts).backward()
        assert here.traffic.reduces == len(names)

    simulate_ranks(ranks)


def test_a_copy_begins_with_a_functional_call() -> None:
    """A copy looks through its modules at its first forward of its own."""
    with single_process():
        plain = seeded(lambda: Tower(1))
        given = {"head.bias": torch.ones(2, dtype=torch.float64)}
        wanted = functional_call(plain, given, (data(0, 0),))
        model = copy.deepcopy(one_unit(plain))
        assert torch.equal(functional_call(model, given, (data(0, 0),)), wanted)


def test_a_transform_of_a_step_after_one_that_failed() -> None:
    """What the failed one left to be summed is summed outside of the transform."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    def ranks(rank: int) -> None:
        model = by_block(seeded(lambda: Tower(1)), mesh=mesh_of_replicas(2, 1))
        hook = model.first.register_full_backward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            square(model, data(0, rank)).backward()
        hook.remove()
        wanted = seeded(lambda: Tower(1))(data(0, rank))
        torch.testing.assert_close(torch.func.functionalize(model)(data(0, rank)), wanted)

    run_ranks(ranks, 2)


class Around(nn.Module):
    """Computes before and behind another module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, inner: Any) -> Tensor:
        return self.layer(torch.tanh(inner(self.layer(x))))


class Pair(nn.Module):
    """Two modules side by side, one of which is called inside the other."""

    def __init__(self, call: Callable[[Any], Any]) -> None:
        super().__init__()
        self.around, self.inner, self.call = Around(), nn.Linear(WIDTH, WIDTH), call

    def forward(self, x: Tensor) -> Tensor:
        return self.around(x, self.call(self.inner))


@pytest.mark.parametrize("call", [lambda module: module, torch.vmap], ids=["called", "vmap"])
def test_a_unit_of_modules_that_call_each_other(call: Callable[[Any], Any]) -> None:
    """The call inside belongs to the forward that runs, which no interrupt ended."""

    def ranks(rank: int) -> None:
        shard = lambda model: fully_shard([model.around, model.inner])  # noqa: E731
        Twin(rank, 2, lambda: Pair(call), shard).train(steps=2)

    simulate_ranks(ranks)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_units_show_their_shards(reentrant: bool) -> None:
    """As behind a first forward, while the units that follow are recomputed too."""

    def ranks(rank: int) -> None:
        model, seen = by_block(seeded(lambda: Checkpointed("pairs", reentrant, 2))), list[bool]()
        look = lambda *_: seen.append(is_sharded(model.blocks[0].up.weight))  # noqa: E731
        model.blocks[1].register_forward_pre_hook(look)
        square(model, data(0, rank)).backward()
        assert seen == [True] * 2

    simulate_ranks(ranks)


class Seeing(nn.Linear):
    """Notes in which dtype its inputs come; hands float32 on to the module inside it."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__(WIDTH, WIDTH)
        self.inner, self.seen = inner, list[torch.dtype]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        x = super().forward(x.to(self.weight.dtype))
        return x if self.inner is None else self.inner(x.float())


def test_which_forwards_cast_their_inputs() -> None:
    """Each unit's, none, or the outermost one's."""
    full, half = torch.float32, torch.bfloat16
    for casts, wanted in (True, [half, half]), (False, [full, full]), ("root", [half, full]):
        with single_process():
            policy = MixedPrecision(half, cast_forward_inputs=casts)
            model = Seeing(fully_shard(Seeing(), mp_policy=policy))
            fully_shard(model, mp_policy=policy)(torch.ones(1, WIDTH))
            assert model.seen + model.inner.seen == wanted


class Opaque(nn.Linear):
    """Gives its output in an object that nothing looks into."""

    def forward(self, x: Tensor) -> Any:
        return iter([super().forward(x)])


@pytest.mark.filterwarnings("ignore:unit 'Opaque' returned")
def test_a_backward_through_what_outlives_its_model() -> None:
    """Also where no hook on an output tells when the backward begins."""
    with single_process():
        model = fully_shard(Opaque(WIDTH, 2))
        (output,) = model(torch.ones(1, WIDTH))
        del model
        with pytest.raises(RuntimeError, match="deleted after its forward"):
            output.sum().backward()


def test_second_gradients_in_a_scope_are_exact() -> None:
    """They stay in the dtype of the scope's tensors, whatever forward computes in."""

    def ranks(rank: int) -> None:
        policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float64)
        model = one_unit(seeded(lambda: nn.Linear(WIDTH, 2)), mp_policy=policy)
        full = model.weight.full_tensor()
        with gathered(model):
            loss = model.weight.pow(3).sum()
        (first,) = torch.autograd.grad(loss, model.weight, create_graph=True)
        (second,) = torch.autograd.grad((first.to_local() / 3).pow(2).sum(), model.weight)
        wanted = own_slice(4 * full.pow(3), model.weight._shard_spec)
        torch.testing.assert_close(second.to_local(), wanted)

    simulate_ranks(ranks)
