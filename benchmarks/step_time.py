"""Training step of a small GPT on real ranks: no sharding, DDP, FSDP1, FSDP2 and fsdp_compose.

All sides live in the same processes, start from the same weights, see the same batches and take
turns step by step, so that the machine's drift touches them alike. Ratios beside times are those of
the medians; in a table of their own are medians of the ratios of each round. On a CPU each step is
measured by the clock and by what its processes computed, which other work on the machine disturbs
less. A side whose losses leave the reference's trains something else, and the run fails.

What sharding adds is a step's time above that of the plain model without communication, as a part
of what FSDP2 adds to it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import common
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from common import Memory, Spread, Traffic
from gpt import GPT, Block, GPTConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import fsdp_compose

BATCHES = 4
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}


@dataclass(frozen=True)
class Setting:
    """What every side is built from, and this process's place."""

    config: GPTConfig
    batch: int
    dtype: torch.dtype
    device: torch.device
    rank: int
    world_size: int
    learning_rate: float
    microbatches: int  # in a step; gradients are reduced with the last

    @property
    def low_precision(self) -> bool:
        return self.dtype != torch.float32

    def fresh_model(self) -> GPT:
        torch.manual_seed(0)
        return GPT(self.config).to(self.device)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's tokens and targets, ``(batch, time)`` each, repeated while training."""
        pairs = []
        for index in range(BATCHES):
            generator = torch.Generator().manual_seed(1000 * index + self.rank)
            shape = (self.batch, self.config.block_size + 1)
            tokens = torch.randint(self.config.vocab_size, shape, generator=generator)
            tokens = tokens.to(self.device)
            pairs.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
        return pairs


def local(setting: Setting) -> nn.Module:
    return setting.fresh_model()


def ddp(setting: Setting) -> nn.Module:
    ids = [setting.device] if setting.device.type == "cuda" else None
    return DistributedDataParallel(
        setting.fresh_model(), device_ids=ids, gradient_as_bucket_view=True
    )


def fsdp1(setting: Setting) -> nn.Module:
    precision = None
    if setting.low_precision:
        precision = torch_fsdp.MixedPrecision(param_dtype=setting.dtype, reduce_dtype=torch.float32)
    return torch_fsdp.FullyShardedDataParallel(
        setting.fresh_model(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=setting.device,
        mixed_precision=precision,
    )


def fsdp2(setting: Setting, *, reshard_after_forward: bool | None) -> nn.Module:
    precision = torch_fsdp.MixedPrecisionPolicy()
    if setting.low_precision:
        precision = torch_fsdp.MixedPrecisionPolicy(
            param_dtype=setting.dtype, reduce_dtype=torch.float32
        )
    mesh = init_device_mesh(setting.device.type, (setting.world_size,))
    shard = partial(
        torch_fsdp.fully_shard,
        mesh=mesh,
        mp_policy=precision,
        reshard_after_forward=reshard_after_forward,
    )
    model = setting.fresh_model()
    for block in model.blocks:
        shard(block)
    shard(model)
    return model


def ours(setting: Setting, *, strategy: str) -> nn.Module:
    precision = fsdp_compose.MixedPrecision()
    if setting.low_precision:
        precision = fsdp_compose.MixedPrecision(
            param_dtype=setting.dtype, reduce_dtype=torch.float32
        )
    shard = partial(
        fsdp_compose.fully_shard,
        strategy=fsdp_compose.ShardingStrategy[strategy],
        mp_policy=precision,
    )
    model = setting.fresh_model()
    for block in model.blocks:
        shard(block)
    shard(model)
    return model


BUILDERS: dict[str, Callable[[Setting], nn.Module]] = {
    "local": local,
    "DDP": ddp,
    "FSDP1": fsdp1,
    "FSDP2": partial(fsdp2, reshard_after_forward=None),
    "FSDP2 kept": partial(fsdp2, reshard_after_forward=False),
    "ours": partial(ours, strategy="FULL_SHARD"),
    "ours kept": partial(ours, strategy="SHARD_GRAD_OP"),
    "ours ZERO1": partial(ours, strategy="ZERO1"),
}
# These two leave the casting to autocast; the sharded sides cast their parameters themselves.
AUTOCAST = {"local", "DDP"}
# These two keep their weights gathered over the microbatches of a step.
KEPT = {"FSDP2 kept", "ours kept"}


@contextlib.contextmanager
def accumulating(model: nn.Module, is_on: bool, keeps: bool) -> Iterator[None]:
    """Scope of a backward whose gradients wait, unreduced, for those of a later one."""
    if not is_on:
        yield
    elif fsdp_compose.is_fully_sharded(model):
        fsdp_compose.set_reshard_after_backward(model, not keeps)
        with fsdp_compose.no_sync(model):
            yield
        fsdp_compose.set_reshard_after_backward(model, True)
    elif isinstance(model, torch_fsdp.FSDPModule):
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(not keeps)
        yield
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
    elif isinstance(model, DistributedDataParallel | torch_fsdp.FullyShardedDataParallel):
        with model.no_sync():
            yield
    else:
        yield


@dataclass
class Side:
    """One way to train the model: it owns its weights, its optimizer and its loss history."""

    name: str
    setting: Setting
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[tuple[Tensor, Tensor]]
    losses: list[Tensor] = field(default_factory=list)

    @classmethod
    def build(cls, name: str, setting: Setting) -> Side:
        model = BUILDERS[name](setting)
        # Fused is the fastest kind on every side, and the kindest to DTensors.
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=setting.learning_rate, weight_decay=0.1, fused=True
        )
        return cls(name, setting, model, optimizer, setting.batches())

    def forward_backward(self) -> None:
        """The microbatches of a step."""
        for index in range(self.setting.microbatches):
            waits = index < self.setting.microbatches - 1
            with accumulating(self.model, waits, self.name in KEPT):
                self.microbatch()

    def microbatch(self) -> None:
        tokens, targets = self.batches[len(self.losses) % BATCHES]
        autocast: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self.setting.low_precision and self.name in AUTOCAST:
            autocast = torch.autocast(self.setting.device.type, self.setting.dtype)
        with autocast:
            _, loss = self.model(tokens, targets)
        (loss / self.setting.microbatches).backward()
        self.losses.append(loss.detach())

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.forward_backward()
        self.update()


