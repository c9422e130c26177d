"""Steps and clipping over sharded parameters against plain tensors of the same sizes.

Both sides of a pair run next to each other, many times, and each time gives one ratio: what slows
the machine slows both. Times are CPU time of one thread; the fake process group sends nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import torch
import torch.distributed as dist
from common import Spread
from host_models import plain
from host_overhead import Shape, local, ours, with_gradients
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_compose

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW, foreach": partial(torch.optim.AdamW, lr=1e-6, foreach=True),
    "AdamW, fused": partial(torch.optim.AdamW, lr=1e-6, fused=True),
    "AdamW, one by one": partial(torch.optim.AdamW, lr=1e-6, foreach=False),
    "SGD with momentum, foreach": partial(torch.optim.SGD, lr=1e-6, momentum=0.9, foreach=True),
}
Pair = tuple[Callable[[], object], Callable[[], object]]


def plain_like(sharded: list[Any]) -> list[Tensor]:
    """Plain parameters of this rank's sizes, with gradients."""
    found: list[Tensor] = []
    for piece in local(sharded):
        param = nn.Parameter(torch.randn(piece.shape))
        param.grad = torch.randn(piece.shape)
        found.append(param)
    return found


def compare(pair: Pair, rounds: int) -> tuple[Spread, Spread, Spread]:
    """ms of the plain side and of ours, and ours ÷ plain, over ``rounds`` neighbouring calls."""
    samples: list[tuple[float, float]] = []
    for turn in range(rounds + 3):
        taken = [0.0, 0.0]
        for side in (turn % 2, 1 - turn % 2):
            start = time.process_time()
            pair[side]()
            taken[side] = (time.process_time() - start) * 1e3
        samples.append((taken[0], taken[1]))
    samples = samples[3:]
    ratios = [mine / plain for plain, mine in samples]
    return (
        Spread.of([plain for plain, _ in samples]),
        Spread.of([mine for _, mine in samples]),
        Spread.of(sorted(ratios)[rounds // 10 : rounds - rounds // 10]),
    )


def shard_like(shape: Shape, shards: list[Tensor]) -> nn.Module:
    """The plain model with ``shards`` in the place of its parameters, and their gradients."""
    model = plain(shape)
    for param, shard in zip(model.parameters(), shards, strict=True):
        param.data, param.grad = shard.data, shard.grad
    return model


def with_all_reduce(clip: Callable[[], object]) -> Callable[[], object]:
    """``clip`` and one all-reduce of a number, which sharded gradients cannot do without."""
    number = torch.zeros(1)

    def run() -> None:
        clip()
        dist.all_reduce(number)

    return run


def pairs_of(shape: Shape, model: nn.Module, views: dict[str, list[Any]]) -> dict[str, Pair]:
    """What is timed, by name: the plain side and ours."""
    clip = partial(torch.nn.utils.clip_grad_norm_, max_norm=1.0)
    sharded = list(model.parameters())
    shards = plain_like(sharded)
    twin = shard_like(shape, shards)  # a module whose parameters torch has to list, too
    pairs: dict[str, Pair] = {}
    for name, make in OPTIMIZERS.items():
        pairs[name] = make(shards).step, make(sharded).step
        for view, params in views.items():
            pairs[f"{name}, {view}"] = make(shards).step, make(params).step
    mine = partial(fsdp_compose.clip_grad_norm_, max_norm=1.0)
    of_list, of_module = partial(clip, shards), lambda: clip(list(twin.parameters()))
    for name, plain_clip, our_clip in (
        ("torch's", of_list, partial(clip, sharded)),
        ("ours", of_list, partial(mine, sharded)),
        ("ours, of a module", of_module, partial(mine, model)),
    ):
        pairs[f"clip_grad_norm_, {name}"] = plain_clip, our_clip
        pairs[f"clip_grad_norm_, {name}; plain with an all-reduce"] = (
            with_all_reduce(plain_clip),
            our_clip,
        )
    return pairs


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, default=24)
    parser.add_argument("--linears", type=int, default=6, help="linear layers per unit")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=100, help="neighbouring calls of each pair")
    common.add_output_options(parser)
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,))
    shape = Shape(options.units, options.linears, options.width, 4, torch.float32)
    rows, figures = [], {}
    with common.without_torch_warnings():
        models = [ours(shape, mesh) for _ in range(3)]
        views = {
            "local_parameters": fsdp_compose.local_parameters(models[1]),
            "flat_parameters": fsdp_compose.flat_parameters(models[2]),
        }
        for model in models:
            with_gradients(model, shape, "ours")
        for name, pair in pairs_of(shape, models[0], views).items():
            plain, mine, ratio = compare(pair, options.rounds)
            rows.append([name, *plain.cells(2), *mine.cells(2), *ratio.cells(2)])
            figures[name] = {"plain": plain, "ours": mine, "ratio": ratio}
    count = len(list(models[0].parameters()))
    headers = ["", "plain, ms", "min–max", "ours, ms", "min–max", "ours ÷ plain", "middle 80 %"]
    sections = [
        f"{count} parameters in {options.units} units, width {options.width}; fake process group "
        f"of 2 ranks on CPU; medians over {options.rounds} neighbouring calls. CPU time of one "
        "thread. Gradients are those that a backward left.",
        common.table(headers, rows),
        "## Machine",
        common.machine(),
    ]
    common.publish("optimizer_step", options, sections, figures)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
