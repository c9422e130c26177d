"""A training step on one GPU: time, idle time, kernels, copies and memory beside FSDP1 and FSDP2.

Llama-like models in bfloat16 with float32 shards. A world of one runs over NCCL; larger worlds run
as one of their ranks on torch's fake process group, whose collectives return at once: memory, host
time and kernels are those of a rank, communication takes no time, gathered values mean nothing, and
most copies are that group's. In the world of one the losses of all sides are compared, and a model
without sharding runs beside them: what a side takes longer is what its sharding adds.

Each round builds each side anew, in an order that rotates, so that one side's memory is never
counted with another's and what slows the machine touches all alike.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from common import Spread
from llama import SIZES, Block, Llama
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_compose

TOLERANCE = 2e-2  # of the losses of a world of one, in bfloat16
COMMUNICATION = "nccl"  # begins the name of every kernel of a collective


def fsdp1(model: Llama, mesh: DeviceMesh) -> nn.Module:
    device = torch.device(mesh.device_type, 0) if mesh.device_type == "cuda" else None
    return torch_fsdp.FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=device or torch.device("cpu"),
        mixed_precision=torch_fsdp.MixedPrecision(torch.bfloat16, torch.float32),
    )


def fsdp2(model: Llama, mesh: DeviceMesh, *, reshard_after_forward: bool | None) -> nn.Module:
    precision = torch_fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*model.blocks, model):
        torch_fsdp.fully_shard(
            module, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard_after_forward
        )
    return model


def fsdp2_split(model: Llama, mesh: DeviceMesh) -> nn.Module:
    """The embedding and the head are units of their own; the head stays for its backward."""
    precision = torch_fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    ends: list[nn.Module] = [model.norm, model.head]
    torch_fsdp.fully_shard(model.embedding, mesh=mesh, mp_policy=precision)
    torch_fsdp.fully_shard(ends, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    return fsdp2(model, mesh, reshard_after_forward=None)


def ours_split(model: Llama, mesh: DeviceMesh) -> nn.Module:
    """As ``fsdp2_split``."""
    precision = fsdp_compose.MixedPrecision(torch.bfloat16, torch.float32)
    ends: list[nn.Module] = [model.norm, model.head]
    fsdp_compose.fully_shard(model.embedding, mesh=mesh, mp_policy=precision)
    fsdp_compose.fully_shard(ends, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    return ours(model, mesh, strategy="FULL_SHARD")


def ours(
    model: Llama, mesh: DeviceMesh, *, strategy: str, static_buffers: bool = False
) -> nn.Module:
    precision = fsdp_compose.MixedPrecision(torch.bfloat16, torch.float32)
    for module in (*model.blocks, model):
        fsdp_compose.fully_shard(
            module,
            mesh=mesh,
            mp_policy=precision,
            strategy=fsdp_compose.ShardingStrategy[strategy],
            static_buffers=static_buffers,
        )
    return model


def plain(model: Llama, mesh: DeviceMesh) -> nn.Module:
    return model


SIDES: dict[str, Callable[[Llama, DeviceMesh], nn.Module]] = {
    "plain": plain,
    "FSDP1": fsdp1,
    "FSDP2": partial(fsdp2, reshard_after_forward=None),
    "FSDP2 split": fsdp2_split,
    "FSDP2 kept": partial(fsdp2, reshard_after_forward=False),
    "ours": partial(ours, strategy="FULL_SHARD"),
    "ours split": ours_split,
    "ours kept": partial(ours, strategy="SHARD_GRAD_OP"),
    "ours static": partial(ours, strategy="FULL_SHARD", static_buffers=True),
    "ours captured": partial(ours, strategy="FULL_SHARD", static_buffers=True),
}
PLAIN = "plain"
"""The model of one process, in bfloat16 with float32 copies that the optimizer steps."""
CAPTURED = "ours captured"
"""The side whose forward and backward are replayed as one CUDA graph."""


class MasterWeights:
    """AdamW over float32 copies of a model's weights, of which the model computes in bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        self.copies = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        self.params = list(model.to(torch.bfloat16).parameters())
        self.inner = adamw(self.copies)

    @torch.no_grad()
    def step(self) -> None:
        grads = [torch.empty_like(copy) for copy in self.copies]
        torch._foreach_copy_(grads, [p.grad for p in self.params if p.grad is not None])
        for copy, grad in zip(self.copies, grads, strict=True):
            copy.grad = grad
        self.inner.step()
        torch._foreach_copy_(self.params, self.copies)

    def zero_grad(self) -> None:
        self.inner.zero_grad()
        for param in self.params:
            param.grad = None


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=1e-5, fused=True)


