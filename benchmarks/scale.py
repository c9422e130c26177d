"""What sharding real models costs on 8 to 16384 ranks: planned, and held against published tables.

``plan`` works on the meta device and needs no ranks. Sharding itself is timed on torch's fake
process group. Run ``python benchmarks/scale.py``; it needs no GPU and about two minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from common import (
    add_output_options,
    interleave,
    machine,
    publish,
    table,
    without_torch_warnings,
)
from padding import fsdp2_numel, lcm_numel
from shapes import MODELS, Model, Parameters, even, t5_3b
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_compose import MixedPrecision, Offload, ShardingStrategy, fully_shard, wrap
from fsdp_compose.report import Plan, plan

GIB = 2.0**30
GB = 1e9
RANKS = (8, 64, 512, 4096, 16384)
HYBRID = 64  # ranks that a hybrid strategy shards over
TOKENS = 2 * 8192  # of one rank in a step
MIXED = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
UNITS = wrap.by_class({Parameters})


@dataclass(frozen=True)
class Machine:
    """Links and arithmetic of one rank: 8 H100 a node, a 400 Gb/s adapter for each.

    A collective over n ranks takes ``latency * log2(n)`` plus the bytes that a rank receives over
    the bandwidth: inside a node that of NVLink, across nodes that of the node's eight adapters
    together, since the ranks of a node need the same data. A sum over replicas is one for each
    rank of a node, so it has one adapter. Four fifths of each bandwidth are taken to be usable.
    """

    latency: float = 10e-6  # s
    node: int = 8  # ranks
    inside: float = 0.8 * 450e9  # bytes/s
    across: float = 0.8 * 400e9
    adapter: float = 0.8 * 50e9
    flops: float = 262e12
    """6 x active parameters x tokens a second, chosen so that Llama-3 8B takes what torchtitan
    published for 8 ranks (2.84 s): attention and recomputation are in it."""

    def seconds(self, nbytes: float, ranks: int, to_replicas: bool = False) -> float:
        if ranks == 1 or not nbytes:
            return 0.0
        rate = self.inside if ranks <= self.node else self.across
        if to_replicas:
            rate = self.adapter
        return self.latency * math.log2(ranks) + nbytes / rate


H100 = Machine()


@dataclass(frozen=True)
class Strategy:
    name: str
    strategy: ShardingStrategy
    is_hybrid: bool = False

    def world(self, ranks: int) -> int | tuple[int, int]:
        return (ranks // HYBRID, HYBRID) if self.is_hybrid else ranks


STRATEGIES = (
    Strategy("full", ShardingStrategy.FULL_SHARD),
    Strategy("kept", ShardingStrategy.SHARD_GRAD_OP),
    Strategy("hybrid", ShardingStrategy.HYBRID_SHARD, is_hybrid=True),
)


def planned(model: Model, chosen: Strategy, ranks: int) -> tuple[Plan, float]:
    """The plan, and how many seconds it took."""
    module, started = model.build(), time.perf_counter()
    found = plan(
        module,
        world_size=chosen.world(ranks),
        units=UNITS,
        strategy=chosen.strategy,
        mp_policy=MIXED,
        optimizer="adamw",
    )
    return found, time.perf_counter() - started


def step_seconds(model: Model, found: Plan, machine: Machine = H100) -> tuple[float, float]:
    """(step, its arithmetic alone) in seconds.

    Units compute one after another. The links carry one collective at a time, in the order in which
    they are asked for: the gather of the next unit when a unit starts, a reduction when it ends.
    """
    ranks, replicas = found.ranks, found.replicas
    rate = 2 * TOKENS / machine.flops
    forward = [layer.active * rate for layer in model.layers]
    units = [unit for unit in found.units if unit.numel]
    ends = links = 0.0

    def gather(nbytes: int, now: float) -> float:
        nonlocal links
        if nbytes:
            links = max(links, now) + machine.seconds(nbytes, ranks)
        return links if nbytes else now

    for is_backward in (False, True):
        order = range(len(units))[:: -1 if is_backward else 1]
        sent = [(u.backward if is_backward else u.forward).gather_bytes for u in units]
        ready = gather(sent[order[0]], ends)
        for place, index in enumerate(order):
            starts = max(ends, ready)
            ends = starts + forward[index] * (2 if is_backward else 1)
            following = order[place + 1] if place + 1 < len(order) else None
            ready = gather(sent[following], starts) if following is not None else ends
            if is_backward:
                traffic = units[index].backward
                took = machine.seconds(traffic.reduce_bytes, ranks)
                took += machine.seconds(traffic.all_reduce_bytes, replicas, to_replicas=True)
                links = max(links, ends) + took
    return max(ends, links), 3 * sum(forward)


def table_of_plans() -> tuple[str, list[dict[str, object]]]:
    """Every model, number of ranks and strategy."""
    rows, figures = [], []
    for model in MODELS:
        for ranks in RANKS:
            for chosen in STRATEGIES:
                if chosen.is_hybrid and ranks <= HYBRID:
                    continue
                found, took = planned(model, chosen, ranks)
                step, arithmetic = step_seconds(model, found)
                memory, traffic = found.memory, found.step
                figures.append(
                    {
                        "model": model.name,
                        "ranks": ranks,
                        "strategy": chosen.name,
                        "states": memory.persistent + memory.gradients,
                        "peak": memory.total,
                        "padding": sum(unit.padding_bytes for unit in found.units),
                        "messages": traffic.collectives,
                        "received": traffic.total_bytes,
                        "plan_seconds": took,
                        "step_seconds": step,
                        "arithmetic_seconds": arithmetic,
                    }
                )
                rows.append(
                    [
                        model.name,
                        str(ranks),
                        chosen.name,
                        f"{(memory.persistent + memory.gradients) / GIB:.2f}",
                        f"{memory.total / GIB:.2f}",
                        f"{sum(u.padding_bytes for u in found.units) / 1e6:.2f}",
                        f"{traffic.gathers}+{traffic.reduces}+{traffic.all_reduces}",
                        f"{traffic.total_bytes / GIB:.2f}",
                        f"{1e3 * took:.0f}",
                        f"{step:.2f}",
                        f"{100 * arithmetic / step:.0f}",
                    ]
                )
    headers = [
        "model", "ranks", "strategy", "states GiB", "peak GiB", "padding MB", "messages",
        "received GiB", "plan ms", "step s", "busy %",
    ]  # fmt: skip
    return table(headers, rows), figures


def table_of_layouts() -> str:
    """Padding of the same units in other layouts, and the states of a rank with it."""
    rows = []
    for model in MODELS:
        for ranks in RANKS:
            found, _ = planned(model, STRATEGIES[0], ranks)
            ours = sum(bucket.shard_numel * bucket.ranks for bucket in found.buckets)
            others = [
                sum(count(layer.shapes, ranks) for layer in model.layers)
                for count in (fsdp2_numel, lcm_numel)
            ]
            sizes = [ours, *others]
            rows.append(
                [
                    model.name,
                    str(ranks),
                    *(f"{100 * (size / model.numel - 1):.4f}" for size in sizes),
                    *(f"{16 * size / ranks / GIB:.3f}" for size in sizes),
                ]
            )
    names = ("ours", "FSDP2", "Megatron")
    headers = ["model", "ranks", *(f"{n} %" for n in names), *(f"{n} GiB" for n in names)]
    return table(headers, rows)


@dataclass(frozen=True)
class Published:
    """A figure that somebody published, ours for the same, and why they differ."""

    source: str
    what: str
    theirs: float
    ours: float
    unit: str
    why: str

    def row(self) -> list[str]:
        difference = f"{self.ours - self.theirs:+.2f}"
        figures = [f"{self.theirs:.2f}", f"{self.ours:.2f}", difference]
        return [self.source, self.what, *figures, self.unit, self.why]


def states_of(model: Model, strategy: ShardingStrategy, ranks: int, **options: object) -> float:
    """Bytes of a rank: shards, gradients, optimizer state, and weights kept for backward."""
    found = plan(
        model.build(),
        world_size=ranks,
        units=UNITS,
        strategy=strategy,
        mp_policy=MIXED,
        optimizer="adamw",
        **options,  # type: ignore[arg-type]
    )
    memory = found.memory
    kept = sum(unit.full_bytes for unit in found.units if unit.keeps)
    gradients = 0 if memory.host else memory.gradients
    return memory.persistent + gradients + kept


def of_zero_paper() -> Iterator[Published]:
    source = "ZeRO (Rajbhandari et al., 2020), figure 1: 7.5B, 64 ranks"
    model, sharding = even("7.5B", 7_500_000_000, 75), ShardingStrategy
    rows = (
        ("data parallel", 120.0, sharding.NO_SHARD,
         "they count fp16 weights (2 bytes) and gradients (2) beside fp32 master weights and Adam "
         "(12); here fp32 weights (4), gradients (4) and Adam (8), and what backward keeps of the "
         "weights in bf16 (2) besides"),
        ("optimizer sharded", 31.4, sharding.ZERO1,
         "they keep whole fp16 gradients (15 GB); here gradients are sharded too"),
        ("and gradients", 16.6, sharding.SHARD_GRAD_OP,
         "gradient shards are fp32 here, fp16 there: 4 bytes against 2, over 64 ranks"),
        ("and weights", 1.9, sharding.FULL_SHARD,
         "the same 16 bytes; the outermost layer of this model has no weights of its own to keep"),
    )  # fmt: skip
    for what, theirs, strategy, why in rows:
        yield Published(source, what, theirs, states_of(model, strategy, 64) / GB, "GB", why)


def of_deepspeed() -> Iterator[Published]:
    source = "DeepSpeed's memory estimators: t5-3b, 8 GPUs"
    model, sharding = t5_3b(), ShardingStrategy
    largest = max(layer.numel for layer in model.layers)
    ours = states_of(model, sharding.FULL_SHARD, 8) + 2 * largest
    why = "they count 18 bytes a parameter and 4 of the largest layer; here 16, and 2 of it in bf16"
    yield Published(source, "ZeRO-3", 6.10, ours / GIB, "GiB", why)
    ours = states_of(model, sharding.SHARD_GRAD_OP, 8)
    why = "they keep whole fp16 gradients (5.31 GiB); here gradients are sharded"
    yield Published(source, "ZeRO-2", 15.93, ours / GIB, "GiB", why)
    offload = Offload(optimizer=True)
    ours = states_of(model, sharding.SHARD_GRAD_OP, 8, offload_policy=offload)
    why = "the same bf16 weights, and the shards of them that gathers read (1/8 of that)"
    yield Published(source, "ZeRO-2, optimizer on the host", 5.31, ours / GIB, "GiB", why)


def of_torchtitan() -> Iterator[Published]:
    source = "torchtitan, llama3_h100_202412: Llama-3.1 8B, eager"
    model = MODELS[0]
    plans = {ranks: planned(model, STRATEGIES[0], ranks)[0] for ranks in (8, 128)}
    less = (plans[8].memory.total - plans[128].memory.total) / GIB
    why = (
        "82.4 - 67.0 there. Here the shards (16 bytes a parameter, 1/8 less 1/128), which leave "
        "1.6 GiB of theirs unexplained"
    )
    yield Published(source, "memory saved from 8 to 128 ranks", 15.4, less, "GiB", why)
    for ranks, speed in ((8, 5762), (128, 5605)):
        step, _ = step_seconds(model, plans[ranks])
        why = "the rate of arithmetic is chosen to fit this one"
        if ranks > 8:
            why = "here every gather but the first hides behind arithmetic, as on 8 ranks"
        yield Published(source, f"step on {ranks} ranks", TOKENS / speed, step, "s", why)


def of_accumulation() -> Iterator[Published]:
    source = "accumulation of fp32 gradients, 70B, 8 ranks"
    found, _ = planned(MODELS[1], STRATEGIES[0], 8)
    why = "they count 70e9 parameters; the model has 70.55e9"
    whole = sum(bucket.flat_bytes for bucket in found.buckets)
    yield Published(source, 'keep="unsharded"', 260.8, whole / GIB, "GiB", why)
    yield Published(source, 'keep="sharded"', 32.6, found.memory.gradients / GIB, "GiB", why)


def table_of_published() -> tuple[str, list[Published]]:
    found = [*of_zero_paper(), *of_deepspeed(), *of_torchtitan(), *of_accumulation()]
    headers = ["source", "figure", "theirs", "ours", "difference", "unit", "why"]
    return table(headers, [entry.row() for entry in found]), found


# Sharding itself, on the fake process group


class Weights(nn.Module):
    """Small parameters without a forward."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(16, 16)) for _ in range(count))


