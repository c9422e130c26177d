"""Host cost of sharding: Python per unit and step, per optimizer step and per gradient clipping.

Tiny tensors and the fake process group leave nothing to wait for, so what a sharded side takes
longer than the plain model is what its hooks, views and dispatch cost the host. Times are CPU
time of this one-threaded process, which other processes disturb less than they do the wall clock;
instructions are the same in every run. Over gloo, two processes also tell each other what they do.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import common
import instructions
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.multiprocessing as mp
from common import Spread
from host_models import SIDES, Copies, Shape, builders, fsdp2, input_for, ours, plain
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_compose

Measurement: TypeAlias = Callable[[], Sequence[float]]

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "default": {},
}


CASES: dict[str, dict[str, Any]] = {
    "12 small": {},
    "6 large": {"linears": 3, "width": 256},
    "60 tiny": {"linears": 30, "width": 4},
    "adapters": {"adapters": True},
    "checkpointed": {"checkpointed": True},
}
"""What each model has besides the options: parameters per unit, or how it is trained."""


COPIES = "copies that all make"
"""The name of what ``Copies`` measures, which stands among the sides."""


def step(model: nn.Module, x: Tensor) -> tuple[float, float]:
    """One forward and one backward; returns the µs of each. Gradients are dropped untimed."""
    start = time.process_time()
    loss = model(x).sum()
    middle = time.process_time()
    loss.backward()
    end = time.process_time()
    model.zero_grad()
    return (middle - start) * 1e6, (end - middle) * 1e6


def timed(call: Measurement, repeats: int) -> list[float]:
    """The median of each figure over ``repeats`` calls, after one that warms the caches."""
    call()
    samples = [call() for _ in range(repeats)]
    return [Spread.of(figure).median for figure in zip(*samples, strict=True)]


def microseconds(call: Callable[[], object]) -> tuple[float]:
    start = time.process_time()
    call()
    return ((time.process_time() - start) * 1e6,)


def keep_runnable(sides: Mapping[str, Measurement], failures: list[str]) -> dict[str, Measurement]:
    """Try each side once; what raises is reported and left out instead of ending the run."""
    runnable = {}
    for name, call in sides.items():
        try:
            call()
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "")
            failures.append(f"- {name} cannot run: {type(error).__name__}: {reason}")
        else:
            runnable[name] = call
    return runnable


def unit_cost(
    shape: Shape,
    models: dict[str, nn.Module],
    mesh: DeviceMesh,
    options: argparse.Namespace,
    failures: list[str],
) -> tuple[str, dict[str, Spread]]:
    """µs per unit that each side adds to the plain forward and backward; and the copies alone."""
    calls: dict[str, Measurement] = {
        name: partial(step, model, input_for(shape, name)) for name, model in models.items()
    }
    calls[COPIES] = Copies(shape, mesh).step
    runnable = keep_runnable(calls, failures)
    figures = common.interleave(
        {name: partial(timed, call, options.steps) for name, call in runnable.items()},
        options.rounds,
    )
    base = figures["plain"]
    rows, costs = [], {}
    for name in figures:
        # The difference is taken within a round, so that drift of the machine cancels.
        pairs = list(zip(figures[name], base, strict=True))
        if name in ("plain", COPIES):
            forward = Spread.of([side[0] / shape.units for side, _ in pairs])
            total = Spread.of([sum(side) / shape.units for side, _ in pairs])
            if name == COPIES:
                costs[name] = total
        else:
            forward = Spread.of([(side[0] - b[0]) / shape.units for side, b in pairs])
            total = Spread.of([(sum(side) - sum(b)) / shape.units for side, b in pairs])
            costs[name] = total
        rows.append((name, forward, total))
    reference = costs["FSDP2"].median
    body = []
    for name, forward, total in rows:
        ratio = f"{reference / total.median:.2f}"
        ratio = {"plain": "(itself)", COPIES: "(no side)"}.get(name, ratio)
        backward = total.median - forward.median
        body.append([name, *total.cells(), f"{forward.median:.0f}", f"{backward:.0f}", ratio])
    headers = ["side", "µs per unit over plain", "min–max", "forward", "backward", "FSDP2 ÷ side"]
    return common.table(headers, body), costs


def with_gradients(model: nn.Module, shape: Shape, name: str) -> None:
    model(input_for(shape, name)).sum().backward()


def plain_shards(sharded: nn.Module) -> list[Tensor]:
    """Plain parameters of the local sizes that FSDP2 left this rank, with gradients."""
    shards: list[Tensor] = []
    for slice_ in local(list(sharded.parameters())):
        shard = nn.Parameter(torch.randn(slice_.shape))
        shard.grad = torch.randn(slice_.shape)
        shards.append(shard)
    return shards


def local(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The plain slices on this rank of DTensors, sharded parameters or plain tensors."""
    return [getattr(tensor, "to_local", tensor.detach)() for tensor in tensors]


