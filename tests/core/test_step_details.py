"""What a step does between its ends: when gradients are there, what names show, what is counted."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    MixedPrecision,
    Offload,
    Prefetch,
    ShardingStrategy,
    default_hook,
    fully_shard,
    get_state,
    register_comm_hook,
    register_post_reduce_hook,
    set_forward_prefetch,
    set_is_last_backward,
    set_requires_all_reduce,
)
from fsdp_compose.base.process import here
from fsdp_compose.core import forward, gathering
from fsdp_compose.core.guards import used_parameters
from fsdp_compose.core.schedule import Hold
from fsdp_compose.sharded import is_sharded

from harness import run_ranks, simulate_ranks
from models import (
    WIDTH,
    Block,
    Checkpointed,
    Tower,
    Twin,
    TwoKinds,
    assert_at_rest,
    by_block,
    data,
    mesh_of_replicas,
    one_unit,
    seeded,
    sgd,
    square,
    two_blocks,
    units,
    whole,
)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_block_is_done_before_the_backward_ends(hooked: bool) -> None:
    """Its names show the parameters again, and its gradients are set, as code in hooks expects.

    A frozen block is released too. What a hook sees in whole is not kept until the end.
    """

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower), prefetch=Prefetch(backward=0))
        model.blocks[1].requires_grad_(False)
        if hooked:
            register_post_reduce_hook(model.blocks[2], lambda module, params: None)
        seen = []

        def look(*_: Any) -> None:
            last = model.blocks[2]
            seen.append((is_sharded(last.up.weight), last.up.weight.grad is not None))
            assert not get_state(model.blocks[1]).unit.holds

        x = data(0, rank).requires_grad_()
        x.register_hook(look)  # all blocks have had their backward when it has a gradient
        square(model, x).backward()
        assert seen == [(True, True)]

    simulate_ranks(ranks)


class Again(nn.Module):
    """Calls itself, and reads its own weights behind the inner call."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = torch.tanh(self.before(x))
        return self.behind(self(x, depth - 1) if depth else x)


def test_a_unit_stays_open_behind_a_call_of_itself() -> None:
    simulate_ranks(lambda rank: Twin(rank, 2, Again, one_unit).train(steps=2))


class Recomputed(nn.Module):
    """Recomputes its second layer where asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, again: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        return checkpoint(self.second, x, use_reentrant=True) if again else self.second(x)


def test_a_part_recomputed_while_the_unit_is_reduced() -> None:
    """The gradients of the recomputed part may not go where the other forward's are read."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x, True).square() + model(2 * x, False).square()).mean()

    run_ranks(lambda rank: Twin(rank, 2, Recomputed, one_unit).train(loss))


def test_an_interrupted_functional_call_is_forgotten() -> None:
    """Its tensors are not read by the next forward; an interrupt runs no forward hook."""

    class Interrupted(Tower):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise KeyboardInterrupt
            return super().forward(x)

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Interrupted)
        given = {name: whole(p) * 2 for name, p in twin.model.named_parameters()}
        twin.model.fails = True
        with pytest.raises(KeyboardInterrupt):
            functional_call(twin.model, given, (data(0, rank),))
        twin.model.fails = False
        twin.train(steps=2)

    run_ranks(ranks)


def test_an_evaluation_that_could_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory for what is gathered ahead of the first unit: training follows its own order."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks)
        with torch.no_grad():
            twin.model(data(0, rank))
            with monkeypatch.context() as patch:
                patch.setattr(gathering, "_start_gather", start_first)
                with pytest.raises(MemoryError):
                    twin.model(data(0, rank))
        schedule = units(twin.model)[0].engine.schedule
        assert schedule.eval_order is None and not schedule.active
        assert_at_rest(twin.model)
        twin.train(steps=1)

    start = gathering._start_gather

    def start_first(engine: Any, buckets: Any) -> None:
        if buckets[0].entries[0].spec.unit.startswith("blocks"):
            raise MemoryError
        start(engine, buckets)

    simulate_ranks(ranks)


def test_ranks_outside_a_step_are_not_asked() -> None:
    """A step of all ranks fails; then two of them train a model of theirs, and compare alone."""

    def ranks(rank: int) -> None:
        pair = dist.new_group([0, 1])
        everyone = by_block(seeded(two_blocks))
        hook = everyone.blocks[0].register_full_backward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            square(everyone, data(0, rank)).backward()
        hook.remove()
        if rank < 2:
            model = by_block(seeded(two_blocks), mesh=pair)
            for seed in range(2):
                square(model, data(seed, rank)).backward()
            assert_at_rest(model)
        dist.barrier()
        square(everyone, data(1, rank)).backward()

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    simulate_ranks(ranks, 3)


