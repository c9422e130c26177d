"""The tests notice a broken engine: each mutation fails the check that is there for it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import (
    MixedPrecision,
    Prefetch,
    ShardingStrategy,
    fully_shard,
    gathered,
    grad_norm,
    no_sync,
    optim_state_dict,
    verify_replicas,
)
from fsdp_compose.base.process import here
from fsdp_compose.checkpoint import metadata
from fsdp_compose.checkpoint.optimizer import agree as optim_agree
from fsdp_compose.comm import collectives as comm
from fsdp_compose.comm import sums, waiting
from fsdp_compose.comm.transports import PAIRS
from fsdp_compose.construct.plans import UnitPlan
from fsdp_compose.core.guards import scope_parameters
from fsdp_compose.core.schedule import Schedule
from fsdp_compose.sharded import ShardedWeightError, torchstate
from fsdp_compose.sharded.ops import MEMORY
from fsdp_compose.sharded.tensor import HANDLERS

from breaking import replace, run_once
from harness import RankFailure, run_ranks
from laws import (
    GATHERS,
    PLANS,
    Choosy,
    Levels,
    be_quick,
    check_prefetch,
    check_released,
    check_steps,
    check_sums,
    check_traffic,
    check_two_graphs,
    inside_out,
)
from models import Tower, Twin, by_block, data, seeded, square
from saved import Code

pytestmark = pytest.mark.slow


# Checks


def check_training(rank: int, **options: Any) -> None:
    Twin(rank, 2, Tower, lambda m: by_block(m, **options)).train()


def check_staleness(rank: int) -> None:
    """A weight written between steps is read by the next forward, though it stayed gathered."""
    twin = Twin(rank, 2, Tower, lambda m: by_block(m, strategy=ShardingStrategy.SHARD_GRAD_OP))
    for seed in range(3):
        square(twin.model, data(0, rank))  # stays gathered
        with torch.no_grad():
            for model in (twin.model, twin.reference):
                for param in model.parameters():
                    param.mul_(1.1)
        twin.backward(square, seed)
        twin.step()


def check_hybrid(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    Twin(rank, 4, Tower, lambda m: by_block(m, mesh=mesh)).train()


def check_no_sync(rank: int) -> None:
    """Micro-batches without communication of gradients, then one with; the sum is right."""
    twin = Twin(rank, 2, Tower)
    for step in range(2):
        here.traffic.reset()
        with no_sync(twin.model):
            twin.backward(square, 10 * step)
            twin.backward(square, 10 * step + 1)
            assert here.traffic.reduces == 0
        twin.backward(square, 10 * step + 2)
        assert here.traffic.reduces == 4
        twin.step()
    twin.check()


def check_reduce_dtype(rank: int) -> None:
    """Gradients travel in reduce_dtype, which is wider than the compute's here."""

    def moved(reduce: torch.dtype) -> int:
        model = by_block(Tower(), mp_policy=MixedPrecision(torch.bfloat16, reduce))
        here.traffic.reset()
        model(data(0, rank, dtype=torch.float32)).float().mean().backward()
        return here.traffic.reduce_bytes

    assert moved(torch.float32) == 2 * moved(torch.bfloat16)


def check_frozen(rank: int) -> None:
    def build() -> nn.Module:
        model = Tower()
        model.blocks[1].requires_grad_(False)
        model.head.bias.requires_grad_(False)
        return model

    twin = Twin(rank, 2, build)
    here.traffic.reset()
    twin.backward(square, 0)
    assert here.traffic.reduces == 3
    assert all(p.grad is None for p in twin.model.parameters() if not p.requires_grad)
    twin.train()


def check_replicas_verified(rank: int) -> None:
    model = seeded(Tower)
    if rank == 1:
        model.head.bias.data += 1
    with pytest.raises(ValueError, match="differs between rank 0 and rank 1"):
        by_block(model)


def check_budget(rank: int) -> None:
    check_traffic(rank, *GATHERS["default"], 2)