def train_with_sgd(side: Side, steps: int) -> None:
    """Warm up in a way that shows a gradient of the wrong size, which Adam's steps hide."""
    optimizer = torch.optim.SGD(side.model.parameters(), lr=1.0)
    for _ in range(steps):
        side.forward_backward()
        optimizer.step()
        optimizer.zero_grad()


class Clock:
    """Marks of time whose gaps are in ms: the host's clock on CPU, stream events on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times: list[float] = []
        self.events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append(event)
        else:
            self.times.append(time.perf_counter() * 1e3)

    def gaps(self) -> list[float]:
        """Waits for the device once, after everything was marked."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            marks: Iterable[tuple[torch.cuda.Event, torch.cuda.Event]]
            marks = zip(self.events, self.events[1:], strict=False)
            return [start.elapsed_time(end) for start, end in marks]
        return [end - start for start, end in zip(self.times, self.times[1:], strict=False)]


def turn(side: Side, steps: int) -> list[float]:
    """``steps`` steps of one side; returns the median ms of a step, its passes, its update.

    Each is the slowest rank's. The last figure is what a step computes, the mean over the ranks.
    """
    clock = Clock(side.setting.device)
    dist.barrier()
    started = time.process_time()
    for _ in range(steps):
        clock.mark()
        side.forward_backward()
        clock.mark()
        side.update()
    clock.mark()
    computed = torch.tensor([(time.process_time() - started) * 1e3 / steps])
    computed = computed.to(side.setting.device)
    gaps = clock.gaps()
    passes, updates = gaps[0::2], gaps[1::2]
    totals = [sum(pair) for pair in zip(passes, updates, strict=True)]
    figures = [Spread.of(kind).median for kind in (totals, passes, updates)]
    slowest = torch.tensor(figures, device=side.setting.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(computed)
    return [*slowest.tolist(), float(computed) / side.setting.world_size]


def global_losses(side: Side) -> list[float]:
    """The mean over the ranks of every step's loss."""
    losses = torch.stack(side.losses).float() / side.setting.world_size
    dist.all_reduce(losses)
    return losses.tolist()


def count_traffic(side: Side) -> Traffic:
    with Traffic(side.setting.world_size) as traffic:
        side.step()
    return traffic


def memory_of(name: str, setting: Setting) -> tuple[Memory, Memory] | None:
    """A fresh side: what it holds between steps, and what one more step adds on top."""
    sides: list[Side] = []

    def begin() -> None:
        sides.append(Side.build(name, setting))
        sides[0].step()
        sides[0].losses.clear()

    dist.barrier()
    rest = common.measure_memory(begin, setting.device)
    added = common.measure_memory(sides[0].step, setting.device)
    return None if rest is None or added is None else (rest, added)


def times_table(times: dict[str, list[Spread]], tokens: int) -> str:
    rows = []
    for name, (step, passes, update, computed) in times.items():
        row = [name, *step.cells(), f"{passes.median:.0f}", f"{update.median:.0f}"]
        row.append(f"{computed.median:.0f}")
        row.append(f"{tokens / step.median * 1e3:.0f}")
        for other in ("DDP", "FSDP2"):
            row.append(f"{times[other][0].median / step.median:.2f}" if other in times else "")
        rows.append(row)
    headers = ["side", "step, ms", "min–max", "forward and backward", "optimizer"]
    headers += ["processor, ms", "tokens/s", "DDP ÷ side", "FSDP2 ÷ side"]
    return common.table(headers, rows)


def added_table(samples: dict[str, list[list[float]]]) -> str:
    """What each side adds to the local step ÷ what FSDP2 adds, and DDP's step ÷ the side's."""
    rows = []
    for name in samples:
        if name in ("local", "DDP", "FSDP2"):
            continue
        row = [name]
        for figure in (0, -1):
            steps = {n: [turn[figure] for turn in turns] for n, turns in samples.items()}
            local, other, mine = steps["local"], steps["FSDP2"], steps[name]
            added = [(m - x) / (o - x) for m, x, o in zip(mine, local, other, strict=True)]
            row += Spread.of(added).cells(2)
            if "DDP" in steps:
                ratios = [d / m for d, m in zip(steps["DDP"], mine, strict=True)]
                row += Spread.of(ratios).cells(2)
        rows.append(row)
    kinds = ["added ÷ FSDP2's", "min–max", *(["DDP ÷ side", "min–max"] if "DDP" in samples else [])]
    headers = [f"{kind}, {of}" for of in ("time", "processor") for kind in kinds]
    return common.table(["side", *headers], rows)


def costs_table(
    traffic: dict[str, Traffic],
    memory: dict[str, tuple[Memory, Memory] | None],
    distance: dict[str, float | None],
) -> str:
    rows = []
    for name, gap in distance.items():
        row = [name, f"{traffic[name].sent / 1e6:.1f}"]
        measured = memory.get(name)
        if measured is None:
            row += ["", ""]
        else:
            rest, added = measured
            row += [f"{rest.kept / 1e6:.0f}", f"{added.peak / 1e6:.0f}"]
        row += ["own data" if gap is None else f"{gap:.1e}", traffic[name].summary()]
        rows.append(row)
    headers = ["side", "sent per rank, MB", "held between steps, MB", "added in a step, MB"]
    return common.table([*headers, "largest loss difference", "calls per step"], rows)


def setting_for(options: argparse.Namespace, device: torch.device) -> Setting:
    config = GPTConfig(
        vocab_size=options.vocab,
        block_size=options.seq,
        n_layer=options.layers,
        n_head=options.width // 64,
        n_embd=options.width,
    )
    return Setting(
        config,
        options.batch,
        common.DTYPES[options.dtype],
        device,
        dist.get_rank(),
        dist.get_world_size(),
        options.learning_rate,
        options.microbatches,
    )


def run(options: argparse.Namespace, device: torch.device) -> bool:
    """Measure every side on this rank; rank 0 reports. False when a side trains differently."""
    setting = setting_for(options, device)
    sides = {name: Side.build(name, setting) for name in options.sides}
    for side in sides.values():
        train_with_sgd(side, options.warmup)
        side.step()
    samples = common.interleave(
        {name: partial(turn, side, options.steps) for name, side in sides.items()},
        options.rounds,
    )
    losses = {name: global_losses(side) for name, side in sides.items()}
    together = [name for name in sides if name != "local"]
    distance: dict[str, float | None] = dict.fromkeys(sides)
    for name in together:
        pairs = zip(losses[name], losses[together[0]], strict=True)
        distance[name] = max(abs(mine - theirs) for mine, theirs in pairs)
    traffic = {name: count_traffic(side) for name, side in sides.items()}
    sides.clear()
    memory = {name: memory_of(name, setting) for name in options.sides if options.memory}

    limit = TOLERANCE[options.dtype]
    # Written so that a difference that is not a number fails too.
    strays = [name for name in together if not (distance[name] or 0.0) <= limit]
    if setting.rank == 0:
        report(options, setting, samples, traffic, memory, distance, losses, strays)
    return not strays


def report(
    options: argparse.Namespace,
    setting: Setting,
    samples: dict[str, list[list[float]]],
    traffic: dict[str, Traffic],
    memory: dict[str, tuple[Memory, Memory] | None],
    distance: dict[str, float | None],
    losses: dict[str, list[float]],
    strays: Sequence[str],
) -> None:
    times = {
        name: [Spread.of(figure) for figure in zip(*rounds, strict=True)]
        for name, rounds in samples.items()
    }
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(setting.config).parameters())
    tokens = setting.world_size * setting.batch * setting.config.block_size * setting.microbatches
    shared = [name for name, gap in distance.items() if gap is not None]
    sections = [
        f"GPT of {parameters / 1e6:.1f}M parameters ({setting.config.n_layer} layers, width "
        f"{setting.config.n_embd}, vocabulary {setting.config.vocab_size}), {setting.batch} "
        f"sequences of {setting.config.block_size} tokens per rank and microbatch, "
        f"{setting.microbatches} microbatches in a step, {setting.world_size} "
        f"{dist.get_backend()} ranks, {options.dtype}, fused AdamW; median over "
        f"{options.rounds} interleaved rounds of {options.steps} steps per side, with the "
        "fastest and slowest round; times are the slowest rank's.",
        times_table(times, tokens),
        *([added_table(samples)] if {"local", "FSDP2"} <= samples.keys() else []),
        costs_table(traffic, memory, distance),
    ]
    if shared:
        first, last = losses[shared[0]][0], losses[shared[0]][-1]
        sections.append(
            f"Loss of {shared[0]}, the reference: {first:.4f} → {last:.4f} in "
            f"{len(losses[shared[0]])} steps; the others may differ by "
            f"{TOLERANCE[options.dtype]:.0e}."
        )
    if strays:
        sections.append(f"**Trained something else: {', '.join(strays)}.**")
    sections += ["## Machine", common.machine(setting.device)]
    figures = {
        "times": times,
        "samples": samples,
        "distance": distance,
        "losses": losses,
        "memory": memory,
    }
    counts = {"ranks": (options.ranks, 2), "microbatches": (options.microbatches, 1)}
    other = [f"{count}-{what}" for what, (count, usual) in counts.items() if count != usual]
    common.publish("-".join(["step_time", *other]), options, sections, figures)