@pytest.mark.parametrize("frozen", [("up.weight", "norm.weight"), ("norm.weight", "")])
def test_ranks_that_freeze_differently_in_a_later_step(frozen: tuple[str, str]) -> None:
    """As many parameters on each rank or not, also the first of the bucket (D17)."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks))
        for step in range(3):
            if step == 2 and frozen[rank]:
                model.blocks[1].get_parameter(frozen[rank]).requires_grad_(False)
            square(model, data(step, rank)).backward()

    trains, freezes = (0, 1) if frozen[1] else (1, 0)
    named = r"trained in step 3: parameter 'blocks\.1\.norm\.weight'"
    with pytest.raises(
        RuntimeError, match=rf"{named} .* on rank {trains} and not on rank {freezes}"
    ):
        simulate_ranks(ranks)


def test_a_read_of_data_on_one_rank_is_told() -> None:
    """``p.data`` of the second bucket, between forward and backward: that rank gathers again."""

    def ranks(rank: int) -> None:
        torch.manual_seed(0)
        model = fully_shard(TwoKinds(), reshard_after_forward=False)
        loss = square(model, data(0, rank))
        if rank:
            model[1].weight.data.mul_(1.0)
        loss.backward()

    with pytest.raises(RuntimeError, match=r"again, since p\.data was handed out"):
        simulate_ranks(ranks)


def test_a_write_on_one_rank_is_told() -> None:
    """To a unit that stays gathered for its backward, which that rank alone gathers again."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks), reshard_after_forward=False)
        model(data(0, rank))
        if rank:
            with torch.no_grad():
                model.blocks[1].up.weight.to_local().mul_(1.0)
        square(model, data(0, rank)).backward()

    with pytest.raises(RuntimeError, match="again, since it was changed"):
        simulate_ranks(ranks)


def test_a_write_on_one_replica_is_told() -> None:
    """It alone gathers over the replicas before it gathers over its shard group."""

    def ranks(rank: int) -> None:
        options = {"strategy": ShardingStrategy.HYBRID_SHARD_OPTIMIZER}
        model = by_block(seeded(two_blocks), mesh=mesh_of_replicas(2, 2), **options)
        with torch.no_grad():
            model(data(0, rank))
            if rank == 3:
                model.blocks[1].up.weight.to_local().mul_(1.0)
            model(data(0, rank))

    with pytest.raises(RuntimeError, match=r"rank 3 gathers unit 'blocks\.1' \(.*, over the"):
        simulate_ranks(ranks, 4)


class Choice(nn.Module):
    """Uses one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.chosen: Sequence[int] = (0,)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layers[i](x) for i in self.chosen]).sum(0)


@pytest.mark.parametrize("grads", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("params", [False, True], ids=["params", "offloaded"])
def test_the_last_backward_sets_what_any_used(params: bool, grads: bool) -> None:
    """With offload they wait in between, and no earlier one is there before; else they add up."""

    def ranks(rank: int) -> None:
        policy = Offload(params=params, grads=grads, pin_memory=False)
        shard = lambda m: fully_shard(m, offload_policy=policy)  # noqa: E731
        twin = Twin(rank, 2, Choice, shard)
        for _ in range(2):
            for seed, chosen in enumerate([(0,), (1,), (1,)]):
                for module in (twin.model, *twin.plain):
                    module.chosen = chosen
                set_is_last_backward(twin.model, seed == 2)
                twin.backward(square, seed)
                found = [is_sharded(p.grad) for p in twin.model.parameters()]
                waits = params or grads
                first, second = (seed == 2, seed == 2) if waits else (True, seed > 0)
                assert found == [first] * 2 + [second] * 2 + [False] * 2
            twin.step()
        twin.check()

    simulate_ranks(ranks)


def test_half_precision_sums_keep_large_and_small() -> None:
    """Gradients are divided by the root of the number of ranks before the sum, the rest after."""

    def ranks(rank: int) -> None:
        model = nn.Linear(1, 2, bias=False).half()
        fully_shard(model, mp_policy=MixedPrecision(reduce_dtype=torch.float16))
        slopes = torch.tensor([28672.0, 2.0**-21], dtype=torch.float16)
        (model(torch.ones(1, 1, dtype=torch.float16)) * slopes).sum().backward()
        assert model.weight.grad is not None
        assert torch.equal(whole(model.weight.grad).flatten(), slopes)

    simulate_ranks(ranks, 8)


@pytest.mark.parametrize(("hooked", "reduces"), [(False, 2 * 3), (True, 3)])
def test_two_forwards_reduce_apart_unless_watched(hooked: bool, reduces: int) -> None:
    """So that one flat buffer lives at a time; a hook on a parameter sees the sum, once."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks)
        seen = []
        if hooked:
            for name, param in twin.model.named_parameters():
                param.register_hook(lambda grad, name=name: seen.append(name))
        (a, b), (c, d) = twin.losses(square, 0), twin.losses(square, 1)
        here.traffic.reset()
        (a + c).backward()
        (b + d).backward()
        assert here.traffic.reduces == reduces
        if hooked:
            assert sorted(seen) == sorted(name for name, _ in twin.model.named_parameters())
        twin.step()
        twin.check()

    simulate_ranks(ranks)


