"""Gradients that wait to be reduced: ``zero_grad`` drops them, and nothing reads them as absent."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fsdp_compose as fc
from fsdp_compose import Offload
from fsdp_compose.scopes.unreduced import UnreducedGradient
from fsdp_compose.sharded import ShardedTensor

from harness import run_ranks, simulate_ranks
from models import (
    WIDTH,
    Recomputed,
    Tower,
    Twin,
    by_block,
    data,
    mesh_of_replicas,
    one_unit,
    seeded,
    square,
    whole,
)

Clear = Callable[[nn.Module, torch.optim.Optimizer], None]


class Way(NamedTuple):
    """How gradients come to wait: on so many ranks, in a scope, of a model with options."""

    world: int
    scope: Callable[[nn.Module], Any]
    shard: Callable[[nn.Module], Any] = by_block
    build: Callable[[], nn.Module] = Tower

    @property
    def ends_outside(self) -> bool:
        """Whether the step's last backward runs behind the scope."""
        return self.scope in (fc.no_sync, not_last)


@contextlib.contextmanager
def not_last(model: nn.Module) -> Iterator[None]:
    fc.set_is_last_backward(model, False)
    yield
    fc.set_is_last_backward(model, True)


def over_replicas(model: nn.Module) -> nn.Module:
    return by_block(model, mesh=mesh_of_replicas(2, 2))


def over_both_axes(model: nn.Module) -> nn.Module:
    strategy = fc.ShardingStrategy.HYBRID_SHARD_OPTIMIZER
    return by_block(model, mesh=mesh_of_replicas(2, 2), strategy=strategy)


WAYS = {
    "no_sync": Way(2, fc.no_sync),
    "one rank": Way(1, fc.no_sync),
    "recomputed": Way(2, fc.no_sync, one_unit, Recomputed),
    "unsharded": Way(2, partial(fc.accumulate, keep="unsharded")),
    "no_all_reduce": Way(4, partial(fc.accumulate, keep="no_all_reduce"), over_replicas),
    "over both axes": Way(4, partial(fc.accumulate, keep="no_all_reduce"), over_both_axes),
    "offloaded": Way(2, not_last, partial(by_block, offload_policy=Offload(True))),
    "offloaded each time": Way(2, not_last, partial(by_block, offload_policy=Offload(True, True))),
    "deterministic": Way(2, contextlib.nullcontext, partial(by_block, deterministic=4)),
}


