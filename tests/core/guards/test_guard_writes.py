"""Writes, views and tensors that a forward leaves, and copies that are compared: the details."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

from fsdp_compose import (
    MixedPrecision,
    ShardingStrategy,
    bf16_codec,
    fully_shard,
    reshard,
    set_debug,
    unshard,
    verify_replicas,
    wrap,
)
from fsdp_compose.base.process import here
from fsdp_compose.buckets import gradients
from fsdp_compose.core.guards import inner_backward, kept_views, replicas
from fsdp_compose.core.guards.kept_views import KeptView
from fsdp_compose.core.guards.replicas import checksum
from fsdp_compose.core.guards.static_buffers import describe

from harness import simulate_ranks
from models import (
    WIDTH,
    Block,
    assert_at_rest,
    by_block,
    data,
    mesh_of_replicas,
    one_unit,
    seeded,
    square,
    two_blocks,
    units,
    whole,
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
                ):
                    with pytest.raises(RuntimeError, match=error):
                        read()
                assert view.dtype == torch.float64 and view.numel() and view.dim()
                assert repr(view) == f"KeptView({tuple(view.shape)}, released)"
        assert model.kept.shape == model.kept.size() == (4, 4)
        assert model.kept.stride() == (1, 4) and not model.kept.requires_grad

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
    """At the end of each step that kept a view, so that reading it raises; a view is no graph."""
    looks: list[int] = []
    inside: list[tuple[int, Any]] = []
    find, watch = kept_views.gc.get_objects, kept_views.watch_inside

    def note(watched: Any) -> None:
        inside.append((dist.get_rank(), list(watched)))
        watch(watched)

    monkeypatch.setattr(
        kept_views.gc, "get_objects", lambda: looks.append(dist.get_rank()) or find()
    )
    monkeypatch.setattr(kept_views, "watch_inside", note)

    def ranks(rank: int) -> list[int]:
        model = by_block(seeded(two_blocks))
        bag: list[Callable[[], Tensor]] = []
        for step in range(3):
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
            assert looks.count(rank) == before
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


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else whole(p.grad) for p in model.parameters()]


def check_inside(rank: int, keep: Callable[[nn.Module, list[Tensor]], Any]) -> None:
    """Gradients from what a hook in a block keeps are those of the plain model, in two steps."""
    plain = seeded(two_blocks)
    model = by_block(copy.deepcopy(plain))
    square(model, data(1, rank)).backward()  # which comes by the outputs
    model.zero_grad()
    bag: list[Tensor] = []
    for one in (model, plain):
        keep(one.blocks[1], bag)  # type: ignore[index]
    for _ in range(2):
        model(data(0, rank))
        sum(t.square().mean() for t in bag).backward()  # type: ignore[union-attr]
        bag.clear()
        for r in range(2):
            plain(data(0, r))
            (sum(t.square().mean() for t in bag) / 2).backward()  # type: ignore[union-attr]
            bag.clear()
        for found, wanted in zip(gradients_of(model), plain.parameters(), strict=True):
            if wanted.grad is None:
                assert found is None or not found.any()
            else:
                assert found is not None
                assert_close(found, wanted.grad, rtol=1e-12, atol=1e-12)
    model.zero_grad()
    square(model, data(2, rank)).backward()
    assert_at_rest(model)


def keep_and_replace(block: nn.Module, bag: list[Tensor]) -> None:
    """What goes on is another tensor than what is kept."""

    def taken(module: nn.Module, args: Any) -> Any:
        bag.append(args[0])
        return (args[0] * 1,)

    def given(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        bag.append(output)
        return output * 1

    block.down.register_forward_pre_hook(taken)  # type: ignore[union-attr]
    block.up.register_forward_hook(given)  # type: ignore[union-attr]


class Pair(nn.Module):
    """Gives two tensors."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return y, torch.sin(y)


def keep_the_second(block: nn.Module, bag: list[Tensor]) -> None:
    block.up = Pair(block.up)  # type: ignore[arg-type]
    block.up.register_forward_hook(lambda m, args, out: bag.append(out[1]))
    block.up.register_forward_hook(lambda m, args, out: out[0])