def updated(parameters: Sequence[Tensor]) -> int:
    """Elements on this rank that an optimizer step would change: those with a gradient."""
    return sum(p.numel() for p in local([p for p in parameters if p.grad is not None]))


def shard_lists(
    shape: Shape, models: dict[str, nn.Module], mesh: DeviceMesh, notes: list[str]
) -> dict[str, list[Tensor]]:
    """What an optimizer is given on each side, every tensor with its gradient in place."""
    lists: dict[str, list[Tensor]] = {}
    for name in ("FSDP2", "FSDP1 original parameters", "ours"):
        if name in models:
            with_gradients(models[name], shape, name)
            lists[name] = list(models[name].parameters())
    if "FSDP2" in models:
        lists = {"plain tensors": plain_shards(models["FSDP2"]), **lists}
    if "ours" in models:
        for function in ("local_parameters", "flat_parameters"):
            if function in fsdp_compose.__all__:
                model = ours(shape, mesh)
                parameters = list(getattr(fsdp_compose, function)(model))
                with_gradients(model, shape, "ours")
                lists[f"ours, {function}"] = parameters
                models[function] = model  # which its plain parameters need
            else:
                notes.append(f"- ours, {function}: not available yet")
    return lists


def optimizer_cost(
    lists: dict[str, list[Tensor]], options: argparse.Namespace, failures: list[str]
) -> tuple[str, dict[str, dict[str, Spread]]]:
    """ms of one AdamW step over every side's shards, for three ways to run AdamW."""
    results: dict[str, dict[str, Spread]] = {}
    ratios: dict[tuple[str, str], str] = {}
    for kind, settings in OPTIMIZERS.items():
        calls = {}
        for name, parameters in lists.items():
            optimizer = torch.optim.AdamW(parameters, lr=1e-6, **settings)
            calls[name] = partial(microseconds, optimizer.step)
        runnable = keep_runnable(calls, failures)
        # The per-tensor loop over DTensors takes a tenth of a second: fewer repeats for it.
        repeats = 1 if kind == "default" else options.steps
        figures = common.interleave(
            {name: partial(timed, call, repeats) for name, call in runnable.items()},
            options.rounds,
        )
        for name, samples in figures.items():
            results.setdefault(name, {})[kind] = Spread.of([us[0] / 1e3 for us in samples])
            if "FSDP2" in figures:
                ratios[name, kind] = f"{common.ratio_by_round(figures['FSDP2'], samples):.2f}"
    body = []
    for name, parameters in lists.items():
        row = [name, str(len(parameters)), str(updated(parameters))]
        for kind in OPTIMIZERS:
            cost = results.get(name, {}).get(kind)
            if cost is None:
                row += ["cannot run", ""]
                continue
            row.append(f"{cost.median:.2f} ({cost.low:.2f}–{cost.high:.2f})")
            row.append(ratios.get((name, kind), ""))
        body.append(row)
    headers = ["parameters given to AdamW", "tensors", "elements"]
    for kind in OPTIMIZERS:
        headers += [f"{kind}, ms (min–max)", "FSDP2 ÷ side"]
    return common.table(headers, body), results


def clip_cost(
    lists: dict[str, list[Tensor]],
    models: dict[str, nn.Module],
    options: argparse.Namespace,
    failures: list[str],
) -> tuple[str, dict[str, Spread]]:
    """ms of one gradient clipping over every side's shards."""
    torch_clip = partial(torch.nn.utils.clip_grad_norm_, max_norm=1.0)
    calls: dict[str, Measurement] = {}
    for name in ("plain tensors", "FSDP2", "ours"):
        if name in lists:
            label = f"{name}, torch.nn.utils.clip_grad_norm_"
            calls[label] = partial(microseconds, partial(torch_clip, lists[name]))
    wrapped = models.get("FSDP1 original parameters")
    if isinstance(wrapped, torch_fsdp.FullyShardedDataParallel):
        calls["FSDP1 original parameters, its own clip_grad_norm_"] = partial(
            microseconds, partial(wrapped.clip_grad_norm_, 1.0)
        )
    if "ours" in models and "clip_grad_norm_" in fsdp_compose.__all__:
        calls["ours, fsdp_compose.clip_grad_norm_"] = partial(
            microseconds, partial(fsdp_compose.clip_grad_norm_, models["ours"], 1.0)
        )
    runnable = keep_runnable(calls, failures)
    figures = common.interleave(
        {name: partial(timed, call, options.steps) for name, call in runnable.items()},
        options.rounds,
    )
    costs = {name: Spread.of([us[0] / 1e3 for us in samples]) for name, samples in figures.items()}
    reference = figures.get("FSDP2, torch.nn.utils.clip_grad_norm_")
    body = [
        [name, *cost.cells(2), f"{common.ratio_by_round(reference, figures[name]):.2f}"]
        if reference
        else [name, *cost.cells(2), ""]
        for name, cost in costs.items()
    ]
    return common.table(["clipping", "ms", "min–max", "FSDP2 ÷ side"], body), costs


