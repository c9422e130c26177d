"""What a step costs, counted: collectives, bytes, copies, gathered units, transient memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_compose import MixedPrecision, Prefetch, ShardingStrategy, fully_shard, wrap
from fsdp_compose.comm import collectives as comm
from fsdp_compose.core.state import Unit

from harness import run_ranks
from models import (
    WIDTH,
    Block,
    Ledger,
    Tower,
    assert_at_rest,
    by_block,
    data,
    one_unit,
    seeded,
    sgd,
    square,
    units,
)

DEPTH = 3


def stack(depth: int = DEPTH, width: int = WIDTH) -> nn.Module:
    """Blocks and nothing around them that has parameters."""
    return nn.Sequential(*(Block(width) for _ in range(depth)))


def steady(model: nn.Module, rank: int, steps: int = 2) -> torch.optim.Optimizer:
    """Train until orders are recorded and ranks no longer compare each collective."""
    optim = sgd(model.parameters())
    for step in range(steps):
        square(model, data(step, rank)).backward()
        optim.step()
        optim.zero_grad()
    return optim


# Collectives and bytes


def expected(
    model: nn.Module, gathers: dict[str, int], a: int, r: int
) -> tuple[int, int, int, int, int, int]:
    """(gathers, bytes, reduces, bytes, all-reduces, bytes) from the layouts, given how often each
    unit is gathered in a step; ``a`` and ``r`` are bytes per element."""
    total = [0] * 6
    for unit in units(model):
        times = gathers.get(unit.name, gathers[""])
        for bucket in unit.buckets:
            n, shards, replicas = (
                bucket.layout.numel,
                bucket.mesh.shard.size,
                bucket.mesh.replicate.size,
            )
            part = n // shards
            if shards > 1:
                total[0] += times
                total[1] += times * (n - part) * a
                total[2] += 1
                total[3] += (n - part) * r
            if replicas > 1:
                total[4] += 1
                total[5] += 2 * part * bucket.shard.element_size() * (replicas - 1) // replicas
    return tuple(total)  # type: ignore[return-value]


STRATEGIES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "default": ({}, {"": 2, "Tower": 1}),
    "FULL_SHARD": ({"strategy": ShardingStrategy.FULL_SHARD}, {"": 2, "Tower": 1}),
    "reshard": ({"reshard_after_forward": True}, {"": 2}),
    "keep": ({"reshard_after_forward": False}, {"": 1}),
    "SHARD_GRAD_OP": ({"strategy": ShardingStrategy.SHARD_GRAD_OP}, {"": 1}),
    "NO_SHARD": ({"strategy": ShardingStrategy.NO_SHARD}, {"": 0}),
}


def check_traffic(rank: int, options: dict[str, Any], gathers: dict[str, int], world: int) -> None:
    """One training step moves what the formula says, and so does the next."""
    model = seeded(Tower)
    by_block(model, **options)
    optim = steady(model, rank)
    for step in range(2):
        comm.traffic.reset()
        square(model, data(step, rank)).backward()
        optim.step()
        t = comm.traffic
        found = (
            t.gathers,
            t.gather_bytes,
            t.reduces,
            t.reduce_bytes,
            t.all_reduces,
            t.all_reduce_bytes,
        )
        assert found == expected(model, gathers, 8, 8)
        optim.zero_grad()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_collectives_and_bytes(strategy: str, world: int) -> None:
    run_ranks(check_traffic, world, *STRATEGIES[strategy], world)


@pytest.mark.parametrize(
    ("strategy", "gathers"),
    [("HYBRID_SHARD", {"": 2, "Tower": 1}), ("HYBRID_SHARD_ZERO2", {"": 1})],
)
@pytest.mark.parametrize("shape", [(2, 2), (2, 1), (1, 2)])
def test_collectives_and_bytes_on_two_axes(
    strategy: str, gathers: dict[str, int], shape: tuple[int, int]
) -> None:
    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        options = {"mesh": mesh, "strategy": ShardingStrategy[strategy]}
        check_traffic(rank, options, gathers, 4)

    run_ranks(ranks, shape[0] * shape[1])


def test_inference_gathers_each_unit_once_and_reduces_nothing() -> None:
    def ranks(rank: int) -> None:
        for mode in (torch.no_grad, torch.inference_mode):
            model = by_block(seeded(Tower))
            steady(model, rank)
            with mode():
                model(data(0, rank))
                comm.traffic.reset()
                model(data(0, rank))
            assert (comm.traffic.gathers, comm.traffic.reduces) == (DEPTH + 1, 0)

    run_ranks(ranks)


def test_frozen_units_reduce_nothing() -> None:
    def ranks(rank: int) -> None:
        model = seeded(Tower)
        model.blocks[1].requires_grad_(False)
        model.first.requires_grad_(False)
        by_block(model)
        optim = sgd(p for p in model.parameters() if p.requires_grad)
        for step in range(3):
            comm.traffic.reset()
            square(model, data(step, rank)).backward()
            optim.step()
            optim.zero_grad()
        assert comm.traffic.reduces == DEPTH  # two blocks and the head

    run_ranks(ranks)


def test_set_up_moves_no_parameters() -> None:
    def ranks(rank: int) -> None:
        comm.traffic.reset()
        by_block(seeded(Tower))
        assert (comm.traffic.gathers, comm.traffic.reduces, comm.traffic.all_reduces) == (0, 0, 0)

    run_ranks(ranks)


# Copies


class Copies(TorchDispatchMode):
    """Every tensor that an operator copies, as (operator, elements)."""

    NAMES = ("copy_", "clone", "_to_copy", "cat", "stack", "split_with_sizes_copy", "contiguous",
             "_foreach_copy_", "_foreach_copy", "new_empty_strided")  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in self.NAMES and name != "new_empty_strided":
            source = args[1] if name in ("copy_", "_foreach_copy_") else args[0]
            sources = [t for t in tree_leaves(source) if isinstance(t, Tensor)]
            self.found += [(name, t.numel()) for t in sources]
        return out

    def take(self) -> list[tuple[str, int]]:
        found, self.found = sorted(self.found), []
        return found


@pytest.mark.parametrize("shard", [by_block, one_unit])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_copies(strategy: str, shard: Callable[..., nn.Module]) -> None:
    """A gather writes this rank's own part and nothing else; a gradient is copied once."""

    def ranks(rank: int) -> None:
        model, plain = seeded(Tower), seeded(Tower)
        shard(model, strategy=ShardingStrategy[strategy])
        optim = steady(model, rank)
        x = data(5, rank)
        with Copies() as copies:
            loss = square(plain, x)
            plain_forward = copies.take()
            loss.backward()
            plain_backward = copies.take()
        gathers = comm.traffic.gathers
        with Copies() as copies:
            loss = square(model, x)
            forward = copies.take()
            gathers = comm.traffic.gathers - gathers
            loss.backward()
            backward = copies.take()
        own = sorted(("copy_", b.shard.numel()) for u in units(model) for b in u.buckets)
        assert gathers == len(own)
        assert plain_forward == [] and forward == own
        again = [] if strategy == "SHARD_GRAD_OP" else [
            ("copy_", b.shard.numel()) for u in units(model)[1:] for b in u.buckets
        ]  # fmt: skip
        wanted = sorted([("_foreach_copy_", p.numel()) for p in model.parameters()] + again)
        assert backward == sorted(wanted + plain_backward), "more than one copy per gradient"
        optim.step()

    run_ranks(ranks)


