"""Norms, clipping, accumulation and the switches, each against one process on the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compose as fc
from fsdp_compose import MixedPrecision, Offload, ShardingStrategy, fully_shard
from fsdp_compose.base.process import here
from fsdp_compose.core.guards.units import get_state
from fsdp_compose.optim.clip import clip_grad_norm_, grad_norm
from fsdp_compose.scopes.gathered import gathered
from fsdp_compose.scopes.switches import (
    accumulate,
    no_sync,
    set_gradient_divide_factor,
    set_is_last_backward,
    set_requires_all_reduce,
    set_requires_gradient_sync,
    set_reshard_after_backward,
    set_reshard_after_forward,
)
from fsdp_compose.scopes.unshard import reduce_grads

from harness import rank_errors, run_ranks, simulate_ranks
from models import (
    WIDTH,
    Tower,
    Twin,
    adamw,
    assert_at_rest,
    by_block,
    compare,
    data,
    nested,
    one_unit,
    seeded,
    sgd,
    square,
    two_blocks,
    units,
    whole,
)

pytestmark = pytest.mark.filterwarnings("error")

Shard = Callable[[nn.Module], Any]


def hybrid(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, torch.distributed.get_world_size() // 2))
    return by_block(model, mesh=mesh)


def full(model: nn.Module) -> nn.Module:
    return by_block(model, strategy=ShardingStrategy.FULL_SHARD)


def grad_op(model: nn.Module) -> nn.Module:
    return by_block(model, strategy=ShardingStrategy.SHARD_GRAD_OP)


def no_shard(model: nn.Module) -> nn.Module:
    return by_block(model, strategy=ShardingStrategy.NO_SHARD)


CELLS: list[tuple[Shard, int]] = [
    (full, 2),
    (full, 3),
    (grad_op, 2),
    (no_shard, 2),
    (hybrid, 4),
    (one_unit, 1),
    (nested, 2),
]
IDS = [f"{shard.__name__}-{world}" for shard, world in CELLS]
cells = pytest.mark.parametrize(("shard", "world"), CELLS, ids=IDS)
cells_of_even_worlds = pytest.mark.parametrize(
    ("shard", "world"), [cell for cell in CELLS if cell[1] != 3]
)
ORDERS = [2.0, 1.0, 3.5, 0.0, 0.5, -1.0, math.inf, -math.inf]


# Norms


@cells
def test_norms_and_clipping_equal_one_process(shard: Shard, world: int) -> None:
    def check(rank: int) -> None:
        for order in ORDERS:
            twin = Twin(rank, world, Tower, shard)
            twin.backward(square, 0)
            wanted = torch.nn.utils.get_total_norm(
                [p.grad for p in twin.reference.parameters()], order
            )
            compare(f"norm {order}", grad_norm(twin.model, order), wanted, twin.tolerance)
            limit = float(wanted) / 3
            found = clip_grad_norm_(twin.model, limit, order)
            assert type(found) is Tensor and found.shape == ()
            compare(f"norm {order}", found, wanted, twin.tolerance)
            torch.nn.utils.clip_grad_norm_(twin.reference.parameters(), limit, order)
            twin.step()
            twin.check()

    simulate_ranks(check, world)


def test_a_large_limit_changes_nothing() -> None:
    """A large limit changes nothing and lists are taken."""

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.backward(square, 0)
        before = [whole(p.grad) for p in twin.model.parameters()]
        params = list(twin.model.parameters())
        clip_grad_norm_(iter(params), 1e9)
        assert all(torch.equal(whole(p.grad), b) for p, b in zip(params, before))
        one = twin.reference.head.weight.grad
        compare("one", grad_norm(twin.model.head.weight), one.norm(), twin.tolerance)

    run_ranks(check, 2)


class Mixed(nn.Module):
    """Dtypes, scalars, empties, a parameter that gets no gradient, and a plain one."""

    def __init__(self) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(0)
        rand = lambda *s, **k: torch.randn(*s, generator=gen, **k)  # noqa: E731
        self.a = nn.Parameter(rand(3, 5))
        self.b = nn.Parameter(rand(7).bfloat16())
        self.c = nn.Parameter(rand(2, 2, dtype=torch.complex64))
        self.d = nn.Parameter(rand(4).double())
        self.e = nn.Parameter(rand(0, 2))
        self.s = nn.Parameter(rand(()))
        self.unused = nn.Parameter(rand(2).half())
        self.plain = nn.Parameter(rand(5))

    def forward(self) -> Tensor:
        parts = (self.a, self.b.float(), torch.view_as_real(self.c), self.d, self.e, self.s)
        return sum(p.square().sum() for p in (*parts, self.plain))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("order", [2.0, 1.0, math.inf])
def test_mixed_dtypes_and_plain_parameters(world: int, order: float) -> None:
    def check(rank: int) -> None:
        model, plain = Mixed(), Mixed()
        fully_shard(model, ignored=[model.plain])
        for m in (model, plain):
            m().backward()
        for p in (model.unused, plain.unused):
            p.grad = None
        for name, p in model.named_parameters():
            if p.grad is not None:  # bf16 gradients are averaged in bf16, so take those
                plain.get_parameter(name).grad = whole(p.grad)
        grads = [p.grad.to(torch.complex128) for p in plain.parameters() if p.grad is not None]
        wanted = torch.nn.utils.get_total_norm([g for g in grads if g.numel()], order)
        found = clip_grad_norm_(model, 1.0, order)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, wanted.double(), rtol=1e-5, atol=0)
        scale = 1 / (wanted + 1e-6)
        for name, p in model.named_parameters():
            q = plain.get_parameter(name)
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                torch.testing.assert_close(whole(p.grad), (q.grad * scale).to(q.grad.dtype))

    simulate_ranks(check, world)


def test_one_all_reduce_per_group() -> None:
    """One all reduce per group and none without gradients."""

    def check(rank: int) -> None:
        model = hybrid(seeded(Tower))
        assert float(grad_norm(model)) == 0.0 and float(clip_grad_norm_(model, 1.0)) == 0.0
        square(model, data(0, rank)).backward()
        for order in (2.0, math.inf, 0.0):
            here.traffic.reset()
            clip_grad_norm_(model, 1.0, order)
            assert here.traffic.all_reduces == 1

    run_ranks(check, 4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_nonfinite_gradients_are_named_on_every_rank(bad: float, order: float) -> None:
    """Nonfinite gradients are seen and named on every rank."""

    def spoil(rank: int, strict: bool) -> Any:
        model = by_block(seeded(Tower))
        square(model, data(0, rank)).backward()
        target = model.blocks[1].down.weight
        local = target.grad.to_local()
        if rank == 1:
            local[:1] = bad  # of one rank's slice only
        norm = clip_grad_norm_(model, 1.0, order, error_if_nonfinite=strict)
        return float(norm)

    for norm in run_ranks(spoil, 3, False):
        assert not math.isfinite(norm) and math.isnan(norm) == math.isnan(bad)
    for error in rank_errors(spoil, 3, True):
        assert error is not None and "RuntimeError" in error
        assert "'blocks.1.down.weight'" in error and "error_if_nonfinite=False" in error


def test_clipping_inside_a_scope_reaches_shards() -> None:
    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.backward(square, 0)
        with gathered(twin.model):
            clip_grad_norm_(twin.model, 1e-3)
        torch.nn.utils.clip_grad_norm_(twin.reference.parameters(), 1e-3)
        twin.step()
        twin.check()

    run_ranks(check, 2)


def test_clipping_of_gradients_that_are_written_back() -> None:
    """In a scope that shows full gradients and writes them back, these are clipped, as edited."""

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.backward(square, 0)
        with gathered(twin.model, with_grads=True, writeback=True):
            for model in (twin.model, twin.reference):
                model.first.weight.grad.mul_(10)
            found = grad_norm(list(twin.model.parameters()))
            assert clip_grad_norm_(twin.model, 1e-3) == found
        wanted = torch.nn.utils.clip_grad_norm_(twin.reference.parameters(), 1e-3)
        compare("norm", found, wanted.to(found.dtype), twin.tolerance)
        twin.step()
        twin.check()

    run_ranks(check, 2)


# Accumulation

STEPS = 3
MICRO = 3


def whole_batch(twin: Twin, seeds: range) -> None:
    """The gradient of one large batch: the sum over microbatches of the mean over ranks."""
    for seed in seeds:
        xs = twin.inputs(seed)
        torch.stack([square(m, x) for m, x in zip(twin.plain, xs)]).mean().backward()


@cells_of_even_worlds
@pytest.mark.parametrize("keep", ["sharded", "no_all_reduce", "unsharded"])
def test_accumulate_equals_one_large_batch(shard: Shard, world: int, keep: Any) -> None:
    def check(rank: int) -> None:
        twin = Twin(rank, world, Tower, shard, sgd)
        for step in range(STEPS):
            seeds = range(step * MICRO, (step + 1) * MICRO)
            with accumulate(twin.model, keep):
                for seed in seeds:
                    square(twin.model, data(seed, rank)).backward()
            whole_batch(twin, seeds)
            assert_at_rest(twin.model)
            twin.step()
        twin.check()

    simulate_ranks(check, world)


@cells_of_even_worlds
@pytest.mark.parametrize("how", ["no_sync", "switch", "all_reduce", "reduce_grads"])
def test_open_accumulation_is_reduced_at_last(shard: Shard, world: int, how: str) -> None:
    """Open accumulation is reduced by the last backward or on request."""

    def check(rank: int) -> None:
        twin = Twin(rank, world, Tower, shard, adamw)
        for step in range(STEPS):
            seeds = range(step * MICRO, (step + 1) * MICRO)
            for seed in seeds:
                last = seed == seeds[-1] and how != "reduce_grads"
                if how == "all_reduce":
                    set_requires_all_reduce(twin.model, last)
                elif how == "switch":
                    set_requires_gradient_sync(twin.model, last)
                if how in ("no_sync", "reduce_grads") and not last:
                    with no_sync(twin.model):
                        square(twin.model, data(seed, rank)).backward()
                else:
                    square(twin.model, data(seed, rank)).backward()
            if how == "reduce_grads":
                reduce_grads(twin.model)
            whole_batch(twin, seeds)
            assert_at_rest(twin.model)
            twin.step()
        twin.check()

    simulate_ranks(check, world)


def test_without_replicas_no_all_reduce_waits() -> None:
    """``set_requires_all_reduce`` is about replicas: where there are none, gradients arrive."""

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower, by_block, adamw)
        set_requires_all_reduce(twin.model, False)
        twin.train()

    simulate_ranks(check, 2)


def test_what_accumulation_communicates() -> None:
    def check(rank: int) -> None:
        model = hybrid(seeded(Tower))
        count = len(units(model))
        wanted = {"sharded": (3, 3), "no_all_reduce": (3, 1), "unsharded": (1, 1)}
        for keep, (scatters, all_reduces) in wanted.items():
            here.traffic.reset()
            with accumulate(model, keep):  # type: ignore[arg-type]
                for seed in range(3):
                    square(model, data(seed, rank)).backward()
            found = (here.traffic.reduces, here.traffic.all_reduces)
            assert found == (scatters * count, all_reduces * count), keep

    run_ranks(check, 4)


def test_reduction_in_another_dtype_accumulates_in_it() -> None:
    def check(rank: int) -> None:
        mp = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        grads = []
        for keep in ("sharded", "unsharded"):
            model = by_block(seeded(Tower).float(), mp_policy=mp)
            with accumulate(model, keep):  # type: ignore[arg-type]
                for seed in range(4):
                    square(model, data(seed, rank).float()).backward()
            grads.append([whole(p.grad) for p in model.parameters()])
        for a, b in zip(*grads):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)

    run_ranks(check, 2)


def test_flags_are_restored_after_an_exception() -> None:
    """Flags are restored after an exception and gradients dropped."""

    def check(rank: int) -> None:
        twin = Twin(rank, 4, Tower, hybrid)

        def spoil(scope: Any) -> None:
            with scope:
                square(twin.model, data(7, rank)).backward()
                raise KeyError("mine")

        for keep in ("unsharded", "no_all_reduce"):
            set_requires_gradient_sync(twin.model.blocks[0], False, recurse=False)
            with pytest.raises(KeyError):
                spoil(accumulate(twin.model, keep))  # type: ignore[arg-type]
            switches = [get_state(m).unit.switches for m in (twin.model, *twin.model.blocks)]
            assert [s.sync for s in switches] == [True, False, True, True]
            assert all(s.all_reduce for s in switches)
            set_requires_gradient_sync(twin.model, True)
        with pytest.raises(KeyError):
            spoil(no_sync(twin.model))
        assert all(s.sync for s in switches)
        with pytest.raises(ValueError, match="keep is 'both'; wanted one of"):
            accumulate(twin.model, "both").__enter__()  # type: ignore[arg-type]
        reduce_grads(twin.model)
        whole_batch(twin, range(7, 8))
        twin.step()
        twin.train()

    run_ranks(check, 4)


# A step too early (D12)


@pytest.mark.parametrize("how", ["no_sync", "no_all_reduce"])
@pytest.mark.parametrize("action", ["step", "clip"])
def test_gradients_of_open_accumulation_are_refused(how: str, action: str) -> None:
    """Using gradients while accumulation is open is an error."""

    def check(rank: int) -> None:
        model = hybrid(seeded(Tower))
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        if how == "no_sync":
            with no_sync(model):
                square(model, data(0, rank)).backward()
        else:
            set_requires_all_reduce(model, False)
            square(model, data(0, rank)).backward()
        torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()  # somebody else's
        if action == "step":
            optim.step()
        else:
            clip_grad_norm_(model, 1.0)

    for error in rank_errors(check, 4):
        assert error is not None
        caller = "SGD.step()" if action == "step" else "clip_grad_norm_"
        assert error.startswith(f"RuntimeError: {caller}: the gradient of 'first.weight'")
        assert "reduce_grads(module)" in error and "no_sync()" in error


def test_a_step_without_any_gradient_is_an_error() -> None:
    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        square(model, data(0, rank)).backward()
        optim.step()
        optim.zero_grad()
        model.head.bias.grad = torch.zeros_like(model.head.bias)
        optim.step()  # one is enough
        optim.zero_grad()

        def closure() -> Tensor:
            optim.zero_grad()
            loss = square(model, data(0, rank))
            loss.backward()
            return loss

        optim.step(closure)
        optim.step(closure=closure)
        optim.zero_grad()
        torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()  # somebody else's
        model.requires_grad_(False)
        optim.step()  # frozen: there is nothing to train
        model.requires_grad_(True)
        optim.step()

    for error in rank_errors(check, 2):
        assert error is not None
        assert error.startswith("RuntimeError: SGD.step(): no parameter has a gradient")
        assert "'first.weight' (unit 'Tower')" in error and "loss.backward()" in error


# Switches


def test_divide_factor() -> None:
    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        set_gradient_divide_factor(twin.model, 1.0)
        square(twin.model, data(0, rank)).backward()
        sum(square(m, data(0, r)) for r, m in enumerate(twin.plain)).backward()
        twin.check_grads()
        twin.zero_grad()
        set_gradient_divide_factor(twin.model, None)
        twin.train()
        for wrong in (0, -1.0, math.inf, math.nan):
            with pytest.raises(ValueError, match="wanted a positive finite number"):
                set_gradient_divide_factor(twin.model, wrong)

    run_ranks(check, 2)


def test_reshard_switches_change_no_result() -> None:
    """Reshard switches change what is gathered and not the result."""

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        count = len(units(twin.model))

        def gathers() -> int:
            here.traffic.reset()
            twin.backward(square, 0)
            return here.traffic.gathers

        assert gathers() == 2 * count - 1
        set_reshard_after_forward(twin.model, False)
        assert gathers() == count
        set_reshard_after_forward(twin.model, True)
        assert gathers() == 2 * count
        set_reshard_after_backward(twin.model, False)
        assert gathers() == 2 * count
        assert gathers() == 0  # kept since the last backward, also over forward
        twin.step()
        assert gathers() == count
        set_reshard_after_backward(twin.model, True)
        gathers()
        twin.step()
        twin.check()

    run_ranks(check, 2)


def test_switches_of_one_unit_and_of_none() -> None:
    """Switches of one unit and of a module without units."""
    setters = [
        (set_requires_gradient_sync, "sync"),
        (set_requires_all_reduce, "all_reduce"),
        (set_is_last_backward, "last_backward"),
        (set_reshard_after_backward, "reshard_after_backward"),
    ]
    model = by_block(Tower())
    for setter, name in setters:
        setter(model, False, recurse=False)
        values = [getattr(unit.switches, name) for unit in units(model)]
        assert values == [False, True, True, True], name
        setter(model, False)
        assert not any(getattr(unit.switches, name) for unit in units(model))
        with pytest.raises(ValueError, match=f"{setter.__name__}: Linear is not a unit"):
            setter(model.head, True)
        with pytest.raises(ValueError, match="ModuleList is not a unit;"):
            setter(model.blocks, True, recurse=False)
    for scope in (no_sync, accumulate):
        with pytest.raises(ValueError, match=f"{scope.__name__}: Linear is not a unit"):
            scope(nn.Linear(WIDTH, 1)).__enter__()


def test_gradients_on_the_host_are_reduced_on_request() -> None:
    """Gradients that wait on the host are reduced on request."""

    def check(rank: int) -> None:
        offload = Offload(grads=True, pin_memory=False)
        twin = Twin(rank, 2, Tower, lambda m: by_block(m, offload_policy=offload), adamw)
        set_is_last_backward(twin.model, False)
        for seed in range(2):
            square(twin.model, data(seed, rank)).backward()
        with pytest.raises(RuntimeError, match=r"AdamW\.step\(\): the gradient of 'first\.weight'"):
            twin.optim.step()
        reduce_grads(twin.model)
        whole_batch(twin, range(2))
        twin.step()
        twin.check()

    run_ranks(check, 2)


def test_experts_without_gradients_have_a_norm() -> None:
    """Clipping before any backward, over the ranks of an expert mesh, finds a norm of zero."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks))
        for norm in (
            fc.clip_grad_norm_(model, 1.0, expert_mesh=dist.group.WORLD),
            fc.grad_norm(model, expert_mesh=dist.group.WORLD),
        ):
            assert norm == 0
        with pytest.raises(ValueError, match="norm_type is 0, which counts"):
            fc.grad_norm(model, 0, expert_mesh=dist.group.WORLD)

    simulate_ranks(ranks)
