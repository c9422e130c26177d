"""Writes and tensors that a forward leaves, and copies that are compared: the details."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

from fsdp_compose import (
    MixedPrecision,
    Prefetch,
    ShardingStrategy,
    bf16_codec,
    fully_shard,
    reshard,
    set_debug,
    undo,
    unshard,
    verify_replicas,
    wrap,
)
from fsdp_compose.base.process import here
from fsdp_compose.base.torch_private import saved_tensor_hooks
from fsdp_compose.buckets import gradients
from fsdp_compose.core.guards import forward_writes, inner_backward, replicas
from fsdp_compose.core.guards.replicas import checksum
from fsdp_compose.core.guards.static_buffers import describe_units

from harness import fake_world, simulate_ranks
from models import (
    WIDTH,
    Block,
    assert_at_rest,
    by_block,
    data,
    mesh_of_replicas,
    seeded,
    square,
    two_blocks,
    units,
    whole,
)

RELEASED = {"reshard_after_forward": True}


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


def keep_what_is_taken(block: nn.Module, bag: list[Tensor]) -> None:
    """What goes in is another tensor than what is kept."""

    def taken(module: nn.Module, args: Any) -> Any:
        bag.append(args[0])
        return (args[0] * 1,)

    block.down.register_forward_pre_hook(taken)  # type: ignore[union-attr]


def keep_what_is_given(block: nn.Module, bag: list[Tensor]) -> None:
    """What goes on is another tensor than what is kept."""

    def given(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        bag.append(output)
        return output * 1

    block.up.register_forward_hook(given)  # type: ignore[union-attr]


class Pair(nn.Module):
    """Gives two tensors, neither of which comes of the other."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), self.inner(torch.sin(x))


def keep_the_second(block: nn.Module, bag: list[Tensor]) -> None:
    block.up = Pair(block.up)  # type: ignore[arg-type]
    block.up.register_forward_hook(lambda m, args, out: bag.append(out[1]))
    block.up.register_forward_hook(lambda m, args, out: out[0])


@pytest.mark.parametrize("keep", [keep_what_is_taken, keep_what_is_given, keep_the_second])
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
        for unit, member in zip(inner, describe_units(inner), strict=True):
            assert member.packed == tuple(packed.get(bucket, 0) for bucket in unit.buckets)
            assert member.gathered == tuple(b.full.nbytes for b in unit.buckets)
            assert sorted(map(bool, member.packed)) == [False, True, True]
        whole_everywhere = fully_shard(Complex(), strategy=ShardingStrategy.NO_SHARD)
        (member,) = describe_units(units(whole_everywhere))
        assert not any(member.packed)  # which is reduced where it is

    simulate_ranks(ranks)