# How many units are gathered, and when


@contextmanager
def gathers_logged(model: nn.Module, log: list[str]) -> Iterator[None]:
    """Append "gather NAME" whenever a unit's gather is issued."""
    names = {
        b.whole_bytes.data_ptr() or id(b.whole_bytes): u for u in units(model) for b in u.buckets
    }
    tensors = {id(b.whole_bytes): u.name for u in units(model) for b in u.buckets}
    assert names
    original = comm.gather_parts

    def logged(whole: Tensor, *args: Any, **kwargs: Any) -> Any:
        log.append(f"gather {tensors.get(id(whole), '?')}")
        return original(whole, *args, **kwargs)

    comm.gather_parts = logged
    try:
        yield
    finally:
        comm.gather_parts = original


def watch(model: nn.Module, log: list[str]) -> None:
    """Append "forward NAME" and "backward NAME" as blocks compute."""
    for name, module in model.named_modules():
        if isinstance(module, Block):
            module.norm.register_forward_pre_hook(lambda m, a, n=name: log.append(f"forward {n}"))
            module.up.register_full_backward_hook(
                lambda m, i, o, n=name: log.append(f"backward {n}")
            )


def check_prefetch(rank: int, prefetch: Prefetch, ahead: bool) -> None:
    """With prefetch the next unit's gather is issued before the present one computes."""
    model = seeded(lambda: stack(4))
    log: list[str] = []
    watch(model, log)
    fully_shard(model, units=wrap.by_class({Block}), prefetch=prefetch, reshard_after_forward=True)
    steady(model, rank)
    log.clear()
    with gathers_logged(model, log):
        loss = square(model, data(0, rank))
        forward = log[:]
        log.clear()
        loss.backward()
        backward = log[:]
    for i in range(3):
        early = forward.index(f"gather {i + 1}") < forward.index(f"forward {i}")
        assert early == ahead, forward
    for i in range(1, 3):
        early = backward.index(f"gather {i}") < backward.index(f"backward {i + 1}")
        assert early == ahead, backward
    assert sorted(forward) == sorted(
        [*(f"gather {i}" for i in range(4)), *(f"forward {i}" for i in range(4))]
    )
    assert backward.count("gather 3") <= 1
    assert_at_rest(model)


def test_prefetch_gathers_ahead() -> None:
    run_ranks(check_prefetch, 2, Prefetch(1, 1, "pre"), True)


def test_without_prefetch_a_unit_is_gathered_when_it_runs() -> None:
    run_ranks(check_prefetch, 2, Prefetch(0, 0, None), False)