def test_gradients_that_land_together_add_up() -> None:
    """Two of one buffer in one backward, and then those of the last backward."""

    def ranks(rank: int) -> None:
        shard = lambda m: by_block(m, offload_policy=Offload(grads=True, pin_memory=False))  # noqa: E731
        twin = Twin(rank, 2, two_blocks, shard)
        for is_last in (False, True):
            set_is_last_backward(twin.model, is_last)
            (a, b), (c, d) = twin.losses(square, 0), twin.losses(square, 1)
            (a + c).backward()
            (b + d).backward()
        twin.step()
        twin.check()

    simulate_ranks(ranks)


def test_ranks_ask_once_what_any_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which parameters any rank used is known before they are reduced, also through a hook."""
    asked: list[str] = []
    unite = used_parameters._unite
    monkeypatch.setattr(
        used_parameters, "_unite", lambda log, *rest: (asked.append(""), unite(log, *rest))
    )

    def ranks(rank: int) -> None:
        model = one_unit(seeded(two_blocks))
        register_comm_hook(model, None, default_hook)
        torch.autograd.grad(square(model, data(0, rank)), list(model.parameters()))

    simulate_ranks(ranks)
    assert len(asked) == 2  # one bucket on each of two ranks


def test_a_unit_is_looked_around_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module around it is looked for in the first forward that trains it, and in no other."""
    found: list[str] = []
    find = forward.find_surroundings
    monkeypatch.setattr(
        forward, "find_surroundings", lambda unit: (found.append(unit.name), find(unit))
    )
    model = by_block(seeded(two_blocks))
    model.blocks[0].requires_grad_(False)
    for seed in range(3):
        square(model, data(seed, 0)).backward()
    assert sorted(found) == ["Tower", "blocks.1"]


def test_one_rank_alone_evaluates_what_is_not_sharded() -> None:
    """Nothing is gathered for it, so the others have nothing to compare."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks), strategy=ShardingStrategy.NO_SHARD)
        optim = sgd(model.parameters())
        for seed in range(3):
            square(model, data(seed, rank)).backward()
            optim.step()
            optim.zero_grad()
            if rank == 1:
                with torch.no_grad():
                    model(data(9, rank))
                model.blocks[1](torch.randn(2, WIDTH).double())  # whose gradients nobody asks for

    simulate_ranks(ranks)


class Borrower(nn.Module):
    """Its block shares a weight with each of two others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden=WIDTH) for _ in range(3))
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.blocks[2].down.weight = self.blocks[1].down.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_weights_lent_by_two_units_are_reduced_once() -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Borrower)
        for seed in range(3):
            here.traffic.reset()
            loss, plain = twin.losses(square, seed)
            loss.backward()
            assert here.traffic.reduces == 3
            plain.backward()
            twin.step()
        twin.check()

    simulate_ranks(ranks)


