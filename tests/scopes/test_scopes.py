"""Full parameters outside forward: what can be read, written and trained through, and what not."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdp_compose import MixedPrecision, ShardingStrategy, fully_shard
from fsdp_compose.comm import collectives as comm
from fsdp_compose.core.records import Hold
from fsdp_compose.scopes.gathered import gathered, iter_full, summon_full_params
from fsdp_compose.scopes.unshard import prefetch_units, reduce_grads, reshard, unshard
from fsdp_compose.sharded import ShardedWeightError, is_sharded

from harness import rank_errors, run_ranks
from models import (
    EVERY_SHARD,
    WIDTH,
    Block,
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
    train_twin,
    units,
    whole,
)

pytestmark = pytest.mark.filterwarnings("error")


class Oddities(nn.Module):
    """Scalars, empties, integers, complex numbers, strides, frozen and tied parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.strided = nn.Parameter(torch.randn(5, 3).t())
        self.codes = nn.Parameter(torch.arange(7), requires_grad=False)
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.low = nn.Parameter(torch.randn(5).bfloat16())
        self.block = Block()
        self.lstm = nn.LSTM(WIDTH, 3)
        self.twin = nn.Linear(WIDTH, 7)
        self.twin.weight = self.block.up.weight


def odd() -> nn.Module:
    torch.manual_seed(0)
    return Oddities()


# Reading


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("grad", [True, False])
def test_every_parameter_reads_as_the_plain_module_has_it(world: int, grad: bool) -> None:
    def check(rank: int) -> None:
        plain, model = odd(), by_block(odd())
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


def test_a_module_without_sharded_parameters_opens_nothing() -> None:
    with gathered(nn.Linear(2, 2)) as module:
        assert module.weight.shape == (2, 2)


def test_a_part_of_a_unit_opens_and_a_nested_unit_stays_shut_without_recurse() -> None:
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
        comm.traffic.reset()
        with gathered(model):
            assert comm.traffic.gathers == len(units(model))
        assert comm.traffic.gathers == len(units(model)) and comm.traffic.control == 0

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


# Writing


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
        plain, model = odd(), by_block(odd())
        with gathered(model, writeback=True):
            edit(model)
        edit(plain)
        for (name, p), q in zip(model.named_parameters(), plain.named_parameters()):
            assert torch.equal(whole(p), q[1]), name
        assert model.twin.weight is model.block.up.weight

    run_ranks(check, 3)


def test_each_rank_writes_the_slice_it_owns() -> None:
    def check(rank: int) -> None:
        model = fully_shard(nn.Linear(4, 4, bias=False))
        with gathered(model, writeback=True), torch.no_grad():
            model.weight.fill_(rank)
        wanted = torch.arange(2.0).repeat_interleave(2)[:, None].expand(4, 4)
        assert torch.equal(model.weight.full_tensor(), wanted)

    run_ranks(check, 2)


def test_rank0_only_writes_for_everyone() -> None:
    def check(rank: int) -> None:
        model = by_block(odd())
        with gathered(model, writeback=True, rank0_only=True), torch.no_grad():
            if rank == 0:
                for param in model.parameters():
                    param.add_(2)
                model.frozen = nn.Parameter(torch.full((4,), 9.0), requires_grad=False)
        plain = odd()
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


def test_an_exception_on_rank_0_reaches_the_others_and_nothing_is_written() -> None:
    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        before = [whole(p) for p in model.parameters()]
        wanted = (KeyError, "mine") if rank == 0 else (RuntimeError, "failed on rank 0")

        def spoil() -> None:
            with gathered(model, writeback=True, rank0_only=True), torch.no_grad():
                if rank == 0:
                    model.head.weight.zero_()
                    raise KeyError("mine")

        with pytest.raises(wanted[0], match=wanted[1]):
            spoil()
        assert all(torch.equal(whole(p), q) for p, q in zip(model.parameters(), before))

    run_ranks(check, 2)


def test_an_exception_writes_nothing_and_leaves_the_model_as_it_was() -> None:
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

    for error in rank_errors(check, 1) + rank_errors(check, 2):
        if edit is edit_through_data and error is None:
            continue  # a rank that owns none of what was written so cannot see it
        assert error is not None
        assert "'head.weight'" in error and "writeback=True" in error and "RuntimeError" in error


