"""``unshard``, ``reshard`` and ``prefetch_units`` between passes; ``iter_full``."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_compose import (
    MixedPrecision,
    Prefetch,
    fully_shard,
    load_checkpoint,
    save_checkpoint,
    state_dict,
)
from fsdp_compose.base.process import here
from fsdp_compose.core.schedule import Hold
from fsdp_compose.scopes import stream
from fsdp_compose.scopes import unshard as scope
from fsdp_compose.scopes.gathered import gathered
from fsdp_compose.scopes.stream import iter_full
from fsdp_compose.scopes.unshard import prefetch_units, reduce_grads, reshard, unshard
from fsdp_compose.sharded import is_sharded

from harness import rank_errors, run_ranks
from models import (
    WIDTH,
    Tower,
    Twin,
    assert_at_rest,
    by_block,
    data,
    one_unit,
    seeded,
    square,
    units,
    whole,
)
from scoped_models import both, seeded_oddities

pytestmark = pytest.mark.filterwarnings("error")


def test_unshard_holds_a_unit_gathered_until_reshard() -> None:
    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        block, plain = twin.model.blocks[0], twin.reference.blocks[0]
        leaf = block.up.weight
        unshard(block)
        assert torch.equal(block.up.weight, plain.up.weight) and not is_sharded(block.up.weight)
        here.traffic.reset()
        with torch.no_grad():
            block(data(0, 0)), block(data(0, 0))
        assert here.traffic.gathers == 0
        reshard(block)
        assert block.up.weight is leaf
        assert_at_rest(twin.model)
        reshard(block)
        twin.train()

    run_ranks(check, 2)


def test_unshard_of_no_unit_gathers_the_units_in_it() -> None:
    """``unshard`` of a module that is no unit gathers the units in it."""

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
def test_training_while_unsharded_reads_new_weights(world: int) -> None:
    """Training while unsharded reads new weights every step."""

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
def test_gradients_flow_after_reshard(world: int) -> None:
    """Gradients flow through unsharded parameters after reshard."""

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


def test_a_graph_keeps_parameters_gathered() -> None:
    """A graph over unsharded parameters keeps them gathered."""

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


def test_writing_after_unshard_is_an_error() -> None:
    """Writing between unshard and reshard is an error."""

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


@pytest.mark.parametrize("has_graph", [False, True])
def test_after_such_an_error_the_model_is_as_before(has_graph: bool) -> None:
    """The next forward has not written, and reads no edit, also where a graph keeps the unit."""

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.backward(square, 0)
        twin.step()
        unshard(twin.model.blocks[0])
        graph = twin.model.blocks[0].up.weight.sum() if has_graph else None
        nn.init.zeros_(twin.model.blocks[0].up.weight)
        with pytest.raises(RuntimeError, match="written between unshard and reshard"):
            reshard(twin.model.blocks[0])
        twin.backward(square, 1)
        twin.step()
        del graph
        twin.check()

    run_ranks(check, 2)


def test_reshard_releases_what_a_forward_kept() -> None:
    def check(rank: int) -> None:
        model = one_unit(seeded(Tower))
        model(data(0, rank))
        assert units(model)[0].holds
        reshard(model)
        assert_at_rest(model)

    run_ranks(check, 2)


def test_reshard_before_backward_gathers_again() -> None:
    """Reshard between forward and backward gathers again."""

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        loss, plain = twin.losses(square, 0)
        reshard(twin.model)
        loss.backward()
        plain.backward()
        twin.step()
        twin.check()

    run_ranks(check, 2)


def test_gathered_and_unshard_inside_each_other() -> None:
    """Gathered inside unshard and reshard inside gathered."""

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


def scale(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.mul_(0.5)


def scale_data(param: nn.Parameter) -> None:
    param.data.mul_(0.5)


@pytest.mark.parametrize("write", [scale, scale_data])
def test_writes_after_a_gather_ahead_are_read(
    write: Callable[[nn.Parameter], None],
) -> None:
    """Between ``prefetch_units`` and the pass, and inside it, by a unit that runs before."""

    class Scaling(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.first.register_forward_hook(lambda *_: self.scale())

        def scale(self) -> None:
            write(self.blocks[0].down.weight)

    def check(rank: int) -> None:
        shard = lambda model: by_block(model, prefetch=Prefetch(2, 1))  # noqa: E731
        twin = Twin(rank, 2, Tower, shard)
        prefetch_units(twin.model, twin.model.blocks)
        for model in (twin.model, twin.reference):
            write(model.blocks[1].up.weight)
        twin.train()
        model, plain = seeded(Scaling), seeded(Scaling)
        fully_shard(model.first)
        shard(model)
        for seed in range(3):  # the later ones follow the order of the first
            x = data(seed, rank)
            with torch.no_grad():
                torch.testing.assert_close(model(x), plain(x))

    run_ranks(check, 2)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_unseen_writes_while_unsharded_are_lost(dtype: torch.dtype | None) -> None:
    """Those through ``.data`` and NumPy too, which leave no version: reshard raises."""

    def by_data(weight: Tensor) -> None:
        weight.data.fill_(7)

    def by_numpy(weight: Tensor) -> None:
        weight.detach().view(torch.int16).numpy()[:] = 7

    def check(rank: int) -> None:
        model = by_block(seeded(Tower), mp_policy=MixedPrecision(param_dtype=dtype))
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        for write in (by_data, by_numpy):
            unshard(model)
            for weight in (model.first.weight, model.head.weight):  # slices of every rank
                write(weight)
            with pytest.raises(RuntimeError, match="the edit would be lost"):
                reshard(model)
            unshard(model)
            square(model, data(0, rank)).backward()
            optim.step()
            optim.zero_grad()
            reshard(model)
        assert_at_rest(model)

    run_ranks(check, 2)


def test_prefetch_units_gathers_ahead() -> None:
    """``prefetch_units`` gathers ahead and a step drops it."""

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.backward(square, 0)
        here.traffic.reset()
        prefetch_units(twin.model, twin.model.blocks)
        assert here.traffic.gathers == 3
        prefetch_units(twin.model, [twin.model.blocks[0]])
        assert here.traffic.gathers == 3
        twin.step()
        assert_at_rest(twin.model)
        with pytest.raises(ValueError, match="prefetch_units: LayerNorm is not a unit"):
            prefetch_units(twin.model, [twin.model.blocks[0], twin.model.blocks[0].norm])
        assert_at_rest(twin.model)  # of a list with a mistake nothing is gathered
        prefetch_units(twin.model, twin.model)
        twin.backward(square, 1)
        twin.step()
        twin.check()

    run_ranks(check, 2)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [0, 200, 1 << 30])
def test_iter_full_yields_what_named_parameters_has(world: int, bucket_bytes: int) -> None:
    def check(rank: int) -> None:
        plain, model = seeded_oddities(), by_block(seeded_oddities())
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


def test_iter_full_of_a_part_has_its_own_names() -> None:
    """``iter_full`` of a part has its own names and ignored parameters."""

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


@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
def test_iter_full_holds_one_at_a_time(bucket_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket, or a parameter of a large one, is let go of before the next is gathered."""
    held: list[StorageWeakRef] = []

    def watched(gather: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any) -> Tensor:
            assert all(ref.expired() for ref in held)
            full = gather(*args)
            held.append(StorageWeakRef(full.untyped_storage()))
            return full

        return run

    for name in "gather_stored", "_gather_parameter":
        monkeypatch.setattr(stream, name, watched(getattr(stream, name)))
    model = by_block(seeded(Tower))
    for _ in iter_full(model, bucket_bytes=bucket_bytes):
        pass
    assert len(held) > 2


