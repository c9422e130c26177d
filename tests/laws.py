"""Checks that hold for the package, and their models; test_mutations runs them on broken ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    MixedPrecision,
    Prefetch,
    ShardingStrategy,
    fully_shard,
    wrap,
)
from fsdp_compose.base.process import here
from fsdp_compose.comm import collectives as comm
from fsdp_compose.comm import waiting
from fsdp_compose.core.guards.moved_parameters import shard_of

from models import (
    WIDTH,
    Block,
    Tower,
    Twin,
    assert_at_rest,
    by_block,
    data,
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
                total[5] += 2 * part * shard_of(bucket).element_size() * (replicas - 1) // replicas
    return tuple(total)  # type: ignore[return-value]


GATHERS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
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
        here.traffic.reset()
        square(model, data(step, rank)).backward()
        optim.step()
        t = here.traffic
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


@contextmanager
def gathers_logged(model: nn.Module, log: list[str]) -> Iterator[None]:
    """Append "gather NAME" whenever a unit's gather is issued."""
    names = {
        b.views.whole_bytes.data_ptr() or id(b.views.whole_bytes): u
        for u in units(model)
        for b in u.buckets
    }
    tensors = {id(b.views.whole_bytes): u.name for u in units(model) for b in u.buckets}
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


def slope_of(model: nn.Module, x: Tensor) -> Tensor:
    """The gradient over the input, differentiable."""
    x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    return slope.square().sum()


def check_two_graphs(rank: int, build: Callable[[], nn.Module] = Tower) -> None:
    """Each is consumed by a backward of its own, in either order; then nothing is gathered."""
    twin = Twin(rank, 2, build)
    for step in range(2):
        first, second = (twin.losses(slope_of, seed) for seed in (step, step + 10))
        for ours, plain in (first, second) if step else (second, first):
            assert any(unit.holds for unit in units(twin.model)), "released before its last reader"
            ours.backward()
            plain.backward()
        assert_at_rest(twin.model)
        twin.step()
    twin.check()


class Choosy(nn.Module):
    """Three layers in one unit, of which a call uses those it is told to, and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.chosen: tuple[int, ...] = (0,)

    def forward(self, x: Tensor) -> Tensor:
        for index in self.chosen:
            x = self.layers[index](x).tanh() + x
        return x


PLANS: list[list[tuple[int, ...]]] = [
    [(0,), (0,)],  # by step: what rank 0 and rank 1 use
    [(0, 1), (0,)],
    [(0,), (0, 1)],
    [(0, 1), (1, 2)],
    [(0,), (0,)],
    [(1,), (0, 2)],
]


def choose(twin: Twin, plan: list[tuple[int, ...]]) -> None:
    for rank, plain in enumerate(twin.plain):
        plain.chosen = plan[rank % len(plan)]
    twin.model.chosen = plan[twin.rank % len(plan)]


def check_steps(twin: Twin, plans: list[list[tuple[int, ...]]] = PLANS) -> None:
    """Every step equals the plain model's, which decays what has a gradient alone."""
    for seed, plan in enumerate(plans):
        choose(twin, plan)
        twin.backward(square, seed)
        assert twin.model.scale.grad is None
        twin.step()
    twin.check()


class Inner(nn.Module):
    def __init__(self, shared: nn.Parameter | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        if shared is not None:
            self.layer.weight = shared

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.layer.weight = self.inner.layer.weight
        self.reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant:
            x = checkpoint(self.inner, x, use_reentrant=True)
        else:
            x = self.inner(x)
        return self.layer(x).tanh()


class Levels(nn.Module):
    """One weight in three units, each inside the next, with another layer between its uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = Middle()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.layer.weight = self.middle.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.middle(self.first(x)))


def inside_out(model: nn.Module, **options: Any) -> nn.Module:
    fully_shard(model.middle.inner, **options)
    fully_shard(model.middle, **options)
    return fully_shard(model, **options)


class Heard(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("fsdp_compose").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def be_quick() -> Heard:
    """Speak up after a quarter of a second."""
    waiting.WARN_AFTER, waiting.POST_AFTER = 0.25, 0.1
    return Heard()


def check_sums(rank: int) -> None:
    """256 + 1 - 256 + 0, in bfloat16 over shards and replicas, is added up in float32."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for grid in (None, mesh):
        mp = MixedPrecision(reduce_dtype=torch.float32)
        model = fully_shard(nn.Linear(8, 1, bias=False).bfloat16(), mesh=grid, mp_policy=mp)
        x = torch.full((1, 8), (256.0, 1.0, -256.0, 0.0)[rank], dtype=torch.bfloat16)
        model(x).sum().backward()
        assert model.weight.grad is not None
        assert (model.weight.grad.full_tensor() == 0.25).all()