@pytest.mark.parametrize(
    ("wrong", "found"),
    [(nn.Parameter(torch.zeros(3)), r"(3,)"), (None, "None")],
    ids=["shape", "none"],
)
def test_a_replacement_of_another_shape_is_an_error(wrong: Any, found: str) -> None:
    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        before = whole(model.head.weight)
        try:
            with gathered(model, writeback=True):
                model.first.bias.data.zero_()
                model.head.weight = wrong
        finally:
            assert torch.equal(whole(model.head.weight), before)
            assert model.first.bias.any()
            assert_at_rest(model)

    for error in rank_errors(check, 2):
        assert error is not None
        assert "'head.weight'" in error and found in error and "(2, 6)" in error


def test_a_step_inside_a_scope_with_writeback_is_an_error() -> None:
    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.backward(square, 0)
        with gathered(twin.model, writeback=True):
            twin.optim.step()

    for error in rank_errors(check, 2):
        assert error is not None and "step the optimizer outside" in error


def test_a_step_inside_a_reading_scope_counts_and_is_no_edit() -> None:
    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.backward(square, 0)
        with gathered(twin.model):
            twin.optim.step()
            twin.plain_optim.step()
        twin.check()

    run_ranks(check, 2)


def test_writing_inside_the_units_own_forward_is_an_error() -> None:
    class Writes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with gathered(self, writeback=True):
                return super().forward(x)

    def check(rank: int) -> None:
        fully_shard(Writes(2, 2))(torch.ones(1, 2))

    for error in rank_errors(check, 2):
        assert error is not None and "inside a forward or backward" in error and "'Writes'" in error


# Gradients in the scope


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("shard", EVERY_SHARD.values(), ids=EVERY_SHARD)
def test_with_grads_shows_full_gradients_and_writes_them_back(
    world: int, shard: Callable[..., Any]
) -> None:
    def check(rank: int) -> None:
        twin = Twin(rank, world, Tower, shard)
        twin.backward(square, 0)
        with gathered(twin.model, with_grads=True):
            for p, q in zip(twin.model.parameters(), twin.reference.parameters()):
                compare("gradient", p.grad, q.grad, twin.tolerance)
        with gathered(twin.model, with_grads=True, writeback=True):
            twin.model.head.weight.grad.mul_(2)
            twin.model.head.bias.grad = torch.ones(2).double()
            twin.model.first.bias.grad = None
        head = twin.reference.head
        head.weight.grad.mul_(2)
        head.bias.grad = torch.ones(2).double()
        twin.reference.first.bias.grad = None
        assert twin.model.first.bias.grad is None
        twin.step()
        twin.check()

    run_ranks(check, world)


def test_an_edited_gradient_without_writeback_is_an_error() -> None:
    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.backward(square, 0)
        with gathered(twin.model, with_grads=True):
            twin.model.head.weight.grad.zero_()

    for error in rank_errors(check, 2):
        assert error is not None and "gradient of parameter 'head.weight'" in error


def test_no_gradients_is_none() -> None:
    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        with gathered(model, with_grads=True):
            assert all(p.grad is None for p in model.parameters())

    run_ranks(check, 2)


def test_with_grads_during_open_accumulation_is_an_error() -> None:
    def check(rank: int) -> None:
        from fsdp_compose.scopes.switches import no_sync

        model = by_block(seeded(Tower))
        with no_sync(model):
            square(model, data(0, rank)).backward()
        with gathered(model, with_grads=True):
            pass

    for error in rank_errors(check, 2):
        assert error is not None and "reduce_grads" in error


@pytest.mark.parametrize("how", ["no_grad", "with_grads", "rank0"])
def test_a_gradient_that_would_get_lost_is_an_error(how: str) -> None:
    def check(rank: int) -> None:
        model = one_unit(seeded(Tower))
        options: dict[str, Any] = {"with_grads": {"with_grads": True}}.get(how, {})
        if how == "rank0":
            options = {"offload_to_cpu": True}
        with torch.set_grad_enabled(how != "no_grad"):
            with gathered(model, **options):
                with torch.enable_grad():
                    loss = model.head.weight.sum()
        loss.backward()

    for error in rank_errors(check, 2):
        assert error is not None and "'head.weight'" in error and "get lost" in error


