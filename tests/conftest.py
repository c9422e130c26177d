"""One thread, no GPU unless asked for, a hard timeout: what lets run_ranks fork this process."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Iterator

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a forked OpenMP pool has no threads

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
if sys.platform == "linux":
    # A batch thread that wakes up lets the running one go on. Otherwise gloo's thread often
    # interrupts the thread that holds the lock it needs, and spins until that one runs again.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # inherited by every rank

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
    parser.addoption("--parts", type=int, help="forks of pytest that share the files of tests")


def pytest_configure(config: pytest.Config) -> None:
    # A CPU backward pass counts the GPUs and starts a thread for each, after which no fork can
    # run backward. So they are hidden, except in a run that asks for them with `-m cuda`.
    wanted = config.getoption("markexpr", "") or ""
    if "cuda" in wanted.replace("not cuda", ""):
        os.environ["FSDP_COMPOSE_TEST_DEVICE"] = "cuda"  # before harness.py is imported
    elif os.environ.get("FSDP_COMPOSE_TEST_DEVICE", "cpu") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # A build for CUDA counts one, too, once FakeTensorMode was entered; so count them now.
        torch.ones((), requires_grad=True).backward()
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # is_available() without initialising CUDA

    # An alarm, not dump_traceback_later: that starts a thread. Stacks first, then death.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.register(signal.SIGALRM, os.fdopen(os.dup(2), "w"), chain=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_REAL, HARD_TIMEOUT)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if nextitem is None or nextitem.path != item.path:
            set_aside()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    reason = "no CUDA device; on a machine that has one, run pytest with -m cuda"
    for item in items:
        if item.get_closest_marker("cuda") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    if torch.cuda.is_initialized():
        raise pytest.UsageError("a file used the GPU as it was imported: no fork of tests can then")
    set_aside()


def set_aside() -> None:
    """What is imported, or left by a file of tests, is no garbage, and no search goes through it.

    The library looks through all objects where a forward keeps tensors; that of a test that comes
    late would go through what thousands before it left.
    """
    gc.collect()
    gc.freeze()
    use_large_pages()


MADV_COLLAPSE = 25  # Linux 6.1
LARGE_PAGE = 2 << 20


def use_large_pages() -> None:
    """Hold what this process has in pages of 2 MiB.

    A fork, of which tests do thousands, copies a table with an entry for each page.
    """
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None).madvise  # older kernels answer that they do not know the advice
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with open("/proc/self/maps") as file:
        mappings = [line.split() for line in file]
    for span, access, *_, name in (fields for fields in mappings if len(fields) in (5, 6)):
        anonymous = name in ("0", "[heap]")  # a mapping of no file ends with its inode, which is 0
        if anonymous and access.startswith("rw"):
            begin, end = (int(address, 16) for address in span.split("-"))
            first = -(-begin // LARGE_PAGE) * LARGE_PAGE
            if (size := end // LARGE_PAGE * LARGE_PAGE - first) > 0:
                advise(first, size, MADV_COLLAPSE)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    parts = session.config.getoption("parts")
    if parts is None or session.testsfailed or session.config.option.collectonly:
        return None  # pytest's own loop, which also reports what could not be collected
    from in_parts import run_in_parts

    return run_in_parts(session, parts)
