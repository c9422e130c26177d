"""Tensors in the same memory that are not one parameter: sharding would take them apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_compose import fully_shard, plan, refresh, undo, wrap
from fsdp_compose.sharded import is_sharded

from harness import rank_errors, run_ranks


class Tied(nn.Module):
    """An embedding and a head, whose memory ``tie`` arranges."""

    def __init__(self, tie: Callable[[Tied], object]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        tie(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(x))
        return logits


def same(model: Tied) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.data)


def transposed(model: Tied) -> None:
    model.head = nn.Linear(6, 4, bias=False)
    model.head.weight = nn.Parameter(model.embed.weight.data.t())


def one_row(model: Tied) -> None:
    rows = torch.randn(11, 4)
    model.embed.weight, model.head.weight = nn.Parameter(rows[:6]), nn.Parameter(rows[5:])


def one_column(model: Tied) -> None:
    columns = torch.randn(6, 7)
    model.embed.weight = nn.Parameter(columns[:, :4])
    model.head.weight = nn.Parameter(columns[:, 3:])


def one_element(model: Tied) -> None:
    flat = torch.randn(47)
    model.embed.weight = nn.Parameter(flat[:24].view(6, 4))
    model.head.weight = nn.Parameter(flat[23:].view(6, 4))


def last_of_every_other(model: Tied) -> None:
    flat = torch.randn(70)
    model.embed.weight = nn.Parameter(flat[:47:2].view(6, 4))
    model.head.weight = nn.Parameter(flat[46:].view(6, 4))


def one_frozen(model: Tied) -> None:
    same(model)
    model.embed.requires_grad_(False)


def all_frozen(model: Tied) -> None:
    """They may be trained later."""
    same(model)
    model.requires_grad_(False)


def expanded(model: Tied) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.data[0].expand(6, 4))


def every_other_row(model: Tied) -> None:
    rows = torch.randn(13, 4)
    model.embed.weight = nn.Parameter(rows[0:11:2])
    model.head.weight = nn.Parameter(rows[2:13:2])


def around_another(model: Tied) -> None:
    """A buffer with two tensors in it, of which the second is a parameter."""
    rows = torch.randn(12, 4)
    model.register_buffer("first", rows[1])
    model.register_buffer("rows", rows)
    model.head.weight = nn.Parameter(rows[6:])


def as_buffer(model: Tied) -> None:
    model.register_buffer("first", model.embed.weight.data[0])


ROWS = [one_row, every_other_row]
FEW = [one_element, last_of_every_other]
TIES = [same, transposed, *ROWS, one_column, *FEW, one_frozen, all_frozen, expanded]


@pytest.mark.parametrize("tie", [*TIES, as_buffer])
@pytest.mark.parametrize("units", [None, wrap.by_class({nn.Embedding})], ids=["one", "units"])
def test_shared_memory_is_refused(tie: Callable[[Tied], object], units: wrap.Policy | None) -> None:
    model = Tied(tie)
    what = "buffer 'first'" if tie is as_buffer else "parameter 'head.weight'"
    with pytest.raises(ValueError, match=f"parameter 'embed.weight' and {what} are different"):
        fully_shard(model, units=units)
    assert not any(map(is_sharded, model.parameters()))


def test_memory_shared_with_what_is_ignored_is_refused() -> None:
    model = Tied(same)
    with pytest.raises(ValueError, match=r"parameter 'head\.weight' and parameter 'embed\.weight'"):
        fully_shard(model, ignored=[model.embed])
    fully_shard(model, ignored=[model.embed, model.head])


def test_a_buffer_around_several_is_seen() -> None:
    model = Tied(around_another)
    with pytest.raises(ValueError, match=r"'head\.weight' and buffer 'rows' are different"):
        fully_shard(model)


@pytest.mark.parametrize("tie", [*TIES, as_buffer])
def test_shared_memory_is_seen_between_calls(tie: Callable[[Tied], object]) -> None:
    """Units sharded one by one meet in the call on what is around them."""
    model = Tied(tie)
    fully_shard(model.embed)
    fully_shard(model.head)
    with pytest.raises(ValueError, match=r"in the same memory.* Build the model again"):
        fully_shard(model)


def test_what_was_undone_shares_nothing() -> None:
    model = Tied(same)
    kept = model.embed.weight.data
    for part in (model.embed, model.head):
        undo(fully_shard(part))
        fully_shard(part)
    fully_shard(model)
    assert kept.shape == (6, 4)


def test_every_rank_raises() -> None:
    def ranks(rank: int) -> None:
        fully_shard(Tied(same if rank == 0 else as_buffer))

    errors = rank_errors(ranks, 2)
    assert all("are different tensors in the same memory" in error for error in errors), errors


def test_plans_are_refused_too() -> None:
    for mode in (torch.device("meta"), FakeTensorMode()):
        with mode:
            model = Tied(one_column)
            with pytest.raises(ValueError, match="in the same memory"):
                plan(model, world_size=4)


def test_refresh_refuses_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model)
    model.extend([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    model[2].weight = nn.Parameter(model[1].weight.data)
    with pytest.raises(ValueError, match=r"refresh: parameter '1\.weight' and parameter '2\.weig"):
        refresh(model)
    model[2].weight = model[1].weight
    refresh(model)


def beside(model: Tied) -> None:
    columns = torch.randn(6, 8)
    model.embed.weight = nn.Parameter(columns[:, :4])
    model.head.weight = nn.Parameter(columns[:, 4:])


def one_after_the_other(model: Tied) -> None:
    rows = torch.randn(12, 4)
    model.embed.weight, model.head.weight = nn.Parameter(rows[:6]), nn.Parameter(rows[6:])


def one_parameter(model: Tied) -> None:
    model.head.weight = model.embed.weight


@pytest.mark.parametrize("tie", [beside, one_after_the_other, one_parameter])
def test_memory_without_common_elements_trains(tie: Callable[[Tied], object]) -> None:
    def ranks(rank: int) -> None:
        torch.manual_seed(0)
        plain = Tied(tie)
        torch.manual_seed(0)
        model = fully_shard(Tied(tie))
        x = torch.arange(6)
        for one in (plain, model):
            one(x).square().sum().backward()
            torch.optim.SGD(one.parameters(), 0.1).step()
        torch.testing.assert_close(model(x), plain(x))

    run_ranks(ranks, 2)


def test_lazy_conjugates_are_refused_by_name() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64).conj())
    with pytest.raises(ValueError, match="'weight' of unit 'Module' is a view that conjug"):
        fully_shard(model)


def test_lazy_modules_are_refused_with_units_too() -> None:
    with pytest.raises(ValueError, match=r"parameter '0\.weight' of unit '0' is an Uninitialized"):
        fully_shard(nn.Sequential(nn.LazyLinear(3)), units=wrap.by_class({nn.Linear}))
    with pytest.raises(ValueError, match="Lazy ones have no shape yet"):
        fully_shard(nn.Sequential(nn.LazyLinear(3)), units=wrap.by_size(10))


def test_modules_that_are_gathered_together() -> None:
    """Each of them is looked through, and named by its place in the list."""
    memory = torch.randn(2, 2)
    first, second, third = (nn.Linear(2, 2, bias=False) for _ in range(3))
    second.weight, third.weight = nn.Parameter(memory), nn.Parameter(memory)
    with pytest.raises(ValueError, match=r"parameter '1.weight' and parameter '2.weight' are diff"):
        fully_shard([first, second, third])
    third.weight = nn.Parameter(memory.clone())
    fully_shard([first, second, third])