class Passing(nn.Module):
    """Leaves, where nobody looks, what it made of weights in two buckets."""

    left: ClassVar[list[tuple[Tensor, Tensor]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        self.left.append((self.first(x), self.second(x.double())))
        return x * 1


def test_a_backward_over_overwritten_weights_raises() -> None:
    """Of any bucket of a unit whose static buffer other units are in now, if nothing gathers it."""
    with fake_world(2):
        model = nn.Sequential(*(Passing() for _ in range(3))).requires_grad_(False)
        fully_shard(model, units=wrap.by_class({Passing}), static_buffers=True)
        x = torch.ones(2, WIDTH, requires_grad=True)
        for _ in range(2):
            square(model, x).backward()
        for unit in units(model):
            unit.checks.warned.clear()  # as if the first forwards had kept nothing
        for index in range(2):
            Passing.left.clear()
            model(x)
            kept = Passing.left[0][index]
            model(x)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                kept.sum().backward()
        Passing.left.clear()


def test_an_interrupt_leaves_the_hooks_of_the_caller() -> None:
    """Those of the library are removed, of each unit whose forward was interrupted."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def ranks(rank: int) -> None:
        model, packed = by_block(seeded(two_blocks)), list[Tensor]()

        def pack(tensor: Tensor) -> Tensor:
            packed.append(tensor)
            return tensor

        handle = model.blocks[1].up.register_forward_hook(interrupt)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            with pytest.raises(KeyboardInterrupt):
                model(data(0, rank))
            found = saved_tensor_hooks()
            assert found is not None and found[0] is not pack
            handle.remove()
            loss = square(model, data(0, rank))
            found = saved_tensor_hooks()
            assert found is not None and found[0] is pack
        assert saved_tensor_hooks() is None and packed
        loss.backward()
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_hooks_of_submodules_are_watched_once() -> None:
    """However many forwards there are; submodules without hooks are left alone."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks))
        block = model.blocks[1]
        block.up.register_forward_hook(lambda *_: None)
        block.down.register_forward_pre_hook(lambda *_: None)
        model.head.register_forward_hook(lambda *_: None)
        for step in range(3):
            square(model, data(step, rank)).backward()
        for module, before, after in (
            (block.up, 0, 1),
            (block.down, 1, 0),
            (model.head, 0, 1),
            (block.norm, 0, 0),
            (model.first, 0, 0),
            (block, 0, 0),
        ):
            hooks = [*module._forward_pre_hooks.values()], [*module._forward_hooks.values()]
            assert hooks[0].count(inner_backward.watch_taken) == before
            assert hooks[1].count(inner_backward.watch_given) == after
        undo(model)
        for module in model.modules():
            assert inner_backward.watch_taken not in module._forward_pre_hooks.values()
            assert inner_backward.watch_given not in module._forward_hooks.values()

    simulate_ranks(ranks)


def test_a_slow_way_to_keep_tensors_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """A backward that begins at what a forward kept in a closure names the unit."""

    class Branch(Block):
        kept: ClassVar[list[Callable[[], Tensor]]] = []

        def forward(self, x: Tensor) -> Tensor:
            if step >= 2:
                y = self.down(torch.sin(self.up(x)))
                self.kept.append(lambda: y)
            return super().forward(x)

    model = seeded(Branch)
    with fake_world(2), caplog.at_level("WARNING", "fsdp_compose"):
        fully_shard(model, **RELEASED)
        for step in range(5):
            loss = square(model, data(step, 0))
            loss.backward(retain_graph=True)
            del loss
            if step >= 2:
                Branch.kept.pop()().sum().backward()
    (record,) = caplog.records
    assert "began at a tensor that a forward of unit 'Branch' kept" in record.getMessage()


def test_other_units_are_gathered_ahead_as_before() -> None:
    """Also where some units of the process have static buffers."""
    with fake_world(2):
        fixed = by_block(seeded(two_blocks), static_buffers=True)
        model = by_block(seeded(two_blocks), prefetch=Prefetch(1, 1))
        work = units(fixed)[0].engine.schedule.work
        for _ in range(2):
            square(model, data(0, 0)).backward()
            assert all(work.has_room(unit) is True for unit in units(model))


class Tagged(Tensor):
    """A kind of tensor that is not looked for among those of the process."""


def test_a_backward_from_a_tensor_of_another_class() -> None:
    """It begins in the middle of the unit's first graph, at what somebody kept."""

    class Middle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = self.last(torch.tanh(self.first(x)))
            bags[id(self)] = h
            return torch.sin(torch.tanh(self.last(h)))

    bags: dict[int, Tensor] = {}

    def ranks(rank: int) -> None:
        plain = seeded(Middle)
        model = fully_shard(copy.deepcopy(plain), **RELEASED)
        for step in range(2):
            model(data(step, rank).as_subclass(Tagged))
            bags.pop(id(model)).square().mean().backward()
            for r in range(2):
                plain(data(step, r))
                (bags.pop(id(plain)).square().mean() / 2).backward()
            for found, param in zip(gradients_of(model), plain.parameters(), strict=True):
                assert found is not None and param.grad is not None
                assert_close(found, param.grad, rtol=1e-12, atol=1e-12)
            assert units(model)[0].checks.entrance == "inside"

    simulate_ranks(ranks)


def test_copies_that_were_assigned_are_compared() -> None:
    """By this rank's part of what ``p.data = x`` gave a parameter, before any forward."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks), mesh=mesh_of_replicas(2, 2))
        value = whole(model.first.weight)
        if rank == 0:
            model.first.weight.data = value
        verify_replicas(model)
        if rank == 0:
            model.first.weight.data = value + 1
        with pytest.raises(RuntimeError, match=r"parameter 'first\.weight' of unit 'Tower' is"):
            verify_replicas(model)

    simulate_ranks(ranks, 4)


@pytest.mark.parametrize("later", [False, True])
def test_a_backward_from_an_attribute(later: bool) -> None:
    """It holds a branch that leads to no output, in the first step or after a usual one."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.kept: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.kept = torch.sin(self.last(torch.tanh(self.last(x))))
            return self.first(x)

    def ranks(rank: int) -> None:
        plain = seeded(Branch)
        model = fully_shard(copy.deepcopy(plain), **RELEASED)
        if later:
            model(data(9, rank).as_subclass(Tagged)).sum().backward()
            model.zero_grad()
        model(data(0, rank).as_subclass(Tagged))
        model.kept.square().mean().backward()
        for r in range(2):
            plain(data(0, r))
            (plain.kept.square().mean() / 2).backward()  # type: ignore[union-attr, operator]
        for name in ("weight", "bias"):
            found, wanted = getattr(model.last, name).grad, getattr(plain.last, name).grad
            assert_close(whole(found), wanted, rtol=1e-12, atol=1e-12)
            assert getattr(model.first, name).grad is None

    simulate_ranks(ranks)


class Assigner(nn.Module):
    """Assigns to ``.data`` of two weights in forward, and has an empty one besides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.change: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.tanh(self.first(x)))
        if self.change is not None:
            self.first.weight.data = self.change(self.first.weight.data)
            self.second.bias.data = self.change(self.second.bias.data)
        return y


def test_assigned_weights_are_kept_where_they_can_be() -> None:
    """All of them; a tensor of another shape or dtype is refused by name."""

    def ranks(rank: int) -> None:
        plain = seeded(Assigner)
        model = fully_shard(copy.deepcopy(plain), strategy=ShardingStrategy.NO_SHARD)
        (unit,) = units(model)
        model(data(0, rank))
        assert not forward_writes._keep_assigned(unit, unit.links.aliases)
        for one in (model, plain):
            one.change = lambda weight: weight * 2
            one(data(0, rank))
            one.change = None
        assert_close(model(data(1, rank)), plain(data(1, rank)))
        for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(whole(found), wanted.detach())
        for change in (lambda weight: weight.float(), lambda weight: weight[:2] + 1):
            model.change = change
            with pytest.raises(
                RuntimeError, match=r"'first\.weight' of unit 'Assigner': a forward"
            ):
                model(data(0, rank))
            model.change = None
            assert_close(model(data(1, rank)), plain(data(1, rank)))

    simulate_ranks(ranks)
