"""Runs the test suite in parts side by side: tests that wait for their ranks leave cores idle.

    python tests/in_parts.py 2 -m "not cuda"    # two processes share the files of tests

One pytest process collects the tests and is forked (`--parts` in conftest.py). Each fork takes the
next file when it is done with one, so that all end together; what it reports is shown, file by
file, by the process that collected.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections import defaultdict
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import pytest

ROOT = Path(__file__).resolve().parent.parent

Event: TypeAlias = tuple[str, dict[str, Any]]
"""A hook of pytest's and what it is called with."""


def run_in_parts(session: pytest.Session, parts: int) -> bool:
    """Run the collected tests in ``parts`` forks of this process; pytest's loop over the tests."""
    files = sort_files(session)
    queue = hand_out_numbers(len(files))
    running: dict[Connection, tuple[int, list[Event]]] = {}
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("terminated", 143))  # parts end with it
    missing = {item.nodeid for item in session.items}
    try:
        for _ in range(parts):
            reader, writer = Pipe(duplex=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # as in harness.py
                pid = os.fork()
            if pid == 0:
                running.clear()  # the forks before are the parent's
                become_part(session, writer)
                return run_files(session, files, queue)
            writer.close()
            running[reader] = pid, []
        while running:
            ready = wait(list(running))
            for reader in [reader for reader in running if reader in ready]:
                pid, events = running[reader]
                try:
                    event = reader.recv()
                except EOFError:
                    del running[reader]
                    show(session, events)
                    check_end(pid, events)
                    continue
                name, arguments = event
                if name == "pytest_runtest_logstart" and events:
                    if file_of(arguments["nodeid"]) != file_of(events[0][1]["nodeid"]):
                        show(session, events)
                        events.clear()
                elif name == "pytest_runtest_logfinish":
                    missing.discard(arguments["nodeid"])
                events.append(event)
    finally:
        for pid, _ in running.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if missing:
        raise session.Failed(f"not run: {', '.join(sorted(missing)[:5])}; {len(missing)} in all")
    return True


def file_of(nodeid: str) -> str:
    return nodeid.split("::")[0]


def sort_files(session: pytest.Session) -> list[list[pytest.Item]]:
    """The tests of each file: slow ones first, then the files of the most tests."""
    files: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in session.items:
        files[file_of(item.nodeid)].append(item)
    slow = lambda item: item.get_closest_marker("slow") is not None  # noqa: E731
    return sorted(files.values(), key=lambda tests: (-sum(map(slow, tests)), -len(tests)))


def hand_out_numbers(count: int) -> int:
    """A pipe that holds 0, 1, 2 ... in two bytes each, from which every part reads the next."""
    queue, end = os.pipe()
    os.write(end, b"".join(number.to_bytes(2, "big") for number in range(count)))
    os.close(end)
    return queue


def become_part(session: pytest.Session, writer: Connection) -> None:
    """In a fork: send what is reported, and capture into files of its own."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the process that collected ends it
    plugins = session.config.pluginmanager
    plugins.unregister(name="terminalreporter")
    plugins.register(Sender(session.config, writer))
    capture: Any = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()


class Sender:
    def __init__(self, config: pytest.Config, writer: Connection) -> None:
        self.config, self.writer = config, writer

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.send("logstart", nodeid=nodeid, location=location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self.config.hook
        self.send("logreport", report=hook.pytest_report_to_serializable(
            config=self.config, report=report
        ))  # fmt: skip

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self.send("logfinish", nodeid=nodeid, location=location)

    def send(self, name: str, **arguments: Any) -> None:
        self.writer.send((f"pytest_runtest_{name}", arguments))


def run_files(session: pytest.Session, files: list[list[pytest.Item]], queue: int) -> bool:
    """One file after another, each by whichever part comes for it first."""
    while number := os.read(queue, 2):
        tests = files[int.from_bytes(number, "big")]
        for test, following in zip(tests, [*tests[1:], None]):
            session.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    return True


def show(session: pytest.Session, events: list[Event]) -> None:
    """Report what a part has reported."""
    hook = session.config.hook
    for name, arguments in events:
        if name == "pytest_runtest_logreport":
            report = hook.pytest_report_from_serializable(
                config=session.config, data=arguments["report"]
            )
            hook.pytest_runtest_logreport(report=report)
        else:
            getattr(hook, name)(**arguments)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)


def check_end(pid: int, events: list[Event]) -> None:
    """A part that died ends the run; its last event says where."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code not in (0, pytest.ExitCode.TESTS_FAILED):
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        where = next((e[1]["nodeid"] for e in reversed(events) if "nodeid" in e[1]), "the start")
        pytest.exit(f"a part ended with {how} at {where}", returncode=1)


def main(parts: str, arguments: list[str]) -> NoReturn:
    os.chdir(ROOT)
    # Tests start some hundred processes that import the package: Python keeps what it compiles.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "pytest", f"--parts={parts}", *arguments]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
