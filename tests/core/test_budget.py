"""What a step costs, counted: collectives, bytes, copies, gathered units, transient memory."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_compose import (
    MixedPrecision,
    Prefetch,
    ShardingStrategy,
    flat_parameters,
    fully_shard,
    local_parameters,
    wrap,
)
from fsdp_compose.base.group import Transport
from fsdp_compose.base.process import here
from fsdp_compose.base.weak_list import WeakList
from fsdp_compose.comm.transports import PAIRS
from fsdp_compose.core.guards.moved_parameters import shard_of
from fsdp_compose.core.guards.units import get_state
from fsdp_compose.core.state import Unit

from harness import cell, fake_world, run_ranks
from laws import (
    DEPTH,
    GATHERS,
    check_prefetch,
    check_released,
    check_traffic,
    stack,
    steady,
)
from models import (
    Block,
    Ledger,
    Tower,
    by_block,
    data,
    one_unit,
    seeded,
    sgd,
    square,
    units,
)

# Collectives and bytes


@pytest.mark.parametrize("world", [1, 2, 3])
def test_collectives_and_bytes(world: int) -> None:
    def ranks(rank: int) -> None:
        for strategy, (options, gathers) in GATHERS.items():
            with cell(strategy):
                check_traffic(rank, options, gathers, world)

    run_ranks(ranks, world)


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


def test_inference_gathers_each_unit_once() -> None:
    """Inference gathers each unit once and reduces nothing."""

    def ranks(rank: int) -> None:
        for mode in (torch.no_grad, torch.inference_mode):
            model = by_block(seeded(Tower))
            steady(model, rank)
            with mode():
                model(data(0, rank))
                here.traffic.reset()
                model(data(0, rank))
            assert (here.traffic.gathers, here.traffic.reduces) == (DEPTH + 1, 0)

    run_ranks(ranks)


def test_frozen_units_reduce_nothing() -> None:
    def ranks(rank: int) -> None:
        model = seeded(Tower)
        model.blocks[1].requires_grad_(False)
        model.first.requires_grad_(False)
        by_block(model)
        optim = sgd(p for p in model.parameters() if p.requires_grad)
        for step in range(3):
            here.traffic.reset()
            square(model, data(step, rank)).backward()
            optim.step()
            optim.zero_grad()
        assert here.traffic.reduces == DEPTH  # two blocks and the head

    run_ranks(ranks)


def test_set_up_moves_no_parameters() -> None:
    def ranks(rank: int) -> None:
        here.traffic.reset()
        by_block(seeded(Tower))
        assert (
            here.traffic.gathers,
            here.traffic.reduces,
            here.traffic.all_reduces,
        ) == (0, 0, 0)

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


@pytest.mark.parametrize("transport", [None, PAIRS])
@pytest.mark.parametrize("shard", [by_block, one_unit])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_copies(
    strategy: str, shard: Callable[..., nn.Module], transport: Transport | None
) -> None:
    """A gather writes this rank's own part and nothing else; a gradient is copied once.

    On one host a gather also copies this part to where the others read it, and theirs from there.
    """

    def ranks(rank: int) -> None:
        model, plain = seeded(Tower), seeded(Tower)
        shard(model, strategy=ShardingStrategy[strategy], transport=transport)
        optim = steady(model, rank)
        x = data(5, rank)
        with Copies() as copies:
            loss = square(plain, x)
            plain_forward = copies.take()
            loss.backward()
            plain_backward = copies.take()
        gathers = here.traffic.gathers
        with Copies() as copies:
            loss = square(model, x)
            forward = copies.take()
            gathers = here.traffic.gathers - gathers
            loss.backward()
            backward = copies.take()
        buckets = [[shard_of(b) for b in u.buckets] for u in units(model)]
        parts = [
            ("copy_", s.nbytes if transport is None else s.numel()) for row in buckets for s in row
        ]
        times = 3 if transport is None else 1  # for others, of this rank, and of the other rank
        assert gathers == len(parts)
        assert plain_forward == [] and forward == sorted(parts * times)
        again = [] if strategy == "SHARD_GRAD_OP" else parts[len(buckets[0]) :] * times
        wanted = sorted([("_foreach_copy_", p.numel()) for p in model.parameters()] + again)
        assert backward == sorted(wanted + plain_backward), "more than one copy per gradient"
        optim.step()

    run_ranks(ranks)


# How many units are gathered, and when


def test_prefetch_gathers_ahead() -> None:
    run_ranks(check_prefetch, 2, Prefetch(1, 1, "pre"), True)


def test_without_prefetch_units_are_gathered_on_use() -> None:
    """Without prefetch a unit is gathered when it runs."""
    run_ranks(check_prefetch, 2, Prefetch(0, 0, None), False)


def gathered_bytes(model: nn.Module) -> int:
    return sum(b.full.untyped_storage().nbytes() for u in units(model) for b in u.buckets)


def flat_bytes(model: nn.Module) -> int:
    buffers = [b.grads for u in units(model) for b in u.buckets if b.grads is not None]
    return sum(g.flat.untyped_storage().nbytes() for g in buffers)


def largest(model: nn.Module) -> Unit:
    return max(units(model), key=lambda u: sum(b.views.nbytes for b in u.buckets))


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
            aP = sum(b.views.nbytes for b in largest(model).buckets)
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
        shards = [shard_of(b) for u in units(model) for b in u.buckets]
        with Ledger(x, *shards) as ledger:
            square(model, x).backward()
        P = max(b.layout.numel for u in units(model) for b in u.buckets)
        received = 8 * P * (world - 1) // world  # contributions of other ranks, on gloo
        sharded = sum(s.numel() for s in shards) * 8
        assert ledger.peak <= activations + sharded + 2 * 8 * P + 8 * P + 8 * P + received
        total = sum(p.numel() for p in plain.parameters()) * 8
        assert ledger.peak < activations + total, "no less than the whole model"

    run_ranks(ranks, world)


def test_released_between_steps() -> None:
    run_ranks(check_released, 2)


def test_padding_is_what_the_layout_promises() -> None:
    def ranks(rank: int, world: int) -> None:
        model = by_block(seeded(Tower))
        for unit in units(model):
            for bucket in unit.buckets:
                used = sum(e.spec.numel for e in bucket.entries) * shard_of(bucket).element_size()
                held = bucket.layout.numel * shard_of(bucket).element_size()
                assert shard_of(bucket).numel() * world == bucket.layout.numel
                assert shard_of(bucket).nbytes % 16 == 0
                assert 0 <= held - used <= 16 * world

    for world in (1, 2, 3, 4):
        run_ranks(ranks, world, world)


class Many(nn.Module):
    """``count`` parameters, read by one operator."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for index in range(count):
            self.register_parameter(f"p{index}", nn.Parameter(torch.ones(4)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([*self._parameters.values()]).mul(x).sum(0)


def count_bytecodes(step: Callable[[], None], model: nn.Module) -> Counter[str]:
    """What the fourth ``step`` executes of this package, by function."""
    counts: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if "/fsdp_compose/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        counts[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += event == "opcode"
        return trace

    sys._getframe().f_trace_opcodes = True  # before settrace, for Python 3.12
    for index in range(4):
        sys.settrace(trace if index == 3 else None)
        step()
        sys.settrace(None)
        model.zero_grad()
    return counts


def list_growing(
    make_step: Callable[[int], tuple[Callable[[], None], nn.Module]],
) -> dict[str, int]:
    """What executes more of this package with 40 parameters than with 4, by function."""
    few, many = (count_bytecodes(*make_step(count)) for count in (4, 40))
    assert few
    return {name: n - few[name] for name, n in many.items() if n - few[name] >= 36}


def test_no_python_for_each_parameter() -> None:
    """In a steady state a unit of 40 parameters executes the bytecodes of one of 4."""

    def make_step(count: int) -> tuple[Callable[[], None], nn.Module]:
        many = nn.Sequential(Many(count), Many(count))
        model = fully_shard(many, units=wrap.by_class({Many}))

        return lambda: model(torch.ones(4)).sum().backward(), model

    with fake_world(2):
        assert not list_growing(make_step)


@pytest.mark.parametrize("is_sharded", [True, False])
def test_no_python_for_parameters_elsewhere(is_sharded: bool) -> None:
    """The guard's neither, where an optimizer has no parameter of another model's ranks."""

    def make_step(count: int) -> tuple[Callable[[], None], nn.Module]:
        model = Many(count)
        if is_sharded:
            fully_shard(model)
        optimizer = sgd(model.parameters())

        def step() -> None:
            model(torch.ones(4)).sum().backward()
            optimizer.step()

        return step, model

    def ranks(rank: int) -> None:
        other = fully_shard(Many(4), mesh=DeviceMesh.from_group(dist.new_group([0, 1]), "cpu"))
        other(torch.ones(4)).sum().backward()
        growing = list_growing(make_step)
        assert not [name for name in growing if "step_guard" in name or "mirror" in name]

    run_ranks(ranks, 2)


def shard_blocks(units: int) -> nn.Module:
    blocks = nn.Sequential(*(Block(8) for _ in range(units)))
    return fully_shard(blocks, units=wrap.by_class({Block}))


def list_calls(call: Callable[[], object]) -> Counter[str]:
    """Functions of this package that ``call`` calls, comprehensions aside."""
    calls: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "call" and "/fsdp_compose/" in code.co_filename and code.co_name[0] != "<":
            calls[code.co_name] += 1

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls


def count_calls(units: int) -> int:
    """Functions that a forward and backward of ``units`` units call in a steady state."""
    model = shard_blocks(units)

    def step() -> None:
        model(torch.ones(1, 8)).sum().backward()

    for _ in range(4):
        step()
        model.zero_grad()
    return list_calls(step).total()


def test_calls_of_a_unit_and_step() -> None:
    """In a steady state a unit costs a step so many calls of functions, which take most time."""
    with fake_world(2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(here, "engines", {})  # without what static buffers of other tests left
        assert (count_calls(12) - count_calls(4)) / 8 <= 135


WAYS: dict[str, Callable[[nn.Module], list[nn.Parameter]]] = {
    "sharded": lambda model: list(model.parameters()),
    "flat": flat_parameters,
    "local": local_parameters,
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_no_call_for_a_unit_in_a_step(way: str, fused: bool) -> None:
    """A steady step of an optimizer calls as many functions for 12 units as for 4, few."""

    def count(units: int) -> Counter[str]:
        model = shard_blocks(units)
        settings = {"fused": True} if fused else {"foreach": True}
        optimizer = torch.optim.AdamW(WAYS[way](model), lr=1e-6, **settings)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
        return list_calls(optimizer.step)

    with fake_world(2):
        few, many = count(4), count(12)
    assert many == few
    assert many.total() <= (90 if way == "sharded" else 70)


class GroupCalls(TorchDispatchMode):
    """Counts what is asked of process groups, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("buckets", [1, 2])
def test_one_call_gathers_a_unit(buckets: int) -> None:
    """Also of two buckets: one call in forward and one in backward for each of 3 units."""
    with fake_world(2):
        model = nn.Sequential(*(Block(8) for _ in range(3)))
        for block in model if buckets == 2 else ():
            block.norm.requires_grad_(False)
        fully_shard(model, units=wrap.by_class({Block}), reshard_after_forward=True)
        assert [len(unit.buckets) for unit in units(model)] == [0] + [buckets] * 3
        for _ in range(2):
            with GroupCalls() as calls:
                model(torch.ones(1, 8)).sum().backward()
    name = "_allgather_base_" if buckets == 1 else "allgather_into_tensor_coalesced_"
    gathers = {key: count for key, count in calls.found.items() if "gather" in key}
    assert gathers == {name: 6}


def test_autograd_sees_one_leaf_per_unit() -> None:
    with fake_world(2):
        model = fully_shard(Many(40))
        out, unit = model(torch.ones(4)), get_state(model).unit
        (node,) = unit.graphs.nodes
        leaves = [leaf.variable for leaf, _ in node.next_functions if leaf is not None]
        assert len(leaves) == 1 and leaves[0] is unit.links.anchor
        out.sum().backward()
        assert unit.links.anchor.grad is None and model.p0.grad is not None


def test_nodes_that_are_gone_are_forgotten() -> None:
    """However many graphs a unit was part of, it remembers those that are kept alone."""
    nodes, kept = WeakList(), [nn.Identity() for _ in range(20)]
    for node in kept:
        nodes.add(node)
        for _ in range(20):
            nodes.add(nn.Identity())
    assert list(nodes) == kept and len(vars(nodes)["_refs"]) < 60