def test_a_part_kept_for_backward_is_freed() -> None:
    """After it, and after one that failed."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 4, two_blocks, lambda m: by_block(m, reshard_after_forward=2))
        twin.train(steps=2)
        hook = twin.model.blocks[0].register_forward_hook(lambda *given: fail_behind(given[-1]))
        loss = square(twin.model, data(0, rank))
        hook.remove()
        stores = [b.inner.store for u in units(twin.model)[1:] for b in u.buckets if b.inner]
        assert len(stores) == 2 and None not in stores
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        with torch.no_grad():
            twin.model(data(0, rank))
        assert_at_rest(twin.model)

    def fail_behind(output: Tensor) -> None:
        output.register_hook(fail)

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    simulate_ranks(ranks, 4)


@pytest.mark.parametrize("grads", [False, True])
def test_gradients_on_their_way_to_host_are_dropped(grads: bool) -> None:
    """Those of a backward that fails before they are set."""

    def ranks(rank: int) -> None:
        policy = Offload(params=True, grads=grads, pin_memory=False)
        twin = Twin(rank, 2, two_blocks, lambda m: by_block(m, offload_policy=policy))

        def fail(grad: Tensor) -> None:
            raise ZeroDivisionError

        x = data(0, rank).requires_grad_()
        x.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            square(twin.model, x).backward()
        twin.zero_grad()
        twin.train(steps=2)

    simulate_ranks(ranks)


def test_gradients_that_add_up_keep_their_graphs() -> None:
    """``.grad`` of two backwards with ``create_graph`` can be differentiated, through both."""

    def slope(model: nn.Module) -> Tensor:
        return sum(p.grad.square().sum() for p in model.parameters())

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks)
        for seed in range(2):
            loss, plain = twin.losses(square, seed)
            loss.backward(create_graph=True)
            plain.backward(create_graph=True)
        twin.check_grads()
        found, wanted = slope(twin.model), slope(twin.reference)
        torch.testing.assert_close(found.detach(), wanted.detach())
        weight = lambda m: m.blocks[0].up.weight  # noqa: E731
        ours = torch.autograd.grad(found, weight(twin.model))[0]
        theirs = torch.autograd.grad(wanted, weight(twin.reference))[0]
        torch.testing.assert_close(whole(ours), theirs)
        twin.zero_grad()

    with warnings.catch_warnings():  # of a reference cycle
        warnings.simplefilter("ignore")
        simulate_ranks(ranks)


def test_a_parameter_added_before_backward() -> None:
    """The recomputation of a unit computes what its forward did; the next forward raises."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Checkpointed("outside", reentrant=False, depth=2))
        loss, plain = twin.losses(square, 0)
        twin.model.blocks[1].added = nn.Parameter(torch.ones(2))
        loss.backward()
        plain.backward()
        with pytest.raises(RuntimeError, match="added"):
            square(twin.model, data(1, rank))
        del twin.model.blocks[1].added
        twin.step()
        twin.check()

    simulate_ranks(ranks)


def test_an_all_reduce_that_was_put_off_happens_once() -> None:
    """What the shard groups summed before is added to the next backward alone, in every step."""

    def ranks(rank: int) -> None:
        mesh = mesh_of_replicas(2, 2)
        twin = Twin(rank, 4, two_blocks, lambda m: by_block(m, mesh=mesh))
        for step in range(2):
            for last in (False, True):
                set_requires_all_reduce(twin.model, last)
                twin.backward(square, 2 * step + last)
            twin.step()
        twin.check()

    simulate_ranks(ranks, 4)


def test_what_forward_gathered_in_vain_goes_at_once() -> None:
    """A backward begins without what the forward gathered ahead and nobody used."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower), prefetch=Prefetch(0, 0))
        set_forward_prefetch(model.blocks[2], [model.blocks[0]])
        first, seen = get_state(model.blocks[0]).unit, []

        def look(grad: Tensor) -> None:
            seen.append(set(first.holds))

        def watch(x: Tensor) -> None:
            x.register_hook(look)

        model.blocks[2].register_forward_pre_hook(lambda _, given: watch(given[0]))
        loss = square(model, data(0, rank))
        assert first.holds == {Hold.PREFETCH}
        loss.backward()
        assert seen == [set()]

    simulate_ranks(ranks)


def test_all_hooks_of_one_parameter_run() -> None:
    """In the order they were registered in, on what is in ``.grad``."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks))
        seen = []
        for name in "ab":
            hook = lambda p, name=name: seen.append((name, p.grad is not None))  # noqa: E731
            model.blocks[0].up.weight.register_post_accumulate_grad_hook(hook)
        square(model, data(0, rank)).backward()
        assert seen == [("a", True), ("b", True)]

    simulate_ranks(ranks)


def test_a_forward_pre_hook_from_before_reads_weights() -> None:
    """A hook that was there before the unit was sharded runs while the unit is gathered."""

    def build() -> nn.Module:
        model = two_blocks()
        for block in model.blocks:
            block.register_forward_pre_hook(lambda m, given: (given[0] @ m.up.weight[:WIDTH],))
        return model

    simulate_ranks(lambda rank: Twin(rank, 2, build).train(steps=2))
