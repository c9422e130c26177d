"""Laws of which buffer at a fixed address each unit has, over random trees of units."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from fsdp_compose.layout.static_buffers import StaticUnit, Turns, offsets, place_gathered

Tree = tuple["Tree", ...]

TREES: st.SearchStrategy[Tree] = st.recursive(
    st.just(()), lambda trees: st.lists(trees, max_size=5).map(tuple), max_leaves=10
)


@dataclass
class Drawn:
    members: list[StaticUnit]
    heights: list[int]
    outermost: list[bool]


@st.composite
def models(draw: st.DrawFn) -> Drawn:
    """Units of one model, each behind those inside it, as some are kept and some are shared."""
    drawn, buffers = Drawn([], [], []), draw(st.integers(1, 4))

    def add(tree: Tree, is_outermost: bool) -> int:
        inside = [add(branch, False) for branch in tree]
        sizes = draw(st.lists(st.integers(0, 2000), min_size=1, max_size=2).map(tuple))
        keeps = draw(st.sampled_from([None, None, False, True]))
        is_shared = draw(st.integers(0, 5)) == 0
        drawn.members.append(StaticUnit(sizes, sizes, frozenset(inside), keeps, is_shared, buffers))
        drawn.heights.append(1 + max((drawn.heights[i] for i in inside), default=-1))
        drawn.outermost.append(is_outermost)
        return len(drawn.members) - 1

    for tree in draw(st.lists(TREES, min_size=1, max_size=4)):
        add(tree, True)
    return drawn


def users(turns: Turns, buffer: int) -> list[int]:
    return [i for i, found in enumerate(turns.buffer) if found == buffer]


@given(models())
def test_who_shares_a_gathered_buffer(drawn: Drawn) -> None:
    """Who stays gathered shares with none; others take turns with units at their height."""
    turns = place_gathered(drawn.members)
    taken: dict[int, list[int]] = {}
    for i, member in enumerate(drawn.members):
        needed, buffer = offsets(member.gathered)[-1], turns.buffer[i]
        assert (buffer == -1) == (needed == 0)
        if not needed:
            continue
        assert turns.nbytes[buffer] >= needed
        stays = drawn.outermost[i] if member.keeps is None else member.keeps
        if stays or member.is_shared:
            assert users(turns, buffer) == [i]
            continue
        assert {drawn.heights[other] for other in users(turns, buffer)} == {drawn.heights[i]}
        before = taken.setdefault(drawn.heights[i], [])
        assert buffer not in before[max(0, len(before) - member.buffers + 1) :]
        before.append(buffer)
    for buffer, nbytes in enumerate(turns.nbytes):
        sizes = [offsets(drawn.members[i].gathered)[-1] for i in users(turns, buffer)]
        assert nbytes == max(sizes)
    assert all(len(set(buffers)) <= drawn.members[0].buffers for buffers in taken.values())
