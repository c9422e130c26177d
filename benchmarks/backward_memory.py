"""The most that a backward holds, beside FSDP2's or DDP's, in steps where this library takes more.

Each row is one step on one rank of a fake process group of 8, whose collectives move nothing. A
ledger counts the bytes of every storage that an operator inside the step makes or writes; shards
and inputs are left out. Counts are the same in every run, on any machine.

Run ``python benchmarks/backward_memory.py``; it takes half a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from common import ROOT, add_output_options, machine, publish, table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as shard_by_fsdp2
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fsdp_compose as fc

sys.path.insert(0, str(ROOT / "tests"))

from harness import fake_world
from models import Block, Ledger, seeded

RANKS, WIDTH = 8, 256
MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


class Net(nn.Module):
    """Blocks of the given inner widths, between a first layer and a head where it has them."""

    def __init__(self, *inner: int, has_ends: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH) if has_ends else nn.Identity()
        self.blocks = nn.ModuleList(Block(WIDTH, width) for width in inner or [4 * WIDTH] * 4)
        self.head = nn.Linear(WIDTH, 2 * WIDTH, bias=False) if has_ends else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Looped(Net):
    """Runs all its blocks twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.head(x)


class Recomputed(Block):
    """A unit that checkpoints its own inside."""

    is_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.is_reentrant)


class Pair(nn.Sequential):
    """A unit that returns what the unit inside it returns."""


def make_net(*inner: int, has_ends: bool = True) -> Callable[[], nn.Module]:
    return lambda: Net(*inner, has_ends=has_ends)


def recomputed_net(is_reentrant: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        found = Net()
        found.blocks = nn.ModuleList(Recomputed(WIDTH, 4 * WIDTH) for _ in range(4))
        for block in found.blocks:
            block.is_reentrant = is_reentrant
        return found

    return build


def nested_net() -> nn.Module:
    pairs = (Pair(nn.Linear(WIDTH, WIDTH), Block(WIDTH, 4 * WIDTH)) for _ in range(3))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *pairs)


def fsdp2(model: nn.Module, kept: bool, mixed: bool) -> nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,))
    policy = MixedPrecisionPolicy(**MIXED) if mixed else MixedPrecisionPolicy()
    for module in reversed(list(model.modules())):
        if isinstance(module, Block | Pair):
            shard_by_fsdp2(module, mesh=mesh, mp_policy=policy, reshard_after_forward=not kept)
    return shard_by_fsdp2(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def ddp(model: nn.Module, kept: bool, mixed: bool) -> nn.Module:
    found = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def pass_on(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        done = torch.futures.Future[Tensor]()
        done.set_result(bucket.buffer())
        return done

    pass_on.__annotations__ = {}  # which DDP reads, and these are strings
    found.register_comm_hook(None, pass_on)
    return found


def ours(model: nn.Module, strategy: str, mixed: bool) -> nn.Module:
    policy = fc.MixedPrecision(**MIXED) if mixed else fc.MixedPrecision()
    return fc.fully_shard(
        model,
        units=fc.wrap.by_class({Block, Pair}),
        strategy=fc.ShardingStrategy[strategy],
        mp_policy=policy,
    )


def hold_gradients(model: nn.Module) -> contextlib.AbstractContextManager[object]:
    """A scope whose gradients wait for those of a later microbatch."""
    if isinstance(model, DistributedDataParallel):
        return model.no_sync()
    if fc.is_fully_sharded(model):
        return fc.no_sync(model)
    stack = contextlib.ExitStack()
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    stack.callback(model.set_requires_gradient_sync, True)
    return stack


def step(model: nn.Module, backwards: str) -> int:
    """Run one step; returns the most bytes that its last backward held."""
    x = torch.ones(2, WIDTH)
    held = [getattr(p, "_local_tensor", p) for p in model.parameters()]
    with Ledger(x, *held) as ledger:
        if backwards in ("no_sync", "each reduced"):
            scope = (
                contextlib.nullcontext() if backwards == "each reduced" else hold_gradients(model)
            )
            with scope:
                model(x).float().square().mean().backward()
        loss = model(x).float().square().mean()
        if backwards == "kept graph":
            loss.backward(retain_graph=True)
        ledger.peak = 0
        loss.backward()
    model.zero_grad()
    return ledger.peak


def compare(
    build: Callable[[], nn.Module], other: Callable[..., nn.Module], backwards: str, **options: Any
) -> list[str]:
    """A row's figures: ours and theirs in kB, and how much more ours is."""
    strategy, mixed = options.get("strategy", "FULL_SHARD"), options.get("mixed", False)
    peaks = []
    for kind in (ours, other):
        with fake_world(RANKS):
            chosen = strategy if kind is ours else strategy == "SHARD_GRAD_OP"
            model = kind(seeded(build).float(), chosen, mixed)
            peaks.append([step(model, backwards) for _ in range(3)][-1])
    mine, theirs = peaks
    return [f"{mine / 1e3:.0f}", f"{theirs / 1e3:.0f}", f"{100 * (mine / theirs - 1):+.1f} %"]


def rows() -> list[list[str]]:
    growing = make_net(WIDTH, 2 * WIDTH, 4 * WIDTH, 8 * WIDTH)
    bare = make_net(has_ends=False)
    kept: dict[str, Any] = {"strategy": "SHARD_GRAD_OP"}
    alone: dict[str, Any] = {"strategy": "NO_SHARD"}
    cases: list[tuple[str, Callable[[], nn.Module], str, dict[str, Any]]] = [
        ("one backward", Net, "one", {}),
        ("one backward, kept gathered", Net, "one", kept),
        ("second microbatch in no_sync", Net, "no_sync", {}),
        ("the same, kept gathered", Net, "no_sync", kept),
        ("the same, bf16 reduced in fp32", Net, "no_sync", {"mixed": True}),
        ("every microbatch reduced", Net, "each reduced", {}),
        ("the same, bf16 reduced in fp32", Net, "each reduced", {"mixed": True}),
        ("second backward of a kept graph", Net, "kept graph", {}),
        ("blocks that grow", growing, "one", {}),
        ("outer unit returns the inner one's output", nested_net, "one", {}),
        ("root without parameters", bare, "one", {}),
        ("blocks that run twice in a loop", Looped, "one", {}),
        ("blocks that run twice, kept gathered", Looped, "one", kept),
        ("checkpoint inside a unit", recomputed_net(False), "one", {}),
        ("reentrant checkpoint inside a unit", recomputed_net(True), "one", {}),
        ("NO_SHARD beside DDP, one backward", Net, "one", alone),
        ("NO_SHARD beside DDP, every microbatch reduced", Net, "each reduced", alone),
        ("NO_SHARD beside DDP, second in no_sync", Net, "no_sync", alone),
    ]
    return [
        [name, *compare(build, ddp if options is alone else fsdp2, backwards, **options)]
        for name, build, backwards, options in cases
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_output_options(parser)
    options = parser.parse_args()
    found = rows()
    sections = [
        f"The most that the last backward of a step holds, shards left out, kB, {RANKS} ranks; "
        "FSDP2 beside it, or DDP with gradient_as_bucket_view=True where that is said.",
        table(["step", "here", "theirs", "more"], found),
        "## Machine",
        machine(),
    ]
    publish("backward_memory", options, sections, {row[0]: row[1:] for row in found})


if __name__ == "__main__":
    main()
