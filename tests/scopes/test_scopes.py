"""Full parameters outside forward: what can be read and written, and what not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compose as fc
from fsdp_compose import MixedPrecision, ShardingStrategy, fully_shard
from fsdp_compose.base.process import here
from fsdp_compose.scopes import open_scope
from fsdp_compose.scopes.gathered import gathered, summon_full_params
from fsdp_compose.sharded import ShardedWeightError, is_sharded

from harness import rank_errors, run_ranks, simulate_ranks
from models import (
    EVERY_SHARD,
    WIDTH,
    Tower,
    Twin,
    adamw,
    assert_at_rest,
    by_block,
    compare,
    data,
    one_unit,
    seeded,
    square,
    units,
    whole,
)
from scoped_models import both, seeded_oddities

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("grad", [True, False])
def test_every_parameter_reads_as_in_the_plain_module(world: int, grad: bool) -> None:
    def check(rank: int) -> None:
        plain, model = seeded_oddities(), by_block(seeded_oddities())
        leaves = dict(model.named_parameters(remove_duplicate=False))
        with torch.set_grad_enabled(grad), gathered(model) as same:
            assert same is model
            ours = dict(model.named_parameters(remove_duplicate=False))
            assert list(ours) == [n for n, _ in plain.named_parameters(remove_duplicate=False)]
            for name, theirs in plain.named_parameters(remove_duplicate=False):
                found = ours[name]
                assert not is_sharded(found) and isinstance(found, nn.Parameter), name
                assert (found.shape, found.stride()) == (theirs.shape, theirs.stride()), name
                assert (found.dtype, found.requires_grad) == (theirs.dtype, theirs.requires_grad)
                assert torch.equal(found, theirs), name
            assert model.twin.weight is model.block.up.weight
            assert list(model.state_dict()) == list(plain.state_dict())
            x = torch.randn(2, 1, WIDTH, generator=torch.Generator().manual_seed(0))
            assert torch.equal(model.lstm(x)[0], plain.lstm(x)[0])
        for name, param in model.named_parameters(remove_duplicate=False):
            assert param is leaves[name]
        assert_at_rest(model)

    run_ranks(check, world)


def test_the_classic_name_is_the_same_function() -> None:
    assert summon_full_params is gathered


def test_a_module_without_shards_opens_nothing() -> None:
    with gathered(nn.Linear(2, 2)) as module:
        assert module.weight.shape == (2, 2)


def test_a_part_opens_and_nested_units_stay_shut() -> None:
    """A part of a unit opens and a nested unit stays shut without recurse."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        with gathered(model.head):
            assert not is_sharded(model.head.weight)
            assert is_sharded(model.blocks[0].up.weight)
        with gathered(model, recurse=False):
            assert not is_sharded(model.head.weight)
            assert is_sharded(model.blocks[0].up.weight)
        with gathered(model):
            assert not is_sharded(model.blocks[0].up.weight)

    run_ranks(check, 2)


def test_one_gather_per_bucket_and_none_on_leaving() -> None:
    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        here.traffic.reset()
        with gathered(model):
            assert here.traffic.gathers == len(units(model))
        assert here.traffic.gathers == len(units(model)) and here.traffic.control == 0

    run_ranks(check, 2)


def test_storage_dtype_with_mixed_precision() -> None:
    def check(rank: int) -> None:
        plain = seeded(Tower).float()
        model = by_block(
            seeded(Tower).float(), mp_policy=MixedPrecision(param_dtype=torch.bfloat16)
        )
        with gathered(model):
            for (name, p), q in zip(model.named_parameters(), plain.parameters()):
                assert p.dtype == torch.float32 and torch.equal(p, q), name

    run_ranks(check, 2)


