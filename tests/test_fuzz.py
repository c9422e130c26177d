"""A short run of the differential fuzzer, and every program that once failed in it."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest

from fsdp_compose.simulation import DelayMessage, KillRank, RaiseError

from fuzz import case_of, failure_of, run_seeds, shrink
from fuzz_found import FOUND
from fuzz_operations import operations
from fuzz_programs import FIRST_OPS, OPS, Case, Leaf, Node, OnPurpose, draw, leaves, smaller
from fuzz_search import Found, run_in_workers, seeds_of, table
from harness import run_ranks

SHORT = {1: range(12), 2: range(30), 3: range(10), 4: range(8), 7: [0], 8: [0], 12: [0]}


@pytest.mark.slow
@pytest.mark.parametrize("world", SHORT)
def test_random_programs_equal_the_plain_model(world: int) -> None:
    """`make fuzz` looks further, and shrinks what it finds."""
    for seed in SHORT[world]:
        assert failure_of(case_of(seed, world), seed) is None, f"seed {seed} of world {world}"


@pytest.mark.slow
def test_random_programs_on_gloo() -> None:
    """A few of them on processes that a launcher would start."""
    with tempfile.TemporaryFile() as progress:
        run_ranks(run_seeds, 2, 2, list(range(8)), progress, timeout=100)


@pytest.mark.parametrize("name", FOUND)
def test_programs_that_once_failed(name: str) -> None:
    assert failure_of(FOUND[name]) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "strategy"),
    [(1, "FULL_SHARD"), (1, "NO_SHARD"), (2, "FULL_SHARD"), (2, "SHARD_GRAD_OP")],
)
def test_a_program_with_every_operation(world: int, strategy: str) -> None:
    """A fixed model goes through every operation, each with what those before left behind."""
    inner = Node((Leaf("matrix", unit=True), Leaf("scalar"), Leaf("matrix", tie=0)), True, "saved")
    again = ["toggle", *FIRST_OPS, "step"] if strategy == "FULL_SHARD" else []
    known = FIRST_OPS if world == 1 and strategy == "NO_SHARD" else OPS
    ops = tuple((op, i) for i, op in enumerate([*known, "step", *again]))
    recompute = "reentrant" if strategy == "SHARD_GRAD_OP" else "saved"
    leaves_ = (Leaf("low rank", frozen=True), Leaf("norm", dtype="float32"))
    other = Node(leaves_, True, recompute)
    tree = Node((Leaf("transposed"), inner, other, Leaf("matrix", tie=1, unit=True)), True)
    assert failure_of(Case(tree, world, strategy, ops)) is None


def test_every_operation_is_drawn_and_known() -> None:
    drawn = {op for seed in range(200) for op, _ in draw(seed, 2).ops}
    assert drawn == set(OPS) == set(operations)


def test_a_seed_gives_the_same_program() -> None:
    assert draw(7, 2) == draw(7, 2) != draw(8, 2)


def test_a_search_is_logged_and_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A failure is printed and kept; a second call runs only what the log does not have."""
    log = str(tmp_path / "log")

    def find(seed: int) -> Found:
        return Found(seed, 2, "none", "gloo", ["step", "edit"], "wrong!" * (seed == 7))

    def run(*texts: str) -> int:
        return run_in_workers(find, seeds_of(texts), 2, log, time.monotonic() + 60)

    assert run("0-450") and "wrong!" in capfd.readouterr().out
    assert [len(chunk) for chunk in seeds_of(["0-450"])] == [200, 200, 50]
    assert not run("0-450", "900")
    found = table(log)
    assert "| programs | 451 |" in found and "| seeds | 0-450, 900-901 |" in found
    assert "| operations | 902: step: 451, edit: 451 |" in found and "| findings | 1 |" in found


def test_faults_are_judged() -> None:
    """What is late may change nothing; what is dead or broken may end in our errors only."""
    model, steps = Node((Node((Leaf("matrix"),), True),)), (("step", 0), ("step", 0))
    for fault in (KillRank(1, 9), RaiseError(1, 9, OnPurpose("mine")), DelayMessage(1, 9, 1.0)):
        assert failure_of(Case(model, 2, "FULL_SHARD", steps, fault=fault)) is None
    for fault in (RaiseError(1, 9, KeyError("mine")), DelayMessage(1, 9, 1e4)):
        found = failure_of(Case(model, 2, "FULL_SHARD", steps, fault=fault))
        assert found is not None and ("KeyError" in found or "timed out" in found)


def test_a_failure_is_shrunk_to_what_causes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among simpler cases, the smallest that still fails is kept."""

    def fails(case: Case, seed: int = 0) -> str | None:
        guilty = any(op == "clip" for op, _ in case.ops)
        return (
            "wrong" if guilty and any(leaf.kind == "norm" for leaf in leaves(case.tree)) else None
        )

    monkeypatch.setattr("fuzz.failure_of", fails)
    large = Case(
        Node((Leaf("norm"), Node((Leaf("matrix", unit=True), Leaf("vector", tie=0)), True)), True),
        4, "NO_SHARD", (("step", 3), ("clip", 2), ("edit", 1), ("step", 0)), granularity="row",
    )  # fmt: skip
    case, failure = shrink(large)
    assert failure == "wrong"
    assert case.ops == (("clip", 0),) and case.tree == Node((Leaf("norm"),))
    assert not any(fails(simpler) for simpler in smaller(case))