Stepper = torch.optim.Optimizer | MasterWeights


@dataclass(frozen=True)
class Figures:
    """What one side took in one round; times in ms, memory in bytes, the rest per step."""

    step: float
    host: float  # until the step was handed to the device
    losses: list[Tensor]
    held: int | None = None  # between steps
    peak: int | None = None  # the most during a step
    asked: int | None = None  # that peak without what the allocator adds to each tensor


@dataclass(frozen=True)
class Profile:
    """What the device did in one step; times in ms."""

    kernels: int
    copies: int
    idle: float  # part of the step's time on the device in which no kernel and no copy ran
    exposed: float  # part of it in which nothing but collectives ran


def build(size: str, side: str, mesh: DeviceMesh) -> tuple[nn.Module, Stepper]:
    torch.manual_seed(0)
    with torch.device(mesh.device_type):
        model = Llama(SIZES[size])
    sharded = SIDES[side](model, mesh)
    return sharded, MasterWeights(model) if side == PLAIN else adamw(sharded.parameters())


def train_step(model: nn.Module, optimizer: Stepper, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def capture(model: nn.Module, optimizer: Stepper, tokens: Tensor) -> Any:
    """A training step whose forward and backward are captured here, and replayed in each call.

    The graph writes its own gradients anew each time, so they are not cleared between steps.
    """
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss: Tensor = model(tokens)
        loss.backward()

    def step() -> Tensor:
        graph.replay()
        optimizer.step()
        return loss.detach().clone()

    return step


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(
    size: str, side: str, mesh: DeviceMesh, options: argparse.Namespace, *, is_profiled: bool
) -> tuple[Figures, Profile | None]:
    """Build a side, warm it up, time its steps, follow the memory of one and maybe profile one.

    Memory is counted from what was allocated before, which an earlier side may have left behind:
    FSDP1 in a world of one does. What a graph was captured with stays its own between replays, so
    the captured side's peak is the higher of the capture's and the step's.
    """
    device = torch.device(mesh.device_type)
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch, options.seq + 1)
    tokens = torch.randint(SIZES[size].vocabulary, shape, generator=generator).to(device)
    earlier = MemoryUse.read() if device.type == "cuda" else None
    model, optimizer = build(size, side, mesh)
    step = partial(train_step, model, optimizer, tokens)
    losses = [step() for _ in range(options.warmup)]
    wait(device.type)
    if side == CAPTURED and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step = capture(model, optimizer, tokens)
        wait(device.type)
        captured = MemoryUse.read()
    else:
        captured = None
    started, host = time.perf_counter(), 0.0
    for _ in range(options.steps):
        before = time.perf_counter()
        losses.append(step())
        host += time.perf_counter() - before
    wait(device.type)
    whole = time.perf_counter() - started
    figures = Figures(whole * 1e3 / options.steps, host * 1e3 / options.steps, losses)
    if earlier is None:
        return figures, None
    torch.cuda.reset_peak_memory_stats()
    step()
    wait(device.type)
    uses = [MemoryUse.read()] if captured is None else [MemoryUse.read(), captured]
    figures = replace(
        figures,
        held=uses[0].now - earlier.now,
        peak=max(use.peak for use in uses) - earlier.now,
        asked=max(use.asked_peak for use in uses) - earlier.asked,
    )
    return figures, profile_step(step) if is_profiled else None


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that torch's allocator gave out on the GPU, and those that it was asked for."""

    now: int
    peak: int
    asked: int
    asked_peak: int

    @classmethod
    def read(cls) -> MemoryUse:
        found = torch.cuda.memory_stats()
        given = found["allocated_bytes.all.current"], found["allocated_bytes.all.peak"]
        asked = found["requested_bytes.all.current"], found["requested_bytes.all.peak"]
        return cls(*given, *asked)