def targets(costs: dict[str, Spread]) -> str:
    """The two ratios that the design sets a target for."""
    if "ours" not in costs:
        return "ours: not measured"
    mine = costs["ours"].median
    lines = []
    for name, factor in (("FSDP2", 5), ("FSDP1 flat", 3)):
        if name in costs:
            ratio = costs[name].median / mine
            verdict = "reached" if ratio >= factor else "missed"
            lines.append(f"- {name} ÷ ours = {ratio:.2f} (target ≥ {factor}: {verdict})")
    copies = costs[COPIES].median
    rest = [
        f"{name} ÷ ours = {(costs[name].median - copies) / (mine - copies):.2f}"
        for name in ("FSDP2", "FSDP1 flat")
        if name in costs
    ]
    share = f"{copies / mine:.0%} of ours"
    lines.append(f"- without {copies:.0f} µs of {COPIES}, {share}: {', '.join(rest)}")
    return "\n".join(lines)


def profile_side(model: nn.Module, shape: Shape, name: str, steps: int = 50) -> None:
    """Print where one side's time goes: own time per call, over ``steps`` steps."""
    x = input_for(shape, name)
    for _ in range(3):
        step(model, x)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        step(model, x)
    profiler.disable()
    print(f"{name}: {steps} steps of {shape.units} units")
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(45)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2, help="ranks of the fake process group")
    parser.add_argument("--units", type=int, default=24)
    parser.add_argument("--linears", type=int, default=6, help="linear layers per unit")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--dtype", choices=[*common.DTYPES, "both"], default="both")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per side and round")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=TIMED,
    )
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--profile", choices=SIDES, help="profile this side instead of timing")
    parser.add_argument("--count", choices=SIDES, help=argparse.SUPPRESS)  # under valgrind
    common.add_output_options(parser)
    return parser.parse_args()


TIMED = ["units", "gloo", "optimizer", "clip"]
PARTS = [*TIMED, "instructions"]


def how_measured(options: argparse.Namespace) -> str:
    """What the figures of the chosen parts are."""
    timed = (
        f"median over {options.rounds} interleaved rounds of {options.steps} steps per side, with "
        "the smallest and largest round; of optimizers and clipping, ratios are medians of those "
        "in each round. CPU time of one thread."
    )
    counted = f"instructions of one step after {instructions.WARM_UPS} others."
    found = [timed] if set(TIMED) & set(options.parts) else []
    return " Beside these, ".join([*found, *([counted] if "instructions" in options.parts else [])])


def build(
    shape: Shape, chosen: Sequence[str], mesh: DeviceMesh, failures: list[str]
) -> dict[str, nn.Module]:
    """Every side's model; one that cannot be built is reported and left out."""
    models = {}
    for name in chosen:
        try:
            models[name] = builders(mesh)[name](shape)
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "")
            failures.append(f"- {name} cannot be built: {type(error).__name__}: {reason}")
    return models


def count_sides(
    options: argparse.Namespace, chosen: Sequence[str], failures: list[str]
) -> dict[str, dict[str, int]]:
    """By side and case, the instructions of a forward and backward; each side in a process."""
    script, arguments = Path(__file__).resolve(), {}
    for name in chosen:
        words = ["--count", name, "--dtype", options.dtype, "--cases", *options.cases]
        for option in ("world", "units", "linears", "width", "batch"):
            words += [f"--{option}", str(getattr(options, option))]
        arguments[name] = words
    return instructions.count_all(script, arguments, failures)


def instruction_cost(
    counted: dict[str, dict[str, int]], label: str, units: int
) -> tuple[str, dict[str, float]]:
    """Thousands of instructions per unit that each side adds to the plain forward and backward."""
    counts = {name: found[label] / units / 1e3 for name, found in counted.items() if label in found}
    if not {"plain", "FSDP2"} <= set(counts):
        return "not counted", counts
    costs = {name: n - counts["plain"] for name, n in counts.items() if name != "plain"}
    body = [[n, f"{cost:.0f}", f"{costs['FSDP2'] / cost:.2f}"] for n, cost in costs.items()]
    return common.table(["side", "1000 instructions over plain", "FSDP2 ÷ side"], body), costs