@pytest.mark.parametrize("strategy", [ShardingStrategy.NO_SHARD, ShardingStrategy.SHARD_GRAD_OP])
def test_other_strategies(strategy: ShardingStrategy) -> None:
    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower, lambda m: by_block(m, strategy=strategy))
        twin.backward(square, 0)
        twin.step()
        with gathered(twin.model, writeback=True), torch.no_grad():
            for p, q in zip(twin.model.parameters(), twin.reference.parameters()):
                compare("parameter", p.detach(), q.detach(), twin.tolerance)
                p.mul_(2)
                q.mul_(2)
        twin.backward(square, 1)
        twin.step()
        twin.check()

    run_ranks(check, 2)


def test_rank0_only_and_offload() -> None:
    def check(rank: int) -> None:
        plain, model = seeded(Tower), by_block(seeded(Tower))
        with gathered(model, rank0_only=True, offload_to_cpu=True):
            for p, q in zip(model.parameters(), plain.parameters()):
                assert is_sharded(p) == (rank != 0)
                assert rank or (p.device.type == "cpu" and torch.equal(p, q))
            x = data(0, 0)
            if rank == 0:
                assert torch.equal(model(x), plain(x))
            else:
                with pytest.raises(ShardedWeightError):
                    model(x)
        assert_at_rest(model)

    run_ranks(check, 3)


def test_inference_mode_and_a_scope_in_it() -> None:
    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        with torch.inference_mode(), gathered(twin.model):
            compare("out", twin.model(data(0, 0)), twin.mine(data(0, 0)), twin.tolerance)
        twin.train()

    run_ranks(check, 2)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("shard", EVERY_SHARD.values(), ids=EVERY_SHARD)
def test_edits_and_replacements_are_written_back(world: int, shard: Callable[..., Any]) -> None:
    def edit(model: nn.Module) -> None:
        torch.manual_seed(3)
        for block in model.blocks:
            nn.init.normal_(block.up.weight)
        with torch.no_grad():
            model.first.weight[1] = 5.0
            model.first.bias.add_(1)
        model.head.weight = nn.Parameter(torch.arange(2.0 * WIDTH).reshape(2, WIDTH).double())
        model.head.bias.data = torch.ones(2).double()
        model.blocks[0].norm.weight.data.mul_(3)

    def check(rank: int) -> None:
        twin = Twin(rank, world, Tower, shard, adamw)
        twin.train(steps=1)
        leaves = list(twin.model.parameters())
        with gathered(twin.model, writeback=True):
            edit(twin.model)
        assert all(p is q for p, q in zip(twin.model.parameters(), leaves))
        edit(twin.reference)
        twin.plain[1:] = []
        for (name, p), q in zip(twin.model.named_parameters(), twin.reference.parameters()):
            compare(name, whole(p), q.detach(), twin.tolerance)
        assert_at_rest(twin.model)
        x = data(9, 0)
        compare("out", twin.model(x), twin.reference(x), twin.tolerance)

    run_ranks(check, world)


def test_oddities_are_written_back() -> None:
    def edit(model: nn.Module) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
            model.codes[2] = 100
            model.twin.weight[0] = 7

    def check(rank: int) -> None:
        plain, model = seeded_oddities(), by_block(seeded_oddities())
        with gathered(model, writeback=True):
            edit(model)
        edit(plain)
        for (name, p), q in zip(model.named_parameters(), plain.named_parameters()):
            assert torch.equal(whole(p), q[1]), name
        assert model.twin.weight is model.block.up.weight

    run_ranks(check, 3)


def test_rank0_only_writes_for_everyone() -> None:
    def check(rank: int) -> None:
        model = by_block(seeded_oddities())
        with gathered(model, writeback=True, rank0_only=True), torch.no_grad():
            if rank == 0:
                for param in model.parameters():
                    param.add_(2)
                model.frozen = nn.Parameter(torch.full((4,), 9.0), requires_grad=False)
        plain = seeded_oddities()
        with torch.no_grad():
            for param in plain.parameters():
                param.add_(2)
            plain.frozen.fill_(9)
        for (name, p), q in zip(model.named_parameters(), plain.parameters()):
            assert torch.equal(whole(p), q), name

    run_ranks(check, 3)


