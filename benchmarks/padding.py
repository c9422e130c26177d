"""Prints how much of a bucket is padding, and how long planning it takes.

The columns, each in percent of the elements that hold parameters (2-byte elements):

- ``element``, ``row``, ``tensor``: ``plan_layout`` with that granularity on every parameter;
- ``fsdp2``: each parameter's dim 0 padded to a multiple of the world size;
- ``lcm``: the whole bucket padded to a multiple of world size x lcm of rows, as Megatron-FSDP does
  (a lower bound: gaps between its parameters are not counted).

Run ``python benchmarks/padding.py``; it needs no GPU, no process group and a few seconds.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence

from common import add_output_options, machine, publish, table

from fsdp_compose.layout.planner import plan_layout
from fsdp_compose.layout.shards import Extent, Granularity

Shape = tuple[int, ...]

ITEMSIZE = 2
WORLD_SIZES = (8, 256, 1024, 16384)
GRANULARITIES: tuple[Granularity, ...] = (1, "row", "tensor")


def gpt2_block() -> list[Shape]:
    """One GPT-2 124M block: 12 tensors."""
    block: list[Shape] = [(768,), (768,), (768, 2304), (2304,), (768, 768), (768,)]
    return [*block, (768,), (768,), (768, 3072), (3072,), (3072, 768), (768,)]


def gpt2() -> list[Shape]:
    """GPT-2 124M as one unit: 148 tensors."""
    return [(50257, 768), (1024, 768), *gpt2_block() * 12, (768,), (768,)]


def llama_70b_block() -> list[Shape]:
    """One Llama-70B block: 9 tensors, 0.86 billion elements."""
    attention: list[Shape] = [(8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192)]
    return [*attention, (28672, 8192), (28672, 8192), (8192, 28672), (8192,), (8192,)]


def moe_128_block() -> list[Shape]:
    """One block with 128 fused experts, gpt-oss-120b's shapes: 17 tensors, 3.2 billion elements."""
    attention: list[Shape] = [(4096, 2880), (4096,), (512, 2880), (512,), (512, 2880), (512,)]
    attention += [(2880, 4096), (2880,), (64,), (2880,), (2880,), (128, 2880), (128,)]
    return [*attention, (128, 5760, 2880), (128, 5760), (128, 2880, 2880), (128, 2880)]


def extents_of(shapes: Sequence[Shape], *units: Granularity) -> list[Extent]:
    """The shapes as extents, granularities taken in turn."""
    return [Extent(f"p{i}", shape, units[i % len(units)]) for i, shape in enumerate(shapes)]


def plan_ms(extents: Sequence[Extent], world_size: int, repeats: int = 3) -> float:
    """The least planning time of ``repeats``, in milliseconds."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        plan_layout(extents, ITEMSIZE, world_size)
        seconds.append(time.perf_counter() - start)
    return 1e3 * min(seconds)


def fsdp2_numel(shapes: Sequence[Shape], world_size: int) -> int:
    """Elements when each parameter's dim 0 is padded to a multiple of the world size."""
    return sum(
        -(-shape[0] // world_size) * world_size * math.prod(shape[1:]) for shape in shapes if shape
    )


def lcm_numel(shapes: Sequence[Shape], world_size: int) -> int:
    """Elements when the bucket is padded to a multiple of world size x lcm of rows."""
    unit = world_size * math.lcm(*(math.prod(shape[1:]) for shape in shapes))
    return -(-sum(map(math.prod, shapes)) // unit) * unit


def padding_table() -> str:
    """What each granularity, and other libraries' layouts, add to the parameters."""
    models = {
        "gpt2 block": gpt2_block(),
        "gpt2 whole": gpt2(),
        "llama-70b block": llama_70b_block(),
        "moe-128 block": moe_128_block(),
    }
    rows = []
    for name, shapes in models.items():
        total = sum(map(math.prod, shapes))
        for world_size in WORLD_SIZES:
            sizes = [
                plan_layout(extents_of(shapes, unit), ITEMSIZE, world_size).numel
                for unit in GRANULARITIES
            ]
            sizes += [fsdp2_numel(shapes, world_size), lcm_numel(shapes, world_size)]
            cells = [f"{100 * (size / total - 1):.4f}" for size in sizes]
            rows.append([name, str(world_size), *cells])
    return table(["shapes", "ranks", "element", "row", "tensor", "FSDP2", "LCM"], rows)


def times_table(shapes: list[Shape]) -> str:
    """Time to plan ``shapes``, mixed granularities included."""
    mixes: dict[str, tuple[Granularity, ...]] = {
        "element": (1,),
        "row": ("row",),
        "tensor": ("tensor",),
        "mixed": (1, "row", "tensor", 256),
    }
    rows = []
    for world_size in WORLD_SIZES:
        times = [plan_ms(extents_of(shapes, *mix), world_size) for mix in mixes.values()]
        rows.append([str(world_size), *(f"{ms:.1f}" for ms in times)])
    return table(["ranks", *mixes], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_output_options(parser)
    options = parser.parse_args()
    shapes = ((llama_70b_block() + moe_128_block() + gpt2_block()) * 14)[:500]
    sections = [
        "Padding, % of parameter elements",
        padding_table(),
        f"Planning {len(shapes)} transformer-like parameters, ms (best of 3)",
        times_table(shapes),
        "## Machine",
        machine(),
    ]
    publish("padding", options, sections, {})


if __name__ == "__main__":
    main()