@pytest.mark.parametrize("keep", [keep_and_replace, keep_the_second])
def test_a_backward_from_what_hooks_inside_kept(keep: Any) -> None:
    """Each tensor that such a submodule takes or gives, as it is before other hooks."""
    simulate_ranks(lambda rank: check_inside(rank, keep))


def test_where_backwards_begin_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the outputs: then forwards do not walk their graphs again, unless one came inside."""
    walks: list[tuple[int, str]] = []
    watch = inner_backward._watch_graph

    def count(unit: Any, tensors: Any, start: int) -> None:
        walks.append((dist.get_rank(), unit.name))
        watch(unit, tensors, start)

    monkeypatch.setattr(inner_backward, "_watch_graph", count)

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks))
        second = units(model.blocks[1])[0]
        for step in range(3):
            loss = square(model, data(step, rank))
            assert [name for by, name in walks if by == rank].count("blocks.0") == 1
            loss.backward()
            assert {unit.checks.entrance for unit in units(model)} == {"outputs"}
        later = by_block(seeded(two_blocks))
        bag: list[Tensor] = []
        later.blocks[1].up.register_forward_hook(lambda m, args, out: bag.append(torch.tanh(out)))
        later(data(0, rank))
        bag.pop().sum().backward()
        second = units(later.blocks[1])[0]
        assert second.checks.entrance == "outputs"  # by a hook on what the submodule gave

    simulate_ranks(ranks)


def test_a_unit_that_reads_no_gradient_is_left() -> None:
    """A frozen unit keeps a tensor made outside it, from which a backward begins."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.scale: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.scale

    def ranks(rank: int) -> None:
        model = fully_shard(seeded(Scaled).requires_grad_(False), **RELEASED)
        given = torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)
        model.scale = torch.exp(given)
        model(data(0, rank))
        before = here.traffic.gathers
        model.scale.sum().backward()
        assert here.traffic.gathers == before and units(model)[0].checks.entrance == "unknown"
        assert_at_rest(model)

    simulate_ranks(ranks)


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


class Writer(nn.Module):
    """Writes its weights in forward while ``on``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)
        self.third = nn.Parameter(torch.ones(WIDTH))
        self.on = False

    def double(self) -> Writer:
        super().double()
        self.third.data = self.third.data.float()
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.on:
            with torch.no_grad():
                for param in (self.third, self.second.bias, self.second.weight):
                    param.mul_(2)
        return self.second(self.first(x)) * self.third


def test_the_next_forward_reads_no_lost_write() -> None:
    """Of any bucket, also where the unit stays gathered; the error names the first parameter."""

    def ranks(rank: int) -> None:
        plain = seeded(Writer)
        model = fully_shard(copy.deepcopy(plain))
        model(data(0, rank)).sum().backward()
        for held in (False, True):
            if held:
                unshard(model)
            model.on = True
            with pytest.raises(RuntimeError, match="'third' of unit 'Writer' was written"):
                model(data(0, rank))
            model.on = False
            assert_close(model(data(0, rank)), plain(data(0, rank)))
            model(data(0, rank)).sum().backward()
            if not held:
                assert_at_rest(model)

    simulate_ranks(ranks)


@pytest.mark.parametrize("chunk", [8, 1 << 20])
def test_a_checksum_weighs_each_word(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its place, whatever the dtype, the alignment and how many words are summed at a time."""
    monkeypatch.setattr(replicas, "_CHUNK", chunk)
    base = torch.arange(999, dtype=torch.int32).mul(2654435761).view(torch.uint8)
    for offset in (0, 1, 8):
        for size in (0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 136, 200, 519):
            found = base[offset : offset + size]
            data, whole_words = bytes(found.tolist()), size // 8
            words = [data[8 * k : 8 * k + 8] for k in range(whole_words)]
            numbers = [int.from_bytes(word, "little") for word in words]
            total = sum((2 * k + 1) * number for k, number in enumerate(numbers))
            total += sum((2 * k + 1) * byte for k, byte in enumerate(data[8 * whole_words :]))
            assert checksum(found) == total % (1 << 64)
    values = torch.arange(12.0).view(3, 4)
    assert checksum(values) == checksum(values.flatten()) == checksum(values.t())
    complex_values = torch.view_as_complex(values.view(6, 2))
    assert checksum(complex_values) == checksum(values)