def check_ahead(rank: int) -> None:
    check_prefetch(rank, Prefetch(), True)


# Mutations


def sum_for_mean() -> None:
    original = comm.ReduceScatter.result
    comm.ReduceScatter.result = lambda self, dtype, scale: original(self, dtype, 1.0)


def drop_a_rank() -> None:
    """One contribution of the sum is lost."""

    def make(original: Any) -> Any:
        def mutant(self: Any, dtype: Any, scale: float) -> Any:
            self.exchange.wait()
            self.contributions = [self.contributions[0].clone()]
            return original(self, dtype, scale)

        return mutant

    comm.ReduceScatter.result = make(comm.ReduceScatter.result)


def no_sync_flag() -> None:
    from fsdp_compose.core.records import Switches

    Switches.sync = property(lambda self: True, lambda self, value: None)


def never_release() -> None:
    replace("_release", lambda original: lambda engine, bucket: None)


def gather_zeros() -> None:
    original = comm.gather_parts

    def mutant(whole: Any, parts: Any, own: Any, group: Any, *rest: Any) -> Any:
        exchange = original(whole, parts, own, group, *rest)
        exchange.wait()
        if group.pg is not None and whole.numel():
            parts[1 - group.rank].zero_()
        return exchange

    comm.gather_parts = mutant


def sum_replicas_in_grad_dtype() -> None:
    original = MixedPrecision.dtypes_for
    MixedPrecision.dtypes_for = lambda self, storage, replicas=1: original(self, storage)


def reduce_in_compute_dtype() -> None:
    original = MixedPrecision.dtypes_for

    def mutant(self: Any, storage: Any, replicas: int = 1) -> Any:
        dtypes = original(self, storage, replicas)
        return dataclasses.replace(dtypes, reduce=dtypes.compute)

    MixedPrecision.dtypes_for = mutant


def thaw() -> None:
    """Frozen parameters of a unit are trained with the rest."""

    def make(original: Any) -> Any:
        def mutant(bucket: Any) -> None:
            original(bucket)
            for entry in bucket.entries:
                entry.param.requires_grad_(True)

        return mutant

    replace("place_parameters", make)


def reduce_twice() -> None:
    """Every reduction is handed out two times."""
    replace("assign", lambda original: lambda r, flat: (original(r, flat), original(r, flat)))


def lose_accumulation() -> None:
    """A second backward overwrites the first's gradient."""

    def make(original: Any) -> Any:
        def mutant(reduction: Any, flat: Any) -> None:
            for entry in reduction.bucket.entries:
                entry.param.grad = None
            original(reduction, flat)

        return mutant

    replace("assign", make)


def check_accumulation(rank: int) -> None:
    twin = Twin(rank, 2, Tower)
    for seed in range(3):
        twin.backward(square, seed)
    twin.step()
    twin.check()


def hand_out_memory() -> None:
    """Functions that give out a slice's memory are taken for facts it shares with the whole."""
    for function in MEMORY:
        HANDLERS[function] = HANDLERS[torch.Tensor.get_device]


def check_memory(rank: int) -> None:
    model = by_block(Tower())
    for read in (torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.__array__):
        for tensor in (model.head.weight, model.head.weight.data, model.state_dict()["head.bias"]):
            with pytest.raises(ShardedWeightError, match="save_full"):
                read(tensor)


def keep_own_flags() -> None:
    """A rank hears of no parameter that only others used."""
    comm.Heads._unite = lambda self, flags, rows: None


def check_unused(rank: int) -> None:
    check_steps(Twin(rank, 2, Choosy, fully_shard), PLANS[:2])


def check_parts(rank: int) -> None:
    twin = Twin(rank, 2, Levels, inside_out)
    seen: list[Any] = []
    twin.model.layer.weight.register_hook(seen.append)
    twin.backward(square, 0)
    assert len(seen) == 1


def check_uncut_state(rank: int) -> None:
    """What is not cut is saved for all ranks from one, so it must be the same."""
    model = by_block(Tower())
    optim = torch.optim.SGD(model.parameters(), lr=0.1 + rank)
    with pytest.raises(RuntimeError, match="setting 'lr'"):
        optim_state_dict(model, optim)