def count_side(model: nn.Module, shape: Shape, name: str, label: str) -> None:
    """Count one step, in a process that valgrind runs."""
    x = input_for(shape, name)
    instructions.counted(label, lambda: model(x).sum().backward(), model.zero_grad)


def gloo_cost(shape: Shape, options: argparse.Namespace) -> tuple[str, dict[str, Spread]]:
    """µs of CPU time per unit over the plain model, of the first of two processes over gloo."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "figures"))
        mp.spawn(_run_gloo, (shape, options, path), nprocs=2)
        costs: dict[str, Spread] = torch.load(path, weights_only=False)
    body = [
        [name, *cost.cells(), f"{costs['FSDP2'].median / cost.median:.2f}"]
        for name, cost in costs.items()
    ]
    return common.table(["side", "µs per unit over plain", "min–max", "FSDP2 ÷ side"], body), costs


def _run_gloo(rank: int, shape: Shape, options: argparse.Namespace, path: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{path}.store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    models = {"plain": plain(shape), "FSDP2": fsdp2(shape, mesh), "ours": ours(shape, mesh)}
    calls = {name: partial(step, m, input_for(shape, name)) for name, m in models.items()}
    figures = common.interleave(
        {name: partial(timed, call, options.steps) for name, call in calls.items()}, options.rounds
    )
    costs = {}
    for name in ("FSDP2", "ours"):
        pairs = zip(figures[name], figures["plain"], strict=True)
        costs[name] = Spread.of([(sum(side) - sum(base)) / shape.units for side, base in pairs])
    if rank == 0:
        torch.save(costs, path)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    options = parse()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.world)
    mesh = init_device_mesh("cpu", (options.world,))
    chosen = [name for name in SIDES if name in {*options.sides, "plain", "FSDP2"}]
    dtypes = list(common.DTYPES) if options.dtype == "both" else [options.dtype]
    base = Shape(options.units, options.linears, options.width, options.batch, torch.float32)
    shapes = {
        (case, dtype): replace(base, param_dtype=common.DTYPES[dtype], **CASES[case])
        for case in options.cases
        for dtype in (dtypes if case == "12 small" else dtypes[:1])
    }
    alone = options.count or options.profile
    if alone:
        for (case, dtype), shape in shapes.items():
            try:
                model = builders(mesh)[alone](shape)
                if options.count:
                    count_side(model, shape, alone, f"{case}, {dtype}")
                else:
                    profile_side(model, shape, alone)
            except Exception as error:
                print(f"{case}, {dtype}: {type(error).__name__}: {error}", file=sys.stderr)
        return 0

    sections = [
        f"{options.units} units; {2 * options.linears} parameters each, width {options.width}, "
        f"batch {options.batch}, except where a case says otherwise; fake process group of "
        f"{options.world} ranks on CPU; {how_measured(options)}"
    ]
    failures: list[str] = []
    notes: list[str] = []
    figures: dict[str, object] = {}
    with common.without_torch_warnings():
        counted = count_sides(options, chosen, failures) if "instructions" in options.parts else {}
        for (case, dtype), shape in shapes.items():
            models = build(shape, chosen, mesh, failures) if "units" in options.parts else {}
            if models:
                text, costs = unit_cost(shape, models, mesh, options, failures)
                sections += [f"## Forward and backward, {case}, {dtype}", text, targets(costs)]
                figures[f"units {case} {dtype}"] = costs
            if counted:
                text, counts = instruction_cost(counted, f"{case}, {dtype}", options.units)
                sections += [f"## Instructions, {case}, {dtype}", text]
                figures[f"instructions {case} {dtype}"] = counts
        if "gloo" in options.parts:
            text, costs = gloo_cost(base, options)
            sections += ["## Forward and backward over gloo, two processes, float32", text]
            figures["gloo"] = costs
        if {"optimizer", "clip"} & set(options.parts):
            models = build(base, chosen, mesh, failures)
            lists = shard_lists(base, models, mesh, notes)
        count = options.units * 2 * options.linears
        if "optimizer" in options.parts:
            text, steps = optimizer_cost(lists, options, failures)
            sections += [f"## AdamW over {count} parameters", text]
            figures["optimizer"] = steps
        if "clip" in options.parts:
            text, clips = clip_cost(lists, models, options, failures)
            sections += [f"## Gradient clipping over {count} gradients", text]
            figures["clip"] = clips
    if failures or notes:
        sections += ["## What could not run", "\n".join(failures + notes)]
    sections += ["## Machine", common.machine()]
    name = "-".join(["host_overhead", *([] if options.parts == TIMED else options.parts)])
    common.publish(name, options, sections, figures)
    dist.destroy_process_group()
    return 1 if any(line.startswith("- ours") for line in failures) else 0


if __name__ == "__main__":
    raise SystemExit(main())