def test_copies_over_several_groups_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks of one group agree, those of another may not; then all ranks raise."""
    groups: dict[int, Any] = {}
    monkeypatch.setattr(replicas, "groups_of_copies", lambda *_: groups[dist.get_rank()])

    def ranks(rank: int) -> None:
        pairs = by_block(seeded(two_blocks), mesh=mesh_of_replicas(2, 2))
        model = by_block(seeded(two_blocks), strategy=ShardingStrategy.NO_SHARD)
        pair, every = (units(m)[0].buckets[0].mesh.replicate for m in (pairs, model))
        groups[rank] = [pair, every]
        verify_replicas(model)
        with torch.no_grad():
            if 0 in pair.ranks:
                model.blocks[1].norm.bias.add_(1)  # type: ignore[index, union-attr, operator]
        wanted = r"parameter 'blocks.1.norm.bias' of unit 'blocks.1' is copied on ranks \[0, 1, 2"
        with pytest.raises(RuntimeError, match="verify_replicas: " + wanted):
            verify_replicas(model)
        groups[rank] = [pair]
        verify_replicas(model)
        with torch.no_grad():
            if rank == pair.ranks[-1] and 0 in pair.ranks:
                model.first.weight.mul_(2)  # type: ignore[union-attr, operator]
        wanted = "'first.weight' of unit 'Tower' is copied on ranks .* on ranks .* on ranks"
        with pytest.raises(RuntimeError, match=wanted) as error:
            verify_replicas(model)
        assert (str(list(pair.ranks)) in str(error.value)) == (0 in pair.ranks)

    simulate_ranks(ranks, 4)


def test_a_codec_changes_no_values_of_anybody() -> None:
    """What it rounds is no write, also where every forward is looked at."""

    def ranks(rank: int) -> None:
        policy = MixedPrecision(gather_codec=bf16_codec())
        model = by_block(seeded(two_blocks).float(), mp_policy=policy)
        try:
            set_debug(True)
            for step in range(3):
                square(model, data(step, rank).float()).backward()
            unshard(model)
            with torch.no_grad():
                model(data(0, rank).float())
            reshard(model)
        finally:
            set_debug(False)
        assert_at_rest(model)

    simulate_ranks(ranks)


class Complex(nn.Module):
    """Weights of complex and of real numbers, in buckets of their own."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.turn = nn.Linear(WIDTH, WIDTH, dtype=torch.complex64)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.fixed = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.fixed(x) + self.turn(x.to(torch.complex64)).abs())


def test_static_buffers_have_room_for_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes as are packed, of complex parameters too, and none for what is frozen."""
    packed: dict[Any, int] = {}
    lend = gradients.open_grad_buffer

    def opened(bucket: Any) -> Any:
        buffer = lend(bucket)
        packed[bucket] = buffer.flat.nbytes
        assert buffer.lease is not None, "it is in no static buffer"
        return buffer

    monkeypatch.setattr(gradients, "open_grad_buffer", opened)

    def ranks(rank: int) -> None:
        model = nn.Sequential(Complex(), Complex(), Complex())
        fully_shard(model, units=wrap.by_class({Complex}), static_buffers=True)
        inner = units(model)[1:] or units(model)
        square(model, data(0, rank).float()).backward()
        for unit, member in zip(inner, describe(inner), strict=True):
            assert member.packed == tuple(packed.get(bucket, 0) for bucket in unit.buckets)
            assert member.gathered == tuple(b.full.nbytes for b in unit.buckets)
            assert sorted(map(bool, member.packed)) == [False, True, True]

    simulate_ranks(ranks)
