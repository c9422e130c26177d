"""``pending_gradients`` shows what waits to be reduced, sends nothing, and hands out copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp_compose as fc
from fsdp_compose import Offload, ShardingStrategy

from harness import run_ranks, simulate_ranks
from models import Tower, by_block, data, mesh_of_replicas, seeded, square, whole

OPTIONS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (3, {}),
    (3, {"strategy": ShardingStrategy.ZERO1}),
    (2, {"strategy": ShardingStrategy.NO_SHARD}),
    (2, {"offload_policy": Offload(params=True)}),
    (2, {"static_buffers": True}),
    (4, {"strategy": ShardingStrategy.HYBRID_SHARD}),
    (4, {"strategy": ShardingStrategy.HYBRID_SHARD_OPTIMIZER}),
]


def sharded(options: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """A sharded model, and a plain one with its values."""
    model = seeded(Tower)
    twin = copy.deepcopy(model)
    if "HYBRID" in str(options.get("strategy")):
        options = options | {"mesh": mesh_of_replicas(2, 2)}
    return by_block(model, **options), twin


@pytest.mark.parametrize(("world", "options"), OPTIONS)
def test_what_no_sync_keeps(world: int, options: dict[str, Any]) -> None:
    """Each rank sees its own sum over its backwards; what it does to the copies changes nothing."""

    def look(rank: int) -> None:
        model, twin = sharded(options)
        assert fc.pending_gradients(model) == {}
        with fc.no_sync(model):
            for step in range(2):
                square(model, data(step, rank)).backward()
                square(twin, data(step, rank)).backward()
                pending = fc.pending_gradients(model)
                assert len(pending) == len(list(model.parameters()))
                for mine, param in zip(model.parameters(), twin.parameters(), strict=True):
                    found = pending[mine]
                    assert found.partial is None and found.reduced is None
                    torch.testing.assert_close(found.unreduced, param.grad)
                    found.unreduced.fill_(torch.nan)
        model.head.zero_grad()
        left = fc.pending_gradients(model)
        assert set(left) == set(model.parameters()) - set(model.head.parameters())
        fc.reduce_grads(model)
        assert fc.pending_gradients(model) == {}
        for param, plain in zip(model.first.parameters(), twin.first.parameters(), strict=True):
            mean = plain.grad.clone()
            dist.all_reduce(mean)
            torch.testing.assert_close(whole(param.grad), mean / world)

    simulate_ranks(look, world)


@pytest.mark.parametrize("options", [options for _, options in OPTIONS[-2:]])
def test_what_waits_for_replicas(options: dict[str, Any]) -> None:
    """The parts that all ranks hold add up to the reduced gradient; later ones wait beside them."""

    def look(rank: int) -> None:
        model, _ = sharded(options)
        fc.set_requires_all_reduce(model, False)
        square(model, data(0, rank)).backward()
        pending = fc.pending_gradients(model)
        assert all(p.unreduced is None and p.reduced is None for p in pending.values())
        totals = torch.stack([p.partial.sum() for p in pending.values()])
        dist.all_reduce(totals)
        with fc.no_sync(model):
            square(model, data(0, rank)).backward()
        both = fc.pending_gradients(model)
        assert all(p.unreduced is not None and p.partial is not None for p in both.values())
        for found in both.values():
            found.partial.fill_(torch.nan)  # a copy
        fc.reduce_grads(model)
        reduced = torch.stack([whole(param.grad).sum() for param in pending])
        torch.testing.assert_close(2 * totals, reduced)

    simulate_ranks(look, 4)


def test_what_waits_for_the_host_and_other_batches() -> None:
    """Offloaded gradients wait reduced, those of ``deterministic=`` as sums of microbatches."""

    def look(rank: int) -> None:
        model, _ = sharded({"offload_policy": Offload(params=True, grads=True)})
        fc.set_is_last_backward(model, False)
        square(model, data(0, rank)).backward()
        kept = {p: found.reduced for p, found in fc.pending_gradients(model).items()}
        for found in fc.pending_gradients(model).values():
            found.reduced.fill_(torch.nan)  # a copy
        fc.reduce_grads(model)
        for param, slice in kept.items():
            torch.testing.assert_close(slice.view(-1), param.grad.to_local().view(-1))
        model, _ = sharded({"deterministic": 8})
        sums: list[Tensor] = []
        for step in range(3):
            square(model, data(step, rank)).backward()
            found = fc.pending_gradients(model)[model.head.bias]
            assert found.unreduced is None
            sums.append(found.partial.clone())
        model.head.weight.grad = None  # which clears its sums alone
        square(model, data(3, rank)).backward()
        assert fc.pending_gradients(model) == {}
        single = sharded({})[0]
        square(single, data(3, rank)).backward()
        last = single.head.weight.grad.full_tensor() / 4  # 2 of the 8 microbatches
        torch.testing.assert_close(model.head.weight.grad.full_tensor(), last)
        single.zero_grad()
        for step in range(3):
            square(single, data(step, rank)).backward()
        expected = single.head.bias.grad.full_tensor() * 2
        total = sums[-1].sum().reshape(1)
        dist.all_reduce(total)
        torch.testing.assert_close(total, expected.sum().reshape(1))

    simulate_ranks(look, 2)


def test_what_waits_is_converted_with_its_module() -> None:
    model, _ = sharded({})
    with fc.no_sync(model):
        square(model, data(0, 0)).backward()
    model.float()
    found = [pending.unreduced for pending in fc.pending_gradients(model).values()]
    assert found and {grad.dtype for grad in found} == {torch.float32}


def test_with_tensor_parallelism_and_real_ranks() -> None:
    """What waits for a DTensor is one, placed as the parameter is; one rank may ask alone."""

    def look(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        plain = seeded(lambda: nn.Linear(4, 4, bias=False))
        model = parallelize_module(copy.deepcopy(plain), mesh["tp"], ColwiseParallel())
        fc.fully_shard(model, mesh=mesh["dp"])
        x = data(0, 0, 2, 4)
        plain(x).sum().backward()
        with fc.no_sync(model):
            model(x).sum().backward()
        if rank == 0:
            assert len(fc.pending_gradients(model)) == 1
        found = fc.pending_gradients(model)[model.weight].unreduced
        assert isinstance(found, DTensor) and found.placements == model.weight.placements
        torch.testing.assert_close(found.full_tensor(), plain.weight.grad)

    run_ranks(look, 2)


def test_a_module_without_units_is_refused() -> None:
    """The error says what was given."""
    with pytest.raises(ValueError, match="pending_gradients"):
        fc.pending_gradients(nn.Linear(2, 2))


@pytest.mark.parametrize("keep", ["sharded", "unsharded", "no_all_reduce"])
def test_what_was_to_wait_anyway_waits_on(keep: Any) -> None:
    """``accumulate`` reduces at its end what it postponed itself, and nothing else."""

    def look(rank: int) -> None:
        model, twin = sharded({"strategy": ShardingStrategy.NO_SHARD})

        def accumulate() -> set[str]:
            with fc.accumulate(model, keep=keep):
                square(model, data(0, rank)).backward()
            found = fc.pending_gradients(model).values()
            assert len(found) == len(list(model.parameters()))
            return {name for one in found for name, part in vars(one).items() if part is not None}

        with fc.no_sync(model):
            assert accumulate() == {"unreduced"}
        model.zero_grad()
        fc.set_requires_all_reduce(model, False)
        assert accumulate() == ({"unreduced"} if keep == "unsharded" else {"partial"})
        fc.set_requires_all_reduce(model, True)
        fc.reduce_grads(model)
        for source in range(2):
            (square(twin, data(0, source)) / 2).backward()
        for mine, plain in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), plain.grad)

    simulate_ranks(look, 2)