def test_replicas_of_shards_read_write_and_train() -> None:
    def hybrid(model: nn.Module) -> nn.Module:
        return by_block(model, mesh=init_device_mesh("cpu", (2, 2)))

    def check(rank: int) -> None:
        twin = Twin(rank, 4, Tower, hybrid)
        with gathered(twin.model, writeback=True, rank0_only=True):
            assert is_sharded(twin.model.head.weight) == (rank != 0)
            if rank == 0:
                nn.init.ones_(twin.model.head.weight)
        nn.init.ones_(twin.reference.head.weight)
        twin.check()
        twin.train(both)

    run_ranks(check, 4)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_reaches_the_others(failing: int) -> None:
    """With ``rank0_only`` an exception on any rank reaches the others, and nothing is written."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        before = [whole(p) for p in model.parameters()]

        def spoil() -> None:
            with gathered(model, writeback=True, rank0_only=True), torch.no_grad():
                if rank == 0:
                    model.head.weight.zero_()
                if rank == failing:
                    raise KeyError("mine")

        error: Any = KeyError if rank == failing else RuntimeError
        with pytest.raises(error, match=rf"mine|rank {failing} failed inside a scope"):
            spoil()
        assert all(torch.equal(whole(p), q) for p, q in zip(model.parameters(), before))
        square(model, data(0, rank)).backward()

    run_ranks(check, 2)


def test_an_exception_writes_nothing() -> None:
    """An exception writes nothing and leaves the model as it was."""

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)

        def spoil() -> None:
            with gathered(twin.model, writeback=True), torch.no_grad():
                twin.model.head.weight.zero_()
                twin.model.head.bias = None
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            spoil()
        twin.train()

    run_ranks(check, 2)


def edit_in_place(model: nn.Module) -> None:
    nn.init.zeros_(model.head.weight)


def edit_by_replacing(model: nn.Module) -> None:
    model.head.weight = nn.Parameter(torch.zeros(2, WIDTH).double())


def edit_through_data(model: nn.Module) -> None:
    model.head.weight.data.zero_()


def edit_by_assigning_data(model: nn.Module) -> None:
    model.head.weight.data = torch.zeros(2, WIDTH).double()


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "edit", [edit_in_place, edit_by_replacing, edit_through_data, edit_by_assigning_data]
)
def test_an_edit_without_writeback_is_an_error(edit: Callable[..., None], grad: bool) -> None:
    def check(rank: int) -> None:
        model = one_unit(seeded(Tower))
        before = model.head.weight
        try:
            with torch.set_grad_enabled(grad), gathered(model):
                edit(model)
        finally:
            assert model.head.weight is before
            assert_at_rest(model)

    for errors in (rank_errors(check, 1), rank_errors(check, 2)):
        if edit is edit_through_data:  # unseen by a rank that owns none of what was written so
            errors = [error for error in errors if error is not None]
        assert errors
        for error in errors:
            assert error is not None and error.startswith("RuntimeError")
            assert "'head.weight'" in error and "writeback=True" in error


@pytest.mark.parametrize(
    ("wrong", "found", "writeback"),
    [
        (nn.Parameter(torch.zeros(3)), "(3,)", True),
        (nn.Parameter(torch.zeros(3)), "(3,)", False),
        (None, "None", True),
    ],
    ids=["shape", "no writeback", "none"],
)
def test_a_replacement_of_another_shape_is_an_error(
    wrong: Any, found: str, writeback: bool
) -> None:
    """The error never tells to add a writeback that would be refused too."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        before = whole(model.head.weight)
        try:
            with gathered(model, writeback=writeback):
                if writeback:
                    model.first.bias.data.zero_()
                model.head.weight = wrong
        finally:
            assert torch.equal(whole(model.head.weight), before)
            assert model.first.bias.any()
            assert_at_rest(model)

    for error in rank_errors(check, 2):
        assert error is not None
        assert "'head.weight'" in error and found in error and "(2, 6)" in error
        assert "undo(model)" in error and "writeback=True" not in error


