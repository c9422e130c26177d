"""Units that train nothing: what they are given, and where their backward ends."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

from fsdp_compose import MixedPrecision, count_traffic, fully_shard, reshard, unshard

from harness import simulate_ranks
from models import WIDTH, assert_at_rest, data, seeded, square, two_blocks, units, whole


class Mixing(nn.Module):
    """Takes a tensor that may train, one that does not, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, other: Tensor, scale: float) -> Tensor:
        return scale * torch.tanh(self.left(x)) + self.right(other)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixing = nn.Linear(WIDTH, WIDTH), Mixing().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixing(self.first(x), other=x, scale=0.5)


def test_inputs_of_a_frozen_unit_reach_it_unchanged() -> None:
    """Those that need a gradient get it; the others stay what they are."""

    def ranks(rank: int) -> None:
        plain = seeded(Model)
        model = copy.deepcopy(plain)
        fully_shard(model.mixing)
        fully_shard(model)
        square(model, data(0, rank)).backward()
        sum(square(plain, data(0, r)) / 2 for r in range(2)).backward()
        assert_close(whole(model.first.weight.grad), plain.first.weight.grad)
        assert_at_rest(model)

    simulate_ranks(ranks)


@pytest.mark.parametrize("others_need", [False, True])
def test_a_sparse_input_of_a_frozen_unit(others_need: bool) -> None:
    class Joined(nn.Linear):
        def forward(self, edges: Tensor, x: Tensor) -> Tensor:
            return torch.sparse.mm(edges, super().forward(x))

    def ranks(rank: int) -> None:
        plain = seeded(lambda: Joined(WIDTH, WIDTH)).requires_grad_(False)
        model = fully_shard(copy.deepcopy(plain))
        found = []
        for module in (plain, model):
            edges = torch.eye(3).double().to_sparse().requires_grad_()
            x = data(0, rank, 3, WIDTH).requires_grad_(others_need)
            square(lambda given, f=module, e=edges: f(e, given), x).backward()
            found.append((edges.grad.to_dense(), x.grad))
        assert_close(*found)
        assert_at_rest(model)

    simulate_ranks(ranks)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_inputs_of_a_frozen_unit_are_cast(needs_grad: bool) -> None:
    """To the compute dtype, whether a gradient comes back to them or not."""

    def ranks(rank: int) -> None:
        policy = MixedPrecision(torch.bfloat16, cast_forward_inputs=True)
        model = fully_shard(seeded(Mixing).requires_grad_(False), mp_policy=policy)
        x = data(0, rank).requires_grad_(needs_grad)
        out = model(x, other=data(1, rank), scale=0.5)
        assert out.dtype is torch.bfloat16 and out.requires_grad is needs_grad

    simulate_ranks(ranks)


class Bag(list[Tensor]):
    """Nothing that is looked for in attributes."""


class Around(nn.Module):
    """A frozen layer after a unit that trains, whose result is left in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.bag = Bag()

    def forward(self, x: Tensor) -> Tensor:
        self.bag.append(torch.tanh(self.inner(x)))
        return self.last(self.bag[-1])


def test_a_backward_that_does_not_need_a_frozen_unit() -> None:
    """It gathers the unit inside alone, also after a forward whose input needed a gradient."""

    def ranks(rank: int) -> None:
        model = seeded(Around)
        for unit in (model.inner, model):
            fully_shard(unit, reshard_after_forward=True)
        model(data(0, rank).requires_grad_())
        model.bag.clear()
        model(data(1, rank))
        with count_traffic() as traffic:
            model.bag.pop().sum().backward()
        assert traffic.gathers == 1
        assert_at_rest(model)

    simulate_ranks(ranks)


class Counting(nn.Linear):
    """Gives numbers that no gradient flows through."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(-1)


class Choosing(nn.Module):
    """Has no parameters, and gives what no tensor is found in."""

    def forward(self, x: Tensor) -> Any:
        return iter([x])


def test_outputs_without_gradients_need_no_warning() -> None:
    """Integers, or what a unit without parameters gives, keep nothing gathered."""

    def ranks(rank: int) -> None:
        model = fully_shard(Counting(WIDTH, WIDTH), reshard_after_forward=True)
        assert model(torch.ones(1, WIDTH)).dtype is torch.int64
        assert_at_rest(model)
        assert list(fully_shard(Choosing())(torch.ones(1))) == [1]

    simulate_ranks(ranks)


def test_a_frozen_unit_may_move_before_the_backward() -> None:
    """One that no backward reaches: ranks still compare that they ran it."""

    def ranks(rank: int) -> None:
        model = seeded(two_blocks)
        model.first.requires_grad_(False)
        fully_shard(model.first, mesh=dist.new_group([0, 1]))
        fully_shard(model)
        for step in range(2):
            loss = square(model, data(step, rank))
            model.first.float()
            unshard(model.first)
            reshard(model.first)
            assert units(model.first)[0].run.live is None
            loss.backward()
            assert model.head.weight.grad is not None
            model.first.double()

    simulate_ranks(ranks)


def test_a_frozen_unit_is_given_an_optimizer() -> None:
    """The sharded parameters in it are not taken for tensors that the forward used."""

    class Training(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, optim: torch.optim.Optimizer) -> Tensor:
            for _ in range(2):
                optim.zero_grad()
                self.head(torch.tanh(self.first(x))).square().sum().backward()
                optim.step()
            return self.head(torch.tanh(self.first(x))).detach()

    def ranks(rank: int) -> None:
        x, plain, model = data(0, 0), seeded(Training), seeded(Training)
        for module in (model.first, model.head, model):
            fully_shard(module)
        found = model(x, torch.optim.SGD(model.parameters(), 0.1))
        assert_close(found, plain(x, torch.optim.SGD(plain.parameters(), 0.1)))
        assert_at_rest(model)

    simulate_ranks(ranks)


class Again(nn.Module):
    """Calls itself, or a method that gathers it too, inside its own forward."""

    def __init__(self, by_method: bool) -> None:
        super().__init__()
        self.inner, self.by_method = nn.Linear(WIDTH, WIDTH), by_method

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = torch.tanh(self.inner(x))
        if self.by_method:
            return self.encode(x)
        return self(x, depth - 1) if depth else x


@pytest.mark.parametrize("by_method", [False, True])
def test_a_frozen_unit_calls_itself(by_method: bool) -> None:
    """Its backward ends at the input of the outermost call; until then it stays gathered."""

    def ranks(rank: int) -> None:
        plain, model = (seeded(lambda: Again(by_method)).requires_grad_(False) for _ in range(2))
        fully_shard(model, methods=("forward", "encode"), reshard_after_forward=True)
        found = []
        for module in (plain, model):
            x = data(0, rank).requires_grad_()
            square(module, x).backward()
            found.append(x.grad)
        assert_close(*found)
        assert_at_rest(model)

    simulate_ranks(ranks)
