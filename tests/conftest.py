"""One thread, no GPU unless asked for, a hard timeout: what lets run_ranks fork this process."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator
from zlib import crc32

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a forked OpenMP pool has no threads

import hypothesis
import pytest
import torch

torch.set_num_threads(1)

HARD_TIMEOUT = 300.0  # seconds per test, then stacks are printed and the whole run dies

hypothesis.settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    print_blob=True,
    max_examples=50,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "deep", hypothesis.settings.get_profile("ci"), derandomize=False, max_examples=2000
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", help="run the i-th of n parts of the tests: i/n")


def pytest_configure(config: pytest.Config) -> None:
    # A CPU backward pass counts the GPUs and starts a thread for each, after which no fork can
    # run backward. So they are hidden, except in a run that asks for them with `-m cuda`.
    wanted = config.getoption("markexpr", "") or ""
    if "cuda" not in wanted.replace("not cuda", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # is_available() without initialising CUDA

    # An alarm, not dump_traceback_later: that starts a thread. Stacks first, then death.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.register(signal.SIGALRM, os.fdopen(os.dup(2), "w"), chain=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    signal.setitimer(signal.ITIMER_REAL, HARD_TIMEOUT)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, parts = map(int, config.getoption("part").split("/"))
    # By name, so that a test stays in its part when others come and go.
    items[:] = [item for item in items if crc32(item.nodeid.encode()) % parts == part - 1]
    if torch.cuda.is_available():
        return
    reason = "no CUDA device; on a machine that has one, run pytest with -m cuda"
    for item in items:
        if item.get_closest_marker("cuda") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