def test_iter_full_moves_each_bucket_once() -> None:
    """``iter_full`` moves each bucket once and large ones by owner."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        here.traffic.reset()
        list(iter_full(model.blocks))
        assert (here.traffic.gathers, here.traffic.control) == (3, 1)  # of what was written
        here.traffic.reset()
        list(iter_full(model.blocks, bucket_bytes=8))
        assert here.traffic.gathers == 0 and here.traffic.control >= 15

    run_ranks(check, 2)


def test_reduce_grads_with_nothing_waiting() -> None:
    """``reduce_grads`` without anything waiting does nothing."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        here.traffic.reset()
        reduce_grads(model)
        assert here.traffic.reduces == 0
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


class TiedEnds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


@pytest.mark.parametrize("shown", ["first", "last"])
@pytest.mark.parametrize("steps", [False, True])
def test_state_dicts_beside_a_tie_that_is_unsharded(shown: str, steps: bool, tmp_path: Any) -> None:
    """The other unit finds the full weight in its place, which is no other parameter."""

    def ranks(rank: int) -> None:
        model = seeded(TiedEnds).float()
        wanted = {name: value.clone() for name, value in model.state_dict().items()}
        for part in (model.first, model.last):
            fully_shard(part)
        unshard(getattr(model, shown))
        if steps:
            model(torch.ones(2, 6)).sum().backward()
        for found in (model.state_dict(), state_dict(model)):
            assert found.keys() == wanted.keys()
            assert all(torch.equal(whole(found[name]), wanted[name]) for name in wanted)
        save_checkpoint(tmp_path, model)
        reshard(getattr(model, shown))
        load_checkpoint(tmp_path, model)
        model(torch.ones(2, 6)).sum().backward()

    run_ranks(ranks, 2)


def test_an_unshard_that_fails_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while parameters take their full tensors leaves slices in all of them."""

    def check(rank: int) -> None:
        twin, shown, show = Twin(rank, 2, Tower), count(), scope.show

        def play(*args: Any) -> None:
            if next(shown) == 2:
                raise torch.OutOfMemoryError("played")
            show(*args)

        with monkeypatch.context() as patched:
            patched.setattr(scope, "show", play)
            with pytest.raises(torch.OutOfMemoryError):
                unshard(twin.model.blocks[0])
        assert all(is_sharded(p) for p in twin.model.parameters())
        twin.train()
        reshard(twin.model.blocks[0])
        assert_at_rest(twin.model)

    run_ranks(check, 2)