def gathered_bytes(model: nn.Module) -> int:
    return sum(b.full.untyped_storage().nbytes() for u in units(model) for b in u.buckets)


def flat_bytes(model: nn.Module) -> int:
    buffers = [b.grads for u in units(model) for b in u.buckets if b.grads is not None]
    return sum(g.flat.untyped_storage().nbytes() for g in buffers)


def largest(model: nn.Module) -> Unit:
    return max(units(model), key=lambda u: sum(b.full_nbytes for b in u.buckets))


class Watch(TorchDispatchMode):
    """After every operator: bytes gathered, and bytes gathered plus packed gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.gathered, self.both, self.packed = model, 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        full, flat = gathered_bytes(self.model), flat_bytes(self.model)
        self.gathered, self.packed = max(self.gathered, full), max(self.packed, flat)
        self.both = max(self.both, full + flat)
        return out


@pytest.mark.parametrize("prefetch", [Prefetch(), Prefetch(0, 0, None), Prefetch(1, 1, "post")])
@pytest.mark.parametrize("mixed", [False, True])
def test_at_most_two_units_are_gathered(prefetch: Prefetch, mixed: bool) -> None:
    def ranks(rank: int) -> None:
        model = stack(5).double()
        mp = MixedPrecision(torch.float32, torch.float64) if mixed else MixedPrecision()
        fully_shard(
            model,
            units=wrap.by_class({Block}),
            prefetch=prefetch,
            reshard_after_forward=True,
            mp_policy=mp,
        )
        optim = sgd(model.parameters())
        peaks = []
        for step in range(4):
            assert gathered_bytes(model) == flat_bytes(model) == 0
            with Watch(model) as seen:
                square(model, data(step, rank)).backward()
            assert gathered_bytes(model) == flat_bytes(model) == 0
            optim.step()
            optim.zero_grad()
            aP = sum(b.full_nbytes for b in largest(model).buckets)
            rP = sum(b.layout.numel * 8 for b in largest(model).buckets)
            depth = 2 if prefetch.forward else 1
            assert seen.gathered <= depth * aP, "more than two units are gathered"
            assert seen.packed <= rP, "more than one flat gradient buffer"
            assert seen.both <= 2 * aP + rP
            peaks.append((seen.gathered, seen.both))
        assert peaks[1:] == [peaks[1]] * 3, "memory is not the same every step"

    run_ranks(ranks)


@pytest.mark.parametrize("world", [2, 4])
def test_transient_peak(world: int) -> None:
    """Peak of a step ≤ activations + sharded gradients + 2aP + gradients of a unit + rP."""

    def ranks(rank: int) -> None:
        width = 24
        model, plain = seeded(lambda: stack(6, width)), seeded(lambda: stack(6, width))
        for param in plain.parameters():  # plain gradients leave as soon as they arrive
            param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        fully_shard(model, units=wrap.by_class({Block}), reshard_after_forward=True)
        optim = sgd(model.parameters())
        x = data(0, rank, 2, width)
        for _ in range(3):
            square(model, x).backward()
            optim.step()
            optim.zero_grad()
        with Ledger(x, *plain.parameters()) as ledger:
            square(plain, x).backward()
        activations = ledger.peak
        shards = [b.shard for u in units(model) for b in u.buckets]
        with Ledger(x, *shards) as ledger:
            square(model, x).backward()
        P = max(b.layout.numel for u in units(model) for b in u.buckets)
        received = 8 * P * (world - 1) // world  # contributions of other ranks, on gloo
        sharded = sum(s.numel() for s in shards) * 8
        assert ledger.peak <= activations + sharded + 2 * 8 * P + 8 * P + 8 * P + received
        total = sum(p.numel() for p in plain.parameters()) * 8
        assert ledger.peak < activations + total, "no less than the whole model"

    run_ranks(ranks, world)


def check_released(rank: int) -> None:
    """Nothing stays gathered between steps, whatever the step did."""
    model = by_block(seeded(Tower))
    optim = sgd(model.parameters())
    for step in range(3):
        square(model, data(step, rank)).backward()
        assert_at_rest(model)
        optim.step()
        optim.zero_grad(set_to_none=bool(step % 2))
        with torch.no_grad():
            model(data(step, rank))
        assert_at_rest(model)


def test_released_between_steps() -> None:
    run_ranks(check_released, 2)


def test_padding_is_what_the_layout_promises() -> None:
    def ranks(rank: int, world: int) -> None:
        model = by_block(seeded(Tower))
        for unit in units(model):
            for bucket in unit.buckets:
                used = sum(e.spec.numel for e in bucket.entries) * bucket.shard.element_size()
                held = bucket.layout.numel * bucket.shard.element_size()
                assert bucket.shard.numel() * world == bucket.layout.numel
                assert bucket.shard.nbytes % 16 == 0
                assert 0 <= held - used <= 16 * world

    for world in (1, 2, 3, 4):
        run_ranks(ranks, world, world)
