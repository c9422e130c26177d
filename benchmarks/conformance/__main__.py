"""``python benchmarks/conformance``: the table of ``report.py``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
BENCHMARKS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(BENCHMARKS.parent), str(BENCHMARKS.parent / "tests"), str(BENCHMARKS)]

from conformance.report import main  # noqa: E402

sys.exit(main())