def test_a_step_in_a_writing_scope_is_an_error() -> None:
    """A step inside a scope with writeback is an error."""

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.backward(square, 0)
        with gathered(twin.model, writeback=True):
            twin.optim.step()

    for error in rank_errors(check, 2):
        assert error is not None and "step the optimizer outside" in error


def test_a_step_in_a_reading_scope_counts() -> None:
    """A step inside a reading scope counts and is no edit."""

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.backward(square, 0)
        with gathered(twin.model):
            twin.optim.step()
            twin.plain_optim.step()
        twin.check()

    run_ranks(check, 2)


PLAIN_STEPS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "flat": lambda model: torch.optim.SGD(fc.flat_parameters(model), 0.1),
    "flat, fused": lambda model: torch.optim.SGD(fc.flat_parameters(model), 0.1, fused=True),
    "local": lambda model: torch.optim.SGD(fc.local_parameters(model), 0.1),
}


@pytest.mark.parametrize("way", PLAIN_STEPS)
def test_a_step_of_plain_tensors_in_a_scope(way: str) -> None:
    """It counts in a reading scope; a writing scope, or a forward in one, says what was written."""

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.optim = PLAIN_STEPS[way](twin.model)
        twin.plain_optim = torch.optim.SGD(twin.reference.parameters(), 0.1)
        twin.backward(square, 0)
        written = r"the shard of .* was written inside .* as an optimizer's step does"
        with pytest.raises(RuntimeError, match=written), gathered(twin.model, writeback=True):
            twin.optim.step()
        twin.plain_optim.step()
        twin.check()
        with gathered(twin.model):
            twin.optim.step()
            twin.plain_optim.step()
            with pytest.raises(RuntimeError, match=r"forward was called inside .* was written"):
                twin.model(data(0, 0))
        twin.check()

    simulate_ranks(check, 2)


def test_writing_in_the_units_own_forward_is_refused() -> None:
    """Writing inside the unit's own forward is an error."""

    class Writes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with gathered(self, writeback=True):
                return super().forward(x)

    def check(rank: int) -> None:
        fully_shard(Writes(2, 2))(torch.ones(1, 2))

    for error in rank_errors(check, 2):
        assert error is not None and "inside a forward or backward" in error and "'Writes'" in error


@pytest.mark.parametrize("writeback", [False, True])
def test_scopes_left_in_another_order(writeback: bool) -> None:
    """The outer one, left first, raises and ends with the inner one; then the model is as it was.

    The inner one is over a part, so that some units close with the outer one at once.
    """

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        with torch.set_grad_enabled(not writeback):
            outer = gathered(twin.model, writeback=writeback)
            inner = gathered(twin.model.blocks, writeback=writeback)
            outer.__enter__()
            inner.__enter__()
            if writeback:
                twin.model.blocks[0].up.weight.add_(1)
                twin.reference.blocks[0].up.weight.add_(1)
            with pytest.raises(RuntimeError, match=r"reverse order.*ends with the one inside it"):
                outer.__exit__(None, None, None)
            assert is_sharded(twin.model.head.weight)
            inner.__exit__(None, None, None)
        assert all(is_sharded(p) for p in twin.model.parameters())
        assert_at_rest(twin.model)
        twin.train()
        fc.refresh(twin.model)
        fc.undo(twin.model)

    run_ranks(check, 2)


@pytest.mark.parametrize("options", [{}, {"with_grads": True}, {"writeback": True}])
def test_a_scope_that_cannot_be_entered(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error while full tensors are shown, or put into modules, leaves none of them there."""

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        for name in ("show", "install"):
            for at in (0, 2):
                calls = count()
                original = getattr(open_scope, name)

                def fail(*args: Any, at: int = at, calls: Any = calls, do: Any = original) -> None:
                    if next(calls) == at:
                        raise torch.OutOfMemoryError("played")
                    do(*args)

                with monkeypatch.context() as patched:
                    patched.setattr(open_scope, name, fail)
                    with pytest.raises(torch.OutOfMemoryError):
                        gathered(twin.model, **options).__enter__()
                assert all(is_sharded(p) for p in twin.model.parameters())
                twin.train()

    run_ranks(check, 2)
