"""The recorder of an order predicts what comes next, and tells and follows a change."""

from __future__ import annotations

import random

import pytest

from fsdp_compose.base.order import MAX_PASSES, Change, Order


class V:
    """A visitor."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


A, B, C, D, E, R, S = map(V, "ABCDERS")


def test_what_happens_inside_lies_between_visits() -> None:
    """Forwards that run again, and ends of inner backwards, of the sequence that ended last."""
    order = Order()
    order.begin(R)
    order.note_inner(A)
    order.visit(A)
    order.note_inner(None)
    order.end()
    assert order.list_turns() == []
    order.close()
    expected = [("reached", R), ("forward", A), ("reached", A), ("ended", None)]
    assert order.list_turns() == expected
    order.note_inner(B)
    order.forget()
    assert order.list_turns() == expected
    order.begin(R)
    order.end()
    order.close()
    assert order.list_turns() == [("reached", R)]


def run(order: Order, *visits: V, complete: bool = True, quiet: bool = False) -> list[Change]:
    """One pass; the changes it reported."""
    order.begin(visits[0])
    changes = [order.visit(v) for v in visits[1:]]
    return [c for c in (*changes, order.end(complete, quiet)) if c is not None]


def test_a_sequence_repeats() -> None:
    order = Order()
    assert order.ahead(3) == []
    assert not run(order, R, A, B)
    order.close()
    order.begin(R)
    assert order.ahead(0) == []
    assert order.ahead(1) == [A]
    assert order.ahead(3) == [A, B]
    assert order.visit(A) is None
    assert order.ahead(3) == [B]
    assert order.visit(B) is None
    assert order.ahead(3) == []
    assert order.end() is None


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_is_predicted_once_recorded(seed: int) -> None:
    rng = random.Random(seed)
    passes = [[rng.choice([R, S]), *rng.choices([A, B, C, D, E], k=4)] for _ in range(3)]
    order = Order()
    for _ in range(2):
        for visits in passes:
            assert not run(order, *visits)
        order.close()
    flat = [v for p in passes for v in p]
    seen = 0
    for visits in passes:
        order.begin(visits[0])
        seen += 1
        assert order.ahead(99) == flat[seen:]
        for v in visits[1:]:
            assert order.visit(v) is None
            seen += 1
            assert order.ahead(99) == flat[seen:]
        assert order.end() is None


def test_what_a_lost_sequence_assumed_is_forgotten() -> None:
    order = Order()
    run(order, R, A, B)
    order.close()
    order.begin(S)
    order.assume([S, C, D])
    assert order.ahead(9) == [D, C]
    order.forget()
    order.begin(S)
    assert order.ahead(9) == []
    order.forget()
    order.begin(R)
    assert order.ahead(9) == [A, B]


@pytest.mark.parametrize("seed", range(20))
def test_quiet_passes_change_no_prediction(seed: int) -> None:
    """A rank that ran some more, for which nothing was gathered, expects what the others do."""
    rng = random.Random(seed)
    here, there = Order(), Order()
    for _ in range(5):
        for _ in range(rng.randint(0, 4)):
            visits = [rng.choice([R, S]), *rng.choices([A, B, C, D, E], k=rng.randint(0, 4))]
            if rng.random() < 0.5:
                run(here, *visits, quiet=True)
                assert here.visited()[-len(visits) :] == visits
                continue
            for order in (here, there):
                order.begin(visits[0])
            for visit in visits[1:]:
                assert here.ahead(9) == there.ahead(9)
                assert here.visit(visit) == there.visit(visit)
            assert here.end() == there.end()
            assert here.visited(quiet=False) == there.visited()
            assert here.first == there.first == there.current[0][0]
        for order in (here, there):
            order.close()
        assert (here.recorded, here.latest, here.known) == (
            there.recorded, there.latest, there.known,
        )  # fmt: skip


def test_what_ran_in_quiet_passes_is_known() -> None:
    order = Order()
    run(order, R, A)
    run(order, S, B, quiet=True)
    run(order, S, C, quiet=True)
    assert order.visited() == [R, A, S, B, S, C]
    order.close()
    assert order.visited() == [R, A, S, B, S, C]
    assert [[ref() for ref in p] for p in order.routes] == [[S, C], [S, B], [R, A]]
    run(order, S, D, quiet=True)
    order.close()
    assert order.visited() == [S, D]
    assert [[ref() for ref in p] for p in order.routes] == [[S, D], [S, C], [S, B], [R, A]]
    assert [[ref() for ref in p] for p in order.recorded] == [[R, A]]


def test_where_each_ran_last_is_known() -> None:
    """Whatever ran since, but not for visitors that are gone."""
    order, gone = Order(), V("gone")
    for visits in ([R, A, B], [R, gone], [R, B, A, S], [R, C], [R]):
        run(order, *visits)
        order.close()

    def routes() -> list[list[V | None]]:
        return [[ref() for ref in p] for p in order.routes]

    assert routes() == [[R], [R, C], [R, B, A, S], [R, gone]]
    del visits, gone
    run(order, R, C)
    order.close()
    assert routes() == [[R, C], [R, B, A, S]]


def test_many_quiet_passes_end_no_sequence() -> None:
    order = Order()
    run(order, R, A)
    for _ in range(3 * MAX_PASSES):
        run(order, S, quiet=True)
    assert not order.recorded and len(order.current) <= MAX_PASSES
    for _ in range(MAX_PASSES):
        run(order, R, A)
    assert len(order.recorded) == MAX_PASSES


def test_a_change_inside_a_pass_is_told_and_recorded() -> None:
    order = Order()
    run(order, R, A, B, C)
    order.close()
    assert run(order, R, B, C) == [Change(A, B)]
    assert order.ahead(9) == []
    order.close()
    assert run(order, R, B, C) == []
    order.close()
    assert run(order, R, B) == [Change(C, None)]
    order.close()
    assert run(order, R, B, A) == []  # longer than before: nothing was expected


def test_after_a_change_prediction_goes_on() -> None:
    order = Order()
    run(order, R, A, B, C, D)
    order.close()
    order.begin(R)
    assert order.visit(C) == Change(A, C)
    assert order.ahead(9) == [D]
    order.visit(A)
    assert order.ahead(2) == [B, C]
    order.visit(E)
    assert order.ahead(2) == []


def test_passes_come_in_any_number_and_order() -> None:
    order = Order()
    for _ in range(2):  # accumulation, two models in turn, a pipeline that warms up and drains
        for count in (1, 4, 2):
            assert not any(run(order, R, A, B) for _ in range(count))
            order.close()
            assert not any(run(order, S, C) for _ in range(count))
            assert not run(order, R, A, B)
            order.close()
            assert not run(order, S, C)
            order.close()
    order.begin(R)
    assert order.ahead(2) == [A, B]  # of a sequence before the last


def test_a_failed_pass_is_forgotten() -> None:
    order = Order()
    run(order, R, A, B)
    order.close()
    assert run(order, R, A, complete=False) == []
    assert run(order, R, A, B) == []
    order.close()
    order.begin(R)
    order.visit(A)
    order.begin(R)  # the end of the one before was never seen
    assert order.ahead(2) == [A, B]
    order.forget()
    assert order.ahead(2) == []
    assert order.recorded and not order.current


def test_visitors_that_are_gone_are_skipped() -> None:
    order, gone = Order(), V("gone")
    run(order, R, gone, B)
    order.close()
    del gone
    order.begin(R)
    assert order.ahead(3) == [B]
    assert order.visit(B) is None
    root = V("root")
    run(order, root, A)
    order.close()
    del root
    run(order, R)
    order.close()
    assert [refs[0]() for refs in order.recorded] == [R]


def test_a_sequence_without_end_is_cut() -> None:
    order = Order()
    for _ in range(5 * MAX_PASSES):
        run(order, R, A)
    assert len(order.current) <= MAX_PASSES
    assert len(order.recorded) <= MAX_PASSES