def profile_step(step: Callable[[], object]) -> Profile:
    """Follow one step by torch's profiler, which slows the host down, not the device."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(json.loads(path.read_text())["traceEvents"])


def read_trace(events: list[dict[str, Any]]) -> Profile:
    """Count what ran on the device, and how long nothing, or nothing but collectives, did."""
    kernels = [e for e in events if e.get("cat") == "kernel"]
    copies = [e for e in events if e.get("cat") in ("gpu_memcpy", "gpu_memset")]
    computes = [e for e in kernels if not e["name"].startswith(COMMUNICATION)] + copies
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in kernels + copies]
    whole = max((end for _, end in spans), default=0.0) - min((s for s, _ in spans), default=0.0)
    busy = covered(spans)
    computing = covered([(e["ts"], e["ts"] + e["dur"]) for e in computes])
    part = 1 / whole if whole else 0.0
    return Profile(len(kernels), len(copies), 1 - busy * part, (busy - computing) * part)


def covered(spans: list[tuple[float, float]]) -> float:
    """How much of the line the spans cover together."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


@dataclass
class Cell:
    """A model in a world: the figures of every side, by round."""

    size: str
    world: int
    figures: dict[str, list[Figures]]
    profiles: dict[str, Profile | None]
    failures: list[str]

    def rows(self) -> list[list[str]]:
        medians = {name: Spread.of([f.step for f in all_]) for name, all_ in self.figures.items()}
        return [
            [f"{self.size}, {self.world}, {name}", *self._cells(name, medians)]
            for name in self.figures
        ]

    def _cells(self, name: str, medians: dict[str, Spread]) -> list[str]:
        step, theirs, local = medians[name], medians.get("FSDP2"), medians.get(PLAIN)
        ratio = f"{theirs.median / step.median:.3f}" if theirs else ""
        adds = f"{step.median - local.median:.2f}" if local else ""
        host = Spread.of([f.host for f in self.figures[name]])
        last = self.figures[name][-1]
        row = [
            *step.cells(2),
            ratio,
            adds,
            *host.cells(2)[:1],
            gigabytes(last.held),
            gigabytes(last.peak),
            gigabytes(last.asked),
        ]
        profile = self.profiles[name]
        if profile is None:
            return [*row, "", "", "", ""]
        row += [f"{profile.idle:.1%}", f"{profile.exposed:.1%}"]
        return [*row, str(profile.kernels), str(profile.copies)]

    def strays(self) -> list[str]:
        """Sides of a world of one whose losses leave the first side's."""
        if self.world > 1 or not self.figures:
            return []
        wanted = next(iter(self.figures.values()))[0].losses
        found = {}
        for name, rounds in self.figures.items():
            pairs = zip(rounds[0].losses, wanted, strict=True)
            found[name] = max(float(abs(a - b)) for a, b in pairs)
        return [
            f"{self.size}: losses of {name} leave the first side's by {gap:.1e}"
            for name, gap in found.items()
            if not gap <= TOLERANCE
        ]


def gigabytes(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e9:.3f}"


