"""Views of gathered weights that somebody keeps from a forward, and those of the library."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close

from fsdp_compose import (
    fully_shard,
    reshard,
    unshard,
)
from fsdp_compose.base import tracked
from fsdp_compose.core.guards import kept_tensors, kept_views
from fsdp_compose.core.guards.kept_views import KeptView

from harness import rank_errors, simulate_ranks
from models import (
    WIDTH,
    Block,
    Tower,
    assert_at_rest,
    by_block,
    data,
    one_unit,
    seeded,
    square,
    units,
)

RELEASED = {"reshard_after_forward": True}


class Keeping(nn.Module):
    """Keeps views of its weight in places that are looked at when its forward ends."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.inner = nn.Module()
        self.inner.register_buffer("view", None)
        self.views: list[Any] = []
        self.named: dict[str, Any] = {}
        self.kept = self.empty = None
        self.on = True
        self.last = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.on:
            weight = self.weight.detach()
            self.kept, self.empty = weight.t(), weight[4:]
            self.inner.view = weight[1:]
            self.views[:], self.named["view"] = [1, weight.flatten()], weight[0]
        y = x @ self.weight
        self.last = repr(self.kept)
        return y


def kept_in(model: Any) -> list[Tensor]:
    return [model.kept, model.inner.view, model.views[1], model.named["view"]]


def test_a_kept_view_raises_wherever_it_is_read() -> None:
    """As any argument, while its unit is released; what reads no memory works."""

    def ranks(rank: int) -> None:
        model = fully_shard(seeded(Keeping), **RELEASED)
        x, error = data(0, rank, 3, 4), "parameter 'weight' of unit 'Keeping'"
        for training in (True, False):
            model.train(training)
            model(x)
            for view in kept_in(model):
                assert type(view) is KeptView
                other = torch.zeros_like(x[:1, :1])
                for read in (
                    lambda view=view: view + 1,
                    lambda view=view: torch.mul(other, view),
                    lambda view=view: torch.add(other, other=view),
                    lambda view=view: torch.stack([other, view]),
                    lambda view=view: torch.block_diag(other, view),
                    lambda view=view: torch.equal(model.empty, view),
                ):
                    with pytest.raises(RuntimeError, match=error):
                        read()
                assert view.dtype == torch.float64 and view.numel() and view.dim()
                assert repr(view) == f"KeptView({tuple(view.shape)}, released)"
        assert model.kept.shape == model.kept.size() == (4, 4)
        assert model.kept.stride() == (1, 4) and not model.kept.requires_grad

    simulate_ranks(ranks)


class Chain(nn.Module):
    """Looks at what the modules inside it kept, when their own forwards are over."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Keeping(), Keeping()
        self.kinds: list[type] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        self.kinds = [type(view) for part in (self.first, self.second) for view in kept_in(part)]
        return y


def test_attributes_are_guarded_as_their_unit_ends() -> None:
    """So that the forward around it raises, in every step; of each module of the unit."""

    def ranks(rank: int) -> None:
        model = seeded(Chain)
        fully_shard([model.first, model.second], **RELEASED)
        fully_shard(model)
        for step in range(3):
            loss = model(data(step, rank, 3, 4)).square().mean()
            assert model.kinds == 8 * [KeptView]
            loss.backward()

    simulate_ranks(ranks)


def test_a_kept_view_reads_while_it_is_gathered() -> None:
    """As the plain tensor does, and when it is printed."""

    def ranks(rank: int) -> None:
        plain = seeded(Keeping)
        model = fully_shard(copy.deepcopy(plain), **RELEASED)
        x = data(0, rank, 3, 4)
        model(x), plain(x)
        unshard(model)
        for found, wanted in zip(kept_in(model), kept_in(plain), strict=True):
            assert_close(torch.add(found, other=1.0), wanted + 1)
            assert_close(torch.cat([found, found]), torch.cat([wanted, wanted]))
            assert "0." in repr(found) and "released" not in repr(found)
        reshard(model)
        model.on = False
        model(x)
        assert "released" not in model.last
        with pytest.raises(RuntimeError, match="were released since"):
            model.kept + 1  # type: ignore[operator]

    simulate_ranks(ranks)


def test_an_empty_view_may_be_kept() -> None:
    """Also one that begins behind all parameters, and so is none's."""

    def ranks(rank: int) -> None:
        model = fully_shard(seeded(Keeping), **RELEASED)
        model(data(0, rank, 3, 4))
        assert type(model.empty) is KeptView
        assert (model.empty + 1).shape == (0, 4) and model.empty.sum() == 0

    simulate_ranks(ranks)


def test_a_view_names_the_parameter_it_is_of() -> None:
    """By where it begins, in a unit of several parameters."""

    def ranks(rank: int) -> None:
        model = one_unit(seeded(Block), **RELEASED)
        model.down.register_forward_pre_hook(
            lambda *_: setattr(model, "views", [p.detach() for p in model.parameters()])
        )
        model(data(0, rank))
        names = [name for name, _ in model.named_parameters()]
        for name, view in zip(names, model.views, strict=True):  # type: ignore[arg-type]
            with pytest.raises(RuntimeError, match=f"parameter '{name}' of unit 'Block'"):
                view + 1

    simulate_ranks(ranks)