def check_other_layout(rank: int) -> None:
    """State of a plain optimizer does not go into one over slices as it is."""
    plain, model = Tower(), by_block(Tower(), init="as_is")
    given = torch.optim.Adagrad(plain.parameters()).state_dict()
    with pytest.raises(RuntimeError, match="load_optim_state_dict"):
        torch.optim.Adagrad(model.parameters()).load_state_dict(given)


def check_forward_writes(rank: int) -> None:
    """A forward that clamps its weight raises, as the result would be lost."""
    model = by_block(seeded(Tower))

    def clamp(module: nn.Module, args: Any) -> None:
        with torch.no_grad():
            module.weight.clamp_(-0.1, 0.1)

    model.blocks[0].up.register_forward_pre_hook(clamp)
    with pytest.raises(RuntimeError, match=r"'blocks\.0\.up\.weight' .* was written"):
        model(data(0, rank))


def check_data_before_backward(rank: int) -> None:
    """Backward reads what was written through .data since forward, as in a plain module."""
    twin = Twin(rank, 2, Tower, lambda m: by_block(m, strategy=ShardingStrategy.SHARD_GRAD_OP))
    loss, plain = twin.losses(square, 0)
    for model in (twin.model, twin.reference):
        for param in model.parameters():
            param.data.mul_(1.5)
    loss.backward()
    plain.backward()
    twin.step()


def check_swap(rank: int) -> None:
    """The memory that a parameter had before ``p.data = x`` keeps its values."""
    model = by_block(seeded(Tower))
    former = model.head.weight.data
    before = former.clone()
    model.head.weight.data = model.head.weight.data * 2
    model(data(0, rank))
    assert torch.equal(former.to_local(), before.to_local())


def adopt_in_place() -> None:
    """What parameters were given is copied over what they had."""

    def make(original: Any) -> Any:
        def mutant(bucket: Any, *args: Any) -> Any:
            return bucket.stored.copy_(original(bucket, *args))

        return mutant

    replace("_make_shard", make)


def forget_the_unit() -> None:
    """Policies and errors get names that are relative to the unit."""
    UnitPlan.full_name = lambda self, name: name


def check_full_names(rank: int) -> None:
    asked: set[str] = set()
    model = by_block(Tower(), mp_policy=lambda fqn, param: asked.add(fqn))
    assert asked == {name for name, _ in model.named_parameters()}


def forget_what_is_empty() -> None:
    """``module.to_empty()`` leaves memory that looks written."""
    replace("mark_unwritten", lambda original: lambda tensor: None)


def check_emptied(rank: int) -> None:
    model = by_block(Tower())
    model.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match="nothing has written it"):
        model(data(0, rank, dtype=torch.float32))


def wait_in_silence() -> None:
    waiting.log_missing = lambda wait, now: None


def check_told(rank: int) -> None:
    """A rank that is alone in a norm says so."""
    heard, model = be_quick(), by_block(Tower())
    torch.distributed.barrier()
    time.sleep(0.8 * rank)
    model.head.weight.norm()
    assert rank or any("rank 1 did not come" in line for line in heard.lines)


def unpickle_anything() -> None:
    metadata._Unpickler.find_class = metadata.pickle.Unpickler.find_class


