"""Cells of ``make faults``: a rank is lost under torch's elastic agent, and training goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import faults

pytestmark = pytest.mark.slow


def test_a_killed_rank_is_named_and_one_rank_resumes(tmp_path: Path) -> None:
    """The save before it loads, on fewer ranks, with the losses of a run that nothing disturbed."""
    wanted = faults.expected_losses(tmp_path / "undisturbed")
    assert len(wanted) == faults.STEPS and wanted[-1] != wanted[0]
    folder = tmp_path / "killed"
    cell = faults.run_cell("killed", "backward", folder, wanted, 1)
    assert not cell.wrong and "rank 1 does not answer" in cell.said, cell
    job, again = faults.Job(folder, "killed", "backward"), faults.Ended(True, 1.0, "", 0)
    for ended, losses, found in (
        (faults.Ended(False, 1.0, cell.said, 0), [v + 1e-3 for v in wanted], "other losses"),
        (faults.Ended(False, 1.0, "", 0), wanted, "nobody said"),
        (faults.Ended(False, 1.0, cell.said, 1), wanted, "1 processes left"),
        (faults.Ended(False, faults.PATIENCE, cell.said, 0), wanted, "did not end"),
    ):
        assert found in faults.judge(job, ended, again, losses, "").wrong
    (folder / faults.STRUCK).unlink()
    ended = faults.Ended(False, 1.0, cell.said, 0)
    assert "did not happen" in faults.judge(job, ended, again, wanted, "").wrong