class Mixed(nn.Module):
    """Two buckets: one of each dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.high = nn.Linear(WIDTH, WIDTH)
        self.low = nn.Linear(WIDTH, WIDTH, bias=False)

    def double(self) -> Mixed:
        super().double()
        self.low.float()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.low(torch.tanh(self.high(x)).float())


def test_the_library_keeps_its_own_tensors() -> None:
    """What it has of each of a unit's buckets is taken for nobody's view, in any step."""

    def ranks(rank: int) -> None:
        model = fully_shard(seeded(Mixed), reshard_after_forward=2)
        (unit,) = units(model)
        outside = [nn.Parameter(torch.ones(2)), torch.ones(2), torch.ones(2).to_sparse()]
        for step in range(3):
            square(model, data(step, rank)).backward()
            with torch.no_grad():
                model(data(step, rank))
            for bucket in unit.buckets:
                own = [bucket.full, bucket.views.own, bucket.views.whole_bytes, *bucket.aliases]
                assert not any(type(tensor) is KeptView for tensor in own)
                assert bucket.inner is not None and type(bucket.inner.own) is Tensor
                assert {id(tensor) for tensor in own} <= {
                    id(tensor) for tensor in kept_views._own_tensors(unit)
                }
        assert not any(type(tensor) is KeptView for tensor in outside)

    simulate_ranks(ranks, 4)


def test_memory_is_looked_through_where_it_has_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of each pass that kept a view, so that reading it raises; a view is no graph."""
    looks: list[int] = []
    inside: list[tuple[int, Any]] = []
    find, watch = tracked.gc.get_referrers, kept_views.watch_inside

    def note(watched: Any) -> None:
        inside.append((dist.get_rank(), list(watched)))
        watch(watched)

    monkeypatch.setattr(
        tracked.gc,
        "get_referrers",
        lambda *kinds: looks.append(dist.get_rank()) or find(*kinds),
    )
    monkeypatch.setattr(kept_views, "watch_inside", note)

    def ranks(rank: int) -> list[int]:
        model = by_block(seeded(lambda: Tower(5)))
        bag: list[Callable[[], Tensor]] = []
        for step in range(2):
            square(model, data(step, rank)).backward()

        def keep(module: nn.Module, args: Any) -> None:
            view = module.weight.detach()[1:]  # type: ignore[operator, index, union-attr]
            bag.append(lambda: view)

        before = looks.count(rank)
        square(model, data(3, rank)).backward()
        assert looks.count(rank) == before
        for block in model.blocks:
            block.up.register_forward_pre_hook(keep)
        found = []
        for step in range(4, 8):
            inside.clear()
            before = looks.count(rank)
            loss = square(model, data(step, rank))
            assert looks.count(rank) == before + 1
            loss.backward()
            del loss
            found.append(looks.count(rank) - before)
            assert not any(watched for asked, watched in inside if asked == rank)
            for number, read in enumerate(bag):
                with pytest.raises(RuntimeError, match=f"up.weight' of unit 'blocks.{number}'"):
                    read() + 1
            bag.clear()
        return found

    assert simulate_ranks(ranks) == [[1, 1, 1, 1]] * 2


class GivesWeights(Mixed):
    """Returns weights of both buckets beside its result."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, self.low.weight.detach().t() if self.training else self.high.bias.detach()


def test_a_unit_that_returns_a_weight_stays_gathered() -> None:
    """A weight of any of its buckets, until the backward ends."""

    def ranks(rank: int) -> None:
        plain = seeded(GivesWeights)
        model = fully_shard(copy.deepcopy(plain), **RELEASED)
        for training in (True, False):
            y, weight = model.train(training)(data(0, rank))
            wanted = plain.train(training)(data(0, rank))[1]
            assert_close(weight * 2, wanted * 2)
            y.sum().backward()
            assert_at_rest(model)

    simulate_ranks(ranks)


class Viewing(nn.Linear):
    """Keeps a view of its weight, a new one in every forward."""

    kept: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.weight.view(-1)
        return super().forward(x)


class Looking(nn.Module):
    """Reads what its inner unit kept, after that unit's forward, while it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last, self.reads = Viewing(WIDTH, WIDTH), nn.Linear(WIDTH, 2), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return self.last(x + self.inner.kept.sum() if self.reads else x)


def test_views_are_guarded_before_the_pass_ends() -> None:
    """In later forwards too: an outer unit's forward does not read what the inner one kept."""

    def ranks(rank: int) -> None:
        model = Looking()
        fully_shard(model.inner, reshard_after_forward=True)
        fully_shard(model)
        for _ in range(3):
            model(torch.ones(1, WIDTH)).sum().backward()
        model.reads = True
        model(torch.ones(1, WIDTH))

    for text in rank_errors(ranks, 2):
        assert text is not None and "is a view of parameter 'inner.weight'" in text


def test_counting_users_saves_no_tensor() -> None:
    """The first count may be inside a checkpoint, which compares what was saved."""
    packed: list[Tensor] = []
    kept_tensors._beside.cache_clear()
    with saved_tensors_hooks(packed.append, lambda tensor: tensor):
        kept_tensors.count_beside(torch.ones(1))
    assert kept_tensors._beside.cache_info().currsize == 1 and not packed