def run_cell(size: str, world: int, mesh: DeviceMesh, options: argparse.Namespace) -> Cell:
    """All rounds of all sides; a side that cannot run is named with its reason."""
    cell = Cell(size, world, {}, {}, [])
    broken: set[str] = set()
    for turn in range(options.rounds):
        for name in common.rotated(options.sides, turn):
            if name in broken or (name == PLAIN and world > 1):
                continue
            try:
                figures, profile = measure(size, name, mesh, options, is_profiled=turn == 0)
            except Exception as error:
                broken.add(name)
                while error.__context__ is not None:  # a failed capture says why there alone
                    error = error.__context__
                reason = next(iter(str(error).splitlines()), "")
                cell.failures.append(
                    f"- {size}, {world} ranks: {name} cannot run: {type(error).__name__}: {reason}"
                )
                cell.figures.pop(name, None)
            else:
                cell.figures.setdefault(name, []).append(figures)
                cell.profiles.setdefault(name, profile)
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()
    ordered = {name: cell.figures[name] for name in options.sides if name in cell.figures}
    return replace(cell, figures=ordered)


def run_world(world: int, options: argparse.Namespace) -> list[Cell]:
    """Every model in a world of this size: one real rank, or rank 0 of pretended ones."""
    if world > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    else:
        backend = "nccl" if options.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(options.device, (world,))
        cells = []
        for size in options.sizes:
            cells.append(run_cell(size, world, mesh, options))
            for row in cells[-1].rows():  # what was measured, should the run be cut off
                print(*row, sep=" | ", file=sys.stderr, flush=True)
        return cells
    finally:
        dist.destroy_process_group()


def report(options: argparse.Namespace, cells: list[Cell]) -> list[str]:
    headers = ["model, ranks, side", "step, ms", "min–max", "FSDP2 ÷ side", "adds, ms"]
    headers += [
        "host, ms",
        "held, GB",
        "peak, GB",
        "asked, GB",
        "idle",
        "only collectives",
        "kernels",
        "copies",
    ]
    body = [row for cell in cells for row in cell.rows()]
    failures = [line for cell in cells for line in cell.failures]
    strays = [line for cell in cells for line in cell.strays()]
    about = (
        f"Batch {options.batch} × {options.seq} tokens, bfloat16 with float32 shards, fused AdamW, "
        f"{options.steps} steps a round, {options.rounds} rounds. Worlds above 1 are one rank of "
        "the fake process group, whose collectives take no time; the copies there are mostly "
        "that group's. The plain side is one process without sharding, its weights in bfloat16 "
        "beside float32 copies; what a side adds is counted from it. Split sides have the "
        "embedding in a unit of its own, and the norm and the head in another. In a world of one "
        "FSDP1 shards nothing, and keeps its weights gathered. Memory is what torch's allocator "
        'gave out, and "asked" the peak of what it was asked for, before it rounds up; where '
        "that is more, its two counters disagree. The captured side replays forward and backward "
        "as one CUDA graph; elsewhere than on CUDA it is the static one again."
    )
    sections = [about, common.table(headers, body), "\n".join(failures)]
    if strays:
        sections.append("**Trained otherwise:** " + "; ".join(strays))
    elif any(cell.world == 1 for cell in cells):
        sections.append(f"Losses of the world of one agree within {TOLERANCE}.")
    device = torch.device(options.device)
    return [section for section in [*sections, common.machine(device)] if section]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = [name for name in SIZES if name != "tiny"]
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=sizes)
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--batch", type=int, default=2, help="sequences of the rank")
    parser.add_argument("--seq", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--warmup", type=int, default=4, help="steps that are not timed")
    parser.add_argument("--steps", type=int, default=10, help="timed steps in a round")
    parser.add_argument("--rounds", type=int, default=3)
    common.add_output_options(parser)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; --device cpu tries the script without one")
    with common.without_torch_warnings():
        cells = [cell for world in options.worlds for cell in run_world(world, options)]
    common.publish("gpu", options, report(options, cells), {"cells": cells})
    if any(cell.strays() for cell in cells):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
