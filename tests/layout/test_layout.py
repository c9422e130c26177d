"""Every layout the planner returns is exact, aligned, uncut and no larger than the baseline."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import accumulate, cycle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_compose.base.parts import split_around
from fsdp_compose.layout.boxes import Box, boxes
from fsdp_compose.layout.matrix_work import whole_work
from fsdp_compose.layout.planner import lcm_layout, plan_layout
from fsdp_compose.layout.shards import ALIGN_BYTES, Extent, Granularity, Layout, Slice

Shape = tuple[int, ...]

shapes = st.lists(st.one_of(st.integers(0, 9), st.sampled_from([12, 16, 31, 64])), max_size=3).map(
    tuple
)
granularities: st.SearchStrategy[Granularity] = st.one_of(
    st.just(1), st.sampled_from(["row", "tensor"]), st.integers(1, 40)
)
itemsizes = st.sampled_from([1, 2, 4, 8, 16])
world_sizes = st.one_of(st.integers(1, 9), st.sampled_from([16, 31, 64]))


@st.composite
def extent_lists(
    draw: st.DrawFn, granularity: st.SearchStrategy[Granularity] = granularities
) -> list[Extent]:
    pairs = draw(st.lists(st.tuples(shapes, granularity), max_size=8))
    return [Extent(f"p{i}", shape, unit) for i, (shape, unit) in enumerate(pairs)]


def expected_block(extent: Extent) -> int:
    """The block, restated from the contract rather than read from the code."""
    if extent.granularity == "tensor":
        return max(1, extent.numel)
    if extent.granularity == "row":
        return max(1, extent.numel // extent.shape[0]) if extent.shape and extent.numel else 1
    return int(extent.granularity)


def owner_table(layout: Layout) -> list[list[int]]:
    """For each parameter, the rank that owns each element; fails on an element owned twice."""
    owner = [[-1] * extent.numel for extent in layout.extents]
    taken: set[int] = set()
    for rank in range(layout.world_size):
        for index, part in enumerate(layout.slices(rank)):
            assert 0 <= part.shard_offset <= part.shard_offset + part.numel <= layout.shard_numel
            if part.numel == 0:
                assert part == Slice(0, 0, 0)
            for element in range(part.start, part.stop):
                where = rank * layout.shard_numel + part.shard_offset + element - part.start
                assert where == layout.offsets[index] + element
                assert where not in taken
                assert owner[index][element] == -1
                taken.add(where)
                owner[index][element] = rank
    return owner


@given(extent_lists(), itemsizes, world_sizes)
@settings(max_examples=300, deadline=None)
def test_every_element_is_owned_once_aligned_and_uncut(
    extents: list[Extent], itemsize: int, world_size: int
) -> None:
    layout = plan_layout(extents, itemsize, world_size)
    owner = owner_table(layout)
    assert layout.extents == tuple(extents)
    assert layout.numel == layout.shard_numel * world_size
    assert layout.shard_numel * itemsize % ALIGN_BYTES == 0
    assert layout.padding == layout.numel - sum(math.prod(extent.shape) for extent in extents)
    assert layout.padding_bytes == layout.padding * itemsize
    for index, (extent, ranks) in enumerate(zip(extents, owner, strict=True)):
        assert -1 not in ranks
        assert list(layout.owners(index)) == sorted(set(ranks))
        block = expected_block(extent)
        assert all(len(set(ranks[i : i + block])) == 1 for i in range(0, len(ranks), block))
    starts = [layout.offsets[index] for index in layout.memory_order]
    assert sorted(layout.memory_order) == list(range(len(extents)))
    assert starts == sorted(starts)


@given(extent_lists(), itemsizes, world_sizes)
@settings(max_examples=300, deadline=None)
def test_never_worse_than_the_lcm_baseline(
    extents: list[Extent], itemsize: int, world_size: int
) -> None:
    layout, baseline = (plan(extents, itemsize, world_size) for plan in (plan_layout, lcm_layout))
    unit = math.lcm(ALIGN_BYTES // itemsize, *(expected_block(e) for e in extents if e.numel))
    rows = sum(-(-extent.numel // unit) for extent in extents)
    assert baseline.shard_numel == -(-rows // world_size) * unit
    assert layout.shard_numel <= baseline.shard_numel


@given(extent_lists(st.just(1)), itemsizes, st.integers(1, 16384))
@settings(max_examples=200, deadline=None)
def test_element_granularity_keeps_order_without_gaps(
    extents: list[Extent], itemsize: int, world_size: int
) -> None:
    layout = plan_layout(extents, itemsize, world_size)
    end = 0
    for extent, offset in zip(extents, layout.offsets, strict=True):
        assert offset == end
        end += extent.numel
    assert layout.padding_bytes < ALIGN_BYTES * world_size
    assert layout.shard_numel == 0 or (layout.shard_numel - ALIGN_BYTES // itemsize) < (
        -(-end // world_size)
    )


@given(extent_lists(), itemsizes, world_sizes)
@settings(deadline=None)
def test_planning_is_deterministic(extents: list[Extent], itemsize: int, world_size: int) -> None:
    assert plan_layout(extents, itemsize, world_size) == plan_layout(
        list(extents), itemsize, world_size
    )


def gpt2() -> list[Shape]:
    block = [(768,), (768,), (768, 2304), (2304,), (768, 768), (768,), (768,), (768,)]
    block += [(768, 3072), (3072,), (3072, 768), (768,)]
    return [(50257, 768), (1024, 768), *(block * 12), (768,), (768,)]


def llama_70b_block() -> list[Shape]:
    attention = [(8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192)]
    return [*attention, (28672, 8192), (28672, 8192), (8192, 28672), (8192,), (8192,)]


def moe_128_block() -> list[Shape]:
    attention = [(4096, 2880), (4096,), (512, 2880), (512,), (512, 2880), (512,)]
    attention += [(2880, 4096), (2880,), (64,), (2880,), (2880,), (128, 2880), (128,)]
    return [*attention, (128, 5760, 2880), (128, 5760), (128, 2880, 2880), (128, 2880)]


MODELS = {"gpt2": gpt2, "llama-70b": llama_70b_block, "moe-128": moe_128_block}


def named(tensors: Sequence[Shape], *units: Granularity) -> list[Extent]:
    turns = cycle(units or (1,))
    return [Extent(f"p{i}", shape, next(turns)) for i, shape in enumerate(tensors)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 8, 48, 256, 1000, 1024, 4096, 16383, 16384])
def test_padding_law_on_real_shapes(model: str, world_size: int) -> None:
    for itemsize in (1, 2, 4):
        layout = plan_layout(named(MODELS[model]()), itemsize, world_size)
        assert layout.padding_bytes < ALIGN_BYTES * world_size


@pytest.mark.parametrize(
    ("model", "world_size", "ours", "baseline"),
    [
        ("gpt2", 8, 0.00001, 0.006),
        ("gpt2", 256, 0.005, 0.02),
        ("llama-70b", 4, 0.0001, 0.0004),
        ("moe-128", 2, 0.0001, 0.07),
    ],
)
def test_rows_pad_less_than_the_baseline(
    model: str, world_size: int, ours: float, baseline: float
) -> None:
    extents = named(MODELS[model](), "row")
    total = sum(extent.numel for extent in extents)
    assert plan_layout(extents, 2, world_size).padding < ours * total
    assert lcm_layout(extents, 2, world_size).padding > baseline * total


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("world_size", [8, 32, 256, 1024, 16384])
def test_rows_meet_the_lower_bound(model: str, world_size: int) -> None:
    """A parameter of more than two shards covers one, which must then hold whole rows of it."""
    extents = named(MODELS[model](), "row")
    shard = plan_layout(extents, 2, world_size).shard_numel
    need = max(
        -(-sum(extent.numel for extent in extents) // world_size),
        *(expected_block(extent) for extent in extents),
    )
    unit = math.lcm(8, *(expected_block(e) for e in extents if e.numel > 2 * shard))
    assert need <= shard < 1.0002 * -(-need // unit) * unit


def test_whole_tensors_are_balanced() -> None:
    extents = named([(64, 64)] * 16, "tensor")
    layout = plan_layout(extents, 4, 8)
    assert layout.padding == 0
    loads = [sum(part.numel for part in layout.slices(rank)) for rank in range(8)]
    assert loads == [2 * 64 * 64] * 8
    # One large tensor sets the shard size; the others share the ranks it leaves.
    layout = plan_layout(named([(1000,), *[(100,)] * 14], "tensor"), 4, 8)
    assert layout.shard_numel == 1000
    counts = [sum(part.numel > 0 for part in layout.slices(rank)) for rank in range(8)]
    assert sorted(counts) == [1, 2, 2, 2, 2, 2, 2, 2]


def test_whole_tensors_are_packed_when_order_matters() -> None:
    # In the caller's order the 6s take a shard of 8 each; only pairing 6+2 and 4+4 fits 3 ranks.
    layout = plan_layout(named([(4,), (6,), (2,), (4,), (6,), (2,)], "tensor"), 8, 3)
    assert (layout.shard_numel, layout.padding) == (8, 0)


def test_gaps_that_packing_leaves_are_used() -> None:
    """From the first element of the buffer on, and the largest first where work is balanced."""
    extents = [Extent("a", (9, 4), 3), Extent("b", (9, 5), "tensor"), Extent("c", (2, 7), "tensor")]
    assert plan_layout(extents, 16, 2).shard_numel == 48
    kinds: list[tuple[Shape, Granularity]] = [((9, 7), "row"), ((12, 3), "tensor"), ((9, 9), 3)]
    kinds += [((6, 1), "tensor")]
    layout = plan_layout([Extent("p", *kind) for kind in kinds], 4, 5)
    assert layout.shard_numel == 44 and max(whole_work(layout)) == 12 * 3 * 3


def test_a_larger_shard_can_be_infeasible() -> None:
    # Rows of 6 over 4 ranks: shards of 12 hold two rows each, shards of 14 and 16 would cut one.
    extents = [Extent("w", (8, 6), "row")]
    assert plan_layout(extents, 8, 4).shard_numel == 12
    for shard in (14, 16):
        with pytest.raises(ValueError, match=r"'w'.*cuts a block of 6"):
            Layout(tuple(extents), (0,), shard, 4, 8)


@pytest.mark.parametrize(
    ("tensors", "units", "shard_numel"),
    [
        ([(8, 8, 16), (12,), (16, 1, 64), (8, 12, 2)], ("row", 6, "row", "row"), 576),
        ([(24, 64), (64, 2), (64, 24), (16, 24, 1)], ("row", "row", 6, 6), 900),
    ],
)
def test_sizes_that_plain_bisection_misses(
    tensors: list[Shape], units: tuple[Granularity, ...], shard_numel: int
) -> None:
    assert plan_layout(named(tensors, *units), 8, 4).shard_numel <= shard_numel


@given(extent_lists(), itemsizes, world_sizes)
@settings(deadline=None)
def test_a_shard_is_never_larger_than_the_bucket(
    extents: list[Extent], itemsize: int, world_size: int
) -> None:
    align = ALIGN_BYTES // itemsize
    total = sum(extent.numel for extent in extents)
    assert plan_layout(extents, itemsize, world_size).shard_numel <= -(-total // align) * align


@pytest.mark.parametrize("world_size", [8, 1024, 16384])
@pytest.mark.parametrize("units", [(1,), ("row",), ("tensor",), (1, "row", "tensor", 256)])
def test_planning_500_parameters_is_fast(world_size: int, units: tuple[Granularity, ...]) -> None:
    tensors = (llama_70b_block() + moe_128_block() + gpt2()[:14]) * 13
    start = time.perf_counter()
    plan_layout(named(tensors[:500], *units), 2, world_size)
    assert time.perf_counter() - start < 5.0  # generous: the benchmark states the figure


@pytest.mark.parametrize("unit", [1, "row", "tensor", 7])
@pytest.mark.parametrize("tensors", [[], [(0,)], [(3, 0), (0, 5)]])
def test_a_bucket_without_elements(tensors: list[Shape], unit: Granularity) -> None:
    layout = plan_layout(named(tensors, unit), 2, 4)
    assert (layout.shard_numel, layout.padding) == (0, 0)
    assert layout.slices(3) == (Slice(0, 0, 0),) * len(tensors)
    assert [list(layout.owners(i)) for i in range(len(tensors))] == [[]] * len(tensors)


def test_extent_counts() -> None:
    assert Extent("s", ()).numel == 1
    assert Extent("s", (), "row").block == 1
    assert Extent("b", (5,), "row").block == 1
    assert Extent("w", (4, 5, 6), "row").block == 30
    assert Extent("w", (4, 5, 6), "tensor").block == 120
    assert Extent("e", (0, 5), "tensor").block == 1


A, B = Extent("a", (6,)), Extent("b", (2, 5), "row")


@pytest.mark.parametrize(
    ("extents", "offsets", "shard_numel", "message"),
    [
        ((A,), (-1,), 8, r"'a': lies at \[-1, 5\), out of the buffer's \[0, 16\)"),
        ((A,), (11,), 8, r"'a': lies at \[11, 17\)"),
        ((A, A), (0, 5), 8, r"'a': starts at 5, overlaps 'a' up to 6"),
        ((A, B), (4, 0), 8, "'b'.*cuts a block of 5"),
        ((A, B), (0, 6), 8, "'b'.*cuts a block of 5"),
        ((Extent("c", (7,), "tensor"),), (3,), 8, "'c'.*cuts a block of 7"),
        ((A,), (0,), 6, "shard of 6 elements x 4 bytes; wanted a multiple of 16 bytes"),
        ((A,), (0,), -4, "shard of -4"),
        ((A,), (0, 6), 8, "2 offsets for 1 parameters"),
    ],
)
def test_an_invalid_layout_cannot_be_built(
    extents: tuple[Extent, ...], offsets: tuple[int, ...], shard_numel: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(extents, offsets, shard_numel, 2, 4)


def test_a_shard_inside_a_parameter_holds_whole_blocks() -> None:
    # Blocks of 5 from offset 3: the boundary at 8 is between blocks, the one at 16 is not.
    with pytest.raises(ValueError, match=r"'w'.*cuts a block of 5"):
        Layout((Extent("w", (3, 5), "row"),), (3,), 8, 3, 4)
    Layout((Extent("w", (2, 5), "row"),), (3,), 8, 3, 4)


@given(extent_lists(), itemsizes, st.integers(1, 5), st.data())
@settings(max_examples=300, deadline=None)
def test_the_proof_agrees_with_counting(
    extents: list[Extent], itemsize: int, world_size: int, data: st.DataObject
) -> None:
    """Random offsets: ``Layout`` accepts exactly those that an element-by-element count accepts."""
    shard = data.draw(st.integers(0, 12)) * (ALIGN_BYTES // itemsize)
    offset = st.integers(0, max(0, shard * world_size - 1))
    offsets = tuple(data.draw(offset) for _ in extents)
    valid, taken = True, set[int]()
    for extent, base in zip(extents, offsets, strict=True):
        places = range(base, base + extent.numel)
        block = expected_block(extent)
        valid &= places.stop <= shard * world_size and taken.isdisjoint(places)
        valid &= all(
            len({at // max(1, shard) for at in places[i : i + block]}) == 1
            for i in range(0, extent.numel, block)
        )
        taken.update(places)
    if valid:
        Layout(tuple(extents), offsets, shard, world_size, itemsize)
    else:
        with pytest.raises(ValueError, match="parameter 'p"):
            Layout(tuple(extents), offsets, shard, world_size, itemsize)


@pytest.mark.parametrize(
    ("shape", "unit", "message"),
    [
        ((3, -1), 1, r"'w': shape \(3, -1\) has a negative dimension"),
        ((3,), 0, "'w': granularity is 0; wanted a block of 1 element or more"),
        ((3,), -2, "'w': granularity is -2"),
        ((3,), True, "'w': granularity is True"),
        ((3,), "column", "'w': granularity is 'column'"),
        ((3,), 2.0, "'w': granularity is 2.0"),
    ],
)
def test_extent_errors(shape: Shape, unit: Granularity, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Extent("w", shape, unit)


def test_plan_errors() -> None:
    with pytest.raises(ValueError, match="itemsize is 3 bytes; wanted 1, 2, 4, 8 or 16"):
        plan_layout([A], 3, 2)
    with pytest.raises(ValueError, match="world_size is 0; wanted 1 rank or more"):
        plan_layout([A], 4, 0)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank {rank} is out of range; wanted 0 to 1"):
            plan_layout([A], 4, 2).slice_of(0, rank)


@given(st.lists(st.integers(1, 6), max_size=4), st.data())
@settings(max_examples=300, deadline=None)
def test_boxes_cover_the_range_in_order(shape: list[int], data: st.DataObject) -> None:
    total = math.prod(shape)
    stop = data.draw(st.integers(0, total))
    start = data.draw(st.integers(0, stop))
    regions = boxes(shape, start, stop)
    covered: list[int] = []
    for box in regions:
        assert len(box.offsets) == len(box.sizes) == len(shape)
        cells = [0]
        for offset, size, length in zip(box.offsets, box.sizes, shape, strict=True):
            assert 0 <= offset < offset + size <= length
            cells = [cell * length + at for cell in cells for at in range(offset, offset + size)]
        covered += cells
    assert covered == list(range(start, stop))
    assert len(regions) <= max(1, 2 * len(shape) - 1)


def test_boxes_examples() -> None:
    assert boxes((), 0, 1) == (Box((), ()),)
    assert boxes((4, 3), 0, 12) == (Box((0, 0), (4, 3)),)
    assert boxes((4, 3), 3, 9) == (Box((1, 0), (2, 3)),)
    assert boxes((4, 3), 4, 5) == (Box((1, 1), (1, 1)),)
    assert boxes((4, 3), 2, 7) == (
        Box((0, 2), (1, 1)),
        Box((1, 0), (1, 3)),
        Box((2, 0), (1, 1)),
    )
    assert boxes((3, 0), 0, 0) == ()
    for start, stop in ((-1, 2), (3, 2), (0, 13)):
        with pytest.raises(ValueError, match=r"wanted 0 <= start <= stop <= 12"):
            boxes((4, 3), start, stop)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4))), st.integers(0, 3), st.randoms())
def test_spans_and_gaps_are_the_whole(cut: list[tuple[int, int]], rest: int, random: Any) -> None:
    """A flat buffer is cut into its spans and what lies between them, in whatever order they come.

    Each span is a piece, what is no span's piece is a gap, and all of them in a row are the whole.
    """
    spans: list[tuple[int, int]] = []
    total = 0
    for gap, numel in cut:
        spans.append((total + gap if numel else 0, numel))
        total += (gap + numel) * bool(numel)
    random.shuffle(spans)
    sizes, places = split_around(spans, total + rest)
    starts = list(accumulate(sizes, initial=0))
    assert starts[-1] == total + rest
    assert len(set(places)) == len(spans)
    for (start, numel), place in zip(spans, places, strict=True):
        assert sizes[place] == numel
        assert not numel or starts[place] == start