@contextlib.contextmanager
def fake_world(ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard(model: nn.Module) -> None:
    fully_shard(model, units=wrap.by_class({Weights}))


def shard_by_fsdp2(model: nn.Module) -> None:
    for part in model.children():
        fsdp2(part)
    fsdp2(model)


def timed(work: Callable[[nn.Module], None], units: int, params: int) -> Callable[[], list[float]]:
    def run() -> list[float]:
        model = nn.Sequential(*(Weights(params) for _ in range(units)))
        gc.collect()
        started = time.process_time()
        work(model)
        return [time.process_time() - started]

    return run


def table_of_set_up(rounds: int) -> tuple[str, dict[str, list[float]]]:
    """CPU seconds of ``fully_shard`` on 8 ranks, beside FSDP2's."""
    rows, figures = [], {}
    sizes = ((50, 25), (100, 25), (200, 25), (400, 25), (100, 100), (400, 6), (1600, 6))
    with fake_world(8), without_torch_warnings():
        for work in (shard, shard_by_fsdp2):
            timed(work, 2, 2)()  # imports, and what is cached by class
        for units, params in sizes:
            sides = {
                "ours": timed(shard, units, params),
                "FSDP2": timed(shard_by_fsdp2, units, params),
            }
            found = interleave(sides, rounds)
            ours, theirs = ([s for (s,) in found[name]] for name in ("ours", "FSDP2"))
            ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
            figures[f"{units}x{params}"] = ratios
            rows.append(
                [
                    f"{units} units of {params}",
                    f"{min(ours):.2f}",
                    f"{min(theirs):.2f}",
                    f"{ratios[len(ratios) // 2]:.2f}",
                    f"{ratios[0]:.2f}–{ratios[-1]:.2f}",
                ]
            )
    headers = ["model", "ours s", "FSDP2 s", "FSDP2 ÷ ours", "range"]
    return table(headers, rows), figures


def describe_many_ranks() -> str:
    """What 100 units over 16384 ranks keep in memory, in Python objects and views."""
    with fake_world(16384):
        shard(nn.Sequential(Weights(1)))
        model = nn.Sequential(*(Weights(2) for _ in range(100)))
        tracemalloc.start()
        started = time.process_time()
        shard(model)
        took = time.process_time() - started
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return (
        f"100 units of 2 parameters over 16384 ranks: {took:.2f} s of CPU under tracemalloc, "
        f"{kept / 1e6:.1f} MB of Python objects kept."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of timing fully_shard")
    add_output_options(parser)
    options = parser.parse_args(arguments)
    plans, figures = table_of_plans()
    published, compared = table_of_published()
    set_up, times = table_of_set_up(options.rounds)
    usable = "bf16 compute, fp32 shards, gradients and AdamW"
    sections = [
        machine(),
        f"## Plans\n\n{usable}; each layer a unit; hybrid shards over {HYBRID} ranks. *States* are "
        "shards, gradients and optimizer state of a rank; *peak* has the transient buffers of a "
        "step too, not activations. *Messages* are gathers + reduce-scatters + all-reduces of a "
        f"step, *received* their bytes. *Step* is modelled for {TOKENS} tokens a rank, *busy* the "
        f"part of it that is arithmetic.\n\nThe model of a machine. {' '.join(_links().split())}"
        f"\n\n{plans}",
        "## Layouts\n\nPadding in % of the parameters, and the states of a rank at 16 bytes an "
        "element. FSDP2 pads dim 0 of each parameter to a multiple of the ranks; Megatron-FSDP the "
        "unit to a multiple of ranks x least common multiple of rows (a lower bound: gaps between "
        "parameters are not counted). All three send one gather or reduction a unit.\n\n"
        f"{table_of_layouts()}",
        f"## Published figures\n\n{published}",
        "## Sharding a model\n\nSeconds of CPU on torch's fake process group of 8 ranks, the least "
        f"of {options.rounds} rounds; the ratio is the median over rounds.\n\n{set_up}\n\n"
        f"{describe_many_ranks()}",
    ]
    publish(
        "scale",
        options,
        sections,
        {"plans": figures, "published": [vars(e) for e in compared], "set_up_ratios": times},
    )


def _links() -> str:
    text = (Machine.__doc__ or "").replace("``", "`")
    return f"{text} Latency {H100.latency * 1e6:.0f} µs; arithmetic {H100.flops / 1e12:.0f} TFLOP/s"


if __name__ == "__main__":
    main()
