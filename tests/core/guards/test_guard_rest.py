"""What guards do for later units, tensors and forwards, and with hooks and threads of callers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from threading import get_ident
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    MixedPrecision,
    ShardingStrategy,
    count_traffic,
    fully_shard,
    reduce_grads,
    reshard,
    set_requires_all_reduce,
    set_requires_gradient_sync,
    unshard,
    wrap,
)
from fsdp_compose.base.process import here
from fsdp_compose.base.torch_private import pop_saved_tensor_hooks, saved_tensor_hooks
from fsdp_compose.comm.collectives import is_point_to_point
from fsdp_compose.core import forward
from fsdp_compose.core.autograd import EngineWork
from fsdp_compose.core.guards.used_parameters import is_known_at_once
from fsdp_compose.core.state import Task, engine_of

from harness import fake_world, rank_errors, simulate_ranks, single_process
from models import (
    WIDTH,
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

META = torch.device("meta")
RELEASED = {"reshard_after_forward": True}


def layer() -> nn.Module:
    return seeded(lambda: nn.Linear(WIDTH, WIDTH))


def test_submodules_without_hooks_cost_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks of a unit's own module are no reason to look through its submodules."""
    watched: list[str] = []
    monkeypatch.setattr(forward, "watch_hooked", lambda unit: watched.append(unit.name))
    with fake_world(2):
        model = by_block(seeded(two_blocks))
        for step in range(3):
            square(model, data(step, 0)).backward()
        assert not watched
        model.blocks[1].up.register_forward_hook(lambda *_: None)
        model(data(3, 0))
        assert watched == ["blocks.1"]


def test_a_forward_after_another_models_in_a_thread() -> None:
    """What an interrupted thread left of one model does not make another's forward an inner one."""

    def ranks(rank: int) -> None:
        plain = seeded(two_blocks)
        other, model = by_block(seeded(two_blocks)), by_block(copy.deepcopy(plain))
        engine = units(model)[0].engine
        engine.schedule.active.append(units(other)[0])
        engine.thread = -1
        with torch.no_grad():
            assert_close(model(data(0, rank)), plain(data(0, rank)))
        assert engine.thread == get_ident() and not engine.schedule.active
        square(model, data(0, rank)).backward()
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_a_switch_clears_what_failed_on_every_device() -> None:
    """Each device has an engine; a step that failed on any of them is over."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks))
        last = units(model)[-1]
        first, last.engine = last.engine, engine_of(META, EngineWork)
        for engine in (first, last.engine):
            engine.tasks[1] = Task(1)
            engine.tasks[1].callback = None
            assert engine.has_failed
        set_requires_gradient_sync(model, True)
        assert not first.has_failed and not last.engine.has_failed

    simulate_ranks(ranks)


class Filling(nn.Linear):
    """Writes one number into its weight, another into its bias."""

    filling, value = 0.5, 0.0

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.fill_(self.filling)
            self.bias.fill_(self.value)
        return super().forward(x)


def test_each_weight_that_replicas_write_is_compared() -> None:
    """The first is alike on all ranks, the second is not."""

    def ranks(rank: int) -> None:
        model = fully_shard(Filling(WIDTH, WIDTH), strategy=ShardingStrategy.NO_SHARD)
        model.value = float(rank)
        model(torch.ones(1, WIDTH))

    for text in rank_errors(ranks, 2):
        assert text is not None and "write different weights" in text
        assert "parameter 'bias'" in text and "'weight'" not in text


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
        fully_shard(model.inner, **RELEASED)
        fully_shard(model)
        for _ in range(3):
            model(torch.ones(1, WIDTH)).sum().backward()
        model.reads = True
        model(torch.ones(1, WIDTH))

    for text in rank_errors(ranks, 2):
        assert text is not None and "is a view of parameter 'inner.weight'" in text


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
        model = fully_shard(Counting(WIDTH, WIDTH), **RELEASED)
        assert model(torch.ones(1, WIDTH)).dtype is torch.int64
        assert_at_rest(model)
        assert list(fully_shard(Choosing())(torch.ones(1))) == [1]

    simulate_ranks(ranks)


class Forked(nn.Linear):
    """Gives two tensors, neither of which comes of the other."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), super().forward(torch.sin(x))