def check_unpickling(rank: int) -> None:
    """Reading the metadata of a checkpoint runs no code."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / ".metadata").write_bytes(pickle.dumps(Code(Path(folder) / "ran")))
        with pytest.raises(RuntimeError, match="which was not run"):
            metadata.read_metadata(Path(folder))


def check_siblings(rank: int) -> None:
    """Blocks that were sharded without their root: the first backward names what is plain."""
    model = seeded(Tower)
    for block in model.blocks:
        fully_shard(block)
    with pytest.raises(RuntimeError, match=r"'first\.weight'"):
        square(model, data(0, rank)).backward()


def check_copies(rank: int) -> None:
    model = by_block(seeded(Tower), strategy=ShardingStrategy.NO_SHARD)
    with torch.no_grad():
        model.head.bias.add_(rank)
    with pytest.raises(RuntimeError, match=r"'head\.bias'.* is copied"):
        verify_replicas(model)


def hide_gradients() -> None:
    """In a scope parameters have no gradient, as the tensors that they show."""
    scope_parameters.WholeParameter.grad = property(lambda self: None)


def check_scope(rank: int) -> None:
    """Clipping inside ``gathered`` sees every gradient."""
    model = by_block(seeded(Tower))
    square(model, data(0, rank)).backward()
    wanted = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    with gathered(model):
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    torch.testing.assert_close(norm, wanted)


def check_stale_scope(rank: int) -> None:
    """A forward in a scope does not read what the scope gathered before a step."""
    model = by_block(seeded(Tower))
    square(model, data(0, rank)).backward()
    with gathered(model):
        torch.optim.SGD(model.parameters(), 0.1).step()
        with pytest.raises(RuntimeError, match="Leave the scope before the next forward"):
            model(data(0, rank))


def check_shallow_copy(rank: int) -> None:
    block = by_block(seeded(Tower)).blocks[0]
    twin = copy.copy(block)
    twin._modules = {**block._modules, "up": nn.Linear(6, 7).double()}
    with pytest.raises(RuntimeError, match=r"forward was called on a copy.*'up\.weight'"):
        twin(data(0, rank))


def check_cleared(rank: int) -> None:
    """What ``zero_grad`` drops in ``no_sync`` is in no later gradient."""
    twin = Twin(rank, 2, Tower)
    with no_sync(twin.model):
        twin.backward(square, 0)
        twin.zero_grad()
    twin.train(steps=1)


def release_after_one() -> None:
    """Units kept for graphs over gradients are released when the first of them is consumed."""

    def make(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def drop(engine: Any) -> None:
            for unit in list(engine.retained):
                unit.graphs.readers.clear()
            original(engine)

        return drop

    replace("drop_unread", make)


def check_any_ranks(rank: int) -> None:
    """Four ranks add eight microbatches up, and take norms of them, as one rank does."""
    found = []
    for mesh, slots in ((None, range(rank, 8, 4)), ("self", range(8))):
        model = by_block(seeded(Tower).float(), mesh=mesh, deterministic=8)
        for slot in slots:
            square(model, data(slot, 0).float()).backward()
        params = list(model.parameters())
        norms = [grad_norm(part, order) for part in (model, *params) for order in (1.0, 2.0, 3.0)]
        found.append([*norms, *(param.grad.full_tensor() for param in params)])
    assert all(map(torch.equal, *found))


def check_turns(rank: int) -> None:
    """More is to be gathered ahead than there are buffers, and none is overwritten."""
    ahead = {"prefetch": Prefetch(3, 3), "static_buffers": 2, "transport": PAIRS}
    Twin(rank, 2, lambda: Tower(4), lambda m: by_block(m, **ahead)).train()


MUTATIONS: dict[str, tuple[Callable[[], None], Callable[[int], None], int]] = {
    "sum for mean": (sum_for_mean, check_training, 2),
    "a contribution lost": (drop_a_rank, check_training, 2),
    "stale weights": (
        lambda: replace("refresh_stale", lambda original: lambda unit: None), check_staleness, 2,
    ),
    "no stamp": (
        lambda: replace("stamp_of", lambda _: lambda bucket: bucket.fill.stamp),
        check_staleness, 2,
    ),
    "no all-reduce over replicas": (
        lambda: setattr(comm, "all_reduce", lambda tensor, group, **rest: tensor),
        check_hybrid, 4,
    ),
    "sync flag ignored": (no_sync_flag, check_no_sync, 2),
    "never released": (never_release, check_released, 2),
    "prefetch ignored": (
        lambda: setattr(Schedule, "prefetch", lambda *_: None), check_ahead, 2,
    ),
    "always gathered again": (
        lambda: setattr(Schedule, "keep", lambda *_: None), check_budget, 2,
    ),
    "reduce dtype ignored": (reduce_in_compute_dtype, check_reduce_dtype, 2),
    "sums kept in the shards' dtype": (
        lambda: setattr(sums, "_wide_for", lambda given, total: total), check_sums, 4,
    ),
    "replicas add in the shards' dtype": (sum_replicas_in_grad_dtype, check_sums, 4),
    "frozen made trainable": (thaw, check_frozen, 2),
    "other ranks' weights lost": (gather_zeros, check_training, 2),
    "gradients handed out twice": (reduce_twice, check_training, 2),
    "accumulation lost": (lose_accumulation, check_accumulation, 2),
    "other ranks' use not heard of": (keep_own_flags, check_unused, 2),
    "parts of a gradient reduced alone": (
        lambda: replace("is_awaited", lambda original: lambda *_: False),
        check_parts, 2,
    ),
    "memory handed out": (hand_out_memory, check_memory, 2),
    "waits in silence": (wait_in_silence, check_told, 2),
    "metadata unpickled": (unpickle_anything, check_unpickling, 1),
    "names relative to the unit": (forget_the_unit, check_full_names, 2),
    "emptied memory taken for written": (forget_what_is_empty, check_emptied, 2),
    "other layouts loaded": (
        lambda: setattr(torchstate, "check_loaded", lambda spec, key, value: None),
        check_other_layout, 2,
    ),
    "uncut state not compared": (
        lambda: setattr(optim_agree, "_facts_of", lambda *given: {}), check_uncut_state, 2,
    ),
    "gathered over what is read": (
        lambda: replace("_user_of", lambda of: lambda place, unit: None), check_turns, 2,
    ),
    "start not verified": (
        lambda: replace("sum_bytes", lambda of: lambda t: of(torch.zeros(1))),
        check_replicas_verified, 2,
    ),
    "digests of ranks taken for equal": (
        lambda: replace("_are_alike", lambda _: lambda *_: True), check_replicas_verified, 2,
    ),
    "writes in forward lost": (
        lambda: replace("find_writes", lambda _: lambda *_: None),
        check_forward_writes, 2,
    ),
    "old weights in backward": (
        lambda: replace("refresh_handed_out", lambda original: lambda unit: None),
        check_data_before_backward, 2,
    ),
    "swapped weights overwritten": (adopt_in_place, check_swap, 2),
    "plain siblings not looked for": (
        lambda: replace("find_surroundings", lambda original: lambda unit: None),
        check_siblings, 2,
    ),
    "copies not compared": (
        lambda: replace("_difference", lambda original: lambda *_: None, "core.guards.replicas"),
        check_copies, 2,
    ),
    "gradients hidden in a scope": (hide_gradients, check_scope, 2),
    "a scope read after a step": (
        lambda: replace("check_scope_is_current", lambda original: lambda *_: None),
        check_stale_scope, 2,
    ),
    "shallow copies not looked at": (
        lambda: replace("check_copy", lambda original: lambda *_: None),
        check_shallow_copy, 2,
    ),
    "microbatches added in rank order": (
        lambda: replace("add_in_tree", lambda _: lambda parts, total: total.copy_(sum(parts))),
        check_any_ranks, 4,
    ),
    "norms added by slices": (
        lambda: replace("adds_in_tree", lambda original: lambda params: False),
        check_any_ranks, 4,
    ),
    "gradients that wait are kept": (
        lambda: replace("_drop", lambda original: lambda entry: None, "scopes.unreduced"),
        check_cleared, 2,
    ),
    "one reader of released weights": (release_after_one, check_two_graphs, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_noticed(name: str) -> None:
    mutate, check, world = MUTATIONS[name]
    run_once(check, world)

    def broken(rank: int) -> None:
        mutate()
        check(rank)

    with pytest.raises(RankFailure, match=r"AssertionError|DID NOT RAISE"):
        run_ranks(broken, world, timeout=20)