def worker(rank: int, options: argparse.Namespace, rendezvous: str) -> None:
    """One process. Under torchrun the rendezvous comes from the environment."""
    torch.set_num_threads(options.threads)
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    start = partial(
        dist.init_process_group,
        "nccl" if device.type == "cuda" else "gloo",
        device_id=device if device.type == "cuda" else None,
    )
    if rendezvous == "env://":
        start()
    else:
        start(init_method=rendezvous, rank=rank, world_size=options.ranks)
    try:
        with common.without_torch_warnings():
            same = run(options, device)
    finally:
        dist.destroy_process_group()
    if not same:
        raise SystemExit(1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="processes; torchrun decides itself")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=list(common.DTYPES), default="float32")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--vocab", type=int, default=7680)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--threads", type=int, default=1, help="threads per process")
    parser.add_argument("--warmup", type=int, default=3, help="untimed SGD steps per side")
    parser.add_argument("--steps", type=int, default=1, help="timed steps per side and round")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds")
    parser.add_argument("--microbatches", type=int, default=1, help="accumulated in a step")
    parser.add_argument("--sides", nargs="+", choices=list(BUILDERS), default=list(BUILDERS))
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    common.add_output_options(parser)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if "RANK" in os.environ:
        worker(int(os.environ["RANK"]), options, "env://")
        return
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{Path(folder) / 'rendezvous'}"
        spawn(worker, args=(options, rendezvous), nprocs=options.ranks)


if __name__ == "__main__":
    main()