def test_a_backward_from_a_later_output() -> None:
    """Also after backwards that came by the first alone."""

    def ranks(rank: int) -> None:
        plain = seeded(lambda: Forked(WIDTH, WIDTH))
        model = fully_shard(copy.deepcopy(plain), **RELEASED)
        for step in range(3):
            first, second = model(data(step, rank))
            first.sum().backward()
            del first, second
        model.zero_grad()
        model(data(3, rank))[1].square().sum().backward()
        for r in range(2):
            (plain(data(3, r))[1].square().sum() / 2).backward()
        for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(whole(found.grad), wanted.grad)
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_an_interrupt_leaves_hooks_entered_later() -> None:
    """The forward that clears up gives its activations to the hooks that are in force then."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def hooks(packed: list[Tensor]) -> saved_tensors_hooks:
        def pack(tensor: Tensor) -> Tensor:
            packed.append(tensor)
            return tensor

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def ranks(rank: int) -> None:
        model = one_unit(seeded(two_blocks))
        before, later = list[Tensor](), list[Tensor]()
        handle = model.head.register_forward_hook(interrupt)
        with hooks(before), pytest.raises(KeyboardInterrupt):
            model(data(0, rank))
        handle.remove()
        before.clear()
        with hooks(later):
            loss = square(model, data(0, rank))
        assert later and not before
        while saved_tensor_hooks() is not None:
            pop_saved_tensor_hooks()
        loss.backward()
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_saved_tensor_hooks_may_be_any_callable() -> None:
    """Also one that tells no module it was defined in."""
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    hook: Callable[[Tensor], Tensor] = pack.__call__
    assert not hasattr(hook, "__module__")
    with single_process():
        model = fully_shard(layer())
        with saved_tensors_hooks(hook, lambda tensor: tensor):
            loss = square(model, data(0, 0))
        loss.backward()
    assert packed and model.weight.grad is not None


class Branch(nn.Module):
    """Keeps in an attribute what leads to no output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kept: Tensor | None = None
        self.keeps_weight = False

    def forward(self, x: Tensor) -> Tensor:
        self.kept = torch.sin(self.last(torch.tanh(self.last(x))))
        if self.keeps_weight:
            self.kept = self.last.weight
        return self.first(x)


def test_an_attribute_is_no_slow_way(caplog: pytest.LogCaptureFixture) -> None:
    """The first backward that begins at what an attribute keeps is as usual, and logs nothing."""

    def ranks(rank: int) -> None:
        model = fully_shard(seeded(Branch), **RELEASED)
        model(data(0, rank))
        model.kept.square().mean().backward()
        assert model.last.weight.grad is not None

    with caplog.at_level("WARNING", "fsdp_compose"):
        simulate_ranks(ranks)
    assert not caplog.records


def test_borrowed_weights_that_ranks_write_differ() -> None:
    """Also where the unit's own parameters are on one rank alone."""

    def ranks(rank: int) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Filling(WIDTH, WIDTH))
        model[0].weight = model[1].weight
        fully_shard(model[0], strategy=ShardingStrategy.NO_SHARD)
        fully_shard(model[1], mesh="self")
        own, borrowed = units(model[1])[0].gathered
        assert own.mesh.size == 1 and borrowed.mesh.size == 2
        model[1].filling = float(rank)
        model(torch.ones(1, WIDTH))

    for text in rank_errors(ranks, 2):
        assert text is not None and "write different weights" in text
        assert "unit 'Filling' (parameter 'weight'" in text


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


