"""The fuzzer's random programs on real ranks that communicate over NCCL: run with ``-m cuda``."""

from __future__ import annotations

import tempfile

import pytest

from fuzz import run_seeds
from harness import run_ranks

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_programs_train_as_one_process(first: int) -> None:
    with tempfile.TemporaryFile() as progress:
        run_ranks(run_seeds, 2, 2, range(first, first + 10), progress, timeout=120)
