"""Rows of ``make conformance``, for this library alone, so that its table cannot rot.

The whole table compares four libraries and takes minutes; here are rows of each file that take a
moment, and what is said of rows as a whole.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from conformance import rows
from conformance.outcomes import CLEAR, EXACT, ROWS, Seen, _judge, run_row
from harness import RankError

EXACTLY = """
    autograd.hvp autograd.enabled_inside autograd.checkpoints_inside autograd.kept_view
    identity.deepcopies identity.streams
    meshes.one_shard
    modules.declared_method modules.hidden_between
    precision.mixed_storage
    saving.optimizer_resumes
    setup.tied
    training.participates training.small_sums training.fails_in_backward training.clips_ignored
""".split()
CLEARLY = """
    identity.read_outside identity.to_safetensors identity.optimizer_of_a_copy
    autograd.own_partner
    mistakes.other_rates mistakes.other_order mistakes.frozen_unit mistakes.stale_graph
    modules.max_norm
    saving.other_files saving.other_shape saving.plain_optimizer
    setup.different_seeds setup.no_group setup.late_lora
    training.forgotten_sync training.one_fewer
""".split()
BY_NAME = {case.name: case for case in ROWS}


@pytest.mark.parametrize("name", [*EXACTLY, *CLEARLY])
def test_rows_of_the_table(name: str) -> None:
    seen = run_row(BY_NAME[name], "ours", slower=3.0)
    assert seen.outcome == (CLEAR if name in CLEARLY else EXACT), seen.text


def test_every_row_is_told_apart() -> None:
    """Each has a name and a title of its own, and comes from somewhere."""
    assert len(BY_NAME) == len(ROWS) == len({case.title for case in ROWS}) > 120
    assert {case.key.split()[0][0] for case in ROWS} == set("UDTb")
    files = {case.name.partition(".")[0] for case in ROWS}
    assert files == set(rows.__all__)


def test_outcomes_are_judged_by_the_rules() -> None:
    """An error is clear if it names what is at fault and says what to do; a timeout is a hang."""
    case = BY_NAME["saving.other_shape"]  # at fault: head.weight

    def judge(*errors: RankError, late: bool = False) -> Seen:
        return _judge(case, dict(enumerate(errors)), late)

    clear = RankError("ValueError", "'head.weight' has 3 rows; pass a file of this model")
    unclear = RankError("RuntimeError", "shape mismatch for head.weight")
    nameless = RankError("AssertionError", "you must pass something else")
    timeout = RankError("RuntimeError", "[unbound_buffer.cc] Timed out waiting 4000ms")
    hung = RankError("Hung", "still running")
    assert judge(clear).outcome == judge(unclear, clear).outcome == CLEAR
    assert judge(unclear).outcome == judge(nameless).outcome == "unclear error"
    assert judge(hung).outcome == judge(timeout, hung, late=True).outcome == "hang"
    assert judge(timeout).outcome == judge(unclear, hung).outcome == "unclear error"
    assert judge(RankError("NotApplicable", "none")).outcome == "n/a"


def test_a_wrong_result_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that divided gradients by another number would be silently wrong in the table."""
    import fsdp_compose as fc

    from conformance.libraries import LIBRARIES, Ours

    def shard(self: Ours, *args: object, **options: object) -> object:
        model = Ours.shard(self, *args, **options)
        fc.set_gradient_divide_factor(model, 3.0)
        return model

    wrong = type("Wrongly", (Ours,), {"shard": shard})()
    monkeypatch.setitem(LIBRARIES, "ours", wrong)
    seen = run_row(BY_NAME["training.basic"], "ours", slower=3.0)
    assert seen.outcome == "silently wrong" and "off by" in seen.text