class Caching(nn.Module):
    """Passes on a tensor in a list that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        cache.append(torch.tanh(self.key(x)).mul(2))
        return self.out(x)


def test_backward_looks_for_weights_of_each_dtype() -> None:
    """The first are the shard itself, the second were released."""
    with single_process():
        model = Caching()
        model.key.double()
        policy = MixedPrecision(param_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(model, mp_policy=policy, **RELEASED)
        assert [bucket.in_place for bucket in units(model)[0].gathered] == [True, False]
        for _ in range(3):
            model(torch.ones(1, WIDTH), []).sum().backward()
        cache: list[Tensor] = []
        model(torch.ones(1, WIDTH), cache)
        with pytest.raises(RuntimeError, match="computed with weights of unit 'Caching'"):
            cache[0].sum().backward()


def test_units_of_every_device_watch_hooked_tensors() -> None:
    """A backward from what a hook kept, where another device was used first."""

    def ranks(rank: int) -> None:
        engine_of(META, EngineWork)
        model = by_block(seeded(two_blocks))
        kept: list[Tensor] = []
        for step in range(2):
            square(model, data(step, rank)).backward()
        assert next(iter(here.engines)) == META
        model.zero_grad()
        model.blocks[1].up.register_forward_hook(lambda *given: kept.append(given[2] * 1))
        model(data(2, rank))
        kept.pop().sum().backward()
        grad = whole(model.blocks[1].up.bias.grad)
        assert_close(grad, torch.full_like(grad, len(data(2, rank))))

    simulate_ranks(ranks)


@pytest.mark.parametrize("way", ["no_grad", "checkpoint"])
def test_hooks_that_keep_no_weights_stay_in_force(way: str) -> None:
    """Without gradients, and in a checkpoint, a unit's forward runs under its caller's hooks."""
    seen: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        return tensor

    with single_process():
        model = fully_shard(seeded(two_blocks))
        model.first.register_forward_hook(lambda *_: seen.append(saved_tensor_hooks()))
        if way == "no_grad":
            with torch.no_grad(), saved_tensors_hooks(pack, pack):
                model(data(0, 0))
            assert [hooks[0] for hooks in seen] == [pack]
        else:
            checkpoint(model, data(0, 0), use_reentrant=False).sum().backward()
            modules = {hooks[0].__module__ for hooks in seen}
            assert len(seen) == 2 and modules == {"torch.utils.checkpoint"}


def test_messages_between_pairs_stall_no_accelerator() -> None:
    """Ranks are asked at once on a CPU, and elsewhere where every group has such messages."""

    def ranks(rank: int) -> None:
        (bucket,) = units(one_unit(layer()))[0].buckets
        groups = list(bucket.mesh.groups)
        assert is_known_at_once(bucket, groups)
        bucket.mesh = replace(bucket.mesh, device=META)
        assert is_known_at_once(bucket, groups) == all(map(is_point_to_point, groups))
        bare = replace(groups[0], transport=None, backend="none")
        assert not is_known_at_once(bucket, [*groups, bare])

    simulate_ranks(ranks)


def test_replicas_that_nobody_compares_are_summed() -> None:
    """In a world that moves nothing, gradients that wait for replicas are reduced and set."""
    with fake_world(4):
        options = {"mesh": mesh_of_replicas(2, 2), "strategy": ShardingStrategy.HYBRID_SHARD}
        model = one_unit(layer(), **options)
        set_requires_all_reduce(model, False)
        square(model, data(0, 0)).backward()
        assert "not reduced yet" in repr(model.weight.grad)
        with count_traffic() as traffic:
            reduce_grads(model)
        assert "not reduced yet" not in repr(model.weight.grad)
        assert traffic.control == 0


def test_an_attribute_that_held_a_weight_first() -> None:
    """A later backward may begin at what it holds then."""

    def ranks(rank: int) -> None:
        plain = seeded(Branch)
        model = fully_shard(copy.deepcopy(plain), **RELEASED)
        model.keeps_weight = True
        model(data(0, rank)).sum().backward()
        model.keeps_weight = False
        model.zero_grad()
        model(data(1, rank))
        model.kept.square().mean().backward()
        for r in range(2):
            plain(data(1, r))
            (plain.kept.square().mean() / 2).backward()  # type: ignore[operator, union-attr]
        assert_close(whole(model.last.weight.grad), plain.last.weight.grad)

    simulate_ranks(ranks)


class Taking(nn.Linear):
    """Keeps its inputs in a list."""

    def __init__(self, taken: list[Tensor]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.take = taken.append

    def forward(self, x: Tensor) -> Tensor:
        self.take(x)
        return super().forward(x)


def test_a_backward_from_inputs_of_a_frozen_unit() -> None:
    """It needs no weight of that unit, which is not gathered."""
    taken: list[Tensor] = []
    with fake_world(2):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Taking(taken).requires_grad_(False))
        fully_shard(model[1], **RELEASED)
        fully_shard(model)
        for _ in range(2):  # the first learns where backwards begin
            model(torch.ones(1, WIDTH))
            with count_traffic() as traffic:
                taken.pop().sum().backward()
        assert traffic.gathers == 0
        assert model[0].weight.grad is not None


def test_ranks_that_write_into_different_units() -> None:
    """Each says which weight it wrote, and the ranks know that they have parted."""

    def ranks(rank: int) -> None:
        model = nn.Sequential(Filling(WIDTH, WIDTH), Filling(WIDTH, WIDTH))
        fully_shard(model, units=wrap.by_class({Filling}))
        unshard(model[0])
        unshard(model[1])
        (log,) = units(model[0])[0].links.logs
        with pytest.raises(RuntimeError, match=rf"parameter '{rank}\.weight' of unit '{rank}'"):
            model[rank](torch.ones(1, WIDTH))
        assert log.disagreements == 1

    simulate_ranks(ranks)