# Training through the scope


def chunked_head(model: nn.Module, x: Tensor) -> Tensor:
    """A loss over the head's weight, in chunks, that never calls the head."""
    for module in (model.first, *model.blocks):
        x = module(x)
    with gathered(model.head):
        weight, bias = model.head.weight, model.head.bias
        losses = [F.linear(row, weight, bias).square().mean() for row in x]
    return torch.stack(losses).mean()


def head_unit(model: nn.Module) -> nn.Module:
    """Every child a unit, and no root."""
    for module in (model.first, model.head, *model.blocks):
        fully_shard(module)
    return model


class Chunked(Tower):
    """A tower whose forward uses the head's weight in chunks, inside a scope."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        with gathered(self.head):
            return torch.stack([F.linear(row, self.head.weight, self.head.bias) for row in x])


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("optimizer", [adamw, None], ids=["adamw", "sgd"])
def test_a_chunked_head_trains_after_the_scope(world: int, optimizer: Any) -> None:
    def check(rank: int) -> None:
        options = {} if optimizer is None else {"optimizer": optimizer}
        Twin(rank, world, Tower, head_unit, **options).train(chunked_head)

    run_ranks(check, world)


def test_a_chunked_head_is_one_gather_and_one_reduction() -> None:
    def check(rank: int) -> None:
        model = seeded(Tower)
        fully_shard(model.head)
        comm.traffic.reset()
        chunked_head(model, data(0, rank)).backward()
        assert (comm.traffic.gathers, comm.traffic.reduces) == (1, 1)

    run_ranks(check, 2)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("shard", EVERY_SHARD.values(), ids=EVERY_SHARD)
def test_a_scope_inside_forward(world: int, shard: Callable[..., Any]) -> None:
    train_twin(Chunked, shard=shard, world=world)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_scope_inside_a_checkpointed_forward(reentrant: bool) -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return checkpoint(model, x, use_reentrant=reentrant).square().mean()

    train_twin(Chunked, forward)


def both(model: nn.Module, x: Tensor) -> Tensor:
    """The head by its forward and by its weight, before and after."""
    with gathered(model):
        early = model.head.weight.square().mean()
    out = model(x)
    with gathered(model.head):
        late = (x @ model.first.weight @ model.head.weight.T).square().mean()
    return out.square().mean() + late + early


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("shard", EVERY_SHARD.values(), ids=EVERY_SHARD)
def test_uses_in_forward_and_in_scopes_add_up(world: int, shard: Callable[..., Any]) -> None:
    train_twin(Tower, both, shard, adamw, world=world)


def test_the_whole_model_trains_inside_one_scope_and_gathers_once() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with gathered(model):
            return model(x).square().mean() + model(x + 1).square().mean()

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.train(forward)
        comm.traffic.reset()
        forward(twin.model, data(0, rank)).backward()
        buckets = len(units(twin.model))
        assert (comm.traffic.gathers, comm.traffic.reduces) == (buckets, buckets)

    run_ranks(check, 2)


def test_backward_inside_the_scope_of_a_forward_before_it() -> None:
    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        for seed in range(2):
            loss, plain = twin.losses(square, seed)
            with gathered(twin.model):
                (loss + twin.model.head.weight.square().mean()).backward()
                assert not is_sharded(twin.model.head.weight)
            (plain + twin.reference.head.weight.square().mean()).backward()
            twin.step()
        twin.check()

    run_ranks(check, 2)


def test_a_forward_in_the_scope_is_in_the_compute_dtype() -> None:
    def check(rank: int) -> None:
        mp = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = by_block(seeded(Tower).float(), mp_policy=mp)
        x = data(0, rank).float()
        outside = model(x)
        outside.sum().backward()
        wanted = {n: whole(p.grad) for n, p in model.named_parameters()}
        model.zero_grad()
        with gathered(model):
            inside = model(x)
            assert model.head.weight.dtype == torch.float32
        inside.sum().backward()
        assert torch.equal(inside, outside) and inside.dtype == torch.bfloat16
        for name, p in model.named_parameters():
            torch.testing.assert_close(whole(p.grad), wanted[name], msg=name)
        assert_at_rest(model)

    run_ranks(check, 2)


def test_edits_are_seen_by_a_forward_in_the_scope() -> None:
    def check(rank: int) -> None:
        model, plain = by_block(seeded(Tower)), seeded(Tower)
        with gathered(model, writeback=True):
            for m in (model, plain):
                nn.init.ones_(m.blocks[1].up.weight)
            assert torch.equal(model(data(0, 0)), plain(data(0, 0)))
        compare("out", model(data(0, 0)), plain(data(0, 0)), Twin(rank, 2, Tower).tolerance)

    run_ranks(check, 2)


def test_autograd_grad_and_a_graph_over_gradients() -> None:
    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        x = data(0, rank)
        with gathered(twin.model):
            loss = twin.model(x).square().mean()
        found = torch.autograd.grad(loss, list(twin.model.parameters()), create_graph=True)
        sum(g.square().sum() for g in found).backward()
        plain = torch.stack([square(m, data(0, r)) for r, m in enumerate(twin.plain)]).mean()
        params = list(twin.reference.parameters())
        wanted = torch.autograd.grad(plain, params, create_graph=True)
        sum(g.square().sum() for g in wanted).backward()
        for f, w in zip(found, wanted):
            compare("gradient", whole(f), w.detach(), twin.tolerance)
        twin.check_grads()

    run_ranks(check, 2)


def test_gradient_hooks_see_the_sharded_gradient() -> None:
    def check(rank: int) -> None:
        model = fully_shard(seeded(lambda: nn.Linear(4, 2)))
        seen: list[Any] = []
        model.weight.register_hook(lambda g: g * 2)
        model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(whole(p.grad)))
        with gathered(model):
            loss = model.weight.sum()
        loss.backward()
        assert len(seen) == 1 and torch.equal(seen[0], torch.full((2, 4), 2.0).double())

    run_ranks(check, 2)


def test_unsynchronised_uses_accumulate_and_are_reduced_later() -> None:
    from fsdp_compose.scopes.switches import no_sync

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        with no_sync(twin.model):
            twin.backward(both, 0)
            twin.backward(both, 1)
        assert all(p.grad is None for p in twin.model.parameters())
        twin.backward(both, 2)
        twin.step()
        twin.check()

    run_ranks(check, 2)


def test_a_scope_without_backward_frees_its_memory() -> None:
    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        gc.disable()
        with gathered(model):
            storage = torch.multiprocessing.reductions.StorageWeakRef(
                model.head.weight.untyped_storage()
            )
            loss = model.head.weight.sum()
        assert not storage.expired() or loss is not None
        del loss
        assert storage.expired()

    run_ranks(check, 2)


def test_nested_scopes_share_their_tensors() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with gathered(model):
            outer = model.head.weight
            with gathered(model.head), gathered(model):
                assert model.head.weight is outer
                return model(x).square().mean() + model.head.weight.square().sum()

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.train(forward)
        comm.traffic.reset()
        forward(twin.model, data(0, rank)).backward()
        assert comm.traffic.gathers == len(units(twin.model))

    run_ranks(check, 2)


def test_an_inner_scope_writes_and_the_outer_has_the_edit() -> None:
    def check(rank: int) -> None:
        model = one_unit(seeded(Tower))
        with gathered(model):
            with gathered(model, writeback=True):
                nn.init.ones_(model.head.weight)
                model.head.bias = nn.Parameter(torch.full((2,), 4.0).double())
            assert torch.equal(model.head.bias, torch.full((2,), 4.0).double())
        assert torch.equal(whole(model.head.weight), torch.ones(2, WIDTH).double())
        assert torch.equal(whole(model.head.bias), torch.full((2,), 4.0).double())

    run_ranks(check, 2)


def test_an_inner_edit_is_written_by_the_outer_scope() -> None:
    def check(rank: int) -> None:
        model = one_unit(seeded(Tower))
        with torch.no_grad(), gathered(model, writeback=True):
            with torch.enable_grad(), gathered(model):
                nn.init.ones_(model.head.weight)
        assert torch.equal(whole(model.head.weight), torch.ones(2, WIDTH).double())

    run_ranks(check, 2)


def test_tied_weights_across_units() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))

    def shard(model: nn.Module) -> None:
        fully_shard(model.a)
        fully_shard(model.b)
        fully_shard(model)

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with gathered(model.b):
            assert model.a.weight is model.b.weight and not is_sharded(model.a.weight)
            use = (x @ model.b.weight.T + model.b.bias).square().mean()
            inside = model(x).square().mean()
        return use + inside + square(model, x)

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tied, shard)
        twin.train(forward)
        with gathered(twin.model.a, writeback=True):
            nn.init.ones_(twin.model.b.weight)
        assert torch.equal(whole(twin.model.a.weight), torch.ones(WIDTH, WIDTH).double())

    run_ranks(check, 2)


def test_frozen_units_train_through_the_scope() -> None:
    def build() -> nn.Module:
        model = Tower()
        model.blocks.requires_grad_(False)
        model.first.weight.requires_grad_(False)
        return model

    for shard in EVERY_SHARD.values():
        train_twin(build, both, shard)


# unshard and reshard


def test_unshard_holds_a_unit_gathered_until_reshard() -> None:
    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        block, plain = twin.model.blocks[0], twin.reference.blocks[0]
        leaf = block.up.weight
        unshard(block)
        assert torch.equal(block.up.weight, plain.up.weight) and not is_sharded(block.up.weight)
        comm.traffic.reset()
        with torch.no_grad():
            block(data(0, 0)), block(data(0, 0))
        assert comm.traffic.gathers == 0
        reshard(block)
        assert block.up.weight is leaf
        assert_at_rest(twin.model)
        reshard(block)
        twin.train()

    run_ranks(check, 2)


def test_unshard_of_a_module_that_is_no_unit_gathers_the_units_in_it() -> None:
    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        handle = unshard(model.blocks, async_op=True)
        assert handle is not None and is_sharded(model.blocks[0].up.weight)
        handle.wait()
        handle.wait()
        assert not is_sharded(model.blocks[0].up.weight) and is_sharded(model.head.weight)
        reshard(model.blocks)
        assert_at_rest(model)
        with pytest.raises(ValueError, match="unshard: LayerNorm is not a unit"):
            unshard(model.blocks[0].norm)

    run_ranks(check, 2)


@pytest.mark.parametrize("world", [1, 2])
def test_training_while_unsharded_reads_new_weights_every_step(world: int) -> None:
    def check(rank: int) -> None:
        twin = Twin(rank, world, Tower)
        for u in (twin.model, *twin.model.blocks):
            unshard(u)
        for seed in range(3):
            twin.backward(square, seed)
            twin.optim.step()
            twin.plain_optim.step()
            twin.zero_grad()
        for u in (twin.model, *twin.model.blocks):
            reshard(u)
        twin.check()

    run_ranks(check, world)


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_flow_through_unsharded_parameters_after_reshard(world: int) -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        if any(units(model)):
            unshard(model)
        use = (x @ model.first.weight.T @ model.head.weight.T).square().mean()
        if any(units(model)):
            reshard(model)
        return use + square(model, x)

    def check(rank: int) -> None:
        twin = Twin(rank, world, Tower)
        for seed in range(3):
            twin.backward(forward, seed)
            assert twin.model.head.weight.numel() == 2 * WIDTH
            twin.step()
        gc.collect()
        twin.check()

    run_ranks(check, world)


def test_a_graph_over_unsharded_parameters_keeps_them_gathered() -> None:
    def check(rank: int) -> None:
        model = one_unit(seeded(Tower))
        unshard(model)
        loss = (data(0, rank) @ model.first.weight.T).square().sum()
        reshard(model)
        (unit,) = units(model)
        assert unit.holds == {Hold.USER}
        del loss
        assert_at_rest(model)

    run_ranks(check, 2)


def test_writing_between_unshard_and_reshard_is_an_error() -> None:
    def check(rank: int) -> None:
        model = one_unit(seeded(Tower))
        unshard(model)
        nn.init.zeros_(model.head.weight)
        try:
            reshard(model)
        finally:
            assert_at_rest(model)

    for error in rank_errors(check, 1) + rank_errors(check, 2):
        assert error is not None and "'head.weight'" in error and "writeback=True" in error


def test_reshard_releases_what_a_forward_without_backward_kept() -> None:
    def check(rank: int) -> None:
        model = one_unit(seeded(Tower))
        model(data(0, rank))
        assert units(model)[0].holds
        reshard(model)
        assert_at_rest(model)

    run_ranks(check, 2)


def test_reshard_between_forward_and_backward_gathers_again() -> None:
    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        loss, plain = twin.losses(square, 0)
        reshard(twin.model)
        loss.backward()
        plain.backward()
        twin.step()
        twin.check()

    run_ranks(check, 2)


def test_gathered_inside_unshard_and_reshard_inside_gathered() -> None:
    def check(rank: int) -> None:
        model = one_unit(seeded(Tower))
        leaf = model.head.weight
        unshard(model)
        with gathered(model, writeback=True):
            nn.init.ones_(model.head.weight)
        assert not is_sharded(model.head.weight)
        assert torch.equal(model.head.weight, torch.ones(2, WIDTH).double())
        with gathered(model):
            reshard(model)
            assert not is_sharded(model.head.weight)
        assert model.head.weight is leaf
        assert_at_rest(model)

    run_ranks(check, 2)


def test_prefetch_units_gathers_ahead_and_a_step_drops_it() -> None:
    def check(rank: int) -> None:
        import fsdp_compose.optim.clip  # noqa: F401  the guard on steps

        twin = Twin(rank, 2, Tower)
        twin.backward(square, 0)
        comm.traffic.reset()
        prefetch_units(twin.model, twin.model.blocks)
        assert comm.traffic.gathers == 3
        prefetch_units(twin.model, [twin.model.blocks[0]])
        assert comm.traffic.gathers == 3
        twin.step()
        assert_at_rest(twin.model)
        prefetch_units(twin.model, twin.model)
        twin.backward(square, 1)
        twin.step()
        twin.check()

    run_ranks(check, 2)


# Streaming


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [0, 200, 1 << 30])
def test_iter_full_yields_what_named_parameters_has(world: int, bucket_bytes: int) -> None:
    def check(rank: int) -> None:
        plain, model = odd(), by_block(odd())
        wanted = list(plain.named_parameters(remove_duplicate=False))
        found = list(iter_full(model, bucket_bytes=bucket_bytes))
        assert [n for n, _ in found] == [n for n, _ in wanted]
        for (name, ours), (_, theirs) in zip(found, wanted):
            assert type(ours) is Tensor and not ours.requires_grad
            assert torch.equal(ours, theirs) and ours.stride() == theirs.stride(), name
        kinds = {n: t.dtype for n, t in iter_full(model, dtype=torch.float64, device="cpu")}
        assert kinds["scalar"] == torch.float64 and kinds["codes"] == torch.int64
        assert kinds["complex"] == torch.complex64

    run_ranks(check, world)


def test_iter_full_of_a_part_has_its_own_names_and_ignored_parameters() -> None:
    def check(rank: int) -> None:
        model = seeded(Tower)
        by_block(model, ignored=[model.head])
        plain = seeded(Tower)
        for part, theirs in ((model, plain), (model.blocks[1], plain.blocks[1])):
            found = dict(iter_full(part))
            assert list(found) == [n for n, _ in theirs.named_parameters()]
            for name, q in theirs.named_parameters():
                assert torch.equal(found[name], q)

    run_ranks(check, 2)


def test_iter_full_moves_each_bucket_once_and_large_ones_by_owner() -> None:
    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        comm.traffic.reset()
        list(iter_full(model.blocks))
        assert (comm.traffic.gathers, comm.traffic.control) == (3, 0)
        comm.traffic.reset()
        list(iter_full(model.blocks, bucket_bytes=8))
        assert comm.traffic.gathers == 0 and comm.traffic.control >= 15

    run_ranks(check, 2)


def test_reduce_grads_without_anything_waiting_does_nothing() -> None:
    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        comm.traffic.reset()
        reduce_grads(model)
        assert comm.traffic.reduces == 0
        with pytest.raises(ValueError, match="reduce_grads: Linear is not a unit"):
            reduce_grads(nn.Linear(1, 1))

    run_ranks(check, 2)


def test_a_world_without_a_process_group() -> None:
    twin = Twin(0, 1, Tower)
    twin.train(both)
    with gathered(twin.model, writeback=True):
        nn.init.ones_(twin.model.head.weight)
    assert torch.equal(whole(twin.model.head.weight), torch.ones(2, WIDTH).double())
    assert dict(iter_full(twin.model))["head.weight"].eq(1).all()
