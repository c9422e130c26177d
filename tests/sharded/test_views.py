"""Views of a slice are slices of the whole's views: memory, gradients and sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose.sharded import ShardedWeightError, is_sharded
from fsdp_compose.simulation import simulate

from sharded_values import examples, on_ranks, same, shard, world

FLAT: dict[str, Callable[[Any], Any]] = {
    "flatten": lambda t: t.flatten(),
    "flatten(0, -1)": lambda t: torch.flatten(t, 0, -1),
    "start_dim": lambda t: torch.flatten(input=t, start_dim=0),
    "ravel": lambda t: t.ravel(),
    "view": lambda t: t.view(-1),
    "view(numel)": lambda t: t.view(t.numel()),
    "reshape": lambda t: t.reshape(-1),
    "reshape(shape=)": lambda t: torch.reshape(t, shape=(-1,)),
    "chunks": lambda t: t.flatten().chunk(1)[0],
    "everything": lambda t: t.flatten()[:],
    "every one": lambda t: t.flatten()[::1],
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_way_gives_the_flattened_whole(ranks: int) -> None:
    """What is stored by columns has no such view, and is refused."""

    def body(group: Any) -> None:
        wholes = examples()
        for call in FLAT.values():
            for whole, p in zip(wholes, shard(wholes, group)):
                if not whole.is_contiguous():
                    with pytest.raises(ShardedWeightError, match="another order"):
                        call(p)
                    continue
                flat = call(p)
                same(flat, call(whole))
                torch.testing.assert_close(
                    flat.norm(), call(whole).norm()
                )  # sums differ by address
                with torch.no_grad():
                    flat.mul_(2)  # the same memory
                same(p.detach(), 2 * whole)
                with torch.no_grad():
                    p.div_(2)

    on_ranks(body, ranks)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "view": lambda t: t.view(2, -1, 3),
    "view(shape)": lambda t: t.view((3, 4)),
    "unflatten": lambda t: t.unflatten(0, (2, 2)),
    "flatten(1)": lambda t: t.unsqueeze(0).flatten(1),
    "unsqueeze": lambda t: torch.unsqueeze(t, -1),
    "squeeze": lambda t: t[:1].squeeze(0),
    "select": lambda t: t.select(0, -1),
    "narrow": lambda t: torch.narrow(input=t, dim=0, start=1, length=2),
    "chunk": lambda t: t.chunk(3),
    "split": lambda t: torch.split(t, 3),
    "split sizes": lambda t: t.split([1, 3]),
    "tensor_split": lambda t: t.tensor_split(3),
    "a row's parts": lambda t: t[1].chunk(2),
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_views_are_those_of_the_whole(ranks: int) -> None:
    """In shape, in values, and in what is written through them."""

    def body(group: Any) -> None:
        for call in VIEWS.values():
            whole = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
            (p,) = shard([whole], group)
            with torch.no_grad():
                found, wanted = call(p), call(whole)
                pairs = zip(found, wanted) if isinstance(wanted, tuple) else [(found, wanted)]
                for mine, theirs in pairs:
                    same(mine, theirs)
                    for each in (mine, theirs):
                        each.mul_(-2)
                same(p, whole)

    on_ranks(body, ranks)


RUNS: tuple[Any, ...] = (
    ..., slice(None), 0, 1, -1, slice(1, 3), slice(2, 2), slice(-2, None), (1, 2), (1, ...),
    (1, slice(1, 3)), (slice(1, 2), slice(0, 2)), (-1, -1, ...), slice(None, None, 1),
    (slice(1, 3), slice(None)), slice(0, 99),
)  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_runs_are_read_and_written_like_the_whole(ranks: int) -> None:
    """Rows and parts of one; what is no run of memory is refused, and wrong indices raise."""

    def body(group: Any) -> None:
        count = 0
        for index in RUNS:
            wholes = [whole for whole in examples() if whole.is_contiguous()]
            for whole, p in zip(wholes, shard(wholes, group)):
                try:
                    wanted = whole[index]
                except IndexError:
                    with pytest.raises(IndexError):
                        p[index]
                    continue
                count += 1
                same(p[index], wanted)
                torch.testing.assert_close(p[index].sum(), wanted.sum())
                with torch.no_grad():
                    for model in (p, whole):
                        model[index] = 3.0
                        model[index].add_(torch.arange(wanted.numel()).view(wanted.shape))
                        model[index] = 2 * model[index]
                same(p.detach(), whole)
        assert count > 40, count
        (p,) = shard([torch.ones(4, 3)], group)
        for index in (slice(None, None, 2), (slice(None), 0), (slice(None), slice(0, 1))):
            with pytest.raises(ShardedWeightError):
                p[index]

    on_ranks(body, ranks)


def test_bits_are_read_and_written_as_other_dtypes() -> None:
    """As by stochastic rounding, and by optimizers that exchange two tensors byte by byte."""

    def body() -> None:
        whole = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
        columns = whole.t().contiguous().t()
        for p, other in zip(shard([whole, columns], world()), (whole.clone(), columns.clone())):
            with torch.no_grad():
                for each in (p, other):
                    each.view(torch.int32).bitwise_and_(-65536)
                    each.copy_((each.view(dtype=torch.int32) + 65536).view(torch.float32))
                same(p, other)
        (p,) = shard([whole], world())
        with torch.no_grad():
            for each in (p, whole):
                each.view(torch.uint8).bitwise_xor_((2 * each).view(torch.uint8))
            same(p, whole)
            same(p.view(torch.uint8), whole.view(torch.uint8))
            same(p.view(torch.uint8).view(torch.float32), whole)
        (p,) = shard([torch.arange(14, dtype=torch.uint8)], world())
        with pytest.raises(ShardedWeightError, match="parts of what one element"):
            p.view(torch.int16)  # a shard ends after 7

    simulate(body, 2)


def test_a_whole_takes_the_shape_of_a_parameter() -> None:
    """As by PCGrad, which lays all gradients end to end, and ``vector_to_parameters``."""

    def body() -> None:
        p, q = params = shard([torch.ones(4, 3), torch.ones(5)], world())
        vector, row = torch.arange(17.0), torch.arange(3.0)
        assert torch.equal(vector[:12].view_as(p), vector[:12].view(4, 3))
        same(p.flatten().view_as(p), p)
        with torch.no_grad():
            same(p * row.expand_as(p), row.expand(4, 3))
        q.grad = vector[12:].reshape_as(q).clone()
        same(q.grad, vector[12:])
        nn.utils.vector_to_parameters(vector, params)
        same(p, vector[:12].view(4, 3))
        same(q, vector[12:])

    simulate(body, 2)


def test_a_penalty_on_rows_reaches_their_gradient() -> None:
    def loss(weight: Any) -> Tensor:
        return weight[1:3].square().sum() + weight[0, 1:].sum()

    torch.manual_seed(0)
    plain = nn.Parameter(torch.randn(4, 3))
    loss(plain).backward()

    def body(group: Any) -> None:
        (p,) = shard([plain.detach()], group)
        loss(p).backward()
        assert p.grad is not None and plain.grad is not None
        torch.testing.assert_close(p.grad.full_tensor(), plain.grad)

    on_ranks(body, 2)


def test_padding_is_reset_after_sharding() -> None:
    """As ``nn.Embedding.reset_parameters`` and the initialisers of transformers write it."""

    def reset(model: Any) -> None:
        torch.manual_seed(2)
        model.reset_parameters()
        model.weight.data[4].zero_()

    def ranks() -> Tensor:
        model = fc.fully_shard(nn.Embedding(6, 3, padding_idx=1))
        reset(model)
        full: Tensor = model.weight.full_tensor()
        return full

    plain = nn.Embedding(6, 3, padding_idx=1)
    reset(plain)
    for found in simulate(ranks, 3):
        assert torch.equal(found, plain.weight) and not found[1].any() and not found[4].any()


def test_gradients_and_products_are_those_of_the_whole() -> None:
    """``torch.dot`` of flattened parameters is over all ranks, and reaches ``.grad``."""

    def loss(model: nn.Module) -> Tensor:
        first, second = (p for p in model.parameters() if p.ndim == 2)
        return torch.dot(first.flatten(), first.view(-1)) + second.ravel().norm()

    def ranks() -> list[Tensor]:
        model = build()
        fc.fully_shard(model)
        found = loss(model)
        found.backward()
        assert all(p.grad is None or is_sharded(p.grad) for p in model.parameters())
        grads = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
        return [found.detach(), *grads]

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 5))

    plain = build()
    wanted = loss(plain)
    wanted.backward()
    grads = [p.grad for p in plain.parameters() if p.grad is not None]
    for found in simulate(ranks, 3):
        assert len(found) == 1 + len(grads) == 3
        torch.testing.assert_close(found, [wanted.detach(), *grads])


def test_a_flattened_slice_meets_only_its_like() -> None:
    """It is not added to the parameter itself, nor to a slice of another length."""

    def ranks() -> None:
        model = fc.fully_shard(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 5)))
        first, second = (p.detach() for p in model.parameters() if p.ndim == 2)
        for call in (
            lambda: first + first.flatten(),
            lambda: first.flatten() + second.flatten(),
            lambda: first.flatten()[::2],
        ):
            with pytest.raises((ShardedWeightError, RuntimeError)):
                call()
        same(first.flatten() + torch.ones(20), first.full_tensor().flatten() + 1)

    simulate(ranks, 2)