def assign_none(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = None


def delete(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        del param.grad


CLEARS: dict[str, Clear] = {
    "optimizer": lambda model, optim: optim.zero_grad(),
    "to zeros": lambda model, optim: optim.zero_grad(set_to_none=False),
    "module": lambda model, optim: model.zero_grad(),
    "None": assign_none,
    "del": delete,
}


def both(twin: Twin, clear: Clear) -> None:
    clear(twin.model, twin.optim)
    clear(twin.reference, twin.plain_optim)


def finish(twin: Twin, way: Way) -> None:
    """Compare gradients, step and compare parameters."""
    if way is WAYS["deterministic"]:  # which averages over microbatches too
        for param in twin.reference.parameters():
            if param.grad is not None:
                param.grad /= 2
    twin.step()
    twin.check()


@pytest.mark.parametrize("name", WAYS)
def test_cleared_while_they_wait(name: str) -> None:
    """As in a plain model, each way of clearing drops what backwards before it left."""
    way = WAYS[name]

    def check(rank: int) -> None:
        for clear in CLEARS.values() if name == "no_sync" else [assign_none]:
            twin = Twin(rank, way.world, way.build, way.shard)
            with way.scope(twin.model):
                twin.backward(square, 0)
                assert all(type(p.grad) is UnreducedGradient for p in twin.model.parameters())
                both(twin, clear)
                twin.check_grads()
                twin.backward(square, 1)
                if not way.ends_outside:
                    twin.backward(square, 2)
            if way.ends_outside:
                twin.backward(square, 2)
            finish(twin, way)

    simulate_ranks(check, way.world)


class Phases(Tower):
    """With complex parameters, and one that the forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(2, dtype=torch.complex128))
        self.phase = nn.Parameter(torch.randn(WIDTH, 2, dtype=torch.complex128))
        self.spare = nn.Parameter(torch.randn(WIDTH, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        turned = x.to(self.phase.dtype) @ self.phase + self.shift
        return super().forward(x) + torch.view_as_real(turned).sum(-1)


@pytest.mark.parametrize("name", WAYS)
def test_some_are_cleared_while_they_wait(name: str) -> None:
    """What waits beside them, in the same buffers, stays."""
    way = WAYS[name]

    def check(rank: int) -> None:
        twin = Twin(rank, way.world, Phases, way.shard)
        with way.scope(twin.model):
            twin.backward(square, 0)
            for model in (twin.model, twin.reference):
                assert model.spare.grad is None
                model.spare.grad = None
                model.head.weight.grad = model.blocks[0].up.bias.grad = model.phase.grad = None
            assert type(twin.model.head.bias.grad) is UnreducedGradient
            assert twin.model.head.weight.grad is None
            if not way.ends_outside:
                twin.backward(square, 1)
        if way.ends_outside:
            twin.backward(square, 1)
        finish(twin, way)

    simulate_ranks(check, way.world)


def test_reduced_ones_are_cleared_with_them() -> None:
    """By one function over a list of both, as optimizers with ``foreach=True`` clear theirs."""
    model = by_block(seeded(Tower))
    optim = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    fc.set_requires_gradient_sync(model.blocks[0], False)
    square(model, data(0, 0, 3, WIDTH)).backward()
    kinds = {type(p.grad) for p in model.parameters()}
    assert kinds == {UnreducedGradient, ShardedTensor}
    optim.zero_grad(set_to_none=False)
    assert not any(whole(p.grad).any() for p in model.parameters())


NOT_YET = (
    "the gradient of 'first.weight' .* accumulated without synchronisation and is not in .grad"
)
READS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "norm": lambda grad, other: grad.norm(),
    "sum": lambda grad, other: other + grad,
    "in place": lambda grad, other: other.add_(grad),
    "norms": lambda grad, other: torch._foreach_norm([other, grad]),
    "whole": lambda grad, other: grad.full_tensor(),
    "slice": lambda grad, other: grad.to_local(),
    "data": lambda grad, other: grad.data,
    "item": lambda grad, other: f"{grad:.3f}",
    "copy": lambda grad, other: copy.copy(grad),
    "deepcopy": lambda grad, other: copy.deepcopy(grad),
    "pickle": lambda grad, other: pickle.dumps(grad),
    "assigned": lambda grad, other: setattr(other, "grad", grad),
    "index": lambda grad, other: grad[0],
    "print": lambda grad, other: print(f"{grad.tolist()}"),
}


def waiting(**options: Any) -> tuple[nn.Module, Tensor]:
    """A model of one rank whose gradients wait, and the input that they are of."""
    model, x = by_block(seeded(Tower), **options), data(0, 0, 3, WIDTH)
    with fc.no_sync(model):
        square(model, x).backward()
    return model, x


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_one_raises(read: Callable[[Tensor, Tensor], Any]) -> None:
    model, _ = waiting()
    grad, other = model.first.weight.grad, model.first.weight.detach()
    with pytest.raises(RuntimeError, match=NOT_YET):
        read(grad, other)


def test_the_last_backward_that_was_not_said() -> None:
    """The error names what has the gradient wait, or any scope where it was not reduced yet."""
    model, x = by_block(seeded(Tower), offload_policy=Offload(True)), data(0, 0, 3, WIDTH)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    fc.set_is_last_backward(model, False)
    square(model, x).backward()
    with pytest.raises(RuntimeError, match=r"call set_is_last_backward\(module, True\) before"):
        optim.step()
    with fc.no_sync(model):
        square(model, x).backward()
    with pytest.raises(RuntimeError, match=r"run the last backward outside no_sync\(\)"):
        optim.step()


def clip(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def unscale(kind: Any, model: nn.Module, optim: torch.optim.Optimizer) -> None:
    scaler = kind("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optim)


@pytest.mark.parametrize(
    "change", [clip, partial(unscale, torch.amp.GradScaler), partial(unscale, fc.GradScaler)]
)
def test_what_scales_them_raises(change: Clear) -> None:
    """It would scale nothing, and what arrives later would be stepped as it is."""
    model, _ = waiting()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=NOT_YET):
        change(model, optim)
    fc.reduce_grads(model)
    before = fc.grad_norm(model)
    change(model, optim)
    assert fc.grad_norm(model) < 0.1 * before


def test_local_parameters_are_not_stepped_without_it() -> None:
    """Nor are flat ones: what they are over has no gradient yet."""
    model, _ = waiting()
    for params in (fc.local_parameters(model), fc.flat_parameters(model)):
        with pytest.raises(RuntimeError, match=r"SGD\.step\(\): the gradient of 'first\.weight'"):
            torch.optim.SGD(params, lr=0.1).step()


def test_undo_does_not_lose_it() -> None:
    model, x = waiting()
    with pytest.raises(RuntimeError, match=r"undo: the gradient of 'first\.weight'"):
        fc.undo(model)
    fc.reduce_grads(model)
    plain = seeded(Tower)
    square(plain, x).backward()
    assert torch.equal(fc.undo(model).first.weight.grad, plain.first.weight.grad)


def test_what_can_be_asked_of_one() -> None:
    model, _ = waiting()
    grad, weight = model.first.weight.grad, model.first.weight
    assert (grad.shape, grad.dtype, grad.device) == (weight.shape, weight.dtype, weight.device)
    assert repr(grad) == "UnreducedGradient('first.weight' of unit 'Tower': not reduced yet)"


def test_part_of_a_gradient_is_not_read_as_the_whole() -> None:
    """What was reduced before the scope is not all there is."""
    model, plain, x = by_block(seeded(Tower)), seeded(Tower), data(0, 0, 3, WIDTH)
    square(model, x).backward()
    with fc.no_sync(model):
        square(model, x).backward()
        with pytest.raises(RuntimeError, match=NOT_YET):
            model.first.weight.grad.norm()
    model.zero_grad(set_to_none=False)
    assert all(torch.equal(whole(p.grad), torch.zeros(p.shape)) for p in model.parameters())
    square(model, x).backward()
    square(plain, x).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(ours.grad), theirs.grad)


def test_one_parameter_is_cleared() -> None:
    """Those beside it in the unit's buffer keep what they have, which the last one frees."""
    model, x = waiting()
    weight, bias = model.head.weight, model.head.bias
    weight.grad = None
    assert weight.grad is None and type(bias.grad) is UnreducedGradient
    fc.reduce_grads(model)
    plain = seeded(Tower)
    square(plain, x).backward()
    assert weight.grad is None
    torch.testing.assert_close(whole(bias.grad), plain.head.bias.grad)
    model, x = waiting()
    assert sum(unit.packed for unit in fc.explain(model).units)
    for param in model.parameters():
        param.grad = None
    assert not sum(unit.packed for unit in fc.explain(model).units)


def test_one_rank_clears_its_own() -> None:
    """As under DistributedDataParallel, since nothing was communicated yet."""

    def check(rank: int) -> Tensor:
        model = by_block(seeded(Tower))
        with fc.no_sync(model):
            square(model, data(0, rank, 3, WIDTH)).backward()
        if rank == 0:
            model.zero_grad()
        square(model, data(1, rank, 3, WIDTH)).backward()
        return whole(model.head.weight.grad)

    plain = seeded(Tower)
    for seed, rank in ((0, 1), (1, 0), (1, 1)):
        (square(plain, data(seed, rank, 3, WIDTH)) / 2).backward()
    for found in run_ranks(check, 2):
        torch.testing.assert_close(found, plain.head.weight.grad)


def test_cleared_inside_a_scope_of_full_parameters() -> None:
    model, _ = waiting()
    with fc.gathered(model):
        assert type(model.head.weight.grad) is UnreducedGradient
        model.zero_grad()
        assert model.head.weight.grad is None
    assert not sum(unit.packed for unit in fc.explain(model).units)


def test_a_value_that_does_not_fit_drops_nothing() -> None:
    model, x = waiting()
    bias, other = model.first.bias, model.blocks[0].norm.bias
    for value, error in ((torch.ones(3), ValueError), (other.grad, RuntimeError)):
        with pytest.raises(error):
            bias.grad = value
    bias.grad = bias.grad
    with pytest.raises(RuntimeError, match=r"'first\.bias'"):
        bias.grad.data = torch.ones(6)
    fc.reduce_grads(model)
    plain = seeded(Tower)
    square(plain, x).backward()
    torch.testing.assert_close(whole(bias.grad), plain.first.bias.grad)


def test_another_gradient_takes_its_place() -> None:
    model, _ = waiting()
    model.first.bias.grad = torch.ones(6).double()
    fc.reduce_grads(model)
    assert torch.equal(whole(model.first.bias.grad), torch.ones(6).double())


def test_a_skipped_step_puts_back_what_waits() -> None:
    model, x = waiting()
    with fc.skippable_step(model) as step:
        model.zero_grad()
        square(model, x).backward()
        assert type(model.head.weight.grad) is ShardedTensor
        step.discard("bad batch")
    assert type(model.head.weight.grad) is UnreducedGradient


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("keep", ["unsharded", "no_all_reduce", None])
def test_clearing_what_one_rank_took_part_in(keep: Any, to_none: bool) -> None:
    """Where a rank has no gradient of its own, it clears what waits as the others do."""

    def clear(model: nn.Module, part: str) -> None:
        for param in {"all": model, "some": model.first, "none": nn.Module()}[part].parameters():
            if to_none or param.grad is None:
                param.grad = None
            else:
                param.grad.zero_()

    def check(rank: int, part: str, goes_on: bool) -> None:
        model, plain = by_block(seeded(Tower)), seeded(Tower)
        with fc.no_sync(model) if keep is None else fc.accumulate(model, keep=keep):
            loss = fc.participate(model) if rank else square(model, data(0, 0))
            loss.backward()
            clear(model, part)
        (square(plain, data(0, 0)) / 2).backward()
        clear(plain, part)
        if goes_on:
            square(model, data(1, rank)).backward()
            (sum(square(plain, data(1, r)) for r in range(2)) / 2).backward()  # type: ignore[union-attr]
        elif keep is None:
            fc.reduce_grads(model)
        for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            if wanted.grad is None or not wanted.grad.any():
                assert mine.grad is None or not whole(mine.grad).any()
            else:
                assert_close(whole(mine.grad), wanted.grad)

    for part in ("all", "some", "none"):
        for goes_on in (True, False):
            simulate_ranks(check, 2, part, goes_on)


@pytest.mark.parametrize("keep", ["sharded", "unsharded", "no_all_reduce"])
def test_accumulate_reduces_what_it_postponed(keep: Any) -> None:
    """Also where gradients of one unit inside were to wait anyway, which then wait on."""

    def run(rank: int) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        fc.fully_shard(model, units=fc.wrap.by_class({nn.Linear}), init="broadcast")
        fc.set_requires_gradient_sync(model[0], False)
        with fc.accumulate(model, keep):
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
        waiting = fc.pending_gradients(model)
        assert [p in waiting for p in model.parameters()] == [True, True, False, False]
        assert model[1].bias.grad.full_tensor().tolist() == [2.0, 2.0]
        fc.reduce_grads(model)
        assert model[0].bias.grad.full_tensor().numel() == 2

    run_ranks(run)
